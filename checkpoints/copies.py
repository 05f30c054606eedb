"""Prepare the weights of a checkpoint to be copied: as safetensors, under the names of published checkpoints.

A checkpoint of a training run has the parameters of its model under their names. Some published checkpoints have other
names and other tensors, for example one tensor for each expert instead of one for all. Conversions read only published
names, so a training checkpoint is rewritten first.
"""

import json
from dataclasses import replace
from pathlib import Path

from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_checkpoint_conversion_mapping
from transformers.core_model_loading import revert_weight_conversion
from transformers.utils import SAFE_WEIGHTS_NAME

from attnres import BACKBONES, ResidualConfig
from attnres.utils.errors import about
from attnres.utils.files import check_space

from .checkpoint import NAMED_WEIGHTS, WEIGHTS, Checkpoint
from .complete import empty_model
from .kimi_k3 import is_released
from .pickles import read_pickle
from .shards import DTYPES, Shard, read_shard


def copyable(checkpoint: Checkpoint, scratch: Path) -> Checkpoint:
    """Return a checkpoint whose files of weights can be copied: safetensors beside `config.json`, published names.

    Weights that are not such files are rewritten, without running code from them.

    Args:
        checkpoint: The source. Nothing in it is changed.
        scratch: An empty directory for rewritten files.

    Returns:
        The source itself, or the same checkpoint with rewritten weights.

    Raises:
        FileNotFoundError: There are no weights, or the index names a file or tensor that does not exist.
        OSError: A file is truncated or damaged, or `scratch` has too little space.
        ValueError: A pickle runs code when it is loaded, or the configuration names another file of weights.
    """
    check_files_of_weights(checkpoint)
    if any(shard.path.suffix != ".safetensors" for shard in checkpoint.shards):
        checkpoint = _without_pickles(checkpoint, scratch)
    model = unpublished_model(checkpoint)
    return checkpoint if model is None else _with_published_names(checkpoint, model, scratch)


def check_files_of_weights(checkpoint: Checkpoint) -> None:
    """Raise unless the weights have their usual names and lie beside `config.json`. The result gets the same names."""
    folder = checkpoint.folder
    named_file = checkpoint.fields.get(NAMED_WEIGHTS)
    usual = next((name for name in WEIGHTS if (folder / name).exists()), SAFE_WEIGHTS_NAME)
    if named_file not in (None, usual):
        raise ValueError(
            f"{checkpoint.config_path} names its weights by `{NAMED_WEIGHTS}`: {json.dumps(named_file)}, not by their "
            f"usual name. Remove the field, or rename the file that it names to {usual}."
        )
    if checkpoint.index is None:
        return
    index, suffix = checkpoint.weights_path, ".bin" if usual.endswith(".bin.index.json") else ".safetensors"
    for file in sorted(set(checkpoint.index["weight_map"].values())):
        path = folder / file
        if file in ("", ".", "..") or Path(file).name != file:
            raise ValueError(f"{index} names {file or chr(34) * 2}, which does not lie beside it. Move it there.")
        if path.suffix != suffix or path.is_dir():
            raise ValueError(f"{index} names {file}, which is not a {suffix} file of weights. Copy the index again.")


def _without_pickles(checkpoint: Checkpoint, scratch: Path) -> Checkpoint:
    """Rewrite legacy files as safetensors in `scratch`."""
    check_space(scratch.parent, checkpoint.num_bytes)
    shards: list[Shard] = []
    for i, shard in enumerate(checkpoint.shards, 1):
        count = len(checkpoint.shards)
        path = scratch / (SAFE_WEIGHTS_NAME if count == 1 else f"model-{i:05d}-of-{count:05d}.safetensors")
        with about(shard.path):  # tensors that safetensors cannot hold are refused only here
            tensors = read_pickle(shard.path, DTYPES.values())
            with about(path):
                save_file(tensors, path, {"format": "pt"})
        shards.append(replace(read_shard(path), original=shard.path))
    return checkpoint.with_shards(shards)


def unpublished_model(checkpoint: Checkpoint) -> PreTrainedModel | None:
    """Return the model of a checkpoint if the tensors have the names of its parameters instead of published names.

    Args:
        checkpoint: The checkpoint.

    Returns:
        The model on the meta device, or None if the names are published names.

    Raises:
        ValueError: The configuration holds a wrong value.
    """
    config = checkpoint.config
    is_quantized = getattr(config, "quantization_config", None) is not None
    is_ours = isinstance(config, ResidualConfig)
    # Most model types publish the names of their parameters, which is known without building the model.
    if (
        is_quantized
        or not (is_ours or config.model_type in BACKBONES)
        or not get_checkpoint_conversion_mapping(config.model_type)
        or is_released(checkpoint, config)  # the model would have hundreds of thousands of tensors
    ):
        return None
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
        path = folder / shard.path.name
        with about(path):
            save_file(tensors, path, shard.metadata)
        shards.append(replace(read_shard(path), original=shard.source))
    return checkpoint.with_shards(shards)


__all__ = ["check_files_of_weights", "copyable", "unpublished_model"]
