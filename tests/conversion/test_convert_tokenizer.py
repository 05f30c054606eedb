"""A converted model has the same tokenizer class, tokens and templates, although its model type changes."""

import shutil
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from .checkpoints import change_json, convert, convert_well, save_tokenizer, standard_model

TEXTS = ["Once upon a time, there was", "  two  spaces\n\n\tand a tab", "Grüße, 水は1234", "<s> a </s>", ""]
CONFIG = "tokenizer_config.json"


@pytest.fixture
def source(tmp_path) -> Path:
    standard_model(num_hidden_layers=1).save_pretrained(tmp_path / "source")
    save_tokenizer(tmp_path / "source")
    return tmp_path / "source"


def of_type(source: Path, model_type: str) -> Path:
    """Save the same tokenizer beside a model of another type."""
    fields = {"head_dim": 8} if "gemma" in model_type else {}
    for path in source.glob("*model*"):
        path.unlink()
    standard_model(model_type, num_hidden_layers=1, **fields).save_pretrained(source)
    return source


def loaded(folder: Path) -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(folder)


def assert_same_tokenizer(source: Path, result: Path) -> None:
    before, after = loaded(source), loaded(result)
    assert type(after) is type(before)
    for text in TEXTS:
        assert after(text)["input_ids"] == before(text)["input_ids"]
        assert after.decode(after(text)["input_ids"]) == before.decode(before(text)["input_ids"])
    assert after.special_tokens_map == before.special_tokens_map
    assert after.chat_template == before.chat_template
    assert after.model_max_length == before.model_max_length


# Without the name of a class, `AutoTokenizer` chooses one by the model type; for some types also with a name.
@pytest.mark.parametrize(
    ("model_type", "name"),
    [
        *[(model_type, None) for model_type in ("llama", "qwen2", "gemma2", "mistral")],
        *[(model_type, "LlamaTokenizer") for model_type in ("llama", "phi3", "qwen3")],
        ("qwen3", "Qwen2TokenizerFast"),
        ("llama", "PreTrainedTokenizerFast"),
        ("llama", "NoSuchTokenizer"),
    ],
)
def test_the_class_of_the_tokenizer_stays_the_same(source, tmp_path, model_type, name):
    of_type(source, model_type)
    change_json(source / CONFIG, "tokenizer_class", **({"tokenizer_class": name} if name else {}), model_max_length=77)
    convert_well(source, tmp_path / "result", "--no-verify")
    assert_same_tokenizer(source, tmp_path / "result")
    convert_well(tmp_path / "result", tmp_path / "back", "--to", "standard", "--no-verify")
    assert_same_tokenizer(source, tmp_path / "back")


