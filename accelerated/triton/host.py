"""Compile `host.cpp` once per machine and version of PyTorch, and load it."""

import functools
import hashlib
import importlib.util
import os
import platform
import subprocess
import sys
import sysconfig
import tempfile
import warnings
from pathlib import Path
from types import ModuleType

import torch
from filelock import FileLock

from ..machine_code import usual_parents, writable_folder

SOURCE = Path(__file__).with_suffix(".cpp")
_NAME = "attnres_host"
_LIBRARIES = "c10", "torch_cpu", "torch", "torch_python"


@functools.cache
def load() -> ModuleType | None:
    """Return the compiled module; warn and return `None` if it cannot be compiled here.

    The first call on a machine compiles for about half a minute, by the C++ compiler of the environment variable CXX
    or else by `c++`. Later processes load the file.
    """
    try:
        made_by = torch.__version__, sys.implementation.cache_tag, platform.machine()
        digest = hashlib.sha256(repr(made_by).encode() + SOURCE.read_bytes()).hexdigest()
        file = writable_folder(f"host-{digest[:32]}", usual_parents(__file__)) / f"{_NAME}.so"
        with FileLock(f"{file}.lock"):  # one of several processes compiles
            try:
                return _import(file)
            except ImportError:  # the file is missing or damaged
                _compile(file)
                return _import(file)
    except Exception as error:
        lines = str(getattr(error, "stderr", None) or error).splitlines() or [type(error).__name__]
        reason = next((line for line in lines if "error:" in line), lines[0])
        warnings.warn(
            f"The host's work for a read on a GPU takes longer, because {SOURCE.name} does not compile: {reason}. "
            "It needs a compiler for C++20, such as GCC 11 (`apt-get install g++`).",
            stacklevel=2,
        )
        return None


def _import(file: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(_NAME, file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _compile(file: Path) -> None:
    """Compile beside the file and rename, so that an interrupt leaves no half of it."""
    from torch.utils import cpp_extension  # imports setuptools

    headers = [*cpp_extension.include_paths(), sysconfig.get_path("include")]
    with tempfile.TemporaryDirectory(dir=file.parent) as folder:
        result = Path(folder) / file.name
        command = [
            *(os.environ.get("CXX") or "c++").split(), "-std=c++20", "-O2", "-fPIC", "-shared",
            f"-DTORCH_EXTENSION_NAME={_NAME}", *(f"-isystem{path}" for path in headers), str(SOURCE),
            *(f"-L{path}" for path in cpp_extension.library_paths()), *(f"-l{name}" for name in _LIBRARIES),
            "-o", str(result),
        ]  # fmt: skip
        subprocess.run(command, check=True, capture_output=True, text=True)
        os.replace(result, file)


__all__ = ["SOURCE", "load"]
