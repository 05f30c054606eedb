"""The code that `save_pretrained` writes beside the weights is plain PyTorch, and uses no files or processes."""

import ast
import sys
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM
from transformers.dynamic_module_utils import get_imports

from attnres import CONNECTIONS

from ..imports import imports_of

LIBRARIES = {"torch", "transformers", "safetensors"}
OPTIONAL = {"attnres.accelerated"}
FAMILY = {
    f"{name}_attnres.py"
    for name in (
        "backbones",
        "configuration",
        "decoder",
        "delta_attention",
        "experts",
        "functional",
        "loading",
        "modeling",
        "padding",
        "pretrained",
        "residual",
        "rows",
        "saving",
    )
}
# Only models on Kimi Linear have these files.
LINEAR_ATTENTION = {"modeling_attnres.py", "delta_attention_attnres.py", "padding_attnres.py"}
FORBIDDEN_MODULES = {"ctypes", "marshal", "mmap", "pickle", "shutil", "socket", "subprocess", "tempfile"}
FORBIDDEN_CALLS = {"__import__", "compile", "eval", "exec", "open"}
FORBIDDEN_ATTRIBUTES = {
    *("__code__", "co_code", "data_ptr", "import_module", "system", "popen"),
    *("mkdir", "open", "rename", "unlink", "write_bytes", "write_text"),
}


@pytest.fixture(scope="module")
def code(tiny_model, backbones, tmp_path_factory) -> dict[str, dict[str, str]]:
    """Return the Python files that are saved with a model on Kimi Linear and on Llama: backbone -> name -> text."""
    models = {"kimi_linear": tiny_model(), "llama": AutoModelForCausalLM.from_config(backbones.member_config("llama"))}
    files = {}
    for backbone, model in models.items():
        folder = tmp_path_factory.mktemp(backbone)
        model.save_pretrained(folder)
        files[backbone] = {path.name: path.read_text(encoding="utf-8") for path in Path(folder).rglob("*.py")}
    return files


@pytest.fixture(scope="module")
def files(code) -> dict[str, str]:
    """Return the files of both models together, by name."""
    return code["kimi_linear"] | code["llama"]


OF_ATTENTION = {"attention_gate_attnres.py", "value_residual_attnres.py"}


def of_connections(files: dict[str, str]) -> set[str]:
    return set(files) - FAMILY - OF_ATTENTION


def test_each_model_travels_with_the_files_of_its_backbone_its_attention_and_all_connections(code, files):
    assert set(code["kimi_linear"]) == set(files) - {"backbones_attnres.py"}
    assert set(code["llama"]) == set(files) - LINEAR_ATTENTION
    assert all(code["llama"].get(name, text) == text for name, text in code["kimi_linear"].items())
    classes = {base for connection in CONNECTIONS.values() for base in connection.__mro__}
    modules = {base.__module__.rpartition(".")[2] for base in classes}
    own_files = {f"{module}.py" for module in modules if module.endswith("_attnres")}  # bases included
    assert set(files) >= FAMILY | OF_ATTENTION and of_connections(files) == own_files - FAMILY


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
