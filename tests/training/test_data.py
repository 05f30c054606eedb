"""Blocks of tokens: what they hold, in which order, from the cache or as a stream."""

import hashlib
import itertools
import json
import logging
import os
import random
import resource
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader
from transformers import AutoTokenizer

from attnres.training import data
from attnres.training.data import DataSpec, load_blocks
from attnres.training.encoding import Encoder
from attnres.training.text import END_OF_TEXT, pack, read_documents, train_tokenizer

SESSION = Path(__file__).with_name("data_session.py")
WORDS = ["one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"]
NAMES = {"input_ids", "labels", "documents"}


@pytest.fixture(autouse=True)
def in_tmp_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer([" ".join(WORDS)] * 5, 300)


@pytest.fixture
def tokenised(monkeypatch) -> list[str]:
    """An entry for each time that documents are tokenised."""
    calls, batches = [], Encoder.batches

    def noted(self, documents):
        calls.append("tokenised")
        return batches(self, documents)

    monkeypatch.setattr(Encoder, "batches", noted)
    return calls


def write(path: str, texts: list[str]) -> str:
    Path(path).write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


def some_texts(count: int, seed: int = 0) -> list[str]:
    generator = random.Random(seed)
    return [" ".join(generator.choices(WORDS, k=generator.randint(1, 30))) for _ in range(count)]


def load(paths, tokenizer, length=16, *, seed=0, cache="cache", encode=None, **fields):
    spec = DataSpec(paths, **fields)
    return load_blocks(spec, tokenizer, length, seed=seed, encode=encode, cache=Path(cache))


def rows(blocks) -> list[list[int]]:
    return [row["input_ids"].tolist() for row in blocks]


def stream_of(texts: list[str], tokenizer) -> list[int]:
    return [token for text in texts for token in [*tokenizer(text)["input_ids"], tokenizer.eos_token_id]]


def cut(stream: list, length: int) -> list[list[int]]:
    return [stream[start : start + length] for start in range(0, len(stream) - length + 1, length)]


# What the blocks hold


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.text(st.characters(codec="utf-8"), min_size=1).filter(str.strip), min_size=1, max_size=30),
    st.integers(2, 40),
    st.integers(0, 2**32 - 1),
)
def test_the_blocks_are_the_documents_in_shuffled_order_each_with_its_end(tokenizer, texts, length, seed):
    with tempfile.TemporaryDirectory() as folder:
        path = write(f"{folder}/texts.jsonl", texts)
        shuffled = [texts[number] for number in data._order(seed, 0, len(texts))]
        in_stream_order = cut(stream_of(shuffled, tokenizer), length)
        if not in_stream_order:
            with pytest.raises(ValueError, match="are too few for one block"):
                load(path, tokenizer, length, seed=seed, cache=folder)
            return
        blocks = rows(load(path, tokenizer, length, seed=seed, cache=folder))
        assert blocks == [in_stream_order[number] for number in data._order(seed, 1, len(in_stream_order))]
        assert rows(load(path, tokenizer, length, seed=None, cache=folder)) == cut(stream_of(texts, tokenizer), length)


def test_rows_are_tensors_that_a_model_can_be_trained_on(tokenizer):
    write("a.jsonl", some_texts(50))
    for blocks in (load("a.jsonl", tokenizer), load("a.jsonl", tokenizer, streaming=True)):
        row = next(iter(blocks))
        assert set(row) == NAMES
        assert row["input_ids"].shape == (16,) and row["input_ids"].dtype == torch.long
        assert torch.equal(row["labels"], row["input_ids"]) and row["labels"].dtype == torch.long


def test_a_block_names_the_rows_that_it_was_made_from(tokenizer):
    texts = some_texts(60)
    write("a.jsonl", texts[:30])
    write("b.jsonl", texts[30:])
    paths = [f"a.jsonl:{row}" for row in range(1, 31)] + [f"b.jsonl:{row}" for row in range(1, 31)]
    ids_of = {path: stream_of([text], tokenizer) for path, text in zip(paths, texts)}
    seen = set()
    for row in load(("a.jsonl", "b.jsonl"), tokenizer):
        named = _expand(row["documents"])
        stream = [token for path in named for token in ids_of[path]]
        start = next(n for n in range(len(ids_of[named[0]])) if stream[n : n + 16] == row["input_ids"].tolist())
        assert start + 16 > len(stream) - len(ids_of[named[-1]])  # the last that is named is in it, too
        seen.update(named)
    assert len(seen) >= 59


