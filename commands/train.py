"""`attnres train`: run in one process, or in each process that `accelerate launch -m attnres train` starts."""

import contextlib

import torch

from attnres.training.recipe import Recipe
from attnres.training.train import run_train


def train_in_this_process(recipe: Recipe, name: str = "") -> None:
    """Train by a recipe. If the run has several processes, leave their group at the end.

    Args:
        recipe: The recipe of the run.
        name: The recipe's name if it comes with `attnres`, else empty.
    """
    try:
        run_train(recipe, name)
    finally:
        with contextlib.suppress(Exception):
            torch.distributed.destroy_process_group()
