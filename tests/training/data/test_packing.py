"""Packing: no token is lost, moved or invented, and each block names its documents."""

import dataclasses
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from attnres.training.data import IGNORED
from attnres.training.data.blocks import describe_places, in_blocks, pack
from attnres.training.data.documents import Place, Tokens

LENGTHS = st.lists(st.integers(1, 9), max_size=40)


def tokens(lengths: list[int], first_document: int = 0, first_token: int = 0) -> Tokens:
    """Return documents of these lengths. The token ids count up through all documents; a label is its id plus 1000."""
    ids = np.arange(first_token, first_token + sum(lengths), dtype=np.int32)
    places = [Place("a", number, number) for number in range(first_document, first_document + len(lengths))]
    return Tokens(ids, ids + 1000, np.array(lengths, dtype=np.int64), places)


def in_batches(lengths: list[int], at: list[int]) -> list[Tokens]:
    """Divide the documents into batches that end before the documents `at`."""
    bounds = [0, *sorted(at), len(lengths)]
    return [tokens(lengths[a:b], a, sum(lengths[:a])) for a, b in pairwise(bounds) if b > a]


@given(LENGTHS, st.integers(2, 20), st.data())
def test_blocks_are_the_stream_of_all_documents_without_an_incomplete_end(lengths, length, data):
    at = data.draw(st.lists(st.integers(0, len(lengths)), max_size=5))
    blocks = list(pack(in_batches(lengths, at), length))
    ids = np.concatenate([np.empty(0), *(block.ids.ravel() for block in blocks)])
    labels = np.concatenate([np.empty(0), *(block.labels.ravel() for block in blocks)])
    whole = sum(lengths) // length * length
    assert ids.tolist() == list(range(whole))
    assert labels.tolist() == list(range(1000, 1000 + whole))
    assert all(block.ids.shape == (len(block.documents), length) for block in blocks)


@given(LENGTHS, st.integers(2, 20), st.data())
def test_a_block_names_the_documents_of_its_tokens(lengths, length, data):
    at = data.draw(st.lists(st.integers(0, len(lengths)), max_size=5))
    document_of = np.repeat(np.arange(len(lengths)), lengths)
    for blocks in pack(in_batches(lengths, at), length):
        for ids, documents in zip(blocks.ids, blocks.documents):
            assert documents == describe_places(Place("a", n, n) for n in sorted(set(document_of[ids].tolist())))


@given(st.integers(2, 8), st.sets(st.integers(0, 99)), st.data())
def test_a_block_without_a_label_to_learn_is_left_out(length, learned, data):
    """A model predicts each label from the tokens before it, so the first label of a block is never learned."""
    at = data.draw(st.lists(st.integers(0, 100), max_size=5))
    batches = in_batches([1] * 100, at)
    for batch in batches:
        batch.labels[~np.isin(batch.ids, list(learned))] = IGNORED
    starts = [block.ids[i, 0] for block in pack(batches, length) for i in range(len(block.ids))]
    whole = range(0, 100 // length * length, length)
    assert starts == [start for start in whole if learned & {*range(start + 1, start + length)}]


@given(LENGTHS, st.integers(2, 20), st.data())
def test_positions_restart_with_each_separate_document_and_its_first_token_has_no_label(lengths, length, data):
    at = data.draw(st.lists(st.integers(0, len(lengths)), max_size=5))
    document_of = np.repeat(np.arange(len(lengths)), lengths)
    together = {block[0]: block for blocks in pack(in_batches(lengths, at), length) for block in zip(blocks.ids[:, 0])}
    seen = 0
    for blocks in pack(in_batches(lengths, at), length, separate=True):
        for ids, labels, positions in zip(blocks.ids, blocks.labels, blocks.positions):
            documents = document_of[ids]
            expected = [int((documents[:i] == documents[i]).sum()) for i in range(length)]
            assert positions.tolist() == expected
            assert labels.tolist() == [IGNORED if place == 0 else token + 1000 for token, place in zip(ids, expected)]
            seen += 1
    # A block whose documents have one token each has nothing to learn.
    blocks = [document_of[start : start + length] for start in together]
    assert seen == sum(len(set(block.tolist())) < length for block in blocks)


def test_consecutive_places_are_written_as_a_range():
    places = [
        Place("a.txt", 1, 4),
        Place("a.txt", 5, 9),
        Place("a.txt", 3, 3),
        Place("b.txt", 4, 4),
        Place("a.txt", 5, 6),
    ]
    assert describe_places(places) == "a.txt:1-9,3 b.txt:4 a.txt:5-6"


def test_a_stream_is_cut_without_its_incomplete_end():
    assert in_blocks(np.arange(7), 3).tolist() == [[0, 1, 2], [3, 4, 5]]
    assert in_blocks(np.arange(2), 3).shape == (0, 3)


@pytest.mark.parametrize("first", [True, False])
def test_parts_with_and_without_labels_are_not_joined(first):
    """The labels would no longer lie at their tokens."""
    labelled = tokens([3, 2])
    parts = labelled, dataclasses.replace(labelled, labels=None)
    with pytest.raises(ValueError, match="both parts must have labels, or neither"):
        parts[not first] + parts[first]
