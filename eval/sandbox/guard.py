"""The trusted process between the caller and the program: restrict both, start the program, and run its tests.

    caller  --(1) program, (2) tests-->  guard  --questions-->  candidate
            <--------verdict-----------         <--plain data--

The tests run here, never in the candidate, which is forked before the tests are read and so holds no copy of them. The
functions that they test are `Remote` objects: every call is a question over a pipe, and every answer is plain data (see
`wire`). The guard runs as `python -c "... import guard; guard.main()"`, without the package and without site-packages.
"""

import builtins
import os
import resource
import signal
import sys
import time
from importlib import import_module
from typing import Any, NoReturn

import candidate
import linux
import wire


class Stopped(BaseException):
    """The exception for a candidate that has ended. A `BaseException`, which `except Exception` in a test passes on."""


class Remote:
    """An object of the candidate. Tests can call it, read it and pass it on. It equals only itself.

    Args:
        channel: The channel to the candidate.
        number: The object's number there.
    """

    def __init__(self, channel: "Channel", number: int):
        self._channel, self._number = channel, number

    def __call__(self, *args, **kwargs):
        """Call the object in the candidate."""
        return self._channel.operate("call", self, args, kwargs)

    def __getattr__(self, name):
        return self._channel.operate("getattr", self, (name,))

    def __getitem__(self, key):
        return self._channel.operate("getitem", self, (key,))

    def __contains__(self, item):
        return self._channel.operate("contains", self, (item,))

    def __iter__(self):
        return self._channel.operate("iter", self)

    def __next__(self):
        return self._channel.operate("next", self)

    def __len__(self):
        return self._channel.operate("len", self)

    def __bool__(self):
        return self._channel.operate("bool", self)

    def __str__(self):
        return self._channel.operate("str", self)

    def __repr__(self):
        return self._channel.operate("repr", self)


class Channel:
    """The questions to the candidate and its answers. Once the candidate has ended, every further question fails.

    Args:
        read: The pipe of the answers.
        write: The pipe of the questions.

    Attributes:
        ended: How the candidate ended; `None` while it runs, empty if its exit status will tell.
        objects: The objects that stay in the candidate, by number.
    """

    def __init__(self, read: int, write: int):
        self.read, self.write = read, write
        self.ended: str | None = None
        self.objects: dict[int, Remote] = {}

    def end(self, reason: str) -> NoReturn:
        """Record how the candidate ended and raise Stopped."""
        self.ended = self.ended or reason
        raise Stopped(self.ended)

    def ask(self, question: dict | None) -> dict:
        """Send a question and return the answer. `None` waits for a message that the candidate sends by itself.

        Raises:
            Stopped: The candidate has ended or sent an invalid answer.
            Exception: The question caused an exception in the program. It has the same built-in type and text.
        """
        if self.ended:
            raise Stopped(self.ended)
        try:
            if question is not None:
                wire.send(self.write, question)
            answer = wire.receive(self.read)
        except (EOFError, BrokenPipeError):
            self.end("")
        except (ValueError, RecursionError, MemoryError) as error:
            self.end(f"sent an invalid answer: {error}")
        if not isinstance(answer, dict):
            self.end("sent an invalid answer")
        if "end" in answer:
            self.end(str(answer["end"])[:1000])
        if "error" in answer:
            kind, text = answer["error"]
            kind = vars(builtins).get(kind)
            raise (kind if isinstance(kind, type) and issubclass(kind, Exception) else Exception)(str(text))
        return answer

    def look_up(self, name: str, namespace: dict) -> None:
        """Define `name` for the tests as in the program, by a plain value or a `Remote`, if it exists there."""
        answer = self.ask({"name": name})
        if "value" in answer:
            namespace[name] = self.decode(answer["value"])

    def look_up_module(self, name: str, namespace: dict) -> None:
        """Define `name` for the tests as the real module, if the program has imported a module by that name."""
        if "module" in self.ask({"name": name}):
            namespace[name] = import_module(name)

    def operate(self, operation: str, on: Remote, args: tuple = (), kwargs: dict | None = None) -> Any:
        """Let the candidate perform an operation on one of its objects, and return the result.

        Args:
            operation: A key of `candidate.OPERATIONS`.
            on: The object.
            args: The arguments. Lists, sets and dictionaries among them change as the operation changes them.
            kwargs: The arguments by keyword.
        """
        sent = [wire.encode(part, self.number) for part in ([*args], kwargs or {})]
        answer = self.ask(dict(operation=operation, on=on._number, args=sent[0], kwargs=sent[1]))
        # The candidate sends its arguments back if the call changed them.
        for old, new in zip(args, self.decode(answer.get("args", []))):
            if type(old) is type(new) and hasattr(old, "clear") and old != new:
                old.clear()
                (old.extend if hasattr(old, "extend") else old.update)(new)
        return self.decode(answer.get("value"))

    def decode(self, data: Any) -> Any:
        """Return the value of an answer. References become `Remote` objects."""
        try:
            return wire.decode(data, lambda number: self.objects.setdefault(number, Remote(self, number)))
        except Exception as error:
            self.end(f"sent an invalid value: {error}")

    def number(self, value: Any) -> int:
        """Return the number of a `Remote`. Raise TypeError for objects of the tests, which cannot be sent."""
        if not isinstance(value, Remote):
            raise TypeError(f"a {type(value).__name__} of the tests cannot be passed to the program")
        return value._number


