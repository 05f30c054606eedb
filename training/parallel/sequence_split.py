"""The split of tokens among ranks, and the collectives of sequence parallelism with their gradients.

Every rank has S = ceil(T / n) of T tokens, because collectives want equal parts. The rows after the last token are
zeros, and no result depends on them.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

# torch 2.13 has renamed these two functions, and warns of the old names.
_IS_RENAMED = hasattr(dist, "all_gather_single")
_all_gather = getattr(dist, "all_gather_single" if _IS_RENAMED else "all_gather_into_tensor")
_reduce_scatter = getattr(dist, "reduce_scatter_single" if _IS_RENAMED else "reduce_scatter_tensor")


@dataclass(frozen=True)
class SequenceSplit:
    """The split of the tokens of one forward pass among the ranks of a group.

    Args:
        length: Number T of tokens in each row of the batch.
        size: Number n of ranks.
        rank: The rank of this process in the group.
        group: The process group; `None` for the default group.
    """

    length: int
    size: int
    rank: int
    group: dist.ProcessGroup | None = None

    @property
    def rows(self) -> int:
        """Number S of rows that each rank holds."""
        return -(-self.length // self.size)

    def part_of(self, full: Tensor, dim: int) -> Tensor:
        """Copy this rank's part `[.., S, ..]` of a tensor `[.., T, ..]`, with zeros after the last token."""
        start = min(self.rank * self.rows, self.length)
        part = full.narrow(dim, start, min(self.rows, self.length - start))
        # A copy, since a view would keep the tensor of all tokens in memory.
        return part.clone() if part.shape[dim] == self.rows else self.pad(part, dim)

    def pad(self, part: Tensor, dim: int) -> Tensor:
        """Return a part of at most S rows as a tensor `[.., S, ..]`, with zeros after the last row."""
        missing = list(part.shape)
        missing[dim] = self.rows - missing[dim]
        return torch.cat((part, part.new_zeros(missing)), dim) if missing[dim] else part

    def all_gather(self, part: Tensor, dim: int) -> Tensor:
        """Gather the parts `[.., S, ..]` of all ranks to a tensor `[.., T, ..]` on every rank."""
        part = part.movedim(dim, 0).contiguous()
        full = part.new_empty(self.size * self.rows, *part.shape[1:])
        _all_gather(full, part, group=self.group)
        return full[: self.length].movedim(0, dim).contiguous()

    def reduce_scatter(self, full: Tensor, dim: int) -> Tensor:
        """Sum the tensors `[.., T, ..]` of all ranks, and return this rank's part `[.., S, ..]` of the sum."""
        full = full.movedim(dim, 0)
        if len(full) < self.size * self.rows:
            full = torch.cat((full, full.new_zeros(self.size * self.rows - len(full), *full.shape[1:])))
        part = full.new_empty(self.rows, *full.shape[1:])
        _reduce_scatter(part, full.contiguous(), group=self.group)
        return part.movedim(0, dim)


def gather(part: Tensor, split: SequenceSplit, dim: int, is_partial: bool) -> Tensor:
    """All-gather a tensor along the sequence.

    Args:
        part: `[.., S, ..]`, this rank's tokens.
        split: The split of the pass.
        dim: The dimension of the tokens.
        is_partial: Whether each rank computes a part of the gradient of the result, and not all of it.

    Returns:
        `[.., T, ..]`.
    """
    return _Gather.apply(part, split, dim, is_partial)


def scatter(full: Tensor, split: SequenceSplit, dim: int, is_partial: bool) -> Tensor:
    """Keep this rank's tokens of a tensor, and gather its gradient.

    Args:
        full: `[.., T, ..]`.
        split: The split of the pass.
        dim: The dimension of the tokens.
        is_partial: Whether each rank has a part of the tensor, which is summed first, and not all of it.

    Returns:
        `[.., S, ..]`.
    """
    return _Scatter.apply(full, split, dim, is_partial)


def with_gradient(tensor: Tensor, change: Callable[[Tensor], Tensor]) -> Tensor:
    """Return a tensor whose gradient goes through the function `change` before it reaches the given one."""
    if not tensor.requires_grad:
        return tensor
    alias = tensor.view_as(tensor)
    alias.register_hook(change)
    return alias


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, part: Tensor, split: SequenceSplit, dim: int, is_partial: bool) -> Tensor:
        ctx.arguments = split, dim, is_partial
        return split.all_gather(part, dim)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None, None, None]:
        split, dim, is_partial = ctx.arguments
        return (split.reduce_scatter if is_partial else split.part_of)(grad, dim), None, None, None


class _Scatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx, full: Tensor, split: SequenceSplit, dim: int, is_partial: bool) -> Tensor:
        ctx.arguments = split, dim
        return (split.reduce_scatter if is_partial else split.part_of)(full, dim)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None, None, None]:
        split, dim = ctx.arguments
        return split.all_gather(grad, dim), None, None, None


__all__ = ["SequenceSplit", "gather", "scatter", "with_gradient"]
