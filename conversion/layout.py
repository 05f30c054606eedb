"""The published layout of a checkpoint whose tensors have its model's own names, as in those that a run goes on from.

A published layout may name experts one by one, for example, where the model has one tensor of all.
"""

from pathlib import Path

from safetensors.torch import load_file, save_file
from transformers.conversion_mapping import get_checkpoint_conversion_mapping
from transformers.core_model_loading import revert_weight_conversion

from attnres import BACKBONES, ResidualConfig

from .checkpoint import Checkpoint, check_space, explain_writing, make_checkpoint, read_shard
from .complete import empty_model, explain_config, read_config
from .family import member_config


def in_published_layout(checkpoint: Checkpoint, scratch: Path) -> Checkpoint:
    """The checkpoint as it is or, if its tensors have own names that are not published ones, rewritten in `scratch`.

    Files are mapped into memory rather than read.

    Raises:
        OSError, ValueError: the configuration cannot be used, or there is too little space.
    """
    config = read_config(checkpoint)
    if not isinstance(config, ResidualConfig) and config.model_type in BACKBONES:
        config = member_config(config)
    if getattr(config, "quantization_config", None) is not None or not isinstance(config, ResidualConfig):
        return checkpoint
    if not get_checkpoint_conversion_mapping(config.model_type):
        return checkpoint
    with explain_config(checkpoint.folder):
        model = empty_model(config, checkpoint)
    own = model.state_dict()
    published, names = revert_weight_conversion(model, own).keys(), checkpoint.entries.keys()
    if not (own.keys() - published) & names or (published - own.keys()) & names:
        return checkpoint
    check_space(scratch, checkpoint.num_bytes)
    folder, shards = scratch / "published", []
    folder.mkdir()
    for shard in checkpoint.shards:
        held = {n: tensor for n, tensor in load_file(shard.path).items() if checkpoint.where.get(n) is shard}
        tensors = {n: tensor.contiguous() for n, tensor in revert_weight_conversion(model, held).items()}
        with explain_writing(folder / shard.path.name):
            save_file(tensors, folder / shard.path.name, shard.metadata)
        shards.append(read_shard(folder / shard.path.name))
    return make_checkpoint(checkpoint.folder, shards, is_temporary=True)


__all__ = ["in_published_layout"]