def _expand(documents: str) -> list[str]:
    """`a.jsonl:1-2,7` -> `a.jsonl:1`, `a.jsonl:2`, `a.jsonl:7`."""
    expanded = []
    for part in documents.split(" "):
        name, ranges = part.split(":")
        for bounds in ranges.split(","):
            first, last = (bounds.split("-") * 2)[:2]
            expanded += [f"{name}:{row}" for row in range(int(first), int(last) + 1)]
    return expanded


def test_a_real_corpus_gives_the_blocks_of_the_demo(assets, tokenizer):
    path = assets / "corpora" / "tinystories" / "valid.txt"
    expected = pack(read_documents(path, 10_000_000), tokenizer, 128)
    for streaming in (False, True):
        blocks = load(path, tokenizer, 128, seed=None, streaming=streaming)
        assert torch.equal(torch.stack([row["input_ids"] for row in blocks]), expected)


def test_a_document_begins_as_the_tokenizer_begins_it_and_ends_once(assets):
    tokenizer = AutoTokenizer.from_pretrained(assets / "checkpoints" / "stories260K-hf")
    write("a.jsonl", ["Once upon a time", "The end"])
    stream = [token for row in rows(load("a.jsonl", tokenizer, 2, seed=None)) for token in row]
    expected = tokenizer("Once upon a time")["input_ids"] + [2] + tokenizer("The end")["input_ids"] + [2]
    assert expected[0] == tokenizer.bos_token_id == 1
    assert stream == expected[: len(expected) // 2 * 2]

    write("b.jsonl", ["The end</s>"] * 2)
    ended = tokenizer("The end</s>")["input_ids"]
    assert ended[-1] == 2
    assert rows(load("b.jsonl", tokenizer, 2 * len(ended), seed=None)) == [ended * 2]


def test_what_an_earlier_call_has_set_in_the_tokenizer_changes_nothing(tokenizer, tokenised):
    write("a.jsonl", some_texts(50))
    expected = rows(load("a.jsonl", tokenizer, seed=None))
    tokenizer(some_texts(3), truncation=True, max_length=4, padding="max_length")
    assert rows(load("a.jsonl", tokenizer, seed=None, cache="other")) == expected
    tokenizer(some_texts(3), truncation=True, max_length=4, padding="max_length")
    assert rows(load("a.jsonl", tokenizer, seed=None)) == expected
    assert len(tokenised) == 2


def test_a_limit_takes_the_first_documents(tokenizer):
    texts = some_texts(50)
    write("a.jsonl", texts)
    for streaming in (False, True):
        blocks = load("a.jsonl", tokenizer, seed=None, limit=20, streaming=streaming)
        assert rows(blocks) == cut(stream_of(texts[:20], tokenizer), 16)


# Rows through an encoder


class LastTokenOnly:
    """Labels at a row's last token alone; refuses a row that says so."""

    def __init__(self, tokenizer):
        self.tokenizer = tokenizer

    def __call__(self, row: dict) -> dict:
        if row["messages"] == "refuse":
            raise ValueError("there is nobody to answer.")
        ids = [*self.tokenizer(row["messages"])["input_ids"], self.tokenizer.eos_token_id]
        return {"input_ids": ids, "labels": [-100] * (len(ids) - 1) + ids[-1:]}


@pytest.mark.parametrize("streaming", [False, True])
def test_labels_travel_with_their_tokens(tokenizer, streaming):
    Path("chat.jsonl").write_text("".join(json.dumps({"messages": text}) + "\n" for text in some_texts(50)))
    blocks = load("chat.jsonl", tokenizer, encode=LastTokenOnly(tokenizer), column="messages", streaming=streaming)
    ids = torch.stack([row["input_ids"] for row in blocks])
    labels = torch.stack([row["labels"] for row in blocks])
    assert sorted(rows(blocks)) != rows(blocks)
    assert torch.equal(labels, ids.where(ids == tokenizer.eos_token_id, -100))
    assert (labels != -100).sum() > 30


@pytest.mark.parametrize("streaming", [False, True])
def test_a_row_that_the_encoder_refuses_is_an_error_or_skipped(tokenizer, streaming, caplog):
    texts = some_texts(20)
    texts[6] = "refuse"
    Path("chat.jsonl").write_text("".join(json.dumps({"messages": text}) + "\n" for text in texts))
    fields = {"encode": LastTokenOnly(tokenizer), "column": "messages", "streaming": streaming, "seed": None}
    with pytest.raises(ValueError, match=r"^chat.jsonl:7: there is nobody to answer.$"):
        rows(load("chat.jsonl", tokenizer, **fields))
    del texts[6]
    blocks = load("chat.jsonl", tokenizer, bad_rows="skip", **fields)
    assert rows(blocks) == cut(stream_of(texts, tokenizer), 16)
    assert "Skipped 1 row, the first because: chat.jsonl:7: there is nobody to answer." in caplog.messages


def test_as_many_labels_as_tokens_are_needed(tokenizer):
    write("a.jsonl", ["a"])
    with pytest.raises(ValueError, match=r"^a.jsonl:1: 2 tokens, but 1 labels.$"):
        load("a.jsonl", tokenizer, encode=lambda row: {"input_ids": [1, 2], "labels": [1]})


# Order


def test_the_seed_alone_decides_the_order(tokenizer):
    write("a.jsonl", some_texts(200))
    for streaming in (False, True):
        first = rows(load("a.jsonl", tokenizer, seed=1, streaming=streaming))
        assert rows(load("a.jsonl", tokenizer, seed=1, cache="other", streaming=streaming)) == first
        assert rows(load("a.jsonl", tokenizer, seed=2, streaming=streaming)) != first
        assert len(first) > 100


def test_neither_documents_nor_the_blocks_of_a_document_stay_together(tokenizer):
    write("a.jsonl", [" ".join([word] * 200) for word in WORDS])
    blocks = load("a.jsonl", tokenizer, 8, seed=0)
    numbers = [int(_expand(row["documents"])[0].split(":")[1]) for row in blocks]
    stay = sum(a == b for a, b in itertools.pairwise(numbers))
    assert len(numbers) > 200 and stay < len(numbers) / 5  # a tenth by chance
    neighbours = {tuple(_expand(row["documents"])) for row in blocks if len(_expand(row["documents"])) == 2}
    assert len(neighbours) > 5
    assert neighbours - {(f"a.jsonl:{n}", f"a.jsonl:{n + 1}") for n in range(1, 10)}


# The cache


def test_a_second_start_tokenises_nothing_and_another_order_only_packs(tokenizer, tokenised):
    write("a.jsonl", some_texts(100))
    first = load("a.jsonl", tokenizer)
    assert rows(load("a.jsonl", tokenizer)) == rows(first)
    assert first[:]["documents"] == load("a.jsonl", tokenizer)[:]["documents"]
    load("a.jsonl", tokenizer, seed=1)
    load("a.jsonl", tokenizer, 32)
    load("a.jsonl", train_tokenizer([" ".join(WORDS)] * 5, 300))  # the same content
    assert len(tokenised) == 1


def test_the_cache_is_for_that_content_tokenizer_column_and_length_only(tokenizer, tokenised):
    texts = some_texts(100)
    write("a.jsonl", texts)
    load("a.jsonl", tokenizer)

    texts[50] = "one more"
    write("a.jsonl", texts)
    assert Counter(map(tuple, rows(load("a.jsonl", tokenizer, seed=None)))) == Counter(
        map(tuple, cut(stream_of(texts, tokenizer), 16))
    )
    status = os.stat("a.jsonl")
    os.utime("a.jsonl", ns=(status.st_atime_ns, status.st_mtime_ns + 1))
    load("a.jsonl", tokenizer)
    assert len(tokenised) == 3

    other = train_tokenizer(["seven eight nine ten"] * 5, 290)
    assert rows(load("a.jsonl", other, seed=None)) == cut(stream_of(texts, other), 16)
    assert {len(row) for row in rows(load("a.jsonl", tokenizer, 17))} == {17}
    assert len(tokenised) == 4

    other_end = train_tokenizer([" ".join(WORDS)] * 5, 300)
    other_end.eos_token = "<|pad|>"
    assert rows(load("a.jsonl", other_end, seed=None)) == cut(stream_of(texts, other_end), 16)

    Path("b.jsonl").write_text("".join(json.dumps({"text": text, "body": text[::-1]}) + "\n" for text in texts))
    assert rows(load("b.jsonl", tokenizer)) != rows(load("b.jsonl", tokenizer, column="body"))
    assert len(load("b.jsonl", tokenizer, limit=9)) < len(load("b.jsonl", tokenizer))
    encoded = load("b.jsonl", tokenizer, seed=None, encode=lambda row: {"input_ids": [7], "labels": [-100]})
    assert rows(encoded) == [[7] * 16] * 6
    encoded = load("b.jsonl", tokenizer, seed=None, encode=lambda row: {"input_ids": [8], "labels": [-100]})
    assert rows(encoded) == [[8] * 16] * 6


def test_the_cache_of_a_folder_laid_out_as_on_the_hub_is_for_its_content(tokenizer, tokenised):
    Path("org/name").mkdir(parents=True)
    Path("org/name/README.md").write_text("---\nconfigs:\n- config_name: one\n  data_files: a.jsonl\n---\n")
    for seed in (1, 2):
        texts = some_texts(100, seed)
        write("org/name/a.jsonl", texts)
        for _ in range(2):
            blocks = load("org/name:one", tokenizer, seed=None)
            assert rows(blocks) == cut(stream_of(texts, tokenizer), 16)
            assert blocks[0]["documents"].startswith("org/name/a.jsonl:1")
    assert len(tokenised) == 2


def _flip_a_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


HARM = {
    "a bit flipped": _flip_a_bit,
    "cut short": lambda path: os.truncate(path, path.stat().st_size // 2),
    "emptied": lambda path: os.truncate(path, 0),
    "removed": lambda path: path.unlink(),
    "without its manifest": lambda path: (path.parent / "manifest.json").unlink(),
    "with half a manifest": lambda path: os.truncate(path.parent / "manifest.json", 9),
    "with an empty manifest": lambda path: (path.parent / "manifest.json").write_text("{}"),
    "with another manifest": lambda path: (path.parent / "manifest.json").write_text("[]"),
}


@pytest.mark.parametrize("stage", ["tokens", "blocks"])
@pytest.mark.parametrize("harm", HARM.values(), ids=HARM)
def test_a_harmed_cache_is_built_again(tokenizer, harm, stage):
    write("a.jsonl", some_texts(100))
    expected = rows(load("a.jsonl", tokenizer))
    (path,) = Path("cache").glob(f"{stage}-*/{stage}.arrow")
    harm(path)
    if stage == "tokens":
        (blocks,) = Path("cache").glob("blocks-*[!k]")
        shutil.rmtree(blocks)
    assert rows(load("a.jsonl", tokenizer)) == expected


def test_a_failed_start_leaves_nothing_in_the_cache(tokenizer):
    write("a.jsonl", [*some_texts(2000), 7])
    with pytest.raises(ValueError, match=r"^a.jsonl:2001: column `text` holds a number, not a string.$"):
        load("a.jsonl", tokenizer)
    assert not [path for path in Path("cache").iterdir() if path.is_dir()]


def test_a_file_that_changes_while_it_is_read_is_noticed(tokenizer, monkeypatch):
    write("a.jsonl", some_texts(100))
    batches = Encoder.batches

    def appended_to(self, documents):
        yield from batches(self, documents)
        with open("a.jsonl", "a") as file:
            file.write('{"text": "more"}\n')

    monkeypatch.setattr(Encoder, "batches", appended_to)
    with pytest.raises(ValueError, match=r"^a.jsonl changed while it was read. Start again.$"):
        load("a.jsonl", tokenizer)


@pytest.mark.parametrize("size", [10_000, 240_000], ids=["tokens", "blocks"])
def test_a_full_disk_is_an_error_in_one_line_and_leaves_nothing(tokenizer, size):
    write("a.jsonl", [text * 10 for text in some_texts(200, seed=3)])
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))  # as near to a full disk as a test can come
    try:
        with pytest.raises(OSError, match=r"^The cache cache cannot be written: File too large.$"):
            load("a.jsonl", tokenizer, 3)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert {path.suffix for path in Path("cache").iterdir()} == {".lock"} | ({""} if size == 240_000 else set())
    load("a.jsonl", tokenizer, 3)


