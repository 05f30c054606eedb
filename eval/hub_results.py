"""Results of `attnres eval` as the Hub reads them: files `.eval_results/*.yaml` of a model's repository.

The format: https://huggingface.co/docs/hub/eval-results. One file holds one number, of one benchmark in one setting.
Only whole benchmarks have one, whose data set has an id on the Hub. Reading needs no lm_eval.
"""

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import yaml
from huggingface_hub import EvalResultEntry, eval_result_entries_to_yaml, parse_eval_result_entries
from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id

from attnres.utils.files import atomic_write
from attnres.utils.yaml_files import load_yaml

if TYPE_CHECKING:
    from .rows import ReportRow

FOLDER = ".eval_results"

_SCORING = {"generate_until": "of generated answers", "multiple_choice": "by likelihood of the choices"}


@dataclass(frozen=True)
class HubResults:
    """What a run has for the Hub: entries by the names of their files, and why other benchmarks have none."""

    entries: dict[str, EvalResultEntry]
    left_out: list[str]


def make_results(rows: Sequence["ReportRow"], results: Mapping[str, Any], baseline: str | None = None) -> HubResults:
    """The entries of a report's rows.

    Values are percent with two decimals. `notes` say how the number came about and, if there is a baseline, how far it
    is from the baseline's.

    Args:
        rows: as from [`attnres.eval.rows.make_row`].
        results: of the model, as from [`attnres.eval.suite.collect`].
        baseline: the second model, as named in the command; of a directory only its own name is published.
    """
    entries, parts, homeless = {}, [], []
    for row in rows:
        if not _is_on_hub(row.benchmark.dataset):
            homeless.append(row.benchmark.title)
        elif row.items < row.whole:
            parts.append(f"{row.benchmark.title} ({row.items:,} of {row.whole:,} items)")
        else:
            entries[_file_name(row)] = EvalResultEntry(
                dataset_id=row.benchmark.dataset,
                task_id=row.benchmark.leaderboard or row.benchmark.name,
                value=round(float(row.score.value), 2),
                dataset_revision=row.revision,
                date=row.date,
                notes=_notes(row, results["software"], baseline),
            )
    reasons = {"only whole benchmarks are published": parts, "no data set with an id on the Hub": homeless}
    return HubResults(entries, [f"{', '.join(names)}: {reason}." for reason, names in reasons.items() if names])


def _is_on_hub(dataset: object) -> bool:
    """Whether that is an id such as `openai/gsm8k`."""
    try:
        validate_repo_id(dataset)
    except HFValidationError:
        return False
    return "/" in str(dataset)


def _file_name(row: "ReportRow") -> str:
    """Of the benchmark and the setting, whatever characters the name has; never a hidden file or one elsewhere."""
    name = quote(row.benchmark.name, safe="")
    return f"{'%2E' + name[1:] if name.startswith('.') else name}_{row.shots}shot.yaml"


def _notes(row: "ReportRow", software: Mapping[str, str], baseline: str | None) -> str:
    metric, answer = row.benchmark.metric.split(",")
    scoring = f"{metric}{'' if answer == 'none' else f' ({answer})'} {_SCORING.get(row.output_type, '')}".strip()
    facts = [f"{row.shots}-shot", f"{scoring} in percent", f"{row.items:,} items"]
    if row.second:
        facts.append(f"{' ('.join(row.benchmark.second.split(','))}) {row.second.score.value:.2f}")
    if row.score.stderr is not None:
        facts.append(f"standard error {row.score.stderr:.2f}")
    if row.cut:
        facts.append(f"{row.cut:.0%} of the prompts lost their beginning, being longer than the model's context")
    facts.append(f"lm-evaluation-harness {software['lm_eval']}, attnres {software['attnres']}")
    notes = f"{'; '.join(facts)}."
    if baseline is None or row.baseline is None:
        return notes
    difference = f"Difference from {_public(baseline)} ({row.baseline.value:.2f})"
    if (pair := row.pair) is None:
        return f"{notes} {difference}: {row.score.value - row.baseline.value:+.2f}."
    interval = f"{100 * pair.difference:+.2f} [{100 * pair.low:+.2f}, {100 * pair.high:+.2f}] at 95%"
    return f"{notes} {difference}, paired by item: {interval}, p = {pair.p_value:.2g}."


def _public(model: str) -> str:
    """Where a directory lies on this machine does not belong in results to publish."""
    return Path(model).resolve().name if Path(model).is_dir() else model


