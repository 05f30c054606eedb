"""Build the part of a model that one device has, without data: the shapes of its tensors, by the model's own code."""

import re
from contextlib import AbstractContextManager
from copy import deepcopy
from dataclasses import dataclass

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode  # the name in PyTorch's guide; there is no public one
from transformers import AutoModelForCausalLM, PreTrainedModel

from attnres import AttnResKimiK3Config, ResidualConfig
from attnres.decoder_attnres import ResidualDecoderLayer

from .adapters import add_adapters
from .kernels import CAUSAL, FLASH, use_stand_ins

# Styles of tensor parallelism in `transformers` -> the dimension of a weight that is sharded. These shard the
# activations too.
_SHARDED = {"colwise": -2, "packed_colwise": -2, "rowwise": -1, "packed_rowwise": -1}
# All styles that shard weights. The others gather their outputs or split their inputs, so that activations are whole
# on every device.
WEIGHT_STYLES = {**_SHARDED, "colwise_gather_output": -2, "rowwise_split_input": -1, "embedding_rowwise": -2}


@dataclass(frozen=True)
class Batch:
    """The tokens of one pass, and how it runs.

    Attributes:
        rows: Number of sequences.
        length: Tokens of each sequence in this pass.
        past: Tokens of each sequence that the cache holds already; 0 in training.
        training: Whether a backward pass follows. If not, the pass fills a cache.
        dtype: Dtype of weights and activations.
        tensor: Number of devices that share each matrix, by the model's rules of tensor parallelism.
        fused: Whether attention runs in the kernels of GPUs, for which `kernels` has stand-ins. If not, the pass is
            that of a CPU.
        lora: The rank of adapters beside frozen weights; `None` if all weights are trained.
        packed: Whether the routed experts of Kimi K3 are packed, beside adapters.
    """

    rows: int = 1
    length: int = 4096
    past: int = 0
    training: bool = True
    dtype: torch.dtype = torch.bfloat16
    tensor: int = 1
    fused: bool = True
    lora: int | None = None
    packed: bool = False


def without_data(batch: Batch) -> AbstractContextManager:
    """Return a context in which tensors have no data.

    The meta device is ten times as fast as `FakeTensorMode`, but some operations of a CPU do not know it.
    """
    return torch.device("meta") if batch.fused else FakeTensorMode()


def build(config: ResidualConfig, batch: Batch) -> PreTrainedModel:
    """Build the part of a model that one device has, without data. Call it inside [`without_data`].

    Args:
        config: The configuration of the whole model.
        batch: The pass to trace. Its `tensor` is the number of devices that share the matrices.

    Returns:
        The model in the dtype of `batch`, in training or inference mode.

    Raises:
        ValueError: The matrices cannot be sharded.
    """
    config = deepcopy(config)
    # Every implementation keeps the same tensors, and only this one runs without data.
    config.depth_attention_implementation = "eager"
    if isinstance(config, AttnResKimiK3Config):
        # A batch says whether experts are packed.
        config.packed_experts = batch.packed
    attention = FLASH if batch.fused else CAUSAL if batch.training else "sdpa"
    model = AutoModelForCausalLM.from_config(config, dtype=batch.dtype, attn_implementation=attention)
    model.train(batch.training)
    if batch.fused:
        use_stand_ins(model)
    if batch.tensor > 1:
        _shard(model, batch.tensor)
    if batch.lora is not None:
        add_adapters(model, batch.lora)
    return model


def layers_of(model: PreTrainedModel) -> list[ResidualDecoderLayer]:
    """Return the decoder layers of a model of [`build`]."""
    return [module for module in model.modules() if isinstance(module, ResidualDecoderLayer)]


def sharded_dimension(name: str, rules: dict[str, str], styles: dict[str, int]) -> int | None:
    """Return the dimension of a parameter that rules of tensor parallelism shard, or `None`.

    Args:
        name: The parameter's name.
        rules: The rules of `transformers`: names of modules or parameters, with `*` for numbers, and their styles.
        styles: The styles to consider, with their dimensions.
    """
    name = re.sub(r"\.\d+\.", ".*.", name)
    style = rules.get(name, rules.get(name.rpartition(".")[0]))
    # The bias after a sharded sum is whole.
    return None if style is None or (name.endswith(".bias") and styles.get(style) == -1) else styles.get(style)


def tensor_rules(model: PreTrainedModel) -> dict[str, str]:
    """Return the rules of tensor parallelism that `transformers` applies to a model."""
    return {name: style for name, style in (model.tp_plan or {}).items() if style}


def _shard(model: PreTrainedModel, tensor: int) -> None:
    """Replace each sharded matrix by one device's part of it."""
    rules, config = tensor_rules(model), model.config
    for name, parameter in [*model.named_parameters()]:
        dimension = sharded_dimension(name, rules, _SHARDED)
        if dimension is None:
            continue
        shape, dimension = [*parameter.shape], max(dimension, -parameter.ndim)
        names = ("num_attention_heads", "num_key_value_heads") if ".mlp." not in name else ()
        heads = [(f"`{field}`", getattr(config, field, None) or tensor) for field in names]
        for shared, size in [(f"a dimension of {name}", shape[dimension]), *heads]:
            if size % tensor:
                raise ValueError(f"{tensor} devices cannot share {shared}, which is {size}: it must be a multiple.")
        shape[dimension] //= tensor
        # Products of routed experts, `[experts, ...]`, are aligned to 16 bytes.
        if parameter.ndim == 3 and shape[dimension] * parameter.dtype.itemsize % 16:
            raise ValueError(
                f"{tensor} devices cannot share {name}: rows of {shape[dimension]} are not multiples of 8."
            )
        owner = model.get_submodule(name.rpartition(".")[0])
        part = nn.Parameter(parameter.new_empty(shape), requires_grad=True)
        setattr(owner, name.rpartition(".")[2], part)


__all__ = ["WEIGHT_STYLES", "Batch", "build", "sharded_dimension", "layers_of", "tensor_rules", "without_data"]
