"""Check a data set in the folder of `--data` before `datasets` reads it, and find the commit that was read.

Some data sets still have a loading script, which `datasets` refuses. Their data is read without it.
"""

import os
import re
import zlib
from collections.abc import Iterator, Mapping
from lzma import LZMAError
from pathlib import Path
from typing import Any
from zipfile import BadZipFile, ZipFile

import yaml
from huggingface_hub import metadata_load

from attnres.utils.files import atomic_write

_ConfigFiles = dict[str, dict[str, list[str]]]  # configuration -> split -> the paths of its files

_SPLITS = {"train", "validation", "test"}
_ZIPPED_SPLIT = re.compile(r"(?P<split>[\w-]+)/(?P<config>[\w-]+)\.csv")


def check(folder: Path) -> None:
    """Check that a data set is in its folder, by its README.

    The files of the folder decide whether converted data is read again, and which commit is reported. Both would be
    wrong for files elsewhere.

    Raises:
        ValueError: The README is broken or names a file outside of the folder. The message is one line.
    """
    readme = folder / "README.md"
    if not readme.is_file():
        return
    for name in _file_names(_configs(readme)):
        if os.path.isabs(name) or "://" in name or ".." in Path(name).parts:
            raise ValueError(f"{readme} names {name}, which is not in the folder: name its files from there")


def files_of(folder: Path) -> list[Path]:
    """Return all files of a folder, also those behind links, sorted."""
    paths = (Path(parent, name) for parent, _, names in os.walk(folder, followlinks=True) for name in names)
    return sorted(path for path in paths if path.is_file())


def _configs(readme: Path) -> list[Any]:
    """Return the entry `configs` of the README's metadata."""
    try:
        head = metadata_load(readme) or {}
    except (yaml.YAMLError, ValueError) as error:
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


def loadable(folder: Path, cache: Path) -> str:
    """Return the path by which `datasets` loads a data set without its loading script.

    The README of a data set with a script, and the Hub's own conversion of one, do not name the data files. So the
    layout decides. There are two:

    - `CONFIG/SPLIT/*.parquet`: the Hub's conversion, which is the branch `refs/convert/parquet`.
    - `SPLIT/CONFIG.csv` in a zip file: CMMLU.

    Args:
        folder: The folder of the data set, which [`check`] has accepted. An absolute path.
        cache: A folder that belongs to the present state of these files. The README that names them is written there,
            and files that had to be converted.

    Returns:
        The folder itself if `datasets` can read it, or if no data is found, so that `datasets` says what is wrong.
        Otherwise a folder in `cache`.

    Raises:
        ValueError: A zip file is damaged. The message is one line.
    """
    has_script = (folder / f"{folder.name}.py").is_file()
    readme = folder / "README.md"
    if readme.is_file() and (_configs(readme) or not has_script):
        # `datasets` looks for a script of the name in which the path ends.
        return f"{folder}/." if has_script else str(folder)
    target = cache / folder.name
    if not (target / "README.md").is_file():
        files = _parquet_files(folder) or (_unzipped_files(folder, target) if has_script else {})
        if not files:
            return str(folder)
        configs = [
            {"config_name": config, "data_files": [{"split": split, "path": paths} for split, paths in splits.items()]}
            for config, splits in files.items()
        ]
        target.mkdir(parents=True, exist_ok=True)
        atomic_write(target / "README.md", f"---\n{yaml.safe_dump({'configs': configs})}---\n")
    return str(target)


def _parquet_files(folder: Path) -> _ConfigFiles:
    """Return the files in the layout of the branch `refs/convert/parquet`."""
    files: _ConfigFiles = {}
    for path in sorted(folder.glob("*/*/*.parquet")):
        config, split, _ = path.relative_to(folder).parts
        files.setdefault(config, {}).setdefault(split, []).append(str(path))
    # Folders that begin with splits are left to `datasets`, which knows that layout.
    return {} if files.keys() <= _SPLITS else files


def _unzipped_files(folder: Path, target: Path) -> _ConfigFiles:
    """Convert the CSV files in zip files to Parquet files in `target`, every value as the text that it is."""
    import pandas as pd

    files: _ConfigFiles = {}
    for path in sorted(folder.glob("*.zip")):
        try:
            with ZipFile(path) as archive:
                for member in filter(None, map(_ZIPPED_SPLIT.fullmatch, archive.namelist())):
                    config, split = member["config"], member["split"]
                    with archive.open(member[0]) as file:
                        # Otherwise pandas would read the choices `None` and `0.50` as a missing value and as 0.5.
                        table = pd.read_csv(file, dtype=str, keep_default_na=False)
                    # A column without a name counts the rows.
                    table = table.loc[:, [not name.startswith("Unnamed: ") for name in table.columns]]
                    parquet = target / config / f"{split}.parquet"
                    parquet.parent.mkdir(parents=True, exist_ok=True)
                    atomic_write(parquet, table.to_parquet(index=False))
                    files.setdefault(config, {})[split] = [str(parquet)]
        except (BadZipFile, EOFError, LZMAError, RuntimeError, ValueError, zlib.error) as error:
            raise ValueError(f"{path.name} is damaged: {error}") from error
    return files


def is_script_refused(reason: str) -> bool:
    """Return whether `datasets` refused a data set because it has a loading script.

    Args:
        reason: The message of its error.
    """
    return "scripts are no longer supported" in reason


def revision(source: str | None, dataset: Mapping[str, Any]) -> str | None:
    """Return the commit of a data set on the Hub, if it is known.

    Args:
        source: Where it was loaded from: a folder that `hf download --local-dir` filled, or an id on the Hub.
        dataset: Its splits, as `datasets` loaded them.

    Returns:
        40 hexadecimal digits. `None` if the commit is unknown, or if a file was added or changed since the download.
    """
    if source and os.path.isdir(source):
        names = (path.relative_to(source) for path in files_of(Path(source)))
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
