"""The sandbox contains generated programs: hostile ones fail, change nothing, leave nothing, and the run goes on."""

import os
import re
import resource
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from multiprocessing import get_context
from pathlib import Path

import psutil
import pytest

from attnres.eval import sandbox
from attnres.eval.sandbox import LAYERS, Limits, linux

from .layers import EACH_COMBINATION, SUPPORTED


@pytest.fixture
def folders(tmp_path, monkeypatch) -> Path:
    """Return the folder in which the sandbox makes its folders. It must leave none."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    (tmp_path / "temporary").mkdir()
    return tmp_path / "temporary"


def processes() -> set[psutil.Process]:
    """Return all processes of any sandbox, which share the guard's command line."""
    return {
        p for p in psutil.process_iter(["cmdline"]) if any("guard.main()" in part for part in p.info["cmdline"] or ())
    }


def gone(started: set[psutil.Process]) -> bool:
    """Return whether all these processes end within a minute."""
    return not psutil.wait_procs(started, timeout=60)[1]


def attack(program: str, layers=None, **limits) -> sandbox.Outcome:
    """Run a program whose function `attack` returns "done" if nothing stops it, which counts as passed."""
    return sandbox.run(program, "assert attack() == 'done'", names=["attack"], limits=Limits(**limits), layers=layers)


def body(*lines: str) -> str:
    return "\n    ".join(["def attack():", "import ctypes, os, signal, socket, sys, time", *lines, "return 'done'"])


def signal_owner(*lines: str) -> list[str]:
    """Return code that runs `lines` for each pipe `d` of the program, such as that of the guard's questions."""
    return ["import stat", "for d in range(3, 64):", "    try: pipe = stat.S_ISFIFO(os.fstat(d).st_mode)",
            "    except OSError: continue", *(f"    if pipe: {line}" for line in lines)]  # fmt: skip


