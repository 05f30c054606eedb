"""`attnres eval` writes files for the Hub: real runs on data sets that were cut to a few real items."""

import dataclasses
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

import pandas as pd
import pytest
import yaml
from datasets import Dataset
from datasets.arrow_writer import ArrowWriter
from huggingface_hub import EvalResultEntry, eval_result_entries_to_yaml, parse_eval_result_entries
from transformers import AutoModelForCausalLM, AutoTokenizer

from attnres.commands.errors import describe
from attnres.commands.eval import run_eval
from attnres.eval.benchmarks import benchmarks, pick
from attnres.eval.data_folder import revision
from attnres.eval.hub_results import FOLDER, HubResults, make_results, read_results, write_results
from attnres.eval.rows import ReportRow, Score, Shortened
from attnres.eval.start import EvalOptions, check_run

from ..hub.cards import result_error
from .synthetic import write_data_set

# Its first fixture evaluates models on all benchmarks.
pytestmark = pytest.mark.slow

ARC, GSM8K = "arc_challenge_25shot.yaml", "gsm8k_8shot.yaml"
ITEMS = {"allenai/ai2_arc": ("ARC-Challenge", 12), "openai/gsm8k": ("main", 3)}
COMMIT = "0123456789abcdef0123456789abcdef01234567"

TASK_FILE = """
task: {name}
dataset_path: {dataset}
dataset_name: ARC-Challenge
test_split: test
fewshot_split: train
num_fewshot: {shots}
output_type: multiple_choice
doc_to_text: "Question: {{{{question}}}} Answer:"
doc_to_target: "{{{{choices.label.index(answerKey)}}}}"
doc_to_choice: "{{{{choices.text}}}}"
metric_list: [{{metric: acc, aggregation: mean, higher_is_better: true}}]
"""


@pytest.fixture(scope="module")
def short_hub(hub, tmp_path_factory) -> Path:
    """Return a folder of two data sets as `hf download` writes them, cut to a few items."""
    folder = tmp_path_factory.mktemp("hub")
    for name, (config, items) in ITEMS.items():
        splits = {path.stem: pd.read_parquet(path) for path in (hub / name / config).glob("*.parquet")}
        splits["test"] = splits["test"][:items]
        write_data_set(folder / name, {config: splits})
        for path in [path for path in (folder / name).rglob("*") if path.is_file()]:
            record = folder / name / ".cache/huggingface/download" / f"{path.relative_to(folder / name)}.metadata"
            record.parent.mkdir(parents=True, exist_ok=True)
            record.write_text(f"{COMMIT}\netag\n{path.stat().st_mtime}\n")
    return folder


@pytest.fixture(scope="module")
def models(assets, tmp_path_factory) -> Path:
    """Return a folder with the pretrained model `source`, and `other`, which answers differently."""
    folder = tmp_path_factory.mktemp("models")
    source = assets / "checkpoints" / "stories260K-hf"
    shutil.copytree(source, folder / "source")
    model = AutoModelForCausalLM.from_pretrained(source)
    model.model.layers[2].self_attn.v_proj.weight.data.mul_(-3)
    model.save_pretrained(folder / "other")
    AutoTokenizer.from_pretrained(source).save_pretrained(folder / "other")
    return folder


@pytest.fixture(scope="module")
def evaluate(models, short_hub) -> Callable:
    """Return `evaluate(out, tasks, **options)`, which calls `run_eval` on the model `other`."""

    def run(out: Path, tasks: str, include_path: Path | None = None, **arguments) -> None:
        defaults = {"benchmarks": pick(tasks, include_path), "data": short_hub}
        run_eval(EvalOptions(str(models / "other"), out, **defaults | arguments))

    return run


