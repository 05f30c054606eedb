"""Code of a source is copied only on request, never in place of this package's, and only from within its directory."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from attnres.checkpoints.checkpoint import Checkpoint
from attnres.checkpoints.copies import copyable
from attnres.conversion.convert import prepare_change, prepare_retrofit, prepare_standard

from .checkpoints import change_json, convert, convert_well, files_of, save_tokenizer, standard_model

CONFIG = "tokenizer_config.json"
TRAP = "open({path!r}, 'w').close()\n"  # code that leaves a file when it is run
TOKENIZER = (
    "from transformers import PreTrainedTokenizerFast\n\n\n"
    "class MyTokenizer(PreTrainedTokenizerFast):\n    sign = 'made of code'\n"
)


@pytest.fixture
def source(tmp_path) -> Path:
    standard_model(num_hidden_layers=1).save_pretrained(tmp_path / "source")
    save_tokenizer(tmp_path / "source")
    return tmp_path / "source"


def with_code(source: Path, module: str = "tokenization_mine", body: str = "") -> Path:
    """Give the tokenizer of a model code in a file `module`."""
    path = source / f"{module}.py"
    path.parent.mkdir(exist_ok=True)
    path.write_text(body + TOKENIZER)
    reference = [f"{module}.MyTokenizer", None]
    change_json(source / CONFIG, auto_map={"AutoTokenizer": reference}, tokenizer_class="MyTokenizer")
    return source


def convert_trusting(source: Path, target: Path, prepare=prepare_retrofit, trust: bool = True, **options) -> list[str]:
    """Write a conversion with its code, and return the notes for the user."""
    target.mkdir()
    (target.parent / "scratch").mkdir(exist_ok=True)
    made = prepare(copyable(Checkpoint(source), target.parent / "scratch"), **options)
    return made.write(target, trust_remote_code=trust)


def code_of(folder: Path) -> dict[str, bytes]:
    return {name: text for name, text in files_of(folder).items() if name.endswith(".py")}


def auto_map_of(folder: Path) -> dict | None:
    return json.loads((folder / CONFIG).read_text()).get("auto_map")


def loaded_without_attnres(*folders: Path) -> list[str]:
    """Load model and tokenizer of each folder in a process that has no `attnres`, and return a line on each."""
    script = (
        "import sys; sys.modules['attnres'] = None\n"
        "from transformers import AutoModelForCausalLM, AutoTokenizer\n"
        "for path in sys.argv[1:]:\n"
        "    model = AutoModelForCausalLM.from_pretrained(path, trust_remote_code=True)\n"
        "    tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=True)\n"
        "    print(type(model).__name__, getattr(tokenizer, 'sign', None))\n"
    )
    done = subprocess.run([sys.executable, "-c", script, *folders], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout.splitlines()


# ---- Not trusted


@pytest.mark.parametrize("module", ["tokenization_mine", "residual_attnres", "tokenizer", "vocab", "LICENSE"])
def test_untrusted_code_is_not_copied_and_not_referred_to(source, tmp_path, module):
    (tmp_path / "plain").mkdir()
    standard_model(num_hidden_layers=1).save_pretrained(tmp_path / "plain")
    convert_well(tmp_path / "plain", tmp_path / "ours", "--no-verify")
    convert_well(with_code(source, module, TRAP.format(path=str(tmp_path / "sprung"))), tmp_path / "result")
    code = [
        {name: text for name, text in files_of(tmp_path / f).items() if name.endswith(".py")}
        for f in ("result", "ours")
    ]
    assert code[0] == code[1]
    assert not any(b"MyTokenizer" in text for text in files_of(tmp_path / "result").values())
    assert not (tmp_path / "sprung").exists()


def test_a_tokenizer_that_needs_untrusted_code_is_not_copied(source, tmp_path):
    notes = convert_trusting(with_code(source), tmp_path / "result", trust=False)
    assert not list((tmp_path / "result").glob("*token*"))
    assert len(notes) == 1 and "the tokenizer" in notes[0] and "--trust-remote-code" in notes[0]


def test_a_tokenizer_that_loads_without_untrusted_code_is_copied_and_loads_the_same(source, tmp_path):
    auto_map = {"AutoProcessor": "evil.P", "AutoTokenizer": ["lab/other--evil.T", None]}
    change_json(source / CONFIG, auto_map=auto_map, tokenizer_class="Qwen2Tokenizer")
    before = AutoTokenizer.from_pretrained(source, trust_remote_code=False)
    notes = convert_trusting(source, tmp_path / "result", trust=False)
    assert auto_map_of(tmp_path / "result") is None
    assert len(notes) == 1 and "lab/other--evil.T" in notes[0] and "evil.P" in notes[0]
    after = AutoTokenizer.from_pretrained(tmp_path / "result")
    assert type(after) is type(before)
    assert after("Once upon")["input_ids"] == before("Once upon")["input_ids"]


def test_no_other_file_refers_to_untrusted_code(source, tmp_path):
    for name in ("generation_config.json", "preprocessor_config.json"):
        (source / name).write_text(json.dumps({"auto_map": {"AutoImageProcessor": "evil.Processor"}}))
    pipelines = {"text-generation": {"impl": "evil.Pipeline", "pt": ["AutoModelForCausalLM"]}}
    change_json(source / "config.json", custom_pipelines=pipelines)
    (source / "evil.py").write_text("1 / 0")
    convert_well(source, tmp_path / "result", "--no-verify")
    convert_well(tmp_path / "result", tmp_path / "regrouped", "--set-block-size", "2", "--no-verify")
    convert_well(tmp_path / "result", tmp_path / "back", "--to", "standard", "--no-verify")
    for name in ("result", "regrouped", "back"):
        assert not any(b"evil" in text for text in files_of(tmp_path / name).values())


def test_an_auto_map_with_an_escaped_name_is_removed(source, tmp_path):
    text = (source / CONFIG).read_text().rstrip().removesuffix("}")
    (source / CONFIG).write_text(text + r', "auto\u005fmap": {"AutoTokenizer": ["lab/other--evil.T", null]}}')
    (notes,) = convert_trusting(source, tmp_path / "result", trust=False)
    assert "lab/other--evil.T" in notes
    assert auto_map_of(tmp_path / "result") is None


@pytest.mark.parametrize("name", ["processor_config.json", "preprocessor_config.json", "chat_template.json"])
def test_an_auto_map_deep_in_a_file_is_removed(source, tmp_path, name):
    inner = {"auto_map": {"AutoImageProcessor": "lab/other--evil.P"}, "size": 3}
    pipelines = {"evil": {"impl": "evil.Pipeline"}}
    fields = {"image_processor": inner, "list": [[{"auto_map": "evil.Q", "custom_pipelines": pipelines}]]}
    (source / name).write_text(json.dumps(fields))
    notes = convert_trusting(source, tmp_path / "result", trust=False)
    assert json.loads((tmp_path / "result" / name).read_text()) == {"image_processor": {"size": 3}, "list": [[{}]]}
    assert len(notes) == 2 and "lab/other--evil.P" in notes[0] and "evil.Q" in notes[0] and "pipelines" in notes[1]


def test_a_token_named_auto_map_stays(source, tmp_path):
    text = json.dumps({"auto_map": 0, "custom_pipelines": 1})
    (source / "vocab.json").write_text(text)
    assert convert_trusting(source, tmp_path / "result", trust=False) == []
    assert (tmp_path / "result" / "vocab.json").read_text() == text


# ---- Trusted


@pytest.mark.slow
def test_trusted_code_is_copied_and_replaces_no_file_of_this_package(source, tmp_path):
    convert_well(source, tmp_path / "ours", "--no-verify")
    modules = ("tokenization_mine", "residual_attnres")
    for module in modules:
        copy = Path(shutil.copytree(source, tmp_path / f"source of {module}"))
        result = tmp_path / module
        notes = convert_trusting(with_code(copy, module), result)
        assert code_of(tmp_path / "ours").items() <= code_of(result).items()
        assert auto_map_of(result) == {"AutoTokenizer": [f"source_code/{module}.MyTokenizer", None]}
        assert notes == [f"Code that came with the source, for {CONFIG}: source_code/{module}.py."]
    loaded = loaded_without_attnres(*(tmp_path / module for module in modules))
    assert loaded == ["AttnResLlamaForCausalLM made of code"] * 2


def test_trusted_code_of_an_auto_map_deep_in_a_file_is_copied(source, tmp_path):
    fields = {"image_processor": {"auto_map": {"AutoImageProcessor": "mine.Processor"}}}
    (source / "processor_config.json").write_text(json.dumps(fields))
    (source / "mine.py").write_text("class Processor: ...\n")
    notes = convert_trusting(source, tmp_path / "result")
    fields = json.loads((tmp_path / "result" / "processor_config.json").read_text())
    assert fields == {"image_processor": {"auto_map": {"AutoImageProcessor": "source_code/mine.Processor"}}}
    assert notes == ["Code that came with the source, for processor_config.json: source_code/mine.py."]
    assert (tmp_path / "result" / "source_code" / "mine.py").exists()


def test_trusted_code_in_a_file_with_the_name_of_the_subfolder_is_copied(source, tmp_path):
    convert_well(source, tmp_path / "ours", "--no-verify")
    with_code(source, "source_code", body="from .residual_attnres import X\n")
    (source / "residual_attnres.py").write_text("X = 1\n")
    convert_trusting(source, tmp_path / "result")
    assert code_of(tmp_path / "ours").items() <= code_of(tmp_path / "result").items()
    assert auto_map_of(tmp_path / "result") == {"AutoTokenizer": ["source_code/source_code.MyTokenizer", None]}
    assert (tmp_path / "result" / "source_code" / "residual_attnres.py").read_text() == "X = 1\n"


def test_two_files_that_would_get_one_name_are_refused(source, tmp_path):
    with_code(source, "source_code/mine")
    (source / "mine.py").write_text("class Processor: ...\n")
    (source / "processor_config.json").write_text(json.dumps({"auto_map": {"AutoProcessor": "mine.Processor"}}))
    with pytest.raises(ValueError, match=r"mine\.py would take the place of another source_code/mine\.py"):
        convert_trusting(source, tmp_path / "result")


def test_files_that_trusted_code_imports_are_copied_and_no_others(source, tmp_path):
    with_code(source, body="from .helper import SIGN\n")
    (source / "helper.py").write_text("from .deeper import SIGN\n")
    (source / "deeper.py").write_text("SIGN = 1\n")
    (source / "unrelated.py").write_text("1 / 0\n")
    convert_trusting(source, tmp_path / "result")
    names = {path.name for path in (tmp_path / "result" / "source_code").iterdir()}
    assert names == {"tokenization_mine.py", "helper.py", "deeper.py"}
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "result", trust_remote_code=True)
    assert tokenizer.sign == "made of code"


def test_later_conversions_keep_trusted_code_where_it_is(source, tmp_path):
    convert_trusting(with_code(source, "code/mine"), tmp_path / "result")
    convert_trusting(tmp_path / "result", tmp_path / "back", prepare=prepare_standard)
    convert_trusting(tmp_path / "result", tmp_path / "regrouped", prepare=prepare_change, block_size=2)
    for name in ("result", "back", "regrouped"):
        assert auto_map_of(tmp_path / name) == {"AutoTokenizer": ["source_code/code/mine.MyTokenizer", None]}
        assert (tmp_path / name / "source_code" / "code" / "mine.py").exists()
    assert AutoTokenizer.from_pretrained(tmp_path / "back", trust_remote_code=True).sign == "made of code"


def test_code_in_another_repository_stays_there_and_is_named(source, tmp_path):
    reference = "lab/tokenizer--tokenization_mine.MyTokenizer"
    change_json(source / CONFIG, auto_map={"AutoTokenizer": [reference, None]})
    notes = convert_trusting(source, tmp_path / "result")
    assert auto_map_of(tmp_path / "result") == {"AutoTokenizer": [reference, None]}
    assert notes == [f"{CONFIG} refers to code in another repository: {reference}."]


def test_missing_code_is_named(source, tmp_path):
    change_json(source / CONFIG, auto_map={"AutoTokenizer": ["tokenization_mine.Mine", None]})
    with pytest.raises(FileNotFoundError, match=r"source/tokenization_mine\.py"):
        convert_trusting(source, tmp_path / "result")


@pytest.mark.parametrize("reference", ["../outside.T", "/tmp/outside.T", "a.b.T", ".T", "x y.T", "sub//x.T", "T"])
def test_a_reference_that_leads_out_of_the_directory_is_refused(source, tmp_path, reference):
    (tmp_path / "outside.py").write_text("class T: ...\n")
    change_json(source / CONFIG, auto_map={"AutoTokenizer": [reference, None]})
    with pytest.raises(ValueError, match="which is not the name of a class in a file there") as caught:
        convert_trusting(source, tmp_path / "result")
    assert repr(reference) in str(caught.value)


@pytest.mark.parametrize("module", ["./../outside", "/../../outside", "sub.outside"])
def test_an_import_that_leads_out_of_the_directory_is_refused(source, tmp_path, module):
    (tmp_path / "outside.py").write_text("X = 1\n")
    (source / "sub.outside.py").write_text("X = 1\n")
    with_code(source, body=f'"""\nfrom .{module} import X\n"""\n')
    with pytest.raises((OSError, ValueError), match="outside"):
        convert_trusting(source, tmp_path / "result")
    assert not list((tmp_path / "result").rglob("*outside*"))


@pytest.mark.parametrize("value", [3, {"AutoTokenizer": 3}, {"AutoTokenizer": [3]}], ids=str)
def test_a_damaged_auto_map_is_named(source, tmp_path, value):
    change_json(source / CONFIG, auto_map=value)
    error = convert(source, tmp_path / "result").error
    assert f"{source / CONFIG} is damaged (`auto_map` is" in error


# ---- Links


@pytest.mark.parametrize("name", ["tokenizer.model", "LICENSE", "vocab.json", "generation_config.json"])
def test_a_link_that_leaves_the_directory_is_refused(source, tmp_path, name):
    (tmp_path / "secret").write_text((source / name).read_text() if (source / name).exists() else "{}")
    (source / name).unlink(missing_ok=True)
    (source / name).symlink_to("../secret")
    error = convert(source, tmp_path / "result").error
    assert f"{source / name} is a link to {tmp_path / 'secret'}, outside the model's directory" in error
    assert sorted(path.name for path in tmp_path.iterdir()) == ["secret", "source"]


def test_a_link_to_templates_or_code_outside_the_directory_is_refused(source, tmp_path):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "tool.jinja").write_text("{{ 1 }}")
    (source / "additional_chat_templates").symlink_to(tmp_path / "elsewhere")
    assert "outside the model's directory" in convert(source, tmp_path / "result").error
    (source / "additional_chat_templates").unlink()
    with_code(source)
    (source / "tokenization_mine.py").rename(tmp_path / "elsewhere" / "mine.py")
    (source / "tokenization_mine.py").symlink_to(tmp_path / "elsewhere" / "mine.py")
    with pytest.raises(ValueError, match="outside the model's directory"):
        convert_trusting(source, tmp_path / "result")


def test_a_link_within_the_directory_is_followed(source, tmp_path):
    (source / "texts").mkdir()
    (source / "texts" / "licence").write_text("free")
    (source / "LICENSE").symlink_to("texts/licence")
    convert_well(source, tmp_path / "result", "--no-verify")
    assert (tmp_path / "result" / "LICENSE").read_text() == "free"
    assert not (tmp_path / "result" / "LICENSE").is_symlink()


@pytest.mark.parametrize("option", [(), ("--trust-remote-code",)])
def test_the_command_names_untrusted_code_and_copies_trusted_code(option, source, tmp_path):
    with_code(source)
    out = " ".join(convert_well(source, tmp_path / "result", "--no-verify", *option).out.split())
    assert ("--trust-remote-code copies both." in out) == (not option)
    assert (tmp_path / "result" / "source_code" / "tokenization_mine.py").exists() == bool(option)
