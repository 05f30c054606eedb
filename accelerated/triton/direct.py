"""The direct path of a read, never measured on a GPU: checks and allocations in C++, and launches without a binder.

Until its tests have passed on a machine, `auto` does not take it (see `tested`).

Where tensors are small, a GPU waits for its host (`python -m benchmarks --only host`). So all that depends on shapes
alone is kept on a [`ReadSizes`], `host.cpp` does the rest of the host's work, and kernels that Triton has compiled are
launched themselves. For tensors that need more, such as a cast, a copy or another alignment, [`attend`] returns `None`.
The general path, of `implementation`, takes these and has the error messages.
"""

import warnings
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from ..autograd import (
    BackwardRequest,
    FollowingNorm,
    depth_attention_in_operations,
    differentiable_grads,
    norm_grads_in_operations,
    rms_norm_in_operations,
)
from ..compat import are_backward_passes_compiled, is_in_backward_pass, why_operations_are_observed
from ..plain import Read
from ..tensors import packed
from ..training_plan import TrainingPlan, make_training_plan
from . import host, implementation, launch

_BYTES = 16  # see `kBytes` of `host.cpp`
_MOST_PLANS = 1024  # of lengths that differ in every step
_ROWS, _COLUMNS, _WARPS = 512, 16, 8  # of a tile of the kernel that sums the parts of gradients


class _Launcher:
    """A kernel that is launched again and again, with arguments whose sizes and alignments stay the same.

    Triton binds the arguments of the first launch, compiles the kernel and returns it. Later launches call the compiled
    kernel, as Triton's tutorial on softmax does. That leaves out the binder, which takes most of the time of a launch.

    Args:
        kernel: a function with `@triton.jit`, whose last parameters are constants.
        programs: number of programs.
        constants: values of these parameters, by name.
        num_warps: number of warps of a program.

    Attributes:
        compiled: a function that launches the compiled kernel, or `None` before the first launch.
        values: the constants in order, which `compiled` takes after the other arguments.
    """

    def __init__(self, kernel, programs: int, constants: Mapping[str, object], num_warps: int):
        self._kernel, self._grid, self._constants, self._num_warps = kernel, (programs, 1, 1), constants, num_warps
        self.compiled: Any = None
        self.values: tuple[object, ...] = ()

    def __call__(self, *arguments) -> None:
        """Launch the kernel by Triton's binder, with its arguments before the constants, and keep what it compiled."""
        compiled = self._kernel[self._grid](*arguments, **self._constants, num_warps=self._num_warps)
        # Triton's interpreter returns nothing to launch. Then every launch goes this way.
        if hasattr(compiled, "__getitem__"):
            self.values = tuple(self._constants[name] for name in self._kernel.arg_names[len(arguments) :])
            self.compiled = compiled[self._grid]


