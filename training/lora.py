"""Adapters with PEFT: LoRA on the weights of the decoder's layers, beside the residual connections' tensors.

    W + (alpha / rank) B A        for each projection, and for each expert's part of a stacked weight

The tensors of residual connections, such as pseudo-queries, are small: they are trained whole, and saved with the
adapter. PEFT would freeze them, like every weight that is not a target, unless `modules_to_save` names them.
"""

import math
import re
import warnings
from collections.abc import Collection, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import safe_open
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from transformers import PreTrainedModel
from transformers.utils import ADAPTER_SAFE_WEIGHTS_NAME

from attnres import peft_modules_to_save
from attnres.configuration.adapted import expert_rank_of, expert_weights, projections
from attnres.mtp_attnres import MultiTokenPrediction
from attnres.residual_attnres import FamilyWarning, residual_tensors
from attnres.utils.extras import require_extra

from .settings import LoraSettings, explained

with require_extra("train"):
    from peft import LoraConfig, PeftModel, get_peft_model, get_peft_model_state_dict
    from peft.tuners.lora import LoraLayer, ParamWrapper

    from .lora_experts import EXPERTS, packed_stacks, take_more_adapters, use_wrappers
    from .lora_experts import ParamWrapper as ExpertWrapper


_OWN_BASE = "Load it on its own base, which its adapter_config.json names."


def add_adapters(
    model: PreTrainedModel,
    *,
    rank: int = 16,
    alpha: float | None = None,
    dropout: float = 0.0,
    targets: Collection[str] | None = None,
    experts: bool = True,
    expert_rank: int | None = None,
    shared_outer: bool = False,
) -> PeftModel:
    """Wrap a causal language model, of the family or standard, so that only adapters and residual tensors are trained.

    The result is an ordinary PEFT model: `save_pretrained` writes the adapter, `PeftModel.from_pretrained` loads it on
    the base model, and `merge_and_unload` gives a model without PEFT. Trained tensors are float32, whatever the dtype
    of the base model.

    The adapters of Kimi K3's experts are computed for the chosen experts alone. These experts may be packed. For other
    models PEFT adds an adapter's `B A` to a layer's stacked experts in every forward pass, which takes the memory of
    one more copy of them. An `expert_rank` as large as `rank` would make the adapter of a model with many experts
    large.

    The model may be sharded among processes, or be a part of a pipeline. Each process then has the whole adapter of
    the layers that it computes, in plain tensors.

    Args:
        model: The base model, which is changed in place.
        rank: The rank of the adapters on linear layers.
        alpha: All adapters are scaled by `alpha / rank`, also those of experts. By default `2 * rank`.
        dropout: The dropout on the input of the adapters. PEFT has none for experts.
        targets: The weights to adapt, by the ends of their names: `("q_proj", "shared_experts.up_proj")`. By default
            all that [`projections`] and [`expert_weights`] find.
        experts: Whether to adapt the stacked weights of the experts too.
        expert_rank: The rank of each expert's adapter. By default `rank` divided by the number of experts that a token
            is sent to, and at least 1.
        shared_outer: Whether all experts of a layer of Kimi K3 share the factor that reads the latent space, A of
            `gate_up_proj`, and the factor that writes to it, B of `down_proj`. The saved adapter has a copy of them for
            each expert, as PEFT reads it.

    Returns:
        The PEFT model.

    Raises:
        ValueError: A rank is not positive, a target is not found, there is nothing to adapt, dropout is set together
            with experts, or `shared_outer` without experts of Kimi K3.
    """
    with explained("the adapters"):
        LoraSettings(rank=rank, alpha=alpha, dropout=dropout, targets=targets, expert_rank=expert_rank)
    modules = projections(model)
    with packed_stacks(model):
        parameters = expert_weights(model) if experts else []
    if targets is not None:
        targets = [targets] if isinstance(targets, str) else list(targets)
        residual = sorted({target for target in targets if target.split(".")[-1] in peft_modules_to_save(model)})
        if residual:
            raise ValueError(
                f"{' and '.join(map(repr, residual))} cannot have an adapter: the tensors of residual connections "
                "are trained whole beside any adapter. Leave them out of the targets."
            )
        modules, parameters = _chosen(modules, parameters, targets)
    if not modules and not parameters:
        raise ValueError(f"{type(model).__name__} has no projection in its decoder layers to add an adapter to.")
    # PEFT would adapt the experts in place of these. It leaves names of weights as they are.
    renamed = [name for name in modules if name.split(".")[-1] in _names_that_peft_changes(model)]
    modules, weights = [name for name in modules if name not in renamed], [f"{name}.weight" for name in renamed]
    if dropout and (parameters or weights):
        kind, remedy = ("experts", ", or leave out the experts") if parameters else (" and ".join(renamed), "")
        raise ValueError(f"dropout is {dropout}, but adapters of {kind} have none: set it to 0{remedy}.")
    alpha = 2 * rank if alpha is None else alpha
    options: dict[str, Any] = {"r": rank, "lora_alpha": alpha}
    if parameters:
        expert_rank = expert_rank or expert_rank_of(model, rank)
        # `r` is the rank of the experts, and patterns set the rank of the projections. The other way round, PEFT would
        # warn that the patterns match no module, since experts are parameters.
        options = {"r": expert_rank, "lora_alpha": alpha * expert_rank / rank}
        # One pattern for all, because PEFT would also warn of one that matches `weights` alone.
        if names := [*modules, *weights]:
            pattern = "|".join(map(re.escape, names))
            options |= {"rank_pattern": {pattern: rank}, "alpha_pattern": {pattern: alpha}}
    config = LoraConfig(
        task_type="CAUSAL_LM",
        lora_dropout=dropout,
        target_modules=modules,
        target_parameters=[*parameters, *weights] or None,
        modules_to_save=peft_modules_to_save(model) or None,
        **options,
    )
    is_kimi_k3 = parameters and any(isinstance(module, EXPERTS) for module in model.modules())
    if shared_outer and not is_kimi_k3:
        raise ValueError("`shared_outer` is for adapters of Kimi K3's experts: leave it out.")
    if parameters and not is_kimi_k3 and (getattr(_sharding(model), "ep_size", None) or 1) > 1:
        raise ValueError(
            f"experts of {type(model).__name__} cannot have adapters with expert parallelism: leave out `ep_size`, or "
            "set `experts` of the adapters to false."
        )
    use_wrappers(config, shared_outer)
    with warnings.catch_warnings(), packed_stacks(model), _whole_residual_tensors(model):
        # PEFT 0.21 reads a property by the name that `transformers` has deprecated.
        warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is deprecated", FutureWarning)
        adapted = get_peft_model(model, config)
    take_more_adapters(adapted)
    MultiTokenPrediction.freeze(model)  # without its loss, its adapters would have no gradient
    # PEFT keeps only LoRA's tensors in float32. In 16 bits small steps of a pseudo-query would be lost.
    for tensor in residual_tensors(adapted).values():
        if tensor.requires_grad and tensor.dtype in (torch.float16, torch.bfloat16):
            tensor.data = tensor.data.float()
    return adapted


