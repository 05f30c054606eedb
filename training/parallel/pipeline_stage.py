"""The stage of `torch.distributed.pipelining` that keeps blocks on its process and counts the bytes that it sends.

The engine decides when a chunk runs and which transfers it needs. This class gives the chunk its micro-batch and its
cached blocks, and takes care of their gradients.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining._backward import stage_backward_weight

from .pipeline_cache import BlockCache
from .pipeline_model import ChunkModule
from .pipeline_transfers import Chunk, Piece


class CachedStage(PipelineStage):
    """A stage of the engine, for one chunk.

    Args:
        module: The chunk. FSDP2 may have divided it.
        chunk: The plan of the chunk.
        chunks: The number of chunks of the pipeline.
        device: The device of this process.
        group: The processes of the pipeline.
        cache: The cache of this process.

    Attributes:
        batches: The micro-batches of the current step, as arguments of the model.
        sent: The bytes of states and of gradients that it has sent.
        largest: The most bytes that one transfer of states has carried.
    """

    def __init__(
        self,
        module: ChunkModule,
        chunk: Chunk,
        chunks: int,
        device: torch.device,
        group: dist.ProcessGroup,
        cache: BlockCache,
    ):
        self.chunk = chunk
        # All shapes are known, so the engine need not run the model to find them. Each tensor gets a gradient.
        inputs = tuple(piece.empty("meta").requires_grad_() for piece in chunk.received)
        if module.is_last:
            outputs = (torch.empty(1, device="meta", requires_grad=True),)
        else:
            outputs = tuple(piece.empty("meta").requires_grad_() for piece in chunk.sent)
        super().__init__(module, chunk.index, chunks, device, inputs, outputs, group=group)
        self.cache = cache
        self.batches: Sequence[Mapping[str, Any]] = ()
        self.sent = {"states": 0, "gradients": 0}
        self.largest = 0
        self._leaves: dict[int, dict[int, int]] = {}  # micro-batch -> id of a cached input -> number of the tensor
        self._micro_batch = -1  # of the current backward pass

    def forward_one_chunk(self, fwd_chunk_id: int, args: tuple, kwargs: dict | None = None, *rest, **options) -> Any:
        """Run the chunk on a micro-batch, as the engine calls it. The data comes from `batches`."""
        cached = tuple(self.cache.take(fwd_chunk_id, number) for number in self.chunk.cached)
        self._leaves[fwd_chunk_id] = {id(leaf): number for leaf, number in zip(cached, self.chunk.cached)}
        batch = self.batches[fwd_chunk_id]
        given = {"chunk": self.chunk, "batch": batch, "cached": cached, "micro_batch": fwd_chunk_id}
        return super().forward_one_chunk(fwd_chunk_id, (), given, *rest, **options)

    def backward_one_chunk(self, bwd_chunk_id: int, *args, **options) -> None:
        """Run the backward pass of a micro-batch, and add the gradients that later chunks have left here."""
        self._micro_batch = bwd_chunk_id
        collected = {number: self.cache.collect(bwd_chunk_id, number) for number in self.chunk.kept}
        collected = {number: gradient for number, gradient in collected.items() if gradient is not None}
        # Of tensors that this chunk made: before its backward pass, to the gradients from downstream.
        received = [piece.number for piece in self.chunk.received]
        sent = [piece.number for piece in self.chunk.sent]
        for number, gradient in collected.items():
            if number not in received:
                self.grad_recv_info[bwd_chunk_id][sent.index(number)].buffer.add_(gradient)
        super().backward_one_chunk(bwd_chunk_id, *args, **options)
        # Of tensors that this chunk received: after its backward pass, to the gradients that go upstream.
        if received:
            # Before torch 2.13, gradients of keyword arguments follow after gradients of received tensors.
            self.bwd_cache[bwd_chunk_id] = tuple(
                self._upstream(piece, gradient, collected.get(piece.number))
                for piece, gradient in zip(self.chunk.received, self.bwd_cache[bwd_chunk_id])
            )

    def _upstream(self, piece: Piece, gradient: Tensor | None, deposited: Tensor | None) -> Tensor:
        """Return the gradient of a received tensor, as it is sent upstream.

        Args:
            piece: The tensor.
            gradient: The gradient of this chunk; `None` if it does not depend on the tensor.
            deposited: The gradients of later chunks of this process; `None` without one.
        """
        if gradient is None:
            gradient = piece.empty(self.device).zero_()  # the other side waits for it
        if deposited is not None:
            gradient = gradient + deposited
        # Some backends send the memory of a tensor without its strides.
        return gradient.contiguous()

    def backward_maybe_with_nosync(self, backward_type: str, bwd_kwargs: dict, *args, **options) -> tuple:
        """Compute gradients, as the engine calls it, and leave those of cached tensors in the cache."""
        if backward_type == "weight":
            # As the engine, which sets no flags of FSDP2 here that the first part of the pass has not set.
            groups = bwd_kwargs["param_groups"]
            return stage_backward_weight(self.submod.parameters(), groups, retain_graph=True), None
        inputs = bwd_kwargs["input_values"]
        gradients, groups = super().backward_maybe_with_nosync(backward_type, bwd_kwargs, *args, **options)
        leaves = self._leaves.pop(self._micro_batch, {})
        for value, gradient in zip(inputs, gradients):
            if id(value) in leaves:
                self.cache.deposit(self._micro_batch, leaves[id(value)], gradient)
        return gradients, None if groups is None else join_groups(groups)

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        """Return the transfers of a state, as the engine calls it, and count their bytes."""
        operations = super().get_fwd_send_ops(fwd_chunk_id)
        count = sum(operation.tensor.nbytes for operation in operations)
        self.sent["states"] += count
        self.largest = max(self.largest, count)
        return operations

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        """Return the transfers of gradients, as the engine calls it, and count their bytes."""
        operations = super().get_bwd_send_ops(bwd_chunk_id)
        self.sent["gradients"] += sum(operation.tensor.nbytes for operation in operations)
        return operations


def join_groups(groups: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Join groups of parameters that have nodes of the graph in common.

    The engine divides the parameters of a chunk into groups, whose gradients it computes one after another. It does
    not join two groups that it has begun when a later parameter belongs to both. Then the gradient of the parameter
    would count twice.

    Args:
        groups: The groups of the engine: `params` and `intermediates`, nodes of the graph, and `grads`, the gradients
            that have reached each of the intermediates.

    Returns:
        Groups that have nothing in common.
    """
    joined: list[dict[str, Any]] = []
    for group in groups:
        # Without gradients, none of the nodes has been reached.
        gradients = group.get("grads") or [None] * len(group["intermediates"])
        reached = {node: grad for node, grad in zip(group["intermediates"], gradients) if grad is not None}
        params, apart = set(group["params"]), []
        for other in joined:
            if params.isdisjoint(other["params"]) and reached.keys().isdisjoint(other["reached"]):
                apart.append(other)
            else:
                params |= other["params"]
                reached |= other["reached"]
        joined = [*apart, {"params": params, "reached": reached}]
    return [
        {"params": group["params"], "intermediates": [*group["reached"]], "grads": [*group["reached"].values()]}
        for group in joined
    ]


__all__ = ["CachedStage"]
