"""The index in which lm_eval looks up tasks by name, built from as few of its folders as possible.

Indexing all task files of lm_eval takes up to half a minute, so only the folders that are needed are indexed.
"""

import logging
import re
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .paper import stock_folders, task_path

if TYPE_CHECKING:
    from lm_eval.tasks import TaskManager

TaskConfig = Mapping[str, Any]  # a task file's content, functions as text


@cache
def task_manager() -> "TaskManager":
    """Return the index of the paper's benchmarks, with the tasks of lm_eval that they build on."""
    stock = _stock_path()
    folders = [stock / folder for folder in stock_folders()]
    # Another version of lm_eval may have moved a folder. Then all of its folders are indexed.
    folders_exist = all(folder.is_dir() for folder in folders)
    return index_folders([*(folders if folders_exist else []), task_path()], include_defaults=not folders_exist)


@cache
def find_task_manager(name: str, include_path: Path | None) -> "TaskManager":
    """Return an index that holds a task or group and all its members, if the task exists.

    The search begins with the folders of lm_eval in which a file mentions the name, the folders of the paper's
    benchmarks, and yours. The whole of lm_eval is indexed only if a member is missing from these.

    Args:
        name: A task, group or tag of lm_eval, or a task of `include_path`.
        include_path: The folder of your own task files.

    Returns:
        The index. `name` may be missing from it: then no such task exists.
    """
    stock = _stock_path()
    whole_word = re.compile(rb"(?<![\w-])%b(?![\w-])" % re.escape(name.encode()))
    files = (path for path in stock.rglob("*.yaml") if whole_word.search(path.read_bytes()))
    folders = sorted({stock / path.relative_to(stock).parts[0] for path in files})
    # pyrefly: ignore[not-iterable]  # `index_folders` gives the harness a list
    folders += [*task_manager().include_path, *([include_path] if include_path else [])]
    manager = index_folders(folders, include_defaults=False)
    if name not in manager.task_index or _is_complete(name, manager):
        return manager
    return index_folders(folders, include_defaults=True)


def index_folders(folders: Sequence[Path], include_defaults: bool) -> "TaskManager":
    """Return the index of the task files in some folders.

    Args:
        folders: Folders of task files; a later one replaces tasks of the same name in an earlier one.
        include_defaults: Whether to index all task files of lm_eval too.
    """
    import lm_eval.tasks

    # The harness warns of tags that several folders use, such as `math_word_problems`. That does no harm here.
    logger = logging.getLogger("lm_eval.tasks._index")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        return lm_eval.tasks.TaskManager(include_path=[*folders], include_defaults=include_defaults)
    finally:
        logger.setLevel(level)


def member_names(config: TaskConfig) -> list[str]:
    """Return the names of a group's members; a single task has none."""
    members = config.get("task")
    return [member_name(item) for item in members] if isinstance(members, list) else []


def member_name(item: str | TaskConfig) -> str:
    """Return the name of an entry in a group's `task` list, which is a name or a mapping with overrides."""
    return item if isinstance(item, str) else str(item.get("task", item.get("group")))


def _stock_path() -> Path:
    """Return the folder of lm_eval's own task files."""
    import lm_eval.tasks

    return Path(lm_eval.tasks.__file__).parent


def _is_complete(name: str, manager: "TaskManager") -> bool:
    """Return whether the index holds a task and all its members."""
    entry = manager.task_index.get(name)
    return entry is not None and all(_is_complete(member, manager) for member in member_names(entry.cfg or {}))


__all__ = ["TaskConfig", "find_task_manager", "index_folders", "member_name", "member_names", "task_manager"]