class ReadSizes:
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
        self.count, self.tokens, self.padding, self.has_norm = count, tokens, padded - count, has_norm
        self.source_kind = dtype, shape, device
        self.weight_kinds = [(query_dtype, query_shape, device), (norm_dtype, shape[-1:], device)]
        if has_norm:
            self.weight_kinds.append((dtype, shape[-1:], device))
        self.scratch_shape = (count, *shape[:-1])  # of the backward kernel
        self.statistics_shape = (3, *self.scratch_shape)  # weights, logits and 1 / RMS
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
        self._backward: dict[tuple[bool, bool, bool], _Launcher] = {}
        finish = {"WIDTH": width, "HAS_NORM": has_norm, "ROWS": _ROWS, "COLUMNS": _COLUMNS}
        self.finish = _Launcher(launch.kernels().finish_kernel, -(-width // _COLUMNS), finish, _WARPS)

    def backward(self, has_grad_weights: bool, needs_sources: bool, has_later: bool) -> _Launcher:
        """Return the launcher of the backward kernel with these optional arguments."""
        key = has_grad_weights, needs_sources, has_later
        if key not in self._backward:
            flags = dict(zip(("HAS_GRAD_WEIGHTS", "NEEDS_SOURCES", "HAS_LATER"), key))
            self._backward[key] = self._launcher(launch.kernels().backward_kernel, self.programs, flags)
        return self._backward[key]

    def _launcher(self, kernel, programs: int, flags: dict[str, bool]) -> _Launcher:
        return _Launcher(kernel, programs, self._constants | flags, self._num_warps)


_plans: dict[tuple, Any] = {}  # plans in C++, by the arguments of `ReadSizes`
_right_on: dict[torch.device, bool] = {}  # see `is_right_on`
_recent: dict[tuple[int, int], Any] = {}  # the plan last used, by the numbers of sources and of weights


def _plan(key: tuple) -> Any:
    """Make and keep a plan by the arguments of [`ReadSizes`]; return `None` if the direct path takes no such tensor."""
    _, shape, dtype, device, query_shape, query_dtype, norm_dtype, _ = key
    if not {dtype, query_dtype, norm_dtype} <= {*launch.DTYPES} or not shape or not shape.numel():
        return None
    if query_shape not in (shape[-1:], (1, *shape[-1:])) or implementation.why_not_on(device, shape[-1]) is not None:
        return None
    # Compiled autograd cannot look into nodes in C++.
    if are_backward_passes_compiled() or not is_right_on(device):
        return None
    module, sizes = host.load(), ReadSizes(*key)
    if module is None or not sizes.is_aligned:
        return None
    if len(_plans) >= _MOST_PLANS:
        _plans.clear()
    _plans[key] = module.ReadPlan(sizes, _general_backward)
    return _plans[key]


def is_right_on(device: torch.device) -> bool:
    """Return whether the direct path computes on a device what PyTorch's operations compute; warn if not.

    The first call in a process makes a small read twice, forward and backward. How compiled kernels are called is no
    promise of Triton, so a new release may change it.
    """
    if device not in _right_on:
        module = host.load()
        if module is None or is_in_backward_pass():  # where the trial's backward pass could wait for this one
            return False
        try:
            # In a thread of its own, where no context of the caller, such as a checkpoint's, sees the tensors.
            with ThreadPoolExecutor(1) as thread:
                reason = thread.submit(_try_on, module, device).result()
        except Exception as error:
            reason = f"fails ({error})"
        _right_on[device] = reason is None
        if reason is not None:
            warnings.warn(f"The direct path of a read {reason} on {device}. The general path is taken.", stacklevel=2)
    return _right_on[device]


def _try_on(module: ModuleType, device: torch.device) -> str | None:
    """Return why the results of the direct path are not right on a device, or `None` if they are."""
    values = torch.linspace(-1, 1, 7 * 16, dtype=torch.float32, device=device).view(7, 16)
    values[3:6] += 2
    sources, (query, key_norm_weight, norm_weight), grad = [*values[:3].split(1)], values[3:6], values[6:]
    kind = grad.shape, grad.dtype, device, query.shape, query.dtype, key_norm_weight.dtype
    plan = module.ReadPlan(ReadSizes(3, *kind, has_norm=True), _general_backward)
    leaves = [tensor.clone().requires_grad_() for tensor in (query, key_norm_weight, norm_weight, *sources)]
    query, key_norm_weight, norm_weight, *sources = leaves
    result, _ = depth_attention_in_operations(query * key_norm_weight, sources, 1e-6, True)
    result = rms_norm_in_operations(result, FollowingNorm(norm_weight, 1e-6))
    right = [result, *torch.autograd.grad(result, leaves, grad)]
    for _ in ("by Triton", "without its binder"):
        result, _, _ = plan.attend((query, key_norm_weight, norm_weight), sources, 1e-6, True, True, True, 1e-6)
        seen = [result, *torch.autograd.grad(result, leaves, grad)]
        if not all(torch.allclose(*pair, rtol=1e-4, atol=1e-4) for pair in zip(seen, right)):
            return "computes other numbers"
    return None


def attend(
    query: Tensor,
    sources: Sequence[Tensor],
    key_norm_weight: Tensor,
    eps: float,
    is_sum: bool,
    fuse_later_grads: bool,
    norm: FollowingNorm | None = None,
    needs_weights: bool = True,
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
        needs_weights: whether to return `a`, which takes a while to make an output of autograd.

    Returns:
        `h` or its norm, `a` or `None`, and the sources, as [`Implementation.run`] returns them; `None` if the general
        path must run.
    """
    first = sources[0]
    if torch.compiler.is_compiling() or not first.is_cuda:
        return None
    if why_operations_are_observed() is not None:
        return None
    norm_weight, norm_eps = norm or (None, 0.0)
    weights = (query, key_norm_weight) if norm_weight is None else (query, key_norm_weight, norm_weight)
    arguments = weights, sources, eps, is_sum, fuse_later_grads, needs_weights, norm_eps
    # Most reads have the shapes of the one before with as many sources. A plan checks all of them anyway.
    recently = len(sources), len(weights)
    plan = _recent.get(recently)
    if plan is not None:
        attended = plan.attend(*arguments)
        if attended is not None:
            return attended
    key = (
        len(sources), first.shape, first.dtype, first.device, query.shape, query.dtype, key_norm_weight.dtype,
        norm_weight is not None,
    )  # fmt: skip
    plan = _plans.get(key) or _plan(key)
    if plan is None:
        return None
    _recent[recently] = plan
    return plan.attend(*arguments)


def training_plan(reads: Sequence[Read]) -> TrainingPlan | None:
    """Make a plan that reads by the kernels in a pass with gradients; see [`Implementation`]."""
    if not reads[0][0].weight.is_cuda:
        return None
    if are_backward_passes_compiled():  # to ask at each read would take as long as a launch
        _plans.clear()
        _recent.clear()
    return make_training_plan(reads, partial(attend, needs_weights=False))


def _folded(query: Tensor, key_norm_weight: Tensor) -> Tensor:
    return query.view(-1).float() * key_norm_weight.float()


def _unfolded(grad: Tensor | None, query: Tensor, key_norm_weight: Tensor) -> tuple[Tensor | None, Tensor | None]:
    """Return the gradients of the query and of the key norm's weight, from the gradient of their product or `None`."""
    if grad is None:
        return None, None
    grad_query = (grad * key_norm_weight).to(query.dtype).view(query.shape)
    return grad_query, (grad * query.view(-1)).to(key_norm_weight.dtype)


def _dense(tensor: Tensor) -> Tensor:
    return tensor.to_dense() if tensor.is_sparse else tensor


def _general_backward(
    grads: Sequence[Tensor | None],
    saved: Sequence[Tensor | None],
    needed: Sequence[bool],
    has_norm: bool,
    eps: float,
    is_sum: bool,
    norm_eps: float,
) -> list[Tensor | None]:
    """Return the gradients of a read's inputs, where kernels do not take the tensors as they are.

    Args:
        grads: gradients of the result, of the weights, and with `fuse_later_grads` of the sources from later reads.
        saved: the query, the key norm's weight, the weight of a following norm if there is one, the sources, the
            statistics, and the input of the following norm or `None`.
        needed: for each of the inputs, which are all but the last two of `saved`, whether its gradient is needed.
        has_norm: whether a norm follows.
        eps: epsilon of the key norm.
        is_sum: whether the result was multiplied by n.
        norm_eps: epsilon of the following norm.
    """
    grad, grad_weights, *later_grads = grads
    *inputs, hidden = saved
    query, key_norm_weight, *sources, statistics = [tensor for tensor in inputs if tensor is not None]
    norm = FollowingNorm(sources.pop(0), norm_eps) if has_norm else None
    needs_sources = needed[-len(sources) :]
    later_grads = later_grads or [None] * len(sources)
    grad = torch.zeros_like(sources[0]) if grad is None else _dense(grad)
    grad_weights, *later_grads = [None if tensor is None else _dense(tensor) for tensor in (grad_weights, *later_grads)]
    folded = _folded(query, key_norm_weight)
    if torch.is_grad_enabled():  # this pass will be differentiated itself
        request = BackwardRequest(
            grad, grad_weights, later_grads, folded, sources, (), eps, is_sum, any(needed[:2]), needs_sources
        )
        grad_folded, grad_sources, grad_norm = differentiable_grads(request, norm)
    else:
        grad_norm = None
        if norm is not None and hidden is not None:
            grad, grad_norm = norm_grads_in_operations(grad, hidden, norm)
        partial, grad_sources = launch.backward(
            packed(grad), None if grad_weights is None else packed(grad_weights),
            implementation.all_or_none(later_grads), folded, [*map(packed, sources)], packed(statistics), is_sum,
            any(needs_sources),
        )  # fmt: skip
        grad_folded = partial.sum(0)
    grads_of_weights = [*_unfolded(grad_folded, query, key_norm_weight), *([grad_norm] if has_norm else [])]
    return [*grads_of_weights, *(grad_sources or [None] * len(sources))]


__all__ = ["ReadSizes", "attend", "is_right_on", "training_plan"]
