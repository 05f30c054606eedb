"""Check a run before PyTorch is imported: its names, files and folders, its launcher, and the batch of each process.

So a mistake is reported at once. A launcher (`accelerate launch`, `torchrun`, `mpirun`) describes the run to each
process by variables of the environment.
"""

import os
from pathlib import Path
from typing import NamedTuple

from pydantic import BaseModel, ConfigDict, Field

from attnres.checkpoints.source import ModelSource
from attnres.utils.wording import counted

from .data.paths import check_data_path
from .parallel.pipeline_settings import count_replicas
from .recipe import Recipe
from .run_folder import check_folder
from .settings import explained

HEAL = "heal"  # the recipe that refuses a model without attention residuals
# The variables by which a launcher says how many processes there are, as `accelerate` reads them.
_SIZES = ("WORLD_SIZE", "PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE")


class Launch(BaseModel):
    """What a launcher tells a process.

    Attributes:
        processes: The number of processes of the run; `None` if only accelerate can tell.
        uses_fsdp: Whether accelerate shards the model by FSDP.
        uses_deepspeed: Whether accelerate shards the model by DeepSpeed.
        uses_megatron: Whether accelerate shards the model by Megatron-LM.
        makes_parts: Whether DeepSpeed makes a model in parts.
        mixed_precision: `no`, `bf16` or `fp16`.
    """

    model_config = ConfigDict(frozen=True)
    processes: int | None = 1
    uses_fsdp: bool = Field(False, alias="ACCELERATE_USE_FSDP")
    uses_deepspeed: bool = Field(False, alias="ACCELERATE_USE_DEEPSPEED")
    uses_megatron: bool = Field(False, alias="ACCELERATE_USE_MEGATRON_LM")
    makes_parts: bool = Field(False, alias="ACCELERATE_DEEPSPEED_ZERO3_INIT")
    mixed_precision: str = Field("no", alias="ACCELERATE_MIXED_PRECISION")

    @property
    def engine(self) -> str | None:
        """Return the name of accelerate's engine that shards the model."""
        engines = {"FSDP": self.uses_fsdp, "DEEPSPEED": self.uses_deepspeed, "MEGATRON_LM": self.uses_megatron}
        return next((name for name, is_used in engines.items() if is_used), None)


class BatchShare(NamedTuple):
    """The share of a batch that each process computes.

    Attributes:
        ranks: The processes that compute the same sequences: of a tensor-parallel group or of a pipeline.
        micro: The sequences that such a group computes at once.
        accumulated: The number of times that it does so in a step.
    """

    ranks: int
    micro: int
    accumulated: int


def read_launch() -> Launch:
    """Read the variables of the environment by which a launcher speaks.

    Raises:
        ValueError: A switch is neither true nor false.
    """
    processes = None
    if all(name not in os.environ for name in _SIZES):
        processes = 1
    # Without a rank on its machine, a process may count as the only one.
    elif "LOCAL_RANK" in os.environ and os.environ.get("WORLD_SIZE", "").isdecimal():
        processes = max(1, int(os.environ["WORLD_SIZE"]))
    with explained("the environment"):
        return Launch(processes=processes, **os.environ)


