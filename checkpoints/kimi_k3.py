"""Check directories of Kimi K3 by `config.json` and the headers of the weights, without loading them.

A directory may be in any of the released layouts: the composite model, or the text model alone, which names Kimi
Linear's model type in its `config.json`.
"""

import math
import re
import warnings
from collections.abc import Generator, Iterable
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor
from transformers import PreTrainedConfig
from transformers.utils import CONFIG_NAME

from attnres import AttnResKimiK3Config, AttnResKimiK3ForCausalLM, AttnResKimiK3Model
from attnres.kimi_k3_configuration_attnres import COMPOSITE
from attnres.kimi_k3_layout_attnres import PREFIX, prefix_of, read_release, read_vision
from attnres.kimi_k3_packed_attnres import NVFP4
from attnres.kimi_k3_shapes_attnres import released_shapes
from attnres.kimi_k3_vision_configuration_attnres import is_of_vision, vision_shapes
from attnres.residual_attnres import FamilyWarning

from .checkpoint import Checkpoint
from .shards import DTYPES, StoredTensor

_PARTS = [f"_{part}" for part in NVFP4.parts]  # of a packed weight: those of MXFP4, and one more
# Names of one layer's parts in checkpoints that a training run resumes from. Published names differ.
_OF_TRAINING = re.compile(r"\.forget_gate\.|\.experts\.(gate_up|down)_proj$|\.self_attn\.conv1d\.")


def check_kimi_k3(checkpoint: Checkpoint) -> None:
    """Raise ValueError if a checkpoint is Kimi K3 with a wrong field, or the Auto classes would build another model."""
    if not checkpoint.is_kimi_k3:
        return
    model_type = checkpoint.fields.get("model_type")
    if model_type != AttnResKimiK3Config.model_type:
        raise ValueError(
            f"{checkpoint.name} holds Kimi K3, but its {CONFIG_NAME} names the model type {model_type!r}, under which "
            f"transformers would build another model. `attnres convert {checkpoint.name} OUT` writes a directory that "
            "loads as Kimi K3."
        )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of unknown fields that are kept; loading warns of them
        _ = checkpoint.config


class _TensorInFile:
    """A tensor of a checkpoint: shape and dtype are those in the header, and values are read on demand.

    It has the methods of a slice of a safetensors file, which [`read_release`] takes.
    """

    def __init__(self, path: Path, entry: StoredTensor):
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


def is_released(checkpoint: Checkpoint, config: PreTrainedConfig) -> bool:
    """Return whether a checkpoint is Kimi K3 under released names, and not under those of a training run's checkpoint.

    Args:
        checkpoint: The headers of the weights.
        config: The configuration.
    """
    is_kimi_k3 = isinstance(config, AttnResKimiK3Config)
    return is_kimi_k3 and not any(_OF_TRAINING.search(name) for name in checkpoint.entries)


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
    tensors, with_head = _in_files(checkpoint), has_head(checkpoint, config)
    # The parts that are left out are reported from the result of this function.
    with _naming_the_file(checkpoint), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Left out of the checkpoint", FamilyWarning)
        read_release(config, tensors, with_head)
    prefix = prefix_of(tensors)
    used = {prefix + name for name in released_shapes(config)}
    used |= {name + part for name in used for part in _PARTS}
    return frozenset(tensors.keys() - used)


def check_vision(checkpoint: Checkpoint, config: AttnResKimiK3Config) -> frozenset[str]:
    """Check the vision part of a checkpoint, and return the names of the tensors that it reads, or none.

    Args:
        checkpoint: The headers of the weights.
        config: The configuration.

    Raises:
        ValueError: A tensor is missing, or has another shape or dtype than it must have, and the message names tensor
            and file; or a field of the vision part has a value that is not allowed.
    """
    vision: Any = config.vision_config
    if vision is None or not _has_vision(checkpoint.entries):
        return frozenset()
    vision.check_fields()
    with _naming_the_file(checkpoint):
        used = vision_shapes(vision, config.hidden_size)
        return frozenset(used.keys() & read_vision(config, _in_files(checkpoint)).keys())


def _in_files(checkpoint: Checkpoint) -> dict[str, _TensorInFile]:
    """Return the tensors of a checkpoint by name, whose values are read on demand."""
    return {name: _TensorInFile(checkpoint.where[name].path, entry) for name, entry in checkpoint.entries.items()}


@contextmanager
def _naming_the_file(checkpoint: Checkpoint) -> Generator[None]:
    """Add to an error on a tensor of a checkpoint the name of its file."""
    try:
        yield
    except ValueError as error:
        named = re.search("`([^`]+)`", str(error))
        shard = checkpoint.where.get(named[1]) if named is not None else None
        raise ValueError(f"{checkpoint.folder if shard is None else shard.source}: {error}") from error


def is_packed(checkpoint: Checkpoint) -> bool:
    """Return whether experts of a checkpoint are packed."""
    return any(name.endswith("_packed") for name in checkpoint.entries)


def count_parameters(config: AttnResKimiK3Config, with_head: bool = True) -> int:
    """Return the number of values in the text model's tensors, with `A_log` unpadded and experts unpacked."""
    shapes = released_shapes(config)
    return sum(math.prod(shape) for name, shape in shapes.items() if with_head or not name.startswith("lm_head."))


def describe_layout(config: PreTrainedConfig, checkpoint: Checkpoint | None = None) -> str | None:
    """Return a sentence for the model card on the layout of Kimi K3's weights; None for another model.

    Args:
        config: The configuration.
        checkpoint: The headers of the weights. By default the weights are those that `save_pretrained` writes.
    """
    if not isinstance(config, AttnResKimiK3Config):
        return None
    entries = {} if checkpoint is None else checkpoint.entries
    is_composite = bool(prefix_of(entries)) if entries else config.checkpoint_layout == COMPOSITE
    parts = ["composite model, under `language_model`" if is_composite else "text model alone"]
    if checkpoint is not None and is_packed(checkpoint):
        parts.append(f"with routed experts packed as {config.packing.title}")
    if _has_vision(entries):
        parts.append("with a vision part, which `AutoModelForImageTextToText` loads")
    return f"The weights are in the released layout of Kimi K3's {', '.join(parts)}."


def describe_left_out(checkpoint: Checkpoint, config: AttnResKimiK3Config) -> str | None:
    """Return a sentence on the parts of a release that a model trained from it does not have; None if it has all.

    Args:
        checkpoint: The headers of the release's weights.
        config: The configuration of the model.
    """
    parts = ["the vision part is left out"] if _has_vision(checkpoint.entries) else []
    parts += ["packed experts are saved unpacked"] if is_packed(checkpoint) and not config.packed_experts else []
    return f"Of the source, {' and '.join(parts)}." if parts else None


def _has_vision(names: Iterable[str]) -> bool:
    """Return whether some names of tensors are those of Kimi K3's vision part."""
    return any(map(is_of_vision, names))


def model_class(with_head: bool) -> type[AttnResKimiK3Model] | type[AttnResKimiK3ForCausalLM]:
    """Return the class of a model of Kimi K3 with or without a head."""
    return AttnResKimiK3ForCausalLM if with_head else AttnResKimiK3Model


__all__ = [
    "check_kimi_k3",
    "check_vision",
    "count_parameters",
    "describe_layout",
    "describe_left_out",
    "has_head",
    "is_packed",
    "is_released",
    "model_class",
    "unused_tensors",
]