REFUSED = r"PermissionError|OSError|Errno"
# Name -> (program, possible reasons of its failure). `untouched` defines HOME, PORT, DOOR, BOX, VICTIM and CALLER.
ATTACKS = {
    "loops": (body("while True: pass"), "ran longer than 0.2 s"),
    "loops while it loads": ("while True: pass", "ran longer than 0.2 s"),
    "sleeps and ignores signals": (
        body("for s in signal.SIGTERM, signal.SIGALRM: signal.signal(s, signal.SIG_IGN)", "time.sleep(100)"),
        "ran longer than 0.2 s",
    ),
    "answers for ever": (
        body("class Answer(list):", "    def __iter__(self):", "        while True: yield 1", "return Answer()"),
        "ran longer than 0.2 s|MemoryError",
    ),
    "allocates at once": (body("bytearray(1 << 40)"), "MemoryError"),
    "allocates bit by bit": (body("x = []", "while True: x.append(bytearray(1 << 24))"), "MemoryError"),
    "recurses without end": (body("attack()"), "RecursionError"),
    "crashes": (body("ctypes.string_at(0)"), "Segmentation fault|PermissionError"),
    "forks": (body("for _ in range(200):", "    if os.fork() == 0: time.sleep(100)"), REFUSED),
    "forks by the C library": (body("if ctypes.CDLL(None).fork() < 0: raise OSError('no fork')"), REFUSED),
    "starts a program": (body("import subprocess", "subprocess.run(['touch', HOME + '/new'])"), REFUSED),
    "starts a shell": (body("assert os.system('touch ' + HOME + '/new') == 0"), REFUSED + "|AssertionError"),
    "becomes a program": (body("os.execv('/bin/true', ['true'])"), REFUSED),
    "creates a file at home": (body("open(HOME + '/new', 'w').close()"), REFUSED),
    "writes to a file at home": (body("open(HOME + '/file', 'r+').write('x')"), REFUSED),
    "removes a file at home": (body("os.remove(HOME + '/file')"), REFUSED),
    "renames a file at home": (body("os.rename(HOME + '/file', HOME + '/new')"), REFUSED),
    "changes a mode at home": (body("os.chmod(HOME + '/file', 0o777)"), REFUSED),
    "truncates a file at home": (body("os.truncate(HOME + '/file', 0)"), REFUSED),
    "changes times at home": (body("os.utime(HOME + '/file', (0, 0))"), REFUSED),
    "makes a folder": (body("os.mkdir('folder')"), REFUSED),
    "links out of its folder": (body("os.symlink(HOME, 'link')", "open('link/new', 'w').close()"), REFUSED),
    "reads a file at home": (body("assert open(HOME + '/file').read()"), REFUSED),
    "lists the home directory": (body("os.listdir(HOME)"), REFUSED),
    "reads the accounts": (body("open('/etc/passwd').read()"), REFUSED),
    "reads a secret of the environment": (body("assert 'SECRET' in str(os.environ)"), "AssertionError"),
    "reads the caller's environment": (body("assert open(f'/proc/{CALLER}/environ').read()"), REFUSED),
    "reads the guard's environment": (body("assert open(f'/proc/{os.getppid()}/environ').read()"), REFUSED),
    "reads the caller's memory": (body("open(f'/proc/{CALLER}/mem', 'rb')"), REFUSED),
    "connects": (body("socket.create_connection(('127.0.0.1', PORT), 5)"), REFUSED),
    "connects by a file": (body("socket.socket(socket.AF_UNIX).connect(DOOR)"), REFUSED),
    "sends to a file": (body("socket.socketpair(type=socket.SOCK_DGRAM)[0].sendto(b'x', BOX)"), REFUSED),
    "sends to a file by an extended pair": (
        body("socket.socketpair(type=socket.SOCK_DGRAM | socket.SOCK_CLOEXEC)[0].sendmsg([b'x'], [], 0, BOX)"), REFUSED,
    ),
    "sends to a file by a stream": (body("socket.socketpair()[0].sendto(b'x', BOX)"), REFUSED),
    "takes a name": (body("socket.socketpair()[0].bind('\\0attnres')"), REFUSED),
    "opens a device": (
        body(
            "known = {'null', 'zero', 'random', 'urandom'}",
            "if {*os.listdir('/dev')} <= known: raise OSError('no other device')",
        ),
        REFUSED,
    ),
    "listens": (body("s = socket.socket()", "s.bind(('127.0.0.1', 0))", "s.listen()"), REFUSED),
    "kills another process": (body("os.kill(VICTIM, signal.SIGKILL)"), REFUSED + "|ProcessLookup"),
    "kills its parent": (body("os.kill(os.getppid(), signal.SIGKILL)"), REFUSED),
    "signals every process": (body("os.kill(-1, 0)"), REFUSED),
    "kills its parent by a signal of their pipe": (
        body("import fcntl", *signal_owner("fcntl.fcntl(d, 8, os.getppid())", "fcntl.fcntl(d, 10, signal.SIGKILL)")),
        REFUSED,
    ),
    "asks for signals of a pipe": (body("import fcntl", *signal_owner("fcntl.fcntl(d, 4, 0x2000)")), REFUSED),
    "gives a pipe to another": (
        body("import fcntl, struct", *signal_owner("fcntl.fcntl(d, 15, struct.pack('ii', 1, VICTIM))")), REFUSED,
    ),
    "gives a pipe to another by ioctl": (
        body("import fcntl, struct", *signal_owner("fcntl.ioctl(d, 0x8901, struct.pack('i', VICTIM))")), REFUSED,
    ),
    "asks for signals of a pipe by ioctl": (
        body("import fcntl, struct", *signal_owner("fcntl.ioctl(d, 0x5452, struct.pack('i', 1))")), REFUSED,
    ),
    "writes into every pipe in sight": (
        body(
            "import json",
            "text = json.dumps(dict(passed=True, reason='passed')).encode()",
            "for pid in [CALLER, os.getppid(), *filter(str.isdigit, os.listdir('/proc'))]:",
            "    for name in os.listdir(f'/proc/{pid}/fd'):",
            "        d = os.open(f'/proc/{pid}/fd/{name}', os.O_WRONLY)",
            "        os.write(d, len(text).to_bytes(4, 'big') + text)",
        ),
        REFUSED,
    ),
    "outlives its parent": (body("if ctypes.CDLL(None).prctl(1, 0): raise OSError('no such thing')"), REFUSED),
    "opens itself to others": (body("if ctypes.CDLL(None).prctl(4, 1): raise OSError('no such thing')"), REFUSED),
    "prints a gigabyte": (body("for _ in range(1 << 10): print('x' * (1 << 20))"), "File too large"),
    "writes a large file": (body("open('a', 'wb').write(bytes(1 << 25))"), "File too large"),
    "writes many files": (
        body("for i in range(300): open(str(i), 'w').write('x' * 1000)", "time.sleep(5)"),
        REFUSED + "|wrote more than 256 files or 64 MiB",
    ),
    "fills the disk": (
        body("for i in range(9): open(str(i), 'wb').write(bytes(1 << 23))", "time.sleep(5)"),
        REFUSED + "|wrote more than 256 files or 64 MiB",
    ),
    "fills the disk with files without names that it keeps": (
        body(
            "libc, x = ctypes.CDLL(None), bytes(1 << 20)",
            "libc.mmap.restype, libc.mmap.argtypes = ctypes.c_void_p, [ctypes.c_size_t] * 6",
            "for i in range(40):",
            "    d = os.open('a', os.O_RDWR | os.O_CREAT)",
            "    os.unlink('a')",
            "    for _ in range(8): os.write(d, x)",
            "    if libc.mmap(0, 4096, 1, 2, d, 0) == 2**64 - 1: raise OSError('not mapped')",
            "    os.close(d)",
            "    time.sleep(0.01)",
            "time.sleep(5)",
        ),
        REFUSED + "|wrote more than 256 files or 64 MiB",
    ),
    "fills the disk without writing": (
        body(
            "for i in range(9):",
            "    with open('a', 'wb') as file: os.posix_fallocate(file.fileno(), 0, 1 << 23)",
            "    os.unlink('a')",
        ),
        REFUSED,
    ),
    "writes by a mapped file": (
        body("import mmap", "file = open('a', 'w+b')", "file.truncate(4096)", "mmap.mmap(file.fileno(), 4096)"),
        REFUSED,
    ),
    "splices": (
        body(
            "r, w = os.pipe()", "os.write(w, b'x')", "d = os.open('a', os.O_RDWR | os.O_CREAT)",
            "if ctypes.CDLL(None, use_errno=True).splice(r, None, d, None, 1, 0) < 0: raise OSError('no splice')",
        ),
        REFUSED,
    ),
    "keeps files in a socket": (
        body("a, b = socket.socketpair()", "socket.send_fds(a, [b'x'], [os.open('a', os.O_RDWR | os.O_CREAT)])"),
        REFUSED,
    ),
    "opens many files": (body("x = [open(os.devnull) for _ in range(100)]"), REFUSED),
    "raises its limits": (body("import resource", "resource.setrlimit(0, (999, 999))"), REFUSED + "|ValueError"),
    "exits while it loads": (f"{body()}\nimport sys\nsys.exit(0)", "raised SystemExit"),
    "exits in the call": (body("raise SystemExit(0)"), "raised SystemExit"),
    "exits at once": (body("os._exit(0)"), "status 0 before the tests were done"),
    "exits when it ends": (body("import atexit", "atexit.register(os._exit, 0)", "sys.exit()"), "raised SystemExit"),
    "closes everything": (body("os.closerange(0, 64)", "time.sleep(100)"), "Errno 9|closed its pipe|status 1"),
    "reads its input": (body("input()"), "EOFError"),
    "forges a verdict": (
        body(
            "import json",
            'text = json.dumps(dict(passed=True, reason="passed")).encode()',
            "for d in range(64):",
            "    try: os.write(d, len(text).to_bytes(4, 'big') + text)",
            "    except OSError: pass",
            "raise ValueError",
        ),
        "AssertionError",
    ),
}  # fmt: skip


