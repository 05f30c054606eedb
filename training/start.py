"""Check a run by its recipe, the names of files and the environment, before PyTorch is imported.

So a mistake in them is reported at once.
"""

import os
from pathlib import Path

from attnres.utils.hub import check_source
from attnres.utils.packaged import configuration_names
from attnres.utils.wording import counted

from .data.paths import check_data_path
from .parallel.pipeline_settings import count_replicas, read_settings
from .recipe import Recipe
from .run_folder import check_folder

HEAL = "heal"  # the recipe that refuses a model without attention residuals
# The variables by which a launcher tells each process how many there are, as `accelerate` reads them.
_SIZES = ("WORLD_SIZE", "PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE")


def check_run(recipe: Recipe, name: str = "") -> None:
    """Check the model, tokenizer, data, folder and batch of a run.

    Args:
        recipe: The recipe of the run.
        name: The recipe's name if it comes with `attnres`, else empty.

    Raises:
        FileExistsError: The folder holds a finished run, another run or other files.
        FileNotFoundError: A model, tokenizer or data set cannot be found.
        OSError: The folder cannot be written.
        ValueError: A named configuration lacks a tokenizer or is to be healed or adapted, a file of data has an unknown
            suffix, or the batch size does not fit the processes.
    """
    check_folder(Path(recipe.out), recipe)
    known = configuration_names()
    check_from_scratch(recipe, name)
    if recipe.model not in known:
        check_source(recipe.model, known)
    if recipe.tokenizer is not None:
        check_source(recipe.tokenizer, is_tokenizer=True)
    # With `skip`, a data set that is not found is counted.
    for path in (*recipe.train, *recipe.held_out) if recipe.bad_rows == "error" else ():
        check_data_path(path)
    if (processes := _count_processes()) is not None:
        tp_size = (recipe.distributed or {}).get("tp_size", 1)
        # A wrong size is refused once `transformers` has read it.
        divide_batch(recipe, processes, tp_size if isinstance(tp_size, int) and tp_size > 0 else 1)


def check_from_scratch(recipe: Recipe, name: str) -> None:
    """Check a recipe whose model is a named configuration, which has random weights.

    Args:
        recipe: The recipe of the run.
        name: The recipe's name if it comes with `attnres`, else empty.

    Raises:
        ValueError: The recipe is `heal`, has no tokenizer, or has an adapter.
    """
    if recipe.model not in configuration_names():
        return
    if name == HEAL:
        raise ValueError(
            f"{recipe.model} is a named configuration with random weights, so there is nothing to heal. Train it "
            "from scratch by the recipe `pretrain`, or give model=DIR, a checkpoint that `attnres convert` made."
        )
    if recipe.tokenizer is None:
        raise ValueError(f"{recipe.model} starts from scratch: the recipe needs a `tokenizer`, a directory or Hub id.")
    if recipe.lora is not None:
        raise ValueError(f"{recipe.model} starts from scratch: an adapter would have no base. Leave out `lora`.")


def divide_batch(recipe: Recipe, processes: int, tp_size: int = 1) -> tuple[int, int, int]:
    """Divide the batch of a recipe among processes.

    Args:
        recipe: The recipe of the run.
        processes: The number of processes of the run.
        tp_size: The number of processes that divide the matrices.

    Returns:
        The processes that compute the same batch, those of a tensor-parallel group or of a pipeline; the sequences that
        such a group computes at once; and the number of times that it does so in a step.

    Raises:
        ValueError: The sequences of a batch cannot be divided evenly, or the processes not into pipelines.
    """
    pipeline = read_settings(recipe.pipeline)
    ranks_per_batch = tp_size if pipeline is None else processes // count_replicas(pipeline, processes)
    groups = max(1, processes // ranks_per_batch)
    micro = min(recipe.micro_batch_size, max(1, recipe.batch_size // groups))
    accumulated, rest = divmod(recipe.batch_size, micro * groups)
    if rest:
        raise ValueError(
            f"`batch_size` {recipe.batch_size} is not a multiple of `micro_batch_size` {micro} times "
            f"{counted(groups, 'pipeline') if pipeline else f'{groups} processes'}."
        )
    return ranks_per_batch, micro, accumulated


def _count_processes() -> int | None:
    """Return the number of processes of this run; `None` if only accelerate can tell."""
    if all(name not in os.environ for name in _SIZES):
        return 1
    # Without a rank on its machine, a process may count as the only one.
    if "LOCAL_RANK" in os.environ and os.environ.get("WORLD_SIZE", "").isdecimal():
        return max(1, int(os.environ["WORLD_SIZE"]))
    return None


__all__ = ["HEAL", "check_from_scratch", "check_run", "divide_batch"]
