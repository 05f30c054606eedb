"""Register the implementations with the models, by name and as `auto`, and make their inference plans."""

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from .compat import is_compiled
from .inference_plan import InferencePlan
from .interface import Decoder, Implementation
from .training_plan import TrainingPlan

if TYPE_CHECKING:
    from transformers.utils.generic import GeneralInterface

Attended = tuple[Tensor, Tensor, Sequence[Tensor]]  # `h`, `a` and the sources, see `Implementation.run`


def register(
    interface: "GeneralInterface", implementations: Mapping[str, Implementation], direct_of_auto: Callable | None = None
) -> None:
    """Add implementations to the models' interface, and an `auto` that chooses among them by device and shape.

    Args:
        interface: the models' mapping `DEPTH_ATTENTION`, which has `"eager"`.
        implementations: name -> implementation, in order of preference.
        direct_of_auto: the direct path of `auto`; see [`Implementation`].
    """
    eager = interface["eager"]
    candidates = tuple(implementations.values())

    def auto(
        query: Tensor, sources: Sequence[Tensor], eps: float, is_sum: bool, fuse_later_grads: bool = False
    ) -> Attended:
        for candidate in candidates:
            if candidate.pays(query, sources) and candidate.supports(query, sources) is None:
                return candidate.run(query, sources, eps, is_sum, fuse_later_grads)
        return eager(query, sources, eps, is_sum)

    # Models look for this attribute of the function that they call. Models of an earlier version do without it.
    auto.direct = direct_of_auto  # pyrefly: ignore[missing-attribute]  # any function takes attributes
    for name, implementation in implementations.items():
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


def inference_plan(
    model: Decoder, implementations: Mapping[str, Implementation], classes: tuple[type[nn.Module], type[nn.Module]]
) -> InferencePlan | None:
    """Make a plan by the first implementation that can; see [`attnres.accelerated.inference_plan`].

    Args:
        model: the decoder.
        implementations: name -> implementation, in order of preference.
        classes: the classes of connection and key norm that every read must have.
    """
    make_plans = [candidate.inference_plan for candidate in _candidates(model, implementations)]
    return _plan(model, classes, [make_plan for make_plan in make_plans if make_plan is not None])


def training_plan(
    model: Decoder, implementations: Mapping[str, Implementation], classes: tuple[type[nn.Module], type[nn.Module]]
) -> TrainingPlan | None:
    """Make a plan by the first implementation that can; see [`attnres.accelerated.training_plan`].

    The arguments are those of [`inference_plan`].
    """
    make_plans = [candidate.training_plan for candidate in _candidates(model, implementations)]
    return _plan(model, classes, [make_plan for make_plan in make_plans if make_plan is not None])


def _candidates(model: Decoder, implementations: Mapping[str, Implementation]) -> list[Implementation]:
    name = model.config.depth_attention_implementation
    return [*implementations.values()] if name == "auto" else [*filter(None, [implementations.get(name)])]


def _plan(model: Decoder, classes: tuple[type[nn.Module], type[nn.Module]], make_plans: Sequence[Callable]) -> Any:
    """Return the first plan that one of the functions makes of the model's reads, or `None`."""
    # A layer that is wrapped or compiled may not call its connections in the order of a plan.
    if not make_plans or any("sublayers" not in vars(layer) or is_compiled(layer) for layer in model.layers):
        return None
    # Of each read: the modules of its layer, the name of its connection, and the name of the module that runs next.
    places = [(layer._modules, sublayer.name, sublayer.first) for layer in model.layers for sublayer in layer.sublayers]
    places.append((model._modules, "output_attn_res", None))
    reads = [(modules[f"{name}_proj"], modules[f"{name}_norm"], modules.get(first)) for modules, name, first in places]
    connection, key_norm, _ = reads[-1]  # one is enough: a plan checks that all reads have the same classes
    if (type(connection), type(key_norm)) != classes:
        return None
    return next((plan for plan in (make_plan(reads) for make_plan in make_plans) if plan is not None), None)


__all__ = ["inference_plan", "register", "training_plan"]
