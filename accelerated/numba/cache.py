"""Cache compiled loops on disk, so that only the first process spends seconds on compiling.

`numba`'s own cache checks only whether the file of the function itself has changed, raises at a damaged file, and needs
a folder that it can write to. Here the name of the folder depends on the text of all files that the loops are compiled
from, and a checksum finds damaged files. Without a cached file, or without a folder for it, the loops are compiled.
"""

import hashlib
import os
import pickle
import sys
import tempfile
from functools import cache
from pathlib import Path

import llvmlite
import numba
from numba.core.caching import NullCache
from numba.core.compiler import CompileResult
from numba.core.serialize import dumps

from ..machine_code import usual_parents, writable_folder

_HERE = Path(__file__).parent
_DIGEST = hashlib.sha256().digest_size


class MachineCode(NullCache):
    """The machine code of one function, in a file for each signature and processor.

    An instance replaces `numba`'s cache of the function, for which there is no public interface. `numba` calls
    `load_overload` and `save_overload`.
    """

    def __init__(self, name: str):
        self._name = name

    def load_overload(self, sig, target_context):
        """Return the machine code for a signature, or `None` if it must be compiled."""
        target_context.refresh()
        try:
            content = self._path(sig, target_context.codegen()).read_bytes()
            if hashlib.sha256(content[_DIGEST:]).digest() != content[:_DIGEST]:
                return None  # a damaged file, which `save_overload` replaces
            return CompileResult._rebuild(target_context, *pickle.loads(content[_DIGEST:]))
        except Exception:  # the file is missing, or another version wrote it: compile the loop
            return None

    def save_overload(self, sig, cres) -> None:
        """Write machine code to disk if possible."""
        try:
            content = dumps(cres._reduce())
            path = self._path(sig, cres.codegen)
            path.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
                file.write(hashlib.sha256(content).digest() + content)
            os.replace(file.name, path)
        except Exception:  # for example a full disk; the compiled loop runs all the same
            return

    def _path(self, sig, codegen) -> Path:
        key = hashlib.sha256(repr((sig, codegen.magic_tuple())).encode()).hexdigest()
        return folder() / f"{self._name}-{key[:32]}.nbc"


@cache
def folder() -> Path:
    """Return a writable folder for machine code, in NUMBA_CACHE_DIR or else in the user's cache or beside this file.

    Raises:
        OSError: no folder can be written to.
    """
    # pyrefly: ignore[missing-attribute]  # `numba` sets the names of its configuration at run time
    chosen = numba.config.CACHE_DIR  # NUMBA_CACHE_DIR
    parents = [Path(chosen)] if chosen else usual_parents(__file__)
    return writable_folder(f"attnres-{_sources_digest()[:32]}", parents)


def _sources_digest() -> str:
    """Compute a digest of the files in this folder and of the versions that compile them."""
    digest = hashlib.sha256(repr((sys.version, numba.__version__, llvmlite.__version__)).encode())
    for path in sorted(_HERE.glob("*.py")):
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()


__all__ = ["MachineCode", "folder"]