@pytest.fixture
def untouched(tmp_path, monkeypatch):
    """Return the first lines of a program, which name targets of attacks. After the test, no target has changed."""
    monkeypatch.setenv("ATTNRES_TEST_TOKEN", "SECRET")
    home = tmp_path / "home"
    home.mkdir()
    (home / "file").write_text("content")
    (home / "file").chmod(0o600)
    os.utime(home / "file", (1, 1))
    victim = subprocess.Popen(["sleep", "100"])
    streams, datagrams = socket.SOCK_STREAM, socket.SOCK_DGRAM
    with (
        socket.create_server(("127.0.0.1", 0)) as port,
        socket.socket(socket.AF_UNIX, streams) as door,
        socket.socket(socket.AF_UNIX, datagrams) as box,
        tempfile.TemporaryDirectory(dir="/tmp") as short,  # the path of a Unix socket must be short
    ):
        door.bind(f"{short}/door")
        door.listen()
        box.bind(f"{short}/box")
        places = dict(HOME=str(home), PORT=port.getsockname()[1], VICTIM=victim.pid)
        places |= dict(DOOR=f"{short}/door", BOX=f"{short}/box")
        yield "\n".join(f"{name} = {value!r}" for name, value in (places | {"CALLER": os.getpid()}).items())
        for listener in port, door:
            listener.setblocking(False)
            with pytest.raises(BlockingIOError):
                listener.accept()
        with pytest.raises(BlockingIOError):
            box.recv(1, socket.MSG_DONTWAIT)
    assert sorted(path.name for path in home.iterdir()) == ["file"]
    assert (home / "file").read_text() == "content"
    assert (home / "file").stat().st_mode & 0o777 == 0o600
    assert (home / "file").stat().st_mtime == 1
    assert victim.poll() is None
    victim.kill()
    victim.wait()


