"""Figures of depth: maps of who reads what, and curves from the embedding to the output."""

from .depth_curves import draw_interventions, draw_magnitudes, draw_sinks, draw_weights_by_depth
from .depth_maps import draw_depth_attention, draw_mixing
from .drawing import finish

__all__ = [
    "draw_depth_attention",
    "draw_interventions",
    "draw_magnitudes",
    "draw_mixing",
    "draw_sinks",
    "draw_weights_by_depth",
    "finish",
]
