"""Map standard decoders to members of the AttnRes family and back, and initialize the tensors that a retrofit adds.

This file works on configurations and on models without weights. Both ways of retrofitting use it: in memory
(`retrofit.py`) and from directory to directory (`convert.py`).
"""

from itertools import chain
from typing import Any

import torch
from torch import nn
from transformers import CONFIG_MAPPING, PreTrainedConfig, PreTrainedModel

from attnres import (
    BACKBONES,
    CONNECTIONS,
    PRESETS,
    AttnResConfig,
    AttnResKimiK3Config,
    ResidualConfig,
    ResidualConnection,
)
from attnres.attention_gate_attnres import GATE_FIELDS, gate_tensors
from attnres.residual_attnres import ResidualNorm, residual_tensors
from attnres.value_residual_attnres import VALUE_RESIDUAL_FIELDS, value_residual_tensors

from .attention_gate import is_gated, plan_gate, start_gates
from .value_residual import mixes_values, plan_value_residual, start_value_residuals

DEFAULT_CONNECTION = next(iter(CONNECTIONS))
# Fields that identify the class of a configuration and its code. They do not change what the model computes.
_IDENTITY = ("model_type", "architectures", "auto_map", "custom_pipelines", "transformers_version")


def member_type(backbone: str) -> str:
    """Return the family's model type for a backbone: `attnres_llama` for `llama`, and `attnres` for `kimi_linear`."""
    return AttnResConfig.model_type if backbone == AttnResConfig.backbone else f"attnres_{backbone}"


def member_config(config: PreTrainedConfig) -> ResidualConfig:
    """Return the family's configuration of a standard decoder, with `residual_connection="standard"`.

    The model of that configuration computes the same function as the decoder.

    Raises:
        ValueError: The backbone is not supported, or the decoder has other residual connections already.
    """
    # A retrofit in memory keeps the name of its source.
    name = f"the model, loaded from {config.name_or_path}," if config.name_or_path else "the model"
    if isinstance(config, AttnResKimiK3Config):
        raise ValueError(f"{name} is Kimi K3, which takes no retrofit. Use it as it is.")
    if isinstance(config, ResidualConfig):
        if config.residual_connection != "standard":
            regroup = (
                "--set-block-size S regroups its blocks, and " if "block_size" in config.connection.options else ""
            )
            raise ValueError(
                f"{name} has residual_connection={config.residual_connection!r} already; a retrofit needs a "
                f"'standard' one. With `attnres convert`, {regroup}--to standard undoes an untrained retrofit."
            )
        return config.from_dict(config.to_dict())
    if config.model_type not in BACKBONES:
        raise ValueError(
            f"cannot retrofit the model type {config.model_type!r}. Supported are {', '.join(map(repr, BACKBONES))}, "
            "and `attnres.add_backbone` adds others."
        )
    fields = {key: value for key, value in config.to_dict().items() if key not in _IDENTITY}
    return CONFIG_MAPPING[member_type(config.model_type)].from_dict(fields | {"residual_connection": "standard"})


def backbone_config(config: ResidualConfig) -> PreTrainedConfig:
    """Return the configuration of the standard decoder that is the backbone of a member of the family."""
    family_fields = {
        *_IDENTITY,
        *ResidualConfig.__annotations__,
        *GATE_FIELDS,
        *VALUE_RESIDUAL_FIELDS,
        *chain(*(c.fields for c in CONNECTIONS.values())),
    }
    fields = {key: value for key, value in config.to_dict().items() if key not in family_fields}
    return CONFIG_MAPPING[config.backbone].from_dict(fields)


def retrofit_config(config: PreTrainedConfig, residual: str = DEFAULT_CONNECTION, **options: Any) -> ResidualConfig:
    """Return the configuration that a retrofit gives a standard decoder.

    Args:
        config: The decoder's configuration.
        residual: As in [`attnres.conversion.retrofit`].
        options: As in [`attnres.conversion.retrofit`].

    Returns:
        A new configuration; `config` stays as it is.

    Raises:
        ValueError: The decoder cannot be retrofitted, or one of the arguments is not valid.
    """
    connection = _connection(residual)
    preset = {name: value for name, value in _preset(residual).items() if name != "residual_connection"}
    for option, field in connection.options.items():
        if options.get(option) is not None:
            if field in options:
                raise ValueError(f"give one of {option} and {field}, not both.")
            preset.pop(field, None)
    options = preset | options
    gate = {field: options.pop(field) for field in GATE_FIELDS if field in options}
    values = {field: options.pop(field) for field in VALUE_RESIDUAL_FIELDS if field in options}
    config = member_config(config)
    config.residual_connection = connection.name
    connection.plan_retrofit(config, **options)
    plan_gate(config, **gate)
    plan_value_residual(config, **values)
    config.check_fields()
    return config


def _preset(name: str) -> dict[str, Any]:
    """Return the fields of a preset; none for another name."""
    # A recipe may give a value of any type, also one that cannot be looked up in a dictionary.
    return PRESETS[name] if name in list(PRESETS) else {}


def _connection(name: str) -> type[ResidualConnection]:
    """Return the connection of a name or of a preset. Raise ValueError if there is none."""
    name = _preset(name).get("residual_connection", name)
    if name not in list(CONNECTIONS):
        names = ", ".join(map(repr, (*CONNECTIONS, *PRESETS)))
        raise ValueError(f"there is no residual connection {name!r}; there is {names}.")
    return CONNECTIONS[name]


def added_tensors(model: PreTrainedModel, source: PreTrainedConfig) -> dict[str, nn.Parameter]:
    """Return the tensors that a retrofit adds, by name.

    Args:
        model: The retrofitted model.
        source: The configuration of the decoder it is made from.

    Returns:
        The tensors of residual connections; and of gates and of value residuals, unless the source has these already.
    """
    gates = {} if is_gated(source) else gate_tensors(model)
    values = {} if mixes_values(source) else value_residual_tensors(model)
    return residual_tensors(model) | gates | values


def start_added(model: PreTrainedModel, source: PreTrainedConfig, dtype: torch.dtype) -> None:
    """Replace the added tensors of a model on the meta device by their initial values on the CPU.

    Args:
        model: The retrofitted model.
        source: The configuration of the decoder it is made from.
        dtype: The dtype of the decoder. A connection that computes in float32 gets tensors of at least float32.
    """
    for module in model.modules():
        if isinstance(module, (ResidualConnection, ResidualNorm)):
            is_float32 = getattr(module, "float32", False)
            module.to_empty(device="cpu").to(torch.promote_types(dtype, torch.float32) if is_float32 else dtype)
            model._init_weights(module)
    if not is_gated(source):
        start_gates(model, dtype)
    if not mixes_values(source):
        start_value_residuals(model, dtype)


__all__ = [
    "DEFAULT_CONNECTION",
    "added_tensors",
    "backbone_config",
    "member_config",
    "retrofit_config",
    "start_added",
]
