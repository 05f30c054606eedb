"""Plan the reads of one forward pass without gradients: validate the model once, then dispatch every read.

A connection that is called by itself checks each time which kernels can run. In decoding, these checks would take
longer than the depth attention, because the weights of each sublayer push all else out of the processor's caches. With
a plan, a read checks its sources only.

[`InferencePlan`] holds what all devices share. `numba/plan.py` and `triton/plan.py` derive from it.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from .phases import group_size, two_phases_pay
from .plain import Read, are_plain, is_plain_rms_norm

if TYPE_CHECKING:
    from .interface import Connection

Sources = tuple[Tensor, ...]
Phase = tuple[Tensor, ...] | None  # the result of phase 1, of one read or of all reads in a group
Norm = tuple[Tensor, float] | None  # weight and epsilon


class InferencePlan:
    """The reads of one pass, of each sublayer in turn and of the output. [`make_plan`] makes an instance.

    Args:
        reads: all reads of the pass, in order.
        queries: `w * g` of each read, `[reads, D]` in float32.
    """

    def __init__(self, reads: Sequence[Read], queries: Tensor):
        self._queries = queries
        self._positions = {id(connection): position for position, (connection, _, _) in enumerate(reads)}
        self._key_norms = [key_norm for _, key_norm, _ in reads]
        # Norms that the kernels can compute with the read, if their weights have the sources' dtype.
        self._norms: list[Norm] = [None if norm is None else _plain_norm(norm) for _, _, norm in reads]
        # The current group: its reads, the sources that phase 1 has read for them, their stamps, and its result.
        self._group: range = range(0)
        self._phase_sources: Sources = ()
        self._stamps: list[tuple] = []
        self._phase: Phase = None

    def read(self, connection: "Connection", state: Tensor | Sources) -> tuple[Tensor, bool, Tensor | Sources]:
        """Compute the input of a sublayer, or of the output.

        Args:
            connection: one of the plan's connections.
            state: the sources, each `[batch, seq, hidden]`; the embedding alone before the first write.

        Returns:
            The input `[batch, seq, hidden]`, whether the norm that runs next is already applied to it, and the state.
        """
        sources = state if isinstance(state, tuple) else (state,)
        position = self._positions[id(connection)]
        is_inference = not torch.is_grad_enabled() and sources[0].shape[-1:] == self._queries.shape[1:]
        prepared = self._prepare(sources) if is_inference else None
        if prepared is None:
            return connection(state, self._key_norms[position]())[0], False, state
        if position not in self._group or not self._begins_with_phase_sources(sources):
            self._begin_group(position, connection, sources, prepared)
        norm = self._norms[position]
        if norm is not None and not self._takes_norm(norm[0], sources):
            norm = None
        phase = None if self._phase is None else tuple(part[position - self._group.start] for part in self._phase)
        multiplier = len(sources) if connection.scale == "sum" else 1
        return self._read(position, multiplier, connection.eps, prepared, phase, norm), norm is not None, state

    def _begins_with_phase_sources(self, sources: Sources) -> bool:
        """Return whether the sources begin with those that phase 1 has read, unchanged since then."""
        return len(sources) >= len(self._phase_sources) and all(
            a is b and stamp == _stamp(b) for a, b, stamp in zip(self._phase_sources, sources, self._stamps)
        )

    def _begin_group(self, start: int, connection: "Connection", sources: Sources, prepared: Any) -> None:
        """Begin a group at the read of position `start`. Run phase 1 if it pays; else the group is this read alone."""
        # Within a block the last source is a sum that still grows, so a group begins at the border of a block.
        is_boundary = connection.sublayer % connection.block_size == 0
        count, remaining = len(sources), len(self._norms) - start
        pays = is_boundary and two_phases_pay(count, sources[0].numel())
        size = group_size(connection.block_size, count, remaining) if pays else 1
        self._group, self._phase_sources, self._stamps = range(start, start + size), (), []
        self._phase = None  # frees its memory before the next result is allocated
        if size > 1:
            self._phase = self._phase_one(self._queries[start : start + size], connection.eps, prepared)
            self._phase_sources, self._stamps = sources, [_stamp(source) for source in sources]

    def _prepare(self, sources: Sources) -> Any:
        """Return the sources in the form that the device's kernels take, or `None` if no kernel takes them."""
        raise NotImplementedError

    def _takes_norm(self, weight: Tensor, sources: Sources) -> bool:
        """Return whether the kernels can apply a norm with this weight `[D]` after a read of these sources."""
        raise NotImplementedError

    def _phase_one(self, queries: Tensor, eps: float, prepared: Any) -> Phase:
        """Compute phase 1 of the queries `[G, D]` against prepared sources."""
        raise NotImplementedError

    def _read(self, position: int, multiplier: int, eps: float, prepared: Any, phase: Phase, norm: Norm) -> Tensor:
        """Compute a read `[batch, seq, hidden]`, continued from its part of phase 1 and normed if these are given."""
        raise NotImplementedError


def make_plan(plan_class: type[InferencePlan], device: str, reads: Sequence[Read]) -> InferencePlan | None:
    """Make a plan for a pass, if every connection and key norm computes what its class defines.

    Args:
        plan_class: the plan of a device.
        device: type of that device, `"cpu"` or `"cuda"`.
        reads: all reads of the pass, in order.

    Returns:
        The plan, or `None` if the model must call its connections one by one.
    """
    if torch.is_grad_enabled() or not are_plain(reads):
        return None
    first = reads[0][0].weight
    if first.device.type != device:
        return None
    settings = reads[0][0].eps, reads[0][0].scale, reads[0][0].block_size
    weights, key_norm_weights = [], []
    for connection, key_norm, _ in reads:
        # The reads of a group are computed together, so all must have the same settings.
        if (connection.eps, connection.scale, connection.block_size) != settings:
            return None
        weights.append(connection._parameters.get("weight"))
        key_norm_weights.append(key_norm._parameters.get("weight"))
    if any(type(tensor) is not nn.Parameter for tensor in (*weights, *key_norm_weights)):
        return None
    try:
        # Tensors of several shapes or on several devices raise, or give another shape or device. To compare each one
        # would take longer than the product.
        stacked, norms = torch.stack(weights), torch.stack(key_norm_weights)  # (reads, 1, D), (reads, D)
    except RuntimeError:
        return None
    width, number = first.shape[-1], len(reads)
    if stacked.shape != (number, 1, width) or norms.shape != (number, width):
        return None
    if stacked.device != first.device or norms.device != first.device:
        return None
    queries = stacked.squeeze(1).to(torch.float32) * norms.to(torch.float32)  # (reads, D)
    return plan_class(reads, queries)


def _plain_norm(norm: nn.Module) -> Norm:
    """Return weight and epsilon of a plain RMSNorm, or `None` for any other module."""
    weight = norm._parameters.get("weight")
    if type(weight) is not nn.Parameter or not is_plain_rms_norm(norm, weight.dtype):
        return None
    return weight, vars(norm)["variance_epsilon"]


def _stamp(source: Tensor) -> tuple:
    """Return a value that changes with the tensor's memory, shape and, where PyTorch counts changes, its numbers."""
    return source.data_ptr(), source.shape, None if source.is_inference() else source._version


__all__ = ["InferencePlan", "Norm", "Phase", "Sources", "make_plan"]
