"""The cache of blocks: one process builds it once, and it is used only for the same data and while it is undamaged."""

import hashlib
import json
import os
import resource
import shutil
from collections import Counter
from pathlib import Path

import pytest

from attnres.training.data.documents import Encoder
from attnres.training.text import train_tokenizer

from ... import forks
from ..blocks import WORDS, cut, load, rows, some_texts, stream_of, write

pytestmark = pytest.mark.usefixtures("in_tmp_path")
SESSION = Path(__file__).with_name("data_session.py")


def test_a_second_start_tokenises_nothing_and_another_order_or_length_only_packs_again(tokenizer, tokenised):
    write("a.jsonl", some_texts(100))
    first = load("a.jsonl", tokenizer)
    assert rows(load("a.jsonl", tokenizer)) == rows(first)
    assert first[:]["documents"] == load("a.jsonl", tokenizer)[:]["documents"]
    load("a.jsonl", tokenizer, seed=1)
    load("a.jsonl", tokenizer, 32)
    load("a.jsonl", train_tokenizer([" ".join(WORDS)] * 5, 300))  # the same content
    assert len(tokenised) == 1


def test_other_content_tokenizer_column_length_limit_or_encoder_gets_its_own_cache(tokenizer, tokenised):
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
    encoded = load("b.jsonl", tokenizer, seed=None, encode=lambda row: {"input_ids": [7], "labels": [7]})
    assert rows(encoded) == [[7] * 16] * 6
    encoded = load("b.jsonl", tokenizer, seed=None, encode=lambda row: {"input_ids": [8], "labels": [8]})
    assert rows(encoded) == [[8] * 16] * 6


def test_a_change_in_a_folder_laid_out_as_on_the_hub_is_noticed(tokenizer, tokenised):
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


DAMAGE = {
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
@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
def test_a_damaged_cache_is_built_again(tokenizer, damage, stage):
    write("a.jsonl", some_texts(100))
    expected = rows(load("a.jsonl", tokenizer))
    (path,) = Path("cache").glob(f"{stage}-*/{stage}.arrow")
    damage(path)
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


def test_a_file_that_is_removed_while_it_is_read_is_named(tokenizer, monkeypatch):
    write("a.jsonl", some_texts(20))
    batches = Encoder.batches

    def removed(self, documents):
        yield from batches(self, documents)
        os.remove("a.jsonl")

    monkeypatch.setattr(Encoder, "batches", removed)
    with pytest.raises(FileNotFoundError, match=r"^a.jsonl cannot be read: No such file or directory.$"):
        load("a.jsonl", tokenizer)


def _start(tokenizer, how: str) -> forks.Fork:
    tokenizer.save_pretrained("tokenizer")
    return forks.start(SESSION, "a.jsonl", "tokenizer", "cache", "log", how)


def _digest(blocks) -> str:
    return hashlib.sha256(blocks[:]["input_ids"].numpy().tobytes()).hexdigest()


@pytest.mark.slow
def test_one_of_two_processes_builds_the_cache_and_both_have_the_same_blocks(tokenizer):
    write("a.jsonl", some_texts(2000))
    with _start(tokenizer, "slow") as first, _start(tokenizer, "slow") as second:
        outputs = [process.communicate(timeout=300) for process in (first, second)]
        assert [process.returncode for process in (first, second)] == [0, 0], outputs
    assert Path("log").read_text() == "tokenised\n"
    expected = _digest(load("a.jsonl", tokenizer, 32, seed=5, cache="another cache"))
    assert [output for output, _ in outputs] == [f"{expected}\n"] * 2


@pytest.mark.slow
def test_a_cache_that_a_killed_process_left_incomplete_is_never_used(tokenizer):
    write("a.jsonl", some_texts(2000))
    with _start(tokenizer, "die") as killed:
        killed.communicate(timeout=300)
        assert killed.returncode == -9
    assert list(Path("cache").glob("tokens-*.partial/tokens.arrow"))
    expected = _digest(load("a.jsonl", tokenizer, 32, seed=5, cache="another cache"))
    assert _digest(load("a.jsonl", tokenizer, 32, seed=5)) == expected
    assert not list(Path("cache").glob("*.partial"))
