"""The modules of a sublayer under sequence parallelism: styles in the place of those of tensor parallelism.

A style of `transformers` shards the weights of a module, and communicates before and after its `forward`. The styles
here shard weights in the same way. While a pass is split, the input of a sublayer is gathered once for all its
matrices, whose gradients are summed together, and its outputs are summed once by a reduce-scatter.
"""

from collections.abc import Generator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from transformers.distributed.tensor_parallel import (
    ColwiseParallel,
    EmbeddingParallel,
    MoeExpertsParallel,
    ReplicatedWithGradAllReduce,
    RowwiseParallel,
    TensorParallelLayer,
)

from .sequence_split import SequenceSplit, with_gradient
from .tensor_parallel import GradientSum

# The name of a rule in a plan of tensor parallelism: its style.
Styles = Mapping[str, TensorParallelLayer | None]


class SequenceSharding:
    """The sequence parallelism of one model: its group of ranks, and the split of the pass that is running.

    Args:
        group: The ranks that shard the model's matrices.

    Attributes:
        gradients: Sums the gradients of modules that compute single tokens.
        split: The split of the running pass; `None` outside of a pass, and in one that is not split.
        feeds_head: Whether the running pass is that of a language model whose head is sharded.
    """

    def __init__(self, group: dist.ProcessGroup):
        self.group, self.size, self.rank = group, dist.get_world_size(group), dist.get_rank(group)
        self.gradients = GradientSum(group)
        self.split: SequenceSplit | None = None
        self.feeds_head = False

    @contextmanager
    def splitting(self, split: SequenceSplit | None) -> Generator[None]:
        """Set the split of the running pass for a while."""
        before, self.split = self.split, split
        try:
            yield
        finally:
            self.split = before

    def split_of(self, length: int) -> SequenceSplit | None:
        """Return the split of a pass over rows of `length` tokens; `None` if it is not worth splitting.

        A step of decoding has fewer tokens than there are ranks. A pass with gradients is always split, so that the
        gradients of the vectors are always parts.
        """
        if length < self.size and not torch.is_grad_enabled():
            return None
        return SequenceSplit(length, self.size, self.rank, self.group)


class _EmbeddingToShards(EmbeddingParallel):
    """A sharded embedding that leaves each rank its tokens. Its result is a DTensor with the shape of all tokens."""

    def __init__(self, style: EmbeddingParallel, sharding: SequenceSharding):
        super().__init__(shard_dim=style.shard_dim)
        self.sharding = sharding

    def transform_output_post_forward(self, module: nn.Module, output: Any, mesh: DeviceMesh) -> Tensor:
        if self.sharding.split is None or not isinstance(output, DTensor):
            return super().transform_output_post_forward(module, output, mesh)
        return output.redistribute(placements=[Shard(1)])


class _ColwiseOfGathered(ColwiseParallel):
    """Columns of a matrix, on gathered tokens. Each rank computes a part of the gradient of its input."""

    def __init__(self, style: ColwiseParallel, sharding: SequenceSharding, is_head: bool = False):
        super().__init__(output_layouts=style.output_layouts, use_local_output=style.use_local_output)
        self.sharding, self.is_head = sharding, is_head

    def _is_split(self) -> bool:
        return self.sharding.feeds_head if self.is_head else self.sharding.split is not None

    def should_use_local_tensors(self, module: nn.Module) -> bool:
        return self._is_split() or super().should_use_local_tensors(module)

    def transform_inputs_pre_forward(self, module: nn.Module, args: tuple, kwargs: dict, mesh: DeviceMesh) -> tuple:
        # The base class would sum the gradient of the input here, once for each matrix.
        return (args, kwargs) if self._is_split() else super().transform_inputs_pre_forward(module, args, kwargs, mesh)


class _RowwiseInParts(RowwiseParallel):
    """Rows of a matrix. The result is this rank's part of the sum, which is left to the border of the sublayer."""

    def __init__(self, style: RowwiseParallel, sharding: SequenceSharding):
        super().__init__(output_layouts=style.output_layouts, use_local_output=style.use_local_output)
        self.sharding = sharding

    def should_use_local_tensors(self, module: nn.Module) -> bool:
        return self.sharding.split is not None or super().should_use_local_tensors(module)

    def transform_output_post_forward(self, module: nn.Module, output: Tensor, mesh: DeviceMesh) -> Tensor:
        return (
            output if self.sharding.split is not None else super().transform_output_post_forward(module, output, mesh)
        )