def main() -> None:
    """Read one job from standard input and write one verdict to standard output: {"passed", "reason"} or {"error"}."""
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    verdict = os.dup(1)
    job = wire.receive(0)
    linux.die_with_parent(job["caller"])
    try:
        pid, channel = start(job)
    except (Exception, Stopped) as error:
        wire.send(verdict, {"error": f"{type(error).__name__}: {error}"})
        return
    passed, reason, late = False, None, f"ran longer than {job['seconds']:g} s"
    try:
        # If the candidate has ended already, the alarm must not replace its reason.
        signal.signal(signal.SIGALRM, lambda *_: None if channel.ended is not None else channel.end(late))
        signal.setitimer(signal.ITIMER_REAL, job["seconds"])
        passed, reason = check(wire.receive(0), channel)
        signal.setitimer(signal.ITIMER_REAL, 0)
    except Stopped:
        pass
    # A candidate that closed its pipe may need a moment to exit. Its wait status then gives the reason.
    status = finish(pid, 0.2 if channel.ended == "" else 0)
    if channel.ended is not None:
        passed, reason = False, channel.ended or describe(status)
    wire.send(verdict, {"passed": passed, "reason": reason})


def check(job: dict, channel: Channel) -> tuple[bool, str]:
    """Run the tests against the candidate. Return whether they passed, and `passed` or the exception in one line."""
    namespace: dict[str, Any] = {"__name__": "tests"}
    seed_random(job["helpers"] + job["tests"])
    try:
        exec(compile(job["helpers"], "<helpers>", "exec", dont_inherit=True), namespace)
        channel.ask(None)  # returns once the program is loaded
        for name in job["names"]:
            namespace.pop(name, None)
            channel.look_up(name, namespace)
        for name in job["modules"]:
            channel.look_up_module(name, namespace)
        exec(compile(job["tests"], "<tests>", "exec", dont_inherit=True), namespace)
    except Stopped:
        raise
    except BaseException as error:
        where, trace = "", error.__traceback__
        while trace:  # find the innermost line of the tests
            if trace.tb_frame.f_code.co_filename == "<tests>":
                where = f" in: {job['tests'].splitlines()[trace.tb_lineno - 1]}"
            trace = trace.tb_next
        return False, " ".join(f"{type(error).__name__}: {str(error)[:300]}{where}".split())[:500]
    return True, "passed"


def seed_random(code: str) -> None:
    """Seed `random` if the code mentions it, so that the code draws the same numbers in every run."""
    if "random" in code:
        import_module("random").seed(0)


