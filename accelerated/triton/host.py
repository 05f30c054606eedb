"""Compile `host.cpp` once per machine and version of PyTorch, and load it."""

import hashlib
import importlib.util
import os
import platform
import shlex
import shutil
import subprocess
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
_loaded: list[ModuleType | None] = []  # what the first call of `load` returned


def load() -> ModuleType | None:
    """Return the compiled module; warn and return `None` if it cannot be compiled here.

    The first call on a machine compiles for about half a minute, by the C++ compiler of the environment variable CXX
    or else by `c++`. Later processes load the file.
    """
    if not _loaded:
        module = reason = None
        try:
            module = _find() or _make()
        except Exception as error:
            lines = str(getattr(error, "stderr", None) or error).splitlines() or [type(error).__name__]
            reason = next((line for line in lines if "error:" in line), lines[0])
        _loaded.append(module)  # before the warning, which may be an error
        if module is None:
            warnings.warn(
                f"The host's work for a read on a GPU takes longer, because {SOURCE.name} could not be compiled: "
                f"{reason}. It needs a compiler for C++20, such as GCC 11 (`apt-get install g++`), and a folder to "
                "write to.",
                stacklevel=2,
            )
    return _loaded[0]


def _find() -> ModuleType | None:
    """Load the file that an earlier process has compiled, also from a folder that cannot be written to."""
    for parent in usual_parents(__file__):
        file = parent / _folder() / f"{_NAME}.so"
        try:
            # A damaged file could end the process when it is loaded.
            if hashlib.sha256(file.read_bytes()).hexdigest() == _digest_file(file).read_text():
                return _import(file)
        except (OSError, ImportError):
            continue
    return None


def _make() -> ModuleType:
    """Compile the file and load it."""
    folder = writable_folder(_folder(), usual_parents(__file__))
    file = folder / f"{_NAME}.so"
    try:
        with FileLock(f"{file}.lock"):  # one of several processes compiles
            if (module := _find()) is not None:
                return module
            for remains in folder.glob("tmp*"):  # of processes that were killed
                shutil.rmtree(remains, ignore_errors=True)
            _compile(file)
    except NotImplementedError:  # the file system has no locks
        _compile(file)
    return _import(file)


def _folder() -> str:
    made_by = torch.__version__, sysconfig.get_config_var("EXT_SUFFIX"), platform.machine()
    digest = hashlib.sha256(repr(made_by).encode() + SOURCE.read_bytes()).hexdigest()
    return f"host-{digest[:32]}"


def _digest_file(file: Path) -> Path:
    return file.with_suffix(".sha256")


def _import(file: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(_NAME, file)
    if spec is None or spec.loader is None:
        raise ImportError(f"{file} is no extension module")
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
            *(shlex.split(os.environ.get("CXX", "")) or ["c++"]), "-std=c++20", "-O2", "-fPIC", "-shared",
            "-fvisibility=hidden", f"-DTORCH_EXTENSION_NAME={_NAME}", *(f"-isystem{path}" for path in headers),
            str(SOURCE), *(f"-L{path}" for path in cpp_extension.library_paths()),
            *(f"-l{name}" for name in _LIBRARIES), "-o", str(result),
        ]  # fmt: skip
        subprocess.run(command, check=True, capture_output=True, text=True, errors="replace")
        digest = _digest_file(result)
        digest.write_text(hashlib.sha256(result.read_bytes()).hexdigest())
        os.replace(result, file)
        os.replace(digest, _digest_file(file))


__all__ = ["SOURCE", "load"]