class _ExpertsInParts(MoeExpertsParallel):
    """Experts of which each rank has a part of every matrix, on gathered tokens; their results are not summed here."""

    def __init__(self, sharding: SequenceSharding):
        self.sharding = sharding

    def transform_inputs_pre_forward(self, module: nn.Module, args: tuple, kwargs: dict, mesh: DeviceMesh) -> tuple:
        if self.sharding.split is None:
            return super().transform_inputs_pre_forward(module, args, kwargs, mesh)
        hidden_states, indices, weights, *rest = args
        # The router is whole on every rank, so it needs the whole gradient of its weights `[tokens, top_k]`.
        return (hidden_states, indices, with_gradient(weights, self.sharding.gradients.sum), *rest), kwargs

    def transform_output_post_forward(self, module: nn.Module, output: Tensor, mesh: DeviceMesh) -> Any:
        return (
            output if self.sharding.split is not None else super().transform_output_post_forward(module, output, mesh)
        )


def _install(style: TensorParallelLayer, module: nn.Module, mesh: DeviceMesh) -> None:
    """Put another style in the place of the one by which `transformers` shards a module."""
    vars(module).pop("forward", None)  # a style is installed as this attribute, in front of the method of the class
    style.install_forward(module, mesh)


def install_at_embedding(
    embedding: nn.Module, style: EmbeddingParallel, sharding: SequenceSharding, mesh: DeviceMesh
) -> None:
    """Make an embedding that `transformers` shards by `style` leave each rank its tokens, while a pass is split."""
    _install(_EmbeddingToShards(style, sharding), embedding, mesh)


def install_at_head(head: nn.Module, style: ColwiseParallel, sharding: SequenceSharding, mesh: DeviceMesh) -> None:
    """Make a head that `transformers` shards by `style` leave the gradient of its input in parts, in a split pass."""
    _install(_ColwiseOfGathered(style, sharding, is_head=True), head, mesh)


def leave_in_parts(module: nn.Module, rules: Styles, sharding: SequenceSharding, mesh: DeviceMesh) -> bool:
    """Make a sublayer's module leave its output, and the gradient of its input, as parts that the ranks sum.

    This needs to know how the module uses its input: columns of the first matrices, rows of the last, or experts with
    a router. In any other module the sums stay where the plan of tensor parallelism makes them.

    Args:
        module: An attention or MLP.
        rules: The styles of its parts that hold parameters, by name; `None` for a part that is whole on every rank.
        sharding: The sequence parallelism.
        mesh: The ranks that shard the matrices.

    Returns:
        Whether the module was changed.
    """
    styles: dict[nn.Module, TensorParallelLayer] = {}
    routers: list[nn.Module] = []
    num_last = 0
    has_experts = any(isinstance(rule, MoeExpertsParallel) for rule in rules.values())
    for name, rule in rules.items():
        part = module.get_submodule(name)
        if isinstance(rule, MoeExpertsParallel) and "." not in name:
            styles[part] = _ExpertsInParts(sharding)
        elif type(rule) is ColwiseParallel and type(part) is nn.Linear and rule.output_layouts == Shard(-1):
            styles[part] = _ColwiseOfGathered(rule, sharding)
        elif type(rule) is RowwiseParallel and type(part) is nn.Linear and rule.input_layouts == Shard(-1):
            if part.bias is not None:  # it is added once, after the sum
                return False
            styles[part] = _RowwiseInParts(rule, sharding)
            num_last += 1
        elif rule is None and has_experts and name and "." not in name:
            routers.append(part)
        elif not isinstance(rule, ReplicatedWithGradAllReduce):
            return False
    if (num_last, len(routers)) not in ([(0, 1), (1, 1)] if has_experts else [(1, 0)]):
        return False
    for part, style in styles.items():
        _install(style, part, mesh)
    for router in routers:
        router.register_forward_pre_hook(partial(_count_router_once, sharding))
    return True


def _count_router_once(sharding: SequenceSharding, router: nn.Module, args: tuple) -> tuple | None:
    if sharding.split is None:
        return None
    # All ranks compute the whole gradient of the router's input, and the sublayer sums the ranks' gradients.
    return with_gradient(args[0], lambda gradient: gradient / sharding.size), *args[1:]


__all__ = ["SequenceSharding", "Styles", "install_at_embedding", "install_at_head", "leave_in_parts"]