def load_adapter(model: PreTrainedModel, folder: str | Path) -> PeftModel:
    """Load an adapter onto its base model, whose experts may be packed.

    `PeftModel.from_pretrained` of PEFT does so too for a model without packed experts.

    Args:
        model: The base model, which is changed in place.
        folder: The folder of the adapter.

    Returns:
        The PEFT model, for inference.

    Raises:
        ValueError: The adapter does not have exactly the tensors that its configuration declares for this model, or
            some have other shapes.
    """
    config = cast(LoraConfig, LoraConfig.from_pretrained(str(folder)))
    use_wrappers(config)
    with warnings.catch_warnings(), packed_stacks(model):
        warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is deprecated", FutureWarning)
        warnings.filterwarnings("ignore", "Found missing adapter keys")
        try:
            adapted = PeftModel.from_pretrained(model, str(folder), config=config)
        except (KeyError, RuntimeError) as error:
            reason = " ".join(str(error).split())
            raise ValueError(f"{folder} is an adapter of another base model ({reason}). {_OWN_BASE}") from error
    take_more_adapters(adapted)
    # PEFT only warns of missing tensors, and says nothing of others: the adapter would have no effect there.
    with safe_open(Path(folder, ADAPTER_SAFE_WEIGHTS_NAME), "pt") as file:
        if different := {*file.keys()} ^ get_peft_model_state_dict(adapted).keys():
            raise ValueError(
                f"{folder} is an adapter of another base model (one of them lacks {min(different)}). {_OWN_BASE}"
            )
    return adapted


