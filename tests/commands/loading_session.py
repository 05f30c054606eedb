"""Load a command whose import of the model family is slow, and print what the error output has got by then.

loading_session.py, with the error output on a terminal or a pipe
"""

import importlib.abc
import importlib.util
import sys

import attnres_cli

attnres_cli.is_running = True

from attnres.commands.guard import loading  # noqa: E402
from attnres.utils import progress  # noqa: E402

progress.LEAST_SECONDS = 0.05


class _Slow(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Imports `attnres.family` as an empty module, once the reader of the error output has answered."""

    def find_spec(self, name, path, target=None):
        return importlib.util.spec_from_loader(name, self) if name == "attnres.family" else None

    def exec_module(self, module):
        print("importing", flush=True)
        sys.stdin.readline()


sys.meta_path.insert(0, _Slow())
with loading():
    pass
print("torch" in sys.modules)
