"""Save a model over an older save, so that the folder loads as the old model, as the new one, or not at all.

`save_pretrained` writes into the folder file by file. Interrupted, it leaves shards of both models that load without a
word; completed, it leaves an old `model.safetensors`, which is loaded before a new index.
"""

import json
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_STAGE = ".saving"
# Name of the weights in one file, of the index of several, and of what this package's conversion adds to several.
_FORMS = (
    ("model{variant}.safetensors", "model.safetensors.index{variant}.json"),
    ("pytorch_model{variant}.bin", "pytorch_model.bin.index{variant}.json"),
)
_PART = r"-(\d{5}-of-\d{5}|residual(-\d+)?)"


@contextmanager
def saved_whole(folder: str | os.PathLike, variant: str | None = None, in_place: bool = False) -> Iterator[str]:
    """Give a folder to save a model into, and let it replace the weights in `folder` when the block ends.

    If the block fails, `folder` stays as it was. Files that are no weights of this `variant` stay in any case, but for
    those of the same name.

    Args:
        folder: what the user saves to.
        variant: of the file names, as in `save_pretrained`.
        in_place: write into `folder` itself; weights that the block does not write again go afterwards.

    Yields:
        `folder` itself if there is nothing to replace in it, or a folder in it, which goes again.
    """
    old = _weight_files(Path(folder), variant)
    stage = Path(folder) / _STAGE
    if not old:
        yield os.fspath(folder)
        _clear(stage)  # of a process that was killed while it exchanged the weights
        return
    if in_place:
        before = {name: (Path(folder) / name).stat().st_mtime_ns for name in old}
        yield os.fspath(folder)
        for name, time in before.items():
            path = Path(folder) / name
            if path.exists() and path.stat().st_mtime_ns == time:
                os.remove(path)
        return
    _clear(stage)  # of a process that was killed
    try:
        yield str(stage)
        _replace(Path(folder), stage, old, variant)
    finally:
        _clear(stage)


def _weight_files(folder: Path, variant: str | None) -> set[str]:
    """The names of the files in `folder` that hold weights of a model, or the index of such files."""
    names = {path.name for path in folder.iterdir() if not path.is_dir()} if folder.is_dir() else set()
    weights = set()
    for single, index in _forms(variant):
        stem, suffix = os.path.splitext(single)
        part = re.compile(re.escape(stem) + _PART + re.escape(suffix))
        weights |= {name for name in names if name in (single, index) or part.fullmatch(name)}
        if index in names:
            try:
                named = set(json.loads((folder / index).read_text(encoding="utf-8"))["weight_map"].values())
            except (AttributeError, KeyError, TypeError, ValueError):
                continue  # a damaged index names nothing
            weights |= {name for name in names & named if name.endswith(suffix)}
    return weights


def _forms(variant: str | None) -> list[tuple[str, str]]:
    return [tuple(name.format(variant=f".{variant}" if variant else "") for name in form) for form in _FORMS]


def _replace(folder: Path, stage: Path, old: set[str], variant: str | None) -> None:
    """Let the files in `stage` take the place of the weights `old`.

    A model is loaded from the single file or by the index: without one nothing loads. So these go first and come last.
    """
    entries = {name for form in _forms(variant) for name in form}
    if not any(path.name in entries for path in stage.iterdir()):
        raise OSError(f"no weights were saved, so that those in {folder} stay as they are.")
    for name in sorted(old, key=lambda name: name not in entries):
        os.remove(folder / name)
    for path in sorted(stage.iterdir(), key=lambda path: path.name in entries):
        os.replace(path, folder / path.name)


def _clear(stage: Path) -> None:
    if stage.is_symlink():
        os.remove(stage)  # the link alone: a copied repository may bring one that leads to files of the user
        return
    for folder, _, names in os.walk(stage, topdown=False):
        for name in names:
            os.remove(os.path.join(folder, name))
        os.rmdir(folder)