def merge_adapters(adapted: PeftModel) -> PreTrainedModel:
    """Merge adapters into the weights of the base model, which may be sharded among processes.

    All processes call it together, each with the whole adapter. Packed experts with an adapter are packed again, and a
    warning says how far this moved them.

    Args:
        adapted: The PEFT model.

    Returns:
        The base model, which is changed in place, and sharded as before.

    Raises:
        ValueError: The model has adapters on experts that are packed as NVFP4.
    """
    adapted.state_dict()  # FSDP2 puts the parts of parameters into the modules before it reads them
    for module in adapted.modules():
        if isinstance(module, LoraLayer):
            base = module.get_base_layer()
            weight = getattr(base, module.parameter_name if isinstance(module, ParamWrapper) else "weight", None)
            if isinstance(weight, DTensor):
                for parts in (module.lora_A, module.lora_B):
                    for part in parts.values():
                        part.weight = _replicated(part.weight, weight.device_mesh)
    wrappers = [module for module in adapted.modules() if isinstance(module, ExpertWrapper)]
    model = cast(PreTrainedModel, adapted.merge_and_unload())
    merged, changed, lost = (math.sqrt(sum(wrapper.moved[i] for wrapper in wrappers)) for i in range(3))
    if merged:
        message = (
            f"the adapters moved the weights of experts by {changed / merged:.2g} of their norm, and packing these "
            f"again moved them by {lost / merged:.2g}. Where that is too much, keep the adapter apart from its base, "
            "or merge it into unpacked experts (`config.packed_experts=false` in a recipe)."
        )
        warnings.warn(message, FamilyWarning, stacklevel=2)
    return model


def _replicated(tensor: Any, mesh: DeviceMesh) -> Any:
    """Return a plain tensor, the same in all processes, for operations with sharded ones."""
    if isinstance(tensor, DTensor):
        return tensor
    whole = DTensor.from_local(tensor.detach(), mesh, [Replicate()] * mesh.ndim, run_check=False)
    return nn.Parameter(whole, requires_grad=False)


@contextmanager
def _whole_residual_tensors(model: PreTrainedModel) -> Generator[None]:
    """Put whole tensors in place of sharded ones into the residual connections while PEFT copies these.

    FSDP2 gathers the parameters that it has sharded, and would leave copies of them in parts.
    """
    residual = {id(tensor) for tensor in residual_tensors(model).values()}
    sharded: list[tuple[nn.Module, str, Any]] = [
        (module, name, parameter)
        for module in model.modules()
        for name, parameter in module.named_parameters(recurse=False)
        if id(parameter) in residual and isinstance(parameter, DTensor)
    ]
    for module, name, parameter in sharded:
        module._parameters[name] = nn.Parameter(parameter.detach().full_tensor())
    try:
        yield
    finally:
        for module, name, parameter in sharded:
            parameter.requires_grad_(False)
            module._parameters[name] = parameter


def _sharding(model: PreTrainedModel) -> Any:
    """Return how `transformers` has sharded a model; `None` if it has not."""
    return getattr(model.config, "distributed_config", None)


def _names_that_peft_changes(model: PreTrainedModel) -> Collection[str]:
    """Return the ends of names that PEFT takes for those of experts in earlier releases of `transformers`.

    For a model type with experts, PEFT reads a target `gate_proj` as all experts' parts of `gate_up_proj`. So it would
    miss the linear layers of that name, in dense layers and in shared experts. There is no public name for its table.
    """
    from peft.utils import transformers_weight_conversion as conversion

    pattern = conversion._MODEL_TO_CONVERSION_PATTERN.get(model.config.model_type, "")
    return conversion._MOE_TARGET_MODULE_MAPPING.get(pattern, {}).keys()


def _chosen(modules: list[str], parameters: list[str], targets: Collection[str]) -> tuple[list[str], list[str]]:
    """Return the modules and the parameters whose names end in a target. Raise ValueError if a target matches none."""

    def is_chosen(name: str, target: str) -> bool:
        return f".{name}".endswith(f".{target}")

    for target in targets:
        if not any(is_chosen(name, target) for name in (*modules, *parameters)):
            raise ValueError(f"no projection is named {target!r}; there are {', '.join((*modules, *parameters))}.")
    chosen_modules, chosen_parameters = (
        [name for name in names if any(is_chosen(name, target) for target in targets)]
        for names in (modules, parameters)
    )
    return chosen_modules, chosen_parameters


__all__ = ["add_adapters", "expert_weights", "load_adapter", "merge_adapters", "projections"]