def start(job: dict) -> tuple[int, Channel]:
    """Restrict this process and fork the candidate, which is restricted further. Raise OSError if a layer fails."""
    layers, folder = job["layers"], job["folder"]
    limit(job)
    if "namespaces" in layers:
        linux.namespaces(folder, job["readable"], job["disk"], job["files"])
    os.chdir(folder)
    # Printed output goes to a file without a name, so that the limit on file size holds for it.
    output = os.open("output", os.O_RDWR | os.O_CREAT | os.O_APPEND)
    os.unlink("output")
    if "landlock" in layers:
        linux.landlock(folder, job["readable"])
    linux.drop_privileges()
    linux.hide_memory()
    for descriptor in 1, 2:
        os.dup2(output, descriptor)
    questions, answers = os.pipe(), os.pipe()
    parent = os.getpid()
    pid = os.fork()
    if pid:
        os.close(questions[0])
        os.close(answers[1])
        channel = Channel(answers[0], questions[1])
        channel.ask(None)  # returns once the candidate's restrictions hold
        return pid, channel
    try:
        become_candidate(job, questions[0], answers[1], parent)
    except OSError as error:
        wire.send(answers[1], {"error": ["OSError", str(error)]})
    finally:
        os._exit(1)


def become_candidate(job: dict, read: int, write: int, parent: int) -> None:
    """Turn the forked process into the candidate: close all but two pipes, take the last restrictions, and serve.

    Args:
        job: The job.
        read: The pipe of the questions.
        write: The pipe of the answers.
        parent: The guard's process id.
    """
    layers = job["layers"]
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    # Close the ranges of descriptors before, between and after the two pipes.
    low, high = sorted((read, write))
    for first, last in (3, low), (low + 1, high), (high + 1, 1 << 10):
        os.closerange(first, last)
    sys.path[:] = [path for path in sys.path if os.path.exists(path)] + job["packages"]
    sys.argv[:] = ["program"]
    seed_random(job["program"])
    resource.setrlimit(resource.RLIMIT_NPROC, (0, 0))
    linux.die_with_parent(0 if "namespaces" in layers else parent)
    if "landlock" in layers:
        # A second call puts the candidate into its own Landlock domain, from which it cannot reach the guard.
        linux.landlock(job["folder"], job["readable"])
    if "namespaces" not in layers:
        # The caller reads the kernel's counter of written bytes. Landlock still closes the candidate's memory to other
        # programs.
        linux.show_counts()
    linux.seccomp()
    # The program must not import these by name.
    for name in "guard", "linux", "wire", "candidate":
        sys.modules.pop(name, None)
    wire.send(write, {"value": None})
    candidate.serve(read, write, job["program"], job["setup"])


def limit(job: dict) -> None:
    """Set the resource limits of this process and its children."""
    seconds = int(job["seconds"]) + 2
    for name, value in dict(CPU=seconds, AS=job["memory"], FSIZE=job["file"], NOFILE=job["open_files"], CORE=0).items():
        kind = getattr(resource, f"RLIMIT_{name}")
        hard = resource.getrlimit(kind)[1]
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(kind, (value, value))


def finish(pid: int, patience: float) -> int | None:
    """Wait for the candidate, then kill it.

    Args:
        pid: The candidate's process id.
        patience: Seconds to wait for it to end by itself.

    Returns:
        Its wait status if it ended by itself, else `None`.
    """
    end = time.monotonic() + patience
    done, status = os.waitpid(pid, os.WNOHANG)
    while not done and time.monotonic() < end:
        time.sleep(0.002)
        done, status = os.waitpid(pid, os.WNOHANG)
    if not done:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    return status if done else None


def describe(status: int | None) -> str:
    """Return how the candidate ended, from the wait status that `finish` returns."""
    if status is None:
        return "closed its pipe"
    if os.WIFSIGNALED(status):
        return f"ended by a signal: {signal.strsignal(os.WTERMSIG(status))}"
    return f"ended with status {os.WEXITSTATUS(status)} before the tests were done"
