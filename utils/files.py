"""Files and directories that appear whole or not at all, and of which one process at a time is the writer."""

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryFile

from filelock import FileLock, Timeout


def atomic_write(path: Path, content: str | bytes) -> None:
    """Write a file so that whoever reads it finds the old content or the new one; a link stays, its file is written."""
    path = Path(os.path.realpath(path))
    partial = path.with_name(f".{path.name}.partial")
    try:
        partial.write_bytes(content if isinstance(content, bytes) else content.encode("utf-8"))
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


@contextlib.contextmanager
def atomic_directory(out: str | os.PathLike, *, overwrite: bool, marker: str, content: str = "") -> Iterator[Path]:
    """A temporary sibling `.{name}.partial` of the directory `out`, which takes its name when the block ends.

    If the block fails, the sibling goes and `out` stays as it was. What a killed run left is cleared by the next one.

    Args:
        overwrite: replace `out` if it exists and holds the file `marker` with the text `content`: then it was written
            by the same command.

    Raises:
        FileExistsError: `out` exists and is not to be replaced, or another process is writing it.
    """
    out = Path(os.path.abspath(out))
    roles = ("partial", "replaced", "removed", "lock")
    # A whole old directory may lie at `replaced`, and come back. At `removed` there is only what nobody needs.
    stage, replaced, removed, lock = (out.with_name(f".{out.name}.{role}") for role in roles)
    check_replaceable(out, overwrite, marker, content)
    with parents(out), locked(lock, out):
        try:
            if os.path.lexists(replaced) and not os.path.lexists(out):
                replaced.rename(out)  # a run was killed between the two renames below
            check_replaceable(out, overwrite, marker, content)  # again: another run may have ended meanwhile
            _remove(stage)
            _remove(removed)
            stage.mkdir()
            yield stage
            try:
                if os.path.lexists(out):
                    _discard(replaced, removed)
                    out.rename(replaced)
                stage.rename(out)
            except BaseException:
                if os.path.lexists(replaced) and not os.path.lexists(out):
                    replaced.rename(out)
                raise
        finally:
            shutil.rmtree(stage, ignore_errors=True)
            if os.path.lexists(out):
                _discard(replaced, removed)


def check_replaceable(out: Path, overwrite: bool, marker: str, content: str) -> None:
    """Raises FileExistsError: `out` exists and is not to be replaced, as for [`atomic_directory`]."""
    if not os.path.lexists(out):
        return
    if not overwrite:
        raise FileExistsError(f"{out} exists. Choose another directory, or give --overwrite to replace it.")
    if not (out / marker).is_file() or content not in (out / marker).read_text(errors="replace"):
        raise FileExistsError(
            f"{out} was not written by this command (as {marker} in it would show). Choose another directory."
        )


@contextlib.contextmanager
def parents(out: Path) -> Iterator[None]:
    """The folders above `out`; those that had to be made go again if nothing is written to them."""
    new = [parent for parent in out.parents if not parent.exists()]
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        yield
    finally:
        for parent in new:
            with contextlib.suppress(OSError):
                parent.rmdir()


@contextlib.contextmanager
def locked(path: Path, out: Path, wait: bool = False) -> Iterator[None]:
    """Hold the lock file `path`, which says that this process writes to `out`; it goes at the end.

    Args:
        wait: until another process that holds it is done.

    Raises:
        FileExistsError: another process holds it.
        OSError: nothing can be written beside it.
    """
    TemporaryFile(dir=path.parent).close()  # fails where nothing can be written, and says why, which the lock does not
    lock = FileLock(path)
    try:
        lock.acquire(timeout=-1 if wait else 0)
    except Timeout:
        raise FileExistsError(
            f"{out} is being written by another process. Wait for it, or choose another place."
        ) from None
    try:
        yield
    finally:
        # While it is held: whoever has opened this file meanwhile finds it gone and takes a new one.
        with contextlib.suppress(OSError):
            path.unlink()
        lock.release()


def _discard(path: Path, removed: Path) -> None:
    """Remove `path` under the name `removed`, so that a kill never leaves half of it under its own name."""
    if os.path.lexists(path):
        _remove(removed)
        path.rename(removed)
        _remove(removed)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
