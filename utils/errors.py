"""Name the file that an error is about, and recognise errors of disks and of other processes."""

import errno
import os
import re
from collections.abc import Generator
from contextlib import contextmanager

_ERRNO = re.compile(r"\(os error (\d+)\)")
# Messages of `torch.save` for a file that it could not write in full. They do not give the reason.
_CUT_SHORT = re.compile(r"inline_container|PytorchStreamWriter|unexpected pos")
# Messages of gloo, NCCL and the key-value store of `torch.distributed` if a peer has ended.
_LOST = re.compile(
    r"Connection (closed|reset) by (remote )?peer|Broken pipe|Socket (closed|Timeout)|recvValue failed|sendBytes failed"
    r"|failed to recv|remote process exited|NCCL communicator was aborted",
    re.IGNORECASE,
)
# And if a peer has not answered within the limit.
_TOO_LONG = re.compile(r"timed out|wait timeout", re.IGNORECASE)


@contextmanager
def about(subject: str | os.PathLike, remedy: str = "", only: type[BaseException] = BaseException) -> Generator[None]:
    """Note on errors of the block what it works on.

    Many errors of libraries do not name the file. A note keeps an error's type and message. The command line prints the
    notes at the end of its line, unless the message names the file, and takes an error with a note for one with a
    message for users.

    An `OSError` with a number gets the file's name, if it has none: errors of a full disk, a quota and a limit of file
    sizes lack it. Other errors of this type have a message that names the file.

    Args:
        subject: The file, directory or Hub id.
        remedy: What the user can do, as a sentence.
        only: The class of the errors.
    """
    try:
        yield
    except only as error:  # the errors of checkpoints in parts derive from `BaseException`
        if isinstance(error, OSError):
            if error.errno is not None and error.filename is None:
                error.filename = str(subject)
        else:
            error.add_note(f"(in {subject}){remedy and '. '}{remedy}")
        raise


def notes_of(error: BaseException) -> list[str]:
    """Return the notes on an error that [`about`] has added, each in one line."""
    return [" ".join(note.split()) for note in getattr(error, "__notes__", ())]


def why_not_written(error: BaseException) -> str:
    """Return why something could not be written, such as `/disk/file: No space left on device`.

    Args:
        error: An `OSError`, or the error that safetensors or PyTorch raises in its place.

    Returns:
        The reason in one line, with the file's name if the error has it.
    """
    text = " ".join(str(error).split())
    if isinstance(error, OSError):
        if error.errno is None:
            return text  # raised by this package, with its message
        reason = error.strerror or os.strerror(error.errno)
        # The error of a copy has two names: the file that is read, then the file that is written.
        names = [str(name) for name in (error.filename, error.filename2) if name]
        return f"{' -> '.join(names)}: {reason}" if names else reason
    if number := _ERRNO.search(text):
        return os.strerror(int(number[1]))
    if _CUT_SHORT.search(text):
        return f"a file was cut short, as if by a full disk ({os.strerror(errno.ENOSPC)}) or a limit of file sizes"
    return text


def is_lost_connection(error: BaseException) -> bool:
    """Return whether an error only follows from the end of another process of this run."""
    several = os.environ.get("WORLD_SIZE", "1") not in ("", "1")
    return several and isinstance(error, RuntimeError) and _LOST.search(str(error)) is not None


def is_timeout(error: BaseException) -> bool:
    """Return whether a transfer or a collective of several processes has taken longer than its limit."""
    several = os.environ.get("WORLD_SIZE", "1") not in ("", "1")
    return several and not isinstance(error, OSError) and _TOO_LONG.search(str(error)) is not None


__all__ = ["about", "is_lost_connection", "is_timeout", "notes_of", "why_not_written"]
