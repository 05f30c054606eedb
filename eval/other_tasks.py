"""Describe other tasks than the paper's, from lm_eval or your own folder, as a `Benchmark`.

A task can be reported if its number is a mean over items. The headline number is the first such metric of a task, or
the first metric that a group aggregates.
"""

import os
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from attnres.utils.wording import did_you_mean, install_command

from .paper import Benchmark
from .task_index import TaskConfig, find_task_manager, index_folders, member_name, member_names

# `dataset_path` may be a data set's id, or one of these file formats of `datasets`. Then the task names its own files.
_FORMATS = {"arrow", "csv", "json", "pandas", "parquet", "text", "webdataset", "xml"}
# Scorers that run generated programs in the sandbox.
_SANDBOXED_SCORERS = {"attnres.eval.code.humaneval", "attnres.eval.code.mbpp"}
# The two filters that most of the harness's tasks with numeric answers have.
_STRICT_AND_FLEXIBLE = {"strict-match", "flexible-extract"}


def describe(names: Collection[str], include_path: Path | None, paper: Collection[str]) -> list[Benchmark]:
    """Describe tasks of lm_eval and of your own folder.

    Args:
        names: Names of tasks or groups. Those in `paper` are skipped.
        include_path: The folder of your own task files.
        paper: The names of the paper's benchmarks.

    Returns:
        One benchmark per name that is not in `paper`, in the order of `names`.

    Raises:
        ValueError: A task does not exist, has no mean score to report, or takes the name of a benchmark of the paper.
            The message is one line.
    """
    try:
        import lm_eval  # noqa: F401
    except ModuleNotFoundError as error:
        others = ", ".join(name for name in names if name not in paper)
        raise ValueError(
            f"--tasks {others}: tasks that are not the paper's need lm_eval: {install_command('eval')}"
        ) from error
    if include_path is not None:
        if not include_path.is_dir():
            raise ValueError(f"--include-path {include_path} is not a directory.")
        your_tasks = index_folders([include_path], include_defaults=False).task_index
        if taken := [name for name in names if name in paper and name in your_tasks]:
            file = your_tasks[taken[0]].yaml_path
            raise ValueError(f"{taken[0]} is a benchmark of the paper. Give the task in {file} another name.")
    return [_describe(name, include_path, paper) for name in names if name not in paper]


def _describe(name: str, include_path: Path | None, paper: Collection[str]) -> Benchmark:
    """Describe one task or group. Raise ValueError in one line if it does not exist or cannot be reported."""
    index = find_task_manager(name, include_path).task_index
    if name not in index:
        hint = did_you_mean(name, [*paper, *index], otherwise_all=False)
        raise ValueError(
            f"There is no benchmark {name!r}.{hint} There is paper (all), {', '.join(paper)}, every task "
            f"that `lm_eval ls tasks` lists, and the tasks of --include-path.{_unreadable_files(include_path)}"
        )
    kind, config = index[name].kind.name, index[name].cfg or {}
    if kind == "PY_TASK":
        raise ValueError(f"{name} is a task with its own Python class, which attnres eval does not run: use lm_eval.")
    if kind == "TAG" or (kind == "GROUP" and not config.get("aggregate_metric_list")):
        members = sorted(index[name].tags) if kind == "TAG" else member_names(config)
        raise ValueError(f"{name} has no score for all of its tasks together. Name them: {','.join(members)}.")
    leaves = [*_leaves(config, index, {})]
    unsafe = [leaf for leaf in leaves if leaf.get("unsafe_code")]
    # The index writes a function as a path: the task file's folder, then the name after `!function`.
    if not all(os.path.basename(str(leaf.get("process_results"))) in _SANDBOXED_SCORERS for leaf in unsafe):
        raise ValueError(
            f"{name} runs generated programs outside the sandbox: use humaneval or mbpp, or score it by "
            "`process_results: !function attnres.eval.code.humaneval` (or `.mbpp`)."
        )
    datasets = {_dataset(leaf) for leaf in leaves}
    if len(datasets) > 1:
        raise ValueError(f"{name} reads several data sets. Name its tasks, one by one.")
    metric, second = _metrics_to_report(name, config, leaves[0])
    return Benchmark(
        name=name,
        title=str(config.get("group_alias") or name),
        group=name,
        metric=metric,
        second=second,
        category="Other",
        dataset=datasets.pop(),
        runs_code=bool(unsafe),
        include_path=include_path,
    )


