"""The options of `attnres train`, and the checks of a recipe that need no PyTorch."""

from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer

from attnres.utils.packaged import recipe_names
from attnres.utils.wording import install_command

from .choices import Debug
from .guard import loading


def train(
    recipe: Annotated[
        str,
        typer.Argument(
            metavar="RECIPE",
            help=f"A YAML file, or one of: {', '.join(recipe_names())}.",
            autocompletion=recipe_names,
        ),
    ],
    changes: Annotated[list[str] | None, typer.Argument(metavar="key=value", help="Changes to the recipe.")] = None,
    debug: Debug = False,
) -> None:
    """Pre-train, heal or fine-tune by a recipe.

    To heal is to train a retrofitted model until it has adapted. A recipe is a YAML file with the settings of a run.
    Each key=value changes one of them. The command runs in one process. To use several: accelerate launch -m attnres
    train RECIPE [key=value]...

    attnres train heal model=my-attnres train=text.jsonl out=runs/heal
    attnres train finetune model=my-attnres train=ORG/DATA out=runs/more steps=500
    attnres train pretrain model=attnres-tiny tokenizer=DIR train=FILE out=new
    """
    # Matplotlib draws the loss curve. Without this check, its import fails seconds later and names another extra.
    if missing := next((name for name in ("yaml", "matplotlib") if find_spec(name) is None), None):
        raise RuntimeError(f"attnres train needs the package {missing}: {install_command('train')}")
    from attnres.training.launch import check_run
    from attnres.training.recipe import read_recipe

    try:
        checked = read_recipe(recipe, changes or ())
    except (FileNotFoundError, ValueError) as error:
        raise typer.BadParameter(str(error)) from error
    # A file comes before a packaged recipe of the same name. Cards of models show names, but no paths.
    name = "" if Path(recipe).is_file() else recipe
    check_run(checked, name)
    with loading():
        from .train import train_in_this_process

    train_in_this_process(checked, name)
