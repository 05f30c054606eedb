"""While a command imports PyTorch, a terminal shows so at once, and a file after a while."""

import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest

SESSION = [sys.executable, Path(__file__).with_name("loading_session.py")]
LINE = "Loading PyTorch and Transformers ..."


def start(error_output: int, **environment: str) -> subprocess.Popen:
    """Start `loading_session.py`, and return when it imports the family, which waits for a line of input."""
    launched = {name: value for name, value in os.environ.items() if "RANK" not in name}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": error_output, "text": True}
    process = subprocess.Popen(SESSION, env=launched | environment, **pipes)
    assert process.stdout.readline() == "importing\n"
    return process


def end(process: subprocess.Popen) -> None:
    """Let the import end, and check that the command has ended well without PyTorch."""
    out, _ = process.communicate("\n", timeout=60)
    assert (process.returncode, out) == (0, "False\n")


@pytest.mark.parametrize("terminal", ["xterm", "dumb"])
def test_a_terminal_shows_what_is_loaded_before_the_import_has_ended(terminal):
    leader, follower = pty.openpty()
    process = start(follower, TERM=terminal)
    assert os.read(leader, 1000).decode() == f"{LINE}\r\n"
    end(process)
    os.close(follower)
    with pytest.raises(OSError):  # the terminal is closed, and nothing else was written
        os.read(leader, 1000)
    os.close(leader)


def test_a_file_gets_a_line_with_the_time_when_the_import_takes_long():
    reading, writing = os.pipe()
    process = start(writing)
    os.close(writing)
    with os.fdopen(reading) as errors:
        assert errors.readline().partition(" ")[2] == f"{LINE} 1 s so far\n"
        process.stdin.write("\n")
        process.stdin.flush()
        errors.read()
    assert process.wait(timeout=60) == 0


def test_only_the_first_process_of_a_launcher_says_what_it_loads():
    leader, follower = pty.openpty()
    process = start(follower, RANK="1")
    end(process)
    os.close(follower)
    with pytest.raises(OSError):
        os.read(leader, 1000)
    os.close(leader)