def write_results(out: Path, found: HubResults) -> list[Path]:
    """Write the entries to `out/.eval_results`, each file whole or not at all.

    Files of an earlier run that would be out of date go; those that this function did not write stay as they are.

    Returns:
        The files, in the order of the entries.

    Raises:
        FileExistsError: a file of that name is there that was not written by this function.
    """
    folder = out / FOLDER
    for path in sorted(folder.glob("*.yaml")):
        if path.name in found.entries:
            _check_own(path)
        elif _is_own(path):
            path.unlink()
    if found.entries:
        folder.mkdir(parents=True, exist_ok=True)
    for name, entry in found.entries.items():
        atomic_write(folder / name, _to_yaml(name, entry))
    return [folder / name for name in found.entries]


def _to_yaml(name: str, entry: EvalResultEntry) -> str:
    content = eval_result_entries_to_yaml([entry])
    return _head(name) + yaml.safe_dump(content, sort_keys=False, allow_unicode=True, width=math.inf)


def _head(name: str) -> str:
    """The first line, by which a file is known as its writer's: a copy under another name is its user's."""
    return f"# {name}, written by attnres eval\n"


def _is_own(path: Path) -> bool:
    return path.is_file() and path.read_bytes().startswith(_head(path.name).encode())


def _check_own(path: Path) -> None:
    if os.path.lexists(path) and not _is_own(path):
        raise FileExistsError(f"{path} was not written by attnres eval, and would be replaced. Rename or remove it.")


def read_results(folder: Path) -> dict[Path, list[EvalResultEntry]]:
    """The files of results in the directory of a run or a model, and what they say.

    Raises:
        FileNotFoundError: there are none.
        ValueError: a file is not as the Hub wants it, in one line that names it.
    """
    paths = sorted((folder / FOLDER).glob("*.yaml"))
    if not paths:
        raise FileNotFoundError(
            f"{folder} has no results to publish. attnres eval writes them to {FOLDER} there, of whole benchmarks "
            "(without --limit) whose data sets are on the Hub."
        )
    return {path: _read(path) for path in paths}


def _read(path: Path) -> list[EvalResultEntry]:
    try:
        content = load_yaml(path.read_text(encoding="utf-8"))
        if not isinstance(content, list) or not content:
            raise ValueError("it is no list of results")
        entries = [entry for item in content for entry in parse_eval_result_entries([item])]
        if len(entries) < len(content):
            raise ValueError("it holds a result that the Hub refused")
        for entry in entries:
            _check(entry)
    except (AttributeError, KeyError, OSError, RecursionError, TypeError, ValueError, yaml.YAMLError) as error:
        reason = " ".join(str(error).split()).rstrip(".")
        if isinstance(error, KeyError):
            reason = f"it lacks {error}"
        elif isinstance(error, AttributeError | TypeError):  # of the parser, which takes the form for granted
            reason = "a result is to have a dataset with id and task_id, and a value"
        raise ValueError(
            f"{path} holds no results as the Hub wants them: {reason}. Remove it; the same attnres eval command writes "
            "its own files again."
        ) from error
    return entries


def _check(entry: EvalResultEntry) -> None:
    """Raises ValueError: what the Hub asks of an entry, and its parser does not check."""
    if not _is_on_hub(entry.dataset_id):
        raise ValueError(f"its data set {_shortened(entry.dataset_id)} is no id such as ORG/NAME")
    if not _is_score(entry.value):
        raise ValueError(f"its value {_shortened(entry.value)} is no finite number")
    for field in ("task_id", "dataset_revision", "date", "notes"):
        value = getattr(entry, field)
        if not isinstance(value, str) and (field == "task_id" or value is not None):
            raise ValueError(f"its {field} {_shortened(value)} is no text (quotes make it one)")


def _is_score(value: object) -> bool:
    try:
        return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    except OverflowError:  # an integer beyond the largest float, which is what readers make of it
        return False


def _shortened(value: object) -> str:
    """A value in one line of a message; of a long one its beginning."""
    try:
        text = repr(value)
    except ValueError:  # Python writes no integer of more than 4300 digits, which YAML may give in hexadecimal
        return f"of {value.bit_length():,} bits" if isinstance(value, int) else f"of type {type(value).__name__}"
    return text if len(text) <= 100 else f"{text[:100]}..."


__all__ = ["FOLDER", "HubResults", "make_results", "read_results", "write_results"]
