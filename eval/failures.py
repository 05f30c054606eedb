"""Why benchmarks have no result, told in as few lines as there are reasons."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum, auto
from pathlib import Path

from attnres.utils.wording import counted

from .benchmarks import Benchmark


class Reason(Enum):
    """What benchmarks can have in common; `OTHER` is of one alone."""

    RUNS_CODE = auto()
    ABSENT = auto()  # the data set is not where it is looked for, or the Hub cannot be reached
    OTHER = auto()


@dataclass(frozen=True)
class Failure:
    """Of one benchmark: all of it in one line, which names the benchmark and the remedy."""

    reason: Reason
    text: str


Failures = dict[Benchmark, Failure]


def told(failures: Mapping[Benchmark, Failure], data: Path | None) -> list[str]:
    """The failures, those of many benchmarks for one reason in one line."""
    lines = []
    for reason in Reason:
        these = {benchmark: failure for benchmark, failure in failures.items() if failure.reason is reason}
        if len(these) < 2 or reason is Reason.OTHER:
            lines += [failure.text for failure in these.values()]
        elif reason is Reason.RUNS_CODE:
            titles = " and ".join(benchmark.title for benchmark in these)
            lines.append(f"{titles} run programs that the model writes; --allow-code-execution allows it.")
        else:
            lines.append(_absent(list(these), data))
    return lines


def _absent(benchmarks: list[Benchmark], data: Path | None) -> str:
    where = "and the Hub cannot be reached" if data is None else f"as {data} does not hold them"
    titles = ", ".join(benchmark.title for benchmark in benchmarks)
    names = " ".join(dict.fromkeys(benchmark.dataset for benchmark in benchmarks if benchmark.dataset))
    folder = "DATA" if data is None else data
    download = f'for name in {names}; do hf download --repo-type dataset $name --local-dir "{folder}/$name"; done'
    remedy = (
        f"`{download}`"
        if data is not None
        else f"go online, or run `{download}` on a machine that is, and give --data DATA"
    )
    if gated := [benchmark.dataset for benchmark in benchmarks if benchmark.gated]:
        pages = " and ".join(f"https://huggingface.co/datasets/{name}" for name in gated)
        remedy = f"accept the terms at {pages}, run `hf auth login`, then {remedy}"
    return (
        f"{titles}: the data sets of these {counted(len(benchmarks), 'benchmark')} cannot be read, {where}. "
        f"To get them: {remedy}."
    )


__all__ = ["Failure", "Failures", "Reason", "told"]
