"""Helpers for the tests of blocks: make texts, load them, and compute the expected blocks."""

import json
import random
import re
from pathlib import Path

from attnres.training.data.blocks import DataSpec, load_blocks
from attnres.training.data.loaders import END_OF_TEXT

WORDS = ["one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"]


def write(path: str, texts: list[str]) -> str:
    """Write texts as JSON Lines, and return the path."""
    Path(path).write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


def some_texts(count: int, seed: int = 0) -> list[str]:
    generator = random.Random(seed)
    return [" ".join(generator.choices(WORDS, k=generator.randint(1, 30))) for _ in range(count)]


def split(text: str) -> list[str]:
    """Divide a text at lines that hold only `<|endoftext|>`, or else into paragraphs."""
    at_marks = re.split(rf"^{re.escape(END_OF_TEXT)}$", text, flags=re.MULTILINE)
    parts = at_marks if len(at_marks) > 1 else text.split("\n\n")
    return [part.strip() for part in parts if part.strip()]


def load(paths, tokenizer, length=16, *, seed=0, cache="cache", encode=None, separate=False, **fields):
    spec = DataSpec(paths, **fields)
    return load_blocks(spec, tokenizer, length, seed=seed, encode=encode, separate=separate, cache=Path(cache))


def rows(blocks) -> list[list[int]]:
    return [row["input_ids"].tolist() for row in blocks]


def stream_of(texts: list[str], tokenizer) -> list[int]:
    """Return the tokens of all texts. Each text ends with exactly one end-of-text token."""
    end, stream = tokenizer.eos_token_id, []
    for text in texts:
        ids = tokenizer(text)["input_ids"]
        stream += ids if ids[-1:] == [end] else [*ids, end]
    return stream


def cut(stream: list, length: int) -> list[list[int]]:
    """Cut a stream into blocks, without its incomplete end."""
    return [stream[start : start + length] for start in range(0, len(stream) - length + 1, length)]
