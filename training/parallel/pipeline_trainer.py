"""`AttnResTrainer` for a pipeline: the loop of `transformers.Trainer`, where a batch passes through several processes.

It differs from `AttnResTrainer` as follows:

- All processes of a pipeline get the same batches.
- A training step is a schedule of the pipeline. Gradients are summed once an optimizer step.
- The norm of the gradients is that of the whole model.
- Each process writes and reads its part of a checkpoint.
- Magnitudes and depth attention are not logged, since no process runs the whole model.
"""

from collections.abc import Generator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate.data_loader import prepare_data_loader
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import PreTrainedModel, TrainerCallback, TrainingArguments
from transformers.trainer import TRAINING_ARGS_NAME

from ..callbacks import ExpertBalance, Monitor
from ..recipe import Recipe
from ..trainer import AttnResTrainer
from .pipeline import TrainingPipeline
from .pipeline_checkpoints import (
    load_adapter_part,
    load_part,
    load_random_state,
    load_schedule,
    save_adapter,
    save_parts,
)


class PipelineBalance(ExpertBalance):
    """[`ExpertBalance`] for the routers of one process: the load is summed over the pipelines, not over the stages.

    Args:
        pipeline: The part of this process.
        rate: The rate of the update.
    """

    def __init__(self, pipeline: TrainingPipeline, rate: float):
        super().__init__(rate)
        self.pipeline = pipeline
        pipeline.forward_contexts.append(self._count_forward)

    @contextmanager
    def _count_forward(self) -> Generator[None]:
        """Count the load during the forward pass of a chunk in training."""
        model = self.pipeline.model
        self._begin_forward(model, ())
        try:
            yield
        finally:
            self._end_forward(model, (), None)

    def _sum(self, loads: Tensor) -> Tensor:
        """Sum the load over the pipelines."""
        dist.all_reduce(loads, group=self.pipeline.replica_group)
        return loads

    def metrics(self) -> dict[str, float]:
        """Return the load balance since the last call, over the routers of all stages; see the base class."""
        mine = None
        if self._routers and self._steps:
            mine = (self._violation / self._steps).tolist(), (self._entropy / self._steps).tolist()
            self._steps = 0
        gathered: list = [None] * self.pipeline.settings.stages
        dist.all_gather_object(gathered, mine, group=self.pipeline.group)
        measured = [one for one in gathered if one is not None]
        if not measured:
            return {}
        violation, entropy = (torch.tensor([value for one in measured for value in one[i]]) for i in range(2))
        return self._describe(violation, entropy)


class PipelineMonitor(Monitor):
    """[`Monitor`] without magnitudes and depth attention, which only a process with the whole model can measure.

    Args:
        pipeline: The part of this process.
    """

    def __init__(self, pipeline: TrainingPipeline):
        super().__init__()
        self.pipeline = pipeline

    def on_train_begin(self, args, state, control, model: PreTrainedModel, **kwargs):
        """Begin the first window."""
        super().on_train_begin(args, state, control, model, **kwargs)
        self._has_connections = False

    def count(self, ids: Tensor) -> None:
        """Count the tokens of a batch, `[batch, seq]`."""
        self._see_batch(self.pipeline.model, (ids,), {})

    def _ranks_per_batch(self) -> int:
        """Return how many processes compute the same batch."""
        return self.pipeline.settings.stages


