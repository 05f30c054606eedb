"""The page of an inspection works in Chromium: with mouse and keys, in light and dark, wide and narrow.

Playwright drives the installed browser. It needs no driver of the browser's version.
"""

import os
import shutil
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, expect, sync_playwright

from attnres.analysis import Inspection
from attnres.analysis.page import render

from .inspections import WORDS, block_attn_res, full_attn_res, standard

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
expect.set_options(timeout=60_000)  # a busy machine may take more than the default of five seconds
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed: apt-get install chromium"),
]

MINUS = "\N{MINUS SIGN}"
SVG = """<svg xmlns="http://www.w3.org/2000/svg" width="40"
 height="20"><rect fill="#fe0102" width="100%" height="100%"/></svg>"""
# Return the row, column, weight, mean and colour of all cells of a map.
CELLS = """place => {
    const {row, column, weight, mean, shown} = Bokeh.documents[place].roots()[0].renderers[0].data_source.data
    return row.map((r, i) => [r, column[i], weight[i], mean[i], shown[i]])
}"""
# Return the colours of a map: of its border, its names, its smallest and its largest value.
COLOURS = """place => {
    const plot = Bokeh.documents[place].roots()[0]
    const {palette} = plot.renderers[0].glyph.fill_color.transform
    return [plot.border_fill_color, plot.below[0].major_label_text_color, palette[0], palette[255]].map(String)
}"""
# Return the position of a cell on the screen.
POSITION = """([place, row, column]) => {
    const {el, frame} = [...Bokeh.index][place]
    const {x, y} = el.getBoundingClientRect()
    return [x + frame.x_scale.compute(column), y + frame.y_scale.compute(row)]
}"""


@pytest.fixture(scope="module")
def browser():
    with sync_playwright() as playwright:
        # Chromium cannot use its sandbox as root, which tests in containers often are.
        flags = ["--no-sandbox"] if hasattr(os, "geteuid") and os.geteuid() == 0 else []
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=flags)
        yield browser
        browser.close()


@pytest.fixture
def opened(browser: Browser, tmp_path: Path):
    """Return a function that opens the page of inspections. At the end, assert that it loaded and warned of nothing."""
    messages, requests, contexts = [], [], []

    def open_page(inspections: list[Inspection], width: int = 1280, scheme: str = "light") -> Page:
        path = tmp_path / "report.html"
        path.write_text(render(inspections, {"magnitudes": SVG}), encoding="utf-8")
        contexts.append(browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme))
        page = contexts[-1].new_page()
        page.set_default_timeout(60_000)
        page.on("console", lambda message: message.type in ("error", "warning") and messages.append(message.text))
        page.on("pageerror", lambda error: messages.append(str(error)))
        page.on("request", lambda request: requests.append(request.url))
        page.goto(path.as_uri())
        page.wait_for_selector("#reader[data-ready]")
        return page

    yield open_page
    assert messages == []
    assert [url for url in requests if not url.startswith(("file:", "data:"))] == []
    for context in contexts:
        context.close()


def wait_until(page: Page, holds: Callable[[], bool]) -> None:
    """Wait until `holds()` is true. The page's policy blocks Playwright's `wait_for_function`."""
    end = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < end
        page.wait_for_timeout(20)


def shown(value: float) -> str:
    """Return a number as the page writes it."""
    text = "0" if abs(value) < 5e-5 else f"{value:.4f}" if abs(value) < 0.01 else f"{value:.3f}"
    return text.replace("-", MINUS)


def assert_map_shows(page: Page, inspection: Inspection, token: int, place: int = 0) -> None:
    """Assert that the map with the index `place` shows the weights of an inspection at a token."""
    means = (inspection.depth_attention or inspection.mixing).mean
    cells = page.evaluate(CELLS, place)
    assert len(cells) == sum(map(len, inspection.passage.weights))
    for row, column, weight, mean, colour in cells:
        expected = inspection.passage.weights[row][column, token].item()
        assert parsed(weight) == pytest.approx(expected, abs=6e-4)
        assert mean == shown(means[row, column].item())
        assert colour**2 == pytest.approx(expected, abs=2e-5)  # colours follow square roots


def parsed(text: str) -> float:
    return float(text.replace(MINUS, "-"))


def test_the_map_shows_the_weights_of_the_clicked_word(opened):
    inspection = block_attn_res()
    page = opened([inspection])
    assert_map_shows(page, inspection, 0)
    page.locator(".words button").nth(5).click()
    assert_map_shows(page, inspection, 5)
    assert page.locator(".chosen").inner_text() == "Token 6 of 8: <b>hat</b>"
    pressed = page.locator('.words button[aria-pressed="true"]')
    assert pressed.all_inner_texts() == ["<b>hat</b>"]


