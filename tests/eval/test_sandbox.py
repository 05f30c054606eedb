"""Generated programs are contained: hostile ones fail, touch nothing, leave nothing, and the run goes on."""

import os
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
from attnres.eval.sandbox import LAYERS, Limits

if sys.platform == "linux":
    from attnres.eval.sandbox import linux

# The system's layers without Python's own fence, which would hide what they do, and that fence alone.
LEVELS = {"system": ("namespaces", "landlock", "seccomp"), "weakest": ("hook",)}
if sandbox.available() != LAYERS:
    del LEVELS["system"]
ALL_LEVELS = pytest.mark.parametrize("layers", LEVELS.values(), ids=LEVELS)


@pytest.fixture
def folders(tmp_path, monkeypatch) -> Path:
    """Where the sandbox makes its folders, in which it must leave none."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    (tmp_path / "temporary").mkdir()
    return tmp_path / "temporary"


def processes() -> set[psutil.Process]:
    """Every process of any sandbox: they share the guard's command line."""
    return {
        p for p in psutil.process_iter(["cmdline"]) if any("guard.main()" in part for part in p.info["cmdline"] or ())
    }


def gone(some: set[psutil.Process]) -> bool:
    return not psutil.wait_procs(some, timeout=20)[1]


def attack(program: str, layers=None, **limits) -> sandbox.Outcome:
    """The outcome of a program whose function `attack` returns "done" if it comes to its end: passed if it does."""
    return sandbox.run(program, "assert attack() == 'done'", names=["attack"], limits=Limits(**limits), layers=layers)


def body(*lines: str) -> str:
    return "\n    ".join(["def attack():", "import ctypes, os, signal, socket, sys, time", *lines, "return 'done'"])


REFUSED = r"PermissionError|OSError|Errno"
# Name -> (program, the reason of its failure). HOME, PORT, DOOR, VICTIM: see `untouched`.
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
    "listens": (body("s = socket.socket()", "s.bind(('127.0.0.1', 0))", "s.listen()"), REFUSED),
    "kills another process": (body("os.kill(VICTIM, signal.SIGKILL)"), REFUSED + "|ProcessLookup"),
    "kills its parent": (body("os.kill(os.getppid(), signal.SIGKILL)"), REFUSED),
    "signals every process": (body("os.kill(-1, 0)"), REFUSED),
    "prints a gigabyte": (body("for _ in range(1 << 10): print('x' * (1 << 20))"), "File too large"),
    "writes a large file": (body("open('a', 'wb').write(bytes(1 << 25))"), "File too large"),
    "writes many files": (body("for i in range(300): open(str(i), 'w').write('x' * 1000)"), REFUSED),
    "opens many files": (body("x = [open(os.devnull) for _ in range(100)]"), REFUSED),
    "calls the kernel by what it finds up the stack": (
        body(
            "frame = sys._getframe()",
            "while 'linux' not in frame.f_globals: frame = frame.f_back",
            "frame.f_globals['linux']._libc.getpid()",
        ),
        "AttributeError",
    ),
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
    """Things that attacks are after, as the first lines of their program; at the end of the test all are as before."""
    monkeypatch.setenv("ATTNRES_TEST_TOKEN", "SECRET")
    home = tmp_path / "home"
    home.mkdir()
    (home / "file").write_text("content")
    (home / "file").chmod(0o600)
    victim = subprocess.Popen(["sleep", "100"])
    with socket.create_server(("127.0.0.1", 0)) as port, socket.socket(socket.AF_UNIX) as door:
        monkeypatch.chdir(home)  # the path of a Unix socket is short
        door.bind("door")
        door.listen()
        places = dict(HOME=str(home), PORT=port.getsockname()[1], DOOR=str(home / "door"), VICTIM=victim.pid)
        yield "\n".join(f"{name} = {value!r}" for name, value in (places | {"CALLER": os.getpid()}).items())
        for listener in port, door:
            listener.setblocking(False)
            with pytest.raises(BlockingIOError):
                listener.accept()
    assert sorted(path.name for path in home.iterdir()) == ["door", "file"]
    assert (home / "file").read_text() == "content"
    assert (home / "file").stat().st_mode & 0o777 == 0o600
    assert victim.poll() is None
    victim.kill()
    victim.wait()


