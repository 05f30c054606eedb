"""The files that the commands write for a model, by name, and the directories that `--overwrite` may therefore replace.

Commands check an output directory before they import PyTorch, so this file imports little.
"""

import json
from collections.abc import Callable
from fnmatch import fnmatchcase
from pathlib import Path

from .files import Written, entries_beyond

# The patterns leave out weights, their index and the model's configuration. None fits the name of a Python file.
TOKENIZER_PATTERNS = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "tokenizer.model.v[0-9]",
    "tokenizer.model.v[0-9][0-9]",
    "vocab*.json",
    "vocab*.txt",
    "merges.txt",
    "*.model",
    "*.tiktoken",
    "tekken.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "*.jinja",
    "chat_template*.json",
    "additional_chat_templates/*.jinja",
)
# A directory with a tokenizer has at least one of these.
TOKENIZER_FILES = ("tokenizer_config.json", "tokenizer.json", "tokenizer.model", "vocab.json", "tekken.json")
_LICENCES = ("LICENSE", "LICENCE", "COPYING", "NOTICE")
OTHER_PATTERNS = (
    "generation_config.json",
    "preprocessor_config.json",
    "processor_config.json",
    *_LICENCES,
    *(f"{name}*{suffix}" for name in _LICENCES for suffix in (".txt", ".md", ".rst")),
)
# The files that `attnres convert` copies from a source as they are.
SIDE_FILES = (*TOKENIZER_PATTERNS, *OTHER_PATTERNS)
# A conversion of Kimi K3 writes this file, by which `--to released` undoes it.
RECORD = "released_config.json"
# The subfolder of a result for code that came with the source. The result's own code lies beside `config.json`.
SOURCE_CODE = "source_code"
# What the demo writes: three files, and the directory of a model.
DEMO_RESULTS, DEMO_LOSSES, DEMO_ATTENTION = _DEMO_FILES = ("results.json", "loss_curves.png", "depth_attention.png")
DEMO_MODEL = "model"

_CONFIG, _INDEX = "config.json", "model.safetensors.index.json"
_ADAPTER = ("adapter_config.json", "adapter_model.safetensors")
# Beside these, the files of weights that the index names. A star fits no `/`: see `_fits`.
_MODEL_PATTERNS = (
    *(_CONFIG, _INDEX, RECORD, "README.md"),
    *("model.safetensors", "model-*-of-*.safetensors", "model-residual*.safetensors"),
    "*_attnres.py",
    *SIDE_FILES,
)


def weight_bytes(folder: Path) -> int:
    """Return the size of a model's weights in safetensors, by its index and the sizes of files."""
    files = (folder / name for name in _shards(folder) or {"model.safetensors"})
    return sum(file.stat().st_size for file in files if file.is_file())


def _shards(folder: Path) -> set[str]:
    """Return the files of weights that the index of a model names; none if there is no index or it is damaged."""
    if not (folder / _INDEX).is_file():  # a named pipe would never end
        return set()
    try:
        weight_map = json.loads((folder / _INDEX).read_text(encoding="utf-8"))["weight_map"]
        return {name for name in weight_map.values() if Path(name).suffix == ".safetensors"}
    except (AttributeError, KeyError, OSError, TypeError, ValueError):
        return set()


def _fits(path: str, patterns: tuple[str, ...]) -> bool:
    """Return whether a path fits a pattern that has as many slashes."""
    return any(path.count("/") == pattern.count("/") and fnmatchcase(path, pattern) for pattern in patterns)


def _parts_of_model(folder: Path, others: tuple[str, ...] = ()) -> Callable[[str], bool]:
    """Return the function that tells whether a path in a model's directory is one that the commands write there.

    Args:
        folder: The directory. Files of weights may have any names that its index has.
        others: Names that count too.
    """
    shards = _shards(folder)

    def is_part(path: str) -> bool:
        if path in ("additional_chat_templates/", f"{SOURCE_CODE}/") or path in shards or path in others:
            return True
        if path.startswith(f"{SOURCE_CODE}/"):
            return path.endswith((".py", "/"))
        return _fits(path, _MODEL_PATTERNS)

    return is_part


def _beyond_model(folder: Path) -> list[str]:
    """Return what lies in the directory of a model but is not part of it."""
    return entries_beyond(folder, _parts_of_model(folder))


def _beyond_adapter(folder: Path) -> list[str]:
    """Return what lies in the directory of an adapter but is not part of it."""
    return entries_beyond(folder, _parts_of_model(folder, _ADAPTER))


def _beyond_demo(folder: Path) -> list[str]:
    """Return what lies in the directory of a demo but is not part of it."""
    is_part_of_model = _parts_of_model(folder / DEMO_MODEL)

    def is_part(path: str) -> bool:
        first, _, rest = path.partition("/")
        return is_part_of_model(rest) or not rest if first == DEMO_MODEL else path in _DEMO_FILES

    return entries_beyond(folder, is_part)


WRITTEN_MODEL = Written("a model", _CONFIG, '"model_type"', _beyond_model)
WRITTEN_ADAPTER = Written("an adapter", _ADAPTER[0], '"peft_type"', _beyond_adapter)
WRITTEN_DEMO = Written("a demo", DEMO_RESULTS, '"retrofit"', _beyond_demo)

__all__ = [
    "DEMO_ATTENTION",
    "DEMO_LOSSES",
    "DEMO_MODEL",
    "DEMO_RESULTS",
    "OTHER_PATTERNS",
    "RECORD",
    "SIDE_FILES",
    "SOURCE_CODE",
    "TOKENIZER_FILES",
    "TOKENIZER_PATTERNS",
    "WRITTEN_ADAPTER",
    "WRITTEN_DEMO",
    "WRITTEN_MODEL",
    "weight_bytes",
]
