"""The page of an inspection has the right content and size, and only its own scripts can run."""

import base64
import hashlib
import json
from dataclasses import replace
from html.parser import HTMLParser
from urllib.parse import unquote

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from attnres.analysis import inspection as measuring
from attnres.analysis.inspection import passage_tokens
from attnres.analysis.page import FIGURES, render

from .inspections import WORDS, block_attn_res, full_attn_res, standard
from .measured import depth

SVG = '<svg xmlns="http://www.w3.org/2000/svg"><text>ü</text></svg>'
HOSTILE = '</script><img src=x onerror="alert(1)"><!--<script>'


class Page(HTMLParser):
    """The elements of a page in turn, as `[name, attributes, text]`. Text belongs to the innermost open element."""

    VOID = {"meta", "img", "input", "link", "br"}

    def __init__(self, text: str):
        super().__init__()
        self.elements: list[list] = []
        self.open: list[list] = []
        self.feed(text)
        assert not self.open

    def handle_starttag(self, tag, attrs):
        element = [tag, dict(attrs), ""]
        self.elements.append(element)
        if tag not in self.VOID:
            self.open.append(element)

    def handle_endtag(self, tag):
        assert self.open.pop()[0] == tag

    def handle_data(self, data):
        if self.open:
            self.open[-1][2] += data

    def of(self, kind: str, **attributes: str) -> list[tuple[dict, str]]:
        """Return the attributes and texts of the elements of a kind that have these attributes."""
        return [
            (actual, text)
            for tag, actual, text in self.elements
            if tag == kind and attributes.items() <= actual.items()
        ]

    @property
    def text(self) -> str:
        return " ".join(text for tag, _, text in self.elements if tag not in ("script", "style"))

    @property
    def given(self) -> list[dict]:
        ((_, text),) = self.of("script", id="given")
        return json.loads(text)


def decoded(given: dict) -> list[np.ndarray]:
    """Return the weights of each reader `[sources, tokens]`, decoded as by the script of the page."""
    levels, begin, rows = np.frombuffer(base64.b64decode(given["data"]), "<u2"), 0, []
    for reader in given["weights"]:
        shape = len(reader["mean"]), given["tokens"]
        if reader["constant"] is not None:
            rows.append(np.repeat(np.array(reader["constant"])[:, None], shape[1], 1))
            continue
        end = begin + shape[0] * shape[1]
        part = levels[begin:end].reshape(shape)
        rows.append(reader["low"] + (reader["high"] - reader["low"]) * part / 65535)
        begin = end
    assert begin == len(levels)
    return rows


def test_the_same_inspections_and_figures_give_the_same_bytes():
    made = [render([block_attn_res(), standard()], {"magnitudes": SVG}, ["inspection.json"]) for _ in range(2)]
    assert made[0] == made[1]


@pytest.mark.parametrize("inspections", [[block_attn_res()], [standard()], [block_attn_res(), standard()]])
def test_the_page_holds_the_weights_of_every_token_and_their_means(inspections):
    given = Page(render(inspections, {})).given
    assert len(given) == len(inspections)
    for passage, inspection in zip(given, inspections):
        measured = inspection.depth_attention or inspection.mixing
        for row, weights, reader, mean in zip(
            decoded(passage), inspection.passage.weights, passage["weights"], measured.mean, strict=True
        ):
            assert np.abs(row - weights.numpy()).max() <= 1e-5
            assert reader["mean"] == pytest.approx(mean[: len(weights)].tolist(), rel=1e-5)
        assert passage["readers"] == list(inspection.depth.consumers)
        assert passage["attention"] == (inspection.depth_attention is not None)


def test_weights_that_are_equal_for_all_tokens_are_stored_once():
    assert Page(render([standard()], {})).given[0]["data"] == ""
    # Of the readers of Block AttnRes, only the first has one source.
    readers = Page(render([block_attn_res()], {})).given[0]["weights"]
    assert [reader["constant"] is not None for reader in readers] == [True, False, False, False, False]