def test_a_cache_that_cannot_be_written_is_an_error_in_one_line(tokenizer):
    write("a.jsonl", some_texts(20))
    with pytest.raises(OSError, match=r"^The cache a.jsonl cannot be written: File exists.$"):
        load("a.jsonl", tokenizer, cache="a.jsonl")


def test_a_file_that_goes_while_it_is_read_is_named(tokenizer, monkeypatch):
    write("a.jsonl", some_texts(20))
    batches = Encoder.batches

    def removed(self, documents):
        yield from batches(self, documents)
        os.remove("a.jsonl")

    monkeypatch.setattr(Encoder, "batches", removed)
    with pytest.raises(FileNotFoundError, match=r"^a.jsonl cannot be read: No such file or directory.$"):
        load("a.jsonl", tokenizer)


def _start(tokenizer, how: str) -> subprocess.Popen:
    tokenizer.save_pretrained("tokenizer")
    command = [sys.executable, str(SESSION), "a.jsonl", "tokenizer", "cache", "log", how]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def _digest(blocks) -> str:
    return hashlib.sha256(blocks[:]["input_ids"].numpy().tobytes()).hexdigest()


@pytest.mark.slow
def test_of_two_processes_one_builds_the_cache_and_both_have_the_same_blocks(tokenizer):
    write("a.jsonl", some_texts(2000))
    processes = [_start(tokenizer, "slow") for _ in range(2)]
    outputs = [process.communicate(timeout=300) for process in processes]
    assert [process.returncode for process in processes] == [0, 0], outputs
    assert Path("log").read_text() == "tokenised\n"
    expected = _digest(load("a.jsonl", tokenizer, 32, seed=5, cache="cache of its own"))
    assert [output for output, _ in outputs] == [f"{expected}\n"] * 2


