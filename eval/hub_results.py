"""Write and read evaluation results in the Hub's format: files `.eval_results/*.yaml` of a model's repository.

The format: https://huggingface.co/docs/hub/eval-results. One file holds one number, of one benchmark with one number of
shots. Only benchmarks that ran on all their items, and whose data set has an id on the Hub, get a file. Reading needs
no lm_eval, so that `attnres push` works without it.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import yaml
from huggingface_hub import EvalResultEntry, eval_result_entries_to_yaml, parse_eval_result_entries

from attnres.utils.errors import about
from attnres.utils.files import atomic_write
from attnres.utils.hub import is_hub_id

if TYPE_CHECKING:
    from .rows import ReportRow, Shortened

FOLDER = ".eval_results"

# The harness's name for the kind of request -> the words in `notes`.
_SCORING = {"generate_until": "of generated answers", "multiple_choice": "by likelihood of the choices"}


@dataclass(frozen=True)
class HubResults:
    """The results of a run for the Hub.

    Attributes:
        entries: The entries by the names of their files.
        left_out: One line for each reason why benchmarks have no entry.
    """

    entries: dict[str, EvalResultEntry]
    left_out: list[str]


def make_results(rows: Sequence["ReportRow"], results: Mapping[str, Any], baseline: str | None = None) -> HubResults:
    """Return the entries of a report's rows.

    Values are percent with two decimals. `notes` say how the number was computed and, if there is a baseline, how far
    it is from the baseline's number.

    Args:
        rows: The rows, from [`attnres.eval.rows.make_row`].
        results: The model's results, from [`attnres.eval.suite.collect`].
        baseline: The second model as named in the command. Only the last part of a directory's path is published.
    """
    entries, incomplete, not_on_hub = {}, [], []
    for row in rows:
        dataset = row.benchmark.dataset
        if dataset is None or "/" not in dataset or not is_hub_id(dataset):
            not_on_hub.append(row.benchmark.title)
        elif row.items < row.whole:
            incomplete.append(f"{row.benchmark.title} ({row.items:,} of {row.whole:,} items)")
        else:
            entries[_file_name(row)] = EvalResultEntry(
                dataset_id=dataset,
                task_id=row.benchmark.leaderboard or row.benchmark.name,
                value=round(float(row.score.value), 2),
                dataset_revision=row.revision,
                date=row.date,
                notes=_notes(row, results["software"], baseline),
            )
    reasons = {"only whole benchmarks are published": incomplete, "no data set with an id on the Hub": not_on_hub}
    return HubResults(entries, [f"{', '.join(names)}: {reason}." for reason, names in reasons.items() if names])


def _file_name(row: "ReportRow") -> str:
    """Return the file name for a benchmark and its number of shots."""
    # A task's name may contain any characters. The file must be visible, and in this folder.
    name = quote(row.benchmark.name, safe="")
    return f"{'%2E' + name[1:] if name.startswith('.') else name}_{row.shots}shot.yaml"


def _notes(row: "ReportRow", software: Mapping[str, str], baseline: str | None) -> str:
    """Return the text on how a number was computed."""
    metric, filter_name = row.benchmark.metric.split(",")
    name = metric if filter_name == "none" else f"{metric} ({filter_name})"
    scoring = f"{name} {_SCORING.get(row.output_type, '')}".strip()
    unit = " in percent" if row.is_percent else ", not in percent"
    facts = [f"{row.shots}-shot", f"{scoring}{unit}", f"{row.items:,} items"]
    if row.second and row.benchmark.second:
        second_metric, second_filter = row.benchmark.second.split(",")
        facts.append(f"{second_metric} ({second_filter}) {row.second.score.value:.2f}")
    if row.score.stderr is not None:
        facts.append(f"standard error {row.score.stderr:.2f}")
    facts += _shortened_facts(row.shortened, "the model's")
    facts.append(f"lm-evaluation-harness {software['lm_eval']}, attnres {software['attnres']}")
    notes = f"{'; '.join(facts)}."
    if baseline is None or row.baseline is None:
        return notes
    name = _public_name(baseline)
    difference = f"Difference from {name} ({row.baseline.value:.2f})"
    if (pair := row.pair) is None:
        difference = f"{difference}: {row.score.value - row.baseline.value:+.2f}."
    else:
        interval = f"{100 * pair.difference:+.2f} [{100 * pair.low:+.2f}, {100 * pair.high:+.2f}] at 95%"
        difference = f"{difference}, paired by item: {interval}, p = {pair.p_value:.2g}."
    limits = "; ".join(_shortened_facts(row.baseline_shortened, "its"))
    return f"{notes} {difference}{f' For {name}, {limits}.' if limits else ''}"


def _shortened_facts(shortened: "Shortened", whose: str) -> list[str]:
    """Return what a model's context was too short for, as clauses of `notes`."""
    facts = []
    if shortened.cut:
        facts.append(f"{shortened.cut_percent} of the prompts lost their beginning, being longer than {whose} context")
    if shortened.answer_tokens is not None:
        facts.append(
            f"answers had {shortened.answer_tokens} instead of {shortened.task_answer_tokens} tokens, half of {whose} "
            "context"
        )
    return facts


