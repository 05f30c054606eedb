"""Training by recipes, the demo, and two callbacks for any `transformers.Trainer`. The README maps the files.

The callbacks are imported on first use: importing them takes seconds, and the command line checks a recipe first.
"""

import importlib

_CALLBACKS = ("ExpertBalance", "Monitor")


def __getattr__(name: str) -> object:
    """Import a callback on first use."""
    if name not in _CALLBACKS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.callbacks"), name)


__all__ = ["ExpertBalance", "Monitor"]
