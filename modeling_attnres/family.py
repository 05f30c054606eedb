"""The names of the package `attnres`, and the registration of the model family with `transformers`' Auto classes."""

import importlib
from pathlib import Path
from typing import Any

import transformers
from torch import nn
from transformers import processing_utils

from . import backbones_attnres
from .configuration_attnres import BACKBONES, CONNECTIONS, AttnResConfig, ResidualConfig, Sublayer, Sublayers, register
from .decoder_attnres import ResidualPreTrainedModel
from .functional import depth_attention, depth_attention_reference
from .functional_attnres import DEPTH_ATTENTION
from .modeling_attnres import (
    AttnResForCausalLM,
    AttnResForSequenceClassification,
    AttnResModel,
    AttnResPreTrainedModel,
)
from .residual_attnres import ResidualConnection, residual_tensors


def add_backbone(model_type: str, sublayers: Sublayers) -> None:
    """Bring the family to another decoder of `transformers`: afterwards `attnres_{model_type}` is a model type.

    Args:
        model_type: that of the backbone, known to `AutoConfig`.
        sublayers: what a layer of it computes; see [`Sublayer`] and, for usual forms, `configuration_attnres`.

    Raises:
        ValueError: `AutoConfig` does not know the model type.
    """
    if model_type not in transformers.CONFIG_MAPPING:
        raise ValueError(
            f"{model_type!r} is no model type of `transformers`. Register its configuration with AutoConfig."
        )
    BACKBONES[model_type] = sublayers if callable(sublayers) else tuple(sublayers)
    config_class = backbones_attnres.config_on(model_type)
    transformers.AutoConfig.register(config_class.model_type, config_class, exist_ok=True)


def register_residual_connection(connection: type[ResidualConnection]) -> type[ResidualConnection]:
    """Bring another residual connection to the family: its `name` becomes a value of `residual_connection`.

    It works as a decorator of the class. The class stays where it is: a checkpoint that uses it loads where it has been
    registered, and not by the code beside the weights.

    Args:
        connection: with a `name`, `mix` and `write`; `fields` and all else are optional.

    Raises:
        TypeError: it is no class that derives from [`ResidualConnection`].
        ValueError: its name is no identifier or that of another connection, or one of its fields is a field of a
            configuration already. A class that takes the place of itself, as when a notebook's cell runs again, may.
    """
    if not (isinstance(connection, type) and issubclass(connection, ResidualConnection)):
        raise TypeError(f"{connection!r} is no class that derives from ResidualConnection.")
    name, title = getattr(connection, "name", None), connection.__qualname__
    if not (isinstance(name, str) and name.isidentifier()):
        raise ValueError(f"the `name` of {title} is {name!r}, but must be an identifier.")
    known, defaults = CONNECTIONS.get(name), {}
    if known is not None and (known.__module__, known.__qualname__) != (connection.__module__, title):
        raise ValueError(f"there is a residual connection {name!r} already: {known.__qualname__}.")
    for other in CONNECTIONS.values():
        defaults |= {} if other is known else other.fields
    configs = [AttnResConfig, *(backbones_attnres.config_on(name) for name in BACKBONES if name != "kimi_linear")]
    taken = {field for config in configs for field in (*dir(config), *config.attribute_map)}
    taken -= defaults.keys() | (known.fields.keys() if known else set())
    for field, default in connection.fields.items():
        if defaults.get(field, default) != default or field in taken or not field.isidentifier():
            raise ValueError(f"`{field}` of {title} is a field of the configuration already, or no identifier.")
    register(connection)
    return connection


def peft_modules_to_save(model: nn.Module) -> list[str]:
    """The modules of a model that hold the residual connections' tensors, for PEFT's `modules_to_save`.

    PEFT freezes all that is no target, and these tensors are none, not of `all-linear` either: they are vectors. Named
    to it, they are trained whole and saved with the adapter.

    ```python
    >>> config = LoraConfig(target_modules="all-linear", modules_to_save=attnres.peft_modules_to_save(model))
    ```

    Returns:
        Their names in the module that holds them, such as `mlp_res_proj`; none for a standard model.
    """
    return sorted({name.split(".")[-2] for name in residual_tensors(model)})


def _upload_with_card(model: ResidualPreTrainedModel, folder: str, repo: str, *args: Any, **kwargs: Any) -> Any:
    """What `model.push_to_hub` calls when all is saved, with a card of ours in the place of the template's."""
    cards = importlib.import_module("attnres.conversion.cards")  # not before: it is of a room above
    text = cards.decode_card((Path(folder) / cards.CARD).read_bytes(), cards.CARD)
    cards.write_card(cards.without_template(text), cards.Subject(model.config, Path(folder), repo))
    return transformers.PreTrainedModel._upload_modified_files(model, folder, repo, *args, **kwargs)


# Models that are loaded by the code beside their weights have `transformers`' own.
ResidualPreTrainedModel._upload_modified_files = _upload_with_card
transformers.AutoConfig.register(AttnResConfig.model_type, AttnResConfig, exist_ok=True)
for _auto_class, _name in AttnResPreTrainedModel.auto_classes.items():
    getattr(transformers, _auto_class).register(AttnResConfig, globals()[_name], exist_ok=True)
for _backbone, _sublayers in BACKBONES.items():
    if _backbone != AttnResConfig.backbone:
        add_backbone(_backbone, _sublayers)


def __getattr__(name: str) -> type:
    """The classes on other backbones, such as `AttnResLlamaForCausalLM`, when they are first asked for."""
    return getattr(backbones_attnres, name)


def _in_transformers(name: str) -> type:
    """`transformers.AttnResForCausalLM`: tools look the `architectures` of a configuration up there."""
    if name.startswith("AttnRes"):
        return globals().get(name) or __getattr__(name)
    raise AttributeError(name)  # `transformers` goes on with its own


# `processing_utils` puts a new module `transformers` in the place of the one that whoever was first has imported.
for _module in (transformers, processing_utils.transformers_module):
    _module.__getattr__ = _in_transformers


__all__ = [
    "BACKBONES",
    "CONNECTIONS",
    "DEPTH_ATTENTION",
    "AttnResConfig",
    "AttnResForCausalLM",
    "AttnResForSequenceClassification",
    "AttnResModel",
    "AttnResPreTrainedModel",
    "ResidualConfig",
    "ResidualConnection",
    "Sublayer",
    "add_backbone",
    "depth_attention",
    "depth_attention_reference",
    "peft_modules_to_save",
    "register_residual_connection",
]