def page_that_calls_everything(name: str) -> Page:
    """Return the page of two models, where everything that has a name in the first one has this name."""
    inspection, other, words = block_attn_res(), standard(), [name, *WORDS[1:]]
    depth = inspection.depth
    named = replace(
        inspection,
        model={key: name if isinstance(value, str) else value for key, value in inspection.model.items()},
        text={**inspection.text, "name": name},
        depth=replace(depth, consumers=(name, *depth.consumers[1:]), sources=(name, *depth.sources[1:])),
        passage=replace(inspection.passage, words=words),
    )
    other = replace(other, passage=replace(other.passage, words=words))
    return Page(render([named, other], {f"mixing: {name}": SVG}, [name]))


def test_a_hostile_name_does_not_change_the_markup():
    plain, hostile = page_that_calls_everything("name"), page_that_calls_everything(HOSTILE)
    # The elements and the names of their attributes are the same. Only texts and values differ.
    assert [(tag, set(attributes)) for tag, attributes, _ in hostile.elements] == [
        (tag, set(attributes)) for tag, attributes, _ in plain.elements
    ]
    assert HOSTILE in hostile.text and hostile.given[0]["readers"][0] == HOSTILE


@pytest.mark.slow
@settings(max_examples=15, deadline=None)
@given(st.text("<>&\"'`/=-!\\$ \nscript[]{}%", min_size=1, max_size=30))
def test_random_names_do_not_change_the_markup(name):
    plain, named = page_that_calls_everything("name"), page_that_calls_everything(f"a{name}a")
    assert [(tag, set(attributes)) for tag, attributes, _ in named.elements] == [
        (tag, set(attributes)) for tag, attributes, _ in plain.elements
    ]
    assert named.given[0]["readers"][0] == f"a{name}a"


def test_only_the_scripts_of_the_page_may_run_and_nothing_is_loaded():
    text = render([block_attn_res()], {"magnitudes": SVG}, ["inspection.json"])
    page = Page(text)
    ((policy, _),) = page.of("meta", **{"http-equiv": "Content-Security-Policy"})
    scripts = [content for attributes, content in page.of("script") if attributes.get("type") != "application/json"]
    hashes = [base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts]
    allowed = " ".join(f"'sha256-{value}'" for value in hashes)
    assert policy["content"] == (
        f"default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src {allowed}; base-uri 'none'; "
        "form-action 'none'"
    )
    assert len(scripts) == 5 and scripts[0].startswith("'use strict';\n/*!\n * Copyright (c) Anaconda")
    addresses = [
        attributes[name] for _, attributes, _ in page.elements for name in ("src", "href") if name in attributes
    ]
    assert {address.split(",")[0] for address in addresses} == {
        "data:image/svg+xml",
        "inspection.json",
        "https://arxiv.org/abs/2603.15031",
    }


def strip_of(words: list[str]) -> Page:
    """Return the part of a page that holds the words of a passage."""
    inspection = block_attn_res()
    text = render([replace(inspection, passage=replace(inspection.passage, words=words))], {})
    return Page('<div class="words"' + text.split('<div class="words"')[1].split("</div>")[0] + "</div>")


def test_words_keep_the_layout_of_the_text_and_the_tab_key_reaches_one_of_them():
    words = ["<s>", "The", " cat's", " <b>hat</b>", " sat.\n", "  On"]
    strip = strip_of(words)
    assert [text for _, text in strip.of("button")] == ["<s>", "The", "cat's", "<b>hat</b>", "sat.", "On"]
    assert strip.of("div")[0][1] == " " * 3 + "\n  "  # the white space between the buttons
    assert [attributes["tabindex"] for attributes, _ in strip.of("button")] == ["0", *["-1"] * 5]


@pytest.mark.parametrize(
    ("word", "label", "after", "spoken"),
    [
        ("\n\n", "↵↵", "\n\n", "white space: 2 line breaks"),
        ("  ", "␣␣", "", "white space: 2 spaces"),
        ("\t", "→", "", "white space: 1 tab"),
        ("\r\n    ", "↵", "\n    ", "white space: 1 line break, 4 spaces"),
        ("", "·", "", "nothing"),
    ],
)
def test_white_space_has_visible_signs_and_a_spoken_name(word, label, after, spoken):
    strip = strip_of([word])
    ((attributes, text),) = strip.of("button")
    assert (text, attributes["aria-label"], strip.of("div")[0][1]) == (label, spoken, after)


