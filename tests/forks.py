"""Commands in forks of one process that has imported what takes seconds, and has done nothing else.

For tests of what a command computes and says; those of how it starts, of signals and of imports run `python`.
"""

import gc
import multiprocessing
import os
import runpy
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

_FORKS = multiprocessing.get_context("forkserver")
_FORKS.set_forkserver_preload(["attnres", "attnres.conversion", "attnres.training.train", "attnres.commands.app"])


def run(
    *arguments: object, cwd: Path | None = None, env: Mapping[str, str] = os.environ, timeout: float = 600
) -> subprocess.CompletedProcess[str]:
    """What `python ARGUMENTS` writes and returns: `-m MODULE ...`, `-c CODE ...` or a file and its arguments.

    Raises:
        subprocess.TimeoutExpired: it takes longer than `timeout` seconds, and is killed.
    """
    words = [*map(str, arguments)]
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder, name) for name in ("output", "errors")]
        for file in files:
            file.touch()
        given = {"words": words, "cwd": str(cwd or Path.cwd()), "environment": dict(env), "files": files}
        process = _FORKS.Process(target=runpy.run_path, args=(__file__, {"given": given}, "fork"))
        process.start()
        process.join(timeout)
        if process.exitcode is None:
            process.kill()
            process.join()
            raise subprocess.TimeoutExpired(words, timeout)
        return subprocess.CompletedProcess(words, process.exitcode, *(file.read_text() for file in files))


def _become(words: list[str], cwd: str, environment: dict[str, str], files: list[Path]) -> None:
    """Do as the interpreter that is started with these words."""
    gc.freeze()  # what was imported before the fork is no garbage: looking for some there takes long
    for number, file in enumerate(files, start=1):
        os.dup2(os.open(file, os.O_WRONLY | os.O_APPEND), number)
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(environment)
    tempfile.tempdir = None  # `TMPDIR` may have changed
    if (how := words[0]) in ("-m", "-c"):
        words = words[1:]
        sys.path.insert(0, cwd)
    if "PYTHONPATH" in environment:
        sys.path[1:1] = environment["PYTHONPATH"].split(os.pathsep)
    sys.argv = words if how != "-c" else ["-c", *words[1:]]
    if how == "-m":
        runpy.run_module(words[0], run_name="__main__", alter_sys=True)
    elif how == "-c":
        exec(compile(words[0], "<string>", "exec"), {"__name__": "__main__"})
    else:
        runpy.run_path(words[0], run_name="__main__")


if __name__ == "fork":
    _become(**given)  # noqa: F821, given by `run`
