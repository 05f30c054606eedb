"""Training of AttnRes models: text, parameter groups, the demo, and callbacks for any `transformers.Trainer`."""

from .balance import ExpertBalance
from .monitor import Monitor

__all__ = ["ExpertBalance", "Monitor"]
