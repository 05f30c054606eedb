"""Tasks that are not the paper's: those of lm_eval, and the user's own, described as a [`Benchmark`].

A task can be reported if its number is a mean over items: the first such metric of it, or of a group the first that it
aggregates.
"""

import os
import re
from collections.abc import Collection, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from attnres.utils.wording import did_you_mean, install_command
from attnres.utils.yaml_files import UnboundedYaml, load_yaml

from .benchmarks import Benchmark, TaskFileLoader, index_of, task_manager

if TYPE_CHECKING:
    from lm_eval.tasks import TaskManager

Config = Mapping[str, Any]

# What `datasets` reads from files that a task names itself.
_FORMATS = {"arrow", "csv", "json", "pandas", "parquet", "text", "webdataset", "xml"}
_CONTAINED = {"attnres.eval.code.humaneval", "attnres.eval.code.mbpp"}


def describe(names: Collection[str], include_path: Path | None, paper: Collection[str]) -> list[Benchmark]:
    """The tasks `names` of lm_eval and of the folder `include_path`; those of `paper` are left out.

    Raises:
        ValueError: one is not there, has no mean to report, or takes the name of a benchmark of the paper, in one line.
    """
    try:
        import lm_eval  # noqa: F401
    except ModuleNotFoundError as error:
        others = ", ".join(name for name in names if name not in paper)
        raise ValueError(
            f"{others}: not of the paper's. Other tasks need lm_eval: {install_command('eval')}"
        ) from error
    if include_path is not None:
        if not include_path.is_dir():
            raise ValueError(f"--include-path {include_path} is not a directory.")
        _check_bounded(include_path)
        own = index_of([include_path], include_defaults=False).task_index
        if taken := [name for name in names if name in paper and name in own]:
            file = own[taken[0]].yaml_path
            raise ValueError(f"{taken[0]} is a benchmark of the paper. Give the task in {file} another name.")
    return [_describe(name, include_path, paper) for name in names if name not in paper]


@cache
def manager_of(name: str, include_path: Path | None) -> "TaskManager":
    """An index with that task or group and all that it is made of, if there is such a task.

    To index all that lm_eval has takes up to half a minute: it is done only where its folders that have the name in a
    file, those that the paper's benchmarks are built on, and the user's lack something.
    """
    import lm_eval.tasks

    stock = Path(lm_eval.tasks.__file__).parent
    whole_word = re.compile(rb"(?<![\w-])%b(?![\w-])" % re.escape(name.encode()))
    files = (path for path in stock.rglob("*.yaml") if whole_word.search(path.read_bytes()))
    folders = sorted({stock / path.relative_to(stock).parts[0] for path in files})
    folders += [*task_manager().include_path, *([include_path] if include_path else [])]
    few = index_of(folders, include_defaults=False)
    if name not in few.task_index or _is_whole(name, few):
        return few
    return index_of(folders, include_defaults=True)


def _members(config: Config) -> list[str]:
    """What a group is made of."""
    members = config.get("task")
    return [_name(item) for item in members] if isinstance(members, list) else []


def _name(item: str | Config) -> str:
    return item if isinstance(item, str) else str(item.get("task", item.get("group")))


def _is_whole(name: str, manager: "TaskManager") -> bool:
    entry = manager.task_index.get(name)
    return entry is not None and all(_is_whole(member, manager) for member in _members(entry.cfg or {}))


def _describe(name: str, include_path: Path | None, paper: Collection[str]) -> Benchmark:
    index = manager_of(name, include_path).task_index
    if name not in index:
        hint = did_you_mean(name, [*paper, *index], otherwise_all=False)
        raise ValueError(
            f"There is no benchmark {name!r}.{hint} There is paper (all), {', '.join(paper)}, what "
            f"`lm_eval ls tasks` lists, and the tasks of --include-path.{_unread(include_path)}"
        )
    kind, config = index[name].kind.name, index[name].cfg or {}
    if kind == "PY_TASK":
        raise ValueError(f"{name} is a task of its own Python class, which attnres eval does not run: use lm_eval.")
    if kind == "TAG" or (kind == "GROUP" and not config.get("aggregate_metric_list")):
        members = sorted(index[name].tags) if kind == "TAG" else _members(config)
        raise ValueError(f"{name} has no number of its own. Name its tasks: {','.join(members)}.")
    leaves = [*_leaves(config, index, {})]
    unsafe = [leaf for leaf in leaves if leaf.get("unsafe_code")]
    if not all(os.path.basename(str(leaf.get("process_results"))) in _CONTAINED for leaf in unsafe):
        raise ValueError(
            f"{name} runs generated programs, and not in the sandbox: use humaneval or mbpp, or score it by "
            "`process_results: !function attnres.eval.code.humaneval` (or `.mbpp`)."
        )
    datasets = {_dataset(leaf) for leaf in leaves}
    if len(datasets) > 1:
        raise ValueError(f"{name} reads several data sets. Name its tasks, one by one.")
    metric, second = _metrics_to_report(name, config, leaves)
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