def test_two_models_share_the_words_if_they_are_equal():
    other = standard()
    different = replace(other, passage=replace(other.passage, words=["other", *WORDS[1:]]))
    shared, apart = (Page(render([block_attn_res(), one], {})) for one in (other, different))
    assert [len(page.of("div", **{"class": "words"})) for page in (shared, apart)] == [1, 2]
    assert [len(page.of("input", name="tint")) for page in (shared, apart)] == [2, 0]
    assert len(shared.of("div", **{"class": "plot"})) == 2


def test_key_numbers_stand_side_by_side_with_their_difference():
    text = render([block_attn_res(), standard()], {})
    table = Page("<table" + text.split('<table class="numbers"')[1].split("</table>")[0] + "</table>")
    cells = [content for _, content in table.of("td")]
    names = [content for attributes, content in table.of("th", scope="row")]
    rows = {name: cells[3 * i : 3 * i + 3] for i, name in enumerate(names)}
    assert rows["loss, in nats per token"] == ["1.83", "1.75", "\N{MINUS SIGN}0.0825"]
    assert rows["weight of the output on the embedding"] == ["0.375", "\N{EN DASH}", "\N{EN DASH}"]


def test_the_page_explains_the_matrix_of_a_model_without_depth_attention():
    reason = "as there is no depth attention"
    assert reason in render([standard()], {}) and reason not in render([block_attn_res()], {})
    assert f"The map of B shows the depth-mixing matrix at that word, {reason}" in render(
        [block_attn_res(), standard()], {}
    )
    assert "Both maps show the weight" in render([block_attn_res(), block_attn_res()], {})


def test_figures_are_images_with_their_titles_and_captions():
    page = Page(render([block_attn_res()], {"mixing": SVG, "mixing: B": SVG}))
    images = [attributes for attributes, _ in page.of("img")]
    assert [image["alt"].split(":")[0] for image in images] == ["Depth mixing", "Depth mixing, B"]
    assert {unquote(image["src"].removeprefix("data:image/svg+xml,")) for image in images} == {SVG}
    assert FIGURES["mixing"][2] in page.text


def test_files_beside_the_page_are_linked_and_no_others():
    page = Page(render([block_attn_res()], {}, ["inspection.json", "a b.csv"]))
    links = [(attributes["href"], text) for attributes, text in page.of("a") if "arxiv" not in attributes["href"]]
    assert links == [("inspection.json", "inspection.json"), ("a%20b.csv", "a b.csv")]
    assert "files beside this page:" not in Page(render([block_attn_res()], {})).text


def test_two_models_of_54_sublayers_make_a_page_under_five_megabytes():
    inspections = [full_attn_res(27, 256, seed) for seed in (0, 1)]
    text = render(inspections, {})
    assert len(inspections[0].depth.sources) == 55 and len(inspections[0].passage.words) == 256
    assert len(text.encode()) < 4_000_000  # a megabyte is left for figures
    rows = decoded(Page(text).given[1])
    assert max(np.abs(a - b.numpy()).max() for a, b in zip(rows, inspections[1].passage.weights)) <= 1e-5


def test_the_passage_of_a_deep_model_is_shortened_and_the_page_says_so(monkeypatch):
    sizes = {layers: passage_tokens(depth(layers)) for layers in (27, 80, 500)}
    assert (sizes[27], sizes[80], sizes[500]) == (256, 256, 31)
    assert 2 * sizes[500] * sum(range(1, 1002)) <= measuring.PASSAGE_BYTES
    assert passage_tokens(depth(10_000)) == 1
    assert "These are the first" not in Page(render([block_attn_res()], {})).text
    monkeypatch.setattr(measuring, "PASSAGE_BYTES", 2 * 15 * 8)  # two layers have 15 pairs of reader and source
    assert "These are the first 8 tokens of the text." in Page(render([block_attn_res()], {})).text


def test_too_many_inspections_and_unknown_figures_are_rejected():
    with pytest.raises(ValueError, match="3 inspections were given: a page shows one, or compares two"):
        render([block_attn_res()] * 3, {})
    with pytest.raises(ValueError, match=r"the kind of a figure must be one of depth_attention, .* got 'sizes'"):
        render([block_attn_res()], {"sizes": SVG})
