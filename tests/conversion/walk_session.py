"""Convert a checkpoint, and print how often the files of its rooms are entered and its own files are parsed.

`test_convert_reading.py` starts this. To follow a checkpoint from call to call, a reader opens the file of every
function where it is first called. An argument limits this to some rooms.
"""

import json
import os
import sys
from collections import Counter
from pathlib import Path

import attnres_cli

attnres_cli.is_running = True

from attnres.commands import app, convert, main  # noqa: E402, F401

ROOT = Path(attnres_cli.__file__).parent
SOURCE, TARGET, *ROOMS = sys.argv[1:]
FOLDERS = tuple(f"{ROOT / room}{os.sep}" for room in ROOMS)


def own_file(code: object) -> str | None:
    """Return the path of a function's file, relative to the project; None if it is not in one of the rooms."""
    path = getattr(code, "co_filename", "")
    return os.path.relpath(path, ROOT) if path.startswith(FOLDERS) and path.endswith(".py") else None


def follow(frame, event, argument) -> None:
    """Note the file of each function at its first call."""
    if event == "call" and frame.f_code.co_name.isidentifier() and frame.f_code not in functions:
        functions.add(frame.f_code)
        file = own_file(frame.f_code)
        if file is not None and files[-1:] != [file]:
            files.append(file)


def count_parses(path: Path, *args, **kwargs) -> str:
    """Count a text that this package reads; libraries open files by other calls."""
    if str(path).startswith(SOURCE):
        parses[path.name] += 1
    return read_text(path, *args, **kwargs)


functions: set[object] = set()
files: list[str] = []
parses: Counter[str] = Counter()
read_text, Path.read_text = Path.read_text, count_parses
sys.argv = ["attnres", "convert", SOURCE, TARGET, "--no-verify"]
sys.setprofile(follow)
try:
    main.main()
except SystemExit as end:
    sys.setprofile(None)
    counts = {"stays": len(files), "returns": len(files) - len(set(files)), "parses": parses, "code": end.code}
    print(json.dumps(counts | {"files": files}))
