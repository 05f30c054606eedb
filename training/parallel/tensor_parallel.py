"""Helpers for models that `transformers` has sharded by tensor parallelism, and a correction of their gradients.

The norm of each head's queries and keys, in Qwen3 and Gemma 3, is whole on every rank, but a rank computes only its
heads. So the gradients of its weight are summed over the ranks. `transformers` 5.23 sums the whole `grad` after each
backward pass, and with accumulated batches sums the earlier ones again: for two batches on n ranks it is
`n g_1 + g_2` instead of `g_1 + g_2`. Here only the gradient of the pass is summed, before it is added to `grad`.
"""

import re
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel


class GradientSum:
    """Sums gradients of parameters over the ranks of a group in the backward pass, before they are added to `grad`.

    Args:
        group: The ranks.
    """

    def __init__(self, group: dist.ProcessGroup):
        self.group = group
        self._hooked: dict[tuple[int, str], nn.Parameter] = {}

    def watch(self, module: nn.Module, names: Iterable[str]) -> None:
        """Sum the gradients of a module's parameters, from this pass on.

        Call it in each pass, because a parameter may be frozen, or be replaced: FSDP2 puts the whole parameters in
        place when a module, or one around it, is called.

        Args:
            module: The module.
            names: The names of its parameters.
        """
        for name in names if torch.is_grad_enabled() else ():
            parameter, key = module._parameters[name], (id(module), name)
            if parameter is not None and parameter.requires_grad and self._hooked.get(key) is not parameter:
                self._hooked[key] = parameter
                parameter.register_hook(self.sum)

    def watch_calls(self, module: nn.Module, names: Iterable[str]) -> None:
        """Sum the gradients of a module's parameters in each pass that calls the module; see [`watch`]."""
        module.register_forward_pre_hook(lambda module, args: self.watch(module, names))

    def sum(self, tensor: Tensor) -> Tensor:
        """Return the sum of the ranks' tensors, of one shape."""
        tensor = tensor.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(tensor, group=self.group)
        return tensor


def parameter_names(module: nn.Module) -> list[str]:
    """Return the names of the parameters that a module itself holds."""
    return [name for name, _ in module.named_parameters(recurse=False)]


def rule_name(name: str) -> str:
    """Return the name of a module as plans of `transformers` write it: `layers.*.mlp` for `layers.3.mlp`."""
    return re.sub(r"(^|\.)\d+(?=\.|$)", r"\1*", name)


def tensor_parallel_mesh(model: nn.Module) -> DeviceMesh | None:
    """Return the ranks that shard the matrices of a model; `None` if no matrix is sharded."""
    for parameter in model.parameters():
        if isinstance(parameter, DTensor) and "tp" in (parameter.device_mesh.mesh_dim_names or ()):
            return parameter.device_mesh["tp"]
    return None


def sum_gradients_of_norms(model: PreTrainedModel) -> PreTrainedModel:
    """Sum the gradients of norms of single heads over the ranks that shard the heads, once for each backward pass.

    Args:
        model: A model, sharded by `transformers` or not. It is changed in place. A second call changes nothing, and
            neither does the first where `transformers` sums the gradients once.

    Returns:
        The model.
    """
    plan, mesh = getattr(model, "tp_plan", None) or {}, tensor_parallel_mesh(model)
    if mesh is None:
        return model
    sums = GradientSum(mesh.get_group())
    for name, module in model.named_modules():
        if plan.get(rule_name(name)) == "replicated_with_grad_allreduce" and sums_again(module):
            del module.forward  # the function of `transformers`, in front of the method of the class
            sums.watch_calls(module, parameter_names(module))
    return model


def sums_again(module: nn.Module) -> bool:
    """Return whether `transformers` sums a module's gradients after they were added to those of earlier batches.

    The hook is the fault, and it is in a function without a name. So the names that the function uses are read: a later
    release that has no such hook is left alone.
    """
    code = getattr(vars(module).get("forward"), "__code__", None)
    return code is not None and "register_post_accumulate_grad_hook" in code.co_names


__all__ = [
    "GradientSum",
    "parameter_names",
    "rule_name",
    "sum_gradients_of_norms",
    "sums_again",
    "tensor_parallel_mesh",
]
