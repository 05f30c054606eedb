"""Errors of writing, in words that say what is wrong with the disk."""

import errno
import os
import re

_ERRNO = re.compile(r"\(os error (\d+)\)")
# What `torch.save` says when it could not write all of a file. It does not say why.
_CUT_SHORT = re.compile(r"inline_container|PytorchStreamWriter|unexpected pos")


def why_not_written(error: BaseException) -> str:
    """Return why something could not be written, such as `/disk/file: No space left on device`.

    Args:
        error: What the writer raised: an `OSError`, or what safetensors and PyTorch raise in its place.
    """
    text = " ".join(str(error).split())
    if isinstance(error, OSError):
        if error.errno is None:
            return text  # a message of our own
        reason = error.strerror or os.strerror(error.errno)
        # A copy names the file that was read first. The second one is written.
        names = [str(name) for name in (error.filename, error.filename2) if name]
        return f"{' -> '.join(names)}: {reason}" if names else reason
    if number := _ERRNO.search(text):
        return os.strerror(int(number[1]))
    if _CUT_SHORT.search(text):
        return f"a file was cut short, as if by a full disk ({os.strerror(errno.ENOSPC)}) or a limit of file sizes"
    return text


__all__ = ["why_not_written"]