def _leaves(config: TaskConfig, index: Mapping[str, Any], overrides: TaskConfig) -> Iterator[TaskConfig]:
    """Yield the configuration of each single task of a group, with the overrides of the groups above it."""
    if not isinstance(config.get("task"), list):
        yield {**config, **overrides}
        return
    # A group overrides keys of its tasks. Only the keys that this module reads matter here.
    keys = config.keys() & {"dataset_path", "filter_list", "metric_list", "unsafe_code"}
    group_overrides = {key: config[key] for key in keys}
    for item in config["task"]:
        entry = index.get(member_name(item))
        item_overrides = item if isinstance(item, dict) and "task" in item else {}
        merged = {**group_overrides, **overrides, **item_overrides}
        merged.pop("task", None)  # the member's name
        if entry is None:  # the member is defined within the group
            yield from _leaves(item if isinstance(item, dict) else {}, index, {**group_overrides, **overrides})
        elif entry.kind.name == "TAG":
            for task in sorted(entry.tags):
                yield from _leaves(index[task].cfg or {}, index, merged)
        else:
            yield from _leaves(entry.cfg or {}, index, merged)


def _dataset(leaf: TaskConfig) -> str | None:
    """Return the id of a task's data set on the Hub, or `None` if the task names files."""
    path = leaf.get("dataset_path")
    return None if not isinstance(path, str) or path in _FORMATS or os.path.exists(path) else path


def _metrics_to_report(name: str, config: TaskConfig, leaf: TaskConfig) -> tuple[str, str | None]:
    """Return the keys, `metric,filter`, of the headline number and of a second number.

    The second number uses the flexible filter where the headline uses the strict one, and the strict filter where the
    headline uses the flexible one. It is `None` if the task does not have both filters.
    """
    filters = [step["name"] for step in leaf.get("filter_list") or []] or ["none"]
    if aggregated := config.get("aggregate_metric_list"):
        headline = aggregated[0] if isinstance(aggregated, list) else aggregated
        metric, filter_list = headline["metric"], headline.get("filter_list") or filters
        filters = [filter_list] if isinstance(filter_list, str) else filter_list
    else:
        metrics = [*_metrics(leaf)]
        means = [metric for metric, is_mean in metrics if is_mean]
        if not means:
            raise ValueError(
                f"{name} has no metric that is a mean over items "
                f"({', '.join(metric for metric, _ in metrics)}), which a report needs: use lm_eval."
            )
        metric = means[0]
    first = filters[0]
    others = _STRICT_AND_FLEXIBLE.intersection(filters) - {first} if first in _STRICT_AND_FLEXIBLE else ()
    return f"{metric},{first}", next((f"{metric},{other}" for other in others), None)


def _metrics(leaf: TaskConfig) -> Iterator[tuple[str, bool]]:
    """Yield the name of each metric of a task, and whether it is a mean over items."""
    from lm_eval.api.metrics import mean
    from lm_eval.api.registry import DEFAULT_METRIC_REGISTRY, get_metric_aggregation

    default = [{"metric": metric} for metric in DEFAULT_METRIC_REGISTRY.get(leaf.get("output_type", ""), [])]
    for entry in leaf.get("metric_list") or default:
        metric = str(entry["metric"])
        if os.sep in metric:  # a function of the task's own module, written as a path
            metric = metric.rpartition(".")[2]
        aggregation = entry.get("aggregation")
        yield metric, aggregation == "mean" or (aggregation is None and get_metric_aggregation(metric) is mean)


def _unreadable_files(include_path: Path | None) -> str:
    """Return the end of a message: the task files that lm_eval cannot read and skips silently."""
    # A private name of the harness, because only its loader checks a file exactly: includes, functions, tags.
    from lm_eval.tasks._yaml_loader import load_yaml as load_task

    broken = []
    for path in sorted(include_path.rglob("*.yaml")) if include_path else []:
        try:
            load_task(path, resolve_func=False)
        except Exception as error:
            broken.append(f"{path} ({' '.join(str(error).split())[:120]})")
    return f" Not readable: {', '.join(broken)}." if broken else ""


__all__ = ["describe"]
