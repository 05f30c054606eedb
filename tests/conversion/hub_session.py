"""Run `attnres convert` from a Hub, with one cache. `test_convert_hub.py` starts this and checks the results.

hub_session.py FOLDER        results go to `FOLDER`
"""

import contextlib
import io
import json
import os
import sys
from pathlib import Path

from huggingface_hub import close_session, get_session

from attnres.commands.main import main

folder = Path(sys.argv[1])


def convert(name: str, *arguments: str) -> dict:
    """Convert to the folder `name`; return exit status, standard output and error."""
    out, err, code = io.StringIO(), io.StringIO(), 0
    sys.argv = ["attnres", "convert", *arguments, str(folder / name)]
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            main()
    except SystemExit as stop:
        code = stop.code or 0
    return {"code": code, "out": out.getvalue(), "err": err.getvalue()}


seen = {
    "main": convert("main", "lab/model"),
    "v1": convert("v1", "lab/model", "--revision", "v1", "--block-size", "2"),
    "pickled": convert("pickled", "lab/model", "--revision", "pickled"),
    "linked": convert("linked", "lab/model", "--hard-link"),
    "no revision": convert("x", "lab/model", "--revision", "absent"),
    "no weights": convert("x", "lab/model", "--revision", "bare"),
    "adapter": convert("x", "lab/model", "--revision", "adapter"),
    "no repository": convert("x", "lab/absent"),
    "no name": convert("x", "lab/mo del"),
}
get_session().get(f"{os.environ['HF_ENDPOINT']}/stop")  # the test stops the Hub at this request
close_session()  # connections to the stopped Hub are still open
seen["v1 from the cache"] = convert("cached", "lab/model", "--revision", "v1", "--block-size", "2")
seen["no Hub"] = convert("x", "lab/other")
(folder / "seen.json").write_text(json.dumps(seen))
