"""Commands in forks of one process that has imported what takes seconds, and has done nothing else.

For tests of what a command computes and says, also when it receives a signal at work. Tests of how it starts and of
what it imports run `python`.
"""

import faulthandler
import gc
import multiprocessing.connection
import os
import runpy
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from torch.distributed import TCPStore

_FORKS = multiprocessing.get_context("forkserver")
_FORKS.set_forkserver_preload(
    # The last is what `torch.compile` imports at its first call, which takes a second. Importing it compiles nothing.
    ["attnres", "attnres.conversion", "attnres.training.train", "attnres.commands.app", "torch._inductor.compile_fx"]
)


def run(
    *arguments: object, cwd: Path | None = None, env: Mapping[str, str] = os.environ, timeout: float = 600
) -> subprocess.CompletedProcess[str]:
    """Run `python ARGUMENTS` in a fork, and return its exit status and outputs.

    Args:
        arguments: `-m MODULE ...`, `-c CODE ...` or a file and its arguments.
        cwd: Folder to run in; by default this process's.
        env: Its environment.
        timeout: Seconds until it is killed.

    Raises:
        subprocess.TimeoutExpired: it takes longer than `timeout` seconds, and is killed.
    """
    return _run([*map(str, arguments)], cwd, [dict(env)], timeout)


def launch(
    *arguments: object, processes: int = 2, env: Mapping[str, str] = os.environ, timeout: float = 300
) -> subprocess.CompletedProcess[str]:
    """Run `torchrun --nproc-per-node PROCESSES ARGUMENTS` in forks without a launcher, and return status and outputs.

    As with `torchrun`, when a process fails the others are terminated. The outputs stand one after another, and last
    those of the process that failed first, which tells why; its exit status is the one returned.

    Args:
        arguments: As of [`run`].
        processes: Number of ranks.
        env: Their environment, to which the variables of `torchrun` are added.
        timeout: Seconds until all are killed.

    Raises:
        subprocess.TimeoutExpired: it takes longer than `timeout` seconds, and all are killed.
    """
    with ranks(env, processes) as environments:
        return _run([*map(str, arguments)], None, environments, timeout)


class Fork:
    """A command that runs in a fork, with the part of `subprocess.Popen` that tests of signals need.

    Args:
        words: As of [`run`].
        cwd: Folder to run in.
        env: Its environment.

    Attributes:
        pid: Number of the process.
        stdout: Its output, to read line by line.
    """

    def __init__(self, words: list[str], cwd: Path, env: Mapping[str, str]) -> None:
        self._folder = tempfile.TemporaryDirectory()
        self._errors = Path(self._folder.name, "errors")
        self._errors.touch()
        output, written = multiprocessing.connection.Pipe(duplex=False)
        self._process = _process(words, cwd, env, [written, self._errors])
        self._process.start()
        written.close()  # the fork has the other end, so that its end is the end of the output
        self.pid, self.stdout = self._process.pid, os.fdopen(os.dup(output.fileno()))

    @property
    def returncode(self) -> int | None:
        """The exit status, -N after signal N, or `None` while the fork runs."""
        return self._process.exitcode

    def poll(self) -> int | None:
        return self.returncode

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def kill(self) -> None:
        self._process.kill()

    def communicate(self, timeout: float = 300) -> tuple[str, str]:
        """Return the rest of the output, and all errors, when the fork has ended; after `timeout` seconds, kill it."""
        limit = threading.Timer(timeout, self.kill)
        limit.start()
        try:
            output = self.stdout.read()
            self._process.join()
        finally:
            limit.cancel()
        return output, self._errors.read_text()

    def __enter__(self) -> "Fork":
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.join()
        self.stdout.close()
        self._folder.cleanup()


def start(*arguments: object, cwd: Path | None = None, env: Mapping[str, str] = os.environ) -> Fork:
    """Start `python ARGUMENTS` in a fork, to send signals to; the arguments are those of [`run`]."""
    return Fork([*map(str, arguments)], cwd or Path.cwd(), env)


@contextmanager
def ranks(env: Mapping[str, str], processes: int) -> Iterator[list[dict[str, str]]]:
    """Give the environments of the ranks of `torchrun`.

    As with `torchrun`, the store in which the ranks find each other is not in one of them: when the rank with the store
    is stopped, another one may wait for an answer of the store without a limit.
    """
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    sizes = {"WORLD_SIZE": str(processes), "LOCAL_WORLD_SIZE": str(processes)}
    yield [dict(env) | shared | sizes | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(processes)]


def _run(
    words: list[str], cwd: Path | None, environments: list[dict[str, str]], timeout: float
) -> subprocess.CompletedProcess[str]:
    """Run a command in one process for each environment, all at once."""
    with tempfile.TemporaryDirectory() as folder:
        streams, processes = [], []
        for number, environment in enumerate(environments):
            files = [Path(folder, f"{name}{number}") for name in ("output", "errors")]
            for file in files:
                file.touch()
            processes.append(_process(words, cwd or Path.cwd(), environment, files))
            streams.append(files)
        for process in processes:
            process.start()
        try:
            failed = _wait(processes, timeout)
        except TimeoutError:
            raise subprocess.TimeoutExpired(words, timeout) from None
        finally:
            for process in processes:
                process.kill()
                process.join()
        if failed is not None:
            streams.append(streams.pop(processes.index(failed)))
        output, errors = ("".join(file.read_text() for file in files) for files in zip(*streams))
        return subprocess.CompletedProcess(words, 0 if failed is None else failed.exitcode, output, errors)


def _process(
    words: list[str], cwd: Path, env: Mapping[str, str], files: Sequence[Path | multiprocessing.connection.Connection]
) -> multiprocessing.process.BaseProcess:
    """Return a process that runs a command, whose output and errors go into two files or pipes."""
    given = {"words": words, "cwd": str(cwd), "environment": dict(env), "files": files}
    return _FORKS.Process(target=runpy.run_path, args=(__file__, {"given": given}, "fork"))


def _wait(
    processes: Sequence[multiprocessing.process.BaseProcess], timeout: float
) -> multiprocessing.process.BaseProcess | None:
    """Wait for all processes, and return the first that failed; then terminate the others, within half a minute."""
    end, running = time.monotonic() + timeout, {process.sentinel: process for process in processes}
    failed = None
    while running:
        ended = [*map(running.pop, multiprocessing.connection.wait(running, max(0, end - time.monotonic())))]
        if not ended and failed is not None:
            return failed
        if not ended:
            raise TimeoutError
        if now := [process for process in ended if process.exitcode]:
            # Of several at once, the one that a signal ended: the others lost their connection to it.
            failed = failed or min(now, key=lambda process: process.exitcode)
            end = min(end, time.monotonic() + 30)
            for process in running.values():
                process.terminate()
    return failed


def _become(
    words: list[str],
    cwd: str,
    environment: dict[str, str],
    files: Sequence[Path | multiprocessing.connection.Connection],
) -> None:
    """Do as the interpreter that is started with these words."""
    gc.freeze()  # what was imported before the fork is no garbage: looking for some there takes long
    for number, file in enumerate(files, start=1):
        os.dup2(os.open(file, os.O_WRONLY | os.O_APPEND) if isinstance(file, Path) else file.fileno(), number)
    faulthandler.enable()  # so that a crash of a library tells where
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
