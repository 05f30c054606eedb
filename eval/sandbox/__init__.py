"""Running generated programs: each in a child process of its own, restricted by the Linux kernel.

    layer        what it adds
    namespaces   no network, no other process, a root that holds Python's own files and the system's libraries to be
                 read, and the folder in memory
    landlock     Linux 6.2: no reading but of those same files, no writing outside the folder, no programs; Linux 6.7:
                 no TCP; Linux 6.12: no signals to others
    seccomp      no processes, threads, programs, signals, sockets (x86-64 and ARM64)
    limits       time, processor time, memory, file size, open files; no privileges; no environment

Seccomp, limits, and at least one of namespaces and Landlock (both where the kernel has both), or nothing runs.

The verdict is not the program's to give: its tests run in a second process that sees only plain data of it (`guard`).

What stays open: faults of the kernel itself and side channels (timing, load). Without `namespaces` a program can learn
which files exist, though not what is in them.

What does not cross as plain data makes a test fail: a function of the tests given to the program, an object of the
program compared with `==`. What a call does to a list, set or dictionary that it is given reaches the tests; what it
does to those nested in tuples and objects does not.
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

from attnres.eval.sandbox import wire

LAYERS = ("namespaces", "landlock", "seccomp")


@dataclass(frozen=True)
class Limits:
    """What one program with its tests may use."""

    # Reference solutions of MBPP take milliseconds, the slowest two seconds: the usual limit of 3 s would make its
    # score a matter of the machine's load. Only programs that do not end take as long as this.
    seconds: float = 10.0
    memory: int = 1 << 30  # bytes of address space, for each of the two processes
    file: int = 16 << 20  # bytes of one file; also of what it prints
    disk: int = 64 << 20  # bytes of all files
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
    modules: Collection[str] = (),
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
        modules: the modules of the standard library in `tests` that the program has to import. The tests get the real
            ones, whatever else the program calls so.
        helpers: code that defines other names of the tests, trusted as they are.
        setup: code of the tests that builds on the program's classes: it runs in the program's process, after it.
        limits: of time, memory, files.
        layers: those to use: seccomp and at least one of the others; all that work on this machine by default.
    Raises:
        RuntimeError: the restrictions cannot be had here; nothing has run.
        ValueError: `layers` are too few, or none of ours.
    """
    most = available()
    chosen = most if layers is None else (*layers,)
    if not _enough(chosen):
        raise ValueError(
            f"layers {', '.join(chosen) or 'none'}: choose seccomp with namespaces, with landlock, or with both"
        )
    job = dict(program=program, setup=setup), dict(helpers=helpers, names=[*names], modules=[*modules], tests=tests)
    return _run(*job, limits, chosen)


def level(layers: Collection[str] | None = None) -> str:
    """The restrictions in one line, for the report: those of `layers`, by default the strongest that work here."""
    titles = {
        "namespaces": "namespaces (user, process, network, IPC, mount)",
        "landlock": "Landlock",
        "seccomp": "seccomp",
    }
    chosen = available() if layers is None else layers
    return ", ".join([*(titles[layer] for layer in LAYERS if layer in chosen), "resource limits"])


