"""Pipeline parallel training of a family model, on the engine of `torch.distributed.pipelining`.

    processes     rank = d P + p: pipeline d of D, stage p of P
    a step        M micro-batches pass through C = P V chunks by a schedule, and their gradients come back
    afterwards    gradients are summed over the D pipelines, and over both ends of a tied embedding

[`TrainingPipeline`] holds the part of one process. `pipeline_transfers` finds what travels, `pipeline_stage` moves it.
"""

import copy
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from datetime import timedelta
from functools import lru_cache, partial
from itertools import pairwise
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.pipelining.schedules import get_schedule_class
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from attnres.configuration.counting import count_stored

from .pipeline_model import (
    check_model,
    chunk_layers,
    decoder_of,
    embedding_of,
    head_of,
    is_tied,
    keep_part,
    untie,
    view_of,
)
from .pipeline_settings import SCHEDULES, PipelineSettings, count_replicas
from .pipeline_stage import BlockCache, CachedStage, ChunkModule, SentBytes
from .pipeline_transfers import assign_transfers, trace_states

_MOST_SHAPES = 64  # of micro-batches, whose states are remembered


class TrainingPipeline:
    """The part of one process in pipeline parallel training.

    Args:
        model: The model, whole or of [`make_part`](attnres.training.parallel.pipeline_parts.make_part), or a PEFT model
            around it. It is cut in place: afterwards it holds the layers of this process, and placeholders for the
            others.
        settings: The settings of the pipeline.
        device: The device of this process.

    Attributes:
        model: The model of this process.
        adapted: The PEFT model around it; `None` if all weights are trained.
        stage: p, the place of this process in its pipeline.
        replica: d, the number of its pipeline.
        replicas: D, the number of pipelines.
        layers: The layers of each chunk of the model.
        parameters: The number of parameters of the whole model, the biases of routers included.
        tied: The copy of a tied embedding, on the first and the last process of a pipeline.
        embedding_name: The name of the embedding's weight.
        group: The processes of this pipeline.
        replica_group: The processes with the same stage, one of each pipeline.
        forward_contexts: Functions that return a context manager, which is entered for each forward pass of a chunk.
        output_dtype: Dtype of the sublayers' outputs if autocast narrows it; `None` for the embedding's.

    Raises:
        ValueError: The model cannot be cut in this way, or the number of processes is not a multiple of the stages.
    """

    def __init__(self, model: PreTrainedModel, settings: PipelineSettings, device: torch.device):
        self.adapted: Any = None
        if not isinstance(model, PreTrainedModel):
            self.adapted, model = model, model.get_base_model()
        check_model(model)
        self.model, self.settings, self.device = model, settings, device
        self.layers = chunk_layers(model, settings)
        self.parameters = count_stored(model)
        self.output_dtype: torch.dtype | None = None
        self.forward_contexts: list[Callable[[], AbstractContextManager]] = []
        embedding = embedding_of(model).weight
        # Tracing takes as many operations as all reads of the model, and shapes return.
        self._trace = lru_cache(_MOST_SHAPES)(partial(trace_states, decoder_of(model).config, dtype=embedding.dtype))
        self.embedding_name = next(name for name, tensor in model.named_parameters() if tensor is embedding)
        world, stages = dist.get_world_size(), settings.stages
        self.replicas = count_replicas(settings, world)
        self.replica, self.stage = divmod(dist.get_rank(), stages)
        pipelines = [[*range(start, start + stages)] for start in range(0, world, stages)]
        self.group = self._make_group(pipelines)
        self.replica_group = self._make_group([[*range(p, world, stages)] for p in range(stages)])
        self._ends_group = self._make_group([[ranks[0], ranks[-1]] for ranks in pipelines])
        is_first, is_last = self.stage == 0, self.stage == stages - 1
        tied = is_tied(model)
        if tied and is_last:
            untie(model)
        keep_part(model, {layer for part in self.layers[self.stage :: stages] for layer in part}, is_first, is_last)
        # pyrefly: ignore[bad-argument-type]  # `transformers` wraps `to`, and the checker loses its `self`
        model.to(device)
        self.cache = BlockCache()
        self._modules = [self._make_module(index) for index in range(self.stage, len(self.layers), stages)]
        if self.is_sharded:
            mesh = DeviceMesh.from_group(self.replica_group, device.type)
            for module in self._modules:
                shard_module(module, mesh)
        # After FSDP2, which replaces parameters.
        self.tied: Tensor | None = None
        if tied and (is_first or is_last):
            self.tied = (embedding_of if is_first else head_of)(model).weight
        self._shape: tuple | None = None  # of the micro-batches that `_schedule` and `_stages` are made for
        self._stages: list[CachedStage] = []
        self._schedule: Any = None
        self._sent, self._largest_step = SentBytes(), SentBytes()

    def _make_group(self, groups: Sequence[Sequence[int]]) -> dist.ProcessGroup:
        """Make a group of each list of ranks, and return the group of this process or, without one, the last group."""
        timeout = timedelta(seconds=self.settings.timeout)
        mine = None
        for ranks in groups:  # every process takes part in making every group
            group = dist.new_group(ranks, timeout=timeout)
            mine = group if dist.get_rank() in ranks or mine is None else mine
        return cast(dist.ProcessGroup, mine)

    @property
    def is_sharded(self) -> bool:
        """Return whether FSDP2 shards each stage among the pipelines."""
        return self.settings.fsdp and self.replicas > 1

    def _make_module(self, index: int) -> ChunkModule:
        """Make the module of a chunk, whose layers this process holds."""
        is_last = index == len(self.layers) - 1
        view = view_of(self.model, self.layers[index], index == 0, is_last)
        return ChunkModule(view, self.cache, is_last, self._in_contexts, self.settings.splits_backward)

    # Training

    def step(self, batch: Mapping[str, Any], num_items: Tensor | int) -> Tensor:
        """Compute the loss of a batch, and add its gradients to those of this process's parameters.

        Args:
            batch: Arguments of the model, `input_ids` and `labels` `[batch, seq]` and others. All processes of a
                pipeline get the same.
            num_items: The number of labels that the loss is divided by, over all pipelines and accumulated batches.

        Returns:
            The loss of this pipeline, a scalar without a gradient, the same on each of its processes.

        Raises:
            RuntimeError: A transfer failed, or blocks or gradients are left in the cache.
        """
        batches = split_batch(batch, self.settings.microbatches)
        # FSDP2 averages gradients over the pipelines, where their sum is needed.
        scale = self.replicas if self.is_sharded and self.adapted is None else 1
        batches = [part | {"num_items_in_batch": num_items / scale} for part in batches]
        self._prepare(batches)
        for stage in self._stages:
            stage.batches = batches
            stage.submod.train()
        losses: list[Tensor] = []
        # The engine requires a target to split. The loss is computed inside the model, so this one is a dummy.
        target = torch.zeros(len(batches))
        try:
            self._schedule.step(target=target, losses=losses, return_outputs=False)
        except RuntimeError as error:
            # The engine wraps an error of the model into one that shows all tensors.
            raise error.__cause__ or error from None
        finally:
            for stage in self._stages:
                stage.batches = ()
        self.cache.check_empty()
        is_last = self.stage == self.settings.stages - 1
        loss = torch.stack(losses).sum() if is_last else torch.zeros((), device=self.device)
        loss = loss.detach().float() / scale
        dist.broadcast(loss, group=self.group, group_src=self.settings.stages - 1)
        return loss

    @contextmanager
    def _in_contexts(self) -> Generator[None]:
        """Enter all `forward_contexts`."""
        with ExitStack() as stack:
            for context in self.forward_contexts:
                stack.enter_context(context())
            yield

    def _prepare(self, batches: Sequence[Mapping[str, Any]]) -> None:
        """Make stages and schedule for the shape of these micro-batches, if the last step had another shape."""
        shape = (len(batches), *batches[0]["input_ids"].shape)
        if shape == self._shape:
            return
        settings = self.settings
        states = self._trace(*shape[1:], output_dtype=self.output_dtype)
        chunks = assign_transfers(states, self.layers, settings.stages, settings.cache)
        self._stages = [
            CachedStage(module, chunk, len(chunks), self.device, self.group, self._sent)
            for module, chunk in zip(self._modules, chunks[self.stage :: settings.stages], strict=True)
        ]
        # The loss is the chunk's output. Gradients are summed, since each loss is divided by the labels of the batch.
        options = {"n_microbatches": shape[0], "loss_fn": lambda loss, target: loss.sum(), "scale_grads": False}
        is_looped = SCHEDULES[settings.schedule]
        name = settings.schedule
        if shape[0] != settings.microbatches:
            # The schedule may not run the fewer micro-batches of an epoch's last batch. These run any number.
            name = "LoopedBFS" if is_looped else "GPipe"
        self._schedule = get_schedule_class(name)(self._stages if is_looped else self._stages[0], **options)
        self._shape = shape

    @torch.no_grad()
    def reduce_gradients(self) -> None:
        """Sum the gradients over the pipelines, and over both ends of a tied embedding. Call it once a step."""
        # For parameters that FSDP2 shards, it has reduced the gradients already.
        trained = (parameter for parameter in self.model.parameters() if parameter.requires_grad)
        parameters = [parameter for parameter in trained if not isinstance(parameter, DTensor)]
        if self.replicas > 1 and parameters:
            # A parameter may be used in one pipeline only, such as an expert that no token of the others chose.
            used = torch.tensor([parameter.grad is not None for parameter in parameters], device=self.device).int()
            dist.all_reduce(used, group=self.replica_group)
            work = []
            for parameter, count in zip(parameters, used.tolist()):
                if count and parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
                if count:
                    work.append(dist.all_reduce(parameter.grad, group=self.replica_group, async_op=True))
            for one in work:
                one.wait()
        if self.tied is not None and self.tied.requires_grad:
            gradient = self.tied.grad
            # Both ends are sharded in the same way.
            dist.all_reduce(gradient.to_local() if isinstance(gradient, DTensor) else gradient, group=self._ends_group)

    @torch.no_grad()
    def clip_gradients(self, max_norm: float) -> Tensor:
        """Scale the gradients down so that their norm over the whole model is at most `max_norm`.

        Args:
            max_norm: The largest norm.

        Returns:
            The norm before, a scalar.
        """
        is_copy = self.stage > 0  # of a tied embedding, whose gradient counts once
        parameters = [*self.model.parameters()]
        counted = [
            parameter.grad
            for parameter in parameters
            if parameter.grad is not None and not (is_copy and parameter is self.tied)
        ]
        square = torch.zeros((), device=self.device)
        if counted:
            total = nn.utils.get_total_norm(counted)
            square += (total.full_tensor() if isinstance(total, DTensor) else total).to(self.device).square()
        dist.all_reduce(square, group=self.group)
        norm = square.sqrt()
        nn.utils.clip_grads_with_norm_(parameters, max_norm, norm)
        return norm

    # Evaluation

    @torch.no_grad()
    def evaluate(self, batch: Mapping[str, Any]) -> Tensor | None:
        """Compute the logits of a batch, without a schedule: each process begins the next batch once it has sent this.

        Args:
            batch: Arguments of the model without labels, the same on all processes of the pipeline.

        Returns:
            The logits `[batch, seq, vocab]` on the last process of the pipeline, and `None` on the others.
        """
        shape, stages = batch["input_ids"].shape, self.settings.stages
        states = self._trace(*shape, output_dtype=self.output_dtype)
        # Without a cache, since nothing is kept for a backward pass, and batches may have any size.
        chunks = assign_transfers(states, self.layers, stages, cache=False)
        result: Any = None
        for module, chunk in zip(self._modules, chunks[self.stage :: stages], strict=True):
            received = [piece.empty(self.device) for piece in chunk.received]
            for tensor in received:
                dist.recv(tensor, group=self.group, group_src=(chunk.index - 1) % stages)
            # With gradients on, no inference plan is made: a plan reads for the layers of the whole model.
            with torch.enable_grad():
                result = module.eval()(*received, chunk=chunk, batch=batch)
            if self.is_sharded:
                for part in module.modules():
                    if isinstance(part, FSDPModule):
                        part.reshard()  # the backward pass would do it
            if not module.is_last:
                for tensor in result:
                    dist.send(tensor.detach(), group=self.group, group_dst=(chunk.index + 1) % stages)
        return result.detach() if self._modules[-1].is_last else None

    # Counts

    def end_step(self) -> None:
        """Close the counts of an optimizer step, in which gradients may have come from several batches."""
        if self._sent.states.total() >= self._largest_step.states.total():
            self._largest_step = copy.deepcopy(self._sent)
        self._sent.states.clear()
        self._sent.gradients.clear()

    def results(self) -> dict[str, Any]:
        """Return the settings and the counts of bytes, for `results.json`. All processes call it together.

        Returns:
            The settings, and of one pipeline: `sent_bytes` and `sent_gradient_bytes`, what all transfers of an
            optimizer step carry, the largest step if they differ; `transition_bytes`, the first of them from each chunk
            to the next; `peak_transition_bytes`, the most bytes that the state of one micro-batch had in one transfer;
            and `cached_bytes_peak`, the most bytes that the cache of a process has held.
        """
        step = self._largest_step
        mine = step.states, step.gradients.total(), self._sent.peak, self.cache.peak_bytes
        gathered: list[Any] = [None] * self.settings.stages
        dist.all_gather_object(gathered, mine, group=self.group)
        states, gradients, peaks, cached = zip(*gathered)
        transitions = [sum(sent[index] for sent in states) for index in range(len(self.layers) - 1)]
        settings = self.settings
        return {
            "stages": settings.stages,
            "virtual": settings.virtual,
            "schedule": settings.schedule,
            "microbatches": settings.microbatches,
            "replicas": self.replicas,
            "cache": settings.cache,
            "layers": [len(part) for part in self.layers],
            "sent_bytes": sum(transitions),
            "sent_gradient_bytes": sum(gradients),
            "transition_bytes": transitions,
            "peak_transition_bytes": max(peaks),
            "cached_bytes_peak": max(cached),
        }


