"""Cache of compiled loops on disk, so that seconds of compiling are spent once and not in each process.

`numba`'s own cache only asks whether the file of the function itself has changed, raises at a damaged file, and needs a
folder that it can write to. Here the key is the text of all files that the code was compiled from, and a checksum tells
damaged files. Without a cached file, or without a place for it, loops are compiled, and nothing fails.
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

_HERE = Path(__file__).parent
_DIGEST = hashlib.sha256().digest_size


class MachineCode(NullCache):
    """The compiled forms of one function, a file for each signature and processor.

    It takes the place of `numba`'s cache of a function, for which `numba` has no public interface: `load_overload` and
    `save_overload` are the two methods that it calls.
    """

    def __init__(self, name: str):
        self._name = name

    def load_overload(self, sig, target_context):
        """Return the compiled form for a signature, or `None`."""
        target_context.refresh()
        try:
            content = self._path(sig, target_context.codegen()).read_bytes()
            if hashlib.sha256(content[_DIGEST:]).digest() != content[:_DIGEST]:
                return None  # a damaged file; it is written anew
            return CompileResult._rebuild(target_context, *pickle.loads(content[_DIGEST:]))
        except Exception:  # no file, or a file of another version: the loop is compiled
            return None

    def save_overload(self, sig, data) -> None:
        """Write a compiled form to disk, where that is possible."""
        try:
            content = dumps(data._reduce())
            path = self._path(sig, data.codegen)
            path.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
                file.write(hashlib.sha256(content).digest() + content)
            os.replace(file.name, path)
        except Exception:  # a full disk, say: the loops are compiled and run all the same
            return

    def _path(self, sig, codegen) -> Path:
        key = hashlib.sha256(repr((sig, codegen.magic_tuple())).encode()).hexdigest()
        return folder() / f"{self._name}-{key[:32]}.nbc"


@cache
def folder() -> Path:
    """Return the folder for the machine code of these sources: the first one that can be written to.

    Raises:
        OSError: no folder can be written to.
    """
    own = f"attnres-{sources_digest()[:32]}"
    chosen = [numba.config.CACHE_DIR] if numba.config.CACHE_DIR else [_user_cache() / "attnres", _HERE / "__pycache__"]
    for parent in map(Path, chosen):
        try:
            (parent / own).mkdir(parents=True, exist_ok=True)
            tempfile.TemporaryFile(dir=parent / own).close()
        except OSError:
            continue
        return parent / own
    raise OSError("no folder for compiled loops can be written to")


def sources_digest() -> str:
    """Compute a digest of the files in this folder and of the versions that compile them."""
    digest = hashlib.sha256(repr((sys.version, numba.__version__, llvmlite.__version__)).encode())
    for path in sorted(_HERE.glob("*.py")):
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()


def _user_cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()


__all__ = ["MachineCode", "folder", "sources_digest"]
