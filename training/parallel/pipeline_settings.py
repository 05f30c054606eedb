"""The key `pipeline` of a recipe: stages, schedule and micro-batches, with their checks.

A recipe is read before PyTorch is imported, so this file imports nothing heavy.
"""

from typing import Annotated, Any, Literal

from pydantic import Field, StrictBool, model_validator

from ..settings import LONGEST_TIMEOUT, Count, Settings, Whole

Schedule = Literal["GPipe", "1F1B", "Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble"]
# Schedule of `torch.distributed.pipelining` -> whether a process holds several chunks of the model.
SCHEDULES: dict[Schedule, bool] = {
    "GPipe": False,
    "1F1B": False,
    "Interleaved1F1B": True,
    "LoopedBFS": True,
    "InterleavedZeroBubble": True,
}


class PipelineSettings(Settings):
    """The cut of a model into chunks of layers, and the way of micro-batches through the chunks.

    The model is cut into `stages * virtual` chunks. Process `p` of a pipeline holds the chunks `p`, `p + stages`,
    `p + 2 * stages` and so on (section 4 of the paper).

    Attributes:
        stages: P, the processes of one pipeline, at least 2.
        virtual: V, the chunks of each process.
        schedule: A key of `SCHEDULES`. By default `1F1B`, and `Interleaved1F1B` for `virtual` above 1.
        microbatches: The parts that `micro_batch_size` sequences are cut into. By default `stages`.
        layers: The number of decoder layers in each chunk. By default chunks of about equal cost.
        cache: Whether a process keeps blocks, so that a transfer carries only the blocks that the receiver lacks.
        fsdp: Whether FSDP2 shards each stage among the pipelines that run beside each other. Without it, each of them
            has the whole stage, as with DDP.
        timeout: The seconds after which a transfer or a collective that has not ended is an error, at most 30 days.

    Raises:
        ValueError: A value is not allowed, or two values contradict each other.
    """

    key = "pipeline"
    stages: Annotated[Whole, Field(ge=2)]
    virtual: Count = 1
    schedule: Schedule = Field(default_factory=lambda given: "Interleaved1F1B" if given["virtual"] > 1 else "1F1B")
    microbatches: Count = Field(default_factory=lambda given: given["stages"])
    layers: Annotated[tuple[Count, ...], Field(min_length=1)] | None = None
    cache: StrictBool = True
    fsdp: StrictBool = False
    timeout: Annotated[Count, Field(le=LONGEST_TIMEOUT)] = 600

    @model_validator(mode="before")
    @classmethod
    def _leave_out_nulls(cls, values: Any) -> Any:
        # A key without a value counts as left out.
        return (
            {key: value for key, value in values.items() if value is not None} if isinstance(values, dict) else values
        )

    @property
    def chunks(self) -> int:
        """Return C = P V, the number of chunks."""
        return self.stages * self.virtual

    @property
    def splits_backward(self) -> bool:
        """Return whether the gradients of states and of weights are computed one after the other."""
        return self.schedule == "InterleavedZeroBubble"

    @model_validator(mode="after")
    def _check_schedule(self) -> "PipelineSettings":
        """Raise ValueError if the schedule or `layers` does not fit the numbers of chunks and micro-batches."""
        if self.virtual > 1 and not SCHEDULES[self.schedule]:
            several = ", ".join(name for name, is_looped in SCHEDULES.items() if is_looped)
            raise ValueError(
                f"`pipeline` of the recipe has `virtual: {self.virtual}`, but the schedule {self.schedule} runs one "
                f"chunk per process: set `virtual: 1`, or `schedule` to one of {several}."
            )
        if self.schedule == "1F1B" and self.microbatches < self.stages:
            raise ValueError(
                f"`pipeline.microbatches` of the recipe is {self.microbatches}, but with the schedule 1F1B must be "
                f"at least `stages`, {self.stages}: raise it, or set `schedule: GPipe`."
            )
        # `torch` runs interleaved schedules in rounds of at least `stages` micro-batches.
        rounds = max(1, self.microbatches // self.stages)
        if SCHEDULES[self.schedule] and self.schedule != "LoopedBFS" and self.microbatches % rounds:
            raise ValueError(
                f"`pipeline.microbatches` of the recipe is {self.microbatches}, but with the schedule "
                f"{self.schedule} must be a multiple of {rounds}, such as {self.microbatches // rounds * rounds}: that "
                f"is the number of rounds of {self.stages} micro-batches or more."
            )
        if self.layers is not None and len(self.layers) != self.chunks:
            raise ValueError(
                f"`pipeline.layers` of the recipe has {len(self.layers)} numbers, but must have {self.chunks}, one for "
                f"each chunk (`stages` {self.stages} times `virtual` {self.virtual})."
            )
        return self


def count_replicas(settings: PipelineSettings, processes: int) -> int:
    """Return D, the number of pipelines that run beside each other.

    Raises:
        ValueError: The number of processes is not a multiple of the stages.
    """
    replicas, rest = divmod(processes, settings.stages)
    if rest or not replicas:
        raise ValueError(
            f"`pipeline.stages` of the recipe is {settings.stages}, but this run has "
            f"{processes} process{'' if processes == 1 else 'es'}: their number must be a multiple of `stages`. Start "
            f"it by `accelerate launch --multi_gpu --num_processes {settings.stages} -m attnres train`."
        )
    return replicas


__all__ = ["SCHEDULES", "PipelineSettings", "count_replicas"]
