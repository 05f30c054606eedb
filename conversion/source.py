"""Open the source of a conversion: its checkpoint and its configuration, each read and checked once.

A checkpoint of a training run has the parameters of its model under their names. Some published checkpoints have other
names and other tensors, for example one tensor for each expert instead of one for all. Conversions read only published
names, so a training checkpoint is rewritten first.
"""

from dataclasses import dataclass, replace
from pathlib import Path

from safetensors.torch import load_file, save_file
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.conversion_mapping import get_checkpoint_conversion_mapping
from transformers.core_model_loading import revert_weight_conversion

from attnres import BACKBONES, ResidualConfig
from attnres.checkpoints.checkpoint import Checkpoint, make_checkpoint, open_checkpoint
from attnres.checkpoints.complete import empty_model, explain_config, read_config
from attnres.checkpoints.generation_settings import read_generation_config
from attnres.checkpoints.kimi_k3 import is_released
from attnres.checkpoints.shards import explain_writing, read_shard
from attnres.utils.files import check_space

from .family import member_config


@dataclass(frozen=True)
class ConversionSource:
    """A checkpoint in its published layout, and its configuration.

    Attributes:
        checkpoint: The headers of the weights. The weights themselves stay in their files.
        config: The configuration, after the checks of [`attnres.checkpoints.complete.read_config`].
    """

    checkpoint: Checkpoint
    config: PreTrainedConfig

    @property
    def folder(self) -> Path:
        """The directory of the model, for messages."""
        return self.checkpoint.folder


def open_source(folder: Path, scratch: Path) -> ConversionSource:
    """Open the directory of a model that is to be converted.

    Args:
        folder: The directory. Nothing in it is changed.
        scratch: An empty directory for weights that have to be rewritten first: legacy pickles, and checkpoints of
            training runs.

    Returns:
        The checkpoint and its configuration.

    Raises:
        OSError: A file is missing, truncated or damaged, or `scratch` has too little space.
        ValueError: The configuration or the settings of generation cannot be used, or the weights cannot be read
            without running code.
    """
    checkpoint = open_checkpoint(folder, scratch)
    config = read_config(checkpoint)
    read_generation_config(folder)  # the result gets these settings
    model = unpublished_model(checkpoint, config)
    if model is not None:
        checkpoint = _with_published_names(checkpoint, model, scratch)
    return ConversionSource(checkpoint, config)


def unpublished_model(checkpoint: Checkpoint, config: PreTrainedConfig) -> PreTrainedModel | None:
    """Return the model of a checkpoint if the tensors have the names of its parameters instead of published names.

    Args:
        checkpoint: The headers of the weights.
        config: The checkpoint's configuration.

    Returns:
        The model on the meta device, or None if the names are published names.

    Raises:
        ValueError: The configuration holds a wrong value.
    """
    # `transformers` needs a model to rename tensors. The family's model has the same names as its standard decoder.
    if not isinstance(config, ResidualConfig) and config.model_type in BACKBONES:
        config = member_config(config)
    is_quantized = getattr(config, "quantization_config", None) is not None
    if is_quantized or not isinstance(config, ResidualConfig):
        return None
    if is_released(checkpoint, config):
        return None  # the model need not be built, which has hundreds of thousands of tensors
    # Most model types publish the names of their parameters, which is known without building the model.
    if not get_checkpoint_conversion_mapping(config.model_type):
        return None
    with explain_config(checkpoint.folder):
        model = empty_model(config, checkpoint)
    names, state = checkpoint.entries.keys(), model.state_dict()
    published = revert_weight_conversion(model, state).keys()
    # The two layouts share many names. The names that only one of them has tell them apart.
    is_unpublished = (state.keys() - published) & names and not (published - state.keys()) & names
    return model if is_unpublished else None


def _with_published_names(checkpoint: Checkpoint, model: PreTrainedModel, scratch: Path) -> Checkpoint:
    """Rewrite a checkpoint under its published names in `scratch`, shard by shard."""
    check_space(scratch.parent, checkpoint.num_bytes)
    folder, shards = scratch / "published", []
    folder.mkdir()
    for shard in checkpoint.shards:
        # `load_file` maps the file into memory, so a shard may be larger than the memory.
        held = {n: tensor for n, tensor in load_file(shard.path).items() if checkpoint.where.get(n) is shard}
        tensors = {n: tensor.contiguous() for n, tensor in revert_weight_conversion(model, held).items()}
        with explain_writing(folder / shard.path.name):
            save_file(tensors, folder / shard.path.name, shard.metadata)
        shards.append(replace(read_shard(folder / shard.path.name), original=shard.source))
    return make_checkpoint(checkpoint.folder, shards, is_temporary=True)


__all__ = ["ConversionSource", "open_source", "unpublished_model"]
