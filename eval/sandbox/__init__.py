"""Run generated programs, each in a separate process that the Linux kernel restricts.

    layer        effect
    namespaces   no network, no other processes; a root with nothing but Python's files and the system's libraries, all
                 read-only, and a folder in memory
    landlock     Linux 6.2: reads only those same files, writes only in the folder, runs no programs; Linux 6.7: no TCP;
                 Linux 6.12: no signals to other processes
    seccomp      no processes, threads, programs, signals or sockets (x86-64 and ARM64)
    limits       time, processor time, memory, file size, open files; no privileges; no environment

A program runs only with seccomp, the limits, and at least one of namespaces and Landlock (both if the kernel has both).

The program cannot forge the verdict, because its tests run in a second process, the guard, which receives only plain
data from it.

Two gaps remain: faults of the kernel itself, and side channels (timing, load). Without `namespaces`, a program can also
learn which files exist, though not their content.

A test fails if it needs more than plain data from the program, for example if it passes a function to the program or
compares objects of the program by their `__eq__`. A call that changes a list, set or dictionary among its arguments
changes it for the tests too, unless it is nested in a tuple or an object.
"""

import contextlib
import functools
import os
import select
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Collection
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from attnres.eval.sandbox import wire

LAYERS = ("namespaces", "landlock", "seccomp")

_REFUSAL = (
    "Programs that a model wrote are not run on this machine, because it cannot contain them. The sandbox needs Linux "
    "with seccomp, and with Landlock (Linux 6.2 or newer) or user namespaces (which containers often forbid)."
)

_MARGIN_SECONDS = 5.0  # after a program's time limit, until a guard that is stuck is killed
_POLL_SECONDS = 0.05  # between two readings of what a program has written
_MAX_UNREADABLE = 20  # readings in a row that the kernel may refuse
# The guard process has no site-packages (-S), so it imports its modules from this folder by name.
_START = f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r}); import guard; del sys.path[0]; guard.main()"
# The whole environment of the guard and the program, with `_INHERITED`.
_ENVIRONMENT = {
    "LC_ALL": "C.UTF-8",
    "PATH": "/usr/bin:/bin",
    "PYTHONHASHSEED": "0",  # so that sets of strings have the same order in every run
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
}
_INHERITED = ("LD_LIBRARY_PATH",)  # some interpreters do not start without it


@dataclass(frozen=True)
class Limits:
    """The resources that one program may use together with its tests.

    Attributes:
        seconds: Wall-clock seconds. Most reference solutions of MBPP take milliseconds; the slowest takes two seconds.
            With the usual limit of 3 s, a score would depend on the machine's load.
        memory: Bytes of address space, for each of the two processes.
        file: Bytes of one file, and of the printed output.
        disk: Bytes of all files.
        files: The number of files that it may write.
        open_files: The number of files that it may have open.
    """

    seconds: float = 10.0
    memory: int = 1 << 30
    file: int = 16 << 20
    disk: int = 64 << 20
    files: int = 256
    open_files: int = 64


@dataclass(frozen=True)
class Outcome:
    """The outcome of a program.

    Attributes:
        passed: Whether it passed its tests.
        reason: One line on why it failed, or `passed`.
        seconds: How long the run took, in wall-clock seconds.
    """

    passed: bool
    reason: str
    seconds: float


def run(
    program: str,
    tests: str,
    *,
    names: Collection[str],
    modules: Collection[str] = (),
    helpers: str = "",
    setup: str = "",
    limits: Limits = Limits(),
    layers: Collection[str] | None = None,
) -> Outcome:
    """Run tests against a program. It passes if the tests end without an exception.

    Args:
        program: The untrusted Python source.
        tests: Statements in Python, usually asserts. They run outside of the program's process.
        names: The names in `tests` that the program must define.
        modules: The modules of the standard library in `tests` that the program must import. The tests receive the real
            modules, even if the program defines something else by that name.
        helpers: Source that defines other names for the tests. It is trusted and runs where the tests run.
        setup: Source that prepares the tests with the program's classes. It runs in the program's process, after the
            program.
        limits: The resources that the program may use.
        layers: The layers to use: seccomp and at least one other. By default all that work on this machine.

    Raises:
        RuntimeError: This machine lacks the restrictions. Nothing has run.
        ValueError: `layers` are too few or unknown.
    """
    usable = available()
    chosen = usable if layers is None else (*layers,)
    if not _enough(chosen):
        raise ValueError(
            f"layers {', '.join(chosen) or 'none'}: choose seccomp with namespaces, with landlock, or with both"
        )
    job = dict(program=program, setup=setup), dict(helpers=helpers, names=[*names], modules=[*modules], tests=tests)
    return _run(*job, limits, chosen)


def level(layers: Collection[str] | None = None) -> str:
    """Return one line that names the restrictions, by default all that work on this machine."""
    titles = {
        "namespaces": "namespaces (user, process, network, IPC, mount)",
        "landlock": "Landlock",
        "seccomp": "seccomp",
    }
    chosen = available() if layers is None else layers
    return ", ".join([*(titles[layer] for layer in LAYERS if layer in chosen), "resource limits"])


@functools.cache
def available() -> tuple[str, ...]:
    """Return the layers that work on this machine, each tested by a small program that imports and computes.

    Raises:
        RuntimeError: They are too few to run generated programs.
    """
    if sys.platform != "linux":
        raise RuntimeError(f"{_REFUSAL} This is {sys.platform}.")
    program = dict(program="import fractions\ndef half(x):\n    return fractions.Fraction(x, 2)", setup="")
    tests = dict(helpers="", names=["half"], modules=[], tests="assert half(3) * 2 == 3")
    missing = {}
    for layer in "namespaces", "landlock":
        try:
            outcome = _run(program, tests, Limits(), (layer, "seccomp"))
        except RuntimeError as error:
            missing[layer] = str(error)
        else:
            if not outcome.passed:
                missing[layer] = f"{layer}: {outcome.reason}"
    if len(missing) > 1:
        raise RuntimeError(f"{_REFUSAL} Here {'; '.join(missing.values())}.")
    return tuple(layer for layer in LAYERS if layer not in missing)


