"""Check a data set in the folder of `--data` before `datasets` reads it, and find the commit that was read.

A data set comes from others. Its README and its links must not lead to files outside of its folder.
"""

import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from attnres.utils.yaml_files import load_card_metadata


def check(folder: Path) -> None:
    """Check the README and the links of a data set. The content of its data files is left to `datasets`.

    Raises:
        ValueError: The README is broken or names a file outside of the folder, or a link leads out of the folder. The
            message is one line.
    """
    root = os.path.realpath(folder)
    for path in sorted(folder.rglob("*")):
        if path.is_symlink() and os.path.commonpath([root, os.path.realpath(path)]) != root:
            raise ValueError(
                f"{path} is a link to {os.path.realpath(path)}, outside the folder: put the file itself there"
            )
    readme = folder / "README.md"
    if not readme.is_file():
        return
    for name in _file_names(_configs(readme)):
        if os.path.isabs(name) or "://" in name or ".." in Path(name).parts:
            raise ValueError(f"{readme} names {name}, which is not in the folder: name its files from there")


def _configs(readme: Path) -> list[Any]:
    """Return the entry `configs` of the README's metadata."""
    try:
        head = load_card_metadata(readme) or {}
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        # Marks count from 0, and the first line of the file opens the metadata.
        place = f" in line {mark.line + 2}" if mark else ""
        raise ValueError(f"the head of {readme} is not YAML{place}: {getattr(error, 'problem', error)}") from error
    except ValueError as error:
        raise ValueError(f"{readme} cannot be read: {error}") from error
    configs = head.get("configs") or []
    if not isinstance(configs, list) or not all(isinstance(config, dict) for config in configs):
        raise ValueError(f"{readme}: `configs` must be a list of configurations, not {configs!r}")
    return configs


def _file_names(configs: list[dict[str, Any]]) -> Iterator[str]:
    """Yield every file name or pattern in configurations."""

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
    """Return one line that names the first damaged Parquet file, or `None`. Errors of `datasets` do not name it."""
    from pyarrow import ArrowException, parquet

    for path in sorted(folder.rglob("*.parquet")):
        try:
            for _ in parquet.ParquetFile(path).iter_batches():
                pass
        except (ArrowException, OSError) as error:
            return f"{path} is damaged: {error}"
    return None


def revision(source: str | None, dataset: Mapping[str, Any]) -> str | None:
    """Return the commit of a data set on the Hub, if it is known.

    Args:
        source: Where it was loaded from: a folder that `hf download --local-dir` filled, or an id on the Hub.
        dataset: Its splits, as `datasets` loaded them.

    Returns:
        40 hexadecimal digits. `None` if the commit is unknown, or if a file was added or changed since the download.
    """
    if source and os.path.isdir(source):
        names = (path.relative_to(source) for path in Path(source).rglob("*") if path.is_file())
        commits = {_downloaded_commit(Path(source), name) for name in names if name.parts[0] != ".cache"}
    else:
        # `datasets` names the folder of its converted files after the commit.
        files = (file for split in dataset.values() for file in getattr(split, "cache_files", ()))
        commits = {Path(file["filename"]).parent.name for file in files}
    commit = commits.pop() if len(commits) == 1 else None
    return commit if commit and re.fullmatch("[0-9a-f]{40}", commit) else None


def _downloaded_commit(folder: Path, name: Path) -> str | None:
    """Return the commit from which `hf download` took a file; `None` if it did not, or if the file changed since."""
    record = folder / ".cache" / "huggingface" / "download" / f"{name}.metadata"
    try:
        commit, _, time = record.read_text(encoding="utf-8").split()
        # The record is written just after the file, with the time of that moment.
        return commit if (folder / name).stat().st_mtime - 1 <= float(time) else None
    except (OSError, ValueError):
        return None
