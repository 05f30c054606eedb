"""Write files and directories so that they appear whole or not at all, and by one process at a time."""

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryFile

from filelock import FileLock, Timeout


def atomic_write(path: Path, content: str | bytes) -> None:
    """Write a file so that other processes see either the old content or the new one.

    Args:
        path: The file. If it is a link, the file that it leads to is written.
        content: The content. Text is encoded as UTF-8.
    """
    path = Path(os.path.realpath(path))
    partial = path.with_name(f".{path.name}.partial")
    try:
        partial.write_bytes(content if isinstance(content, bytes) else content.encode("utf-8"))
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


@contextlib.contextmanager
def atomic_directory(out: str | os.PathLike, *, overwrite: bool, marker: str, content: str = "") -> Iterator[Path]:
    """Make a temporary directory `.{name}.partial` beside `out`, and rename it to `out` when the block ends.

    If the block fails, the temporary directory is removed and `out` stays as it was. If the process is killed, the next
    call with the same `out` cleans up.

    Args:
        out: The directory.
        overwrite: Whether to replace `out` if the same command has written it, as `marker` shows.
        marker: The name of a file in every directory that the command writes.
        content: A text that the marker must contain before its directory may be replaced.

    Yields:
        The temporary directory, which is empty.

    Raises:
        FileExistsError: `out` exists and must not be replaced, or another process is writing it.
    """
    out = Path(os.path.abspath(out))
    roles = ("partial", "replaced", "removed", "lock")
    # `replaced` is the old `out` as a whole, which is renamed back after a failure. `removed` is about to be deleted.
    stage, replaced, removed, lock = (out.with_name(f".{out.name}.{role}") for role in roles)
    check_replaceable(out, overwrite, marker, content)  # before folders and the lock file are made
    with parents(out), locked(lock, out):
        try:
            if os.path.lexists(replaced) and not os.path.lexists(out):
                replaced.rename(out)  # an earlier run was killed between the two renames below
            # Check again, because another run may have written `out` before this one got the lock.
            check_replaceable(out, overwrite, marker, content)
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
    """Raise if [`atomic_directory`] would refuse to write `out`.

    Args:
        out: The directory.
        overwrite: As in [`atomic_directory`].
        marker: As in [`atomic_directory`].
        content: As in [`atomic_directory`].

    Raises:
        FileExistsError: `out` exists and must not be replaced.
    """
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
    """Make the folders above `out`. When the block ends, remove the new ones that are still empty."""
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
    """Hold a lock file while the block runs, so that only this process writes to `out`. Then remove the file.

    Args:
        path: The lock file.
        out: The file or directory that it protects, for the message.
        wait: Whether to wait for another process that holds the lock.

    Raises:
        FileExistsError: Another process holds the lock.
        OSError: Nothing can be written beside the lock file.
    """
    # `FileLock` does not say why a directory cannot be written. This raises an error that does.
    try:
        TemporaryFile(dir=path.parent).close()
    except OSError as error:  # it names a temporary file, which the user has not given
        raise OSError(error.errno, error.strerror, str(out)) from error
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
        # Remove the file while the lock is held: a waiting process notices, and makes a new file.
        with contextlib.suppress(OSError):
            path.unlink()
        lock.release()


def _discard(path: Path, removed: Path) -> None:
    """Rename `path` to `removed`, then delete it, so that a kill never leaves a half-deleted `path`."""
    if os.path.lexists(path):
        _remove(removed)
        path.rename(removed)
        _remove(removed)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
