"""The options of one evaluation, which every step of a run receives."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from .paper import Benchmark


@dataclass(frozen=True)
class EvalOptions:
    """What to evaluate, and how.

    Attributes:
        model: The directory or Hub id of the model.
        out: The folder for results. A stopped run with the same `out` resumes there.
        benchmarks: The benchmarks, from [`attnres.eval.benchmarks.pick`].
        baseline: The directory or Hub id of a second model, which is compared with the first item by item.
        data: A folder that holds the data sets as `ORG/NAME`, read instead of the Hub.
        limit: How many items of each task are asked, from the first; `None` for all.
        batch_size: The number of sequences at a time. It is halved when memory runs out.
        allow_code_execution: Whether programs that the model writes may run, in a sandbox.
        seed: The seed of the prompts.
    """

    model: str
    out: Path
    benchmarks: Sequence[Benchmark]
    baseline: str | None = None
    data: Path | None = None
    limit: int | None = None
    batch_size: int = 8
    allow_code_execution: bool = False
    seed: int = 0


__all__ = ["EvalOptions"]
