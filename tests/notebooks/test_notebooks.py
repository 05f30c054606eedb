"""Tests that the stored notebooks are whole, and that each runs from top to bottom without network."""

import os
import re
import shlex
import subprocess
import sys
import tomllib
from itertools import pairwise
from pathlib import Path
from types import ModuleType

import nbformat
import pytest
from IPython.core.interactiveshell import InteractiveShell

from .. import forks

ROOT = Path(__file__).parents[2]
EXECUTE = ROOT / "notebooks" / "execute.py"
NAMES = ["fine_tune", "look_inside", "quickstart", "retrofit_and_heal"]
SECONDS = 180
NOWHERE = "http://127.0.0.1:9"  # a port without a listener
OFFLINE = {"HF_HUB_OFFLINE": "1"} | {
    name: NOWHERE for name in ("http_proxy", "https_proxy", "all_proxy", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY")
}
# A path from the root of a machine. Links and `</tag>` do not match.
MACHINE_PATH = re.compile(r"(?<![\w.:/<])/(?:home|root|tmp|usr|opt|work|Users|var|mnt|content)/\S+|\b[A-Z]:\\\\?Users")
# Numbers in the cells that decide how long they take -> the factor by which tests divide them.
SHORTER = {r"(?<=steps=)\d+": 20, "2_000_000": 5, r"(?<=\[:)(64|128)\b|\b64(?=:\])": 4, r"(?<=tokens=)\d+": 4}
BAD_CELLS = {"raises": "1 / 0", "hangs": "import time\ntime.sleep(60)"}


def stored(name: str) -> nbformat.NotebookNode:
    return nbformat.read(ROOT / "notebooks" / f"{name}.ipynb", as_version=4)


def code_cells(name: str) -> list[nbformat.NotebookNode]:
    return [cell for cell in stored(name).cells if cell.cell_type == "code"]


def run(*arguments: str, script: Path = EXECUTE, **environment: str) -> subprocess.CompletedProcess[str]:
    environment = {k: v for k, v in os.environ.items() if not k.startswith("ATTNRES_")} | OFFLINE | environment
    return forks.run(script, *arguments, env=environment, timeout=SECONDS + 60)


def shortened(name: str, folder: Path) -> Path:
    """Write a notebook with less training, text and held-out tokens, beside a copy of the script.

    What its cells call is the same; `make notebooks` runs it in full length.

    Returns:
        The path of the script.
    """
    notebook = stored(name)
    for cell in notebook.cells:
        for number, factor in SHORTER.items():
            cell.source = re.sub(number, lambda found, by=factor: str(-(-int(found[0]) // by)), cell.source)
    assert notebook != stored(name)
    nbformat.write(notebook, folder / f"{name}.ipynb")
    script = folder / "execute.py"
    script.write_text(EXECUTE.read_text())
    return script


def test_the_page_lists_all_notebooks():
    assert sorted(path.stem for path in (ROOT / "notebooks").glob("*.ipynb")) == NAMES
    assert sorted(re.findall(r"^\| \[`(\w+)\.ipynb`\]", (ROOT / "notebooks" / "README.md").read_text(), re.M)) == NAMES


# ---- as stored


@pytest.mark.parametrize("name", NAMES)
def test_every_cell_was_run_in_order_and_none_failed(name):
    nbformat.validate(stored(name))
    cells = code_cells(name)
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    outputs = [output for cell in cells for output in cell.outputs]
    assert len(outputs) > 5
    assert not [output for output in outputs if output.output_type == "error" or output.get("name") == "stderr"]


@pytest.mark.parametrize("name", NAMES)
def test_a_stored_notebook_is_small_and_shows_no_path_of_a_machine(name):
    path = ROOT / "notebooks" / f"{name}.ipynb"
    assert path.stat().st_size < 300_000
    assert MACHINE_PATH.findall(path.read_text(encoding="utf-8")) == []


ROOTS = ("home", "root", "tmp", "usr", "opt", "work", "Users", "var", "mnt", "content")
PATHS = [text for root in ROOTS for text in (f"/{root}/x/a.py:3", f"in /{root}/x/loss.png")]


@pytest.mark.parametrize("text", [*PATHS, "C:" + r"\\Users\\me"])
def test_the_pattern_finds_a_path_of_a_machine(text):
    assert MACHINE_PATH.search(text)


@pytest.mark.parametrize("name", NAMES)
def test_a_notebook_reads_like_an_article(name):
    """Every code cell is short and has prose before it, except after a short cell of settings."""
    cells = stored(name).cells
    assert cells[0].cell_type == "markdown" and cells[0].source.startswith("# ")
    for before, cell in pairwise(cells):
        if cell.cell_type == "code":
            assert len(cell.source.splitlines()) <= 25
            assert before.cell_type == "markdown" or len(before.source.splitlines()) <= 10
    assert "google.colab" in code_cells(name)[0].source


@pytest.mark.parametrize("name", NAMES)
def test_on_colab_the_first_cell_installs_the_package_from_a_checkout(name, tmp_path, monkeypatch):
    """Pip would look up a bare name in a package registry."""
    monkeypatch.setitem(sys.modules, "google.colab", ModuleType("google.colab"))
    monkeypatch.chdir(tmp_path)
    shell, requests, clones = InteractiveShell(), [], []
    shell.register_magic_function(requests.append, "line", "pip")
    shell.system = clones.append
    source = code_cells(name)[0].source
    missing = shell.run_cell(source).error_in_exec
    # With an address in `[project.urls]`, the cell clones the repository; see `docs/address.py`.
    address = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"].get("urls", {}).get("Repository")
    if address:
        assert clones == [f"git clone --quiet {address.rstrip('/')} ./attnres"]
        requests.clear()
    else:
        assert "./attnres holds no checkout of the repository" in str(missing)
    assert requests == []
    (tmp_path / "attnres").symlink_to(ROOT)
    shell.run_cell(source).raise_error()
    (words,) = map(shlex.split, requests)
    assert words == ["install", "--quiet", "./attnres[notebooks]"]
    project = tomllib.loads((tmp_path / "attnres" / "pyproject.toml").read_text())["project"]
    assert "notebooks" in project["optional-dependencies"]


@pytest.mark.parametrize("name", NAMES)
def test_every_link_to_a_file_leads_somewhere(name):
    prose = "\n".join(cell.source for cell in stored(name).cells if cell.cell_type == "markdown")
    links = re.findall(r"\]\((?!https?:)([^)#]+)", prose)
    assert links
    assert [link for link in links if not (ROOT / "notebooks" / link).exists()] == []


def test_the_stored_outputs_come_from_the_real_checkpoint():
    outputs = str([cell.outputs for cell in code_cells("retrofit_and_heal")])
    assert "260,032 parameters" in outputs


# ---- run


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_a_notebook_runs_from_top_to_bottom_without_network_and_files(name, tmp_path):
    done = run("--timeout", str(SECONDS), name, script=shortened(name, tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.startswith(f"{name}.ipynb: ")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "reason"),
    [("raises", "cell 2: ZeroDivisionError: division by zero"), ("hangs", "cell 2: not done after 5 seconds.")],
)
def test_the_error_of_a_notebook_that_fails_is_one_line_with_its_name(tmp_path, name, reason):
    script = tmp_path / "execute.py"
    script.write_text(EXECUTE.read_text())
    cells = [nbformat.v4.new_markdown_cell("Text."), nbformat.v4.new_code_cell(BAD_CELLS[name])]
    content = nbformat.writes(nbformat.v4.new_notebook(cells=cells))
    (tmp_path / f"{name}.ipynb").write_text(content)
    done = run("--save", "--timeout", "5", script=script)
    assert (done.returncode, done.stderr) == (1, f"{name}.ipynb, {reason}\n")
    assert (tmp_path / f"{name}.ipynb").read_text() == content


@pytest.mark.slow
def test_two_saved_runs_of_a_notebook_are_the_same_file(tmp_path):
    script, path = tmp_path / "execute.py", tmp_path / "good.ipynb"
    script.write_text(EXECUTE.read_text())
    cells = [nbformat.v4.new_code_cell("import os\nprint(os.listdir())")]
    path.write_text(nbformat.writes(nbformat.v4.new_notebook(cells=cells)))
    assert run("--save", script=script).returncode == 0
    first = path.read_text()
    (saved,) = nbformat.reads(first, as_version=4).cells
    assert saved.outputs[0].text == "[]\n" and saved.execution_count == 1 and saved.metadata == {}
    assert run("--save", script=script).returncode == 0
    assert path.read_text() == first


@pytest.mark.slow
def test_a_notebook_that_does_not_exist_is_bad_usage():
    """The script starts as a user starts it, and not in a fork, which has imported much already."""
    done = subprocess.run([sys.executable, EXECUTE, "nothing"], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "there is no notebook 'nothing'; there are fine_tune, " in done.stderr
