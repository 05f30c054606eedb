"""Named configurations: directories with a `config.json`, and their loader.

Each directory is one model: `attnres-tiny` for tests and demos, the five models of the paper's scaling table, and
`attnres-48b-a3b`; `attnres-k3-tiny` and `kimi-k3` are Kimi K3, small and as released. The README beside this file
tabulates them. The override `residual_connection="standard"` gives the baseline of each.
"""

import json
from dataclasses import fields

from attnres import CONNECTIONS, AttnResConfig, AttnResKimiK3Config
from attnres.attention_gate_attnres import GATE_FIELDS
from attnres.mtp_attnres import MTP_FIELDS
from attnres.utils.packaged import configuration_names, configurations
from attnres.utils.wording import did_you_mean
from attnres.value_residual_attnres import VALUE_RESIDUAL_FIELDS

from .counting import ParameterCount, count_parameters

# Keys that the configuration accepts, though they are not its fields.
_SETTINGS = ("num_labels", "attn_implementation", "experts_implementation")
_PER_LAYER_FIELDS = ("layer_types", "mlp_layer_types")


def names() -> tuple[str, ...]:
    """Return the names of the configurations, in alphabetical order."""
    return configuration_names()


def load(name: str, **overrides) -> AttnResConfig:
    """Load a named configuration, with some of its fields replaced.

    Args:
        name: One of [`names`].
        overrides: Fields of the configuration and their values. A field that releases name differently may have either
            name, such as `num_local_experts` and `num_experts`. A smaller `num_hidden_layers` keeps the first layers:
            it also cuts `layer_types` and `mlp_layer_types`, unless they are overridden too. A larger one needs both
            lists, since the pattern of the new layers is not known. An override changes no other field.

    Returns:
        The configuration.

    Raises:
        ValueError: The name is unknown, a field is unknown (a misspelt one would otherwise be stored and have no
            effect), or the configuration refuses a value.

    ```python
    >>> from attnres.configuration import load

    >>> baseline = load("attnres-194m", residual_connection="standard")
    ```
    """
    known_names = names()
    if name not in known_names:
        hint = did_you_mean(name, known_names, otherwise_all=False)
        raise ValueError(f"There is no configuration {name!r}; the configurations are {', '.join(known_names)}.{hint}")
    config = json.loads((configurations() / name / "config.json").read_text(encoding="utf-8"))
    is_kimi_k3 = config["model_type"] == AttnResKimiK3Config.model_type
    config_class = AttnResKimiK3Config if is_kimi_k3 else AttnResConfig
    _check_fields(overrides, config_class)
    config = config_class.fields_of_file(config)
    if "num_hidden_layers" in overrides:
        for field in {*_PER_LAYER_FIELDS} & config.keys():
            config[field] = config[field][: overrides["num_hidden_layers"]]
    if is_kimi_k3:
        return config_class.from_dict(config, **overrides)  # some of its fields follow from others
    # A field may have two names, of `transformers` and of the released model.
    names_of_fields = config_class.attribute_map
    replaced = {names_of_fields.get(field, field) for field in overrides}
    config = {field: value for field, value in config.items() if names_of_fields.get(field, field) not in replaced}
    return config_class(**config, **overrides)


def _check_fields(overrides: dict, config_class: type[AttnResConfig]) -> None:
    """Raise ValueError if an override is neither a field of the configuration nor one of `_SETTINGS`."""
    known_fields = {field.name for field in fields(config_class)} | {*_SETTINGS}
    known_fields.update(GATE_FIELDS, VALUE_RESIDUAL_FIELDS, *(connection.fields for connection in CONNECTIONS.values()))
    known_fields |= {*MTP_FIELDS, "num_nextn_predict_layers"}
    known_fields.update(config_class.attribute_map.values())  # the names in the released model
    if config_class is AttnResKimiK3Config:
        known_fields.add("linear_attn_config")  # the released model has some fields there
    for field in overrides:
        if field not in known_fields:
            hint = did_you_mean(field, sorted(known_fields))
            raise ValueError(f"`{field}` is not a field of `{config_class.__name__}`.{hint}")


__all__ = ["ParameterCount", "count_parameters", "load", "names"]
