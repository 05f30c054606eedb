"""One chunk of a pipeline as a stage of `torch.distributed.pipelining`, and the cache of blocks of its process.

The engine decides when a chunk runs and which transfers it needs. [`CachedStage`] gives the chunk its micro-batch and
its cached blocks, takes care of their gradients, and counts the bytes that are sent.

A block that a chunk takes from the cache needs no transfer. Its gradient stays on this process too, until the chunk
that received or made the block runs its backward pass, and adds it to the gradient that goes upstream.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining._backward import stage_backward_weight
from transformers import PreTrainedModel

from attnres.residual_attnres import DepthState

from .pipeline_model import StateEntry, decoder_of
from .pipeline_transfers import Chunk, Piece

# Arguments that every chunk needs; the others are for the head.
_OF_DECODER = ("attention_mask", "position_ids")
Key = tuple[int, int]  # micro-batch, number of the tensor


class BlockCache:
    """Tensors of the depth state, and gradients deposited for them.

    Attributes:
        num_bytes: The bytes of the tensors that it holds.
        peak_bytes: The most bytes that it has held at one time.
    """

    def __init__(self) -> None:
        self._tensors: dict[Key, Tensor] = {}
        self._gradients: dict[Key, Tensor] = {}
        self.num_bytes = self.peak_bytes = 0

    def keep(self, micro_batch: int, number: int, tensor: Tensor) -> None:
        """Keep a tensor, which shares its memory with the caller's.

        Args:
            micro_batch: The number of the micro-batch.
            number: The number of the tensor.
            tensor: The tensor.
        """
        self._tensors[micro_batch, number] = tensor.detach()
        self.num_bytes += tensor.nbytes
        self.peak_bytes = max(self.peak_bytes, self.num_bytes)

    def take(self, micro_batch: int, number: int) -> Tensor:
        """Return a tensor as the start of a new graph, so that its gradient does not reach the chunk that kept it."""
        return self._tensors[micro_batch, number].detach().requires_grad_()

    def free(self, micro_batch: int, number: int) -> None:
        """Forget a tensor after its last use."""
        self.num_bytes -= self._tensors.pop((micro_batch, number)).nbytes

    def deposit(self, micro_batch: int, number: int, gradient: Tensor | None) -> None:
        """Add the gradient of a reader of the tensor; `None` from a reader that does not depend on it."""
        if gradient is None:
            return
        key = micro_batch, number
        self._gradients[key] = gradient if key not in self._gradients else self._gradients[key] + gradient

    def collect(self, micro_batch: int, number: int) -> Tensor | None:
        """Remove and return the sum of the deposited gradients; `None` if there are none."""
        return self._gradients.pop((micro_batch, number), None)

    def check_empty(self) -> None:
        """Check that a step has used all tensors and gradients.

        Raises:
            RuntimeError: Some are left, so that gradients are incomplete. They are removed.
        """
        tensors, gradients = sorted(self._tensors), sorted(self._gradients)
        self._tensors.clear()
        self._gradients.clear()
        self.num_bytes = 0
        if tensors or gradients:
            raise RuntimeError(
                f"the step of the pipeline has left {len(tensors)} blocks and {len(gradients)} gradients in the cache, "
                f"as (micro-batch, tensor): {[*tensors, *gradients][:4]}. Its gradients are incomplete."
            )


@dataclass
class SentBytes:
    """Bytes that a process has sent.

    Attributes:
        states: Of states, by the index of the chunk that sent them, since the optimizer step began.
        gradients: Of gradients, in the same way.
        peak: The most bytes that one transfer of states has carried, in any step.
    """

    states: Counter[int] = field(default_factory=Counter)
    gradients: Counter[int] = field(default_factory=Counter)
    peak: int = 0


class ChunkModule(nn.Module):
    """One chunk as a module for `torch.distributed.pipelining`: tensors of the state in, tensors of the state out.

    Args:
        view: The model of the chunk, of [`view_of`].
        cache: The cache of the process.
        is_last: Whether the chunk has the head.
        context: A function that returns the context manager of each forward pass, such as autocast.
        clones_sent: Whether to return copies of the tensors to send, for a schedule with a split backward pass. After
            its first part, the engine cuts the returned tensors off their graph in place. The second part may still
            need the originals: later layers of the chunk have saved them, or they are inputs or views.
    """

    def __init__(
        self,
        view: PreTrainedModel,
        cache: BlockCache,
        is_last: bool,
        context: Callable[[], AbstractContextManager] = nullcontext,
        clones_sent: bool = False,
    ):
        super().__init__()
        self.view, self.cache, self.is_last, self.context = view, cache, is_last, context
        self.clones_sent = clones_sent

    def forward(
        self,
        *received: Tensor,
        chunk: Chunk,
        batch: Mapping[str, Any],
        cached: tuple[Tensor, ...] = (),
        micro_batch: int | None = None,
    ) -> tuple[Tensor, ...] | Tensor:
        """Run the chunk on one micro-batch.

        Args:
            received: The tensors of the transfer, in the order of `chunk.received`.
            chunk: The chunk's transfers for this shape.
            batch: The arguments of the model: `input_ids` `[batch, seq]`, `labels` and others.
            cached: The tensors of the cache, in the order of `chunk.cached`.
            micro_batch: The number of the micro-batch in a training step, for the cache. Without it, nothing is kept.

        Returns:
            The tensors to send, in the order of `chunk.sent`. Of the last chunk, the loss `[1]` if the batch has
            labels, else the logits `[batch, seq, vocab]`.

        Raises:
            RuntimeError: The state has other tensors than were traced.
        """
        inputs = dict(zip((piece.number for piece in chunk.received), received, strict=True))
        inputs |= dict(zip(chunk.cached, cached, strict=True))
        outputs = self._run(inputs, chunk, batch)
        if self.is_last:
            made, result = inputs, outputs.logits if "labels" not in batch else outputs.loss.reshape(-1).clone()
        else:
            # A tensor that passes through is sent as it came, so that its gradients meet in one place.
            made = dict(zip(chunk.after.numbers, _tensors_of(outputs, chunk), strict=True)) | inputs
            result = tuple(made[piece.number].contiguous() for piece in chunk.sent)
            if self.clones_sent:
                result = tuple(tensor.clone() for tensor in result)
        if micro_batch is not None:
            for number in chunk.kept:
                self.cache.keep(micro_batch, number, made[number])
            for number in chunk.freed:
                self.cache.free(micro_batch, number)
        return result

    def _run(self, inputs: Mapping[int, Tensor], chunk: Chunk, batch: Mapping[str, Any]) -> Any:
        """Run the chunk's model on the tensors of the state by their numbers.

        Returns:
            The state after the chunk; of the last chunk the output of the model.
        """
        ids, arguments = batch["input_ids"], {name: value for name, value in batch.items() if name != "input_ids"}
        if not self.is_last:
            arguments = {name: value for name, value in arguments.items() if name in _OF_DECODER}
        decoder = decoder_of(self.view)
        called = self.view if self.is_last else decoder
        entry = None
        if chunk.index == 0:
            arguments["input_ids"] = ids
        else:
            tensors = tuple(inputs[number] for number in chunk.before.numbers)
            # The backbone takes batch, length, dtype and device from an embedding. This one has no memory.
            nothing = torch.zeros((), dtype=tensors[0].dtype, device=tensors[0].device)
            arguments["inputs_embeds"] = nothing.expand(*ids.shape, self.view.config.hidden_size)
            entry = cast(StateEntry, decoder.layers[chunk.layers.start - 1])
            entry.state = tensors if chunk.before.is_tuple else tensors[0]
        try:
            with self.context():
                outputs = called(use_cache=False, **arguments)
        finally:
            if entry is not None:
                del entry.state  # else it would keep the tensors of this pass
        return outputs if self.is_last else outputs.last_hidden_state


def _tensors_of(state: DepthState, chunk: Chunk) -> tuple[Tensor, ...]:
    """Return the tensors of the state after a chunk. Raise RuntimeError if they are not those that were traced."""
    tensors = state if isinstance(state, tuple) else (state,)
    found = [(tuple(tensor.shape), tensor.dtype) for tensor in tensors]
    expected = [(piece.shape, piece.dtype) for piece in chunk.after.pieces]
    if found != expected:
        raise RuntimeError(
            f"the state after layer {chunk.layers.stop - 1} has tensors {found}, but the pipeline expects {expected}."
        )
    return tensors


class CachedStage(PipelineStage):
    """A stage of the engine, for one chunk.

    Args:
        module: The chunk. FSDP2 may have sharded it.
        chunk: The chunk's layers and transfers.
        chunks: The number of chunks of the pipeline.
        device: The device of this process.
        group: The processes of the pipeline.
        sent: The counts of this process, to which the stage adds its transfers.

    Attributes:
        batches: The micro-batches of the current step, as arguments of the model.
    """

    def __init__(
        self,
        module: ChunkModule,
        chunk: Chunk,
        chunks: int,
        device: torch.device,
        group: dist.ProcessGroup,
        sent: SentBytes,
    ):
        self.chunk = chunk
        # All shapes are known, so the engine need not run the model to find them. Each tensor gets a gradient.
        inputs = tuple(piece.empty("meta").requires_grad_() for piece in chunk.received)
        if module.is_last:
            outputs = (torch.empty(1, device="meta", requires_grad=True),)
        else:
            outputs = tuple(piece.empty("meta").requires_grad_() for piece in chunk.sent)
        super().__init__(module, chunk.index, chunks, device, inputs, outputs, group=group)
        self.cache, self.sent = module.cache, sent
        self.batches: Sequence[Mapping[str, Any]] = ()
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
        self.sent.states[self.chunk.index] += count
        self.sent.peak = max(self.sent.peak, count)
        return operations

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        """Return the transfers of gradients, as the engine calls it, and count their bytes."""
        operations = super().get_bwd_send_ops(bwd_chunk_id)
        self.sent.gradients[self.chunk.index] += sum(operation.tensor.nbytes for operation in operations)
        return operations


def join_groups(groups: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Join groups of parameters that have nodes of the graph in common.

    The engine sorts the parameters of a chunk into groups, whose gradients it computes one after another. It does
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


__all__ = ["BlockCache", "CachedStage", "ChunkModule", "SentBytes", "join_groups"]
