"""Tests that every message on the page for troubleshooting is one that the code or a run has."""

import os
import re
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

import attnres

from .messages import is_of_the_code
from .reading import ROOT

PAGE = ROOT / "docs" / "guides" / "troubleshooting.md"
_ENTRY = re.compile(r"^### (?P<title>.+)\n(?P<text>(?:(?!^##).*\n?)*)", re.MULTILINE)
_MESSAGE = re.compile(r"^```text\n(.*?)^```$", re.DOTALL | re.MULTILINE)


def entries() -> dict[str, str]:
    """Return the text of each entry of the page by its title."""
    return {entry["title"]: entry["text"] for entry in _ENTRY.finditer(PAGE.read_text(encoding="utf-8"))}


def messages(text: str) -> list[str]:
    """Return the messages that an entry quotes, each in one line."""
    return [" ".join(message.split()) for message in _MESSAGE.findall(text)]


def test_every_entry_is_short_and_has_a_remedy():
    assert 15 <= len(entries()) <= 22
    for title, text in entries().items():
        prose = _MESSAGE.sub("", text).strip()
        assert 1 <= len(prose.splitlines()) <= 8, title
        assert title in RUNS or messages(text), title


def test_every_message_is_one_of_the_code_or_comes_out_of_a_run():
    for title, text in entries().items():
        if title not in RUNS:
            assert [message for message in messages(text) if not is_of_the_code(message)] == [], title
    assert RUNS.keys() <= entries().keys()


def test_a_message_that_the_code_does_not_have_is_found_out():
    assert is_of_the_code("attnres: The recipe lacks `train`: give train=...") is False
    assert not is_of_the_code("a message that nobody has written, of more than thirty letters")
