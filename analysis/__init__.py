"""What a model does across its depth: measured on text, as numbers, figures and a page.

What writes reports is imported when it is asked for: who measures alone needs neither matplotlib nor jinja2.
"""

import importlib

from .attention_sinks import AttentionSinks, attention_sinks
from .depth_attention import DepthAttention, NoDepthAttention, depth_attention
from .inspection import Inspection, Passage, inspect_model
from .interventions import Interventions, interventions
from .magnitudes import Magnitudes, magnitudes
from .mixing import DepthMixing, TokenMixing, depth_mixing, mixing_matrix, semiseparable_rank, token_mixing
from .names import Depth
from .text import Text


def __getattr__(name: str) -> object:
    if name != "write_report":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return importlib.import_module(f"{__name__}.report").write_report


__all__ = [
    "AttentionSinks",
    "Depth",
    "DepthAttention",
    "DepthMixing",
    "Inspection",
    "Interventions",
    "Magnitudes",
    "NoDepthAttention",
    "Passage",
    "Text",
    "TokenMixing",
    "attention_sinks",
    "depth_attention",
    "depth_mixing",
    "inspect_model",
    "interventions",
    "magnitudes",
    "mixing_matrix",
    "semiseparable_rank",
    "token_mixing",
    "write_report",
]
