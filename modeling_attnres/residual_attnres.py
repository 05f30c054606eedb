"""The interface of residual connections: how a sublayer reads from earlier layers, and where its output goes.

A connection is one module per sublayer with two operations on the *state* that flows through the decoder layers:

    read    (state) -> input of sublayer l, state         `coefficients`, which may depend on the state, then `mix`
    write   (state, output of sublayer l) -> state        `write`

The class of a connection holds everything particular to it: tensors and their initial values, configuration fields and
their checks, the meaning of the state. No other code names a connection.
"""

import os
import reprlib
from collections.abc import Generator, Iterable, Mapping
from contextlib import contextmanager
from copy import copy
from inspect import signature
from itertools import groupby
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig

# The state is the embedding `[batch, seq, hidden]` before the first write, and after it whatever `write` returns: a
# tensor or a tuple of tensors.
DepthState = Tensor | tuple[Tensor, ...]
# Shows a value in a message, and cuts a long one.
_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxlong = _SHORT.maxother = _SHORT.maxlist = 100


class FamilyWarning(UserWarning):
    """Warns that a model may compute another function than the user intended."""


def require(config: PreTrainedConfig, field: str, condition: bool, allowed: str) -> None:
    """Raise if a configuration field has a value that is not allowed.

    Args:
        config: the configuration that holds the field.
        field: name of the field.
        condition: whether its value is allowed.
        allowed: the allowed values, in words that follow "must be".

    Raises:
        ValueError: the condition does not hold; the message names field, value and allowed values.
    """
    if not condition:
        require_value(field, getattr(config, field), condition, allowed)


def require_value(name: str, value: Any, condition: bool, allowed: str) -> None:
    """Raise if a value is not allowed, such as one inside a field; see [`require`]."""
    if not condition:
        raise ValueError(f"`{name}` is {_SHORT.repr(value)}, but must be {allowed}.")


@contextmanager
def explain_source(source: str | os.PathLike | None) -> Generator[None]:
    """Put the name of a model before the message of a `ValueError` that the block raises.

    Args:
        source: directory or Hub id of the model; `None` if it has none.

    Raises:
        ValueError: the block raises it.
    """
    try:
        yield
    except ValueError as error:
        # A subclass, such as that of a damaged text file, may be handled by its type.
        if source is None or type(error) is not ValueError or os.fspath(source) in str(error):
            raise
        raise ValueError(f"{source}: {error}") from error


def one_of(values: Iterable[object]) -> str:
    """Return the values in words: "one of 'a', 'b'"."""
    return "one of " + ", ".join(map(repr, values))


def is_count(value: Any) -> bool:
    """Return whether a value is an integer >= 1."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def is_number(value: Any) -> bool:
    """Return whether a value is an integer or a float; true and false are neither."""
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def require_norms(config: PreTrainedConfig) -> None:
    """Raise `ValueError` if a sublayer of the backbone does not begin with a norm, which the connection takes over."""
    has_norms = all("norm" in (sublayer.first or "") for sublayer in config.sublayers)
    allowed = f"another one: the sublayers of {config.backbone!r} do not begin with a norm"
    require(config, "residual_connection", has_norms, allowed)


def field_defaults(declaration: type) -> dict[str, Any]:
    """Return the annotated fields of a class, those of its bases first, with their defaults."""
    names = [name for cls in reversed(declaration.__mro__) for name in vars(cls).get("__annotations__", ())]
    return {name: getattr(declaration, name) for name in names}


class AddedModule(nn.Module):
    """A module with tensors that the family adds to a backbone, and that have initial values of their own."""

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Set the tensors to their initial values."""


