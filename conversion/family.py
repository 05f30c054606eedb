"""Map standard decoders to members of the AttnRes family and back, and initialize the tensors that a retrofit adds.

This file works on configurations and on models without weights. Both ways of retrofitting use it: in memory
(`retrofit.py`) and from directory to directory (`convert.py`).

Gates and value residuals may be added to the attention, if their start keeps the function the same. At `W = 0`,
`Y * 2 sigmoid(X W)` and `Y + silu(X W)` are exactly `Y`, the ungated attention. The other forms of the gate differ from
`Y` for every `W`, so a retrofit refuses them. Value residuals start at the coefficients 0 and 1.
"""

from collections.abc import Mapping
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
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
from attnres.attention_gate_attnres import GATE_FIELDS, GatedAttention, check_attention_gate, gate_tensors
from attnres.mtp_attnres import MTP_FIELDS
from attnres.residual_attnres import ResidualNorm, residual_tensors
from attnres.value_residual_attnres import (
    VALUE_RESIDUAL_FIELDS,
    ValueResidual,
    check_value_residual,
    value_residual_tensors,
)

DEFAULT_CONNECTION = next(iter(CONNECTIONS))
# Fields that identify the class of a configuration and its code. They do not change what the model computes.
_IDENTITY = ("model_type", "architectures", "auto_map", "custom_pipelines", "transformers_version")
# The fields that define the gate's function, and their values for which zero weights leave attention unchanged.
_FUNCTION = ("attention_gate_form", "attention_gate_activation", "attention_gate_scale")
_EXACT = (("multiply", "sigmoid", "double"), ("add", "silu", "unit"))


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
    member: Any = CONFIG_MAPPING[member_type(config.model_type)]
    return member.from_dict(fields | {"residual_connection": "standard"})