@pytest.mark.slow
def test_what_a_killed_process_has_begun_is_never_used(tokenizer):
    write("a.jsonl", some_texts(2000))
    killed = _start(tokenizer, "die")
    killed.communicate(timeout=300)
    assert killed.returncode == -9
    assert list(Path("cache").glob("tokens-*.partial/tokens.arrow"))
    expected = _digest(load("a.jsonl", tokenizer, 32, seed=5, cache="cache of its own"))
    assert _digest(load("a.jsonl", tokenizer, 32, seed=5)) == expected
    assert not list(Path("cache").glob("*.partial"))


# Streams


def test_a_stream_in_file_order_gives_the_same_blocks(tokenizer):
    write("a.jsonl", some_texts(3000))
    stored = load("a.jsonl", tokenizer, seed=None)
    stream = load("a.jsonl", tokenizer, seed=None, streaming=True)
    for a, b in zip(stored, stream, strict=True):
        assert (
            all(torch.equal(a[name], b[name]) for name in ("input_ids", "labels")) and a["documents"] == b["documents"]
        )
    assert Counter(map(tuple, rows(load("a.jsonl", tokenizer, streaming=True)))) == Counter(map(tuple, rows(stored)))


def test_a_stream_is_the_same_for_every_number_of_workers(tokenizer):
    write("a.jsonl", some_texts(300))
    write("b.jsonl", some_texts(300, seed=1))
    stream = load(("a.jsonl", "b.jsonl"), tokenizer, streaming=True)
    expected = [row["documents"] for row in stream]
    for workers in (1, 2):
        assert [row["documents"] for row in DataLoader(stream, batch_size=None, num_workers=workers)] == expected