def check_launch(recipe: Recipe, launch: Launch) -> None:
    """Check that a recipe fits the launcher that started this process.

    Raises:
        ValueError: The recipe and an engine of accelerate contradict each other, the recipe shards the model among
            another number of processes, or its batch cannot be divided evenly.
    """
    for name in ("distributed", "pipeline"):
        if getattr(recipe, name) is not None and launch.engine is not None:
            raise ValueError(
                f"`{name}` of the recipe and accelerate's {launch.engine} would both shard the model: leave out one."
            )
    if recipe.pipeline is not None and launch.mixed_precision == "fp16":
        raise ValueError("`pipeline` of the recipe does not train in fp16, as accelerate's settings ask: use bf16.")
    if launch.uses_deepspeed and recipe.optimizer != "adamw":
        raise ValueError("Muon needs whole matrices, which DeepSpeed cuts up: set optimizer=adamw.")
    if launch.uses_deepspeed and launch.makes_parts:
        raise ValueError(
            "a model cannot be made in parts: set `zero3_init_flag: false` in accelerate's file. Each process then "
            "holds the whole model until DeepSpeed has sharded it."
        )
    if launch.processes is None:
        return
    size = None if recipe.distributed is None else recipe.distributed.count_processes()
    if size is not None and size != launch.processes:
        raise ValueError(
            f"`distributed` of the recipe shards the model among {size} processes, but this run has "
            f"{launch.processes}. Start it by `accelerate launch --multi_gpu --num_processes {size} -m attnres train`, "
            "or change the sizes."
        )
    if recipe.trainer.fsdp and launch.processes == 1:
        raise ValueError(
            "`trainer.fsdp` of the recipe shards the model among processes, but this run was not launched as several: "
            "start it by `accelerate launch`, or leave it out."
        )
    divide_batch(recipe, launch.processes)


def divide_batch(recipe: Recipe, processes: int) -> BatchShare:
    """Divide the batch of a recipe among processes.

    Args:
        recipe: The recipe of the run.
        processes: The number of processes of the run.

    Raises:
        ValueError: The sequences of a batch cannot be divided evenly, or the processes not into pipelines, or a
            pipeline's batch not into its micro-batches.
    """
    if recipe.pipeline is not None:
        ranks = processes // count_replicas(recipe.pipeline, processes)
    else:
        ranks = 1 if recipe.distributed is None else recipe.distributed.tp_size or 1
    groups = max(1, processes // ranks)
    micro = min(recipe.micro_batch_size, max(1, recipe.batch_size // groups))
    accumulated, rest = divmod(recipe.batch_size, micro * groups)
    if rest:
        raise ValueError(
            f"`batch_size` {recipe.batch_size} is not a multiple of `micro_batch_size` {micro} times "
            f"{counted(groups, 'pipeline') if recipe.pipeline else f'{groups} processes'}."
        )
    if recipe.pipeline is not None and micro % recipe.pipeline.microbatches:
        raise ValueError(
            f"`pipeline.microbatches` of the recipe is {recipe.pipeline.microbatches}, but must divide the {micro} "
            "sequences that a pipeline computes at once (`micro_batch_size`): make one a multiple of the other."
        )
    return BatchShare(ranks, micro, accumulated)


def check_run(recipe: Recipe, name: str = "") -> None:
    """Check the model, tokenizer, data, folder and batch of a run.

    Args:
        recipe: The recipe of the run.
        name: The recipe's name if it comes with `attnres`, else empty.

    Raises:
        FileExistsError: The folder holds a finished run, another run or other files.
        FileNotFoundError: A model, tokenizer or data set cannot be found.
        OSError: The folder cannot be written.
        ValueError: A named configuration lacks a tokenizer or is to be healed, a file of data has an unknown suffix, or
            the recipe does not fit the processes.
    """
    check_folder(Path(recipe.out), recipe)
    if recipe.source.is_named and name == HEAL:
        raise ValueError(
            f"{recipe.model} is a named configuration with random weights, so there is nothing to heal. Train it "
            "from scratch by the recipe `pretrain`, or give model=DIR, a checkpoint that `attnres convert` made."
        )
    if recipe.source.is_named and recipe.tokenizer is None:
        raise ValueError(f"{recipe.model} starts from scratch: the recipe needs a `tokenizer`, a directory or Hub id.")
    recipe.source.check()
    if recipe.tokenizer is not None:
        ModelSource(recipe.tokenizer).check(is_tokenizer=True)
    # With `skip`, a data set that is not found is counted.
    for path in (*recipe.train, *recipe.held_out) if recipe.bad_rows == "error" else ():
        check_data_path(path)
    check_launch(recipe, read_launch())


__all__ = [
    "HEAL",
    "BatchShare",
    "Launch",
    "check_launch",
    "check_run",
    "divide_batch",
    "read_launch",
]