# Limits and seccomp are the same beside namespaces and Landlock. Attacks on files, processes and the network meet both.
OUTSIDE = re.compile(r"\b(HOME|PORT|DOOR|BOX|VICTIM|CALLER)\b|getppid|/etc|/dev|socket\.|kill\(|open\(|fork")
CASES = [
    (name, layers)
    for number, (name, (program, _)) in enumerate(ATTACKS.items())
    for layers in (SUPPORTED if OUTSIDE.search(program) else [SUPPORTED[number % len(SUPPORTED)]])
]


@pytest.mark.parametrize(("name", "layers"), CASES, ids=lambda value: value if value in ATTACKS else "+".join(value))
def test_hostile_program_is_contained_and_fails(name, layers, untouched, folders):
    program, reason = ATTACKS[name]
    before = processes()
    seconds = 0.2 if "0.2 s" in reason else 20
    outcome = attack(f"{untouched}\n{program}", layers, seconds=seconds, memory=256 << 20)
    assert not outcome.passed
    assert any(part in outcome.reason for part in reason.split("|")), outcome.reason
    assert outcome.seconds < 60  # it was killed, since the programs run for 100 s or for ever
    assert not list(folders.iterdir())
    assert gone(processes() - before)


def test_run_goes_on_after_hostile_programs(untouched, folders):
    for name in "loops", "exits at once", "kills its parent", "allocates at once":
        program, seconds = f"{untouched}\n{ATTACKS[name][0]}", 0.2 if name == "loops" else 20
        assert not attack(program, seconds=seconds, memory=256 << 20).passed
    assert attack(body()).passed


HONEST = """
import collections, dataclasses, functools, heapq, itertools, json, math, os, re, statistics, typing, zoneinfo
assert os.listdir() == []
@dataclasses.dataclass
class Pair:
    first: int
    second: int = 0
class Row(typing.NamedTuple):
    cells: tuple = ()
def answer(x):
    with open("notes", "w") as file: file.write("noted")
    assert open("notes").read() == "noted" and zoneinfo.ZoneInfo("UTC")
    print("working on", x)
    return [Pair(x, 2).first, Row().cells, math.sqrt(x), statistics.mean([x, x]), sorted({"b", "a"})]
"""


@EACH_COMBINATION
def test_honest_program_passes_under_every_layer(layers):
    test = "assert answer(4) == [4, (), 2.0, 4, ['a', 'b']]"
    assert sandbox.run(HONEST, test, names=["answer"], layers=layers).reason == "passed"