def test_a_stream_has_the_same_order_in_each_epoch(tokenizer):
    write("a.jsonl", some_texts(300))
    stream = load("a.jsonl", tokenizer, streaming=True)
    first = rows(stream)
    stream.set_epoch(1)
    assert rows(stream) == first


def test_a_block_of_a_stream_comes_at_most_the_buffer_too_early(tokenizer, monkeypatch):
    monkeypatch.setattr(data, "SHUFFLE_BUFFER", 20)
    write("a.jsonl", some_texts(300))
    in_order = rows(load("a.jsonl", tokenizer, seed=None, streaming=True))
    shuffled = rows(load("a.jsonl", tokenizer, streaming=True))
    early = [in_order.index(block) - number for number, block in enumerate(shuffled)]
    assert 10 < max(early) <= 20


def test_a_stream_goes_on_where_it_stood(tokenizer):
    write("a.jsonl", some_texts(300))
    for seed in (None, 0):
        stream = load("a.jsonl", tokenizer, seed=seed, streaming=True)
        expected = rows(stream)
        assert rows(stream.skip(50)) == expected[50:]
        for number, _ in enumerate(stream, 1):
            if number == 50:
                state = stream.state_dict()
                break
        again = load("a.jsonl", tokenizer, seed=seed, streaming=True)
        again.load_state_dict(state)
        assert rows(again) == expected[50:]


