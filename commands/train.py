"""`attnres train`: in one process, or in each of those that `accelerate launch -m attnres train` starts."""

import contextlib

import torch

from attnres.training.recipe import Recipe
from attnres.training.train import run_train


def train_in_this_process(recipe: Recipe, name: str = "") -> None:
    """Train by the recipe, of that name; the group of processes, if there is one, ends with the run."""
    try:
        run_train(recipe, name)
    finally:
        with contextlib.suppress(Exception):
            torch.distributed.destroy_process_group()
