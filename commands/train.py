"""The command `attnres train`, in one process or in each process that `accelerate launch -m attnres train` starts."""

import contextlib

import torch

from attnres.training.recipe import Recipe
from attnres.training.train import run_train


def train_in_this_process(recipe: Recipe, name: str = "") -> None:
    """Train by a recipe, and end the group of processes with the run, if there is one.

    Args:
        recipe: The recipe of the run.
        name: The recipe's name, where it comes with `attnres`.
    """
    try:
        run_train(recipe, name)
    finally:
        with contextlib.suppress(Exception):
            torch.distributed.destroy_process_group()
