"""Counts the parameters of a configuration without allocating them: the model is built on the meta device.

    activated = all - (1 - top_k / experts) * (parameters of the routed experts)

The same model is built for training, so the counts cannot drift from the code.
"""

from dataclasses import dataclass

import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig


@dataclass(frozen=True)
class ParameterCount:
    """Parameters of a causal language model; buffers, such as the router's correction bias, are not parameters.

    Attributes:
        total: every parameter, the AttnRes tensors included. Tied parameters count once.
        non_embedding: `total` without the token embedding and without the output projection (`lm_head`).
        activated_non_embedding: of `non_embedding`, what one token passes through: `top_k` of all routed experts, and
            the whole of everything else, routers and shared experts included.
    """

    total: int
    non_embedding: int
    activated_non_embedding: int


def count_parameters(config: PreTrainedConfig) -> ParameterCount:
    """Count the parameters of the causal language model of a configuration, of the family or of `transformers`."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    # `parameters()` of the whole names a tied parameter once; the set does so for the two embeddings.
    embeddings = {*model.get_input_embeddings().parameters(), *model.get_output_embeddings().parameters()}
    # `MixtralExperts`, `KimiLinearExperts`, ...: all of a layer's routed experts, stacked along the first axis.
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
