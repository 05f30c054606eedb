"""Count the parameters of a configuration, without allocating them: the model is built on the meta device.

    activated = all - (1 - top_k / experts) * (parameters of the routed experts)

Training builds the same model, so the counts cannot differ from the code.
"""

from dataclasses import dataclass

import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig


@dataclass(frozen=True)
class ParameterCount:
    """Numbers of parameters of a causal language model. Buffers, such as a router's correction bias, do not count.

    Attributes:
        total: All parameters, the AttnRes tensors included. Tied parameters count once.
        non_embedding: `total` without the token embedding and the output projection (`lm_head`).
        activated_non_embedding: The part of `non_embedding` that one token uses: `top_k` of the routed experts, and
            everything else, routers and shared experts included.
    """

    total: int
    non_embedding: int
    activated_non_embedding: int


def count_parameters(config: PreTrainedConfig) -> ParameterCount:
    """Count the parameters of a configuration's causal language model.

    Args:
        config: A configuration of the family or of `transformers`.
    """
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    # Tied parameters count once: `parameters()` of a model yields them once, and this is a set.
    embeddings = {*model.get_input_embeddings().parameters(), *model.get_output_embeddings().parameters()}
    # `MixtralExperts`, `KimiLinearExperts`, ...: one module holds all routed experts of a layer, stacked along axis 0.
    # Each model of `transformers` has its own class for it, and they have no common parent.
    routed_experts = [module for module in model.modules() if type(module).__name__.endswith("Experts")]

    total = _size(model.parameters())
    non_embedding = total - _size(embeddings)
    idle = sum(
        _size(experts.parameters()) // experts.num_experts * (experts.num_experts - config.num_experts_per_tok)
        for experts in routed_experts
    )
    return ParameterCount(total, non_embedding, non_embedding - idle)


def _size(parameters) -> int:
    return sum(parameter.numel() for parameter in parameters)


__all__ = ["ParameterCount", "count_parameters"]
