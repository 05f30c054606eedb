"""Every error ends a command with one line. The traceback of an unforeseen error is written to a file."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from .. import forks

# A command that runs the statement `error`. The innermost frame of its traceback is in the module `module`.
SCRIPT = """
import sys
sys.modules["__main__"].__file__ = "attnres"  # as for the command itself, which does not register the family
from attnres.commands import app, choices

def fail(debug: choices.Debug = False):
    {error}

command = app.app.registered_commands[0]
command.name, command.callback = "demo", fail
fail.__globals__["__name__"] = {module!r}
sys.argv[0] = "attnres"
from attnres.commands.main import main
main()
"""


def run(error: str, *options: str, folder: Path, module: str = "elsewhere") -> subprocess.CompletedProcess:
    """Run `attnres demo` with this error, and with `folder` for temporary files."""
    environment = os.environ | {"TMPDIR": str(folder)}
    return forks.run("-c", SCRIPT.format(error=error, module=module), *options, env=environment, timeout=120)


@pytest.mark.parametrize(
    "error, message",
    [
        ("raise TypeError('a\\nb')", "TypeError: a b"),
        ("raise KeyError('name')", "KeyError: 'name'"),
        ("raise AssertionError", "AssertionError"),
        ("raise ValueError('of numpy')", "ValueError: of numpy"),
        ("fail(debug)", "RecursionError: maximum recursion depth exceeded"),
        ("raise BaseException('even this')", "BaseException: even this"),
        ("raise TypeError('a\\x1b[2J')", "TypeError: a\\x1b[2J"),
    ],
)
def test_an_unforeseen_error_is_one_line_that_names_the_file_of_the_traceback(error, message, tmp_path):
    done = run(error, "demo", folder=tmp_path)
    assert (done.returncode, done.stdout) == (1, "")
    (line,) = done.stderr.splitlines()
    (file,) = tmp_path.iterdir()
    assert line.startswith(f"attnres: unforeseen {message}")
    assert line.endswith(f"(traceback: {file}; --debug shows it)")
    assert re.search(r"Traceback .*, in fail\n", file.read_text(), re.DOTALL)


def test_a_terminal_without_the_characters_of_a_spinner_gets_others():
    spinner = (
        "from rich.console import Console; from attnres.utils.progress import status\n"
        "    with status(Console(), 'Working'): pass"
    )
    on_a_terminal = (
        "import os, sys\n"
        "terminal, end = os.openpty()\n"
        "sys.stdout = open(end, 'w', encoding='latin-1')\n"
        f"try: exec({SCRIPT.format(error=spinner, module='elsewhere')!r})\n"
        "finally:\n"
        "    shown = b''\n"
        "    while b'Working' not in shown: shown += os.read(terminal, 10_000)\n"
        "    print(shown, file=sys.__stdout__, flush=True)"
    )
    done = forks.run("-c", on_a_terminal, "demo", env=os.environ | {"TERM": "xterm"}, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")
    assert r"?\x1b[0m Working" in done.stdout


@pytest.mark.parametrize("arguments", [("--debug", "demo"), ("demo", "--debug")])
def test_debug_shows_the_traceback(arguments, tmp_path):
    done = run("raise TypeError('a')", *arguments, folder=tmp_path)
    assert done.returncode == 1
    assert done.stderr.startswith("Traceback (most recent call last):\n")
    assert done.stderr.endswith("TypeError: a\nattnres: unforeseen TypeError: a\n")
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    "error, module",
    [
        ("raise ValueError('`steps` is 0.')", "attnres.training.recipe"),
        ("raise FloatingPointError('`steps` is 0.')", "attnres.training.trainer"),
        ("raise OSError('`steps` is 0.')", "transformers.utils.hub"),
        ("raise ImportError('`steps` is 0.')", "datasets"),
    ],
)
def test_an_error_with_a_message_for_users_is_printed_without_a_traceback(error, module, tmp_path):
    done = run(error, "demo", folder=tmp_path, module=module)
    assert (done.returncode, done.stderr) == (1, "attnres: `steps` is 0.\n")
    assert os.listdir(tmp_path) == []


def test_the_line_mentions_a_traceback_that_could_not_be_written(tmp_path):
    code = "import tempfile; tempfile.tempdir = '/proc'; raise TypeError('a')"
    done = run(code, "demo", folder=tmp_path)
    (line,) = done.stderr.splitlines()
    assert line.startswith("attnres: unforeseen TypeError: a (its traceback could not be written, ")


def test_help_imports_no_model():
    # An environment over another one, as of `make versions`, has no script of its own.
    scripts = [[path] for path in [Path(sys.executable).with_name("attnres")] if path.exists()]
    for command in (*scripts, [sys.executable, "-m", "attnres_cli"]):
        script = [*command, "convert", "--help"]
        environment = os.environ | {"PYTHONPROFILEIMPORTTIME": "1"}
        done = subprocess.run(script, capture_output=True, text=True, timeout=60, env=environment, check=True)
        imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
        assert "attnres.commands.app" in imported
        assert not {"torch", "transformers", "numpy", "attnres.family"} & imported


@pytest.mark.slow
def test_a_script_of_the_user_has_the_family_registered(tmp_path):
    """Only the command line itself delays the registration."""
    script = tmp_path / "attnres-mine"
    script.write_text(
        "import attnres\nfrom transformers import AutoConfig\nprint(AutoConfig.for_model('attnres_llama').model_type)\n"
    )
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout == "attnres_llama\n"


def test_a_signal_after_the_work_changes_nothing(tmp_path):
    """Functions that run at the exit finish, and the exit status is that of the work."""
    code = "import atexit, os, signal"
    code += "".join(f"; atexit.register(os.kill, os.getpid(), signal.{number})" for number in ("SIGINT", "SIGTERM"))
    done = run(code, "demo", folder=tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_a_warning_of_the_family_is_printed_in_one_line(tmp_path):
    message = "from attnres.residual_attnres import FamilyWarning; import warnings"
    message += "; warnings.warn('a field\\n is new', FamilyWarning); warnings.warn('deprecated', UserWarning); 1/0"
    done = run(f"exec({message!r})", "demo", folder=tmp_path)
    lines = done.stderr.splitlines()
    assert lines[0] == "attnres: warning: a field is new"
    assert lines[1].endswith("UserWarning: deprecated")
