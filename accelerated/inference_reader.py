"""The reads of a forward pass without gradients: what holds for all of them is found out once, before the first.

A connection that is called by itself asks each time whether it and the norm after it do only what their classes do,
and which kernels serve. In decoding, where the weights of a sublayer push all else out of the processor's caches, the
answers would take longer than the attention over the depth. Of the sources nothing is taken for granted: each read
looks at those it gets.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from . import compat
from .phases import group_size, two_phases_pay
from .plain import does_nothing_of_its_own, is_plain_rms_norm, is_unpatched, modules_are_called_plainly

# A connection, its key norm, and the module that runs next, if one does.
Read = tuple[nn.Module, nn.Module, nn.Module | None]
Sources = tuple[Tensor, ...]
Phase = tuple[Tensor, ...] | None  # what phase 1 left for one read, or for all of a group
Norm = tuple[Tensor, float] | None  # weight and epsilon
_FEW_TOKENS = 16  # the inputs of so many, for all sublayers, are allocated at once
_ON_GPU = (torch.float32, torch.bfloat16, torch.float16)


class InferenceReader:
    """The reads of one pass: of each sublayer in turn, and of the output. Made by `read_on_cpu` and `read_on_gpu`.

    Args:
        reads: all of them, in order.
        queries: `w * g` of each, `[reads, D]` in float32.
    """

    def __init__(self, reads: Sequence[Read], queries: Tensor):
        self._queries = queries
        self._places = {id(connection): place for place, (connection, _, _) in enumerate(reads)}
        self._key_norms = [key_norm for _, key_norm, _ in reads]
        # Of the norms that the kernels can compute after the read, if they are of the sources' dtype.
        self._norms: list[Norm] = [None if norm is None else _plain_norm(norm) for _, _, norm in reads]
        # The sublayers that phase 1 served, the sources that it read, what they were then, and what it returned.
        self._group: range = range(0)
        self._in_phase: Sources = ()
        self._stamps: list[tuple] = []
        self._phase: Phase = None

    def read(self, connection: nn.Module, state: Tensor | Sources) -> tuple[Tensor, bool]:
        """The input of a sublayer `[batch, seq, hidden]`; or, and then `True`, what the norm after it makes of that."""
        sources = state if isinstance(state, tuple) else (state,)
        place = self._places[id(connection)]
        is_served = not torch.is_grad_enabled() and sources[0].shape[-1:] == self._queries.shape[1:]
        taken = self._take(sources) if is_served else None
        if taken is None:
            return connection(state, self._key_norms[place]())[0], False
        if place not in self._group or not self._is_there(sources):
            self._begin_group(place, connection, sources, taken)
        norm = self._norms[place]
        if norm is not None and not self._takes_norm(norm[0], sources):
            norm = None
        phase = None if self._phase is None else tuple(part[place - self._group.start] for part in self._phase)
        multiplier = len(sources) if connection.scale == "sum" else 1
        return self._read(place, multiplier, connection.eps, taken, phase, norm), norm is not None

    def _is_there(self, sources: Sources) -> bool:
        """Whether what phase 1 read is what the sources begin with, unchanged."""
        return len(sources) >= len(self._in_phase) and all(
            a is b and stamp == _stamp(b) for a, b, stamp in zip(self._in_phase, sources, self._stamps)
        )

    def _begin_group(self, start: int, connection: nn.Module, sources: Sources, taken: object) -> None:
        # Within a block the last source is a sum that still grows.
        is_boundary = connection.sublayer % connection.block_size == 0
        count, to_come = len(sources), len(self._norms) - start
        pays = is_boundary and two_phases_pay(count, sources[0].numel())
        size = group_size(connection.block_size, count, to_come) if pays else 1
        self._group, self._in_phase, self._stamps = range(start, start + size), (), []
        self._phase = None  # its memory, before that of the next
        if size > 1:
            self._phase = self._phase_one(self._queries[start : start + size], connection.eps, taken)
            self._in_phase, self._stamps = sources, [_stamp(source) for source in sources]

    # What a device has of its own: the sources as its kernels take them, or `None` where they do not; whether they take
    # a norm's weight after these sources; the phases.
    def _take(self, sources: Sources) -> object | None:
        raise NotImplementedError

    def _takes_norm(self, weight: Tensor, sources: Sources) -> bool:
        raise NotImplementedError

    def _phase_one(self, queries: Tensor, eps: float, taken: object) -> Phase:
        raise NotImplementedError

    def _read(self, place: int, multiplier: int, eps: float, taken: object, phase: Phase, norm: Norm) -> Tensor:
        raise NotImplementedError


def read_on_cpu(reads: Sequence[Read]) -> InferenceReader | None:
    """A reader by the loops of `accelerated.numba`; `None` where it may not act."""
    return _reader(_CpuReader, "cpu", reads)


def read_on_gpu(reads: Sequence[Read]) -> InferenceReader | None:
    """A reader by the kernels of `accelerated.triton`; `None` where it may not act."""
    from .triton import kernels_available

    first = reads[0][0].weight
    return _reader(_GpuReader, "cuda", reads) if kernels_available(first.device, first.shape[-1]) else None


def _reader(of_device: type[InferenceReader], device: str, reads: Sequence[Read]) -> InferenceReader | None:
    if torch.is_grad_enabled() or torch.compiler.is_compiling() or compat.looks_at_operations() is not None:
        return None
    if not reads or not modules_are_called_plainly():
        return None
    kind, key_norm_kind, first = type(reads[0][0]), type(reads[0][1]), reads[0][0].weight
    # One who patched how a connection writes means something by it, and may mean it for what is read.
    if not all(is_unpatched(*method) for method in ((kind, "forward"), (kind, "write"), (key_norm_kind, "forward"))):
        return None
    form = reads[0][0].eps, reads[0][0].scale, reads[0][0].block_size
    weights, key_norm_weights = [], []
    for connection, key_norm, _ in reads:
        if type(connection) is not kind or type(key_norm) is not key_norm_kind:
            return None
        if "write" in vars(connection):
            return None
        if not (does_nothing_of_its_own(connection) and does_nothing_of_its_own(key_norm)):
            return None
        # A group of reads is computed alike.
        if (connection.eps, connection.scale, connection.block_size) != form:
            return None
        weights.append(connection._parameters.get("weight"))
        key_norm_weights.append(key_norm._parameters.get("weight"))
    on, expected = first.device, ((1, first.shape[-1]), first.shape[-1:])
    for pair in zip(weights, key_norm_weights):
        for tensor, shape in zip(pair, expected):
            if type(tensor) is not nn.Parameter or tensor.shape != shape or tensor.device != on:
                return None
    if on.type != device:
        return None
    queries = torch.cat(weights).to(torch.float32) * torch.stack(key_norm_weights).to(torch.float32)
    return of_device(reads, queries)


def _plain_norm(norm: nn.Module) -> Norm:
    weight = norm._parameters.get("weight")
    if type(weight) is not nn.Parameter or not is_plain_rms_norm(norm, weight.dtype):
        return None
    return weight, norm.variance_epsilon


def _stamp(source: Tensor) -> tuple:
    """Another one after the tensor was given other memory, another shape or, where PyTorch counts, other numbers."""
    return source.data_ptr(), source.shape, None if source.is_inference() else source._version


class _CpuReader(InferenceReader):
    """By the loops of `accelerated.numba`."""

    def __init__(self, reads: Sequence[Read], queries: Tensor):
        super().__init__(reads, queries)
        from . import numba as of_cpu  # the folder; the package of that name is looked for when it is first needed

        self._supports, self._pays, self._call, self._kernels = (
            of_cpu.supports,
            of_cpu.pays,
            of_cpu.call,
            of_cpu.kernels,
        )
        self._served: torch.dtype | None = None  # the dtype of sources for which the loops are known to run
        self._each_query = queries.unbind()
        self._results: list[Tensor] = []  # for the reads to come

    def _take(self, sources: Sources) -> object | None:
        # In this order: to load the loops takes half a second, and seconds on a new machine, which what is small is not
        # worth; unless it is one token, as in generation, where others follow.
        is_token = sources[0].shape[-2:-1] == (1,)
        if not (is_token or self._pays(self._each_query[0], sources)):
            return None
        dtype = sources[0].dtype
        if dtype is not self._served:
            if self._supports(self._each_query[0], sources) is not None:
                return None
            self._served = dtype
        try:
            return self._call.checked(sources)
        except self._call.Unfit:
            return None

    def _takes_norm(self, weight: Tensor, sources: Sources) -> bool:
        fits = weight.dtype is sources[0].dtype and weight.shape == sources[0].shape[-1:]
        return fits and weight.is_cpu and weight.is_contiguous()

    def _phase_one(self, queries: Tensor, eps: float, taken: object) -> Phase:
        return self._kernels.phase_one(queries, eps, taken)

    def _read(self, place: int, multiplier: int, eps: float, taken: object, phase: Phase, norm: Norm) -> Tensor:
        result = self._result(taken.shape, taken.dtype)
        fresh = taken if phase is None else taken.after(len(self._in_phase))
        norm_weight, norm_eps = norm or (None, 0.0)
        self._call.forward(
            self._each_query[place], fresh, result, None, multiplier, eps, norm_weight, norm_eps, phase
        )  # fmt: skip
        return result

    def _result(self, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        if shape.numel() > _FEW_TOKENS * shape[-1]:
            return torch.empty(shape, dtype=dtype, device="cpu")
        if not self._results or self._results[-1].shape != shape or self._results[-1].dtype is not dtype:
            self._results = list(torch.empty((len(self._norms), *shape), dtype=dtype, device="cpu").unbind())
        return self._results.pop()


class _GpuReader(InferenceReader):
    """By the kernels of `accelerated.triton`."""

    def __init__(self, reads: Sequence[Read], queries: Tensor):
        super().__init__(reads, queries)
        from . import triton

        self._run_phase_one, self._run_read = triton.phase_one, triton.read_fused

    def _take(self, sources: Sources) -> object | None:
        dtype, device, shape = sources[0].dtype, self._queries.device, sources[0].shape
        are_served = dtype in _ON_GPU and all(
            type(source) is Tensor and source.dtype is dtype and source.device == device and source.shape == shape
            for source in sources
        )
        return sources if are_served else None

    def _takes_norm(self, weight: Tensor, sources: Sources) -> bool:
        fits = weight.dtype is sources[0].dtype and weight.shape == sources[0].shape[-1:]
        return fits and weight.device == self._queries.device

    def _phase_one(self, queries: Tensor, eps: float, taken: object) -> Phase:
        return self._run_phase_one(queries, eps, *taken)

    def _read(self, place: int, multiplier: int, eps: float, taken: object, phase: Phase, norm: Norm) -> Tensor:
        fresh = taken[len(self._in_phase) :]
        return self._run_read(
            self._queries[place], eps, multiplier, fresh, phase, taken[0].dtype, *(norm or (None, 0.0))
        )


__all__ = ["InferenceReader", "read_on_cpu", "read_on_gpu"]
