"""The folder of a run: whose it is, and whether a run may begin or go on there."""

from pathlib import Path

from attnres.files import atomic_write

from .recipe import Recipe, read_recipe, write_recipe

RECIPE, RESULTS = "recipe.yaml", "results.json"
# What two runs of one training may differ in.
FREE = ("log_every", "save_every", "keep", "micro_batch_size")


def check_place(out: Path) -> None:
    """Raises FileExistsError: `out` holds a finished run or something else."""
    if (out / RESULTS).exists():
        raise FileExistsError(f"{out} holds a finished run. Choose another `out`.")
    if out.exists() and not out.is_dir():
        raise FileExistsError(f"{out} is a file. Choose another `out`.")
    if out.exists() and any(out.iterdir()) and not (out / RECIPE).exists():
        raise FileExistsError(f"{out} holds other files. Choose another `out`.")


def claim(out: Path, recipe: Recipe) -> None:
    """Write the recipe into the folder of its run. Raises FileExistsError: it is that of another run."""
    from transformers.trainer_utils import get_last_checkpoint

    check_place(out)
    if (out / RECIPE).exists() and get_last_checkpoint(str(out)):
        before = read_recipe(out / RECIPE)
        differing = [name for name in vars(recipe) if getattr(before, name) != getattr(recipe, name)]
        if differing := [name for name in differing if name not in FREE]:
            name = differing[0]
            raise FileExistsError(
                f"{out} holds a run with {name} {getattr(before, name)!r}, not {getattr(recipe, name)!r}. "
                "Choose another `out`, or go on with the recipe as it was."
            )
    out.mkdir(parents=True, exist_ok=True)
    atomic_write(out / RECIPE, write_recipe(recipe))


__all__ = ["RECIPE", "RESULTS", "check_place", "claim"]
