"""How the models' code finds what is installed: implementations by name, `auto`, and what reads a whole pass."""

from collections.abc import Mapping, MutableMapping, Sequence
from typing import Any

from torch import Tensor, nn

from .compat import is_compiled
from .interface import Implementation

Attended = tuple[Tensor, Tensor, Sequence[Tensor]]


def register(interface: MutableMapping, implementations: Mapping[str, Implementation]) -> None:
    """Add the `implementations` to the models' interface, and an `auto` that chooses among them by device and shape."""
    eager = interface["eager"]
    candidates = tuple(implementations.values())

    def auto(
        query: Tensor, sources: Sequence[Tensor], eps: float, is_sum: bool, fuse_later_grads: bool = False
    ) -> Attended:
        for candidate in candidates:
            if candidate.pays(query, sources) and candidate.supports(query, sources) is None:
                return candidate.run(query, sources, eps, is_sum, fuse_later_grads)
        return eager(query, sources, eps, is_sum)

    for name, implementation in implementations.items():
        interface.register(name, _by_name(name, implementation))
    interface.register("auto", auto)


def _by_name(name: str, implementation: Implementation) -> Any:
    def run(
        query: Tensor, sources: Sequence[Tensor], eps: float, is_sum: bool, fuse_later_grads: bool = False
    ) -> Attended:
        reason = implementation.supports(query, sources)
        if reason is not None:
            raise ValueError(f"the depth attention {name!r} cannot run here: {reason}. Choose 'auto' or 'eager'.")
        return implementation.run(query, sources, eps, is_sum, fuse_later_grads)

    return run


def reader(
    model: nn.Module, implementations: Mapping[str, Implementation], classes: tuple[type[nn.Module], type[nn.Module]]
) -> Any:
    """What may read in place of the connections of a decoder, all of these `classes`; see `accelerated.reader`."""
    chosen = model.config.depth_attention_implementation
    wanted = implementations.values() if chosen == "auto" else filter(None, [implementations.get(chosen)])
    readers = [implementation.reader for implementation in wanted if implementation.reader is not None]
    # Not where a layer is wrapped or compiled: what it would make of a reader is not known.
    if not readers or any("sublayers" not in vars(layer) or is_compiled(layer) for layer in model.layers):
        return None
    owners = [(layer._modules, sublayer.name, sublayer.first) for layer in model.layers for sublayer in layer.sublayers]
    owners.append((model._modules, "output_attn_res", None))
    reads = [(modules[f"{name}_proj"], modules[f"{name}_norm"], modules.get(first)) for modules, name, first in owners]
    connection, key_norm, _ = reads[-1]  # the others are of its classes, or no reader takes them
    if (type(connection), type(key_norm)) != classes:
        return None
    return next((found for found in (make(reads) for make in readers) if found is not None), None)


__all__ = ["reader", "register"]
