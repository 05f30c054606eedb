"""Callbacks of a pipeline: the balance of experts and tokens/s, where no process runs the whole model."""

from collections.abc import Generator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import PreTrainedModel

from ..balance import ExpertBalance
from ..monitor import Monitor
from .pipeline import Pipeline


class PipelineBalance(ExpertBalance):
    """[`ExpertBalance`] for the routers of one process: the load is summed over the pipelines, not over the stages.

    Args:
        pipeline: The part of this process.
        rate: The rate of the update.
    """

    def __init__(self, pipeline: Pipeline, rate: float):
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

    def __init__(self, pipeline: Pipeline):
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


__all__ = ["PipelineBalance", "PipelineMonitor"]
