"""The 15 benchmarks of the paper, and other tasks: what they are called and their data as lm_eval tasks.

Of the paper's, the YAML files in `tasks/` say all once; this module reads them. Describing these needs no lm_eval;
other tasks (`other_tasks`) and `load` do.
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from hashlib import sha256
from pathlib import Path
from textwrap import shorten
from typing import TYPE_CHECKING

import yaml

from attnres.utils.yaml_files import read_yaml

from . import data_folder

if TYPE_CHECKING:
    from lm_eval.tasks import TaskManager
    from lm_eval.tasks.manager import TaskDict

_PAPER_GROUP = "attnres_paper"
_PREFIX = "attnres_"


@dataclass(frozen=True)
class Benchmark:
    """One of the paper's benchmarks, or another task of lm_eval, and the one number of it that counts.

    Attributes:
        name: what `--tasks` takes, as `mmlu`.
        title: the paper's name, as `MMLU`.
        group: the lm_eval group, as `attnres_mmlu`.
        metric: key of the headline number in the group's results, as `acc,none`.
        second: key of a number beside it, whose filter takes the answer from the same texts in another way, as
            `exact_match,flexible-extract`; None if there is none.
        category: `General`, `Math & code` or `Chinese`; of other tasks `Other`, here and below.
        dataset: its id on the Hub, as `cais/mmlu`; None if the task file says where the data lies.
        leaderboard: what that data set's `eval.yaml` calls this benchmark, if the Hub has a leaderboard of it.
        shots: examples in the prompt; None if the task decides.
        baseline: what the paper reports for the standard model, in percent; None if nothing.
        attn_res: what it reports for Block AttnRes, in percent; None if nothing.
        runs_code: scoring runs programs that the model wrote.
        gated: the Hub gives it only to those who accepted its terms.
        include_path: the folder of task files that was given for it.
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


class DataMissing(FileNotFoundError):
    """A benchmark's data cannot be read; `is_absent` if there is none where it was looked for."""

    def __init__(self, text: str, is_absent: bool = False) -> None:
        super().__init__(text)
        self.is_absent = is_absent


class TaskFileLoader(yaml.SafeLoader):
    """Reads task files without importing what their `!function` tags name."""


TaskFileLoader.add_multi_constructor("!", lambda loader, tag, node: f"!{tag} {node.value}")


def task_path() -> Path:
    """The folder of task files, for `lm_eval run --include_path`."""
    return Path(__file__).parent / "tasks"


@cache
def benchmarks() -> dict[str, Benchmark]:
    """The benchmarks by name, in the paper's order."""
    groups = _read(f"{_PAPER_GROUP}.yaml")["task"]
    return {name: _describe(name) for name in (group.removeprefix(_PREFIX) for group in groups)}


def _read(name: str) -> dict:
    return read_yaml(task_path() / name, TaskFileLoader)


def _describe(name: str) -> Benchmark:
    group = _read(f"{name}.yaml")
    (headline,) = group["aggregate_metric_list"]
    filter_name, *others = headline["filter_list"]
    metadata = group["metadata"]
    return Benchmark(
        name=name,
        title=group["group_alias"],
        group=group["group"],
        metric=f"{headline['metric']},{filter_name}",
        second=f"{headline['metric']},{others[0]}" if others else None,
        **{key: metadata[key] for key in metadata if key in Benchmark.__dataclass_fields__},
    )


def pick(tasks: str, include_path: Path | None = None) -> list[Benchmark]:
    """The benchmarks that `tasks` names: the paper's in its order, then the others as they are named.

    Args:
        tasks: names with commas between: of the paper's benchmarks (`paper`: all), of tasks or groups of lm_eval, or of
            those in `include_path`. What the paper and lm_eval both have, as `mmlu`, is the paper's.
        include_path: a folder of the user's own task files.

    Raises:
        ValueError: a name that is none, no name at all, or a task that cannot be reported.
    """
    known = benchmarks()
    names = [*dict.fromkeys(name.strip() for name in tasks.split(",") if name.strip())]
    if not names:
        raise ValueError(f"No benchmark is named. There is paper (all), {', '.join(known)}.")
    paper = [benchmark for name, benchmark in known.items() if name in names or "paper" in names]
    if include_path or {*names} - {*known, "paper"}:
        from .other_tasks import describe

        return paper + describe([name for name in names if name != "paper"], include_path, known)
    return paper