def _leaves(config: Config, index: Mapping[str, Any], overrides: Config) -> Iterator[Config]:
    """The configurations of the tasks of a group, of a tag in it, or of a task itself."""
    if not isinstance(config.get("task"), list):
        yield {**config, **overrides}
        return
    own = {key: config[key] for key in config.keys() & {"dataset_path", "filter_list", "metric_list", "unsafe_code"}}
    for item in config["task"]:
        entry = index.get(_name(item))
        more = {**own, **overrides, **(item if isinstance(item, dict) and "task" in item else {})}
        more.pop("task", None)
        if entry is None:  # defined within the group
            yield from _leaves(item if isinstance(item, dict) else {}, index, {**own, **overrides})
        elif entry.kind.name == "TAG":
            for task in sorted(entry.tags):
                yield from _leaves(index[task].cfg or {}, index, more)
        else:
            yield from _leaves(entry.cfg or {}, index, more)


def _dataset(leaf: Config) -> str | None:
    """Its id on the Hub, or None if the task names files."""
    path = leaf.get("dataset_path")
    return None if not isinstance(path, str) or path in _FORMATS or os.path.exists(path) else path


# The harness's names of the two filters that most of its tasks with numbers as answers have.
_STRICT_AND_FLEXIBLE = {"strict-match", "flexible-extract"}


def _metrics_to_report(name: str, config: Config, leaves: list[Config]) -> tuple[str, str | None]:
    """Return the keys, `metric,filter`, of the headline number and of the one beside it.

    The one beside it is of the flexible filter where the headline's is the strict one, and the other way round.
    """
    first = leaves[0]
    filters = [step["name"] for step in first.get("filter_list") or []] or ["none"]
    if aggregated := config.get("aggregate_metric_list"):
        headline = aggregated[0] if isinstance(aggregated, list) else aggregated
        metric, given = headline["metric"], headline.get("filter_list") or filters
        filters = [given] if isinstance(given, str) else given
    else:
        means = [metric for metric, mean in _metrics(first) if mean]
        if not means:
            raise ValueError(
                f"{name} has no metric that is a mean over items "
                f"({', '.join(metric for metric, _ in _metrics(first))}), which a report needs: use lm_eval."
            )
        metric = means[0]
    others = _STRICT_AND_FLEXIBLE.intersection(filters) - {filters[0]} if filters[0] in _STRICT_AND_FLEXIBLE else ()
    return f"{metric},{filters[0]}", next((f"{metric},{other}" for other in others), None)


def _metrics(leaf: Config) -> Iterator[tuple[str, bool]]:
    """The names of a task's metrics, and whether each is a mean."""
    from lm_eval.api.metrics import mean
    from lm_eval.api.registry import DEFAULT_METRIC_REGISTRY, get_metric_aggregation

    default = [{"metric": metric} for metric in DEFAULT_METRIC_REGISTRY.get(leaf.get("output_type"), [])]
    for entry in leaf.get("metric_list") or default:
        metric = str(entry["metric"])
        if os.sep in metric:  # a function of the task's own module
            metric = metric.rpartition(".")[2]
        aggregation = entry.get("aggregation")
        yield metric, aggregation == "mean" or (aggregation is None and get_metric_aggregation(metric) is mean)


def _unread(include_path: Path | None) -> str:
    """The task files that cannot be read, which lm_eval leaves out without a word."""
    from lm_eval.tasks._yaml_loader import load_yaml as load_task

    broken = []
    for path in sorted(include_path.rglob("*.yaml")) if include_path else []:
        try:
            load_task(path, resolve_func=False)
        except Exception as error:
            broken.append(f"{path} ({' '.join(str(error).split())[:120]})")
    return f" Not readable: {', '.join(broken)}." if broken else ""


def _check_bounded(include_path: Path) -> None:
    """Raise ValueError for a task file of the user, or a file that it includes, which lm_eval could not finish reading.

    lm_eval leaves out files that are not YAML; of these `_unread` tells.
    """
    pending, seen = sorted(include_path.rglob("*.yaml")), set()
    while pending:
        path = pending.pop()
        if path in seen or not path.is_file():
            continue
        seen.add(path)
        try:
            task = load_yaml(path.read_text(encoding="utf-8"), TaskFileLoader)
        except UnboundedYaml as error:
            raise ValueError(f"--include-path: {path} cannot be used: {error}.") from error
        except (ValueError, yaml.YAMLError):
            continue
        included = task.get("include", []) if isinstance(task, dict) else []
        pending += [path.parent / str(name) for name in (included if isinstance(included, list) else [included])]