# What is wrong


@pytest.mark.parametrize("streaming", [False, True])
def test_what_is_wrong_with_all_of_the_data_shows_before_training(tokenizer, streaming):
    with pytest.raises(FileNotFoundError, match=r"^absent.jsonl does not exist.$"):
        load("absent.jsonl", tokenizer, streaming=streaming)
    write("a.jsonl", some_texts(3))
    with pytest.raises(ValueError, match=r"^a.jsonl:1 has no column `body`, but `text`.$"):
        load("a.jsonl", tokenizer, column="body", streaming=streaming)
    with pytest.raises(ValueError, match=r"^`length` is 1, but a block needs at least 2 tokens.$"):
        load("a.jsonl", tokenizer, 1, streaming=streaming)
    message = "^a.jsonl: 0 documents with 0 tokens are too few for one block of 16. Skipped 3 rows, the first because: "
    with pytest.raises(ValueError, match=f"{message}a.jsonl:1 has no column `body`, but `text`.$"):
        load("a.jsonl", tokenizer, column="body", bad_rows="skip", streaming=streaming)


@pytest.mark.parametrize("streaming", [False, True])
def test_too_little_text_for_one_block_is_an_error(tokenizer, streaming):
    write("a.jsonl", ["one", "two"])
    tokens = len(stream_of(["one", "two"], tokenizer))
    message = f"^a.jsonl: 2 documents with {tokens} tokens are too few for one block of {tokens + 1}.$"
    with pytest.raises(ValueError, match=message):
        rows(load("a.jsonl", tokenizer, tokens + 1, streaming=streaming))
    assert len(rows(load("a.jsonl", tokenizer, tokens, streaming=streaming))) == 1


def test_a_tokenizer_without_an_end_is_refused(tokenizer):
    without = train_tokenizer(["one two"], 300)
    without.eos_token = None
    write("a.jsonl", some_texts(30))
    with pytest.raises(ValueError, match=r"^The tokenizer has no end-of-text token: set its `eos_token`.$"):
        load("a.jsonl", without)


@pytest.mark.parametrize("streaming", [False, True])
def test_what_was_skipped_is_reported_each_time(tokenizer, streaming, caplog):
    texts = some_texts(100)
    write("a.jsonl", [*texts[:50], 7, *texts[50:], None])
    caplog.set_level(logging.WARNING)
    for _ in range(2):
        caplog.clear()
        blocks = load(("a.jsonl", "b.txt"), tokenizer, seed=None, bad_rows="skip", streaming=streaming)
        assert rows(blocks) == cut(stream_of(texts, tokenizer), 16)
        assert caplog.messages == ["Skipped 2 rows and 1 file, the first because: b.txt does not exist."]


@pytest.mark.slow
def test_a_corpus_of_many_books_becomes_blocks_and_is_whole(assets):
    path = assets / "corpora" / "classics" / "train.txt"
    documents = read_documents(path, 100_000_000)
    tokenizer = train_tokenizer(documents[:5], 4096)
    blocks = load(path, tokenizer, 1024, seed=None)
    texts = tokenizer.decode(blocks[:]["input_ids"].flatten()).split(END_OF_TEXT)
    assert len(texts) == len(documents)
    assert texts[:-1] == documents[:-1]
    assert documents[-1].startswith(texts[-1]) and len(documents[-1]) - len(texts[-1]) < 10_000
