"""Count the parameters of a configuration, without allocating them: the model is built on the meta device.

    activated = all - (1 - top_k / experts) * (parameters of the routed experts)

Training builds the same model, so the counts cannot differ from the code. They count what a checkpoint stores. That
includes the routing biases of Kimi Linear and Kimi K3, which are buffers here and parameters in the releases.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from attnres.mtp_attnres import MultiTokenPrediction


@dataclass(frozen=True)
class ParameterCount:
    """Numbers of parameters of a causal language model, by what a checkpoint of it stores.

    Attributes:
        total: All parameters, the AttnRes tensors included, and floating-point buffers that are saved, such as a
            router's biases. Tied parameters count once.
        non_embedding: `total` without the token embedding and the output projection (`lm_head`).
        activated_non_embedding: The part of `non_embedding` that one token uses: `top_k` of the routed experts, and
            everything else, routers and shared experts included. A layer for multi-token prediction is among it only if
            its loss is trained.
    """

    total: int
    non_embedding: int
    activated_non_embedding: int


def count_parameters(config: PreTrainedConfig) -> ParameterCount:
    """Count the parameters of a configuration's causal language model.

    Args:
        config: A configuration of the family or of `transformers`.

    Returns:
        The counts. `total` is the number of values in the floating-point tensors of a checkpoint.
    """
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    embeddings = [
        *model.get_input_embeddings().named_parameters(),
        *model.get_output_embeddings().named_parameters(),
    ]
    total = count_stored(model)
    non_embedding = total - count_values(embeddings)
    idle = count_idle(model, config)
    ahead = MultiTokenPrediction.layer(model)
    if ahead is not None and not config.mtp_loss_weight:  # a forward pass does not run it
        idle += count_stored(ahead) - count_idle(ahead, config)
    return ParameterCount(total, non_embedding, non_embedding - idle)


def count_idle(module: nn.Module, config: PreTrainedConfig) -> int:
    """Return the number of parameters in a module's routed experts that one token does not use."""
    # `MixtralExperts`, `KimiLinearExperts`, ...: one module holds all routed experts of a layer, stacked along axis 0.
    # Each model of `transformers` has its own class for it, and they have no common parent.
    routed: list[Any] = [part for part in module.modules() if type(part).__name__.endswith("Experts")]
    return sum(
        count_values(experts.named_parameters())
        // experts.num_experts
        * (experts.num_experts - config.num_experts_per_tok)
        for experts in routed
    )


def count_stored(model: nn.Module) -> int:
    """Return the number of values in a model's checkpoint, those of packed weights too; tied ones count once."""
    # `keep_vars` gives the parameters themselves for every name.
    return count_values(model.state_dict(keep_vars=True).items())


def count_loaded(model: PreTrainedModel) -> int:
    """Return the number of parameters as `num_parameters` does, with packed weights in place of their bytes."""
    packed = [(name, tensor) for name, tensor in model.named_parameters() if name.endswith(("_packed", "_scale"))]
    return model.num_parameters() - sum(tensor.numel() for _, tensor in packed) + count_values(packed)


def count_values(named_tensors: Iterable[tuple[str, Tensor]]) -> int:
    """Count the values of floating-point tensors and of packed weights; a tensor with several names counts once."""
    names = {tensor: name for name, tensor in named_tensors}
    return sum(_values(name, tensor) for tensor, name in names.items())


def _values(name: str, tensor: Tensor) -> int:
    # The codes of packed experts have four bits. Their scales are no parameters of the model.
    if tensor.dtype is torch.uint8:
        return 2 * tensor.numel() if name.endswith("_packed") else 0
    return tensor.numel() if tensor.is_floating_point() else 0


__all__ = ["ParameterCount", "count_idle", "count_loaded", "count_parameters", "count_stored", "count_values"]
