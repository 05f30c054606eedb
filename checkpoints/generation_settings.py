"""Check that training can save the settings of generation of a model, before any work.

`transformers` refuses some settings only when it saves a model: a run would end at its first checkpoint.
"""

import tempfile
from collections.abc import Mapping
from copy import deepcopy
from typing import Any

from attnres.utils.errors import about
from attnres.utils.quiet import quiet_transformers

from .checkpoint import Checkpoint


def check_generation_saving(checkpoint: Checkpoint, changes: Mapping[str, Any]) -> None:
    """Raise if the settings of generation of a model cannot be read, or could not be saved after training.

    `transformers` saves settings that only warn if they are as they were read.

    Args:
        checkpoint: The checkpoint that training begins with.
        changes: The settings that training changes, by name.

    Raises:
        OSError: The file of the settings is damaged.
        ValueError: The settings cannot be read or saved. A note names the file.
    """
    generation = deepcopy(checkpoint.generation_config)
    if not changes:
        return
    path = checkpoint.generation_path
    with (
        about(path, "Correct these settings there, or remove them."),
        quiet_transformers(),
        tempfile.TemporaryDirectory() as scratch,
    ):
        vars(generation).update(changes)
        generation.save_pretrained(scratch)


__all__ = ["check_generation_saving"]
