"""Retrofit in memory: the same weights under another residual connection, computing the same function.

With zero pseudo-queries every source weighs the same, so that with `scale="sum"` a sublayer reads

    h_l = n * sum_i (1/n) s_i = v_0 + v_1 + ... + v_{l-1},

the standard residual stream, term by term and for every block size.
"""

import math
import os

import torch
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from attnres import AttnResConfig, AttnResForCausalLM
from attnres.loading_attnres import attn_res_tensors

# Backbone model type -> the AttnRes class on that backbone.
SUPPORTED: dict[str, type[PreTrainedModel]] = {
    "kimi_linear": AttnResForCausalLM,
    AttnResConfig.model_type: AttnResForCausalLM,  # with residual_connection="standard"
}
DEFAULT_NUM_BLOCKS = 8  # "about 8 blocks recover most of the gain" (AttnRes, section 3)


def retrofit(
    model_or_path: PreTrainedModel | str | os.PathLike,
    *,
    block_size: int | None = None,
    num_blocks: int | None = None,
    full: bool = False,
    scale: str = "sum",
) -> PreTrainedModel:
    """Put attention residuals into a standard-residual causal language model.

    Args:
        model_or_path: the model, or the directory or Hub id of one (loaded in the dtype it is stored in).
        block_size: block size S in sublayers, two per decoder layer.
        num_blocks: instead of `block_size`, the number of blocks: `S = ceil(2 * layers / num_blocks)`.
        full: instead of either, Full AttnRes, `S = 1`. With none of the three, 8 blocks.
        scale: `"sum"` computes the same function as the model; `"mean"` only up to the epsilons of its norms.

    Returns:
        The AttnRes model. It **shares** its backbone weights with the given model: training one changes the other.

    Raises:
        ValueError: the backbone is not supported, has another residual connection already or is offloaded, or the block
            size is given more than once or is not positive.
    """
    source = model_or_path
    if not isinstance(source, PreTrainedModel):
        source = AutoModelForCausalLM.from_pretrained(model_or_path, dtype="auto")
    _check_supported(source)
    block_size = _block_size(source.config, block_size, num_blocks, full)

    model_class = SUPPORTED[source.config.model_type]
    fields = source.config.to_dict()
    for field in ("model_type", "architectures", "auto_map", "transformers_version"):
        fields.pop(field, None)
    fields |= {"residual_connection": "attn_res", "attn_res_block_size": block_size, "attn_res_scale": scale}
    config = model_class.config_class.from_dict(fields, attn_implementation=source.config._attn_implementation)

    with torch.device("meta"):
        model = model_class(config)
    _share_tensors(model, source)
    for name, tensor in attn_res_tensors(model).items():
        start = torch.ones if name.endswith("_norm.weight") else torch.zeros
        value = start(tensor.shape, dtype=source.dtype, device=_device_beside(source, name))
        model.get_submodule(name.rpartition(".")[0]).weight = nn.Parameter(value)
    model.tie_weights()
    model.generation_config = source.generation_config
    return model.train(source.training)


def _check_supported(source: PreTrainedModel) -> None:
    model_type = source.config.model_type
    if model_type not in SUPPORTED or not source.can_generate():
        raise ValueError(
            f"cannot retrofit {type(source).__name__} (model type {model_type!r}): supported are causal LMs "
            f"of the model types {', '.join(map(repr, sorted(SUPPORTED)))}."
        )
    connection = getattr(source.config, "residual_connection", "standard")
    if connection != "standard":
        raise ValueError(f"the model has residual_connection={connection!r} already; retrofit takes a 'standard' one.")
    offloaded = [name for name, parameter in source.named_parameters() if parameter.is_meta]
    if offloaded:
        raise ValueError(f"`{offloaded[0]}` is offloaded or on the meta device; load the model without `device_map`.")


def _block_size(config: PreTrainedConfig, block_size: int | None, num_blocks: int | None, full: bool) -> int:
    """The block size in sublayers that the arguments of `retrofit` ask for."""
    given = {"block_size": block_size, "num_blocks": num_blocks, "full": full or None}
    given = {name: value for name, value in given.items() if value is not None}
    if len(given) > 1:
        raise ValueError(f"give one of block_size, num_blocks and full, not {' and '.join(given)}.")
    if full:
        return 1
    for name, value in given.items():
        if value < 1:
            raise ValueError(f"`{name}` is {value}, but must be an integer >= 1.")
    return block_size or math.ceil(2 * config.num_hidden_layers / (num_blocks or DEFAULT_NUM_BLOCKS))


def _share_tensors(model: nn.Module, source: nn.Module) -> None:
    """Make every tensor of `source` that of the same name in `model`, whose own are on the meta device."""
    shared = source.state_dict(keep_vars=True)
    # `assign` gives the shared parameters the requires_grad of the ones they replace.
    for name, parameter in model.named_parameters():
        if name in shared:
            parameter.requires_grad_(shared[name].requires_grad)
    incompatible = model.load_state_dict(shared, strict=False, assign=True)
    missing = sorted(set(incompatible.missing_keys) - set(attn_res_tensors(model)))
    if missing or incompatible.unexpected_keys:
        raise ValueError(f"the backbone's tensors do not fit: missing {missing}, left {incompatible.unexpected_keys}.")


def _device_beside(source: PreTrainedModel, name: str) -> torch.device:
    """The device of the decoder layer that the tensor `name` belongs to, or of the final norm."""
    parent = name.rsplit(".", 2)[0]
    owner = source.get_submodule(parent)
    owner = owner.norm if hasattr(owner, "layers") else owner
    return next(owner.parameters()).device


__all__ = ["SUPPORTED", "retrofit"]
