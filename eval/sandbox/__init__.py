"""Running generated programs: each in a child process of its own, restricted as far as the operating system allows.

    layer        what it adds
    namespaces   Linux: no network, no other process in sight, a read-only file system, the folder in memory
    landlock     Linux 5.13: no reading but of Python's own files and the system's libraries, no writing outside the
                 folder, no programs; Linux 6.7: no TCP; Linux 6.12: no signals to others
    seccomp      Linux on x86-64 and ARM64: no processes, threads, programs, signals, sockets
    hook         everywhere: the same refusals by Python's audit hook, enough for programs that do not attack Python
    limits       always: time, processor time, memory, file size, open files, processes; no privileges; no environment

The verdict is not the program's to give: its tests run in a second process that sees only plain data of it (`guard`).

What stays open. Without `landlock`, a program that gets past the hook reads what the user can read; without
`namespaces`, it can write many files until its time is over. Without any of the first three (macOS) it also writes
outside, connects and signals as the user can, and macOS does not limit memory. The kernel itself and side channels
(timing, load) are open everywhere.

What does not cross as plain data makes a test fail: a function of the tests given to the program, an object of the
program compared with `==`. What a call does to a list, set or dictionary that it is given reaches the tests; what it
does to those nested in tuples and objects does not.
"""

import functools
import importlib.util
import os
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Collection
from dataclasses import asdict, dataclass
from pathlib import Path

from attnres.eval.sandbox import wire

LAYERS = ("namespaces", "landlock", "seccomp", "hook")


@dataclass(frozen=True)
class Limits:
    """What one program with its tests may use."""

    # Reference solutions of MBPP take milliseconds, the slowest two seconds: the usual limit of 3 s would make its
    # score a matter of the machine's load. Only programs that do not end take as long as this.
    seconds: float = 10.0
    memory: int = 1 << 30  # bytes of address space, for each of the two processes
    file: int = 16 << 20  # bytes of one file; also of what it prints
    disk: int = 64 << 20  # bytes of all files (layer namespaces)
    files: int = 256  # files that it may write
    open_files: int = 64


@dataclass(frozen=True)
class Outcome:
    """Whether the program passed its tests; if not, why not, in one line; and the seconds that it took."""

    passed: bool
    reason: str
    seconds: float


def run(
    program: str,
    tests: str,
    *,
    names: Collection[str],
    helpers: str = "",
    setup: str = "",
    limits: Limits = Limits(),
    layers: Collection[str] | None = None,
) -> Outcome:
    """Run Python source `tests` against Python source `program`: passed if the tests end without an exception.

    Args:
        program: the untrusted code.
        tests: statements, usually asserts; they run outside the program's process.
        names: the names in `tests` that stand for what the program defines.
        helpers: code that defines other names of the tests, trusted as they are.
        setup: code of the tests that builds on the program's classes: it runs in the program's process, after it.
        limits: of time, memory, files.
        layers: those to use, from `LAYERS`; all that work on this machine by default.
    Raises:
        RuntimeError: the restrictions cannot be had here; nothing has run.
    """
    if unknown := [layer for layer in layers or () if layer not in LAYERS]:
        raise ValueError(f"unknown layer {unknown[0]!r}: choose from {', '.join(LAYERS)}")
    chosen = available() if layers is None else (*layers,)
    return _run(program, tests, [*names], helpers, setup, limits, chosen)


def level(layers: Collection[str] | None = None) -> str:
    """The restrictions in one line, for the report: those of `layers`, by default the strongest that work here."""
    titles = {
        "namespaces": "namespaces (user, process, network, IPC, mount)",
        "landlock": "Landlock",
        "seccomp": "seccomp",
        "hook": "audit hook",
    }
    chosen = available() if layers is None else layers
    return ", ".join([*(titles[layer] for layer in LAYERS if layer in chosen), "resource limits"])


@functools.cache
def available() -> tuple[str, ...]:
    """The layers that work here: under each of them alone a small program has passed that imports and computes.

    RuntimeError: not even resource limits exist (Windows).
    """
    if importlib.util.find_spec("resource") is None:
        raise RuntimeError("running generated programs needs resource limits: use Linux, macOS or WSL")
    program = "import fractions\ndef half(x):\n    return fractions.Fraction(x, 2)"
    test = "assert half(3) * 2 == 3"

    def works(layer: str) -> bool:
        try:
            return _run(program, test, ["half"], "", "", Limits(), (layer,)).passed
        except RuntimeError:
            return False

    return tuple(layer for layer in LAYERS if works(layer))


def _run(
    program: str, tests: str, names: list[str], helpers: str, setup: str, limits: Limits, layers: tuple[str, ...]
) -> Outcome:
    start = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="attnres-program-", ignore_cleanup_errors=True) as folder:
        places = dict(folder=os.path.realpath(folder), readable=_readable(), packages=_packages(), caller=os.getpid())
        job = wire.frame(dict(program=program, setup=setup, layers=layers, **places, **asdict(limits)))
        job += wire.frame(dict(helpers=helpers, names=names, tests=tests))
        guard = subprocess.Popen(
            [sys.executable, "-P", "-s", "-S", "-c", _START],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            cwd=folder,
            env=_ENVIRONMENT | {name: os.environ[name] for name in _KEPT if name in os.environ},
            start_new_session=True,
        )
        try:
            # The guard keeps the time; the margin is for one that is itself stuck, in a comparison, say.
            answer, errors = guard.communicate(job, timeout=limits.seconds + _MARGIN)
        except subprocess.TimeoutExpired:
            answer, errors = b"", b""
        finally:
            if guard.poll() is None:
                os.killpg(guard.pid, signal.SIGKILL)  # and with it all that it started
            guard.communicate()
    if answer:
        verdict = wire.unframe(answer)
    elif errors:  # the guard itself failed: afterwards it writes to the program's output
        verdict = dict(error=errors.decode(errors="replace").strip().splitlines()[-1])
    else:
        verdict = dict(passed=False, reason="the checker did not end")
    if "error" in verdict:
        raise RuntimeError(f"the sandbox ({level(layers)}) did not start: {verdict['error']}")
    return Outcome(verdict["passed"], verdict["reason"], time.monotonic() - start)


_MARGIN = 5.0
_START = f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r}); import guard; del sys.path[0]; guard.main()"
_ENVIRONMENT = {
    "LC_ALL": "C.UTF-8",
    "PATH": "/usr/bin:/bin",
    "PYTHONHASHSEED": "0",  # sets of strings in the same order in every run
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
}
_KEPT = ("LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH")  # without it some interpreters do not start


@functools.cache
def _packages() -> list[str]:
    """Where installed packages lie."""
    return sorted({sysconfig.get_path("purelib"), sysconfig.get_path("platlib")})


@functools.cache
def _readable() -> list[str]:
    """What a program may read: Python's own files, installed packages, the system's libraries and time zones."""
    python = {sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib"), os.path.join(sys.base_prefix, "lib")}
    libraries = "/lib /lib64 /usr/lib /usr/lib64 /usr/local/lib /nix/store /etc/ld.so.cache"
    others = "/usr/share/zoneinfo /etc/localtime /dev/null /dev/zero /dev/random /dev/urandom"
    return [*sorted(python), *_packages(), *libraries.split(), *others.split()]
