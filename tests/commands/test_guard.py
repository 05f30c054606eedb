"""Every error ends a command in one line, and the traceback of an unforeseen one is left in a file."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

# A command that runs the statement `error`, whose innermost frame is in the module `module`.
SCRIPT = """
import sys
sys.modules["__main__"].__file__ = "attnres"  # as the command itself: the model family can wait
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
    """Run `attnres demo` with this error. Temporary files go to `folder`."""
    command = [sys.executable, "-c", SCRIPT.format(error=error, module=module), *options]
    environment = os.environ | {"TMPDIR": str(folder)}
    return subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment, check=False)


@pytest.mark.parametrize(
    "error, told",
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
def test_what_nobody_foresaw_is_one_line_that_names_the_file_of_the_traceback(error, told, tmp_path):
    done = run(error, "demo", folder=tmp_path)
    assert (done.returncode, done.stdout) == (1, "")
    (line,) = done.stderr.splitlines()
    (file,) = tmp_path.iterdir()
    assert line.startswith(f"attnres: unforeseen {told}")
    assert line.endswith(f"(traceback: {file}; --debug shows it)")
    assert re.search(r"Traceback .*, in fail\n", file.read_text(), re.DOTALL)


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
def test_what_explains_itself_is_its_message_alone(error, module, tmp_path):
    done = run(error, "demo", folder=tmp_path, module=module)
    assert (done.returncode, done.stderr) == (1, "attnres: `steps` is 0.\n")
    assert os.listdir(tmp_path) == []


def test_where_no_traceback_can_be_written_the_line_says_so(tmp_path):
    code = "import tempfile; tempfile.tempdir = '/proc'; raise TypeError('a')"
    done = run(code, "demo", folder=tmp_path)
    (line,) = done.stderr.splitlines()
    assert line.startswith("attnres: unforeseen TypeError: a (its traceback could not be written, ")


def test_help_imports_no_model_and_takes_no_time():
    for command in ([Path(sys.executable).with_name("attnres")], [sys.executable, "-m", "attnres_cli"]):
        script = [*command, "convert", "--help"]
        environment = os.environ | {"PYTHONPROFILEIMPORTTIME": "1"}
        done = subprocess.run(script, capture_output=True, text=True, timeout=60, env=environment, check=True)
        imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
        assert "attnres.commands.app" in imported
        assert not {"torch", "transformers", "numpy", "attnres.family"} & imported


def test_a_script_of_ones_own_has_the_family_registered(tmp_path):
    """Only the command line itself puts the registration off."""
    script = tmp_path / "attnres-mine"
    script.write_text(
        "import attnres\nfrom transformers import AutoConfig\nprint(AutoConfig.for_model('attnres_llama').model_type)\n"
    )
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout == "attnres_llama\n"


@pytest.mark.parametrize("number", ["SIGINT", "SIGTERM"])
def test_a_signal_after_the_work_changes_nothing(number, tmp_path):
    """Functions registered to run at the exit finish, and the status is that of the work."""
    code = f"import atexit, os, signal; atexit.register(os.kill, os.getpid(), signal.{number})"
    done = run(code, "demo", folder=tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_a_warning_of_the_family_is_one_line_of_the_command(tmp_path):
    told = "from attnres.residual_attnres import FamilyWarning; import warnings"
    told += "; warnings.warn('a field\\n is new', FamilyWarning); warnings.warn('deprecated', UserWarning); 1/0"
    done = run(f"exec({told!r})", "demo", folder=tmp_path)
    lines = done.stderr.splitlines()
    assert lines[0] == "attnres: warning: a field is new"
    assert lines[1].endswith("UserWarning: deprecated")