def _public_name(model: str) -> str:
    """Return a model's id, or the last part of a directory's path. The rest of a path is private."""
    return Path(model).resolve().name if Path(model).is_dir() else model


def write_results(out: Path, results: HubResults) -> list[Path]:
    """Write the entries to `out/.eval_results`, each file as a whole or not at all.

    Outdated files of an earlier run are removed. Files that this function did not write stay as they are.

    Args:
        out: The folder of the run.
        results: The entries.

    Returns:
        The files, in the order of the entries.

    Raises:
        FileExistsError: A file of the same name exists that this function did not write.
    """
    folder = out / FOLDER
    for path in sorted(folder.glob("*.yaml")):
        if path.is_file() and is_written_here(path.name, path.read_bytes()):
            if path.name not in results.entries:
                path.unlink()
        elif path.name in results.entries:
            raise FileExistsError(
                f"{path} was not written by attnres eval, and would be replaced. Rename or remove it."
            )
    if results.entries:
        folder.mkdir(parents=True, exist_ok=True)
    for name, entry in results.entries.items():
        atomic_write(folder / name, _to_yaml(name, entry))
    return [folder / name for name in results.entries]


def _to_yaml(name: str, entry: EvalResultEntry) -> str:
    content = eval_result_entries_to_yaml([entry])
    return _head(name) + yaml.safe_dump(content, sort_keys=False, allow_unicode=True, width=math.inf)


def _head(name: str) -> str:
    """Return the first line of a file. It holds the file's name, so that a copy of yours under another name is kept."""
    return f"# {name}, written by attnres eval\n"


def is_written_here(name: str, content: bytes) -> bool:
    """Return whether `write_results` wrote the file of this name and content."""
    return content.startswith(_head(name).encode())


def read_results(folder: Path) -> dict[Path, list[EvalResultEntry]]:
    """Return the entries of each result file in the directory of a run or a model.

    Raises:
        FileNotFoundError: There are no result files.
        ValueError: A file is not in the Hub's format. Errors of any kind have a note that names the file.
    """
    paths = sorted((folder / FOLDER).glob("*.yaml"))
    if not paths:
        raise FileNotFoundError(
            f"{folder} has no results to publish. attnres eval writes them to {FOLDER} there, of whole benchmarks "
            "(without --limit) whose data sets are on the Hub."
        )
    return {path: _read(path) for path in paths}


def _read(path: Path) -> list[EvalResultEntry]:
    """Return the entries of a file. Any error has a note that names it."""
    with about(path, "Remove it; the same attnres eval command writes its files again."):
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
        # One by one, because the parser leaves out an entry that the Hub has refused.
        entries = [entry for item in content for entry in parse_eval_result_entries([item])]
        if not entries or len(entries) < len(content):
            raise ValueError("each result must be in the Hub's format.")
    return entries


__all__ = ["FOLDER", "HubResults", "is_written_here", "make_results", "read_results", "write_results"]
