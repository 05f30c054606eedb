"""Environments with packages that the project is used with but does not install: made by pip, in `.peer-NAME/`."""

import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

from filelock import FileLock

ROOT = Path(__file__).resolve().parents[2]
PINS = (ROOT / "constraints.txt").read_text().splitlines()


def environment(
    name: str, *requirements: str, alone: bool = False, without: tuple[str, ...] = (), dependencies: bool = True
) -> Path:
    """The Python of the environment `name`, which has the packages required; made when it is not there.

    It lies over the environment that runs this one, and sees all packages of that which it does not have itself. One
    that is `alone` has a torch of its own and nothing else; neither does it have `attnres`. Without
    `dependencies`, pip leaves out the packages that those required ask for.

    Raises:
        RuntimeError: the packages cannot be installed here; with what pip says.
    """
    folder = ROOT / f".peer-{name}"
    python, finished, wanted = folder / "bin" / "python", folder / "installed", "\n".join(requirements)
    lock = ROOT / ".peer" / f"{name}.lock"
    lock.parent.mkdir(exist_ok=True)
    with FileLock(lock):
        if finished.exists() and finished.read_text() == wanted:
            return python
        shutil.rmtree(folder, ignore_errors=True)
        # The `setuptools` that comes with `venv` would hide a newer one below.
        _run(sys.executable, "-m", "venv", "--without-pip", str(folder))
        pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet", f"--python={python}"]
        install = [*pip, "install", "--no-compile"]  # Python compiles the files that it imports
        requirements += () if dependencies else ("--no-deps",)
        if alone:
            torch = next(pin for pin in PINS if pin.startswith("torch=="))
            # By itself and by name: a range would take a build with CUDA where one for the CPU is at hand.
            _run(*install, torch)
            _run(*install, torch, *requirements)
        else:
            below = sysconfig.get_path("purelib")
            # Not the bare folder: an editable install lies there as a `.pth` file, which only `addsitedir` reads.
            code = f"import site; site.addsitedir({below!r})\n"
            Path(sysconfig.get_path("purelib", vars={"base": str(folder)}), "below.pth").write_text(code)
            script = python.with_name("attnres")  # a script stays where its package was installed
            script.write_text(f"#!{python}\nfrom attnres_cli import main\n\nmain()\n")
            script.chmod(0o755)
            own = {requirement.partition("==")[0] for requirement in requirements}
            pins = folder / "constraints.txt"
            pins.write_text("\n".join(pin for pin in PINS if pin.partition("==")[0] not in own))
            _run(*install, "--constraint", str(pins), *requirements)
        if without:
            _run(*pip, "uninstall", "--yes", *without)
        finished.write_text(wanted)
    return python


def _run(*command: str) -> None:
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(command, capture_output=True, text=True, env=environ, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command[1:])} failed: {done.stderr.strip()[-2000:]}")