def test_arrow_keys_go_through_the_words(opened):
    inspection = block_attn_res()
    page = opened([inspection])
    page.locator(".words button").first.focus()
    for key, token in (
        ("ArrowRight", 1),
        ("ArrowRight", 2),
        ("ArrowLeft", 1),
        ("End", 7),
        ("ArrowRight", 7),
        ("Home", 0),
        ("ArrowLeft", 0),
        ("ArrowDown", 4),  # the next word below is white space
        ("ArrowUp", 0),
    ):
        page.keyboard.press(key)
        assert page.evaluate("[...document.querySelectorAll('.words button')].indexOf(document.activeElement)") == token
    page.keyboard.press("ArrowRight")
    assert_map_shows(page, inspection, 1)
    # The tab key reaches only the chosen word.
    assert page.locator('.words button[tabindex="0"]').all_inner_texts() == [WORDS[1]]


@pytest.mark.parametrize("width", [1280, 390])
def test_a_cell_under_the_mouse_shows_its_numbers(opened, width):
    inspection = block_attn_res()
    page = opened([inspection], width)
    page.locator(".words button").nth(2).click()
    page.locator(".plot").scroll_into_view_if_needed()
    for row, column in ((3, 2), (4, 0)):
        page.mouse.move(*page.evaluate(POSITION, [0, row, column]))
        depth = inspection.depth
        tooltip = page.get_by_text(f"{depth.consumers[row]} reads {depth.sources[column]}")
        tooltip.wait_for()
        seen = [cell.inner_text() for cell in page.locator(".bk-Tooltip td").all()]
        weight, mean = inspection.passage.weights[row][column, 2], inspection.depth_attention.mean[row, column]
        assert seen == ["this token", shown(weight.item()), "mean of the text", shown(mean.item())]


def test_a_clicked_row_is_listed_with_the_largest_weight_first(opened):
    inspection = block_attn_res()
    page = opened([inspection])
    assert page.locator("select").input_value() == "4"  # the output
    page.locator(".plot").scroll_into_view_if_needed()
    page.mouse.click(*page.evaluate(POSITION, [0, 3, 1]))
    expect(page.locator("select")).to_have_value("3")
    weights = inspection.passage.weights[3][:, 0]
    order = weights.argsort(descending=True).tolist()
    assert page.locator(".row .name").all_inner_texts() == [inspection.depth.sources[source] for source in order]
    values = page.locator(".row .value:not(.heading)").all_inner_texts()
    assert values == [shown(weights[source].item()) for source in order]
    page.locator("select").select_option("attention 1")
    assert page.locator(".row .name").count() == 2


def test_the_difference_from_the_mean_is_shown_on_demand(opened):
    inspection = block_attn_res()
    page = opened([inspection])
    page.check("input[value=difference]")
    for row, column, *_, colour in page.evaluate(CELLS, 0):
        difference = inspection.passage.weights[row][column, 0] - inspection.depth_attention.mean[row, column]
        assert colour * abs(colour) == pytest.approx(difference.item(), abs=2e-5)
    ends = page.locator(".ticks span").all_inner_texts()
    assert ends[2] == "0" and ends[0].strip("≤\u00a0").replace(MINUS, "+") == ends[-1].strip("≥\u00a0")


def test_words_are_tinted_by_the_distance_of_their_weights_from_the_mean(opened):
    inspection = block_attn_res()
    page = opened([inspection])
    several = range(1, 5)
    far = sum(
        (weights - mean[: len(weights), None]).abs().sum(0) / 2
        for weights, mean in ((inspection.passage.weights[i], inspection.depth_attention.mean[i]) for i in several)
    ) / len(several)
    tints = page.evaluate(
        "[...document.querySelectorAll('.words button')].map(b => Number(b.style.getPropertyValue('--far')))"
    )
    assert tints == pytest.approx(((far - far.min()) / (far.max() - far.min())).tolist(), abs=1e-3)
    legend = [page.locator(f".tint-legend .{end}").inner_text() for end in ("least", "most")]
    assert legend == [shown(far.min().item()), shown(far.max().item())]


def test_two_models_that_read_the_same_words_have_one_strip_and_two_maps(opened):
    one, other = block_attn_res(), full_attn_res(2, len(WORDS))
    other = replace(other, passage=replace(other.passage, words=WORDS))
    page = opened([one, other])
    page.locator(".words button").nth(6).click()
    assert_map_shows(page, one, 6, place=0)
    assert_map_shows(page, other, 6, place=1)


