"""Stand-ins for adapters, which keep the same tensors for the backward pass as those of `attnres.training.lora`.

A plan needs neither PEFT nor data: tokens are spread evenly over the routed experts.
"""

from types import MethodType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from attnres.configuration.adapted import expert_rank_of, expert_weights, projections
from attnres.decoder_attnres import ResidualDecoderLayer
from attnres.kimi_k3_attnres import KimiK3Experts, KimiK3PackedExperts
from attnres.residual_attnres import residual_tensors

# Kimi K3 has 896 experts. Several are traced as one with all of their tokens, which keeps the same bytes.
_GROUPS = 16
_A, _B = "_adapter_a", "_adapter_b"  # the ends of the names of the factors, in the module that they adapt


def add_adapters(model: PreTrainedModel, rank: int) -> None:
    """Freeze a model, and add adapters to all its projections and routed experts.

    The tensors of residual connections are trained whole, in float32.

    Args:
        model: The model, without data. It is changed in place.
        rank: The rank of the adapters on linear layers.
    """
    residual = {id(tensor) for tensor in residual_tensors(model).values()}
    for module in model.modules():
        for name, parameter in [*module.named_parameters(recurse=False)]:
            is_trained = id(parameter) in residual
            kept = torch.empty_like(parameter, dtype=torch.float32) if is_trained else parameter.detach()
            setattr(module, name, nn.Parameter(kept, requires_grad=is_trained))
    names, stacks, expert_rank = projections(model), expert_weights(model), expert_rank_of(model, rank)
    for layer in model.modules():
        if not isinstance(layer, ResidualDecoderLayer):
            continue
        for name, module in layer.named_modules():
            if name in names and isinstance(module, nn.Linear):
                rows, columns = module.weight.shape
                _add_factors(module, "weight", rows, columns, rank)
                module.register_forward_hook(_adapt_output)
            elif isinstance(module, (KimiK3Experts, KimiK3PackedExperts)):
                width, latent = module.intermediate_dim, module.hidden_dim
                for stack, shape in (("gate_up_proj", (2 * width, latent)), ("down_proj", (latent, width))):
                    _add_factors(module, stack, *shape, expert_rank * module.num_experts)
                module.forward = MethodType(_one_after_another, module)
            elif adapted := [stack for stack in ("gate_up_proj", "down_proj") if f"{name}.{stack}" in stacks]:
                for stack in adapted:
                    count, rows, columns = getattr(module, stack).shape
                    _add_factors(module, stack, rows, columns, expert_rank * count)
                module.forward = MethodType(_with_merged_stacks, module)


def _add_factors(module: nn.Module, name: str, rows: int, columns: int, rank: int) -> None:
    """Add the factors A `[rank, columns]` and B `[rows, rank]` of the adapter of a weight to its module."""
    for end, shape in ((_A, (rank, columns)), (_B, (rows, rank))):
        module.register_parameter(name + end, nn.Parameter(torch.empty(shape, dtype=torch.float32)))


def _adapt_output(linear: nn.Linear, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
    """Add the output of an adapter to that of a linear layer, as PEFT does: in float32."""
    a, b = getattr(linear, f"weight{_A}"), getattr(linear, f"weight{_B}")
    return (output + F.linear(F.linear(inputs[0].to(a.dtype), a), b) * 1.0).to(output.dtype)


def _one_after_another(
    experts: KimiK3Experts | KimiK3PackedExperts, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
) -> Tensor:
    """Compute the experts of Kimi K3 with their adapters, one after another, as a training run does."""
    result, count = torch.zeros_like(hidden_states), experts.num_experts
    groups = max(number for number in range(1, _GROUPS + 1) if count % number == 0)
    factors = {}
    for name in ("gate_up_proj", "down_proj"):
        a, b = getattr(experts, name + _A), getattr(experts, name + _B)
        factors[name] = a.view(groups, -1, a.shape[1]).unbind(0), b.view(len(b), -1, groups).unbind(-1)

    def project(name: str, group: int, x: Tensor) -> Tensor:
        product = experts.project(name, group, x)
        a, b = (factor[group] for factor in factors[name])
        if groups < count:  # the factors of one expert
            rank = len(a) * groups // count
            a, b = a[:rank], b[:, :rank]
        return product + (1.0 * F.linear(F.linear(x.to(a.dtype), a), b)).to(product.dtype)

    each, more = divmod(top_k_index.numel(), groups)
    for expert in range(groups if each else more):
        tokens, choices = (torch.zeros(each + (expert < more), dtype=torch.long) for _ in range(2))
        output = experts._apply_gate(project("gate_up_proj", expert, hidden_states[tokens]))
        output = project("down_proj", expert, output) * top_k_weights[tokens, choices, None]
        result.index_add_(0, tokens, output.to(result.dtype))
    return result


def _with_merged_stacks(experts: Any, *arguments: Any) -> Tensor:
    """Compute experts with weights to which their adapters are added in each pass, as PEFT does."""
    stacks = {name.removesuffix(_A) for name in experts._parameters if name.endswith(_A)}
    weights = {name: experts._parameters.pop(name) for name in stacks}
    try:
        for name, weight in weights.items():
            a, b = experts._parameters[name + _A], experts._parameters[name + _B]
            outer = b.view(len(b), -1, len(weight)).permute(2, 0, 1).to(weight.dtype)
            inner = a.view(len(weight), -1, a.shape[1]).to(weight.dtype)
            vars(experts)[name] = torch.baddbmm(weight, outer, inner)
        return type(experts).forward(experts, *arguments)
    finally:
        for name, weight in weights.items():
            vars(experts).pop(name, None)
            experts._parameters[name] = weight


__all__ = ["add_adapters"]
