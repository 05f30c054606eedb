"""The tokenizer of a Kimi release gives the ids of byte-pair merging by its table, without code from the release."""

import json
import shutil
from itertools import pairwise
from pathlib import Path

import pytest
import regex
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer

from attnres.checkpoints.checkpoint import Checkpoint
from attnres.checkpoints.side_files import copy_side_files
from attnres.checkpoints.tokenizers import load_tokenizer
from attnres.training.data.chat import IGNORED, encode_chat

from ..checkpoints.kimi_release import NAMES, ranks_of, train_vocabulary, write_tokenizer

TEXTS = [
    "The cat's mat isn't hers: 12345 words!\r\n\n",
    "def f(x):\n    return x ** 2  # площадь, 面積は\n",
    "naïve 한국어 ❤️",
]
# The rule of the release by another engine of regular expressions.
WORDS = regex.compile(
    r"[\p{Han}]+"
    r"|[^\r\n\p{L}\p{N}]?[[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]--[\p{Han}]]*[[\p{Ll}\p{Lm}\p{Lo}\p{M}]--[\p{Han}]]+"
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\p{L}\p{N}]?[[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]--[\p{Han}]]+[[\p{Ll}\p{Lm}\p{Lo}\p{M}]--[\p{Han}]]*"
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    regex.V1,
)


def merged(word: bytes, ranks: dict[bytes, int]) -> list[int]:
    """The ids of one word: the pair whose union has the lowest rank is joined first, the leftmost of equal ones."""
    parts = [bytes([byte]) for byte in word]
    while len(parts) > 1:
        pairs = [(ranks.get(a + b, len(ranks)), i) for i, (a, b) in enumerate(pairwise(parts))]
        rank, i = min(pairs)
        if rank == len(ranks):
            break
        parts[i : i + 2] = [parts[i] + parts[i + 1]]
    return [ranks[part] for part in parts]


@pytest.fixture(scope="session")
def vocabulary() -> dict[str, int]:
    """A byte-level vocabulary, trained on the text of this file."""
    return train_vocabulary([Path(__file__).read_text(encoding="utf-8"), *TEXTS * 3], 1500)


@pytest.fixture(scope="session")
def ranks(vocabulary) -> dict[bytes, int]:
    return ranks_of(vocabulary)


@pytest.fixture(scope="session")
def release(vocabulary, tmp_path_factory) -> Path:
    """The tokenizer files of a release of Kimi K3, with a small table."""
    folder = write_tokenizer(vocabulary, tmp_path_factory.mktemp("k3"))
    (folder / "config.json").write_text('{"model_type": "llama"}')
    return folder


@pytest.fixture(scope="session")
def tokenizer(release):
    return load_tokenizer(release)


def expected(text: str, ranks: dict[bytes, int]) -> list[int]:
    """The ids of a text without control tokens, by the rule of the release."""
    return [i for word in WORDS.findall(text) for i in merged(word.encode(), ranks)]


def ids_of(tokenizer, text: str) -> list[int]:
    return tokenizer(text, add_special_tokens=False)["input_ids"]


SCRIPTS = st.sampled_from(
    "aZé'sSLld09 \t\n\r.,!#_-<|>面積はカ한я❤️عदि\u0301\u0085\u00a0\u2028\u017f\u01c5\u02b0\U0001d54f\U00020000"
)


@given(st.text(SCRIPTS, max_size=60) | st.text(max_size=30))
def test_ids_are_those_of_merging_by_rank(ranks, tokenizer, text):
    ids = ids_of(tokenizer, text)
    assert ids == expected(text, ranks)
    assert tokenizer.decode(ids) == text


@pytest.mark.parametrize("text", TEXTS)
def test_ids_of_text_in_several_scripts(ranks, tokenizer, text):
    assert ids_of(tokenizer, text) == expected(text, ranks)


