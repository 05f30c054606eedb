"""The names of the package `attnres`, and the registration of the model family with `transformers`' Auto classes."""

import transformers

from . import backbones_attnres
from .configuration_attnres import BACKBONES, CONNECTIONS, AttnResConfig, ResidualConfig, Sublayer, Sublayers
from .functional import depth_attention, depth_attention_reference
from .functional_attnres import DEPTH_ATTENTION
from .modeling_attnres import (
    AttnResForCausalLM,
    AttnResForSequenceClassification,
    AttnResModel,
    AttnResPreTrainedModel,
)
from .residual_attnres import ResidualConnection


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


transformers.AutoConfig.register(AttnResConfig.model_type, AttnResConfig, exist_ok=True)
for _auto_class, _name in AttnResPreTrainedModel.auto_classes.items():
    getattr(transformers, _auto_class).register(AttnResConfig, globals()[_name], exist_ok=True)
for _backbone, _sublayers in BACKBONES.items():
    if _backbone != AttnResConfig.backbone:
        add_backbone(_backbone, _sublayers)


def __getattr__(name: str) -> type:
    """The classes on other backbones, such as `AttnResLlamaForCausalLM`, when they are first asked for."""
    return getattr(backbones_attnres, name)


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
]
