"""Measure how a model uses its depth, and show the result as tensors, figures or a page.

Measurements do not need matplotlib, bokeh or jinja2. The modules that need them are imported at the first figure or
report.
"""

import os
from typing import TYPE_CHECKING, Any

from .attention_sinks import AttentionSinks, attention_sinks
from .axis import DepthAxis
from .depth_attention import DepthAttention, NoDepthAttention, depth_attention
from .inspection import Inspection, Passage, inspect_model
from .interventions import Interventions, interventions
from .magnitudes import Magnitudes, magnitudes
from .measurement import DrawableMeasurement
from .mixing import DepthMixing, TokenMixing, depth_mixing, semiseparable_rank, token_mixing
from .text import InspectedText

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def _make_figure(measurement: DrawableMeasurement, path: str | os.PathLike | None, **options: Any) -> "Figure":
    """Draw a measurement, for `DrawableMeasurement.plot`."""
    from .figures import draw_measurement

    return draw_measurement(measurement, path, **options)


DrawableMeasurement.figure_maker = _make_figure


def __getattr__(name: str) -> Any:
    """Import `write_report` on first access, since it needs matplotlib, bokeh and jinja2."""
    if name == "write_report":
        from .report import write_report

        return write_report
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__all__ = [
    "AttentionSinks",
    "DepthAttention",
    "DepthAxis",
    "DepthMixing",
    "InspectedText",
    "Inspection",
    "Interventions",
    "Magnitudes",
    "NoDepthAttention",
    "Passage",
    "TokenMixing",
    "attention_sinks",
    "depth_attention",
    "depth_mixing",
    "inspect_model",
    "interventions",
    "magnitudes",
    "semiseparable_rank",
    "token_mixing",
    "write_report",
]
