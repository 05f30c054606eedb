"""The base classes of all measurements: a `repr` that shows shapes instead of numbers, and `plot`."""

import os
from collections.abc import Callable
from dataclasses import fields
from typing import TYPE_CHECKING, Any, ClassVar

from torch import Tensor

from attnres.utils.wording import counted

from .axis import DepthAxis

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class Measurement:
    """Base of the data classes that hold measurements. Its `repr` shows the shapes of tensors, not their numbers."""

    __dataclass_fields__: ClassVar[dict[str, Any]]  # every subclass is a data class

    def __repr__(self) -> str:
        shown = (f"{field.name}={_shown(getattr(self, field.name))}" for field in fields(self))
        return f"{type(self).__name__}({', '.join(shown)})"


class DrawableMeasurement(Measurement):
    """A measurement that has a figure."""

    # Called as `figure_maker(measurement, path, **options)`. `figures.py` imports the measurements, so they cannot
    # import it. `__init__.py` sets this attribute instead.
    figure_maker: ClassVar[Callable[..., "Figure"]]

    def plot(self, path: str | os.PathLike | None = None) -> "Figure":
        """Draw the measurement by depth.

        Args:
            path: The `.png` or `.svg` file to write, in a folder that exists; `None` to write no file.

        Returns:
            The figure, which a notebook shows if it is the last value of a cell.

        Raises:
            ModuleNotFoundError: matplotlib is not installed.
            ValueError: The file name has another suffix.
            FileNotFoundError: The folder does not exist.
        """
        return DrawableMeasurement.figure_maker(self, path)


def standard_deviation(mean: Tensor, mean_of_squares: Tensor) -> Tensor:
    """Compute the standard deviation (with division by n) from a mean and a mean of squares, element by element.

    Args:
        mean: The mean of the values, of any shape.
        mean_of_squares: The mean of their squares, of the same shape.
    """
    # For equal values, rounding may leave a difference just below zero.
    return (mean_of_squares - mean.square()).clamp_min(0).sqrt()


def _shown(value: object) -> str:
    """Return the text of a field for `repr`: the shape of a tensor, the length of a list, else its `repr`."""
    if isinstance(value, Tensor):
        return f"<{' x '.join(map(str, value.shape))}>"
    if isinstance(value, DepthAxis):
        return f"<{counted(value.num_sublayers, 'sublayer')}>"
    return f"<{len(value)}>" if isinstance(value, list) else repr(value)


__all__ = ["DrawableMeasurement", "Measurement", "standard_deviation"]
