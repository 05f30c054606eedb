"""The value of a recipe's `pipeline`: stages, schedule and micro-batches, with their checks.

A recipe is read before PyTorch is imported, so this file imports nothing heavy.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from attnres.utils.wording import did_you_mean

# Schedule of `torch.distributed.pipelining` -> whether a process holds several chunks of the model.
SCHEDULES = {
    "GPipe": False,
    "1F1B": False,
    "Interleaved1F1B": True,
    "LoopedBFS": True,
    "InterleavedZeroBubble": True,
}
_COUNTS = ("stages", "virtual", "microbatches", "timeout")
LONGEST_TIMEOUT = 30 * 24 * 3600  # seconds; gloo counts nanoseconds in 64 bits, and fails at once beyond their range


@dataclass(frozen=True)
class PipelineSettings:
    """The division of a model into chunks of layers, and the way of micro-batches through the chunks.

    The model is cut into `stages * virtual` chunks. Process `p` of a pipeline holds the chunks `p`, `p + stages`,
    `p + 2 * stages` and so on (section 4 of the paper).

    Attributes:
        stages: P, the processes of one pipeline, at least 2.
        virtual: V, the chunks of each process.
        schedule: A key of `SCHEDULES`. By default `1F1B`, and `Interleaved1F1B` for `virtual` above 1.
        microbatches: The parts that `micro_batch_size` sequences are cut into. By default `stages`.
        layers: The number of decoder layers in each chunk. By default chunks of about equal cost.
        cache: Whether a process keeps blocks, so that a transfer carries only the blocks that the receiver lacks.
        fsdp: Whether FSDP2 divides each stage among the pipelines that run beside each other. Without it, each of them
            has the whole stage, as with DDP.
        timeout: The seconds after which a transfer or a collective that has not ended is an error, at most 30 days.

    Raises:
        ValueError: A value is not allowed, or two values contradict each other.
    """

    stages: int
    virtual: int = 1
    schedule: str | None = None
    microbatches: int | None = None
    layers: tuple[int, ...] | None = None
    cache: bool = True
    fsdp: bool = False
    timeout: int = 600

    def __post_init__(self) -> None:
        # A frozen dataclass can set the fields that follow from others only in this way.
        if self.schedule is None:
            object.__setattr__(self, "schedule", "Interleaved1F1B" if self.virtual != 1 else "1F1B")
        if self.microbatches is None:
            object.__setattr__(self, "microbatches", self.stages)
        for name in _COUNTS:
            value, least = getattr(self, name), 2 if name == "stages" else 1
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise ValueError(_wrong(name, value, f"a whole number, at least {least}"))
        if self.timeout > LONGEST_TIMEOUT:
            raise ValueError(_wrong("timeout", self.timeout, f"at most {LONGEST_TIMEOUT} seconds, which are 30 days"))
        for name in ("cache", "fsdp"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(_wrong(name, getattr(self, name), "true or false"))
        self._check_schedule()
        if self.layers is not None:
            self._check_layers()

    @property
    def chunks(self) -> int:
        """Return C = P V, the number of chunks."""
        return self.stages * self.virtual

    @property
    def splits_backward(self) -> bool:
        """Return whether the gradients of states and of weights are computed one after the other."""
        return self.schedule == "InterleavedZeroBubble"

    def _check_schedule(self) -> None:
        """Raise ValueError if the schedule is unknown, or does not fit the numbers of chunks and micro-batches."""
        if not isinstance(self.schedule, str) or self.schedule not in SCHEDULES:
            raise ValueError(_wrong("schedule", self.schedule, f"one of {', '.join(SCHEDULES)}"))
        if self.virtual > 1 and not SCHEDULES[self.schedule]:
            several = ", ".join(name for name, is_looped in SCHEDULES.items() if is_looped)
            raise ValueError(
                f"`pipeline` of the recipe has `virtual: {self.virtual}`, but the schedule {self.schedule} runs one "
                f"chunk per process: set `virtual: 1`, or `schedule` to one of {several}."
            )
        if self.schedule == "1F1B" and self.microbatches < self.stages:
            raise ValueError(
                f"`microbatches` of the recipe's `pipeline` is {self.microbatches}, but with the schedule 1F1B must be "
                f"at least `stages`, {self.stages}: raise it, or set `schedule: GPipe`."
            )
        # `torch` runs interleaved schedules in rounds of at least `stages` micro-batches.
        rounds = max(1, self.microbatches // self.stages)
        if SCHEDULES[self.schedule] and self.schedule != "LoopedBFS" and self.microbatches % rounds:
            raise ValueError(
                f"`microbatches` of the recipe's `pipeline` is {self.microbatches}, but with the schedule "
                f"{self.schedule} must be a multiple of {rounds}, such as {self.microbatches // rounds * rounds}: that "
                f"is the number of rounds of {self.stages} micro-batches or more."
            )

    def _check_layers(self) -> None:
        """Raise ValueError if `layers` is not a list of one positive number for each chunk. Make it a tuple."""
        layers = self.layers
        counts = tuple(layers) if isinstance(layers, list | tuple) else ()
        if not counts or any(isinstance(count, bool) or not isinstance(count, int) or count < 1 for count in counts):
            raise ValueError(_wrong("layers", layers, "a list of whole numbers, at least 1"))
        if len(counts) != self.chunks:
            raise ValueError(
                f"`layers` of the recipe's `pipeline` has {len(counts)} numbers, but must have {self.chunks}, one for "
                f"each chunk (`stages` {self.stages} times `virtual` {self.virtual})."
            )
        object.__setattr__(self, "layers", counts)


def read_settings(settings: Mapping[str, Any] | None) -> PipelineSettings | None:
    """Read `pipeline` of a recipe.

    Args:
        settings: The value of the key: fields of [`PipelineSettings`].

    Returns:
        The settings; `None` without the key.

    Raises:
        ValueError: A key is unknown or missing, or a value is not allowed.
    """
    if settings is None:
        return None
    known = [field.name for field in fields(PipelineSettings)]
    for name in settings:
        if name not in known:
            raise ValueError(f"`pipeline` of the recipe has no `{name}`.{did_you_mean(str(name), known)}")
    if settings.get("stages") is None:
        raise ValueError("`pipeline` of the recipe lacks `stages`: give the number of processes of one pipeline.")
    # A key without a value counts as left out.
    return PipelineSettings(**{name: value for name, value in settings.items() if value is not None})


def count_replicas(settings: PipelineSettings, processes: int) -> int:
    """Return D, the number of pipelines that run beside each other.

    Raises:
        ValueError: The number of processes is not a multiple of the stages.
    """
    replicas, rest = divmod(processes, settings.stages)
    if rest or not replicas:
        raise ValueError(
            f"`stages` of the recipe's `pipeline` is {settings.stages}, but this run has {processes} "
            f"process{'' if processes == 1 else 'es'}: their number must be a multiple of `stages`. Start it by "
            f"`accelerate launch --multi_gpu --num_processes {settings.stages} -m attnres train`."
        )
    return replicas


def _wrong(name: str, value: Any, allowed: str) -> str:
    return f"`{name}` of the recipe's `pipeline` is {value!r}, but must be {allowed}."


__all__ = ["SCHEDULES", "PipelineSettings", "count_replicas", "read_settings"]
