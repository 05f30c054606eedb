"""Find the weights of a model that adapters are for: the matrices in its decoder layers, without routers."""

from torch import nn
from torch.nn.modules.conv import _ConvNd
from transformers import PreTrainedModel

# The names that models of `transformers` have for a router of experts.
_ROUTERS = ("gate", "router")


def projections(model: PreTrainedModel) -> list[str]:
    """Return the names of the linear layers in the decoder layers, without routers: `self_attn.q_proj`."""
    names = set()
    for layer in _decoder_layers(model):
        for name, module in layer.named_modules():
            if isinstance(module, nn.Linear) and not _is_router(layer, name):
                names.add(name)
    return sorted(names)


def expert_weights(model: PreTrainedModel) -> list[str]:
    """Return the names of the stacked weights `[experts, ., .]` in the decoder layers: `mlp.experts.gate_up_proj`."""
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
    """Return the weights `[experts, ., .]` that a module itself holds, by name."""
    if isinstance(module, _ConvNd):  # kernels of convolutions have three axes too
        return {}
    weights = module.named_parameters(recurse=False)
    return {name: weight for name, weight in weights if weight.ndim == 3 and weight.is_floating_point()}


def _is_router(layer: nn.Module, name: str) -> bool:
    """Return whether a linear layer is a router: it, or a module that it is in, is named so and lies beside experts.

    A router's number of outputs, that of the experts, does not tell: projections may have as many.
    """
    parts = name.split(".")
    for i, part in enumerate(parts):
        siblings = layer.get_submodule(".".join(parts[:i])).children()
        if part in _ROUTERS and any(_stacked_weights(module) for module in siblings):
            return True
    return False


def count_adapters(model: PreTrainedModel, rank: int) -> list[int]:
    """Count the values of the adapters of each decoder layer, if all its matrices have one.

    Args:
        model: The model; it may be on the meta device.
        rank: The rank of the adapters on linear layers. Experts have the rank of
            [`attnres.training.lora.add_adapters`].
    """
    modules, stacks = projections(model), expert_weights(model)
    of_experts = expert_rank_of(model, rank)
    counts = []
    for layer in _decoder_layers(model):
        parameters = dict(layer.named_parameters())
        matrices = [parameters[f"{name}.weight"] for name in modules if f"{name}.weight" in parameters]
        stacked = [parameters[name] for name in stacks if name in parameters]
        count = sum(rank * sum(weight.shape) for weight in matrices)
        counts.append(count + sum(of_experts * len(weight) * sum(weight.shape[1:]) for weight in stacked))
    return counts


def expert_rank_of(model: PreTrainedModel, rank: int) -> int:
    """Return the rank of each expert's adapter beside a rank of linear layers.

    It is divided by the number of experts that a token is sent to, and is at least 1.
    """
    return max(1, rank // (getattr(model.config, "num_experts_per_tok", None) or 1))


__all__ = ["count_adapters", "expert_rank_of", "expert_weights", "projections"]
