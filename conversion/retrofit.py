"""Retrofit in memory: the same weights under another residual connection, computing the same function.

With zero pseudo-queries every source weighs the same, so that with `scale="sum"` a sublayer reads

    h_l = n * sum_i (1/n) s_i = v_0 + v_1 + ... + v_{l-1},

the standard residual stream, term by term and for every block size.
"""

import os

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from attnres.loading_attnres import attn_res_tensors

from .family import initial_tensor, retrofit_config


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
        block_size: block size S in sublayers, two per decoder layer (one where attention and MLP are parallel).
        num_blocks: instead of `block_size`, the number of blocks: `S = ceil(sublayers / num_blocks)`.
        full: instead of either, Full AttnRes, `S = 1`. With none of the three, 8 blocks.
        scale: `"sum"` computes the same function as the model; `"mean"` only up to the epsilons of its norms.

    Returns:
        The AttnRes model. It **shares** its backbone weights with the given model: training one changes the other.

    Raises:
        ValueError: the backbone is not supported, has another residual connection already, is quantised or offloaded,
            or the block size is given more than once or is not positive.
    """
    source = model_or_path
    if not isinstance(source, PreTrainedModel):
        source = AutoModelForCausalLM.from_pretrained(model_or_path, dtype="auto")
    config = retrofit_config(source.config, block_size=block_size, num_blocks=num_blocks, full=full, scale=scale)
    _check_loaded(source)
    implementations = {
        "attn_implementation": source.config._attn_implementation,
        "experts_implementation": source.config._experts_implementation,
    }

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=source.dtype, **implementations)
    _share_tensors(model, source)
    for name, tensor in attn_res_tensors(model).items():
        value = initial_tensor(name, tensor.shape, source.dtype, _device_beside(source, name))
        model.get_submodule(name.rpartition(".")[0]).weight = nn.Parameter(value)
    model.tie_weights()
    model.generation_config = source.generation_config
    return model.train(source.training)


def _check_loaded(source: PreTrainedModel) -> None:
    if not source.can_generate():
        raise ValueError(f"{type(source).__name__} is not a causal language model; load it as one.")
    if getattr(source, "hf_quantizer", None) is not None:
        raise ValueError(
            "the model is quantised; `attnres convert` retrofits its directory, which then loads quantised."
        )
    offloaded = [name for name, parameter in source.named_parameters() if parameter.is_meta]
    if offloaded:
        raise ValueError(f"`{offloaded[0]}` is offloaded or on the meta device; load the model without `device_map`.")


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
    for name, buffer in source.named_buffers():
        if name not in shared:  # not persistent: frequencies of the rotary embedding, scale of the token embedding
            owner, _, key = name.rpartition(".")
            model.get_submodule(owner).register_buffer(key, buffer, persistent=False)
            # Dynamic rotary embeddings keep beside their frequencies the length that those are for.
            numbers = {key: value for key, value in vars(source.get_submodule(owner)).items() if _is_number(value)}
            vars(model.get_submodule(owner)).update(numbers)


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float, Tensor)) and not isinstance(value, bool)


def _device_beside(source: PreTrainedModel, name: str) -> torch.device:
    """The device of the decoder layer that the tensor `name` belongs to, or of the final norm."""
    parent = name.rsplit(".", 2)[0]
    owner = source.get_submodule(parent)
    if hasattr(owner, "layers"):  # the decoder: the final norm follows its last layer
        owner = owner.layers[-1]
    return next(owner.parameters()).device


__all__ = ["retrofit"]