@ALL_LEVELS
@pytest.mark.parametrize("name", ATTACKS)
def test_hostile_program_is_contained_and_fails(name, layers, untouched, folders):
    program, reason = ATTACKS[name]
    before = processes()
    seconds = 0.2 if "0.2 s" in reason else 20
    outcome = attack(f"{untouched}\n{program}", layers, seconds=seconds, memory=256 << 20)
    assert not outcome.passed
    assert any(part in outcome.reason for part in reason.split("|")), outcome.reason
    assert outcome.seconds < seconds + 4
    assert not list(folders.iterdir())
    assert gone(processes() - before)


# What each layer of the system refuses by itself: the others would hide that it does not.
ALONE = {
    "limits": [
        "raises its limits", "reads the guard's environment", "allocates bit by bit", "prints a gigabyte",
        "writes a large file", "opens many files",
    ],
    "namespaces": [
        "creates a file at home", "writes to a file at home", "removes a file at home", "truncates a file at home",
        "links out of its folder", "reads the caller's environment", "reads the caller's memory", "connects",
        "kills another process", "writes many files", "raises its limits",
    ],
    "landlock": [
        "reads a file at home", "lists the home directory", "reads the accounts", "creates a file at home",
        "writes to a file at home", "removes a file at home", "renames a file at home", "truncates a file at home",
        "makes a folder", "links out of its folder", "becomes a program", "starts a program",
        "reads the caller's environment", "reads the guard's environment", "reads the caller's memory",
    ],
    "seccomp": [
        "forks", "forks by the C library", "becomes a program", "starts a program", "starts a shell", "connects",
        "connects by a file", "listens", "kills another process", "kills its parent", "signals every process",
        "changes a mode at home", "makes a folder", "links out of its folder", "raises its limits",
    ],
}  # fmt: skip


if sys.platform == "linux" and linux.landlock_version() >= 6:
    ALONE["landlock"] += ["connects", "kills another process"]


@pytest.mark.parametrize(
    "layer, name",
    [(layer, name) for layer in ALONE if layer in ("limits", *sandbox.available()) for name in ALONE[layer]],
)
def test_layer_contains_by_itself_what_it_is_for(layer, name, untouched):
    program, reason = ATTACKS[name]
    outcome = attack(f"{untouched}\n{program}", {layer} & {*LAYERS}, seconds=20, memory=256 << 20)
    assert any(part in outcome.reason for part in reason.split("|")), outcome.reason


def test_run_goes_on_after_hostile_programs(untouched, folders):
    for name in "loops", "exits at once", "kills its parent", "allocates at once":
        program, seconds = f"{untouched}\n{ATTACKS[name][0]}", 0.2 if name == "loops" else 20
        assert not attack(program, seconds=seconds, memory=256 << 20).passed
    assert attack(body()) == sandbox.Outcome(True, "passed", pytest.approx(0, abs=9))


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


@pytest.mark.parametrize(
    "layers", [sandbox.available(), *((layer,) for layer in sandbox.available()), ()], ids="+".join
)
def test_honest_program_passes_under_every_layer(layers):
    test = "assert answer(4) == [4, (), 2.0, 4, ['a', 'b']]"
    assert sandbox.run(HONEST, test, names=["answer"], layers=layers).reason == "passed"


@pytest.mark.parametrize("layers", [("namespaces",), ("landlock",), ()], ids="+".join)
@pytest.mark.skipif(sandbox.available() != LAYERS, reason="needs namespaces and Landlock")
def test_processes_in_the_background_end_with_the_program(layers, folders):
    """Where processes may be started, those that have left their session and parent are found all the same."""
    program = body(
        "for _ in range(3):",
        "    if os.fork() == 0:",
        "        os.setsid()",
        "        if os.fork() == 0:",
        "            signal.signal(signal.SIGTERM, signal.SIG_IGN)",
        "            time.sleep(100)",
        "        os._exit(0)",
        "    os.wait()",
    )
    before = processes()
    assert attack(program, layers).passed == (os.geteuid() == 0)  # users other than root may not even start them
    assert gone(processes() - before)
    assert not list(folders.iterdir())


def state() -> dict:
    """What a sandbox could change in the process that calls it."""
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