def load(benchmark: Benchmark, data: Path | None = None) -> "TaskDict":
    """The benchmark's tasks with their data, for `lm_eval.evaluator.evaluate`.

    Args:
        benchmark: one of [`benchmarks`].
        data: a folder with `ORG/NAME` inside, laid out as on the Hub; nothing is then read from the network. Without it
            the data set comes from the Hub or its cache.

    Raises:
        FileNotFoundError: the data set, or a part of it that the benchmark needs, is missing, in one line with what
            to do about it.
        RuntimeError: a template of a task file does not end.
    """
    overrides, folder = {}, None
    if data is not None and benchmark.dataset is not None:
        folder = Path(data) / benchmark.dataset
        if not folder.is_dir():
            raise data_missing(benchmark, data, f"there is no folder {folder}", is_absent=True)
        try:
            data_folder.check(folder)
        except (OSError, ValueError) as error:
            raise data_missing(benchmark, data, str(error)) from error
        folder = folder.absolute()
        overrides = {"dataset_path": str(folder), "dataset_kwargs": {"cache_dir": str(_cache_of(folder))}}
    manager = task_manager()
    if benchmark.group not in manager.task_index or benchmark.include_path is not None:
        from .other_tasks import manager_of

        manager = manager_of(benchmark.group, benchmark.include_path)
    import datasets
    import huggingface_hub.constants
    from datasets.exceptions import DatasetsError

    from .templates import TemplateTooLong, bounded_templates

    try:
        with _quiet_hub(), bounded_templates():
            # `TaskManager.load` takes no overrides for a group, and what it builds with is not public.
            group = manager._factory.build(
                manager.task_index[benchmark.group], overrides=overrides, registry=manager.task_index
            )
    except TemplateTooLong:
        raise
    except KeyError as error:
        raise data_missing(benchmark, data, f"it has no split or column {error}") from error
    except ConnectionError as error:
        # Each attempt takes half a minute. What is in the cache loads without.
        datasets.config.HF_HUB_OFFLINE = huggingface_hub.constants.HF_HUB_OFFLINE = True
        raise data_missing(benchmark, data, str(error), is_absent=True) from error
    except DatasetsError as error:
        damaged = data_folder.damaged_file(folder) if folder else None
        raise data_missing(benchmark, data, damaged or f"{error}: {error.__cause__}") from error
    except Exception as error:  # of `datasets`, templates, a task's own functions: that benchmark fails, others go on
        raise data_missing(benchmark, data, str(error) or type(error).__name__) from error
    return manager.load(group)


@cache
def task_manager() -> "TaskManager":
    """The index of our tasks and of those of lm_eval that they are built on.

    To index all that lm_eval has takes seconds, so only the folders that the task files name are read, where they are.
    """
    import lm_eval.tasks

    stock = Path(lm_eval.tasks.__file__).parent
    names = [_read(f"{name}.yaml")["metadata"].get("stock_tasks") for name in benchmarks()]
    folders = [stock / name for name in names if name]
    found = all(folder.is_dir() for folder in folders)
    return index_of([*(folders if found else []), task_path()], include_defaults=not found)


def index_of(folders: list[Path], include_defaults: bool) -> "TaskManager":
    """The index of the task files in `folders`, and of all that lm_eval has."""
    import lm_eval.tasks

    # Folders share tags, such as `math_word_problems`, of which the index warns; nothing here goes by tag.
    log = logging.getLogger("lm_eval.tasks._index")
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        return lm_eval.tasks.TaskManager(include_path=folders, include_defaults=include_defaults)
    finally:
        log.setLevel(level)


@contextmanager
def _quiet_hub() -> Iterator[None]:
    """Without progress bars, and without a line for each attempt at a request."""
    import datasets
    from huggingface_hub.utils import logging as hub_logging

    enabled, verbosity = not datasets.are_progress_bars_disabled(), hub_logging.get_verbosity()
    datasets.disable_progress_bars()
    hub_logging.set_verbosity_error()
    try:
        yield
    finally:
        hub_logging.set_verbosity(verbosity)
        if enabled:
            datasets.enable_progress_bars()


def _cache_of(folder: Path) -> Path:
    """Where `datasets` keeps its form of a folder's data.

    Its own choice depends on the folder's README alone, so that it serves the data of one folder for those of another
    with the same README, and after a file is replaced what was in it before.
    """
    import datasets

    files = sorted(path for path in folder.rglob("*") if path.is_file())
    state = [(str(path), path.stat().st_size, path.stat().st_mtime_ns) for path in files]
    return Path(datasets.config.HF_DATASETS_CACHE) / "attnres" / sha256(repr(state).encode()).hexdigest()[:16]


def data_missing(benchmark: Benchmark, data: Path | None, reason: str, is_absent: bool = False) -> DataMissing:
    """The error that names the benchmark, its data set, what is wrong and the remedy, in one line."""
    reason = reason.partition(" with any supported extension")[0]  # and a list of 150
    if benchmark.dataset is None:
        reason = shorten(reason, 240, placeholder=" ...").rstrip(".")
        return DataMissing(f"{benchmark.title}: cannot load the data that its task file names: {reason}.")
    source = "on the Hub" if data is None else f"in {data}"
    folder = Path("DATA" if data is None else data) / benchmark.dataset
    remedy = f"`hf download --repo-type dataset {benchmark.dataset} --local-dir {folder}`"
    if data is None:
        remedy = f"go online, or run {remedy} on a machine that is, and give `--data DATA`"
    if benchmark.gated:
        page = f"https://huggingface.co/datasets/{benchmark.dataset}"
        remedy = f"accept the terms at {page}, run `hf auth login`, then {remedy}"
    return DataMissing(
        f"{benchmark.title}: cannot read the data set {benchmark.dataset} {source}: "
        f"{shorten(reason, 240, placeholder=' ...').rstrip('.')}. To get it: {remedy}.",
        is_absent,
    )
