"""The 15 benchmarks of the paper: what they are called, what the paper reports, and their data as lm_eval tasks.

The YAML files in `tasks/` say all of it once; this module reads them. Describing the benchmarks needs no lm_eval;
`load` does.
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache
from hashlib import sha256
from pathlib import Path
from textwrap import shorten
from typing import TYPE_CHECKING

import yaml

if TYPE_CHECKING:
    from lm_eval.tasks import TaskManager
    from lm_eval.tasks.manager import TaskDict

_PAPER_GROUP = "attnres_paper"
_PREFIX = "attnres_"


@dataclass(frozen=True)
class Benchmark:
    """One of the paper's benchmarks, and the one number of it that counts.

    Attributes:
        name: what `--tasks` takes, as `mmlu`.
        title: the paper's name, as `MMLU`.
        group: the lm_eval group, as `attnres_mmlu`.
        metric: key of the headline number in the group's results, as `acc,none`.
        category: `General`, `Math & code` or `Chinese`.
        dataset: its id on the Hub, as `cais/mmlu`.
        shots: examples in the prompt.
        baseline: what the paper reports for the standard model, in percent.
        attn_res: what it reports for Block AttnRes, in percent.
        runs_code: scoring runs programs that the model wrote.
        gated: the Hub gives it only to those who accepted its terms.
    """

    name: str
    title: str
    group: str
    metric: str
    category: str
    dataset: str
    shots: int
    baseline: float
    attn_res: float
    runs_code: bool = False
    gated: bool = False


class _DescriptionLoader(yaml.SafeLoader):
    """Reads task files without importing what their `!function` tags name."""


_DescriptionLoader.add_multi_constructor("!", lambda loader, tag, node: f"!{tag} {node.value}")


def task_path() -> Path:
    """The folder of task files, for `lm_eval run --include_path`."""
    return Path(__file__).parent / "tasks"


@cache
def benchmarks() -> dict[str, Benchmark]:
    """The benchmarks by name, in the paper's order."""
    groups = _read(f"{_PAPER_GROUP}.yaml")["task"]
    return {name: _describe(name) for name in (group.removeprefix(_PREFIX) for group in groups)}


def _read(name: str) -> dict:
    return yaml.load((task_path() / name).read_text(encoding="utf-8"), Loader=_DescriptionLoader)


def _describe(name: str) -> Benchmark:
    group = _read(f"{name}.yaml")
    (headline,) = group["aggregate_metric_list"]
    (filter_name,) = headline["filter_list"]
    metadata = group["metadata"]
    return Benchmark(
        name=name,
        title=group["group_alias"],
        group=group["group"],
        metric=f"{headline['metric']},{filter_name}",
        **{key: metadata[key] for key in metadata if key in Benchmark.__dataclass_fields__},
    )


def pick(tasks: str) -> list[Benchmark]:
    """The benchmarks that `tasks` names, in the paper's order: `paper` for all, or names with commas between.

    Raises:
        ValueError: a name that is none, or no name at all.
    """
    known = benchmarks()
    names = [name.strip() for name in tasks.split(",") if name.strip()]
    for name in names:
        if name not in known and name != "paper":
            similar = get_close_matches(name, known, n=1)
            hint = f" Did you mean {similar[0]}?" if similar else ""
            raise ValueError(f"There is no benchmark {name!r}.{hint} There is paper (all), {', '.join(known)}.")
    if not names:
        raise ValueError(f"No benchmark is named. There is paper (all), {', '.join(known)}.")
    return [benchmark for name, benchmark in known.items() if name in names or "paper" in names]


def load(benchmark: Benchmark, data: Path | None = None) -> "TaskDict":
    """The benchmark's tasks with their data, for `lm_eval.evaluator.evaluate`.

    Args:
        benchmark: one of [`benchmarks`].
        data: a folder with `ORG/NAME` inside, laid out as on the Hub; nothing is then read from the network. Without it
            the data set comes from the Hub or its cache.

    Raises:
        FileNotFoundError: the data set, or a part of it that the benchmark needs, is missing, in one line with what
            to do about it.
    """
    overrides = {}
    if data is not None:
        folder = Path(data) / benchmark.dataset
        if not folder.is_dir():
            raise _missing(benchmark, data, f"there is no folder {folder}")
        folder = folder.absolute()
        overrides = {"dataset_path": str(folder), "dataset_kwargs": {"cache_dir": str(_cache_of(folder))}}
    manager = task_manager()
    import datasets
    import huggingface_hub.constants
    from datasets.exceptions import DatasetsError
    from jinja2 import UndefinedError

    try:
        with _quiet_hub():
            # `TaskManager.load` takes no overrides for a group, and what it builds with is not public.
            group = manager._factory.build(
                manager.task_index[benchmark.group], overrides=overrides, registry=manager.task_index
            )
    except KeyError as error:
        raise _missing(benchmark, data, f"it has no split or column {error}") from error
    except ConnectionError as error:
        # Each attempt takes half a minute. What is in the cache loads without.
        datasets.config.HF_HUB_OFFLINE = huggingface_hub.constants.HF_HUB_OFFLINE = True
        raise _missing(benchmark, data, str(error)) from error
    except (OSError, ValueError, RuntimeError, UndefinedError) as error:
        raise _missing(benchmark, data, str(error)) from error
    except DatasetsError as error:
        raise _missing(benchmark, data, f"{error}: {error.__cause__}") from error
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
    # Folders share tags, such as `math_word_problems`, of which the index warns; nothing here goes by tag.
    log = logging.getLogger("lm_eval.tasks._index")
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        return lm_eval.tasks.TaskManager(
            include_path=[*(folders if found else []), task_path()], include_defaults=not found
        )
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


def _missing(benchmark: Benchmark, data: Path | None, reason: str) -> FileNotFoundError:
    """The error that names the benchmark, its data set, what is wrong and the remedy, in one line."""
    reason = reason.partition(" with any supported extension")[0]  # and a list of 150
    source = "on the Hub" if data is None else f"in {data}"
    folder = Path("DATA" if data is None else data) / benchmark.dataset
    remedy = f"`hf download --repo-type dataset {benchmark.dataset} --local-dir {folder}`"
    if data is None:
        remedy = f"be online, or where you are run {remedy} and give `--data DATA`"
    if benchmark.gated:
        page = f"https://huggingface.co/datasets/{benchmark.dataset}"
        remedy = f"accept the terms at {page}, run `hf auth login`, then {remedy}"
    return FileNotFoundError(
        f"{benchmark.title}: cannot read the data set {benchmark.dataset} {source}: "
        f"{shorten(reason, 240, placeholder=' ...').rstrip('.')}. To get it: {remedy}."
    )