def test_caller_is_left_as_it_was(folders):
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
    assert time.monotonic() - start < 30
    assert gone(processes() - before)
    assert not list(folders.iterdir())


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere the guard ends by its own clock")
@ALL_LEVELS
def test_death_of_the_caller_kills_the_program(layers, folders):
    program = "while True: pass"
    caller = get_context("fork").Process(target=attack, args=(program, layers), kwargs={"seconds": 60})
    caller.start()
    started, end = [], time.monotonic() + 20
    # Guard and candidate, which has come to the loop.
    while (len(started) < 2 or started[-1].cpu_times().user < 0.2) and time.monotonic() < end:
        started = psutil.Process(caller.pid).children(recursive=True)
    caller.kill()
    caller.join()
    assert len(started) == 2
    assert gone(set(started))


def test_checker_that_hangs_is_killed(monkeypatch, folders):
    monkeypatch.setattr(sandbox, "_MARGIN", 0.3)
    before = processes()
    # No signal handler runs within one call of a built-in function, so the guard's own clock cannot end this.
    outcome = sandbox.run(body(), "sum(range(10**12))", names=["attack"], limits=Limits(seconds=1))
    assert outcome.reason == "the checker did not end"
    assert gone(processes() - before)
    assert not list(folders.iterdir())


@pytest.fixture
def without_namespaces(monkeypatch):
    """A machine that forbids namespaces, as most containers do."""
    refuse = "import linux; linux.namespaces = lambda *_: open('/proc/self/mem', 'rb').read(1)"
    monkeypatch.setattr(sandbox, "_START", sandbox._START.replace("del sys.path", f"{refuse}; del sys.path"))
    sandbox.available.cache_clear()
    yield
    sandbox.available.cache_clear()


@pytest.mark.skipif(sandbox.available() != LAYERS, reason="this machine lacks one already")
def test_layer_that_a_machine_lacks_is_left_out_and_the_report_says_so(without_namespaces):
    assert sandbox.available() == ("landlock", "seccomp", "hook")
    assert sandbox.level() == "Landlock, seccomp, audit hook, resource limits"
    assert attack(body()).passed
    with pytest.raises(RuntimeError, match=r"^the sandbox \(namespaces .*\) did not start: OSError: .*$"):
        attack(body(), ["namespaces"])


@pytest.mark.skipif(sys.platform != "linux", reason="these layers are Linux's")
def test_every_layer_that_the_machine_offers_is_used():
    """What it offers is found in other ways than the sandbox's own."""
    flags = "--user --map-root-user --pid --fork --net --ipc --mount"
    namespaces = subprocess.run(["unshare", *flags.split(), "mount", "-t", "tmpfs", "none", "/mnt"]).returncode == 0
    filters = Path("/proc/sys/kernel/seccomp").exists() and os.uname().machine in ("x86_64", "aarch64")
    offered = dict(namespaces=namespaces, landlock=linux.landlock_version() > 0, seccomp=filters, hook=True)
    assert sandbox.available() == tuple(layer for layer in LAYERS if offered[layer])


def test_level_names_what_is_used():
    assert sandbox.level(("hook",)) == "audit hook, resource limits"
    everything = "namespaces (user, process, network, IPC, mount), Landlock, seccomp, audit hook, resource limits"
    assert sandbox.level(LAYERS) == everything
    assert sandbox.level() == sandbox.level(sandbox.available())


def test_unknown_layer_is_named():
    with pytest.raises(ValueError, match="unknown layer 'jail': choose from namespaces, landlock, seccomp, hook"):
        attack(body(), ["jail"])


def test_machine_without_resource_limits_is_told_what_to_use(monkeypatch):
    monkeypatch.setattr(sandbox.importlib.util, "find_spec", lambda name: None)
    sandbox.available.cache_clear()
    with pytest.raises(RuntimeError, match="use Linux, macOS or WSL"):
        attack(body())
    sandbox.available.cache_clear()


def test_same_program_gives_the_same_result_in_every_run():
    program = "import random\ndef draw(): return [random.random(), [*{str(i) for i in range(99)}]]"
    tests = "import random\nraise ValueError(draw(), random.random())"
    reasons = {sandbox.run(program, tests, names=["draw"]).reason for _ in range(3)}
    assert len(reasons) == 1
