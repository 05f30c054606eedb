"""Find the files and folders that a recipe's data sets name, without PyTorch and without `datasets`.

A data set is a local file, a folder, a glob pattern or a Hub id.
"""

import glob
import os
import re
from pathlib import Path
from typing import NamedTuple

from attnres.utils.hub import check_dataset

from .loaders import LOADERS

_HUB_ID = re.compile(r"(?P<id>\w[\w.-]*(/\w[\w.-]*)?)(:(?P<config>[^/:]+))?")
SUFFIXES = ", ".join(list(LOADERS)[:-1]) + f" or {list(LOADERS)[-1]}"


class DataFolder(NamedTuple):
    """A folder of files, or one of the configurations that its README.md names."""

    path: Path
    config: str | None = None


class HubData(NamedTuple):
    """A data set on the Hub, and one of its configurations."""

    id: str
    config: str | None = None


def find_data(path: str) -> list[str] | DataFolder | HubData:
    """Find what a data set of a recipe names.

    Args:
        path: A file, a folder, a glob pattern or a Hub id.

    Returns:
        Files, in order; or a folder; or a data set on the Hub, which may not exist.

    Raises:
        FileNotFoundError: The path names nothing.
        ValueError: The suffix of a file is unknown.
    """
    local = Path(os.path.expanduser(path))
    if local.is_dir():
        return DataFolder(local)
    if local.exists():
        return [check_suffix(local)]
    if glob.has_magic(path):
        files = sorted(glob.glob(str(local), recursive=True))
        if not files:
            raise FileNotFoundError(f"{path} matches no file.")
        return [check_suffix(Path(file)) for file in files]
    folder, _, config = str(local).rpartition(":")
    if folder and Path(folder).is_dir():
        return DataFolder(Path(folder), config)
    hub_id = _HUB_ID.fullmatch(path)
    if hub_id is None or local.suffix.lower() in LOADERS:
        raise FileNotFoundError(f"{path} does not exist.")
    return HubData(hub_id["id"], hub_id["config"])


def check_suffix(path: Path) -> str:
    """Return the name of a file. Raise ValueError if no loader reads files with its suffix."""
    if path.suffix.lower() not in LOADERS:
        raise ValueError(f"{path} has an unknown suffix, which must be {SUFFIXES}.")
    return str(path)


def describe_empty(folder: Path) -> str:
    """Return the message that a folder holds no file of data."""
    return f"{folder} holds no {SUFFIXES} file."


def check_data_path(path: str) -> None:
    """Check a data set of a recipe by its name and the names of files.

    Args:
        path: As in [`find_data`].

    Raises:
        FileNotFoundError: The path names nothing, or a folder without files of data; or the Hub cannot be reached, and
            its cache does not have the data set.
        ValueError: The suffix of a file is unknown.
    """
    data = find_data(path)
    if isinstance(data, HubData):
        check_dataset(path, data.id)
    elif isinstance(data, DataFolder):
        # A README.md may name files anywhere.
        is_listed = (data.path / "README.md").is_file()
        if not is_listed and not any(file.suffix.lower() in LOADERS for file in data.path.rglob("*")):
            raise FileNotFoundError(describe_empty(data.path))


__all__ = ["DataFolder", "HubData", "check_data_path", "check_suffix", "describe_empty", "find_data"]
