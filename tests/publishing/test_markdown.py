"""Texts of unknown origin are shown literally in a model card, never as markup."""

import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest
from huggingface_hub import EvalResultEntry, ModelCard
from hypothesis import example, given, settings
from hypothesis import strategies as st
from markdown_it import MarkdownIt
from markdown_it.token import Token

from attnres.configuration import load
from attnres.publishing.card_text import add_step
from attnres.publishing.cards import CardSubject, complete
from attnres.publishing.markdown import code, escape, link, link_model, python_text, shell_word

CONFIG = load("attnres-tiny")
CONFIG.auto_map = {"AutoModelForCausalLM": "family_attnres.AttnResForCausalLM"}
READER = MarkdownIt("commonmark", {"html": True}).enable(["table", "strikethrough"])
HOSTILE = (
    *("<script>alert(1)</script>", "<img src=x onerror=alert(1)>", "</details><h1>x", "<!-- /attnres:results -->"),
    *("[x](javascript:alert(1))", "<javascript:alert(1)>", "![x](https://evil.example/x.png)", "[a]: javascript:b"),
    *("a | b", "a \\| b", "a\\", "`a`", "``", "a\n\n# b", "a\n| b | c |", "---\nlicense: mit\n---", "```\ncode"),
    *("**a** _b_ __c__ ~~d~~", "&lt;b&gt; &#60;", "https://evil.example", "www.evil.example", "mailto:a@b.example"),
    *(
        "\u202egnp.exe",
        "a\x00b\x1b[2J",
        "\udcff",
        "# #",
        "#",
        "- a",
        "1. a",
        "$x$ $$y$$",
        "\\(a\\)",
        "{{ a }} {% b %}",
        "",
    ),
)
anything = st.one_of(
    st.sampled_from(HOSTILE), st.text(), st.text("<>&|`*_[]()!#-~$\\ \nab:/.'\"{}", max_size=30)
)  # fmt: skip


def flat(tokens: list[Token]) -> Iterator[Token]:
    for token in tokens:
        yield token
        yield from flat(token.children or [])


def kinds(text: str) -> list[tuple[str, str]]:
    """Return the kinds of elements of rendered Markdown, without their content."""
    return [(t.type, t.tag) for t in flat(READER.parse(text)) if t.type not in ("text", "text_special", "softbreak")]


def visible_text(text: str) -> str:
    """Return the visible characters of rendered Markdown."""
    tokens = flat(READER.parse(text))
    return "".join(token.content for token in tokens if token.type in ("text", "text_special", "code_inline"))


def printed(text: str) -> str:
    """Return a text in which unprintable characters are replaced by their codes."""
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


def shown_text(text: str) -> str:
    """Return a text in one line, as a browser shows it."""
    return printed(" ".join(text.split()))


@given(anything)
def test_an_escaped_text_is_shown_literally_without_markup(text):
    for before, after in (("Of ", "."), ("# ", " x"), ("| a |\n|---|\n| ", " |"), ("**x** ", " y")):
        plain = f"{before}a{after}"
        assert kinds(before + escape(f"a{text}a") + after) == kinds(plain)
    assert visible_text(f"x{escape(text)}x") == f"x{shown_text(text)}x"


@given(anything)
def test_an_address_in_a_text_does_not_become_a_link(text):
    """The Hub's renderer links addresses without markup."""
    escaped = escape(f"{text} https://a.example WWW.b.example")
    assert not any(sign in escaped.lower() for sign in ("http:", "https:", "ftp:", "mailto:", "www."))


@given(anything)
def test_a_name_as_code_is_shown_literally_without_other_markup(text):
    for name in (text, Path(text.replace("\x00", "")).name):
        elements = kinds(f"| a |\n|---|\n| x{code(name)} |")
        assert [kind for kind in elements if kind[0] != "code_inline"] == kinds("| a |\n|---|\n| x |")
        assert visible_text(f"x{code(name)}x") == f"x{shown_text(name)}x"


@given(anything, anything)
def test_only_the_id_of_a_repository_becomes_a_link(repo, commit):
    written = link(repo, commit=commit)
    for token in flat(READER.parse(f"x {written}")):
        if token.type == "link_open":
            assert token.attrs["href"].startswith(f"https://huggingface.co/{repo}")
    if "link_open" not in dict(kinds(f"x {written}")):
        assert kinds(f"x {written}") in (kinds("x a"), kinds("x `a`"))


@given(anything)
def test_a_python_literal_and_a_shell_word_hold_the_text_in_one_line(text):
    literal, word = python_text(text), shell_word(text)
    assert eval(literal) == text
    assert shlex.split(word) == [printed(text)]
    assert literal.isprintable() and word.isprintable()


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("model")


def card(folder: Path, text: str) -> str:
    """Return a card in which every name is `text`."""
    entry = EvalResultEntry(dataset_id=text, task_id=text, value=1.5, notes=text)
    subject = CardSubject(CONFIG, folder, f"me/{text}", title=text, results=[entry], code=[])
    step = f"**Retrofit** of {link_model(None, f'/home/{text}')} and {link_model(text, text, text)}."
    return complete(add_step("", step), subject)


@settings(max_examples=40, deadline=None)
@given(anything)
@example("<script>alert(1)</script>")
@example("a: b\nlicense: mit")
def test_no_name_changes_the_markup_of_a_card(folder, text):
    named = card(folder, f"a{text}a")
    named.encode()
    plain = card(folder, "a")
    bodies = [whole.partition("\n---\n")[2] for whole in (plain, named)]
    # A local name may be shown as code or text, and an id as a link or not. Nothing else may differ.
    differing = ("code_inline", "link_open", "link_close")
    assert [kind for kind in kinds(bodies[1]) if kind[0] not in differing] == [
        kind for kind in kinds(bodies[0]) if kind[0] not in differing
    ]
    assert ModelCard(named).data.license is None


@pytest.mark.parametrize(("before", "present"), [("datasets:\n- me/first", ["me/first"]), ("datasets: []", [])])
def test_items_are_added_to_a_list_of_the_metadata(folder, before, present):
    items = ["me/a", "me/b"]
    subject = CardSubject(CONFIG, folder, "me/x", code=[], datasets=items)
    card = complete(f"---\n{before}\n---\n\n# Mine\n", subject)
    assert ModelCard(card).data.datasets == present + items
