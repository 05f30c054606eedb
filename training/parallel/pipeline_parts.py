"""Make a model of which a process holds the tensors of its stage alone. The other tensors are on the meta device.

All modules are there, so the model is cut like a whole one. Its tensors have the values that they have in a whole model
that is made with the same random numbers.
"""

from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_any, tree_map_only
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from attnres.checkpoints.whole import Part

from .pipeline_model import check_model, chunk_layers, view_of
from .pipeline_settings import PipelineSettings


def part_of(settings: PipelineSettings, stage: int) -> Part:
    """Return a function that gives the names of the tensors that a process of a pipeline holds.

    Args:
        settings: The settings of the pipeline.
        stage: The place of the process in its pipeline.

    Returns:
        A function of the whole model, which may be on the meta device. It raises ValueError if the model cannot be cut
        in this way.
    """

    def names(model: PreTrainedModel) -> frozenset[str]:
        check_model(model)
        layers = {layer for part in chunk_layers(model, settings)[stage :: settings.stages] for layer in part}
        is_last = stage == settings.stages - 1
        held = {*view_of(model, layers, stage == 0, is_last).state_dict()}
        # A tied head is stored as the embedding, and each of the two is initialised before they are tied.
        for target, source in model.all_tied_weights_keys.items():
            if held & {target, source}:
                held |= {target, source}
        return frozenset(held)

    return names


def make_part(config: PreTrainedConfig, part: Part) -> PreTrainedModel:
    """Make the model of a configuration, with the tensors of one process.

    The constructor of the whole model runs. A tensor of another process is drawn too, so that the random numbers after
    it are those of the whole model, and is dropped at once.

    Args:
        config: The configuration.
        part: A function that gives the names of the process's tensors; see [`part_of`].

    Returns:
        The model. Parameters of other processes are on the meta device; buffers, which are small, are not.

    Raises:
        RuntimeError: The constructor makes other parameters on the meta device than on the CPU.
    """
    made: list[tuple[nn.Module, str]] = []
    with _on_parameter(lambda module, name, parameter: made.append((module, name))), torch.device("meta"):
        whole = AutoModelForCausalLM.from_config(config)
    names = part(whole)
    held = {id(tensor) for name, tensor in whole.state_dict(keep_vars=True).items() if name in names}
    # A constructor makes its parameters in the same order each time. It may replace a parameter by one that it computes
    # from it. Both are then made where the final one belongs.
    is_held = iter([id(getattr(module, name, None)) in held for module, name in made])

    def place(module: nn.Module, name: str, parameter: nn.Parameter) -> nn.Parameter | None:
        if next(is_held, True) or parameter.is_meta:
            return None
        return nn.Parameter(parameter.detach().to("meta"), requires_grad=parameter.requires_grad)

    with _on_parameter(place), _DrawAndDrop():
        model = AutoModelForCausalLM.from_config(config)
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if parameter.is_meta == (name in names):
            raise RuntimeError(f"{type(model).__name__} makes `{name}` in another order on the meta device.")
    return model


@contextmanager
def _on_parameter(call: Callable[[nn.Module, str, nn.Parameter], nn.Parameter | None]) -> Generator[None]:
    """Call a function with each parameter that a module gets in the block. It may return one to take its place.

    Args:
        call: A function of the module, the parameter's name in it, and the parameter.
    """

    def call_with_parameter(module: nn.Module, name: str, parameter: nn.Parameter | None) -> nn.Parameter | None:
        return None if parameter is None else call(module, name, parameter)

    # pyrefly: ignore[bad-argument-type]  # its annotation forgets that a hook may return another parameter
    hook = register_module_parameter_registration_hook(call_with_parameter)
    try:
        yield
    finally:
        hook.remove()


class _DrawAndDrop(TorchDispatchMode):
    """Within this context, a tensor on the meta device takes as many random numbers as it would on the CPU."""

    def __init__(self):
        super().__init__()
        # As large as the largest tensor. Memory that is allocated anew for each of them would be fragmented, and grow.
        self._scratch = torch.empty(0, dtype=torch.uint8)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        is_random = torch.Tag.nondeterministic_seeded in func.tags
        if is_random and tree_any(lambda leaf: isinstance(leaf, Tensor) and leaf.is_meta, (args, kwargs)):
            drawn = tree_map_only(Tensor, self._on_cpu, (args, kwargs))
            func(*drawn[0], **drawn[1])
        return func(*args, **kwargs)

    def _on_cpu(self, tensor: Tensor) -> Tensor:
        """Return a tensor in the scratch memory in place of one on the meta device."""
        if not tensor.is_meta:
            return tensor
        reach = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride())) + 1
        if reach * tensor.itemsize > self._scratch.numel():
            self._scratch = torch.empty(reach * tensor.itemsize, dtype=torch.uint8)
        # With the same strides, which decide in which order numbers are drawn.
        return torch.empty(0, dtype=tensor.dtype).set_(
            self._scratch.untyped_storage(), 0, tensor.shape, tensor.stride()
        )


__all__ = ["make_part", "part_of"]