@EACH_COMBINATION
def test_program_may_use_an_event_loop_locks_and_temporary_files(layers):
    program = """
import asyncio, fcntl, os, tempfile, threading
async def later(x):
    await asyncio.sleep(0.001)
    return x
def answer(x):
    os.get_inheritable(0), os.set_blocking(os.pipe()[0], False), os.isatty(1)
    with open("lock", "w") as file, tempfile.TemporaryFile(dir=".") as other:
        fcntl.lockf(file, fcntl.LOCK_EX)
        other.write(b"x")
    os.rename("lock", "unlocked")
    with threading.Lock(): return asyncio.run(later(x))
"""
    assert sandbox.run(program, "assert answer(4) == 4", names=["answer"], layers=layers).reason == "passed"


def state() -> dict:
    """Return the parts of the calling process that a sandbox could change."""
    kinds = [getattr(resource, name) for name in dir(resource) if name.startswith("RLIMIT_")]
    return dict(
        signals={number: signal.getsignal(number) for number in signal.valid_signals()},
        mask=signal.pthread_sigmask(signal.SIG_BLOCK, ()),
        limits=[resource.getrlimit(kind) for kind in kinds],
        folder=os.getcwd(),
        environment=dict(os.environ),
        path=[*sys.path],
        children=psutil.Process().children(recursive=True),
        threads=threading.active_count(),
        descriptors=psutil.Process().num_fds(),
    )


def test_caller_is_unchanged_after_runs(folders):
    attack(body())
    before = state()
    assert attack(body()).passed
    assert not attack("def attack(): import os; os._exit(1)").passed
    assert not attack(body("while True: pass"), seconds=0.2).passed
    assert state() == before
    assert not list(folders.iterdir())


def test_interrupt_of_the_caller_kills_the_program(folders):
    before, start = processes(), time.monotonic()
    threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()
    with pytest.raises(KeyboardInterrupt):
        attack(body("while True: pass"), seconds=60)
    assert time.monotonic() - start < 60  # not by its own limit
    assert gone(processes() - before)
    assert not list(folders.iterdir())


CLINGING = """
import ctypes, signal
ctypes.CDLL(None).prctl(1, 0)  # PR_SET_PDEATHSIG: not to be killed when the parent dies
for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}: signal.signal(number, signal.SIG_IGN)
def attack():
    while True: pass
"""


@pytest.mark.slow
@EACH_COMBINATION
def test_death_of_the_caller_kills_the_program(layers, folders):
    program = f"{CLINGING}attack()"
    caller = get_context("fork").Process(target=attack, args=(program, layers), kwargs={"seconds": 60})
    caller.start()
    started, end = [], time.monotonic() + 120
    # The guard, and the candidate, which has reached the loop.
    while (len(started) < 2 or started[-1].cpu_times().user < 0.2) and time.monotonic() < end:
        started = psutil.Process(caller.pid).children(recursive=True)
    caller.kill()
    caller.join()
    assert len(started) == 2
    assert gone(set(started))


@pytest.mark.slow
@EACH_COMBINATION
def test_program_dies_with_a_guard_that_exceeds_its_own_limit(layers, folders, monkeypatch):
    monkeypatch.setattr(sandbox, "_MARGIN_SECONDS", 100)
    before = processes()
    # A long call of a built-in function uses up the guard's processor time of 2 s before its clock can interrupt.
    tests = "sum(range(10**12))"
    outcome = sandbox.run(CLINGING, tests, names=["attack"], limits=Limits(seconds=0.2), layers=layers)
    assert outcome.reason == "the guard was killed"
    assert gone(processes() - before)
    assert not list(folders.iterdir())


@pytest.mark.slow
def test_guard_that_hangs_is_killed(monkeypatch, folders):
    monkeypatch.setattr(sandbox, "_MARGIN_SECONDS", 0.3)
    before = processes()
    # No signal handler runs within one call of a built-in function, so the guard's own clock cannot end this.
    outcome = sandbox.run(body(), "sum(range(10**12))", names=["attack"], limits=Limits(seconds=1))
    assert outcome.reason == "the guard did not end"
    assert gone(processes() - before)
    assert not list(folders.iterdir())


