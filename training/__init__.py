"""Training of AttnRes models: text, parameter groups, the demo, and callbacks for any `transformers.Trainer`.

The callbacks are imported when they are asked for: the command line reads a recipe before the seconds that this takes.
"""

import importlib

_PLACES = {"ExpertBalance": "balance", "Monitor": "monitor"}


def __getattr__(name: str) -> object:
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_PLACES[name]}"), name)


__all__ = ["ExpertBalance", "Monitor"]