@pytest.mark.parametrize("is_fixed", [False, True])
def test_the_corrected_tokenizer_of_a_mistral_stays_corrected(source, tmp_path, is_fixed):
    """`transformers` corrects it by `fix_mistral_regex`, beside a `config.json` of an older Mistral only."""
    of_type(source, "mistral")
    change_json(source / "config.json", transformers_version="4.50.0")
    change_json(source / CONFIG, tokenizer_class="PreTrainedTokenizerFast", fix_mistral_regex=is_fixed)
    letters = [*pre_tokenizers.ByteLevel.alphabet(), "12"]
    vocabulary = {token: number for number, token in enumerate([*letters, *map(str, range(200, 100_200))])}
    tokenizer = Tokenizer(models.BPE(vocabulary, [("1", "2")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.save(str(source / "tokenizer.json"))
    convert_well(source, tmp_path / "result", "--no-verify")
    for folder in (source, tmp_path / "result"):
        assert loaded(folder).tokenize("a12") == (["a", "1", "2"] if is_fixed else ["a", "12"])


@pytest.mark.parametrize("model_type", ["llama", "qwen2", "gemma2", "gpt_neox"])
def test_a_tokenizer_without_configuration_stays_the_same(source, tmp_path, model_type):
    of_type(source, model_type)
    (source / CONFIG).unlink()
    convert_well(source, tmp_path / "result")
    assert_same_tokenizer(source, tmp_path / "result")


def test_a_configuration_that_names_the_class_is_not_rewritten(source, tmp_path):
    change_json(source / CONFIG, tokenizer_class=type(loaded(source)).__name__)
    before = (source / CONFIG).read_text()
    convert_well(source, tmp_path / "result", "--no-verify")
    assert (tmp_path / "result" / CONFIG).read_text() == before


def test_chat_templates_are_copied(source, tmp_path):
    (source / "chat_template.jinja").write_text("{{ messages[0]['content'] }} of {{ bos_token }}")
    folder = source / "additional_chat_templates"
    folder.mkdir()
    (folder / "tool.jinja").write_text("{{ 'a tool' }}")
    folder.chmod(0o555)
    convert_well(source, tmp_path / "result")
    (tmp_path / "result" / folder.name / "mine.jinja").write_text("")  # the copied folder is writable
    chat = [{"role": "user", "content": "Grüße"}]
    for name, expected in ((None, "Grüße of <s>"), ("tool", "a tool")):
        text = loaded(tmp_path / "result").apply_chat_template(chat, tokenize=False, chat_template=name)
        assert text == expected


def test_a_chat_template_in_the_configuration_is_copied(source, tmp_path):
    change_json(source / CONFIG, "tokenizer_class", chat_template="{{ messages[0]['role'] }}")
    convert_well(source, tmp_path / "result")
    chat = [{"role": "user", "content": ""}]
    assert loaded(tmp_path / "result").apply_chat_template(chat, tokenize=False) == "user"


def test_licences_are_copied_and_files_of_the_training_are_not(source, tmp_path):
    for name in ("LICENSE", "NOTICE.txt", "README.md", "optimizer.pt", "trainer_state.json", "modeling_mine.py"):
        (source / name).write_text(name)
    convert_well(source, tmp_path / "result")
    names = {path.name for path in (tmp_path / "result").iterdir()}
    assert names >= {"LICENSE", "NOTICE.txt"}
    assert "README.md" not in (tmp_path / "result" / "README.md").read_text()  # the card is not the source's
    assert not names & {"optimizer.pt", "trainer_state.json", "modeling_mine.py"}


@pytest.fixture
def with_code(source) -> Path:
    """Return a model whose tokenizer needs code in three files."""
    (source / "tokenization_mine.py").write_text(
        "from transformers import PreTrainedTokenizerFast\nfrom .helper import SIGN\n\n\n"
        "class MyTokenizer(PreTrainedTokenizerFast):\n    sign = SIGN\n"
    )
    (source / "helper.py").write_text("from .deeper import SIGN\n")
    (source / "deeper.py").write_text("SIGN = 'made of code'\n")
    (source / "unrelated.py").write_text("1 / 0\n")
    reference = ["tokenization_mine.MyTokenizer", None]
    change_json(source / CONFIG, auto_map={"AutoTokenizer": reference}, tokenizer_class="MyTokenizer")
    return source


@pytest.mark.slow
def test_verifying_uses_random_tokens_if_the_tokenizer_needs_code(with_code, tmp_path, monkeypatch):
    monkeypatch.setattr("builtins.input", lambda *args: pytest.fail("the user is asked"))
    (with_code / "tokenization_mine.py").write_text("raise SystemExit('run')\n")
    (with_code / "helper.py").unlink()
    assert "(256 tokens)" in convert_well(with_code, tmp_path / "result").out
    (tmp_path / "text").write_text("Some text.")
    assert "no tokenizer" in convert(with_code, tmp_path / "again", "--text", tmp_path / "text").error


def test_a_tokenizer_that_needs_a_missing_package_is_copied_as_it_is(source, tmp_path):
    for path in source.glob("*token*"):
        path.unlink()
    (source / "tokenizer.model").write_bytes(b"\x0a\x0e\x0a\x05<unk>")
    convert_well(source, tmp_path / "result")
    assert (tmp_path / "result" / "tokenizer.model").read_bytes() == (source / "tokenizer.model").read_bytes()


def test_a_tokenizer_that_loads_but_fails_is_reported(source, tmp_path):
    of_type(source, "gemma2")
    (source / CONFIG).unlink()
    path = source / "tokenizer.json"
    path.write_text(path.read_text().replace("<unk>", "<other>"))  # Gemma's class needs `<unk>`
    assert f"the tokenizer of {source} fails" in convert(source, tmp_path / "result").error


def test_a_real_tokenizer_gives_the_same_tokens(assets, tmp_path):
    shutil.copytree(assets / "checkpoints" / "stories260K-hf", tmp_path / "source", copy_function=shutil.copyfile)
    (tmp_path / "source").chmod(0o755)
    for name in ("LlamaTokenizer", "TokenizersBackend"):
        change_json(tmp_path / "source" / CONFIG, tokenizer_class=name)
        convert_well(tmp_path / "source", tmp_path / name)
        assert_same_tokenizer(tmp_path / "source", tmp_path / name)
