"""`attnres convert` from a Hub, with one cache; run by `test_convert_hub.py`, which judges what was seen.

hub_session.py SERVER FOLDER        `SERVER` is the process id of the Hub; results go to `FOLDER`
"""

import contextlib
import io
import json
import os
import signal
import socket
import sys
import time
from pathlib import Path
from urllib.parse import urlsplit

from attnres.commands.main import main

server, folder = int(sys.argv[1]), Path(sys.argv[2])


def convert(name: str, *arguments: str) -> dict:
    """A conversion to the folder `name`: exit status, standard output and error."""
    out, err, code = io.StringIO(), io.StringIO(), 0
    sys.argv = ["attnres", "convert", *arguments, str(folder / name)]
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            main()
    except SystemExit as stop:
        code = stop.code or 0
    return {"code": code, "out": out.getvalue(), "err": err.getvalue()}


def wait_until_refused(endpoint: str) -> None:
    address = urlsplit(endpoint)
    for _ in range(600):
        try:
            socket.create_connection((address.hostname, address.port), timeout=1).close()
        except ConnectionRefusedError:
            return
        except OSError:
            pass
        time.sleep(0.05)
    sys.exit(f"{endpoint} still answers 30 seconds after its end.")


seen = {
    "main": convert("main", "lab/model"),
    "v1": convert("v1", "lab/model", "--revision", "v1", "--block-size", "2"),
    "pickled": convert("pickled", "lab/model", "--revision", "pickled"),
    "linked": convert("linked", "lab/model", "--hard-link"),
    "no revision": convert("x", "lab/model", "--revision", "absent"),
    "no weights": convert("x", "lab/model", "--revision", "bare"),
    "no repository": convert("x", "lab/absent"),
    "no name": convert("x", "lab/mo del"),
}
os.kill(server, signal.SIGTERM)
wait_until_refused(os.environ["HF_ENDPOINT"])  # one that is ending still accepts connections, and resets them
seen["v1 from the cache"] = convert("cached", "lab/model", "--revision", "v1", "--block-size", "2")
seen["no Hub"] = convert("x", "lab/other")
(folder / "seen.json").write_text(json.dumps(seen))