def backbone_config(config: ResidualConfig) -> PreTrainedConfig:
    """Return the configuration of the standard decoder that is the backbone of a member of the family."""
    family_fields = {
        *_IDENTITY,
        *ResidualConfig.__annotations__,
        *GATE_FIELDS,
        *VALUE_RESIDUAL_FIELDS,
        *MTP_FIELDS,
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
    connection = _find_connection(residual)
    preset = {name: value for name, value in _preset_fields(residual).items() if name != "residual_connection"}
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
    _set_gate(config, **gate)
    _set_value_residual(config, **values)
    config.check_fields()
    return config


def _preset_fields(name: str) -> dict[str, Any]:
    """Return the fields of a preset; none for another name."""
    # A recipe may give a value of any type, also one that cannot be looked up in a dictionary.
    return PRESETS[name] if name in list(PRESETS) else {}


def _find_connection(name: str) -> type[ResidualConnection]:
    """Return the connection of a name or of a preset. Raise ValueError if there is none."""
    name = _preset_fields(name).get("residual_connection", name)
    if name not in list(CONNECTIONS):
        names = ", ".join(map(repr, (*CONNECTIONS, *PRESETS)))
        raise ValueError(f"there is no residual connection {name!r}; there is {names}.")
    return CONNECTIONS[name]


def _set_gate(config: ResidualConfig, **fields: str | None) -> None:
    """Set the fields of the gate in the configuration of a retrofit. Without any field, nothing changes.

    Args:
        config: The configuration of an ungated model. It is changed.
        fields: Fields of the gate; None stands for the default. The default of `attention_gate_scale` is `"double"`
            where only that keeps the function the same.

    Raises:
        ValueError: A value is not allowed, or would change the function, or the attention has a gate already.
    """
    chosen = {field: value for field, value in fields.items() if value is not None}
    if not chosen:
        return
    if config.attention_gate is not None:
        raise ValueError(f"the model has attention_gate={config.attention_gate!r} already, and takes no second gate.")
    if "attention_gate" not in chosen:
        field, value = next(iter(chosen.items()))
        raise ValueError(f"`{field}` is {value!r}, but without `attention_gate` there is no gate. Set that field too.")
    scale = "attention_gate_scale"
    # The sigmoid of zero is 1/2, so a gate that multiplies by it keeps the function only at twice the scale.
    doubled = GATE_FIELDS | {scale: "double"} | chosen
    is_exact = tuple(doubled[field] for field in _FUNCTION) in _EXACT
    for field, value in (doubled if is_exact else GATE_FIELDS | chosen).items():
        setattr(config, field, value)
    check_attention_gate(config)
    if reason := _explain_inexact_gate(config):
        raise ValueError(f"{reason}.")


def differs_from_ungated(config: ResidualConfig, tensors: Mapping[str, Tensor]) -> str | None:
    """Explain why a model with gates may compute another function than the same model without gates.

    Args:
        config: The configuration of the model.
        tensors: The tensors of its gates, by name.

    Returns:
        The reason, or None if the functions are the same.
    """
    if config.attention_gate is None:
        return None
    for name, tensor in tensors.items():
        if tensor.count_nonzero():
            return f"`{name}` is a trained attention gate, with entries up to {tensor.abs().max():.3g}"
    return _explain_inexact_gate(config)


def is_gated(config: PreTrainedConfig) -> bool:
    """Return whether the attention of a configuration's model has gates."""
    return getattr(config, "attention_gate", None) is not None


def _explain_inexact_gate(config: ResidualConfig) -> str | None:
    """Return why a gate with zero weights changes attention, or None if it does not."""
    function = tuple(getattr(config, field) for field in _FUNCTION)
    if function in _EXACT:
        return None
    has = ", ".join(f"`{field}` {value!r}" for field, value in zip(_FUNCTION, function))
    exact = " and ".join("/".join(values) for values in _EXACT)
    return f"a gate with {has} changes attention even at zero weights; {exact} do not"


def _set_value_residual(config: ResidualConfig, value_residual: str | None = None) -> None:
    """Set the field of value residuals in the configuration of a retrofit. Without a value, nothing changes.

    Args:
        config: The configuration of a model without value residuals. It is changed.
        value_residual: The start of the coefficients.

    Raises:
        ValueError: The value is not allowed, or would change the function, or the model has value residuals already.
    """
    if value_residual is None:
        return
    if config.value_residual is not None:
        raise ValueError(f"the model has value_residual={config.value_residual!r} already.")
    config.value_residual = value_residual
    check_value_residual(config)
    if value_residual != "standard":
        raise ValueError(f"`value_residual` is {value_residual!r}, but must be 'standard' in a retrofit.")


def differs_from_unmixed(tensors: Mapping[str, Tensor]) -> str | None:
    """Explain why a model with value residuals may compute another function than without; None if it does not.

    Args:
        tensors: The coefficients, by name.
    """
    for name, tensor in tensors.items():
        if tensor.count_nonzero():
            return f"`{name}` is not zero: its attention sees values of the first layer"
    return None


def _mixes_values(config: PreTrainedConfig) -> bool:
    """Return whether the model of a configuration has value residuals."""
    return getattr(config, "value_residual", None) is not None


def added_tensors(model: PreTrainedModel, source: PreTrainedConfig) -> dict[str, nn.Parameter]:
    """Return the tensors that a retrofit adds, by name.

    Args:
        model: The retrofitted model.
        source: The configuration of the decoder it is made from.

    Returns:
        The tensors of residual connections; and of gates and of value residuals, unless the source has these already.
    """
    gates = {} if is_gated(source) else gate_tensors(model)
    values = {} if _mixes_values(source) else value_residual_tensors(model)
    return residual_tensors(model) | gates | values


@torch.no_grad()
def start_added(model: PreTrainedModel, source: PreTrainedConfig, dtype: torch.dtype) -> None:
    """Replace the added tensors of a model on the meta device by their initial values on the CPU.

    Args:
        model: The retrofitted model.
        source: The configuration of the decoder it is made from.
        dtype: The dtype of the decoder. A connection that computes in float32, and the coefficients of value residuals,
            get at least float32.
    """
    for module in model.modules():
        if isinstance(module, (ResidualConnection, ResidualNorm)):
            is_float32 = getattr(module, "float32", False)
            module.to_empty(device="cpu").to(torch.promote_types(dtype, torch.float32) if is_float32 else dtype)
            model._init_weights(module)
        elif isinstance(module, GatedAttention) and not is_gated(source):
            module.g_proj.to_empty(device="cpu").to(dtype).weight.zero_()
        elif isinstance(module, ValueResidual) and not _mixes_values(source):
            module.to_empty(device="cpu").to(torch.promote_types(dtype, torch.float32)).reset_parameters()


__all__ = [
    "DEFAULT_CONNECTION",
    "added_tensors",
    "backbone_config",
    "differs_from_ungated",
    "differs_from_unmixed",
    "is_gated",
    "member_config",
    "retrofit_config",
    "start_added",
]
