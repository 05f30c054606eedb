"""Check a run by the names of models, files and folders, before PyTorch is imported.

So a mistake in them is reported at once.
"""

from pathlib import Path

from attnres.checkpoints.source import ModelSource

from .data.paths import check_data_path
from .launch import check_launch, read_launch
from .recipe import Recipe
from .run_folder import check_folder

HEAL = "heal"  # the recipe that refuses a model without attention residuals


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
            suffix, or the recipe does not fit the processes.
    """
    check_folder(Path(recipe.out), recipe)
    if recipe.source.is_named:
        check_from_scratch(recipe, name)
    recipe.source.check()
    if recipe.tokenizer is not None:
        ModelSource(recipe.tokenizer).check(is_tokenizer=True)
    # With `skip`, a data set that is not found is counted.
    for path in (*recipe.train, *recipe.held_out) if recipe.bad_rows == "error" else ():
        check_data_path(path)
    check_launch(recipe, read_launch())


def check_from_scratch(recipe: Recipe, name: str) -> None:
    """Check a recipe whose model is a named configuration, which has random weights.

    Args:
        recipe: The recipe of the run.
        name: The recipe's name if it comes with `attnres`, else empty.

    Raises:
        ValueError: The recipe is `heal`, has no tokenizer, or has an adapter.
    """
    if name == HEAL:
        raise ValueError(
            f"{recipe.model} is a named configuration with random weights, so there is nothing to heal. Train it "
            "from scratch by the recipe `pretrain`, or give model=DIR, a checkpoint that `attnres convert` made."
        )
    if recipe.tokenizer is None:
        raise ValueError(f"{recipe.model} starts from scratch: the recipe needs a `tokenizer`, a directory or Hub id.")
    if recipe.lora is not None:
        raise ValueError(f"{recipe.model} starts from scratch: an adapter would have no base. Leave out `lora`.")


__all__ = ["HEAL", "check_from_scratch", "check_run"]
