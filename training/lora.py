"""Adapters with PEFT: LoRA on what the decoder's layers multiply by, and the AttnRes tensors themselves.

    W + (alpha / rank) B A        for each projection, and for each expert's part of a stacked weight

Pseudo-queries and key norms are too small to factorise: they are trained whole, and saved with the adapter.
"""

import re
from collections.abc import Collection

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import nn
from torch.nn.modules.conv import _ConvNd
from transformers import PreTrainedModel

from attnres.loading_attnres import attn_res_tensors


def add_adapters(
    model: PreTrainedModel,
    *,
    rank: int = 16,
    alpha: float | None = None,
    dropout: float = 0.0,
    targets: Collection[str] | None = None,
    experts: bool = True,
    expert_rank: int | None = None,
) -> PeftModel:
    """Wrap a causal language model, of the family or standard, so that only adapters and AttnRes tensors are trained.

    The result is an ordinary PEFT model: `save_pretrained` writes the adapter, `PeftModel.from_pretrained` loads it on
    the base model, and `merge_and_unload` gives a model without PEFT. What is trained is kept in float32, whatever the
    dtype of the base model.

    PEFT adds an adapter's `B A` to a layer's stacked experts in every forward pass, which takes the memory of one more
    copy of them. An `expert_rank` as large as `rank` would make the adapter of a model with many experts large.

    Args:
        rank: of the adapters on linear layers.
        alpha: adapters are scaled by `alpha / rank`; `2 * rank` by default. The experts' have the same scale.
        dropout: on the input of the adapters; PEFT has none for experts.
        targets: only these of the projections that [`projections`] and [`expert_weights`] find, by the ends of their
            names: `("q_proj", "shared_experts.up_proj")`.
        experts: also adapt the stacked weights of the experts.
        expert_rank: of each expert's adapter; by default `rank` over the number of experts that a token is sent to,
            and at least 1.

    Raises:
        ValueError: a rank is not positive; a target is not found; there is nothing to adapt; or dropout with experts.
    """
    if rank < 1 or (expert_rank is not None and expert_rank < 1):
        raise ValueError(f"the rank is {rank} and that of experts {expert_rank}, but a rank must be at least 1.")
    modules = projections(model)
    parameters = expert_weights(model) if experts else []
    if targets is not None:
        modules, parameters = _chosen(modules, parameters, targets)
    if not modules and not parameters:
        raise ValueError(f"{type(model).__name__} has no projection in its decoder layers to add an adapter to.")
    if dropout and parameters:
        raise ValueError(
            f"dropout is {dropout}, but adapters of experts have none: set it to 0, or leave out the experts."
        )
    alpha = 2 * rank if alpha is None else alpha
    options = {"r": rank, "lora_alpha": alpha}
    if parameters:
        per_token = getattr(model.config, "num_experts_per_tok", None) or 1
        expert_rank = expert_rank or max(1, rank // per_token)
        # PEFT warns, wrongly, of patterns that match parameters only: the experts' rank is the general one.
        options = {"r": expert_rank, "lora_alpha": alpha * expert_rank / rank}
        patterns = [re.escape(name) for name in modules]
        options |= {"rank_pattern": dict.fromkeys(patterns, rank), "alpha_pattern": dict.fromkeys(patterns, alpha)}
    config = LoraConfig(
        task_type="CAUSAL_LM",
        lora_dropout=dropout,
        target_modules=modules,
        target_parameters=parameters or None,
        modules_to_save=sorted({name.split(".")[-2] for name in attn_res_tensors(model)}) or None,
        **options,
    )
    adapted = get_peft_model(model, config)
    # PEFT does this for LoRA's own tensors only. In 16 bits small steps of a pseudo-query would be lost.
    for tensor in attn_res_tensors(adapted).values():
        if tensor.requires_grad and tensor.dtype in (torch.float16, torch.bfloat16):
            tensor.data = tensor.data.float()
    return adapted


def projections(model: PreTrainedModel) -> list[str]:
    """The linear layers within the decoder layers, by their names there: `self_attn.q_proj`. No router is one."""
    names = set()
    for layer in _decoder_layers(model):
        for name, module in layer.named_modules():
            if isinstance(module, nn.Linear) and not _is_router(layer, name):
                names.add(name)
    return sorted(names)


def expert_weights(model: PreTrainedModel) -> list[str]:
    """The stacked weights `[experts, ., .]` within the decoder layers: `mlp.experts.gate_up_proj`."""
    names = set()
    for layer in _decoder_layers(model):
        for name, module in layer.named_modules():
            names.update(f"{name}.{parameter}" for parameter in _stacked_weights(module))
    return sorted(names)


def _decoder_layers(model: PreTrainedModel) -> nn.ModuleList:
    layers = getattr(model.base_model, "layers", None)
    if not isinstance(layers, nn.ModuleList):
        raise ValueError(f"the decoder of {type(model).__name__} does not keep its layers in `layers`.")
    return layers


def _stacked_weights(module: nn.Module) -> dict[str, nn.Parameter]:
    if isinstance(module, _ConvNd):  # whose kernels have three axes too
        return {}
    return {name: weight for name, weight in module.named_parameters(recurse=False) if weight.ndim == 3}


def _is_router(layer: nn.Module, name: str) -> bool:
    """Whether a linear layer has one output for each of the experts that stand beside it."""
    siblings = layer.get_submodule(name.rpartition(".")[0]).children()
    experts = {len(weight) for module in siblings for weight in _stacked_weights(module).values()}
    return layer.get_submodule(name).out_features in experts and bool(experts)


def _chosen(modules: list[str], parameters: list[str], targets: Collection[str]) -> tuple[list[str], list[str]]:
    targets = [targets] if isinstance(targets, str) else list(targets)

    def ends(name: str, target: str) -> bool:
        return f".{name}".endswith(f".{target}")

    for target in targets:
        if not any(ends(name, target) for name in (*modules, *parameters)):
            raise ValueError(f"no projection is named {target!r}; there are {', '.join((*modules, *parameters))}.")
    return tuple([name for name in names if any(ends(name, t) for t in targets)] for names in (modules, parameters))


__all__ = ["add_adapters", "expert_weights", "projections"]