class ResidualConnection(AddedModule):
    """The residual connection of one sublayer or of the model's output. A subclass defines at least `mix` and `write`.

    Args:
        config: the model's configuration.
        sublayer: index of the sublayer in the decoder, from 0. The output has the index `num_sublayers`.
    """

    name: ClassVar[str]  # value of the configuration field `residual_connection`
    summary: ClassVar[str] = ""  # what it is, in a few words
    reference: ClassVar[str] = ""  # where it was published, such as "arXiv 2603.15031"
    used_by: ClassVar[str] = ""  # published models, or recipes of others, whose code was read
    own_start: ClassVar[str] = ""  # how its start from scratch differs from the published one
    state_size: ClassVar[str] = "1"  # the state between sublayers, in tensors [tokens, hidden]
    exact: ClassVar[str] = ""  # the forms in which a retrofit is exact; by default all where `retrofit` is set
    # What benchmarks measured: "step", the time of a training step over that of the standard model.
    measured: ClassVar[dict[str, str]] = {}
    fields: ClassVar[dict[str, Any]] = {}  # its configuration fields with their defaults
    start_fields: ClassVar[tuple[str, ...]] = ()  # fields that only untrained tensors depend on
    options: ClassVar[dict[str, str]] = {}  # option of a retrofit -> configuration field that it sets
    # Fields with which an untrained connection equals the residual stream; `None` if it never does.
    retrofit: ClassVar[dict[str, Any] | None] = None
    has_norm: bool = False  # whether a read gets the weight of a `ResidualNorm`; an instance may set it
    # Whether all its tensors stay in float32 when the model is in 16 bits. This is for scalars that all tokens and
    # channels share: rounding them can move the logits more than rounding the rest of the model does. It is also for
    # tensors that start at another constant than zero: beside 1, bfloat16 has steps of 1/128 and loses smaller ones.
    float32: ClassVar[bool] = False
    mixes_channels: ClassVar[bool] = False  # whether a channel of an input may depend on other channels of the state
    takes_norm: ClassVar[bool] = False  # whether a read gets the sublayer's norm, and returns a normed input
    # Tensor -> factor of the learning rate, for tensors that need another rate. Optimizers of `attnres` read it.
    rate_factors: ClassVar[dict[str, float]] = {}

    def __init__(self, config: PreTrainedConfig, sublayer: int):
        super().__init__()
        self.sublayer = sublayer

    @classmethod
    def form(cls, config: PreTrainedConfig) -> "type[ResidualConnection]":
        """Return the class that implements the connection for these fields; by default this one."""
        return cls

    @classmethod
    def check(cls, config: PreTrainedConfig) -> None:
        """Check the connection's configuration fields.

        Raises:
            ValueError: a field has a value that is not allowed.
        """

    @classmethod
    def describe(cls, config: PreTrainedConfig) -> str:
        """Return a description in a few words, for model cards and reports."""
        return cls.name

    @classmethod
    def retrofit_options(cls) -> list[str]:
        """Return the names of the options of `plan_retrofit`, such as `block_size`."""
        parameters = signature(cls.plan_retrofit).parameters.values()
        return [*cls.options, *(option.name for option in parameters if option.default is not option.empty)]

    @classmethod
    def plan_retrofit(cls, config: PreTrainedConfig, **options: Any) -> None:
        """Set the configuration fields for a retrofit, which keeps the function of a standard decoder.

        Args:
            config: the configuration to change.
            options: keys of `options`, or configuration fields of the connection.

        Raises:
            ValueError: the connection never equals the residual stream; an option is unknown or its value not allowed.
        """
        if cls.retrofit is None:
            raise ValueError(f"no model can be retrofitted with {cls.name!r}: it never equals the standard residual.")
        chosen = {o: v for o, v in options.items() if o in cls.fields or (v is not None and v is not False)}
        for option in chosen.keys() - cls.options.keys() - cls.fields.keys():
            known = ", ".join([*cls.retrofit_options(), *cls.fields])
            raise ValueError(
                f"`{option}` ({chosen[option]!r}) is no option of the residual connection {cls.name!r}. "
                f"Its options: {known or 'none'}."
            )
        for field, value in (cls.retrofit | {cls.options.get(name, name): chosen[name] for name in chosen}).items():
            setattr(config, field, value)
        cls.check(config)

    @classmethod
    def differs_from_standard(cls, config: PreTrainedConfig, tensors: Mapping[str, Tensor]) -> str | None:
        """Return why a model may not compute the function of the standard decoder, or `None` if it certainly does.

        By default, its fields and tensors must be those of a retrofit at its start.

        Args:
            config: the model's configuration.
            tensors: the tensors of its connections by name, as [`residual_tensors`] returns them.
        """
        if cls.retrofit is None:
            return f"{cls.name!r} computes another function"
        config, names = copy(config), [sublayer.name for sublayer in config.sublayers]
        for field, value in cls.retrofit.items():
            if field not in cls.start_fields and getattr(config, field) != value:
                return f"`{field}` is {getattr(config, field)!r}, not {value!r}"
            setattr(config, field, value)
        for owner, group in groupby(tensors, lambda name: name.rpartition(".")[0]):
            place, _, kind = owner.rpartition("_")  # such as `model.layers.3.mlp_res` and `proj`
            layer, _, place = place.rpartition(".")
            index = config.num_sublayers
            if place in names:
                index = int(layer.rpartition(".")[2]) * len(names) + names.index(place)
            starts = None if kind == "norm" else cls._starts(config, index)
            for name in group:
                tensor = tensors[name]
                key, ones = name.rpartition(".")[2], torch.ones_like(tensor)
                # What all starts have in common does not come from random numbers, on which the function does not
                # depend. Of millions of them, some are equal in two starts by chance, and more after a cast to 16 bits.
                one, two, three = [ones] * 3 if starts is None else [start[key] for start in starts]
                is_fixed = ((one == two) & (one == three)).to(tensor.device)
                if one.shape != tensor.shape or bool(((tensor != one.to(tensor)) & is_fixed).any()):
                    return f"`{name}` is not at the start, where {cls.name!r} is the standard residual"
        return None

    @classmethod
    def _starts(cls, config: PreTrainedConfig, sublayer: int) -> list[dict[str, Tensor]]:
        """Return the tensors of three new connections, without a change of the state of random numbers."""
        with torch.random.fork_rng(devices=[]), torch.device("cpu"):
            torch.seed()
            connection, starts = cls.form(config)(config, sublayer), []
            for _ in range(3):
                connection.reset_parameters()
                starts.append({name: tensor.detach().clone() for name, tensor in connection.named_parameters()})
        return starts

    @classmethod
    def plan_change(cls, config: PreTrainedConfig, connections: Mapping[str, Any], **options: Any) -> None:
        """Change configuration fields of a trained model where that keeps its function.

        Args:
            config: the configuration to change.
            connections: the model's connections by module name.
            options: keys of `options` with their new values.

        Raises:
            ValueError: the function would change, or the connection has no such option.
        """
        raise ValueError(f"{cls.name!r} has no {' or '.join(f'`{option}`' for option in options)} to change.")

    def coefficients(self, state: DepthState, norm: Any = None) -> Any:
        """Compute the coefficients of a read, the part that depends on the state's values.

        Args:
            state: the state before the read.
            norm: a tensor, the key norm's weight `[hidden]`, if `has_norm`. A function, the sublayer's norm, if
                `takes_norm`, and `None` for the output. Other connections are called without it.

        Returns:
            Any value, which `mix` takes; `None` if nothing depends on the state.
        """

    def mix(self, state: DepthState, coefficients: Any) -> tuple[Tensor, DepthState]:
        """Compute a sublayer's input `[batch, seq, hidden]` and the state after the read.

        It is linear in the state, as `write` is: analysis derives the mixing matrix from both. A write must not use the
        connection's tensors, since engines that shard or offload modules hold them only during a read, the call of the
        module. The state after the read has what the write needs.

        Args:
            state: the state before the read.
            coefficients: the result of `coefficients`.
        """
        raise NotImplementedError

    def forward(self, state: DepthState, norm: Any = None) -> tuple[Tensor, Any, DepthState]:
        """Read the input of a sublayer.

        Args:
            state: the state before the read.
            norm: as in `coefficients`.

        Returns:
            The input `[batch, seq, hidden]`, the depth weights `[sources, batch, seq]` or `None` if the connection has
            none, and the state after the read.
        """
        coefficients = self.coefficients(state, norm) if self.has_norm or self.takes_norm else self.coefficients(state)
        inputs, state = self.mix(state, coefficients)
        return inputs, None, state

    def write(self, state: DepthState, output: Tensor) -> DepthState:
        """Return the state after the write of the sublayer's output `[batch, seq, hidden]`."""
        raise NotImplementedError

    def partial_sum(self, state: DepthState) -> Tensor | None:
        """Return the sum `[batch, seq, hidden]` of the outputs in the current block, or `None` if it is not kept.

        Where a block has just ended, it is the sum of that block; before the first output, the embedding.

        Args:
            state: the state after a read.
        """

    def running_sum(self, state: DepthState) -> Tensor | None:
        """Return the sum `[batch, seq, hidden]` of all outputs, `v_0 + ... + v_{l-1}`, or `None` if it is not kept.

        Args:
            state: the state after a read.
        """

    @classmethod
    def inference_plan(cls, model: nn.Module) -> Any:
        """Return an inference plan, which reads for all connections in a pass without gradients, or `None`.

        The method `read(connection, state)` of a plan returns the input, whether it is already normed, and the state.

        Args:
            model: the decoder.
        """

    @classmethod
    def training_plan(cls, model: nn.Module) -> Any:
        """Return a plan as [`inference_plan`], for a pass with gradients, or `None`.

        Args:
            model: the decoder.
        """


class ResidualNorm(nn.Module):
    """Holder of the key norm's weight `g_l` `[hidden]`, which its call returns.

    Read the weight by a call, because offloading engines fetch the tensors of a module when it is called.
    """

    def __init__(self, hidden_size: int):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden_size))

    def forward(self) -> Tensor:
        """Return the weight."""
        return self.weight


def norm_eps(config: PreTrainedConfig) -> float:
    """Return the epsilon of the backbone's own norms. Declared fields come first: a file may hold unread others."""
    names = ("rms_norm_eps", "layer_norm_eps", "norm_epsilon", "layer_norm_epsilon")
    values = (getattr(config, name) for owner in (type(config), config) for name in names if hasattr(owner, name))
    return next(values, 1e-6)


def residual_tensors(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the tensors that connections add to a backbone, by their names in the model."""
    return {
        f"{module_name}.{name}": parameter
        for module_name, module in model.named_modules()
        if isinstance(module, (ResidualConnection, ResidualNorm))
        for name, parameter in module.named_parameters(recurse=False)
    }