class PipelineTrainer(AttnResTrainer):
    """A `Trainer` of a model by a [`Recipe`] with `pipeline`.

    Args:
        pipeline: The part of this process.
        recipe: The recipe of the run.
        arguments: The arguments of the run.
        options: Other arguments of `Trainer`, such as the data sets.

    Attributes:
        pipeline: The part of this process.
    """

    def __init__(self, pipeline: TrainingPipeline, recipe: Recipe, arguments: TrainingArguments, **options):
        self.pipeline = pipeline
        super().__init__(pipeline.model, recipe, arguments, **options)
        # accelerate wraps models in DDP and gives each process other batches. It has no settings for pipelines, so
        # these two methods of this one object are replaced.
        self.accelerator.prepare_model = partial(self.accelerator.prepare_model, evaluation_mode=True)
        self.accelerator.prepare_data_loader = self._prepare_data_loader
        # accelerate applies autocast to the model's `forward`, which a pipeline calls by parts.
        pipeline.forward_contexts.append(self.accelerator.autocast)
        if self.accelerator.mixed_precision == "bf16":
            pipeline.output_dtype = torch.bfloat16

    def _callbacks(self) -> list[TrainerCallback]:
        self._monitor = PipelineMonitor(self.pipeline)
        return [self._monitor, PipelineBalance(self.pipeline, self.recipe.expert_balancing)]

    @property
    def total_parameters(self) -> int:
        """Return the number of parameters of the whole model."""
        return self.pipeline.parameters

    def get_tp_size(self) -> int:
        """Return how many processes compute the same batch, which `Trainer` asks in this way."""
        return self.pipeline.settings.stages

    def _prepare_data_loader(
        self, data_loader: DataLoader, device_placement: bool | None = None, slice_fn_for_dispatch: Any = None
    ) -> DataLoader:
        """Give each pipeline its share of the batches, as accelerate gives each process one."""
        accelerator = self.accelerator
        prepared = prepare_data_loader(
            data_loader,
            accelerator.device,
            num_processes=self.pipeline.replicas,
            process_index=self.pipeline.replica,
            put_on_device=accelerator.device_placement if device_placement is None else device_placement,
            rng_types=accelerator.rng_types.copy(),  # pyrefly: ignore[missing-attribute]  # a list by default
            # Each process reads a stream by itself. The alternative sends every process another part of a batch.
            dispatch_batches=False,
            even_batches=accelerator.even_batches,
            use_seedable_sampler=accelerator.use_seedable_sampler,
            non_blocking=accelerator.non_blocking,
        )
        accelerator._dataloaders.append(prepared)  # as the replaced method does, for `free_memory` and the end of data
        return prepared

    # Training

    def training_step(
        self, model: nn.Module, inputs: dict[str, Any], num_items_in_batch: Tensor | int | None = None
    ) -> Tensor:
        """Pass a batch through the pipeline, and add its gradients, as `Trainer` calls it."""
        model.train()
        documents = inputs.pop("documents", [])
        inputs = self._prepare_inputs(inputs)
        self._monitor.count(inputs["input_ids"])
        # pyrefly: ignore[bad-argument-type]  # `Trainer` counts the labels of every language model
        loss = self.pipeline.step(inputs, num_items_in_batch)
        self._check_loss(loss, documents)
        if self.accelerator.sync_gradients:
            self.pipeline.reduce_gradients()
            self.pipeline.end_step()
        # `Trainer` averages the loss over processes, and so over pipelines. It is divided by the labels of all of them.
        return loss * self.pipeline.replicas

    def _clip_grad_norm(self, model: nn.Module) -> Tensor:
        return self.pipeline.clip_gradients(self.args.max_grad_norm)

    def _get_grad_norm(self, model: nn.Module, grad_norm: Tensor | None = None) -> Tensor:
        return self.pipeline.clip_gradients(float("inf")) if grad_norm is None else grad_norm

    def _compute_logits(self, model: PreTrainedModel, inputs: Mapping[str, Any]) -> Tensor | None:
        return self.pipeline.evaluate(inputs)

    def results(self) -> dict[str, Any]:
        """Return the counts of the pipeline, for `results.json`."""
        return {"pipeline": self.pipeline.results()}

    # Checkpoints

    @property
    def has_optimizer_parts(self) -> bool:
        """Return True: each process has the optimizer of its layers."""
        return True

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Write the model, each process its part, or the adapter; all processes call it together."""
        folder = Path(output_dir or self.args.output_dir or "")
        if self.args.should_save:
            folder.mkdir(parents=True, exist_ok=True)
        self.accelerator.wait_for_everyone()
        if self.pipeline.adapted is not None:
            save_adapter(self.pipeline, folder)
        else:
            save_parts(self.pipeline, folder, is_checkpoint=self._saving_in is not None)
        if self.args.should_save:
            torch.save(self.args, folder / TRAINING_ARGS_NAME)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: PreTrainedModel | None = None) -> None:
        self._load_best_weights(Path(resume_from_checkpoint))

    def _load_best_weights(self, folder: Path) -> None:
        load = load_part if self.pipeline.adapted is None else load_adapter_part
        load(self.pipeline, folder)

    def merge_adapter(self) -> None:
        """Merge the trained adapter into the layers of this process; see the base class."""
        from ..lora import merge_adapters

        merge_adapters(self.pipeline.adapted)  # in place
        self.pipeline.adapted = None

    def _load_schedule(self, path: Path) -> None:
        load_schedule(self.lr_scheduler, path)  # pyrefly: ignore[bad-argument-type]  # made before the first step

    def _load_rng_state(self, checkpoint: str | None) -> None:
        own = f"rng_state_{self.args.process_index}.pth"
        if checkpoint is not None and not Path(checkpoint, own).is_file():
            load_random_state(Path(checkpoint, "rng_state_0.pth"))
        else:
            super()._load_rng_state(checkpoint)


def describe_pipeline(pipeline: TrainingPipeline) -> str:
    """Describe in a line how many processes train, and how they share the model."""
    settings = pipeline.settings
    count, layers = settings.stages * pipeline.replicas, "+".join(str(len(part)) for part in pipeline.layers)
    beside = "" if pipeline.replicas == 1 else f", {pipeline.replicas} pipelines"
    sharded = " sharded by FSDP2" if pipeline.is_sharded else ""
    return (
        f"{count} processes{beside}{sharded}, each of {settings.stages} stages with {settings.virtual} "
        f"chunk{'s' if settings.virtual > 1 else ''} ({settings.schedule}, {settings.microbatches} micro-batches, "
        f"layers {layers}, time limit {settings.timeout} s)"
    )


__all__ = ["PipelineBalance", "PipelineMonitor", "PipelineTrainer", "describe_pipeline"]
