"""Choose benchmarks by name and load their data: the entry to everything that can be evaluated.

Describing the paper's benchmarks needs no lm_eval. Other tasks and `load` need it.
"""

from collections.abc import Generator
from contextlib import contextmanager
from functools import cache
from hashlib import sha256
from pathlib import Path
from textwrap import shorten
from typing import TYPE_CHECKING, Any

from . import data_folder
from .failures import DataMissing, data_missing
from .other_tasks import describe
from .paper import Benchmark, benchmarks, task_path
from .task_index import find_task_manager, task_manager

if TYPE_CHECKING:
    from lm_eval.tasks.manager import TaskDict


def pick(tasks: str, include_path: Path | None = None) -> list[Benchmark]:
    """Return the benchmarks that `tasks` names.

    Args:
        tasks: Comma-separated names of the paper's benchmarks (`paper` for all of them), of tasks or groups of lm_eval,
            or of tasks in `include_path`. A name that both the paper and lm_eval have, such as `mmlu`, means the
            paper's.
        include_path: A folder of your own task files.

    Returns:
        The paper's benchmarks in its order, then the others in the order of `tasks`.

    Raises:
        ValueError: A name is unknown, there is no name at all, or a task cannot be reported.
    """
    known = benchmarks()
    names = [*dict.fromkeys(name.strip() for name in tasks.split(",") if name.strip())]
    if not names:
        raise ValueError(f"--tasks names no benchmark. There is paper (all), {', '.join(known)}.")
    paper = [benchmark for name, benchmark in known.items() if name in names or "paper" in names]
    if include_path or {*names} - {*known, "paper"}:
        return paper + describe([name for name in names if name != "paper"], include_path, known)
    return paper


def load(benchmark: Benchmark, data: Path | None = None) -> "TaskDict":
    """Return the benchmark's tasks with their data, for `lm_eval.evaluator.evaluate`.

    Args:
        benchmark: A benchmark from [`pick`] or [`benchmarks`].
        data: A folder that holds data sets as `ORG/NAME`, laid out as on the Hub. Nothing is then read from the
            network. Without it, the data set comes from the Hub or its cache. One with a loading script is downloaded
            whole, and read without the script.

    Returns:
        Tasks and groups by name, as `lm_eval.tasks.TaskManager.load` returns them.

    Raises:
        FileNotFoundError: The data set, or a part of it that the benchmark needs, is missing or damaged, or a function
            of the task file fails. The message is one line with the remedy.
    """
    if data is None and benchmark.dataset is not None and (_downloads() / benchmark.dataset).is_dir():
        # It has a loading script, and was downloaded before.
        return load(benchmark, _download(benchmark, benchmark.dataset))
    overrides: dict[str, Any] = {}
    folder = None
    if data is not None and benchmark.dataset is not None:
        folder = Path(data) / benchmark.dataset
        if not folder.is_dir():
            raise data_missing(benchmark, data, f"there is no folder {folder}", is_absent=True)
        try:
            data_folder.check(folder)
            folder = folder.absolute()
            converted = _cache_path(folder)
            overrides["dataset_path"] = data_folder.loadable(folder, converted)
        except (OSError, ValueError) as error:
            raise data_missing(benchmark, data, str(error)) from error
        overrides["dataset_kwargs"] = {"cache_dir": str(converted)}
    manager = task_manager()
    if benchmark.group not in manager.task_index or benchmark.include_path is not None:
        manager = find_task_manager(benchmark.group, benchmark.include_path)

    # These imports take seconds, and `attnres eval --help` reads this module.
    import datasets.config
    import huggingface_hub.constants
    from datasets.exceptions import DatasetsError
    from jinja2 import TemplateSyntaxError

    try:
        with _quiet_hub(), compile_templates_once():
            # The public `TaskManager.load` does not pass overrides on to the tasks of a group. Given the group as a
            # mapping with overrides, it replaces the `task` of each member by the list of all members.
            tasks = manager._factory.build(
                manager.task_index[benchmark.group], overrides=overrides, registry=manager.task_index
            )
    except KeyError as error:
        raise data_missing(benchmark, data, f"it has no split or column {error}") from error
    except ConnectionError as error:
        # Go offline for the rest of the run, because each further attempt would take half a minute. Data in the cache
        # still loads. The environment variable HF_HUB_OFFLINE is read only at import, so set what was read from it.
        datasets.config.HF_HUB_OFFLINE = huggingface_hub.constants.HF_HUB_OFFLINE = True
        raise data_missing(benchmark, data, str(error), is_absent=True) from error
    except DatasetsError as error:
        raise data_missing(benchmark, data, f"{error}: {error.__cause__}") from error
    except TemplateSyntaxError as error:
        template = shorten(error.source or "", 120, placeholder=" ...")
        message = f"{benchmark.title}: a template of its task file cannot be read: {error.message}, in {template!r}."
        raise DataMissing(message) from error
    except Exception as error:
        if data is None and benchmark.dataset is not None and data_folder.is_script_refused(str(error)):
            return load(benchmark, _download(benchmark, benchmark.dataset))
        # Data, templates and a task's own functions may raise anything. This benchmark fails, and the others go on.
        raise data_missing(benchmark, data, str(error) or type(error).__name__) from error
    return manager.load(tasks)


