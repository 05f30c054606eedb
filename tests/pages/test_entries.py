"""The pages of the reference say on GitHub, too, what each entry is."""

import importlib
import re

import pytest

from .reading import ROOT


@pytest.fixture
def entries(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "docs")
    return importlib.import_module("entries")


def test_each_entry_has_the_first_line_of_its_docstring(entries):
    for page in entries.PAGES:
        text = page.read_text(encoding="utf-8")
        assert entries.with_entries(page, text) == text, "run `make tables`"
        assert text.count(":::") == len(re.findall(r"^<!-- ::: ", text, re.MULTILINE))
        # On the site mkdocstrings shows the whole docstring in place of the line.
        directives = entries.directives_of(text)
        assert "<!-- :::" not in directives and "<!-- end -->" not in directives
        assert len(re.findall(r"^::: attnres\.", directives, re.MULTILINE)) == text.count(":::")
