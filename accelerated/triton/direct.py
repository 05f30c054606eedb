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

import torch
from torch import Tensor

from ..autograd import BackwardRequest, differentiable_backward
from ..compat import why_operations_are_observed
from ..tensors import PLAIN, packed
from . import implementation, launch

_BYTES = 16  # Triton compiles a kernel for pointers that are multiples of it, and another for the rest
_MOST_PLANS = 1024  # of lengths that differ in every step
_PLAIN = frozenset(PLAIN)
_kind = operator.attrgetter("dtype", "shape", "device")


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
    ):
        width, tokens, padded = shape[-1], shape.numel() // shape[-1], launch.padded_number(count)
        self.count, self.shape, self.dtype, self.device, self.tokens = count, shape, dtype, device, tokens
        self.source_kind = dtype, shape, device
        weight_kinds = [(query_dtype, query_shape, device), (norm_dtype, shape[-1:], device)]
        self.input_kinds = weight_kinds + [self.source_kind] * count
        self.padding = padded - count
        self.statistics_shape = (3, count, *shape[:-1])  # weights, logits and 1 / RMS
        self.grads_shape = (count, *shape)
        self.programs = launch.backward_programs(tokens, width)
        self.contracted_shape = self.statistics_shape[1:]  # scratch of the backward kernel
        self.partial_shape = self.programs, width  # the query's gradient in parts
        # Whether every part of an allocation that is divided begins at a multiple of 16 bytes.
        self.is_aligned = not any(size % _BYTES for size in (4 * count * tokens, dtype.itemsize * tokens * width))
        tile = launch.tile_of(width)
        self._num_warps = tile.pop("num_warps")
        self._constants = launch.sizes(padded, width) | tile | {"HAS_KEY_NORM": True}
        flags = {"HAS_PHASE": False, "HAS_NORM": False, "KEEPS_STATISTICS": True}
        self.forward = self._launcher(launch.kernels().forward_kernel, -(-tokens // tile["TOKENS"]), flags)
        self._backward: dict[tuple[bool, bool, bool], Launcher] = {}

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
    _, shape, dtype, device, query_shape, query_dtype, norm_dtype = key
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
        plan, seen = ReadPlan(3, values.shape[1:], values.dtype, device, query.shape, query.dtype, query.dtype), []
        for _ in ("by Triton", "without its binder"):
            result, *statistics = _forward(plan, query, weight, sources, 1e-6, True)
            grads = _backward(plan, result, None, [], (query, weight), sources, tuple(statistics), True, True)
            seen.append([result, *statistics, grads[0], *grads[1]])
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
) -> tuple[Tensor, Tensor, Sequence[Tensor]] | None:
    """Compute depth attention by the Triton kernels, from the query and the key norm's weight themselves.

    Args:
        query: `w`, `[D]` or `[1, D]`.
        sources: n >= 1 tensors `[..., D]`.
        key_norm_weight: `g` `[D]`.
        eps: epsilon of the key norm.
        is_sum: whether to multiply the result by n.
        fuse_later_grads: see [`Implementation`].

    Returns:
        `h`, `a` and the sources, as [`Implementation.run`] returns them; `None` if the general path must run.
    """
    first = sources[0]
    if torch.compiler.is_compiling() or not first.is_cuda or type(first) not in PLAIN:
        return None
    key = len(sources), first.shape, first.dtype, first.device, query.shape, query.dtype, key_norm_weight.dtype
    plan = _plans.get(key) or _plan(key)
    if plan is None or not are_ready((query, key_norm_weight, *sources), plan.input_kinds):
        return None
    if why_operations_are_observed() is not None:
        return None
    if not torch.is_grad_enabled():
        result, weights, *_ = _forward(plan, query, key_norm_weight, sources, eps, is_sum)
        return result, weights, sources
    result, weights, *later = DirectRead.apply((plan, eps, is_sum, fuse_later_grads), query, key_norm_weight, *sources)
    return result, weights, tuple(later) or sources


class DirectRead(torch.autograd.Function):
    """A read whose tensors fit its plan. It saves its inputs, and three statistics of one allocation."""

    @staticmethod
    def forward(
        ctx, call: tuple[ReadPlan, float, bool, bool], query: Tensor, key_norm_weight: Tensor, *sources: Tensor
    ) -> tuple[Tensor, ...]:
        """Return the result and the weights, and with `fuse` the sources too."""
        plan, eps, is_sum, fuse = ctx.call = call  # one argument, because autograd unwraps each
        result, *saved = _forward(plan, query, key_norm_weight, sources, eps, is_sum)
        ctx.save_for_backward(query, key_norm_weight, *saved, *sources)
        ctx.set_materialize_grads(False)  # missing gradients are `None`, not tensors of zeros
        if not fuse:
            return result, saved[0]
        # As outputs of this node, the sources bring the gradients of later reads to its backward pass.
        needed = ctx.needs_input_grad[3:]
        if not all(needed):
            ctx.mark_non_differentiable(*(source for source, is_needed in zip(sources, needed) if not is_needed))
        return result, saved[0], *sources

    @staticmethod
    def backward(ctx, grad: Tensor | None, grad_weights: Tensor | None, *later_grads: Tensor | None):
        """Return the gradients of the query, the key norm's weight and the sources."""
        query, key_norm_weight, weights, logits, inverse_rms, *sources = ctx.saved_tensors
        _, needs_query, needs_norm, *needs_sources = ctx.needs_input_grad
        plan, eps, is_sum, _ = ctx.call
        if grad is None:
            grad = torch.zeros_like(sources[0])
        elif grad.is_sparse:
            grad = grad.to_dense()
        is_compiled = torch.compiler.is_compiling()
        if torch.is_grad_enabled() and not is_compiled:
            request = BackwardRequest(
                grad, grad_weights, later_grads or [None] * len(sources), _folded(query, key_norm_weight),
                sources, (), eps, is_sum, needs_query or needs_norm, needs_sources,
            )  # fmt: skip
            grad_folded, grad_sources = differentiable_backward(request)
            if grad_folded is not None:
                grad_folded = grad_folded.view(query.shape)
            grad_query = (grad_folded * key_norm_weight).to(query.dtype) if needs_query else None
            grad_norm = (grad_folded * query).to(key_norm_weight.dtype) if needs_norm else None
        else:
            grads = _backward(
                None if is_compiled else plan,
                packed(grad),
                None if grad_weights is None else packed(grad_weights),
                implementation.all_or_none(later_grads),
                (query, key_norm_weight),
                sources,
                (weights, logits, inverse_rms),
                is_sum,
                any(needs_sources),
            )
            grad_folded = grads[0].sum(0, keepdim=query.ndim == 2)  # in the shape of the query
            grad_sources = grads[1]
            if not all(needs_sources):
                grad_sources = [grad if is_needed else None for grad, is_needed in zip(grad_sources, needs_sources)]
            grad_query = _product(grad_folded, key_norm_weight, query.dtype) if needs_query else None
            grad_norm = _product(grad_folded, query, key_norm_weight.dtype) if needs_norm else None
        if needs_norm and query.ndim == 2:
            grad_norm = grad_norm.view(-1)
        return None, grad_query, grad_norm, *grad_sources


def _product(grad: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the product of a gradient in float32 and a factor of any dtype, rounded once, by one kernel."""
    if dtype is torch.float32:
        return grad * factor
    return torch.mul(grad, factor, out=grad.new_empty(grad.shape, dtype=dtype))


def _folded(query: Tensor, key_norm_weight: Tensor) -> Tensor:
    """Return `w * g` `[D]` in float32."""
    return query.view(-1).float() * key_norm_weight


def _forward(
    plan: ReadPlan, query: Tensor, key_norm_weight: Tensor, sources: Sequence[Tensor], eps: float, is_sum: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the result, and the weights, logits and 1 / RMS of all sources."""
    first = sources[0]
    result = torch.empty_like(first)
    weights, logits, inverse_rms = first.new_empty(plan.statistics_shape, dtype=torch.float32).unbind()
    plan.forward(
        (*sources, *sources[:1] * plan.padding), query, key_norm_weight, None, None, None, None,
        result, weights, logits, inverse_rms,
        plan.tokens, plan.count, float(plan.count if is_sum else 1), eps, 0.0,
    )  # fmt: skip
    return result, weights, logits, inverse_rms


def _backward(
    plan: ReadPlan | None,
    grad: Tensor,
    grad_weights: Tensor | None,
    later_grads: list[Tensor],
    query_and_norm: tuple[Tensor, Tensor],
    sources: list[Tensor],
    statistics: tuple[Tensor, Tensor, Tensor],
    is_sum: bool,
    needs_sources: bool,
) -> tuple[Tensor, Sequence[Tensor | None]]:
    """Return the gradient of `w * g` in parts `[programs, D]`, and that of each source or `None`."""
    is_direct = plan is not None and are_ready([grad, *later_grads], [plan.source_kind] * (1 + len(later_grads)))
    if is_direct and grad_weights is not None:
        is_direct = are_ready([grad_weights], [(torch.float32, plan.contracted_shape, plan.device)])
    if not is_direct:
        partial, grads = launch.backward(
            grad, grad_weights, later_grads, _folded(*query_and_norm), sources, *statistics, is_sum, needs_sources
        )
        return partial, grads or [None] * len(sources)
    # To divide one allocation into these two would take longer.
    contracted = grad.new_empty(plan.contracted_shape, dtype=torch.float32)
    partial = grad.new_empty(plan.partial_shape, dtype=torch.float32)
    grads = grad.new_empty(plan.grads_shape).unbind() if needs_sources else ()
    plan.backward(grad_weights is not None, needs_sources, bool(later_grads))(
        grad, grad_weights, (*sources, *sources[:1] * plan.padding), *query_and_norm, *statistics, contracted, partial,
        (*grads, *grads[:1] * plan.padding) or None, (*later_grads, *later_grads[:1] * plan.padding) or None,
        plan.tokens, plan.count, float(plan.count if is_sum else 1),
    )  # fmt: skip
    return partial, grads or [None] * plan.count


__all__ = ["DirectRead", "Launcher", "ReadPlan", "attend", "is_right_on"]
