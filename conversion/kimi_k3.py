"""Convert released checkpoints of Kimi K3 to directories that the Auto classes load, and back.

Such a conversion keeps the bytes of every tensor, those of the vision part and packed experts included. It changes
`config.json`, and adds the model's code. The text model alone names Kimi Linear's model type in its `config.json`; its
result is in the composite layout, whose tensors have a prefix.
"""

import json
import math
import re
import warnings
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor
from transformers import PreTrainedConfig
from transformers.utils import CONFIG_NAME

from attnres import AttnResKimiK3Config, AttnResKimiK3ForCausalLM, AttnResKimiK3Model
from attnres.configuration_attnres import is_kimi_k3
from attnres.decoder_attnres import auto_map
from attnres.kimi_k3_configuration_attnres import COMPOSITE
from attnres.kimi_k3_layout_attnres import PREFIX, check_scales, prefix_of, read_release, released_shapes
from attnres.utils.quiet import quiet_transformers

from .checkpoint import DTYPES, Checkpoint, Entry
from .source_code import AUTO_MAP, references
from .source_files import check_text, read_object

# The file of a result that keeps what `--to released` restores.
RECORD = "released_config.json"
# Fields of the text model that a composite `config.json` repeats.
_REPEATED = ("dtype", "torch_dtype", "bos_token_id", "eos_token_id", "pad_token_id", "tie_word_embeddings")
_PACKED, _SCALE = "_packed", "_scale"
# Names of one layer's parts in checkpoints that a training run resumes from. Published names differ.
_OF_TRAINING = re.compile(r"\.forget_gate\.|\.experts\.(gate_up|down)_proj$|\.self_attn\.conv1d\.")


def refuse_disguised(folder: Path, source: Any) -> None:
    """Raise ValueError if a directory holds Kimi K3, but the Auto classes would build another model from it.

    Args:
        folder: The directory, which has a `config.json`.
        source: The directory or Hub id as the user gave it, for the message.
    """
    fields = read_object(folder / CONFIG_NAME)
    if fields.get("model_type") != AttnResKimiK3Config.model_type and is_kimi_k3(fields):
        raise ValueError(
            f"{source} holds Kimi K3, but its {CONFIG_NAME} names the model type {fields.get('model_type')!r}, under "
            f"which transformers would build another model. `attnres convert {source} OUT` writes a directory that "
            "loads as Kimi K3."
        )


def read_kimi_k3_config(path: Path) -> AttnResKimiK3Config:
    """Return the configuration in a `config.json` of Kimi K3, in any of the released layouts.

    Raises:
        OSError: The file is damaged.
        ValueError: A field is wrong. The message names the file and the field.
    """
    try:
        config = AttnResKimiK3Config.from_dict(read_object(path))
        config.check_fields()
    except ValueError as error:
        raise ValueError(f"{path} cannot be used: {error}") from error
    return config


class _TensorInFile:
    """A tensor of a checkpoint: shape and dtype are those in the header, and values are read on demand.

    It has the methods of a slice of a safetensors file, which [`read_release`] takes.
    """

    def __init__(self, path: Path, entry: Entry):
        self.path, self.entry = path, entry

    def get_shape(self) -> list[int]:
        """Return the shape."""
        return list(self.entry.shape)

    def get_dtype(self) -> str:
        """Return the dtype as safetensors names it."""
        return self.entry.dtype

    def __getitem__(self, index: Any) -> Tensor:
        if self.path.suffix != ".safetensors":
            # Values in pickles stay unread: they are checked when the model is loaded.
            return torch.zeros(self.entry.shape, dtype=DTYPES.get(self.entry.dtype))[index]
        with safe_open(self.path, framework="pt") as file:
            return file.get_slice(self.entry.name)[index]


def has_published_names(checkpoint: Checkpoint) -> bool:
    """Return whether a checkpoint of Kimi K3 has released names, and not those of a training run's checkpoint."""
    return not any(_OF_TRAINING.search(name) for name in checkpoint.entries)


