"""Write files and directories so that they appear whole or not at all, and by one process at a time."""

import contextlib
import os
import shutil
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryFile

from filelock import FileLock, Timeout

from .errors import about
from .wording import show_bytes

_MAX_NAMED = 3  # the largest number of foreign files that a message names


@dataclass(frozen=True)
class Written:
    """The files that a command writes into a directory. Only a directory that holds nothing else may be replaced.

    Attributes:
        title: The words for it, with an article, such as `a model`.
        marker: The name of a file in every directory that the command writes.
        content: A text that the marker contains.
        find_foreign: A function that returns the files and folders of a directory that the command cannot have written,
            as [`entries_beyond`] does.
    """

    title: str
    marker: str
    content: str
    find_foreign: Callable[[Path], Sequence[str]]


def entries_beyond(folder: Path, is_part: Callable[[str], bool]) -> list[str]:
    """Return the files and folders in a directory that are not part of what a command writes.

    Args:
        folder: The directory.
        is_part: A function that tells whether a path is part of it. A path is relative to `folder`, and that of a
            folder ends in `/`. The content of a folder that is no part is not looked at.

    Returns:
        The sorted paths, without the `/` at the end. A link counts as a file, since only the link would be removed.
    """
    foreign = []
    pending = [folder]
    while pending:
        for path in pending.pop().iterdir():
            name = path.relative_to(folder).as_posix()
            if path.is_dir() and not path.is_symlink():
                if is_part(f"{name}/"):
                    pending.append(path)
                    continue
            elif is_part(name):
                continue
            foreign.append(name)
    return sorted(foreign)


def atomic_write(path: Path, content: str | bytes) -> None:
    """Write a file so that other processes see either the old content or the new one.

    Args:
        path: The file. If it is a link, the file that it leads to is written.
        content: The content. Text is encoded as UTF-8.

    Raises:
        OSError: The file cannot be written. A note names it.
    """
    path = Path(os.path.realpath(path))
    partial = path.with_name(f".{path.name}.partial")
    try:
        with about(path):  # the error of a full disk does not name the file
            partial.write_bytes(content if isinstance(content, bytes) else content.encode("utf-8"))
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def check_space(folder: Path, needed: int) -> None:
    """Raise if a file system has too little free space.

    Args:
        folder: A directory in the file system. It may have to be made first.
        needed: The number of bytes.

    Raises:
        OSError: Fewer bytes are free.
    """
    free = shutil.disk_usage(_existing(folder)).free
    if needed > free:
        raise OSError(f"not enough space in {folder}: {show_bytes(needed)} are needed, {show_bytes(free)} are free.")


@contextlib.contextmanager
def atomic_directory(out: str | os.PathLike, written: Written, *, overwrite: bool) -> Generator[Path]:
    """Make a temporary directory `.{name}.partial` beside `out`, and rename it to `out` when the block ends.

    If the block fails, the temporary directory is removed and `out` stays as it was. If the process is killed, the next
    call with the same `out` cleans up.

    Args:
        out: The directory.
        written: What the block writes.
        overwrite: Whether to replace `out` if it holds something `written` earlier and nothing else.

    Yields:
        The temporary directory, which is empty.

    Raises:
        FileExistsError: `out` exists and must not be replaced, or another process is writing it.
    """
    out = Path(os.path.abspath(out))
    roles = ("partial", "replaced", "removed", "lock")
    # `replaced` is the old `out` as a whole, which is renamed back after a failure. `removed` is about to be deleted.
    stage, replaced, removed, lock = (out.with_name(f".{out.name}.{role}") for role in roles)
    check_replaceable(out, written, overwrite)  # before folders and the lock file are made
    with parents(out), locked(lock, out):
        try:
            if os.path.lexists(replaced) and not os.path.lexists(out):
                replaced.rename(out)  # an earlier run was killed between the two renames below
            # Check again, because another run may have written `out` before this one got the lock.
            check_replaceable(out, written, overwrite)
            _remove(stage)
            _remove(removed)
            stage.mkdir()
            yield stage
            # The work may have taken hours, in which someone may have put other files into `out`.
            check_replaceable(out, written, overwrite)
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


def check_replaceable(out: Path, written: Written, overwrite: bool) -> None:
    """Raise if [`atomic_directory`] would refuse to write `out`.

    Args:
        out: The directory.
        written: As in [`atomic_directory`].
        overwrite: As in [`atomic_directory`].

    Raises:
        FileExistsError: `out` exists and must not be replaced. The message names foreign files.
    """
    if not os.path.lexists(out):
        return
    if not overwrite:
        raise FileExistsError(f"{out} exists. Choose another directory, or give --overwrite to replace it.")
    marker = out / written.marker
    if not marker.is_file() or written.content not in marker.read_text(encoding="utf-8", errors="replace"):
        raise FileExistsError(
            f"{out} does not hold {written.title}: it has no {written.marker} with {written.content}. Choose another "
            "directory."
        )
    if foreign := written.find_foreign(out):
        names = ", ".join(foreign[:_MAX_NAMED])
        names += f" and {len(foreign) - _MAX_NAMED:,} more" if len(foreign) > _MAX_NAMED else ""
        verb, them = ("is", "it") if len(foreign) == 1 else ("are", "them")
        raise FileExistsError(
            f"{out} holds {names}, which {verb} not part of {written.title}. Move {them} away, or choose another "
            "directory."
        )


def check_writable(folder: Path, name: str) -> None:
    """Raise if nothing can be written into a directory.

    Args:
        folder: The directory. It and the directories above it may have to be made first.
        name: What is to be written, for the message: an option with its value.

    Raises:
        OSError: The directory, or one above it, is missing and cannot be made, or takes no new files.
    """
    try:
        # Only an attempt tells: `os.access` is wrong for the superuser, and for file systems such as /proc.
        TemporaryFile(dir=_existing(folder)).close()
    except OSError as error:
        raise type(error)(f"{name} cannot be written ({error.strerror}): choose another place.") from error


def _existing(folder: Path) -> Path:
    """Return a directory or, if it has to be made, the first above it that exists."""
    folder = Path(os.path.abspath(folder))
    return next(path for path in (folder, *folder.parents) if os.path.lexists(path))


@contextlib.contextmanager
def parents(out: Path) -> Generator[None]:
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
def locked(path: Path, out: Path, wait: bool = False) -> Generator[None]:
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