@pytest.fixture
def machine_without(monkeypatch):
    """Return `machine_without(*layers)`, which lets this machine forbid these layers, as many containers do."""

    def forbid(*layers: str) -> None:
        refuse = "; ".join(f"linux.{layer} = lambda *_: open('/proc/self/mem', 'rb').read(1)" for layer in layers)
        start = sandbox._START.replace("del sys.path", f"import linux; {refuse}; del sys.path")
        monkeypatch.setattr(sandbox, "_START", start)
        sandbox.available.cache_clear()

    yield forbid
    sandbox.available.cache_clear()


@pytest.mark.skipif(sandbox.available() != LAYERS, reason="this machine lacks one already")
@pytest.mark.parametrize(
    ("lacks", "level"),
    [
        ("namespaces", "Landlock, seccomp, resource limits"),
        ("landlock", "namespaces (user, process, network, IPC, mount), seccomp, resource limits"),
    ],
)
def test_layer_that_a_machine_lacks_is_left_out_and_not_named(lacks, level, machine_without):
    machine_without(lacks)
    assert sandbox.available() == tuple(layer for layer in LAYERS if layer != lacks)
    assert sandbox.level() == level
    assert attack(body()).passed
    with pytest.raises(RuntimeError, match=r"^the sandbox \((namespaces|Landlock).*\) did not start: OSError: .*$"):
        attack(body(), [lacks, "seccomp"])


@pytest.mark.parametrize("lacks", [("namespaces", "landlock"), ("seccomp",), LAYERS], ids="+".join)
def test_machine_that_cannot_contain_programs_refuses_them_with_the_remedy(lacks, machine_without, tmp_path):
    machine_without(*lacks)
    program = f"open({str(tmp_path / 'ran')!r}, 'w').close()\n{body()}"
    for call in (sandbox.level, lambda: attack(program), lambda: attack(program, ["landlock", "seccomp"])):
        with pytest.raises(RuntimeError) as error:
            call()
        message = str(error.value)
        assert message.startswith("Programs that a model wrote are not run on this machine")
        assert "Linux 6.2 or newer" in message and "user namespaces" in message and "\n" not in message
    assert not (tmp_path / "ran").exists()


def test_other_systems_than_linux_run_no_programs(monkeypatch):
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(RuntimeError, match=r"The sandbox needs Linux with seccomp.* This is darwin\.$"):
        sandbox.available.__wrapped__()


def test_every_layer_that_the_machine_offers_is_used():
    """The expected layers are measured in other ways than by the sandbox."""
    flags = "--user --map-root-user --pid --fork --net --ipc --mount"
    namespaces = subprocess.run(["unshare", *flags.split(), "mount", "-t", "tmpfs", "none", "/mnt"]).returncode == 0
    offered = dict(namespaces=namespaces, landlock=linux.landlock_version() >= 3, seccomp=True)
    assert sandbox.available() == tuple(layer for layer in LAYERS if offered[layer])


def test_level_names_the_layers_in_use():
    everything = "namespaces (user, process, network, IPC, mount), Landlock, seccomp, resource limits"
    assert sandbox.level(LAYERS) == everything
    assert sandbox.level() == sandbox.level(sandbox.available())


@pytest.mark.parametrize("layers", [(), ("seccomp",), ("namespaces", "landlock"), ("seccomp", "jail")], ids="+".join)
def test_too_few_layers_are_refused(layers):
    with pytest.raises(ValueError, match="choose seccomp with namespaces, with landlock, or with both"):
        attack(body(), layers)


def test_same_program_gives_the_same_result_in_every_run():
    program = "import random\ndef draw(): return [random.random(), [*{str(i) for i in range(99)}]]"
    tests = "import random\nraise ValueError(draw(), random.random())"
    reasons = {sandbox.run(program, tests, names=["draw"]).reason for _ in range(3)}
    assert len(reasons) == 1
