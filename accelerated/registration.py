"""All implementations: their registration with the models, by name and as `auto`, and their plans.

To add one, add it to `IMPLEMENTATIONS`.
"""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from . import numba, triton
from .compat import is_compiled
from .inference_plan import InferencePlan
from .interface import Decoder, Implementation
from .training_plan import TrainingPlan

if TYPE_CHECKING:
    from transformers.utils.generic import GeneralInterface

Attended = tuple[Tensor, Tensor, Sequence[Tensor]]  # `h`, `a` and the sources, see `Implementation.run`
IMPLEMENTATIONS: dict[str, Implementation] = {"numba": numba.IMPLEMENTATION, **triton.IMPLEMENTATIONS}
# What `auto` takes, by the device of the tensors. (It never takes the operation of flash-linear-attention.)
OF_AUTO = {implementation.device: implementation for implementation in (numba.IMPLEMENTATION, triton.OF_AUTO)}


def register(interface: "GeneralInterface") -> None:
    """Add all implementations, and an `auto` that chooses among them by device and shape.

    Args:
        interface: the models' mapping `DEPTH_ATTENTION`, which has `"eager"`.
    """
    eager = interface["eager"]

    def auto(
        query: Tensor, sources: Sequence[Tensor], eps: float, is_sum: bool, fuse_later_grads: bool = False
    ) -> Attended:
        candidate = OF_AUTO.get(sources[0].device.type)
        if candidate is not None and candidate.pays(query, sources) and candidate.supports(query, sources) is None:
            return candidate.run(query, sources, eps, is_sum, fuse_later_grads)
        return eager(query, sources, eps, is_sum)

    # Models look for this attribute of the function that they call. Models of an earlier version do without it.
    auto.direct = triton.OF_AUTO.direct  # pyrefly: ignore[missing-attribute]  # any function takes attributes
    for name, implementation in IMPLEMENTATIONS.items():
        interface.register(name, _by_name(name, implementation))
    interface.register("auto", auto)


def _by_name(name: str, implementation: Implementation) -> Any:
    """Return `run` of an implementation that the user chose by name; it raises `ValueError` where it cannot run."""

    def run(
        query: Tensor, sources: Sequence[Tensor], eps: float, is_sum: bool, fuse_later_grads: bool = False
    ) -> Attended:
        reason = implementation.supports(query, sources)
        if reason is not None:
            raise ValueError(f"the depth attention {name!r} cannot run here: {reason}. Choose 'auto' or 'eager'.")
        return implementation.run(query, sources, eps, is_sum, fuse_later_grads)

    run.direct = implementation.direct  # pyrefly: ignore[missing-attribute]  # as `auto.direct`
    return run


def inference_plan(model: Decoder, connection: type[nn.Module], key_norm: type[nn.Module]) -> InferencePlan | None:
    """Make a plan that reads in place of a decoder's connections in a pass without gradients.

    Args:
        model: the decoder.
        connection: the class of all connections. A derived class gets no plan, because it may compute more.
        key_norm: the class of all key norms.

    Returns:
        The plan, or `None` if the model must call its connections one by one.
    """
    implementation = _implementation_for(model)
    return None if implementation is None else _plan(model, (connection, key_norm), implementation.inference_plan)


def training_plan(model: Decoder, connection: type[nn.Module], key_norm: type[nn.Module]) -> TrainingPlan | None:
    """Make a plan that reads in place of a decoder's connections in a pass with gradients, as [`inference_plan`].

    It computes each read together with the norm that follows.
    """
    implementation = _implementation_for(model)
    return None if implementation is None else _plan(model, (connection, key_norm), implementation.training_plan)


def _implementation_for(model: Decoder) -> Implementation | None:
    """Return the implementation that the configuration of a decoder names, or `None` for PyTorch's operations."""
    name = model.config.depth_attention_implementation
    if name != "auto":
        return IMPLEMENTATIONS.get(name)
    connection = model._modules["output_attn_res_proj"]
    return OF_AUTO.get(next((parameter.device.type for parameter in connection.parameters()), ""))


def _plan(model: Decoder, classes: tuple[type[nn.Module], type[nn.Module]], make_plan: Callable | None) -> Any:
    """Return the plan that a function makes of the model's reads, or `None`."""
    # A layer that is wrapped or compiled may not call its connections in the order of a plan.
    layers = getattr(model, "depth_layers", model.layers)  # a model of an earlier version has only these
    if make_plan is None or any("sublayers" not in vars(layer) or is_compiled(layer) for layer in layers):
        return None
    # Of each read: the modules of its layer, the name of its connection, and the name of the module that runs next.
    places = [(layer._modules, sublayer.name, sublayer.first) for layer in layers for sublayer in layer.sublayers]
    places.append((model._modules, "output_attn_res", None))
    reads = [(modules[f"{name}_proj"], modules[f"{name}_norm"], modules.get(first)) for modules, name, first in places]
    connection, key_norm, _ = reads[-1]  # one is enough: a plan checks that all reads have the same classes
    if (type(connection), type(key_norm)) != classes:
        return None
    return make_plan(reads)


__all__ = ["IMPLEMENTATIONS", "inference_plan", "register", "training_plan"]