def test_words_of_two_models_are_tinted_by_the_chosen_model(opened):
    page = opened([standard(), block_attn_res()])
    assert page.locator("[name=tint]").last.is_checked()  # the weights of A never differ
    assert "the same for every token" not in page.locator(".tint-legend").inner_text()
    page.locator("[name=tint]").first.check()
    assert "the same for every token" in page.locator(".tint-legend").inner_text()


def test_two_models_that_read_different_words_have_two_strips(opened):
    one, other = block_attn_res(), full_attn_res(2, 6)
    page = opened([one, other])
    page.locator(".words").last.locator("button").nth(4).click()
    assert_map_shows(page, one, 0, place=0)
    assert_map_shows(page, other, 4, place=1)


def test_entries_below_zero_have_their_own_hue(opened):
    inspection = standard()
    weights = [part.clone() for part in inspection.passage.weights]
    weights[3][1] = -0.5
    negative = replace(inspection, passage=replace(inspection.passage, weights=weights))
    page = opened([negative])
    assert page.locator(".ticks span").all_inner_texts() == [f"{MINUS}1.000", f"{MINUS}0.250", "0", "0.250", "1.000"]
    page.locator("select").select_option("MLP 1")
    assert f"{MINUS}0.500" in page.locator(".row .value").all_inner_texts()


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 390])
def test_nothing_is_wider_than_the_screen(opened, width, scheme):
    long = replace(standard(), model={**standard().model, "name": "folder/" * 40, "revision": "f" * 200})
    for inspections in (
        [block_attn_res()],
        [block_attn_res(), long],
        [full_attn_res(27, 32), full_attn_res(27, 32, 1)],
    ):
        page = opened(inspections, width, scheme)
        assert page.evaluate("document.documentElement.scrollWidth") == width
        boxes = page.locator(".plot").evaluate_all("all => all.map(one => one.getBoundingClientRect().toJSON())")
        assert all(box["width"] > 250 and box["right"] <= width for box in boxes)
        if len(boxes) == 2:  # side by side, or one below the other
            assert (boxes[0]["y"] == boxes[1]["y"]) == (width == 1280)


def test_the_map_follows_the_width_of_the_window(opened):
    page = opened([full_attn_res(27, 8)])
    page.set_viewport_size({"width": 390, "height": 900})
    drawn = page.locator(".bk-Figure")
    wait_until(page, lambda: drawn.evaluate("one => one.getBoundingClientRect().right") <= 390)
    assert page.evaluate("document.documentElement.scrollWidth") == 390


def test_maps_follow_the_light_and_dark_schemes(opened):
    page = opened([block_attn_res()])
    light = page.evaluate(COLOURS, 0)
    assert light[0] == "#ffffff"
    page.emulate_media(color_scheme="dark")
    wait_until(page, lambda: page.evaluate(COLOURS, 0)[0] != "#ffffff")
    dark = page.evaluate(COLOURS, 0)
    assert dark[1] != light[1] and dark[2:] == light[:1:-1]  # zero is pale in light, dark in dark
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(20, 21, 26)"
    assert page.locator(".card").evaluate("card => getComputedStyle(card).backgroundColor") == "rgb(255, 255, 255)"
    page.emulate_media(color_scheme="light")
    wait_until(page, lambda: page.evaluate(COLOURS, 0)[0] == "#ffffff")
    assert page.evaluate(COLOURS, 0) == light


def test_figures_are_drawn(opened):
    pixel = """async image => {
        await image.decode()
        const context = new OffscreenCanvas(40, 20).getContext("2d")
        context.drawImage(image, 0, 0)
        return [image.naturalWidth, image.naturalHeight, ...context.getImageData(39, 19, 1, 1).data]
    }"""
    assert opened([block_attn_res()]).locator(".card img").evaluate(pixel) == [40, 20, 254, 1, 2, 255]


def test_hostile_names_do_not_run(opened):
    hostile = '</script><img src=x onerror="console.error(1)">'
    inspection = block_attn_res()
    depth = replace(inspection.depth, consumers=(*inspection.depth.consumers[:-1], hostile))
    words = [hostile, *WORDS[1:]]
    page = opened([replace(inspection, depth=depth, passage=replace(inspection.passage, words=words))])
    page.locator(".plot").scroll_into_view_if_needed()
    page.mouse.move(*page.evaluate(POSITION, [0, 4, 0]))
    page.locator(".bk-Tooltip b").wait_for()
    assert page.locator(".bk-Tooltip b").inner_text() == hostile
    assert page.locator("img[src=x]").count() == 0
