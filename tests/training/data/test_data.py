"""Blocks of tokens: their content and order, from the cache or as a stream."""

import itertools
import json
import logging
import tempfile
from collections import Counter
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader
from transformers import AutoTokenizer

from attnres.training.data import blocks as data
from attnres.training.text import END_OF_TEXT, read_documents, train_tokenizer

from ..blocks import WORDS, cut, load, rows, some_texts, split, stream_of, write

pytestmark = pytest.mark.usefixtures("in_tmp_path")
NAMES = {"input_ids", "labels", "documents"}


# What the blocks hold


@pytest.mark.slow
@settings(max_examples=15, deadline=None)
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
            with pytest.raises(ValueError, match=r"(1 document .* is|documents .* are) too few for one sequence"):
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
        assert start + 16 > len(stream) - len(ids_of[named[-1]])  # the last document that is named is in it, too
        seen.update(named)
    assert len(seen) >= 59


def _expand(documents: str) -> list[str]:
    """Return one place per row: `a.jsonl:1-2,7` gives `a.jsonl:1`, `a.jsonl:2` and `a.jsonl:7`."""
    expanded = []
    for part in documents.split(" "):
        name, ranges = part.split(":")
        for bounds in ranges.split(","):
            first, last = (bounds.split("-") * 2)[:2]
            expanded += [f"{name}:{row}" for row in range(int(first), int(last) + 1)]
    return expanded


def test_a_real_corpus_gives_the_blocks_of_its_stories(assets, tokenizer):
    path = assets / "corpora" / "tinystories" / "valid.txt"
    expected = torch.tensor(cut(stream_of(split(path.read_text()), tokenizer), 128))
    for streaming in (False, True):
        blocks = load(path, tokenizer, 128, seed=None, streaming=streaming)
        assert torch.equal(torch.stack([row["input_ids"] for row in blocks]), expected)


def test_a_document_has_the_tokenizers_own_first_token_and_one_end_of_text_token(assets):
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


def test_padding_and_truncation_of_an_earlier_call_of_the_tokenizer_change_nothing(tokenizer, tokenised):
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
    """An encoder that gives a label to the last token only, and refuses the row `refuse`."""

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
    learned = [block for block in cut(stream_of(texts, tokenizer), 16) if tokenizer.eos_token_id in block[1:]]
    assert rows(blocks) == learned
    assert "Skipped 1 row, the first because: chat.jsonl:7: there is nobody to answer." in caplog.messages


def test_an_encoder_must_give_as_many_labels_as_tokens(tokenizer):
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


def test_documents_and_the_blocks_of_a_document_are_shuffled_apart(tokenizer):
    write("a.jsonl", [" ".join([word] * 200) for word in WORDS])
    blocks = load("a.jsonl", tokenizer, 8, seed=0)
    numbers = [int(_expand(row["documents"])[0].split(":")[1]) for row in blocks]
    together = sum(a == b for a, b in itertools.pairwise(numbers))
    assert len(numbers) > 200 and together < len(numbers) / 5  # a tenth by chance
    neighbours = {tuple(_expand(row["documents"])) for row in blocks if len(_expand(row["documents"])) == 2}
    assert len(neighbours) > 5
    assert neighbours - {(f"a.jsonl:{n}", f"a.jsonl:{n + 1}") for n in range(1, 10)}


# Streams


@pytest.mark.slow
def test_a_stream_in_file_order_gives_the_same_blocks(tokenizer):
    write("a.jsonl", some_texts(600))
    stored = load("a.jsonl", tokenizer, seed=None)
    stream = load("a.jsonl", tokenizer, seed=None, streaming=True)
    for a, b in zip(stored, stream, strict=True):
        assert (
            all(torch.equal(a[name], b[name]) for name in ("input_ids", "labels")) and a["documents"] == b["documents"]
        )
    assert Counter(map(tuple, rows(load("a.jsonl", tokenizer, streaming=True)))) == Counter(map(tuple, rows(stored)))


@pytest.mark.slow
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


def test_a_stream_resumes_where_it_stopped(tokenizer):
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


# Errors


@pytest.mark.parametrize("streaming", [False, True])
def test_an_error_of_all_the_data_shows_before_training(tokenizer, streaming):
    with pytest.raises(FileNotFoundError, match=r"^absent.jsonl does not exist.$"):
        load("absent.jsonl", tokenizer, streaming=streaming)
    write("a.jsonl", some_texts(3))
    with pytest.raises(ValueError, match=r"^a.jsonl:1 has no column `body`; it has `text`.$"):
        load("a.jsonl", tokenizer, column="body", streaming=streaming)
    with pytest.raises(ValueError, match=r"^`length` is 1, but a sequence needs at least 2 tokens.$"):
        load("a.jsonl", tokenizer, 1, streaming=streaming)
    message = "^a.jsonl: 0 documents with 0 tokens are too few for one sequence of 16. Skipped 3 rows, the first"
    with pytest.raises(ValueError, match=f"{message} because: a.jsonl:1 has no column `body`; it has `text`.$"):
        load("a.jsonl", tokenizer, column="body", bad_rows="skip", streaming=streaming)


@pytest.mark.parametrize("streaming", [False, True])
def test_too_little_text_for_one_block_is_an_error(tokenizer, streaming):
    write("a.jsonl", ["one", "two"])
    tokens = len(stream_of(["one", "two"], tokenizer))
    message = f"^a.jsonl: 2 documents with {tokens} tokens are too few for one sequence of {tokens + 1}.$"
    with pytest.raises(ValueError, match=message):
        rows(load("a.jsonl", tokenizer, tokens + 1, streaming=streaming))
    assert len(rows(load("a.jsonl", tokenizer, tokens, streaming=streaming))) == 1


def test_a_tokenizer_without_an_end_of_text_token_is_refused(tokenizer):
    without = train_tokenizer(["one two"], 300)
    without.eos_token = None
    write("a.jsonl", some_texts(30))
    with pytest.raises(ValueError, match=r"^The tokenizer has no end-of-text token: set its `eos_token`.$"):
        load("a.jsonl", without)


@pytest.mark.parametrize("streaming", [False, True])
def test_skipped_rows_and_files_are_reported_each_time(tokenizer, streaming, caplog):
    texts = some_texts(100)
    write("a.jsonl", [*texts[:50], 7, *texts[50:], None])
    caplog.set_level(logging.WARNING)
    for _ in range(2):
        caplog.clear()
        blocks = load(("a.jsonl", "b.txt"), tokenizer, seed=None, bad_rows="skip", streaming=streaming)
        assert rows(blocks) == cut(stream_of(texts, tokenizer), 16)
        assert caplog.messages == ["Skipped 2 rows and 1 file, the first because: b.txt does not exist."]


@pytest.mark.slow
def test_the_blocks_of_a_corpus_of_books_hold_every_book(assets):
    path = assets / "corpora" / "childrens_books" / "train.txt"
    documents = read_documents(path)
    tokenizer = train_tokenizer(documents[:5], 4096)
    blocks = load(path, tokenizer, 1024, seed=None)
    texts = tokenizer.decode(blocks[:]["input_ids"].flatten()).split(END_OF_TEXT)
    assert len(texts) == len(documents)
    assert texts[:-1] == documents[:-1]
    assert documents[-1].startswith(texts[-1]) and len(documents[-1]) - len(texts[-1]) < 10_000