@pytest.mark.parametrize("fill", ["a", " ", "面", "a" * 24_999 + " b"])
def test_long_runs_are_cut_as_the_release_cuts_them(ranks, tokenizer, fill):
    """After each 25,000 characters of one kind, white space or not, and after each 400,000."""
    text = "start " + fill * (60_000 // len(fill)) + "end"
    cuts, length, kind = [0], 0, None
    for i, character in enumerate(text):
        length = length + 1 if character.isspace() == kind else 1
        kind = character.isspace()
        if length > 25_000:
            cuts.append(i)
            length = 1
    pieces = [text[a:b] for a, b in zip(cuts, [*cuts[1:], len(text)])]
    assert len(pieces) == (3 if len(fill) == 1 else 1)
    boundaries, ids = [0], ids_of(tokenizer, text)
    for piece in pieces:
        boundaries.append(boundaries[-1] + len(ids_of(tokenizer, piece)))
    assert [ids[a:b] for a, b in pairwise(boundaries)] == [ids_of(tokenizer, piece) for piece in pieces]
    assert boundaries[-1] == len(ids)


def test_text_is_cut_after_400_000_characters(tokenizer):
    text = "words " * 70_000
    assert ids_of(tokenizer, text) == ids_of(tokenizer, text[:400_000]) + ids_of(tokenizer, text[400_000:])
    assert (text[399_996:400_000], text[400_000]) == ("word", "s")
    assert ids_of(tokenizer, " words") != ids_of(tokenizer, " word") + ids_of(tokenizer, "s")  # so the cut is seen


def test_every_control_token_is_one_id_behind_the_table(ranks, tokenizer):
    names = [NAMES.get(i, f"<|reserved_token_{len(ranks) + i}|>") for i in range(256)]
    assert ids_of(tokenizer, "".join(names)) == list(range(len(ranks), len(ranks) + 256))
    assert ids_of(tokenizer, " x<|sep|>y")[-2] == len(ranks) + 5
    assert (tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token) == ("[BOS]", "[EOS]", "[PAD]")


def test_a_copy_loads_without_code(release, tokenizer, tmp_path):
    notes = copy_side_files(Checkpoint(release), tmp_path)
    assert notes == [] and not [*tmp_path.rglob("*.py")]
    (tmp_path / "config.json").write_text('{"model_type": "attnres_kimi_k3"}')
    copy = AutoTokenizer.from_pretrained(tmp_path)
    text = "".join(TEXTS) + "<|open|>"
    assert ids_of(copy, text) == ids_of(tokenizer, text)
    assert copy.chat_template == tokenizer.chat_template
    assert copy.pad_token == "[PAD]"


def test_a_fast_tokenizer_that_names_the_released_class_is_copied_as_it_is(tokenizer, tmp_path):
    """Others publish `tokenizer.json` in place of the table, and leave the name of the class."""
    (source := tmp_path / "source").mkdir()
    tokenizer.save_pretrained(source)
    config = json.loads((source / "tokenizer_config.json").read_text())
    (source / "tokenizer_config.json").write_text(json.dumps(config | {"tokenizer_class": "TikTokenTokenizer"}))
    (source / "config.json").write_text('{"model_type": "llama"}')
    (source / "vocab.txt").write_text("of another engine")
    assert Checkpoint(source).kimi_tokenizer is None and Checkpoint(source).tokenizer is not None
    (target := tmp_path / "target").mkdir()
    copy_side_files(Checkpoint(source), target)
    for name in ("tokenizer.json", "vocab.txt"):
        assert (target / name).read_bytes() == (source / name).read_bytes()


def test_the_chat_template_of_a_release_comes_before_that_of_kimi_k3(release, tmp_path):
    folder = shutil.copytree(release, tmp_path / "k3")
    (folder / "chat_template.jinja").write_text("its own")
    assert load_tokenizer(folder).chat_template == "its own"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda lines: lines[:300] + lines[301:], "300 is missing"),
        (lambda lines: [*lines[:5], lines[4], *lines[6:]], "5 is missing"),
        (lambda lines: [*lines[:7], "not base64! 7", *lines[8:]], "line 8"),
        (lambda lines: [lines[0], lines[-1].split()[0] + " 1", *lines[2:-1]], "single bytes"),
        (lambda lines: lines[:-9], r"\[UNK\] of tokenizer_config.json"),
    ],
)
def test_a_damaged_table_is_refused(release, tmp_path, change, message):
    folder = shutil.copytree(release, tmp_path / "k3")
    table = folder / "tiktoken.model"
    lines = sorted(table.read_text().splitlines(), key=lambda line: int(line.split()[1]))
    table.write_text("\n".join(change(lines)))
    for load in (load_tokenizer, lambda folder: Checkpoint(folder).tokenizer):
        with pytest.raises(ValueError, match=message) as refused:
            load(folder)
        assert "\n" not in str(refused.value) and str(table) in str(refused.value)


