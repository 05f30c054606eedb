"""Residual connections: what a sublayer reads from the layers before it, and where its output goes.

A connection is one module per sublayer with two operations on the *state* that flows through the decoder layers:

    read    (state) -> input of sublayer l, state         `coefficients`, which may depend on the state, then `mix`
    write   (state, output of sublayer l) -> state        `write`

It alone knows its tensors, their start, its fields and what the state holds.
"""

from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig

# The embedding `[batch, seq, hidden]`, and then what `write` returned: such a tensor, or a tuple of tensors.
DepthState = Tensor | tuple[Tensor, ...]


class FamilyWarning(UserWarning):
    """Warns that a model may compute another function than the user intended."""


def require(config: PreTrainedConfig, field: str, condition: bool, allowed: str) -> None:
    """Raises ValueError, with the field, its value and what is allowed, if the condition does not hold."""
    if not condition:
        raise ValueError(f"`{field}` is {getattr(config, field)!r}, but must be {allowed}.")


def one_of(values: Iterable[str]) -> str:
    return "one of " + ", ".join(map(repr, values))


class ResidualConnection(nn.Module):
    """Of one `sublayer`, which counts from 0, the output last."""

    name: ClassVar[str]  # `residual_connection` of the configuration
    fields: ClassVar[dict[str, Any]] = {}  # of the configuration, with their defaults
    options: ClassVar[dict[str, str]] = {}  # what a retrofit may choose -> the field that it sets
    retrofit: ClassVar[dict[str, Any] | None] = None  # fields at which it starts as the standard one, if it can
    has_norm: ClassVar[bool] = False  # a read gets the weight of a [`ResidualNorm`]
    # Whether all its tensors stay in float32 when the model is in 16 bits. This is for scalars that all tokens and
    # channels share: rounding them can move the logits more than rounding the rest of the model does.
    float32: ClassVar[bool] = False
    takes_norm: ClassVar[bool] = False  # it gets the sublayer's norm, and returns what that makes of its input

    def __init__(self, config: PreTrainedConfig, sublayer: int):
        super().__init__()
        self.sublayer = sublayer

    @classmethod
    def form(cls, config: PreTrainedConfig) -> "type[ResidualConnection]":
        """The class for these fields, if there are several."""
        return cls

    @classmethod
    def check(cls, config: PreTrainedConfig) -> None:
        """Raises ValueError: a field has a value that is not allowed."""

    @classmethod
    def describe(cls, config: PreTrainedConfig) -> str:
        """Its form, in a few words."""
        return cls.name

    @classmethod
    def plan_retrofit(cls, config: PreTrainedConfig, **options: Any) -> None:
        """Set the fields to start as the standard one. Raises ValueError: it cannot."""
        if cls.retrofit is None:
            raise ValueError(f"no model can be retrofitted with {cls.name!r}: it never equals the standard residual.")
        chosen = {o: v for o, v in options.items() if o in cls.fields or (v is not None and v is not False)}
        for option in chosen.keys() - cls.options.keys() - cls.fields.keys():
            raise ValueError(f"`{option}` ({chosen[option]!r}) is no option of the residual connection {cls.name!r}.")
        for field, value in (cls.retrofit | {cls.options.get(name, name): chosen[name] for name in chosen}).items():
            setattr(config, field, value)
        cls.check(config)

    @classmethod
    def differs_from_standard(cls, config: PreTrainedConfig, tensors: Mapping[str, Tensor]) -> str | None:
        """Why a model with these tensors may not be the standard function, or `None`."""
        return f"{cls.name!r} is another function"

    @classmethod
    def plan_change(cls, config: PreTrainedConfig, connections: Mapping[str, Any], **options: Any) -> None:
        """Set fields anew. Raises ValueError: these connections would be another function."""
        raise ValueError(f"{cls.name!r} has no {' or '.join(f'`{option}`' for option in options)} to change.")

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Set the tensors to their start."""

    def coefficients(self, state: DepthState, norm: Any = None) -> Any:
        """What of a read depends on the state's values; for `norm` see `has_norm`."""

    def mix(self, state: DepthState, coefficients: Any) -> tuple[Tensor, DepthState]:
        """The input, and the state; linear in the state, as `write` is."""
        raise NotImplementedError

    def forward(self, state: DepthState, norm: Any = None) -> tuple[Tensor, Any, DepthState]:
        """Read: the input `[batch, seq, hidden]`, depth weights `[sources, batch, seq]` or `None`, the state."""
        inputs, state = self.mix(state, self.coefficients(state, norm))
        return inputs, None, state

    def write(self, state: DepthState, output: Tensor) -> DepthState:
        """The state after a sublayer with this output."""
        raise NotImplementedError

    @classmethod
    def reader(cls, model: nn.Module) -> Any:
        """What may read in place of a decoder's connections without gradients, or `None`."""


class ResidualNorm(nn.Module):
    """The key norm's weight `g_l` `[hidden]`; called, since offloading engines fetch the tensors of what is called."""

    def __init__(self, hidden_size: int):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden_size))

    def forward(self) -> Tensor:
        return self.weight


def norm_eps(config: PreTrainedConfig) -> float:
    """Epsilon of the backbone's own norms."""
    names = ("rms_norm_eps", "layer_norm_eps", "norm_epsilon", "layer_norm_epsilon")
    return next((getattr(config, name) for name in names if hasattr(config, name)), 1e-6)


def residual_tensors(model: nn.Module) -> dict[str, nn.Parameter]:
    """What connections add to a backbone."""
    return {
        f"{module_name}.{name}": parameter
        for module_name, module in model.named_modules()
        if isinstance(module, (ResidualConnection, ResidualNorm))
        for name, parameter in module.named_parameters(recurse=False)
    }
