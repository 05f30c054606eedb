"""What a folder of `--data` must be before a benchmark reads it: a README that can be read, and no file outside.

Also which version of a data set was read.
"""

import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from attnres.utils.yaml_files import load_card_metadata


def check(folder: Path) -> None:
    """Look at the README of a data set and at its links; the files' content is for `datasets`.

    Raises:
        ValueError: the README is broken or names what is not in the folder, or a link leads out of it, in one line.
    """
    inside = os.path.realpath(folder)
    for path in sorted(folder.rglob("*")):
        if path.is_symlink() and os.path.commonpath([inside, os.path.realpath(path)]) != inside:
            raise ValueError(
                f"{path} is a link to {os.path.realpath(path)}, outside the folder: put the file itself there"
            )
    readme = folder / "README.md"
    if not readme.is_file():
        return
    for name in _names(_configs(readme)):
        if os.path.isabs(name) or "://" in name or ".." in Path(name).parts:
            raise ValueError(f"{readme} names {name}, which is not in the folder: name its files from there")


def _configs(readme: Path) -> list[Any]:
    """The entry `configs` of the README's head."""
    try:
        head = load_card_metadata(readme) or {}
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f" in line {mark.line + 2}" if mark else ""  # of the file, whose first line opens the head
        raise ValueError(f"the head of {readme} is no YAML{where}: {getattr(error, 'problem', error)}") from error
    except ValueError as error:
        raise ValueError(f"{readme} cannot be read: {error}") from error
    configs = head.get("configs") or []
    if not isinstance(configs, list) or not all(isinstance(config, dict) for config in configs):
        raise ValueError(f"{readme}: `configs` is to be a list of configurations, not {configs!r}")
    return configs


def _names(configs: list[dict[str, Any]]) -> Iterator[str]:
    """Every file name or pattern that configurations give."""

    def texts(value: Any) -> Iterator[str]:
        if isinstance(value, str):
            yield value
        elif isinstance(value, list):
            for item in value:
                yield from texts(item.get("path") if isinstance(item, dict) else item)
        elif isinstance(value, dict):
            for item in value.values():
                yield from texts(item)

    for config in configs:
        yield from texts(config.get("data_files"))
        yield from texts(config.get("data_dir"))


def damaged_file(folder: Path) -> str | None:
    """The first Parquet file that cannot be read, and why, in one line: `datasets` does not name it."""
    from pyarrow import ArrowException, parquet

    for path in sorted(folder.rglob("*.parquet")):
        try:
            for _ in parquet.ParquetFile(path).iter_batches():
                pass
        except (ArrowException, OSError) as error:
            return f"{path} is damaged: {error}"
    return None


def revision(source: str | None, dataset: Mapping[str, Any]) -> str | None:
    """The commit of a data set on the Hub, as far as that shows.

    Args:
        source: what it was loaded from: a folder that `hf download --local-dir` filled, or an id on the Hub.
        dataset: its splits, as `datasets` loaded them.

    Returns:
        40 hexadecimal digits; None if it is unknown, or if a file was added or changed since.
    """
    if source and os.path.isdir(source):
        names = (path.relative_to(source) for path in Path(source).rglob("*") if path.is_file())
        commits = {_downloaded(Path(source), name) for name in names if name.parts[0] != ".cache"}
    else:  # `datasets` keeps what it prepared of a commit in a folder of that name
        files = (file for split in dataset.values() for file in getattr(split, "cache_files", ()))
        commits = {Path(file["filename"]).parent.name for file in files}
    commit = commits.pop() if len(commits) == 1 else None
    return commit if commit and re.fullmatch("[0-9a-f]{40}", commit) else None


def _downloaded(folder: Path, name: Path) -> str | None:
    """The commit from which `hf download` took a file; None if it did not, or if the file was changed since."""
    note = folder / ".cache" / "huggingface" / "download" / f"{name}.metadata"
    try:
        commit, _, time = note.read_text(encoding="utf-8").split()
        return commit if (folder / name).stat().st_mtime - 1 <= float(time) else None
    except (OSError, ValueError):
        return None