@functools.cache
def available() -> tuple[str, ...]:
    """The layers that work here: with each of them a small program has passed that imports and computes.

    RuntimeError: they are too few to run what a model wrote.
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


_REFUSAL = (
    "Programs that a model wrote are not run on this machine, where nothing would contain them. It takes Linux with "
    "seccomp and with Landlock (Linux 6.2 or newer) or user namespaces (which a container has to be allowed)."
)


def _enough(layers: Collection[str]) -> bool:
    return "seccomp" in layers and len({*layers}) > 1 and {*layers} <= {*LAYERS}


def _run(program: dict, tests: dict, limits: Limits, layers: tuple[str, ...]) -> Outcome:
    start = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="attnres-program-", ignore_cleanup_errors=True) as folder:
        places = dict(folder=os.path.realpath(folder), readable=_readable(), packages=_packages(), caller=os.getpid())
        job = wire.frame(dict(**program, layers=layers, **places, **asdict(limits))) + wire.frame(tests)
        with os.fdopen(os.memfd_create("job"), "w+b") as file:
            file.write(job)
            file.seek(0)
            guard = subprocess.Popen(
                [sys.executable, "-P", "-s", "-S", "-c", _START],
                stdin=file,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                cwd=folder,
                env=_ENVIRONMENT | {name: os.environ[name] for name in _KEPT if name in os.environ},
                start_new_session=True,
            )
        try:
            reason = _watch(guard.pid, folder, limits, counts="namespaces" not in layers)
        finally:
            # However the guard ended, nothing that it started goes on. It is not waited for yet, so that the number of
            # its group is still its own.
            os.killpg(guard.pid, signal.SIGKILL)
            answer, errors = guard.communicate()
    if answer:
        verdict = wire.unframe(answer)
    elif errors:  # the guard itself failed: afterwards it writes to the program's output
        verdict = dict(error=errors.decode(errors="replace").strip().splitlines()[-1])
    else:
        verdict = dict(passed=False, reason=reason or "the checker was killed")
    if "error" in verdict:
        raise RuntimeError(f"the sandbox ({level(layers)}) did not start: {verdict['error']}")
    return Outcome(verdict["passed"], verdict["reason"], time.monotonic() - start)


def _watch(pid: int, folder: str, limits: Limits, counts: bool) -> str | None:
    """Return when the process `pid` has ended, or what is a reason to end it.

    `counts`: of what the processes write too. Names alone do not tell: a file without one lasts as long as it is open,
    mapped, or on its way through a socket. Where namespaces keep the folder in memory, that limits it.
    """
    # The guard keeps the time; the margin is for one that is itself stuck, in a comparison, say.
    end = time.monotonic() + limits.seconds + _MARGIN
    child, blind = None, 0
    descriptor = os.pidfd_open(pid)
    try:
        ended = select.poll()
        ended.register(descriptor, select.POLLIN)
        while not ended.poll(_GLANCE * 1000):
            if time.monotonic() > end:
                return "the checker did not end"
            sizes = []
            for name in os.listdir(folder):
                with contextlib.suppress(FileNotFoundError):  # removed meanwhile
                    sizes.append(os.lstat(os.path.join(folder, name)).st_size)
            child = child or (_child(pid) if counts else None)
            written = _written(child) if child else 0
            blind = blind + 1 if written is None else 0
            if blind > _BLIND:
                return "the kernel does not say how much it writes"
            if len(sizes) > limits.files or max(sum(sizes), written or 0) > limits.disk:
                return f"wrote more than {limits.files} files or {limits.disk >> 20} MiB"
    finally:
        os.close(descriptor)


def _child(guard: int) -> int | None:
    """The process in which the guard has the program."""
    for name in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):  # ended meanwhile
            fields = Path(f"/proc/{name}/stat").read_bytes().rpartition(b")")[2].split()
            if int(fields[1]) == guard:
                return int(name)
    return None


def _written(pid: int) -> int | None:
    """Bytes that a process has written so far, to whatever; None if the kernel does not say, as before the program.

    The system calls that would not count are refused (`linux.seccomp`).
    """
    try:
        lines = Path(f"/proc/{pid}/io").read_text().splitlines()
    except OSError:
        return None if os.path.exists(f"/proc/{pid}") else 0
    return int(dict(line.split(": ") for line in lines)["wchar"])


_MARGIN = 5.0  # seconds
_GLANCE = 0.05  # seconds between looks at what a program has written
_BLIND = 20  # looks in a row at which the kernel does not say
_START = f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r}); import guard; del sys.path[0]; guard.main()"
_ENVIRONMENT = {
    "LC_ALL": "C.UTF-8",
    "PATH": "/usr/bin:/bin",
    "PYTHONHASHSEED": "0",  # sets of strings in the same order in every run
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
}
_KEPT = ("LD_LIBRARY_PATH",)  # without it some interpreters do not start


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
