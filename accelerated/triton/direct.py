"""The direct path of a read: one pass of checks, few allocations, and launches without Triton's binder.

Where tensors are small, a GPU waits for its host (`python -m benchmarks --only host`). So all that depends on shapes
alone is kept on a [`ReadPlan`], and kernels that Triton has compiled are launched themselves. For tensors that need
more, such as a cast, a copy or another alignment, [`attend`] returns `None`. The general path, of `implementation`,
takes these and has the error messages.
"""

import functools
import operator
import warnings
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..autograd import (
    BackwardRequest,
    FollowingNorm,
    apply_untransformed,
    differentiable_grads,
    norm_grads_in_operations,
    sources_for_later_reads,
)
from ..compat import why_operations_are_observed
from ..inference_plan import Read
from ..tensors import PLAIN, packed
from ..training_plan import TrainingPlan, make_training_plan
from . import implementation, launch

_BYTES = 16  # Triton compiles a kernel for pointers that are multiples of it, and another for the rest
_MOST_PLANS = 1024  # of lengths that differ in every step
_ROWS, _COLUMNS, _WARPS = 512, 16, 8  # of a tile of the kernel that sums the parts of gradients
_PLAIN = frozenset(PLAIN)
_kind = operator.attrgetter("dtype", "shape", "device")


class Call(NamedTuple):
    """The arguments of a read that are no tensors.

    Args:
        plan: the plan of its shapes.
        eps: epsilon of the key norm.
        is_sum: whether the result is multiplied by n.
        fuse_later_grads: see [`Implementation`].
        norm_eps: epsilon of the following norm.
    """

    plan: "ReadPlan"
    eps: float
    is_sum: bool
    fuse_later_grads: bool
    norm_eps: float


class Launcher:
    """Launch one kernel again and again, with arguments whose sizes and alignments stay the same.

    Triton binds the arguments of the first launch, compiles the kernel and returns it. Later launches call the compiled
    kernel, as Triton's tutorial on softmax does. That leaves out the binder, which takes most of the time of a launch.

    Args:
        kernel: a function with `@triton.jit`, whose last parameters are constants.
        programs: number of programs.
        constants: values of these parameters, by name.
        num_warps: number of warps of a program.
        device: device of the tensors.
    """

    def __init__(self, kernel, programs: int, constants: dict[str, object], num_warps: int, device: torch.device):
        self._kernel, self._grid, self._device = kernel, (programs, 1, 1), device
        self._constants, self._num_warps = constants, num_warps
        self._compiled, self._values = None, ()

    def __call__(self, *arguments) -> None:
        """Launch the kernel with its arguments before the constants, on the device's current stream."""
        # Entering a device takes longer than asking for it. The index is `None` in Triton's interpreter.
        index = self._device.index
        if index is not None and index != torch.cuda.current_device():
            with torch.cuda.device(index):
                self._launch(arguments)
        else:
            self._launch(arguments)

    def _launch(self, arguments: tuple) -> None:
        if self._compiled is not None:
            self._compiled(*arguments, *self._values)
            return
        compiled = self._kernel[self._grid](*arguments, **self._constants, num_warps=self._num_warps)
        # Triton's interpreter returns nothing to launch. Then every launch goes this way.
        if hasattr(compiled, "__getitem__"):
            names = self._kernel.arg_names[len(arguments) :]
            self._values = tuple(self._constants[name] for name in names)
            self._compiled = compiled[self._grid]


