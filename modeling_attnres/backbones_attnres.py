"""The family on every other backbone of `BACKBONES`: for `llama`, `AttnResLlamaConfig`, `AttnResLlamaForCausalLM`, ...

Each class is the backbone's own behind a mixin of `decoder_attnres`, made when first asked for.
"""

import re
import sys
from functools import cache

import transformers
from transformers import CONFIG_MAPPING, MODEL_MAPPING, conversion_mapping
from transformers.conversion_mapping import WeightRenaming
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from .configuration_attnres import BACKBONES, ResidualConfig
from .decoder_attnres import PooledByMask, ResidualDecoderLayer, ResidualHead, ResidualModel, ResidualPreTrainedModel

_HEADS = {
    "AutoModelForCausalLM": transformers.MODEL_FOR_CAUSAL_LM_MAPPING,
    "AutoModelForQuestionAnswering": transformers.MODEL_FOR_QUESTION_ANSWERING_MAPPING,
    "AutoModelForTokenClassification": transformers.MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING,
}


class BackboneConfig(ResidualConfig):
    """Registers the models on its backbone when the first one is made."""

    def __post_init__(self, **kwargs):
        super().__post_init__(**kwargs)
        for auto_class, model_class in models_on(self.backbone).items():
            getattr(transformers, auto_class).register(type(self), model_class, exist_ok=True)


@cache
def config_on(backbone: str) -> type[ResidualConfig]:
    """The family's configuration class on a backbone."""
    parent = CONFIG_MAPPING[backbone]
    doc = f"All fields of [`{parent.__name__}`] and of [`ResidualConfig`]."
    config_class = _make(parent, BackboneConfig, __doc__=doc, model_type=f"attnres_{backbone}", backbone=backbone)
    config_class.register_for_auto_class()
    return config_class


@cache
def models_on(backbone: str) -> dict[str, type[ResidualPreTrainedModel]]:
    """The family's models on a backbone, by Auto class."""
    config_class, backbone_config = config_on(backbone), CONFIG_MAPPING[backbone]
    heads = {name: models[backbone_config] for name, models in _HEADS.items() if backbone_config in models}
    model, causal_lm = MODEL_MAPPING[backbone_config], heads["AutoModelForCausalLM"]
    layer_class = _make(getattr(sys.modules[model.__module__], model._no_split_modules[0]), ResidualDecoderLayer)
    shared = {"config_class": config_class, "_no_split_modules": [layer_class.__name__]}
    model_class = _make(model, ResidualModel, layer_class=layer_class, **shared)
    shared |= {"model_class": model_class, "base_model_prefix": causal_lm.base_model_prefix}
    name = causal_lm.__name__.replace("ForCausalLM", "ForSequenceClassification")
    classifier = _make(model.__base__, ResidualHead, PooledByMask, name=name, **shared)
    classes = {"AutoModel": model_class, "AutoModelForSequenceClassification": classifier}
    classes |= {auto_class: _make(head, ResidualHead, **shared) for auto_class, head in heads.items()}
    for auto_class, a_class in classes.items():
        a_class.auto_classes = {key: value.__name__ for key, value in classes.items()}
        a_class.register_for_auto_class(auto_class)
    # Checkpoints have the backbone's layout, known by model type or class name.
    of_classes = ((parent.__name__, f"AttnRes{parent.__name__}") for parent in (model, *heads.values()))
    for theirs, ours in ((backbone, config_class.model_type), *of_classes):
        if rules := conversion_mapping.get_checkpoint_conversion_mapping(theirs):
            rules = [_exact(rule) for rule in rules]
            conversion_mapping.register_checkpoint_conversion_mapping(ours, rules, overwrite=True)
    return classes


def _exact(rule: object) -> object:
    """On saving, a target like `.mlp.` is a regular expression, and matches `.mlp_res_proj` too."""
    if type(rule) is WeightRenaming and all(re.fullmatch(r"\.[\w.]+\.", name) for name in rule.target_patterns):
        return WeightRenaming(rule.source_patterns, [re.escape(name) for name in rule.target_patterns])
    return rule


def _make(parent: type, *mixins: type, name: str | None = None, **members) -> type:
    """The class `AttnRes{parent}`, mixins before a backbone's class, as if written here."""
    name = f"AttnRes{name or parent.__name__}"
    globals()[name] = type(name, (*mixins, parent), {"__module__": __name__, **members})
    return globals()[name]


def __getattr__(name: str) -> type:
    for backbone in BACKBONES:
        prefix = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(backbone, "").removesuffix("ForCausalLM")
        if prefix and name.startswith(f"AttnRes{prefix}"):
            models_on(backbone)
            if name in globals():
                return globals()[name]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
