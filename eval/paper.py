"""The 15 benchmarks of the paper, described by the YAML files in `tasks/`.

The task files state each fact once, and this module reads them. It does not import lm_eval, so that the command line
lists the benchmarks quickly. `other_tasks` describes other tasks as a `Benchmark` too.
"""

from dataclasses import dataclass
from functools import cache
from pathlib import Path

import yaml

from attnres.utils.yaml_files import read_yaml

_PAPER_GROUP = "attnres_paper"
_PREFIX = "attnres_"


@dataclass(frozen=True)
class Benchmark:
    """One of the paper's benchmarks, or another task of lm_eval, with its one headline number.

    Attributes:
        name: The name that `--tasks` takes, such as `mmlu`.
        title: The paper's name, such as `MMLU`.
        group: The lm_eval group, such as `attnres_mmlu`.
        metric: The key of the headline number in the group's results, such as `acc,none`.
        second: The key of a second number, whose filter extracts the answers from the same texts in another way, such
            as `exact_match,flexible-extract`. `None` if there is none.
        category: `General`, `Math & code` or `Chinese`. `Other` for tasks that are not the paper's.
        dataset: The data set's id on the Hub, such as `cais/mmlu`. `None` if the task file names data files.
        leaderboard: The name of this benchmark in the data set's `eval.yaml`. `None` if the Hub has no leaderboard for
            it.
        shots: The number of examples in the prompt. `None` if the task decides.
        baseline: The paper's number for the standard model in percent. `None` if it reports none.
        attn_res: The paper's number for Block AttnRes in percent. `None` if it reports none.
        runs_code: Whether scoring runs programs that the model wrote.
        gated: Whether the Hub requires you to accept terms before the download.
        include_path: The folder of your own task files, given by `--include-path`. `None` if you gave none.
    """

    name: str
    title: str
    group: str
    metric: str
    category: str
    dataset: str | None
    second: str | None = None
    leaderboard: str | None = None
    shots: int | None = None
    baseline: float | None = None
    attn_res: float | None = None
    runs_code: bool = False
    gated: bool = False
    include_path: Path | None = None


class TaskFileLoader(yaml.SafeLoader):
    """A YAML loader that reads task files without importing the functions that their `!function` tags name."""


TaskFileLoader.add_multi_constructor("!", lambda loader, tag, node: f"!{tag} {node.value}")


def task_path() -> Path:
    """Return the folder of the task files, for `lm_eval run --include_path`."""
    return Path(__file__).parent / "tasks"


@cache
def benchmarks() -> dict[str, Benchmark]:
    """Return the paper's benchmarks by name, in the paper's order."""
    groups = _read_task_file(_PAPER_GROUP)["task"]
    return {name: _describe(name) for name in (group.removeprefix(_PREFIX) for group in groups)}


@cache
def stock_folders() -> tuple[str, ...]:
    """Return the folders of lm_eval's own task files that the benchmarks build on, such as `mmlu/default`."""
    folders = (_read_task_file(name)["metadata"].get("stock_tasks") for name in benchmarks())
    return tuple(folder for folder in folders if folder)


def _read_task_file(name: str) -> dict:
    return read_yaml(task_path() / f"{name}.yaml", TaskFileLoader)


def _describe(name: str) -> Benchmark:
    group = _read_task_file(name)
    (headline,) = group["aggregate_metric_list"]
    filter_name, *others = headline["filter_list"]
    metadata = group["metadata"]
    return Benchmark(
        name=name,
        title=group["group_alias"],
        group=group["group"],
        metric=f"{headline['metric']},{filter_name}",
        second=f"{headline['metric']},{others[0]}" if others else None,
        # The other fields stand under their own names.
        **{key: metadata[key] for key in metadata if key in Benchmark.__dataclass_fields__},
    )


__all__ = ["Benchmark", "TaskFileLoader", "benchmarks", "stock_folders", "task_path"]