def has_head(checkpoint: Checkpoint, config: AttnResKimiK3Config) -> bool:
    """Return whether a checkpoint of Kimi K3 is that of a causal language model, not of a decoder by itself."""
    names = {f"{prefix}lm_head.weight" for prefix in ("", PREFIX)}
    return bool(config.tie_word_embeddings or names & checkpoint.entries.keys())


def unused_tensors(checkpoint: Checkpoint, config: AttnResKimiK3Config) -> frozenset[str]:
    """Check that a released checkpoint holds the whole text model, and return the names of its other tensors.

    Headers are compared, and the padding of each `A_log` is read. No other value is.

    Args:
        checkpoint: The headers of the weights.
        config: The configuration.

    Returns:
        The names of tensors of a vision part, of layers for multi-token prediction, and of unknown ones.

    Raises:
        ValueError: A tensor is missing, has another shape or dtype than it must have, or is packed where it may not
            be. The message names tensor and file.
    """
    tensors = {name: _TensorInFile(checkpoint.where[name].path, entry) for name, entry in checkpoint.entries.items()}
    with_head = has_head(checkpoint, config)
    try:
        # What is left out or not read is reported from the result of this function.
        with quiet_transformers(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            read_release(config, tensors, with_head)
    except ValueError as error:
        named = re.search("`([^`]+)`", str(error))
        is_there = named is not None and named[1] in checkpoint.where
        raise ValueError(f"{checkpoint.where[named[1]].path if is_there else checkpoint.folder}: {error}") from error
    prefix = prefix_of(tensors)
    used = {prefix + name for name in released_shapes(config)}
    used |= {name + part for name in used for part in (_PACKED, _SCALE)}
    return frozenset(tensors.keys() - used)


def check_packed(values: Tensor, entry: Entry, path: Path) -> None:
    """Raise ValueError if a piece of a tensor holds scales of packed experts that cannot be decoded.

    Args:
        values: The bytes of the piece, uint8.
        entry: The tensor.
        path: The file.
    """
    if entry.name.endswith(_SCALE):
        check_scales(f"{path}: `{entry.name}`", values)


def is_packed(checkpoint: Checkpoint) -> bool:
    """Return whether experts of a checkpoint are packed."""
    return any(name.endswith(_PACKED) for name in checkpoint.entries)


def count_parameters(config: AttnResKimiK3Config, with_head: bool = True) -> int:
    """Return the number of values in the text model's tensors, with `A_log` unpadded and experts unpacked."""
    shapes = released_shapes(config)
    return sum(math.prod(shape) for name, shape in shapes.items() if with_head or not name.startswith("lm_head."))


def describe_layout(config: AttnResKimiK3Config, checkpoint: Checkpoint | None = None) -> str:
    """Return a sentence for the model card on the layout of Kimi K3's weights.

    Args:
        config: The configuration.
        checkpoint: The headers of the weights. By default the weights are those that `save_pretrained` writes.
    """
    entries = {} if checkpoint is None else checkpoint.entries
    is_composite = bool(prefix_of(entries)) if entries else config.checkpoint_layout == COMPOSITE
    parts = ["composite model, under `language_model`" if is_composite else "text model alone"]
    parts += ["with routed experts packed as MXFP4"] if checkpoint is not None and is_packed(checkpoint) else []
    if any(name.startswith(("vision_tower.", "mm_projector.")) for name in entries):
        parts.append("with a vision part that this code does not read")
    return f"The weights are in the released layout of Kimi K3's {', '.join(parts)}."


def model_class(with_head: bool) -> type[AttnResKimiK3Model] | type[AttnResKimiK3ForCausalLM]:
    """Return the class of a model of Kimi K3 with or without a head."""
    return AttnResKimiK3ForCausalLM if with_head else AttnResKimiK3Model


def loadable_config(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a `config.json` by which the Auto classes load Kimi K3.

    Args:
        fields: Those of the source: of the composite model, or of its text model alone.

    Returns:
        The fields of the composite model with the `auto_map` of the code that a result has.
    """
    added = {AUTO_MAP: auto_map(AttnResKimiK3ForCausalLM), "model_type": AttnResKimiK3Config.model_type}
    if "text_config" in fields:
        return {**fields, **added}
    text = {name: value for name, value in fields.items() if name not in (AUTO_MAP, "transformers_version")}
    text["model_type"] = AttnResKimiK3Config.backbone
    outer = {name: text[name] for name in _REPEATED if name in text}
    return {"architectures": ["KimiK3ForConditionalGeneration"], **added, **outer, "text_config": text}


def make_record(folder: Path, has_new_prefix: bool) -> str:
    """Return the content of the file `RECORD`: what a conversion back needs.

    Args:
        folder: The source's directory.
        has_new_prefix: Whether the result's tensors have a prefix that those of the source do not have.
    """
    text = (folder / CONFIG_NAME).read_text(encoding="utf-8")
    record = {"text_of_config.json": text, "prefix_added": PREFIX if has_new_prefix else ""}
    return json.dumps(record, indent=2, ensure_ascii=False) + "\n"


def read_record(folder: Path) -> tuple[str, str] | None:
    """Return the text of the released `config.json` and the prefix that a conversion added to names of tensors.

    It is None if the directory has no record, or if its `config.json` was changed since: by a run that trained the
    model, for example.

    Args:
        folder: The directory.

    Raises:
        OSError: The record is damaged.
    """
    path = folder / RECORD
    if not path.exists() and not path.is_symlink():
        return None
    check_text(folder, path)
    record = read_object(path)
    text, prefix = record.get("text_of_config.json"), record.get("prefix_added")
    try:
        fields = json.loads(text)
        is_whole = isinstance(fields, dict) and prefix in ("", PREFIX)
    except (RecursionError, TypeError, ValueError):
        is_whole = False
    if not is_whole:
        raise OSError(f"{path} is damaged. Copy it again, or remove it.")
    return (text, prefix) if loadable_config(fields) == read_object(folder / CONFIG_NAME) else None


def refuse_options(flags: Collection[str], back: str | None, config: PreTrainedConfig, folder: Path) -> None:
    """Raise ValueError if options of a conversion do not fit its source.

    Args:
        flags: The options of a retrofit and of a change of connections that the user gave, as `--block-size`.
        back: The value of `--to`.
        config: The source's configuration.
        folder: The source's directory.
    """
    if not isinstance(config, AttnResKimiK3Config):
        if back == "released":
            raise ValueError(
                f"{folder} is of model type {config.model_type!r}, but --to released gives back a release of Kimi K3. "
                "--to standard undoes a retrofit."
            )
        return
    if flags:
        raise ValueError(
            f"{folder} is Kimi K3, which is converted as it is and takes no retrofit. Leave out {' and '.join(flags)}."
        )
    if back == "standard":
        raise ValueError(
            f"{folder} is Kimi K3, and no standard decoder of transformers computes the same function. --to released "
            "undoes a conversion."
        )


def left_code(fields: Mapping[str, Any], folder: Path) -> list[str]:
    """Return the references to code in a released `config.json`, which does not come along."""
    return references(dict(fields), folder / CONFIG_NAME)


def add_prefix(name: str) -> str:
    """Return the name that a tensor of the text model alone has in the composite layout."""
    return PREFIX + name if name.startswith(("model.", "lm_head.")) else name


def remove_prefix(name: str) -> str:
    """Undo [`add_prefix`]."""
    return name.removeprefix(PREFIX)


__all__ = [
    "RECORD",
    "add_prefix",
    "check_packed",
    "count_parameters",
    "describe_layout",
    "has_head",
    "has_published_names",
    "is_packed",
    "left_code",
    "loadable_config",
    "make_record",
    "model_class",
    "read_kimi_k3_config",
    "read_record",
    "refuse_disguised",
    "refuse_options",
    "remove_prefix",
    "unused_tensors",
]
