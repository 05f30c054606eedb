"""Check the options of adapters, the key `lora` of a recipe, without PyTorch."""

import math
from collections.abc import Collection
from typing import Any


def check_options(
    *,
    rank: Any = 16,
    alpha: Any = None,
    dropout: Any = 0.0,
    targets: Any = None,
    experts: Any = True,
    expert_rank: Any = None,
) -> None:
    """Check the options of [`attnres.training.lora.add_adapters`], without a model.

    Args:
        rank: As in [`add_adapters`].
        alpha: As in [`add_adapters`].
        dropout: As in [`add_adapters`].
        targets: As in [`add_adapters`].
        experts: As in [`add_adapters`].
        expert_rank: As in [`add_adapters`].

    Raises:
        ValueError: A value is not allowed. The message names the option, its value and the allowed values.
    """
    names = [targets] if isinstance(targets, str) else targets
    for name, value, is_allowed, allowed in (
        ("rank", rank, _is_rank(rank), "a whole number, at least 1"),
        ("alpha", alpha, alpha is None or (_is_number(alpha) and alpha > 0), "a number above 0"),
        ("dropout", dropout, _is_number(dropout) and 0 <= dropout < 1, "a share, at least 0 and below 1"),
        ("targets", targets, names is None or _are_names(names), "a list of names"),
        ("experts", experts, isinstance(experts, bool), "true or false"),
        ("expert_rank", expert_rank, expert_rank is None or _is_rank(expert_rank), "a whole number, at least 1"),
    ):
        if not is_allowed:
            raise ValueError(f"`{name}` of the adapters is {value!r}, but must be {allowed}.")


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _is_rank(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def _are_names(value: Any) -> bool:
    return isinstance(value, Collection) and bool(value) and all(isinstance(name, str) and name for name in value)


__all__ = ["check_options"]
