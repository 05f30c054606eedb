"""Attention Residuals for Transformers: each layer attends over the outputs of earlier layers.

Importing this package registers the model family with the Auto classes of `transformers`. Only the command line, which
has to answer before the seconds that this takes, does so when a command first needs it.
"""

import importlib
import os
import sys

__version__ = "0.1.0"


def _is_command_line() -> bool:
    """Whether this process was started as `attnres` or `python -m attnres`."""
    if sys.argv[:1] == ["-m"]:  # while Python looks for the module to run
        return ("-m", "attnres") in zip(sys.orig_argv, sys.orig_argv[1:])
    return os.path.basename(getattr(sys.modules["__main__"], "__file__", None) or "") == "attnres"


def __getattr__(name: str) -> object:
    """What stands in `family`, and the classes on other backbones, such as `AttnResLlamaForCausalLM`."""
    return getattr(importlib.import_module(f"{__name__}.family"), name)


if not _is_command_line():
    from .family import *  # noqa: F403