class ReadPlan:
    """All that a read needs and that depends on shapes alone: the sizes of its outputs, and launchers of its kernels.

    Args:
        count: number n of sources.
        shape: shape `[..., D]` of each source.
        dtype: dtype of the sources.
        device: device of all tensors.
        query_shape: shape of the query, `[D]` or `[1, D]`.
        query_dtype: dtype of the query.
        norm_dtype: dtype of the key norm's weight.
        has_norm: whether a norm follows.
    """

    def __init__(
        self,
        count: int,
        shape: torch.Size,
        dtype: torch.dtype,
        device: torch.device,
        query_shape: torch.Size,
        query_dtype: torch.dtype,
        norm_dtype: torch.dtype,
        has_norm: bool = False,
    ):
        width, tokens, padded = shape[-1], shape.numel() // shape[-1], launch.padded_number(count)
        self.count, self.shape, self.dtype, self.device, self.tokens = count, shape, dtype, device, tokens
        self.source_kind = dtype, shape, device
        weight_kinds = [(query_dtype, query_shape, device), (norm_dtype, shape[-1:], device)]
        if has_norm:
            weight_kinds.append((dtype, shape[-1:], device))
        self.input_kinds = weight_kinds + [self.source_kind] * count
        self.padding = padded - count
        self.weights_shape = (count, *shape[:-1])  # and of scratch of the backward kernel
        self.statistics_shape = (3, *self.weights_shape)  # weights, logits and 1 / RMS
        self.grads_shape = (count, *shape)
        self.programs = launch.backward_programs(tokens, width)
        # Gradients of the query, and of the following norm's weight, in parts.
        self.partial_shape = (self.programs, 2, width) if has_norm else (self.programs, width)
        # Whether every part of an allocation that is divided begins at a multiple of 16 bytes.
        self.is_aligned = not any(size % _BYTES for size in (4 * count * tokens, dtype.itemsize * tokens * width))
        tile = launch.tile_of(width)
        self._num_warps = tile.pop("num_warps")
        self._constants = launch.sizes(padded, width) | tile | {"HAS_KEY_NORM": True, "HAS_NORM": has_norm}
        flags = {"HAS_PHASE": False, "KEEPS_STATISTICS": True}
        self.forward = self._launcher(launch.kernels().forward_kernel, -(-tokens // tile["TOKENS"]), flags)
        self._backward: dict[tuple[bool, bool, bool], Launcher] = {}
        finish = {"WIDTH": width, "HAS_NORM": has_norm, "ROWS": _ROWS, "COLUMNS": _COLUMNS}
        self.finish = Launcher(launch.kernels().finish_kernel, -(-width // _COLUMNS), finish, _WARPS, device)

    def backward(self, has_grad_weights: bool, needs_sources: bool, has_later: bool) -> Launcher:
        """Return the launcher of the backward kernel with these optional arguments."""
        key = has_grad_weights, needs_sources, has_later
        if key not in self._backward:
            flags = dict(zip(("HAS_GRAD_WEIGHTS", "NEEDS_SOURCES", "HAS_LATER"), key))
            self._backward[key] = self._launcher(launch.kernels().backward_kernel, self.programs, flags)
        return self._backward[key]

    def _launcher(self, kernel, programs: int, flags: dict[str, bool]) -> Launcher:
        return Launcher(kernel, programs, self._constants | flags, self._num_warps, self.device)


def are_ready(tensors: Sequence[Tensor], kinds: list[tuple[torch.dtype, torch.Size, torch.device]]) -> bool:
    """Return whether kernels take all tensors as they are, at addresses for which Triton compiled them.

    Args:
        tensors: the tensors.
        kinds: dtype, shape and device that each must have.
    """
    # By built-in functions over all tensors: statements for each take twice as long.
    if not _PLAIN.issuperset(map(type, tensors)) or [*map(_kind, tensors)] != kinds:
        return False
    if not all(map(Tensor.is_contiguous, tensors)) or any(map(Tensor.is_neg, tensors)):
        return False
    addresses = [*map(Tensor.data_ptr, tensors)]
    # A tensor whose memory was freed is at 0.
    return all(addresses) and not functools.reduce(operator.or_, addresses) % _BYTES


_plans: dict[tuple, ReadPlan] = {}


def _plan(key: tuple) -> ReadPlan | None:
    """Make and keep a plan by the arguments of [`ReadPlan`]; return `None` if the direct path takes no such tensors."""
    _, shape, dtype, device, query_shape, query_dtype, norm_dtype, _ = key
    if not {dtype, query_dtype, norm_dtype} <= {*launch.DTYPES} or not shape or not shape.numel():
        return None
    if query_shape not in (shape[-1:], (1, *shape[-1:])) or implementation.why_not_on(device, shape[-1]) is not None:
        return None
    if not is_right_on(device):
        return None
    plan = ReadPlan(*key)
    if not plan.is_aligned:
        return None
    if len(_plans) >= _MOST_PLANS:
        _plans.clear()
    _plans[key] = plan
    return plan


@functools.cache
@torch.no_grad()
def is_right_on(device: torch.device) -> bool:
    """Return whether launches without the binder compute the same bits as launches by Triton; warn if not.

    The first call in a process makes a small read twice, forward and backward. How compiled kernels are called is no
    promise of Triton, so a new release may change it.
    """
    try:
        values = torch.linspace(-1, 1, 4 * 32, dtype=torch.float32, device=device).view(4, 2, 16)
        sources, query, weight = [*values[:3]], values[3, 0], values[3, 1] + 2
        kind = values.shape[1:], values.dtype, device, query.shape, query.dtype, query.dtype
        call = Call(ReadPlan(3, *kind, has_norm=True), 1e-6, True, True, 1e-6)
        seen = []
        for _ in ("by Triton", "without its binder"):
            outputs = _forward(call, query, weight, weight, sources)
            saved = query, weight, weight, *outputs[1:], *sources
            grads = _backward(call, outputs[0], None, [], saved, True)
            seen.append([*outputs, *grads[:3], *grads[3]])
        if all(map(torch.equal, *seen)):
            return True
        reason = "compute other numbers"
    except Exception as error:
        reason = f"fail ({error})"
    warnings.warn(f"Launches without Triton's binder {reason} on {device}. Triton makes all launches.", stacklevel=2)
    return False


def attend(
    query: Tensor,
    sources: Sequence[Tensor],
    key_norm_weight: Tensor,
    eps: float,
    is_sum: bool,
    fuse_later_grads: bool,
    norm: FollowingNorm | None = None,
) -> tuple[Tensor, Tensor, Sequence[Tensor]] | None:
    """Compute depth attention by the Triton kernels, from the query and the key norm's weight themselves.

    Args:
        query: `w`, `[D]` or `[1, D]`.
        sources: n >= 1 tensors `[..., D]`.
        key_norm_weight: `g` `[D]`.
        eps: epsilon of the key norm.
        is_sum: whether to multiply the result by n.
        fuse_later_grads: see [`Implementation`].
        norm: a norm to apply to `h`.

    Returns:
        `h` or its norm, `a` and the sources, as [`Implementation.run`] returns them; `None` if the general path must
        run.
    """
    first = sources[0]
    if torch.compiler.is_compiling() or not first.is_cuda or type(first) not in PLAIN:
        return None
    norm_weight, norm_eps = norm or (None, 0.0)
    key = (
        len(sources), first.shape, first.dtype, first.device, query.shape, query.dtype, key_norm_weight.dtype,
        norm_weight is not None,
    )  # fmt: skip
    plan = _plans.get(key) or _plan(key)
    weights = (query, key_norm_weight) if norm_weight is None else (query, key_norm_weight, norm_weight)
    if plan is None or not are_ready((*weights, *sources), plan.input_kinds):
        return None
    if why_operations_are_observed() is not None:
        return None
    call = Call(plan, eps, is_sum, fuse_later_grads, norm_eps)
    if not torch.is_grad_enabled():
        result, _, statistics = _forward(call, query, key_norm_weight, norm_weight, sources)
        return result, statistics[0], sources
    result, weights, *later = _apply(call, query, key_norm_weight, norm_weight, *sources)
    return result, weights, tuple(later) or sources


def training_plan(reads: Sequence[Read]) -> TrainingPlan | None:
    """Make a plan that reads by the kernels in a pass with gradients; see [`Implementation`]."""
    return make_training_plan(reads, attend) if reads[0][0].weight.is_cuda else None


class DirectRead(torch.autograd.Function):
    """A read whose tensors fit its plan. It saves its inputs, statistics, and a norm's input."""

    @staticmethod
    def forward(
        ctx, call: Call, query: Tensor, key_norm_weight: Tensor, norm_weight: Tensor | None, *sources: Tensor
    ) -> tuple[Tensor, ...]:
        """Return the result and the weights, and with `fuse_later_grads` the sources too."""
        ctx.call = call  # one argument, because autograd unwraps each
        result, hidden, statistics = _forward(call, query, key_norm_weight, norm_weight, sources)
        ctx.save_for_backward(query, key_norm_weight, norm_weight, hidden, statistics, *sources)
        ctx.set_materialize_grads(False)  # missing gradients are `None`, not tensors of zeros
        if not call.fuse_later_grads:
            return result, statistics[0]
        return result, statistics[0], *sources_for_later_reads(ctx, sources, ctx.needs_input_grad[4:])

    @staticmethod
    def backward(ctx, grad: Tensor | None, grad_weights: Tensor | None, *later_grads: Tensor | None):
        """Return the gradients of the query, the key norm's weight, the following norm's weight and the sources."""
        saved = query, key_norm_weight, norm_weight, _, _, *sources = ctx.saved_tensors
        _, needs_query, needs_key_norm, needs_norm, *needs_sources = ctx.needs_input_grad
        call = ctx.call
        if grad is None:
            grad = torch.zeros_like(sources[0])
        elif grad.is_sparse:
            grad = grad.to_dense()
        is_compiled = torch.compiler.is_compiling()
        if torch.is_grad_enabled() and not is_compiled:
            request = BackwardRequest(
                grad, grad_weights, later_grads or [None] * len(sources), _folded(query, key_norm_weight),
                sources, (), call.eps, call.is_sum, needs_query or needs_key_norm, needs_sources,
            )  # fmt: skip
            norm = None if norm_weight is None else FollowingNorm(norm_weight, call.norm_eps)
            grad_folded, grad_sources, grad_norm = differentiable_grads(request, norm)
            grad_query, grad_key_norm = _unfolded(grad_folded, query, key_norm_weight)
        else:
            grad_query, grad_key_norm, grad_norm, grad_sources = _backward(
                call, grad, grad_weights, later_grads, saved, any(needs_sources), is_direct=not is_compiled
            )
            if not all(needs_sources):
                grad_sources = [grad if is_needed else None for grad, is_needed in zip(grad_sources, needs_sources)]
        return (
            None,
            grad_query if needs_query else None,
            grad_key_norm if needs_key_norm else None,
            grad_norm if needs_norm else None,
            *grad_sources,
        )


_apply = apply_untransformed(DirectRead)


def _folded(query: Tensor, key_norm_weight: Tensor) -> Tensor:
    return query.view(-1).float() * key_norm_weight.float()


def _unfolded(grad: Tensor | None, query: Tensor, key_norm_weight: Tensor) -> tuple[Tensor | None, Tensor | None]:
    """Return the gradients of the query and of the key norm's weight, from the gradient of their product or `None`."""
    if grad is None:
        return None, None
    grad_query = (grad * key_norm_weight).to(query.dtype).view(query.shape)
    return grad_query, (grad * query.view(-1)).to(key_norm_weight.dtype)


def _forward(
    call: Call, query: Tensor, key_norm_weight: Tensor, norm_weight: Tensor | None, sources: Sequence[Tensor]
) -> tuple[Tensor, Tensor | None, Tensor]:
    """Return the result, the input of the norm or `None`, and the statistics of all sources."""
    plan, first = call.plan, sources[0]
    result = torch.empty_like(first)
    hidden = None if norm_weight is None else torch.empty_like(first)
    statistics = first.new_empty(plan.statistics_shape, dtype=torch.float32)
    plan.forward(
        (*sources, *sources[:1] * plan.padding), query, key_norm_weight, None, None, None, norm_weight,
        result, hidden, statistics,
        plan.tokens, plan.count, float(plan.count if call.is_sum else 1), call.eps, call.norm_eps,
    )  # fmt: skip
    return result, hidden, statistics


def _backward(
    call: Call,
    grad: Tensor,
    grad_weights: Tensor | None,
    later_grads: Sequence[Tensor | None],
    saved: Sequence[Tensor | None],
    needs_sources: bool,
    is_direct: bool = True,
) -> tuple[Tensor, Tensor, Tensor | None, Sequence[Tensor | None]]:
    """Return the gradients of the query, of the key norm's weight, of the following norm's weight, and of the sources.

    Args:
        call: the arguments of the forward pass that are no tensors.
        grad: gradient of the result.
        grad_weights: gradient of the weights, or `None`.
        later_grads: gradients of the sources from later reads, each of which may be `None`; or nothing.
        saved: the tensors that the forward pass has saved, in that order.
        needs_sources: whether the sources' gradients are needed. If not, each is `None`.
        is_direct: whether kernels may be launched without Triton's binder.
    """
    plan = call.plan
    query, key_norm_weight, norm_weight, hidden, statistics, *sources = saved
    is_ready = is_direct and are_ready((grad, *later_grads), [plan.source_kind] * (1 + len(later_grads)))
    if not is_ready:
        grad, later_grads = packed(grad), implementation.all_or_none(later_grads)
        is_ready = is_direct and are_ready((grad, *later_grads), [plan.source_kind] * (1 + len(later_grads)))
    if grad_weights is not None:
        grad_weights = packed(grad_weights)
        is_ready = is_ready and are_ready([grad_weights], [(torch.float32, plan.weights_shape, plan.device)])
    if not is_ready:
        grad_norm = None
        if norm_weight is not None:
            grad, grad_norm = norm_grads_in_operations(grad, hidden, FollowingNorm(norm_weight, call.norm_eps))
        partial, grads = launch.backward(
            grad, grad_weights, later_grads, _folded(query, key_norm_weight), sources, statistics,
            call.is_sum, needs_sources,
        )  # fmt: skip
        return *_unfolded(partial.sum(0), query, key_norm_weight), grad_norm, grads or [None] * len(sources)
    # To divide one allocation into these two would take longer.
    contracted = grad.new_empty(plan.weights_shape, dtype=torch.float32)
    partial = grad.new_empty(plan.partial_shape, dtype=torch.float32)
    grads = grad.new_empty(plan.grads_shape).unbind() if needs_sources else ()
    plan.backward(grad_weights is not None, needs_sources, bool(later_grads))(
        grad, grad_weights, (*sources, *sources[:1] * plan.padding), query, key_norm_weight, hidden, norm_weight,
        statistics, contracted, partial,
        (*grads, *grads[:1] * plan.padding) or None, (*later_grads, *later_grads[:1] * plan.padding) or None,
        plan.tokens, plan.count, float(plan.count if call.is_sum else 1), call.norm_eps,
    )  # fmt: skip
    grad_query, grad_key_norm = torch.empty_like(query), torch.empty_like(key_norm_weight)
    grad_norm = None if norm_weight is None else torch.empty_like(norm_weight)
    plan.finish(partial, query, key_norm_weight, grad_query, grad_key_norm, grad_norm, plan.programs)
    return grad_query, grad_key_norm, grad_norm, grads or [None] * plan.count


__all__ = ["Call", "DirectRead", "Launcher", "ReadPlan", "attend", "is_right_on", "training_plan"]
