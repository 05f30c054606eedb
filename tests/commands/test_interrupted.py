"""Ctrl-C and SIGTERM end a command with one line at any moment, and leave no partial files."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

DELAYS = (0.0, 0.2, 0.7, 1.9, 4.0)
DEMO = ("demo", "--out", "out", "--minutes", "1")
COMMANDS = {
    "demo": DEMO,
    "module": DEMO,
    "convert": ("convert", "{model}", "out"),
    "eval": ("eval", "{model}", "--out", "out", "--tasks", "gsm8k", "--data", "{hub}"),
    "train": ("train", "finetune", "model={model}", "train={text}", "out=out", "length=64", "steps=10000"),
    "inspect": ("inspect", "{model}", "--text", "{text}", "--out", "out", "--tokens", "100000"),
    "help": ("--help",),
}


def start(name: str, assets: Path, folder: Path) -> subprocess.Popen:
    """Start the command in its own process group, and return once its guard is active.

    Python prints each import, which shows when this is so. The start of Python itself cannot be guarded.
    """
    arguments = {
        "model": assets / "checkpoints" / "stories260K-hf",
        "hub": assets / "hub",
        "text": assets / "corpora" / "tinystories" / "valid.txt",
    }
    script = [sys.executable, "-m", "attnres_cli"] if name == "module" else [Path(sys.executable).with_name("attnres")]
    process = subprocess.Popen(
        [*script, *(part.format(**arguments) for part in COMMANDS[name])],
        cwd=folder,
        env=os.environ | {"PYTHONPROFILEIMPORTTIME": "1", "HF_HUB_OFFLINE": "1"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
    for line in process.stderr:
        if line.endswith(b"attnres.commands.main\n"):
            process.stderr.readline()  # the first import within the guard
            return process
    raise AssertionError("the command did not begin")


def stop(process: subprocess.Popen, delay: float, number: int) -> str | None:
    """Send the signal after a delay. Return stderr without the lines about imports; `None` if the command had ended."""
    deadline = time.monotonic() + delay
    parts = []
    os.set_blocking(process.stderr.fileno(), False)
    while time.monotonic() < deadline and process.poll() is None:  # read, so that the command never waits for us
        parts.append(process.stderr.read() or b"")
        time.sleep(min(0.02, max(0.0, deadline - time.monotonic())))
    if process.poll() is not None:
        return None
    os.killpg(process.pid, number)
    os.set_blocking(process.stderr.fileno(), True)
    _, rest = process.communicate(timeout=120)
    text = b"".join([*parts, rest]).decode()
    return "\n".join(line for line in text.splitlines() if not line.startswith("import time:"))


@pytest.mark.parametrize(
    ("name", "delay"),
    # One command is stopped at each moment; the others, which have the same guard, in their imports and at work.
    [
        *(("demo", delay) for delay in DELAYS),
        *((name, delay) for name in ("convert", "eval", "train", "inspect") for delay in (0.0, 1.9)),
        *((name, 0.2) for name in ("module", "help")),
    ],
)
def test_a_signal_at_any_moment_ends_the_command_in_one_line(name, delay, assets, tmp_path):
    for number, word in ((signal.SIGINT, "interrupted"), (signal.SIGTERM, "terminated")):
        if number == signal.SIGTERM and delay not in DELAYS[::5]:
            continue
        with start(name, assets, tmp_path) as process:
            written = stop(process, delay, number)
        # These short commands may have ended when the signal arrived.
        if written is None or (name in ("help", "convert") and process.returncode == 0):
            assert process.returncode == 0
            return
        assert process.returncode == 128 + number, written
        if name == "train":  # its progress bar is on stderr
            assert "Traceback" not in written and written.count("attnres: ") <= 1
        else:
            assert written.splitlines()[-1:] == [f"attnres: {word}."] and "Traceback" not in written
        assert name in ("train", "eval") or os.listdir(tmp_path) == []
