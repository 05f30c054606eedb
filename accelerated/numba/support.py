"""Where the compiled loops run, and from which size on they are worth the time to load them."""

from collections.abc import Sequence

import torch
from torch import Tensor

from .. import compat
from . import call, engine, kernels

# A small model is not worth the seconds that the loops take to load. The size alone decides, whether they are loaded
# already or not, so that the same call always gives the same bits.
_WIDE, _MANY = 256, 1 << 15  # numbers in a row, and in all sources; from either on, the loops are used


def supports(query: Tensor, sources: Sequence[Tensor]) -> str | None:
    """Return why the loops cannot run on these tensors, or `None` if they can; see [`Implementation`].

    They take plain tensors on the CPU: the query in float32, the sources all in float32 or all in bfloat16.
    """
    if torch.compiler.is_compiling():
        return "torch.compile fuses PyTorch's operations instead"
    if (reason := compat.why_operations_are_observed()) is not None:
        return reason
    if not query.numel():
        return "the sources have no width"
    if query.dtype is not torch.float32:
        return f"the query is {query.dtype}, not float32"
    dtype = sources[0].dtype
    if dtype not in call.DTYPES:
        return f"the sources are {dtype}, not float32 or bfloat16"
    for tensor in (query, *sources):
        if (reason := call.why_unfit(tensor)) is not None:
            return reason
    if any(source.dtype is not dtype for source in sources):
        return "the sources are of several dtypes"
    return engine.why_loops_do_not_run(kernels.trial, dtype)


def pays(query: Tensor, sources: Sequence[Tensor]) -> bool:
    """Return whether the sources are large enough; see [`Implementation`]."""
    return sources[0].shape[-1] >= _WIDE or len(sources) * sources[0].numel() >= _MANY


__all__ = ["pays", "supports"]
