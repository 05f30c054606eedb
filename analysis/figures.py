"""All figures of depth: maps of consumers by sources, and curves from the embedding to the output.

Other modules import the drawing functions from here. `draw_measurement` draws a measurement for its `plot` method.
"""

import os
from typing import TYPE_CHECKING

from attnres.utils.drawing import finish

from .attention_sinks import AttentionSinks
from .depth_attention import DepthAttention
from .depth_curves import draw_interventions, draw_magnitudes, draw_sinks, draw_weights_by_depth
from .depth_maps import draw_depth_attention, draw_mixing
from .interventions import Interventions
from .magnitudes import Magnitudes
from .measurement import DrawableMeasurement
from .mixing import DepthMixing

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def draw_measurement(
    measurement: DrawableMeasurement, path: str | os.PathLike | None = None, values: str = "weight"
) -> "Figure":
    """Draw a measurement of one model.

    Args:
        measurement: The measurement to draw.
        path: The `.png` or `.svg` file to write, in a folder that exists; `None` to write no file.
        values: For depth attention: "weight", "spread" over tokens, or "relative" to uniform weights.

    Returns:
        The figure.

    Raises:
        TypeError: The measurement has no figure.
        ValueError: The file name has another suffix, or `values` is not one of these.
        FileNotFoundError: The folder does not exist.
    """
    match measurement:
        case DepthAttention():
            figure = draw_depth_attention(measurement, values)
        case DepthMixing():
            figure = draw_mixing(measurement)
        case Magnitudes():
            figure = draw_magnitudes({"": measurement})
        case AttentionSinks():
            figure = draw_sinks({"": measurement})
        case Interventions():
            figure = draw_interventions({"": measurement})
        case _:
            raise TypeError(f"expected a measurement that has a figure, got {type(measurement).__name__}.")
    return finish(figure, path)


__all__ = [
    "draw_depth_attention",
    "draw_interventions",
    "draw_magnitudes",
    "draw_measurement",
    "draw_mixing",
    "draw_sinks",
    "draw_weights_by_depth",
    "finish",
]
