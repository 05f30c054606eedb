"""Depth attention by loops that `numba` compiles for the processor at hand (the extra `cpu`).

Importing this imports no `numba`: it starts when it is first asked whether it runs, in [`supports`].
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from .. import compat
from ..autograd import differentiable
from ..interface import Implementation
from . import call, engine, kernels

# A toy is not worth the seconds that the loops take to load. By size alone: the same call gives the same bits.
_WIDE, _MANY = 256, 1 << 15  # numbers in a row, and in all sources

run = differentiable(kernels.forward, kernels.backward)


def supports(query: Tensor, sources: Sequence[Tensor]) -> str | None:
    """Why the loops do not run on these. They take plain tensors in memory, sources of float32 or all of bfloat16."""
    if torch.compiler.is_compiling():
        return "compiled, operations are fused"
    if (why := compat.looks_at_operations()) is not None:
        return why
    if not query.numel():
        return "the sources have no width"
    if query.dtype is not torch.float32:
        return f"the query is {query.dtype}, not float32"
    dtype = sources[0].dtype
    if dtype not in call.SERVED:
        return f"the sources are {dtype}, not float32 or bfloat16"
    for tensor in (query, *sources):
        if (why := call.unfit(tensor)) is not None:
            return why
    if any(source.dtype is not dtype for source in sources):
        return "the sources are of several dtypes"
    return engine.failure(kernels.trial, dtype)


def pays(query: Tensor, sources: Sequence[Tensor]) -> bool:
    """Whether sources are large enough."""
    return sources[0].shape[-1] >= _WIDE or len(sources) * sources[0].numel() >= _MANY


def reader(reads: Sequence[tuple]):
    """See [`Implementation`]."""
    from ..inference_reader import read_on_cpu

    return read_on_cpu(reads)


IMPLEMENTATION = Implementation(run=run, supports=supports, pays=pays, reader=reader)

__all__ = ["IMPLEMENTATION"]