@pytest.mark.parametrize("entry", [{"x": {"content": "<|sep|>"}}, {"400": {}}, {"400": "<|sep|>"}])
def test_a_damaged_control_token_is_refused(release, tmp_path, entry):
    file = shutil.copytree(release, tmp_path / "k3") / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"added_tokens_decoder": entry}))
    with pytest.raises(ValueError, match="must have an id and a `content` for each token, but has"):
        load_tokenizer(file.parent)


CALL = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": 'two & "3"'}}}
MESSAGES = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "1 + 2? <|end_of_msg|>"},
    {"role": "assistant", "reasoning_content": "Use the tool.", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "c1", "content": "3"},
    {"role": "assistant", "content": "Three."},
]
EFFORT = (
    '<|open|>message role="system" type="thinking-effort"<|sep|>`thinking_effort` guides on how much to think in your '
    "thinking channel (not including the response channel), supported values include `low`, `medium`, `high`, and "
    "`max`.\nNow the system is invoked with `thinking_effort=max`.<|close|>message<|sep|><|end_of_msg|>"
)
TURNS = [
    '<|open|>message role="system"<|sep|>Be brief.<|close|>message<|sep|><|end_of_msg|>',
    '<|open|>message role="user"<|sep|>1 + 2? <|end_of_msg|><|close|>message<|sep|><|end_of_msg|>',
    '<|open|>message role="assistant"<|sep|><|open|>think<|sep|>',
    "Use the tool.<|close|>think<|sep|><|open|>response<|sep|><|close|>response<|sep|><|open|>tools<|sep|>"
    '<|open|>call tool="add" index="1"<|sep|><|open|>argument key="a" type="number"<|sep|>1<|close|>argument<|sep|>'
    '<|open|>argument key="b" type="string"<|sep|>two & "3"<|close|>argument<|sep|><|close|>call<|sep|>'
    "<|close|>tools<|sep|><|close|>message<|sep|><|end_of_msg|>",
    '<|open|>message role="tool" tool="add" index="1"<|sep|>3<|close|>message<|sep|><|end_of_msg|>',
    '<|open|>message role="assistant"<|sep|><|open|>think<|sep|>',
    "<|close|>think<|sep|><|open|>response<|sep|>Three.<|close|>response<|sep|><|close|>message<|sep|><|end_of_msg|>",
]


def test_the_chat_template_renders_the_format_of_kimi_k3(tokenizer):
    text = tokenizer.apply_chat_template(MESSAGES, tokenize=False)
    assert text == EFFORT + "".join(TURNS)
    prompt = tokenizer.apply_chat_template(MESSAGES[:2], tokenize=False, add_generation_prompt=True)
    assert text.startswith(prompt) and prompt.endswith(TURNS[2])


def test_fine_tuning_learns_the_turns_of_the_assistant_and_takes_typed_names_for_text(tokenizer, ranks):
    encoded = encode_chat(tokenizer)({"messages": MESSAGES})
    learned = [i for i in encoded["labels"] if i != IGNORED]
    assert tokenizer.decode(learned) == TURNS[3] + TURNS[6]
    assert tokenizer.decode(encoded["input_ids"]) == EFFORT + "".join(TURNS)
    control = len(ranks) + 2
    assert encoded["input_ids"].count(control) == 6  # one for each message, none for the name that the user typed