def shard_module(module: ChunkModule, mesh: DeviceMesh) -> None:
    """Shard the parameters of a chunk among the pipelines by FSDP2: layers, embedding and head each by itself.

    Adapters, which are small, stay whole.

    Args:
        module: The chunk.
        mesh: The processes with the same stage.

    Raises:
        ValueError: A module has parameters of several dtypes, which FSDP2 cannot shard together.
    """
    view = module.view
    trained = {parameter for parameter in view.parameters() if parameter.requires_grad}
    adapters = trained if len(trained) < len([*view.parameters()]) else set()
    # The other modules, such as norms, stay with the chunk itself. The call of a key norm returns its weight, which
    # FSDP2 would free at once if the norm were sharded by itself.
    parts = [*decoder_of(view).layers, embedding_of(view), head_of(view), module]
    for part in parts:
        dtypes = sorted({str(parameter.dtype).removeprefix("torch.") for parameter in {*part.parameters()} - adapters})
        if len(dtypes) > 1:
            raise ValueError(
                f"`fsdp` of the recipe's `pipeline` cannot shard a model with parameters in {' and '.join(dtypes)}: "
                "load it in float32 (`config.dtype=float32` in the recipe), with `trainer.bf16=true`."
            )
        # The engine looks at the chunk to see whether a stage is sharded.
        if dtypes or part is module:
            # Many micro-batches pass between the forward and the backward pass of one. If each freed the matrices, they
            # would be gathered anew for each, and a split backward pass would read freed memory.
            fully_shard(part, mesh=mesh, reshard_after_forward=False, ignored_params=adapters)


def split_batch(batch: Mapping[str, Any], parts: int) -> list[dict[str, Any]]:
    """Split a batch into micro-batches of equal size.

    Args:
        batch: Arguments of the model. Tensors with a row for each sequence are split.
        parts: The number of micro-batches. The last batch of an epoch may have too few rows. Then it is split into as
            many equal parts as possible, of which `parts` is a multiple.

    Returns:
        The micro-batches, in order.
    """
    rows = len(batch["input_ids"])
    while rows % parts:
        parts = max(part for part in range(1, parts) if parts % part == 0)
    size = rows // parts
    borders = pairwise(range(0, rows + 1, size))
    return [
        {name: value[start:end] if isinstance(value, Tensor) and value.ndim else value for name, value in batch.items()}
        for start, end in borders
    ]


__all__ = ["TrainingPipeline", "split_batch"]