def _downloads() -> Path:
    """Return the folder for data sets with a loading script, laid out like that of `--data`."""
    import datasets.config

    return Path(datasets.config.HF_DATASETS_CACHE) / "attnres" / "hub"


def _download(benchmark: Benchmark, dataset: str) -> Path:
    """Download the data set of a benchmark, or only what is new, and return the folder for `load`.

    Raises:
        FileNotFoundError: It cannot be downloaded.
    """
    from huggingface_hub import snapshot_download

    folder = _downloads() / dataset
    try:
        with _quiet_hub():
            # Not into the cache of the Hub, whose files are links to others outside of their folder.
            snapshot_download(dataset, repo_type="dataset", local_dir=folder)
    except Exception as error:
        raise data_missing(benchmark, None, str(error), is_absent=isinstance(error, ConnectionError)) from error
    return _downloads()


@contextmanager
def _quiet_hub() -> Generator[None]:
    """Suppress the progress bars of `datasets`, and the Hub's log line for each attempt at a request."""
    import datasets
    from huggingface_hub.utils import logging as hub_logging

    is_enabled, verbosity = not datasets.are_progress_bars_disabled(), hub_logging.get_verbosity()
    datasets.disable_progress_bars()
    hub_logging.set_verbosity_error()
    try:
        yield
    finally:
        hub_logging.set_verbosity(verbosity)
        if is_enabled:
            datasets.enable_progress_bars()


@contextmanager
def compile_templates_once() -> Generator[None]:
    """Let the harness compile each template of a task once within the block.

    By itself, it compiles a template for every item, which takes a minute for MMLU.
    """
    import lm_eval.utils

    # The harness renders every template by the global `lm_eval.utils.env`, which no argument can replace.
    environment = lm_eval.utils.env
    compile_template = environment.from_string
    environment.from_string = cache(compile_template)
    try:
        yield
    finally:
        environment.from_string = compile_template


def _cache_path(folder: Path) -> Path:
    """Return the folder in which `datasets` keeps its converted form of a folder's data.

    By default, `datasets` chooses a path that depends on the folder's README alone. Two folders with the same README
    would share one cache entry, and a replaced data file would go unnoticed.
    """
    import datasets.config

    state = [(str(path), path.stat().st_size, path.stat().st_mtime_ns) for path in data_folder.files_of(folder)]
    return Path(datasets.config.HF_DATASETS_CACHE) / "attnres" / sha256(repr(state).encode()).hexdigest()[:16]


__all__ = ["Benchmark", "benchmarks", "compile_templates_once", "load", "pick", "task_path"]
