"""Run commands and scripts in one process whose Hub is that of the environment; driven by `test_push.py`.

The process reads `{"arguments": [...], "token": ...}` or `{"code": ..., "token": ...}` line by line. It answers each
with exit status, standard output and error, and ends with its input. Pauses are not made, but reported in seconds.
"""

import contextlib
import io
import json
import os
import sys
import time
import traceback

from attnres.commands.main import main

answers = sys.stdout
waits: list[float] = []
time.sleep = waits.append
for line in sys.stdin:
    step, out, err, status = json.loads(line), io.StringIO(), io.StringIO(), 0
    waits.clear()
    os.environ.pop("HF_TOKEN", None)
    os.environ |= {"HF_TOKEN": step["token"]} if step["token"] else {}
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            if "code" in step:
                exec(compile(step["code"], "<step>", "exec"), {"__name__": "__main__"})
            else:
                sys.argv = ["attnres", *step["arguments"]]
                main()
        except SystemExit as end:
            status = end.code or 0
        except Exception:
            status = 1
            traceback.print_exc()
    answer = {"status": status, "out": out.getvalue(), "err": err.getvalue(), "waits": waits}
    print(json.dumps(answer), file=answers, flush=True)
