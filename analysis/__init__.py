"""What a model does across its depth: measured on text, as numbers, figures and a page."""

from .attention_sinks import AttentionSinks, attention_sinks
from .depth_attention import DepthAttention, NoDepthAttention, depth_attention
from .inspection import Inspection, Passage, inspect_model
from .interventions import Interventions, interventions
from .magnitudes import Magnitudes, magnitudes
from .mixing import DepthMixing, TokenMixing, depth_mixing, mixing_matrix, semiseparable_rank, token_mixing
from .names import Depth
from .report import write_report
from .text import Text

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
