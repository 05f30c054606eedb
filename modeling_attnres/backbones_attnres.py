"""The family on every other backbone of `BACKBONES`: for `llama`, `AttnResLlamaConfig`, `AttnResLlamaForCausalLM`, ...

Each class is the backbone's own behind a mixin of `decoder_attnres`. They are made when first asked for, by name or by
a configuration, so that a backbone that nobody uses costs no import.
"""

import re
import sys
from functools import cache

import transformers
from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_MAPPING
from transformers.conversion_mapping import (
    WeightRenaming,
    get_checkpoint_conversion_mapping,
    register_checkpoint_conversion_mapping,
)
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from .configuration_attnres import ResidualConfig
from .decoder_attnres import (
    ResidualDecoderLayer,
    ResidualForCausalLM,
    ResidualForSequenceClassification,
    ResidualModel,
    ResidualPreTrainedModel,
)
from .sublayers_attnres import BACKBONES


class BackboneConfig(ResidualConfig):
    """Registers the models on its backbone with the Auto classes when the first configuration is made."""

    def __post_init__(self, **kwargs):
        super().__post_init__(**kwargs)
        for auto_class, model_class in models_on(self.backbone).items():
            getattr(transformers, auto_class).register(type(self), model_class, exist_ok=True)


@cache
def config_on(backbone: str) -> type[ResidualConfig]:
    """The family's configuration class on a backbone (a model type of `transformers`), such as `AttnResLlamaConfig`."""
    parent = CONFIG_MAPPING[backbone]
    doc = f"All fields of [`{parent.__name__}`] and of [`ResidualConfig`]."
    config_class = _make(
        parent,
        BackboneConfig,
        model_type=f"attnres_{backbone}",
        backbone=backbone,
        base_model_pp_plan=None,
        __doc__=doc,
    )
    config_class.register_for_auto_class()
    return config_class


@cache
def models_on(backbone: str) -> dict[str, type[ResidualPreTrainedModel]]:
    """The family's models on a backbone, by the Auto class that loads them."""
    config_class, backbone_config = config_on(backbone), CONFIG_MAPPING[backbone]
    model, causal_lm = MODEL_MAPPING[backbone_config], MODEL_FOR_CAUSAL_LM_MAPPING[backbone_config]
    layer = getattr(sys.modules[model.__module__], model._no_split_modules[0])

    layer_class = _make(layer, ResidualDecoderLayer)
    shared = {"config_class": config_class, "_no_split_modules": [layer_class.__name__]}
    model_class = _make(model, ResidualModel, layer_class=layer_class, **shared)
    shared |= {"model_class": model_class, "base_model_prefix": causal_lm.base_model_prefix}
    classes = {
        "AutoModel": model_class,
        "AutoModelForCausalLM": _make(causal_lm, ResidualForCausalLM, **shared),
        "AutoModelForSequenceClassification": _make(
            model.__base__,
            ResidualForSequenceClassification,
            name=causal_lm.__name__.replace("ForCausalLM", "ForSequenceClassification"),
            **shared,
        ),
    }
    for auto_class, a_class in classes.items():
        a_class.auto_classes = {key: value.__name__ for key, value in classes.items()}
        a_class.register_for_auto_class(auto_class)
    # Checkpoints have the layout of the backbone's. `transformers` knows those that differ by model type or class name.
    _take_layout(backbone, config_class.model_type)
    for parent, a_class in ((model, model_class), (causal_lm, classes["AutoModelForCausalLM"])):
        _take_layout(parent.__name__, a_class.__name__)
    return classes


def _take_layout(backbone: str, member: str) -> None:
    """Register the layout that checkpoints of a `backbone`, a model type or class name, have for a `member` as well."""
    mapping = get_checkpoint_conversion_mapping(backbone)
    if mapping is None:
        return
    # Reversed, on saving, a target like `.mlp.` is a regular expression, which `.mlp_res_proj` would match as well.
    for i, rule in enumerate(mapping):
        if type(rule) is WeightRenaming and all(re.fullmatch(r"\.[\w.]+\.", name) for name in rule.target_patterns):
            mapping[i] = WeightRenaming(rule.source_patterns, [re.escape(name) for name in rule.target_patterns])
    register_checkpoint_conversion_mapping(member, mapping, overwrite=True)


def _make(parent: type, mixin: type, name: str | None = None, **members) -> type:
    """The class `AttnRes{parent}`, of a backbone's class behind a mixin, as if it were written in this file."""
    name = f"AttnRes{name or parent.__name__}"
    globals()[name] = type(name, (mixin, parent), {"__module__": __name__, **members})
    return globals()[name]


def __getattr__(name: str) -> type:
    for backbone in BACKBONES:
        prefix = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(backbone, "").removesuffix("ForCausalLM")
        if prefix and name.startswith(f"AttnRes{prefix}"):
            models_on(backbone)
            if name in globals():
                return globals()[name]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
