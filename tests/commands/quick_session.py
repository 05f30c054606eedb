"""Run commands that need no model one after the other in this process, and print their output and all imports.

quick_session.py < [[ARGUMENT, ...], ...]
"""

import contextlib
import io
import json
import sys

from attnres_cli import main


def run(arguments: list[str]) -> dict:
    """Run `attnres ARGUMENTS`, and return its exit status and output."""
    out, err = io.StringIO(), io.StringIO()
    sys.argv = ["attnres", *arguments]
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = 0
        try:
            main()
        except SystemExit as end:
            code = end.code or 0
    return {"code": code, "out": out.getvalue(), "err": err.getvalue()}


if __name__ == "__main__":
    runs = [run(arguments) for arguments in json.load(sys.stdin)]
    print(json.dumps({"runs": runs, "modules": sorted(sys.modules)}))
