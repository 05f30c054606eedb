"""Check the settings of generation beside a model before any work.

`transformers` reads `generation_config.json` only when it loads a model, and refuses some settings only when it saves
one: a training run would end at its first checkpoint.
"""

import json
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from transformers import GenerationConfig
from transformers.utils import CONFIG_NAME, GENERATION_CONFIG_NAME

from attnres.utils.quiet import quiet_transformers
from attnres.utils.wording import printable

from .source_files import check_file, read_json

_MAX_SHOWN = 300  # characters of a reason or value in a message
# The end of a message of `transformers`, which names no file.
_ADVICE = " If you're using a pretrained model"


def read_generation_config(folder: Path) -> GenerationConfig:
    """Read the settings of generation of a model as `from_pretrained` does. Settings that only warn are accepted.

    Args:
        folder: The model's directory. Without a `generation_config.json`, the settings are those in `config.json`.

    Returns:
        The settings.

    Raises:
        OSError: The file is damaged.
        ValueError: `transformers` refuses the settings, or the file is a link out of the directory. The message names
            the file and the value.
    """
    return _read(folder)[0]


def check_generation_saving(folder: Path, changes: Mapping[str, Any]) -> None:
    """Raise if the settings of generation of a model could not be saved after training.

    `transformers` saves settings that only warn if they are as they were read.

    Args:
        folder: The model's directory.
        changes: The settings that training changes, by name.

    Raises:
        OSError, ValueError: As [`read_generation_config`], or the changed settings cannot be saved.
    """
    generation, path, settings = _read(folder)
    if not changes:
        return
    with _explained(path, settings), tempfile.TemporaryDirectory() as scratch:
        vars(generation).update(changes)
        generation.save_pretrained(scratch)


def _read(folder: Path) -> tuple[GenerationConfig, Path, dict]:
    """Return the settings of generation as [`read_generation_config`], their file, and its content."""
    path, options = folder / GENERATION_CONFIG_NAME, {}
    # A broken link is an error, not an absent file.
    if not path.exists() and not path.is_symlink():
        path, options = folder / CONFIG_NAME, {"_from_model_config": True}
    check_file(folder, path)
    settings = read_json(path)
    if not isinstance(settings, dict):
        raise ValueError(f"{path} holds {_shown(json.dumps(settings))}, not a JSON object. Correct or remove the file.")
    with _explained(path, settings):
        return GenerationConfig.from_pretrained(folder, config_file_name=path.name, **options), path, settings


@contextmanager
def _explained(path: Path, settings: dict) -> Iterator[None]:
    """Turn an error inside the block into a ValueError of one line that names the file and the value."""
    try:
        with quiet_transformers():
            yield
    except Exception as error:  # `transformers` compares values of any type, and calls attributes that a file may set
        reason = " ".join(str(error).split()).partition(_ADVICE)[0].removeprefix("GenerationConfig is invalid: - ")
        if not isinstance(error, ValueError):
            reason = f"{_wrong_setting(settings)}{type(error).__name__}: {reason}"
        remedy = "Correct these settings there, or remove them."
        raise ValueError(f"{path} cannot be used: {_shown(reason.rstrip('.'))}. {remedy}") from error


def _wrong_setting(settings: dict) -> str:
    """Return the beginning of a message that names the setting that is refused by itself; empty if none is."""
    for name, value in settings.items():
        try:
            GenerationConfig(**{name: value}).to_json_string()
        except Exception:  # as above
            return f"`{name}` is {json.dumps(value)}; "
    return ""


def _shown(text: str) -> str:
    """Return a text of a file as a part of a message: printable, and not long."""
    return printable(text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]} ...")


__all__ = ["check_generation_saving", "read_generation_config"]
