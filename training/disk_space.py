"""Check before the first step that the disk has space for what a run writes: its checkpoints and its model."""

import math
from pathlib import Path

from attnres.parameter_kinds import parameters_by_kind
from attnres.utils.files import check_space

from .recipe import Recipe
from .trainer import AttnResTrainer


def check_disk(trainer: AttnResTrainer, recipe: Recipe, steps_made: int = 0) -> None:
    """Raise if the disk has too little free space for the files of a run.

    Args:
        trainer: The trainer, which has not begun.
        recipe: The recipe of the run.
        steps_made: The step of the checkpoint that the run resumes from.

    Raises:
        OSError: There is too little space. The message says how much is needed.
    """
    out, checkpoint = Path(recipe.out), checkpoint_bytes(trainer, recipe)
    stored = len([*out.glob("checkpoint-*")])
    saves = math.ceil(trainer.args.max_steps / trainer.args.save_steps) - steps_made // trainer.args.save_steps
    # A checkpoint is whole before an older one is removed, and the model is written beside the checkpoints that stay.
    most, last = (min(recipe.keep + spare, stored + saves) - stored for spare in (1, 0))
    needed = max(most * checkpoint, last * checkpoint + model_bytes(trainer, recipe))
    try:
        check_space(out, int(needed))
    except OSError as error:
        raise OSError(f"{error} Free some, or choose another `out`, or write fewer checkpoints by `keep`.") from error


def checkpoint_bytes(trainer: AttnResTrainer, recipe: Recipe) -> int:
    """Return the size of a checkpoint without its small files: the weights, and the moments of the optimizer."""
    kinds = parameters_by_kind(trainer.model)
    # AdamW keeps two moments of each parameter, and Muon one of each matrix.
    moments = {kind: 1 if recipe.optimizer == "muon" and kind == "matrices" else 2 for kind in kinds}
    states = sum(moments[kind] * parameter.nbytes for kind, part in kinds.items() for parameter in part)
    return int(_saved_bytes(trainer, recipe) + states * _processes_share(trainer))


def model_bytes(trainer: AttnResTrainer, recipe: Recipe) -> int:
    """Return the size of the results: the model or adapter and, with `merge`, the merged model."""
    merged = sum(p.nbytes for p in trainer.model.parameters() if not p.requires_grad) if recipe.merge else 0
    return _saved_bytes(trainer, recipe) + merged


def _saved_bytes(trainer: AttnResTrainer, recipe: Recipe) -> int:
    """Return the size of the weights that a checkpoint holds: those of the model, or only those of its adapter."""
    is_adapter = recipe.lora is not None
    size = sum(p.nbytes for p in trainer.model.parameters() if p.requires_grad or not is_adapter)
    return int(size * _processes_share(trainer))


def _processes_share(trainer: AttnResTrainer) -> float:
    """Return by how much the whole model is larger than the model of this process, which may have only some layers."""
    total = trainer.total_parameters
    return 1.0 if total is None else total / sum(parameter.numel() for parameter in trainer.model.parameters())


__all__ = ["check_disk", "checkpoint_bytes", "model_bytes"]
