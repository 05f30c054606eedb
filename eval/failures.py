"""The reasons why benchmarks have no result, and the lines that report them.

Each failure is one line that names the benchmark and the remedy. Where many benchmarks fail for one reason, such as an
unreachable Hub, one line covers them all.
"""

import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from pathlib import Path
from textwrap import shorten

from attnres.utils.wording import counted

from .data_folder import is_script_refused
from .paper import Benchmark


class Reason(Enum):
    """The kind of a failure. Several benchmarks can share the first two; `OTHER` concerns one benchmark alone."""

    RUNS_CODE = auto()  # it runs generated programs, and --allow-code-execution is missing
    ABSENT = auto()  # the data set is not in the folder, or the Hub cannot be reached
    OTHER = auto()


@dataclass(frozen=True)
class TaskFailure:
    """Why one benchmark has no result.

    Attributes:
        reason: The kind of the failure.
        text: One line that names the benchmark and the remedy.
    """

    reason: Reason
    text: str


Failures = dict[Benchmark, TaskFailure]


class DataMissing(FileNotFoundError):
    """The error for a benchmark whose data cannot be read.

    Args:
        text: One line for the user.
        is_absent: Whether the data is missing, as opposed to damaged.
    """

    def __init__(self, text: str, is_absent: bool = False) -> None:
        super().__init__(text)
        self.is_absent = is_absent


def data_missing(benchmark: Benchmark, data: Path | None, reason: str, is_absent: bool = False) -> DataMissing:
    """Return the error that names a benchmark, its data set, what is wrong and the remedy, in one line.

    Args:
        benchmark: The benchmark that cannot be loaded.
        data: The folder of `--data`; `None` for the Hub.
        reason: What is wrong. Long texts are cut.
        is_absent: Whether the data is missing, as opposed to damaged.
    """
    # `datasets` ends its message with the 150 extensions that it supports.
    reason = reason.partition(" with any supported extension")[0]
    reason = shorten(reason, 240, placeholder=" ...").rstrip(".")
    if benchmark.dataset is None:
        return DataMissing(f"{benchmark.title}: cannot load the data that its task file names: {reason}.")
    source = "on the Hub" if data is None else f"in {data}"
    folder = Path("DATA" if data is None else data) / benchmark.dataset
    # If the data of a script cannot be read without it, the Hub's own conversion can, where there is one.
    revision = " --revision refs/convert/parquet" if is_script_refused(reason) else ""
    download = f"hf download --repo-type dataset {benchmark.dataset}{revision} --local-dir {folder}"
    remedy = _remedy(download, data, [benchmark.dataset] if benchmark.gated else [])
    return DataMissing(
        f"{benchmark.title}: cannot read the data set {benchmark.dataset} {source}: {reason}. To get it: {remedy}.",
        is_absent,
    )


def describe_error(error: Exception) -> str:
    """Return an error of a task as one line.

    The messages of RuntimeError, and of ValueError from this package, are for users. Other errors come from code that
    did not expect its input, such as a scorer of the task, so their line also names the type and the place.
    """
    message = " ".join(str(error).split())
    place = traceback.extract_tb(error.__traceback__)[-1]
    is_ours = Path(place.filename).is_relative_to(Path(__file__).parents[1])
    if isinstance(error, RuntimeError) or (is_ours and isinstance(error, ValueError)):
        return message
    # Only the file's name: reports get published.
    return f"{type(error).__name__} at line {place.lineno} of {Path(place.filename).name}: {message or 'no message'}"


def code_refused(benchmark: Benchmark) -> TaskFailure:
    """Return the failure of a benchmark that runs generated programs without `--allow-code-execution`."""
    text = f"{benchmark.title} runs programs that the model writes; --allow-code-execution allows it."
    return TaskFailure(Reason.RUNS_CODE, text)


def failure_lines(failures: Mapping[Benchmark, TaskFailure], data: Path | None) -> list[str]:
    """Return one line for each failure, or for all failures that share a reason.

    Args:
        failures: The failures by benchmark.
        data: The folder of `--data`; `None` for the Hub.
    """
    lines = []
    for reason in Reason:
        group = {benchmark: failure for benchmark, failure in failures.items() if failure.reason is reason}
        if len(group) < 2 or reason is Reason.OTHER:
            lines += [failure.text for failure in group.values()]
        elif reason is Reason.RUNS_CODE:
            titles = " and ".join(benchmark.title for benchmark in group)
            lines.append(f"{titles} run programs that the model writes; --allow-code-execution allows it.")
        else:
            lines.append(_absent_line([*group], data))
    return lines


def _absent_line(benchmarks: Sequence[Benchmark], data: Path | None) -> str:
    """Return the line for several benchmarks whose data sets are not there."""
    place = "and the Hub cannot be reached" if data is None else f"as {data} does not hold them"
    titles = ", ".join(benchmark.title for benchmark in benchmarks)
    names = " ".join(dict.fromkeys(benchmark.dataset for benchmark in benchmarks if benchmark.dataset))
    folder = "DATA" if data is None else data
    download = f'for name in {names}; do hf download --repo-type dataset $name --local-dir "{folder}/$name"; done'
    gated = [benchmark.dataset for benchmark in benchmarks if benchmark.gated and benchmark.dataset]
    remedy = _remedy(download, data, gated)
    return (
        f"{titles}: the data sets of these {counted(len(benchmarks), 'benchmark')} cannot be read, {place}. "
        f"To get them: {remedy}."
    )


def _remedy(download: str, data: Path | None, gated: Sequence[str]) -> str:
    """Return the end of a message: how to get data sets by the command `download`, and the terms of `gated` ones."""
    remedy = f"`{download}`"
    if data is None:
        remedy = f"go online, or run {remedy} on a machine that is, and give `--data DATA`"
    if gated:
        pages = " and ".join(f"https://huggingface.co/datasets/{name}" for name in gated)
        remedy = f"accept the terms at {pages}, run `hf auth login`, then {remedy}"
    return remedy


__all__ = [
    "DataMissing",
    "Failures",
    "Reason",
    "TaskFailure",
    "code_refused",
    "data_missing",
    "describe_error",
    "failure_lines",
]
