"""Stop conversions at given moments. `test_convert_interrupted.py` starts this and checks the results.

    interrupted_session.py SOURCE DAMAGED FOLDER        results go to the file `FOLDER/seen.json`

This process imports everything once. Each conversion is a fork of it, which waits at its moment until a signal comes.
"""

import hashlib
import json
import os
import select
import shutil
import signal
import sys
import time
from pathlib import Path
from unittest import mock

from attnres.commands import convert as command
from attnres.commands.main import main
from attnres.conversion import convert as conversion

SOURCE, DAMAGED, FOLDER = map(Path, sys.argv[1:])
SIGNALS = {"SIGINT": signal.SIGINT, "SIGTERM": signal.SIGTERM, "SIGKILL": signal.SIGKILL}


def rest(reached: int) -> None:
    """Report that the moment is reached, and wait for the signal."""
    os.write(reached, b"x")
    time.sleep(120)


def stop_before(owner: object, name: str, reached: int, call: int = 1, if_named: str = "") -> None:
    """Wait before a call of `owner.name`: the first, the second, ... whose first argument has this name."""
    function, calls = getattr(owner, name), []

    def stopping(*args, **kwargs):
        if not if_named or args[0].name == if_named:
            calls.append(args)
            if len(calls) == call:
                rest(reached)
        return function(*args, **kwargs)

    mock.patch.object(owner, name, stopping).start()


MOMENTS = {
    "reading": lambda reached: stop_before(command, "copyable", reached),
    "copying": lambda reached: stop_before(conversion, "copy_shard", reached, call=3),
    "adding": lambda reached: stop_before(conversion, "save_file", reached),
    "verifying": lambda reached: stop_before(command, "compare", reached),
    # At this moment the old result is renamed already, and the new one is not yet.
    "renaming": lambda reached: stop_before(Path, "rename", reached, if_named=".result.partial"),
}


def start(source: Path, *options: str, log: Path, prepare=lambda: None) -> int:
    """Start a fork that converts `source` into `result` in the current folder, and return its process id."""
    if child := os.fork():
        return child
    code = 99
    try:
        file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(file, 1)
        os.dup2(file, 2)
        prepare()
        sys.argv = ["attnres", "convert", str(source), "result", *options]
        main()
        code = 0
    except SystemExit as stop:
        code = stop.code or 0
    finally:
        sys.stdout.flush()
        os._exit(code)


def end(child: int) -> int:
    """Return the exit status of a fork, or minus the number of the signal that killed it."""
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def start_and_rest(moment: str, *options: str, log: Path) -> int:
    """Start a fork as [`start`] does, and return once it waits at its moment."""
    reading, writing = os.pipe()
    child = start(SOURCE, *options, log=log, prepare=lambda: MOMENTS[moment](writing))
    os.close(writing)
    ready, _, _ = select.select([reading], [], [], 100)
    assert ready and os.read(reading, 1) == b"x", f"{moment} was not reached: {log.read_text()}"
    os.close(reading)
    return child


def digest() -> str | None:
    """Return a value that distinguishes one result from another."""
    folder = Path("result")
    if not folder.exists():
        return None
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return hashlib.sha256(b"".join(str(path).encode() + path.read_bytes() for path in files)).hexdigest()


def interrupted(moment: str, name: str, overwrite: bool) -> dict:
    """Stop a conversion. After a kill, run one of a damaged source and one without interruption."""
    folder = FOLDER / f"{moment}-{name}-{overwrite}"
    folder.mkdir()
    os.chdir(folder)
    log = FOLDER / "log"
    options = ["--overwrite"] if overwrite else []
    options += [] if moment == "verifying" else ["--no-verify"]
    if overwrite:
        shutil.copytree(FOLDER / "old" / "result", "result")
    seen = {"old": digest()}
    child = start_and_rest(moment, *options, log=log)
    os.kill(child, SIGNALS[name])
    seen |= {"code": end(child), "log": log.read_text(), "left": sorted(os.listdir()), "result": digest()}
    if name != "SIGKILL":
        return seen
    seen["damaged"] = end(start(DAMAGED, "--no-verify", *options, log=log))
    seen |= {"damaged log": log.read_text(), "left after damaged": sorted(os.listdir())}
    seen["result after damaged"] = digest()
    again = end(start(SOURCE, "--no-verify", *options, log=log))  # a verification would change the card
    seen |= {"again": again, "left after again": sorted(os.listdir())}
    seen["result after again"] = digest()
    return seen


def one() -> dict:
    """Run a conversion without interruption."""
    (FOLDER / "old").mkdir()
    os.chdir(FOLDER / "old")
    return {"code": end(start(SOURCE, "--no-verify", "--block-size", "5", log=FOLDER / "log")), "result": digest()}


def two_at_a_time() -> dict:
    """Start a conversion while another one to the same target waits, and then let that one continue."""
    (FOLDER / "two").mkdir()
    os.chdir(FOLDER / "two")
    logs = [FOLDER / "log1", FOLDER / "log2"]
    go = FOLDER / "go"

    def wait() -> None:
        stop_before(conversion, "copy_shard", -1, call=3)

    def rest_until_told(reached: int) -> None:
        (FOLDER / "resting").touch()
        while not go.exists():
            time.sleep(0.01)

    with mock.patch(f"{__name__}.rest", rest_until_told):
        first = start(SOURCE, "--no-verify", log=logs[0], prepare=wait)
    while not (FOLDER / "resting").exists():
        time.sleep(0.01)
    seen = {"second": end(start(SOURCE, "--no-verify", log=logs[1])), "log": logs[1].read_text()}
    go.touch()
    return seen | {"first": end(first), "left": sorted(os.listdir()), "result": digest()}


seen = {"one": one()}
seen |= {
    f"{moment} {name}{' overwrite' * overwrite}": interrupted(moment, name, overwrite)
    for overwrite in (False, True)
    for moment in MOMENTS
    for name in SIGNALS
    if not overwrite or moment in ("copying", "renaming")
}
seen["two"] = two_at_a_time()
(FOLDER / "seen.json").write_text(json.dumps(seen))