def _enough(layers: Collection[str]) -> bool:
    """Return whether layers suffice: seccomp and at least one other, all of them known."""
    return "seccomp" in layers and len({*layers}) > 1 and {*layers} <= {*LAYERS}


def _run(program: dict, tests: dict, limits: Limits, layers: tuple[str, ...]) -> Outcome:
    """Start the guard in a temporary folder, send it the program and its tests, and return its verdict."""
    start = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="attnres-program-", ignore_cleanup_errors=True) as folder:
        paths = dict(folder=os.path.realpath(folder), readable=_readable(), packages=_packages(), caller=os.getpid())
        job = wire.frame(dict(**program, layers=layers, **paths, **asdict(limits))) + wire.frame(tests)
        with os.fdopen(os.memfd_create("job"), "w+b") as file:
            file.write(job)
            file.seek(0)
            guard = subprocess.Popen(
                [sys.executable, "-P", "-s", "-S", "-c", _START],
                stdin=file,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                cwd=folder,
                env=_ENVIRONMENT | {name: os.environ[name] for name in _INHERITED if name in os.environ},
                start_new_session=True,
            )
        try:
            reason = _watch(guard.pid, folder, limits, count_writes="namespaces" not in layers)
        finally:
            # However the guard ended, end everything that it started. Nothing has waited for the guard yet, so no other
            # process group can have its number by now.
            os.killpg(guard.pid, signal.SIGKILL)
            answer, errors = guard.communicate()
    verdict: dict[str, Any]
    if answer:
        verdict = wire.unframe(answer)
    elif errors:  # the guard failed at its start; later its errors go to the program's output
        verdict = dict(error=errors.decode(errors="replace").strip().splitlines()[-1])
    else:
        verdict = dict(passed=False, reason=reason or "the guard was killed")
    if "error" in verdict:
        raise RuntimeError(f"the sandbox ({level(layers)}) did not start: {verdict['error']}")
    return Outcome(verdict["passed"], verdict["reason"], time.monotonic() - start)


def _watch(pid: int, folder: str, limits: Limits, count_writes: bool) -> str | None:
    """Wait until the guard has ended, or return the reason to end it.

    Args:
        pid: The guard's process id.
        folder: The folder in which the program may write.
        limits: The resources that the program may use.
        count_writes: Whether to read the kernel's counter of written bytes too. A sum over the folder misses files
            without a name, which last as long as they are open, mapped, or on their way through a socket. Namespaces
            need no counter, because there the folder is a file system in memory of limited size.
    """
    # The guard keeps the time. The margin is for a guard that is stuck itself, for example in a comparison.
    end = time.monotonic() + limits.seconds + _MARGIN_SECONDS
    child, num_unreadable = None, 0
    descriptor = os.pidfd_open(pid)
    try:
        ended = select.poll()
        ended.register(descriptor, select.POLLIN)
        while not ended.poll(_POLL_SECONDS * 1000):
            if time.monotonic() > end:
                return "the guard did not end"
            sizes = []
            for name in os.listdir(folder):
                with contextlib.suppress(FileNotFoundError):  # removed meanwhile
                    sizes.append(os.lstat(os.path.join(folder, name)).st_size)
            child = child or (_child(pid) if count_writes else None)
            written = _written(child) if child else 0
            num_unreadable = num_unreadable + 1 if written is None else 0
            if num_unreadable > _MAX_UNREADABLE:
                return "the kernel does not show how much it writes"
            if len(sizes) > limits.files or max(sum(sizes), written or 0) > limits.disk:
                return f"wrote more than {limits.files} files or {limits.disk >> 20} MiB"
    finally:
        os.close(descriptor)


def _child(guard: int) -> int | None:
    """Return the id of the process in which the guard runs the program, its only child; `None` before it exists."""
    for name in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):  # ended meanwhile
            fields = Path(f"/proc/{name}/stat").read_bytes().rpartition(b")")[2].split()
            if int(fields[1]) == guard:
                return int(name)
    return None


def _written(pid: int) -> int | None:
    """Return how many bytes a process has written so far, to any file.

    System calls that the kernel does not count are refused (`linux.seccomp`).

    Returns:
        The number. 0 if the process has ended. `None` if the kernel does not show it, as before the program starts.
    """
    try:
        lines = Path(f"/proc/{pid}/io").read_text().splitlines()
    except OSError:
        return None if os.path.exists(f"/proc/{pid}") else 0
    return int(dict(line.split(": ") for line in lines)["wchar"])


@functools.cache
def _packages() -> list[str]:
    """Return the folders of installed packages."""
    return sorted({sysconfig.get_path("purelib"), sysconfig.get_path("platlib")})


@functools.cache
def _readable() -> list[str]:
    """Return the paths that a program may read: Python, installed packages, the system's libraries and time zones."""
    python = {sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib"), os.path.join(sys.base_prefix, "lib")}
    libraries = "/lib /lib64 /usr/lib /usr/lib64 /usr/local/lib /nix/store /etc/ld.so.cache"
    others = "/usr/share/zoneinfo /etc/localtime /dev/null /dev/zero /dev/random /dev/urandom"
    return [*sorted(python), *_packages(), *libraries.split(), *others.split()]
