"""The code that `save_pretrained` writes beside the weights is plain PyTorch, and uses no files or processes."""

import ast
import sys
from pathlib import Path

import pytest
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.dynamic_module_utils import get_imports

from attnres import CONNECTIONS
from attnres.attn_res_attnres import AttnRes

from ..imports import imports_of

LIBRARIES = {"torch", "transformers", "safetensors"}
OPTIONAL = {"attnres.accelerated"}
# The files of every model, of models on another backbone than Kimi Linear, and of those on Kimi Linear.
SHARED = {
    *("configuration", "connections", "decoder", "functional", "heads", "loading", "pretrained", "records", "residual"),
    *("rows", "saving"),
}
OF_BACKBONE = {
    "llama": {"backbones"},
    "kimi_linear": {"modeling", "kimi_linear_configuration", "delta_attention", "padding", "recording"},
}
# Fields of a model on Llama -> the files of its connection and attention.
USED = {
    (): {"attn_res"},
    (("attn_res_window", 2),): {"attn_res", "attn_res_switches"},
    (("residual_connection", "standard"),): {"standard"},
    (("residual_connection", "highway"),): {"highway"},
    (("residual_connection", "mhc"),): {"mhc", "projected_streams", "streams"},
    (("attention_gate", "sdpa"),): {"attn_res", "attention_gate", "attention_change"},
    (("value_residual", "half"),): {"attn_res", "value_residual", "attention_gate", "attention_change", "streams"},
}
FORBIDDEN_MODULES = {"ctypes", "marshal", "mmap", "pickle", "shutil", "socket", "subprocess", "tempfile"}
FORBIDDEN_CALLS = {"__import__", "compile", "eval", "exec", "open"}
FORBIDDEN_ATTRIBUTES = {
    *("__code__", "co_code", "data_ptr", "import_module", "system", "popen"),
    *("mkdir", "open", "rename", "unlink", "write_bytes", "write_text"),
}


def saved_code(model, folder: Path) -> dict[str, str]:
    """Save a model, and return the Python files beside its weights: name -> text."""
    model.save_pretrained(folder)
    return {path.name: path.read_text(encoding="utf-8") for path in folder.rglob("*.py")}


@pytest.fixture(scope="module")
def files(tiny_model, backbones, tmp_path_factory) -> dict[str, str]:
    """Return the files of models with every connection and attention change: name -> text."""
    on_llama = [{"residual_connection": name} for name in CONNECTIONS] + [dict(fields) for fields in USED]
    configs = (backbones.member_config("llama", **fields) for fields in on_llama)
    models = [tiny_model(), *map(AutoModelForCausalLM.from_config, configs)]
    texts = {}
    for model in models:
        texts |= saved_code(model, tmp_path_factory.mktemp("code"))
    return texts


@pytest.mark.parametrize("fields", USED, ids=str)
def test_a_model_travels_with_the_files_that_it_runs(backbones, fields, tmp_path):
    code = saved_code(AutoModelForCausalLM.from_config(backbones.member_config("llama", **dict(fields))), tmp_path)
    expected = SHARED | OF_BACKBONE["llama"] | USED[fields]
    assert set(code) == {f"{name}_attnres.py" for name in expected}


def test_a_model_on_kimi_linear_travels_with_its_delta_attention(tiny_model, tmp_path):
    expected = SHARED | OF_BACKBONE["kimi_linear"] | {"attn_res"}
    assert set(saved_code(tiny_model(), tmp_path)) == {f"{name}_attnres.py" for name in expected}


def test_a_reviewer_reads_the_code_of_block_attnres_in_half_an_hour(backbones, tmp_path):
    code = saved_code(AutoModelForCausalLM.from_config(backbones.member_config("llama")), tmp_path)
    assert len(code) <= 15 and sum(len(text.splitlines()) for text in code.values()) <= 3000


def test_saved_code_without_the_switches_refuses_them():
    config = AutoConfig.for_model("attnres_llama", attn_res_window=2)
    with pytest.raises(
        ValueError, match="`attn_res_window` is 2, but must be left out: it is no field of the code beside"
    ):
        AttnRes.check(config)


def test_travelled_files_import_only_libraries_each_other_and_the_optional_acceleration(files):
    for name, text in files.items():
        for module in imports_of(text) - OPTIONAL:
            if module.startswith("."):
                # `transformers` finds the files to save by this form, a single dot with a name.
                assert f"{module[1:]}.py" in files, f"{name} imports {module}"
            else:
                top = module.split(".")[0]
                assert top in LIBRARIES | sys.stdlib_module_names - FORBIDDEN_MODULES, f"{name} imports {module}"


def test_only_one_file_imports_the_acceleration_and_it_is_optional(files, tmp_path):
    assert {name for name, text in files.items() if imports_of(text) & OPTIONAL} == {"functional_attnres.py"}
    for name, text in files.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
        # `transformers` requires these imports before it loads a file; imports in a `try` are optional.
        assert set(get_imports(tmp_path / name)) <= LIBRARIES | sys.stdlib_module_names, name


# Only `saving_attnres.py` changes files, those of the folder that the user saves a model to. It opens that folder only
# for reading, to lock it.
OF_SAVING = {"O_RDONLY", "close", "makedirs", "open", "remove", "replace", "rmdir", "walk"}


def test_only_saving_moves_and_removes_files(files):
    used = {}
    for name, text in files.items():
        nodes = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Attribute)]
        used[name] = {node.attr for node in nodes if isinstance(node.value, ast.Name) and node.value.id == "os"}
    assert used.pop("saving_attnres.py") == OF_SAVING | {"PathLike", "fspath", "path"}
    assert all(names <= {"PathLike", "fspath", "path"} for names in used.values()), used


LOCKING = "os.open(folder, os.O_RDONLY)"


def forbidden(tree: ast.AST) -> list[str]:
    """Return names in code that computing with tensors does not need: addresses, generated code, files, processes."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr in FORBIDDEN_ATTRIBUTES:
            found.append(node.attr)
        elif isinstance(node, ast.Name) and node.id in FORBIDDEN_CALLS:
            found.append(node.id)
    return found


def test_travelled_files_use_no_addresses_generated_code_files_or_processes(files):
    assert files["saving_attnres.py"].count(LOCKING) == 1
    texts = files | {"saving_attnres.py": files["saving_attnres.py"].replace(LOCKING, "lock")}
    assert {name: names for name, text in texts.items() if (names := forbidden(ast.parse(text)))} == {}


@pytest.mark.parametrize(
    "text",
    [
        *("x.data_ptr()", "exec('1')", "eval('1')", "compile('1', '', 'eval')", "f.__code__.co_code", "open('a', 'w')"),
        *("path.write_text('a')", "path.open('w')", "os.system('a')", "importlib.import_module('ctypes')"),
    ],
)
def test_the_search_finds_forbidden_code(text):
    assert forbidden(ast.parse(text))
