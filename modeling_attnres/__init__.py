"""Attention Residuals for Transformers: each layer attends over the outputs of earlier layers.

Importing this package registers the model family with the Auto classes of `transformers`.
"""

import importlib
import sys

__version__ = "0.1.0"


def __getattr__(name: str) -> object:
    """Return a name of `family`, such as a class on another backbone (`AttnResLlamaForCausalLM`), on first use."""
    return getattr(importlib.import_module(f"{__name__}.family"), name)


# The command line answers before the seconds that registration takes; a command imports `family` when it needs it.
# While `python -m attnres` imports this package, `sys.argv[0]` is `-m`.
_is_command = sys.argv[:1] == ["-m"] and __name__ in sys.orig_argv
if not (_is_command or getattr(sys.modules.get("attnres_cli"), "is_running", False)):
    from .family import *  # noqa: F403
