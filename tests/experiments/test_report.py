"""Pages and figures from stored runs: the pages of the repository show every run, and trials leave them alone."""

import re
import shutil
from dataclasses import asdict
from pathlib import Path

import pytest

from experiments import evidence, report, store
from experiments.declared import SELECTION_SEED, ScratchExperiment
from experiments.store import RunStore
from experiments.tables import scratch_tables

from .stored_runs import stored

ROOT = Path(__file__).parents[2]


@pytest.fixture
def copy(tmp_path, monkeypatch) -> Path:
    """Return a folder with copies of the pages and the stored runs."""
    monkeypatch.setattr(store, "ROOT", tmp_path)
    shutil.copytree(ROOT / "experiments" / "results", tmp_path / "experiments" / "results")
    for page in report.PAGES:
        (tmp_path / page).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / page, tmp_path / page)
    for name in ("models", "memory"):
        (tmp_path / "benchmarks" / "results").mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / "benchmarks" / "results" / f"{name}.json", tmp_path / "benchmarks" / "results")
    (tmp_path / "configuration").mkdir()
    return tmp_path


@pytest.mark.slow
def test_report_makes_all_tables_and_figures_of_the_repository_anew(copy):
    """All tables and figures are removed, and the command restores the pages byte for byte."""
    pages = {path: path.read_text() for path in (*report.pages(), report.tables_page())}
    for path, text in pages.items():
        # The address of the repository stands between marks too, and another command writes it.
        path.write_text(re.sub(r"(?s)(<!-- (?!end|address)[\w :-]+ -->\n)[^!].*?(?=<!-- end -->)", r"\1", text))
        assert path == report.tables_page() or len(path.read_text()) < len(text) - 100, path
    report.tables_page().write_text(pages[report.tables_page()].partition("\n## ")[0])
    figures = list((copy / "experiments" / "results").glob("*.png"))
    assert {figure.name for figure in figures} == {"summary.png", "claim-gpu.png"}
    for figure in figures:
        figure.unlink()
    report.write_all()
    assert {path: path.read_text() for path in pages} == pages
    assert all(figure.exists() for figure in figures)
    assert (copy / evidence.FILE).read_text() == (ROOT / evidence.FILE).read_text()


def test_all_tables_hold_every_stored_run():
    text = report.tables_page().read_text()
    for comparison in report.stored_comparisons():
        name = comparison.store.path.stem
        assert f"## {name}: result" in text and f"## {name}: lead" in text
    for experiment, runs in report.stored_healing():
        for title, sweep in experiment.sweeps.items():
            was_run = any(runs.find(asdict(recipe), SELECTION_SEED) for recipe in sweep.values())
            assert (f"## {runs.path.stem}: {title}\n" in text) == was_run
    stems = {path.stem for path in (ROOT / "experiments" / "results").glob("*.json")}
    assert stems == {line.split(":")[0].removeprefix("## ") for line in text.splitlines() if line.startswith("## ")}


def test_the_sentence_on_repeated_runs_has_their_numbers():
    """The page gives the distance of repeated runs as a root mean square."""
    first, again = (
        next(comparison for comparison in report.stored_comparisons() if comparison.store.path.stem == name)
        for name in ("ablations-cpu", "ablations-cpu-repeated")
    )
    distances = [
        run["after"] - other["after"]
        for run in again.store.runs
        for other in first.store.runs
        if (run["recipe"], run["seed"]) == (other["recipe"], other["seed"])
    ]
    assert len(distances) == 6
    mean_square = sum(distance**2 for distance in distances) / 6
    page = (ROOT / "experiments" / "RESULTS.md").read_text()
    sizes = sorted(map(abs, distances))
    words = f"{sizes[0]:.3f} to {sizes[-1]:.3f} apart, {mean_square**0.5:.3f} in root mean square"
    assert words in " ".join(page.split())


def test_healed_repetitions_end_equal_to_six_decimals():
    repeated, avx512 = (
        next(runs for _, runs in report.stored_healing() if runs.path.stem == f"healing-sixteen-{name}")
        for name in ("repeated", "avx512")
    )
    pairs = [
        (run["after"], other["after"])
        for run in avx512.runs
        for other in repeated.runs
        if (run["recipe"], run["seed"]) == (other["recipe"], other["seed"])
    ]
    assert len(pairs) == 10 and all(one == other for one, other in pairs)


@pytest.mark.slow
def test_a_trial_has_a_page_beside_its_file_and_is_on_no_other(copy):
    tiny = ScratchExperiment.load("claim-tiny")
    path = store.results_file("claim-tiny-trial")
    runs = [(label, 1e-3, tiny.tokens, 0, 5.0) for label in ("standard", "Full")]
    before = report.tables_page().read_text()
    report.write(
        tiny, path, scratch_tables(stored(tiny, path, runs).shown(rates=dict.fromkeys(tiny.connections, 1e-3)), {})
    )
    assert "<!-- claim-tiny-trial: result -->" in path.with_suffix(".md").read_text()
    report.write_all()
    assert report.tables_page().read_text() == before


@pytest.mark.slow
def test_a_new_run_of_the_repository_is_on_its_pages_at_once(copy):
    experiment = ScratchExperiment.load("depth-12")
    runs = RunStore(experiment, store.results_file("depth-12"))
    with runs.update():
        runs.runs = [run for run in runs.runs if run["seed"] != 2]
    report.write_all()
    page = copy / "experiments" / "RESULTS.md"
    assert "| Block, S=3 | 0.002 | 2 |" in page.read_text()
    shutil.copy(ROOT / "experiments" / "results" / "depth-12.json", runs.path)
    report.write(experiment, runs.path, {})
    assert page.read_text() == (ROOT / "experiments" / "RESULTS.md").read_text()
