"""What the commands share: an output directory that appears whole or not at all, and a quiet `transformers`."""

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from filelock import FileLock, Timeout
from transformers.utils import logging

_LOCK = ".lock"


@contextlib.contextmanager
def directory_at_once(out: str | os.PathLike, *, overwrite: bool, marker: str) -> Iterator[Path]:
    """A temporary sibling `.{name}.partial` of the directory `out`, which takes its name when the block ends.

    If the block fails, the sibling goes and `out` stays as it was. What a killed run left is cleared by the next one.

    Args:
        overwrite: replace `out` if it exists and holds the file `marker`: then it was written by the same command.

    Raises:
        FileExistsError: `out` exists and is not to be replaced, or another process is writing it.
    """
    out = Path(os.path.abspath(out))
    if os.path.lexists(out):
        if not overwrite:
            raise FileExistsError(f"{out} exists. Choose another directory, or give --overwrite to replace it.")
        if not (out / marker).is_file():
            raise FileExistsError(
                f"{out} was not written by this command (it has no {marker}). Choose another directory."
            )
    stage = out.with_name(f".{out.name}.partial")
    stage.mkdir(parents=True, exist_ok=True)
    lock = FileLock(stage / _LOCK)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        raise FileExistsError(f"{out} is being written by another process. Wait for it, or choose another.") from None
    try:
        for path in stage.iterdir():
            if path.name != _LOCK:
                _remove(path)
        yield stage
        lock.release()
        (stage / _LOCK).unlink(missing_ok=True)
        replaced = out.with_name(f".{out.name}.replaced")
        if out.exists():
            _remove(replaced)
            out.rename(replaced)
        stage.rename(out)
        _remove(replaced)
    finally:
        lock.release()
        shutil.rmtree(stage, ignore_errors=True)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


@contextlib.contextmanager
def quiet_transformers() -> Iterator[None]:
    """Without the notes on missing GPU kernels and the bars of loading and saving: the commands have their own."""
    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()