@pytest.fixture(scope="module")
def evaluated(evaluate, models, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("evaluated") / "out"
    evaluate(out, "arc_challenge,gsm8k", baseline=str(models / "source"))
    return out


def entries(folder: Path) -> dict[str, EvalResultEntry]:
    """Return the one entry of each file, as the Hub's own parser reads it."""
    by_file = {}
    for path in sorted((folder / FOLDER).glob("*")):
        data = yaml.safe_load(path.read_text(encoding="utf-8"))
        (by_file[path.name],) = parse_eval_result_entries(data)
        assert eval_result_entries_to_yaml([by_file[path.name]]) == data
        assert result_error(data[0]) is None
    return by_file


def numbers(out: Path) -> dict[str, float]:
    """Return the headline numbers in a run's results.json, by benchmark."""
    results = json.loads((out / "results.json").read_text())["results"]
    groups = {name: results.get(benchmark.group, {}) for name, benchmark in benchmarks().items()}
    return {name: 100 * groups[name][benchmarks()[name].metric] for name in groups if groups[name]}


def test_each_benchmark_has_a_file_with_the_reports_number(evaluated):
    by_file = entries(evaluated)
    assert by_file.keys() == {ARC, GSM8K}
    arc, gsm8k = by_file[ARC], by_file[GSM8K]
    assert (arc.dataset_id, arc.task_id) == ("allenai/ai2_arc", "arc_challenge")
    assert (gsm8k.dataset_id, gsm8k.task_id) == ("openai/gsm8k", "gsm8k")
    assert {"arc_challenge": arc.value, "gsm8k": gsm8k.value} == pytest.approx(numbers(evaluated), abs=0.005)
    assert 0 < arc.value < 100  # 0 and 100% would not show whether the unit is percent
    row = next(line for line in (evaluated / "report.md").read_text().splitlines() if "ARC-Challenge" in line)
    assert row.split("|")[4].split("±")[0].strip() == f"{arc.value:.1f}"


def test_notes_describe_how_the_number_was_computed(evaluated):
    arc, gsm8k = entries(evaluated)[ARC].notes, entries(evaluated)[GSM8K].notes
    assert arc.startswith("25-shot; acc_norm by likelihood of the choices in percent; 12 items; standard error ")
    assert gsm8k.startswith("8-shot; exact_match (answer) of generated answers in percent; 3 items")
    for notes in (arc, gsm8k):
        assert f"; lm-evaluation-harness {version('lm_eval')}, attnres {version('attnres')}." in notes
        assert "100% of the prompts lost their beginning" in notes


def test_notes_have_the_reports_difference_from_the_baseline(evaluated, models):
    notes = entries(evaluated)[ARC].notes
    name, base, *points = re.search(
        r"Difference from (\S+) \(([\d.]+)\), paired by item: (\S+) \[(\S+), (\S+)\] at 95%", notes
    ).groups()
    assert name == "source" and str(models) not in notes
    base_number = json.loads((evaluated / "baseline.json").read_text())["results"]["attnres_arc_challenge"]
    assert float(base) == pytest.approx(100 * base_number["acc_norm,none"], abs=0.005)
    assert float(points[0]) == pytest.approx(entries(evaluated)[ARC].value - float(base), abs=0.011)
    difference, low, high = (f"{float(point):+.1f}" for point in points)
    assert f"| {difference} [{low}, {high}] |" in (evaluated / "report.md").read_text()


def test_date_and_revision_of_the_data_are_those_of_the_evaluation(evaluated):
    for entry in entries(evaluated).values():
        assert entry.dataset_revision == COMMIT
        date = datetime.fromisoformat(entry.date)
        assert date.tzinfo == UTC and entry.date.endswith("Z")
        stored = [json.loads(path.read_text()) for path in (evaluated / "model").glob("*_*.json")]
        assert entry.date in {result["date"] for result in stored}
        assert 0 <= (datetime.now(UTC) - date).total_seconds() < 3600


def test_data_changed_since_its_download_has_no_known_revision(evaluate, short_hub, tmp_path):
    data = tmp_path / "hub"
    shutil.copytree(short_hub, data)
    readme = data / "openai/gsm8k/README.md"
    os.utime(readme, (readme.stat().st_atime, readme.stat().st_mtime + 60))
    evaluate(tmp_path / "out", "gsm8k", data=data)
    (entry,) = entries(tmp_path / "out").values()
    assert entry.dataset_revision is None
    assert "Difference" not in entry.notes  # without a baseline


def test_the_revision_of_data_from_the_hub_is_the_commit_that_was_loaded(tmp_path):
    """`datasets` writes its converted files of a commit to a folder of that name, and reads them from there."""
    for commit in (COMMIT, "default-0123"):
        (tmp_path / commit).mkdir()
        table = Dataset.from_dict({"question": ["1 + 1 ="]})
        with ArrowWriter(features=table.features, path=str(tmp_path / commit / "gsm8k-test.arrow")) as writer:
            writer.write_table(table.data.table)
    splits = [Dataset.from_file(str(tmp_path / name / "gsm8k-test.arrow")) for name in (COMMIT, "default-0123")]
    assert revision("openai/gsm8k", {"test": splits[0]}) == COMMIT
    assert revision("json", {"test": splits[1]}) is None
    assert revision("openai/gsm8k", {"test": splits[0], "train": splits[1]}) is None
    assert revision(None, {"test": table}) is None


def test_part_of_a_benchmark_is_not_published_and_the_output_names_it(evaluate, tmp_path, capsys):
    evaluate(tmp_path / "out", "arc_challenge,gsm8k", limit=5)
    assert entries(tmp_path / "out").keys() == {GSM8K}  # all of its three items were asked
    output = capsys.readouterr().out.splitlines()
    assert "Not for the Hub: ARC-Challenge (5 of 12 items): only whole benchmarks are published." in output
    assert f"For the Hub, in {FOLDER} there: {GSM8K}. attnres push --results publishes them." in output


def test_a_resumed_run_writes_the_same_files_and_keeps_files_of_others(
    evaluate, evaluated, models, tmp_path, monkeypatch
):
    out = tmp_path / "out"
    shutil.copytree(evaluated, out)
    before = {path.name: path.read_bytes() for path in (out / FOLDER).iterdir()}
    (out / FOLDER / GSM8K).unlink()
    mine = {"mine.yaml": b"- my: own", "notes.txt": b"text", "copy.yaml": before[ARC]}
    stale = out / FOLDER / "arc_challenge_24shot.yaml"  # of another number of shots, which the task file had before
    stale.write_text(f"# {stale.name}, written by attnres eval\n")
    for name, content in mine.items():
        (out / FOLDER / name).write_bytes(content)
    arguments = {"baseline": str(models / "source")}
    check_run(EvalOptions(str(models / "other"), out, pick("arc_challenge,gsm8k"), **arguments))
    monkeypatch.setattr("attnres.commands.eval._load_model", lambda *_: pytest.fail("a model was loaded"))
    evaluate(out, "arc_challenge,gsm8k", **arguments)
    assert {path.name: path.read_bytes() for path in (out / FOLDER).iterdir()} == before | mine


def test_every_task_and_number_of_shots_has_a_separate_file_whatever_its_name(evaluate, tmp_path, capsys):
    folder = tmp_path / "tasks"
    folder.mkdir()
    names = {"arc_plain": 0, "arc_shown": 2, "../../up": 0, "/tmp/arc up": 1}
    for number, (name, shots) in enumerate(names.items()):
        (folder / f"{number}.yaml").write_text(TASK_FILE.format(name=name, shots=shots, dataset="allenai/ai2_arc"))
    rows = [{"question": "1 + 1 =", "choices": {"text": ["1", "2"], "label": ["A", "B"]}, "answerKey": "B"}] * 2
    (folder / "data.json").write_text("\n".join(json.dumps(row) for row in rows))
    local = TASK_FILE.format(name="local", shots=0, dataset="json")
    local = local.replace("dataset_name: ARC-Challenge", f"dataset_kwargs: {{data_files: {folder / 'data.json'}}}")
    (folder / "local.yaml").write_text(local.replace("test_split: test", "test_split: train"))
    out = tmp_path / "out"
    evaluate(out, ",".join([*names, "local"]), folder)
    by_file = entries(out)
    files = ["arc_plain_0shot.yaml", "arc_shown_2shot.yaml"]
    files += ["%2E.%2F..%2Fup_0shot.yaml", "%2Ftmp%2Farc%20up_1shot.yaml"]
    assert by_file.keys() == {*files}
    assert [by_file[file].task_id for file in files] == [*names]
    assert {entry.dataset_id for entry in by_file.values()} == {"allenai/ai2_arc"}
    assert by_file[files[0]].notes.startswith("0-shot; acc by") and by_file[files[1]].notes.startswith("2-shot; acc by")
    assert "Not for the Hub: local: no data set with an id on the Hub.\n" in capsys.readouterr().out
    assert {path.name for path in tmp_path.iterdir()} == {"tasks", "out"}
    assert [path for path in out.rglob("*.yaml") if path.parent != out / FOLDER] == []


# Entries, without a run


def row(name: str = "mmlu", **changes) -> ReportRow:
    return dataclasses.replace(ReportRow(benchmarks()[name], 4, 5, Score(50.126, 25), whole=4), **changes)


SOFTWARE = {"software": {"lm_eval": "0.4.13", "attnres": "1.0"}}


def test_entries_use_the_leaderboard_names_of_their_data_sets():
    hub_results = make_results([row(name) for name in ("gsm8k", "mmlu_pro", "gpqa_diamond", "mmlu")], SOFTWARE)
    named = {entry.dataset_id: entry.task_id for entry in hub_results.entries.values()}
    assert named.pop("cais/mmlu") == "mmlu"
    assert named == {"openai/gsm8k": "gsm8k", "TIGER-Lab/MMLU-Pro": "mmlu_pro", "Idavidrein/gpqa": "diamond"}


def test_notes_name_a_baseline_on_the_hub_and_have_no_interval_without_pairs():
    hub_results = make_results([row(baseline=Score(49.0, 1.0))], SOFTWARE, "meta-llama/Llama-3.2-1B")
    assert hub_results.entries["mmlu_5shot.yaml"].notes.endswith(
        "Difference from meta-llama/Llama-3.2-1B (49.00): +1.13."
    )
    assert hub_results.entries["mmlu_5shot.yaml"].value == 50.13


def test_notes_say_what_the_contexts_of_both_models_were_too_short_for():
    changes = {"baseline": Score(49.0, 1.0), "shortened": Shortened(0, 256, 512), "baseline_shortened": Shortened(1.0)}
    (entry,) = make_results([row(**changes)], SOFTWARE, "org/base").entries.values()
    assert "; answers had 256 instead of 512 tokens, half of the model's context; lm-eval" in entry.notes
    assert entry.notes.endswith(
        "Difference from org/base (49.00): +1.13. For org/base, 100% of the prompts lost their beginning, being longer "
        "than its context."
    )
    (entry,) = make_results([row(shortened=Shortened(0.5), is_percent=False)], SOFTWARE).entries.values()
    assert "acc, not in percent; " in entry.notes and "50% of the prompts lost their beginning" in entry.notes


def test_notes_hold_the_number_of_the_second_filter():
    hub_results = make_results([row("gsm8k", second=row("gsm8k", score=Score(61.5, 2)))], SOFTWARE)
    (entry,) = hub_results.entries.values()
    assert entry.value == 50.13
    assert "; exact_match (answer) in percent; " in entry.notes
    assert "; exact_match (flexible-extract) 61.50; " in entry.notes


@pytest.mark.parametrize("dataset", [None, "piqa", "https://huggingface.co/datasets/a/b", "/data/mine", "a/b/c"])
def test_without_an_id_on_the_hub_there_is_no_entry(dataset):
    hub_results = make_results([row(benchmark=dataclasses.replace(benchmarks()["mmlu"], dataset=dataset))], SOFTWARE)
    assert hub_results == HubResults({}, ["MMLU: no data set with an id on the Hub."])


def test_a_file_that_attnres_eval_did_not_write_is_not_replaced(tmp_path):
    hub_results = make_results([row()], SOFTWARE)
    (path,) = write_results(tmp_path, hub_results)
    path.write_text(path.read_text().partition("\n")[2])
    before = path.read_bytes()
    with pytest.raises(FileExistsError, match=r"mmlu_5shot\.yaml was not written by attnres eval.* Rename or remove"):
        write_results(tmp_path, hub_results)
    assert path.read_bytes() == before


# Reading result files


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"[]",
        b"dataset: {id: a/b}",
        b"- [unclosed",
        b"- {dataset: {id: a/b}, value: 1}",
        b"- {dataset: a/b, value: 1}",
        b"- {dataset: {id: a/b, task_id: c}, value: 1, source: {name: x}}",
        b"- {error: bad, filename: x.yaml}",
        b"\xff\xfe\x00",
    ],
)
def test_the_message_on_a_bad_result_file_is_one_line_that_names_it(content, evaluated, tmp_path):
    shutil.copytree(evaluated / FOLDER, tmp_path / "out" / FOLDER)
    bad = tmp_path / "out" / FOLDER / "bad.yaml"
    bad.write_bytes(content)
    with pytest.raises((AttributeError, LookupError, TypeError, ValueError, yaml.YAMLError)) as error:
        read_results(tmp_path / "out")
    line, is_foreseen = describe(error.value)
    assert str(bad) in line and "\n" not in line
    assert is_foreseen


def test_reading_a_folder_without_results_raises_an_error_with_the_remedy(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"has no results to publish\. .* \(without --limit\)"):
        read_results(tmp_path)


def test_reading_needs_no_harness(evaluated, tmp_path):
    code = (
        "import sys; sys.modules |= dict.fromkeys(('lm_eval', 'matplotlib', 'datasets'))\n"
        "from pathlib import Path; from attnres.eval.hub_results import read_results\n"
        "assert len(read_results(Path(sys.argv[1]))) == 2"
    )
    done = subprocess.run([sys.executable, "-c", code, evaluated], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
