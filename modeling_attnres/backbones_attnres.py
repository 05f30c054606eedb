"""The family on all backbones but Kimi Linear: for `llama`, `AttnResLlamaConfig`, `AttnResLlamaForCausalLM`, ...

Each class is a mixin of `decoder_attnres` in front of the backbone's own class. It is made on first use, because the
import of all backbones would take seconds.
"""

import re
import sys
from collections.abc import Callable
from functools import cache
from typing import Any

import transformers
from torch import nn
from transformers import CONFIG_MAPPING, MODEL_MAPPING, PreTrainedModel, conversion_mapping
from transformers.conversion_mapping import WeightRenaming
from transformers.modeling_layers import GenericForTokenClassification
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from .configuration_attnres import BACKBONES, ResidualConfig
from .decoder_attnres import ResidualDecoderLayer, ResidualModel
from .heads_attnres import PooledByMask, ResidualHead, ResidualLanguageModel
from .pretrained_attnres import ResidualPreTrainedModel

_HEADS = {
    "AutoModelForCausalLM": transformers.MODEL_FOR_CAUSAL_LM_MAPPING,
    "AutoModelForQuestionAnswering": transformers.MODEL_FOR_QUESTION_ANSWERING_MAPPING,
    "AutoModelForTokenClassification": transformers.MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING,
}


# Functions that are called with every class that is made here.
on_new_class: list[Callable[[type], None]] = []


class BackboneConfig(ResidualConfig):
    """Base of the configuration classes. Its first instance makes the models on its backbone."""

    def __post_init__(self, **kwargs):
        super().__post_init__(**kwargs)
        models_on(self.backbone)


@cache
def config_on(backbone: str) -> type[ResidualConfig]:
    """Return the family's configuration class on a backbone, a model type of `BACKBONES`."""
    parent = CONFIG_MAPPING[backbone]
    doc = f"All fields of [`{parent.__name__}`] and of [`ResidualConfig`]."
    fields: dict[str, Any] = {}
    if "num_mtp_layers" in getattr(parent, "__dataclass_fields__", ()):
        # A model from scratch has a layer for multi-token prediction only if it is asked for.
        fields = {"num_mtp_layers": 0, "__annotations__": {"num_mtp_layers": int}}
    model_type = f"attnres_{backbone}"
    config_class = _make(parent, BackboneConfig, __doc__=doc, model_type=model_type, backbone=backbone, **fields)
    config_class.register_for_auto_class()
    return config_class


@cache
def models_on(backbone: str) -> dict[str, type[ResidualPreTrainedModel]]:
    """Return the family's model classes on a backbone by Auto class, such as `"AutoModelForCausalLM"`.

    The first call makes them and registers them with the Auto classes.

    Raises:
        ValueError: the backbone has no decoder, no language model, or no name of its layers' class.
    """
    config_class, backbone_config = config_on(backbone), CONFIG_MAPPING[backbone]
    heads: dict[str, Any] = {
        name: models[backbone_config] for name, models in _HEADS.items() if backbone_config in models
    }
    if backbone_config not in MODEL_MAPPING or "AutoModelForCausalLM" not in heads:
        raise ValueError(
            f"{backbone!r} must have a decoder and a language model: register their classes with `AutoModel` and "
            "`AutoModelForCausalLM`."
        )
    model: Any = MODEL_MAPPING[backbone_config]
    causal_lm = heads["AutoModelForCausalLM"]
    layer_class = _make(_layer_class(backbone, model), ResidualDecoderLayer)
    shared: dict[str, Any] = {"config_class": config_class, "_no_split_modules": [layer_class.__name__]}
    model_class = _make(model, ResidualModel, layer_class=layer_class, **shared)
    shared |= {"model_class": model_class, "base_model_prefix": causal_lm.base_model_prefix}
    name = causal_lm.__name__.removesuffix("ForCausalLM")
    classifier = _make(model.__base__, ResidualHead, PooledByMask, name=f"{name}ForSequenceClassification", **shared)
    classes = {"AutoModel": model_class, "AutoModelForSequenceClassification": classifier}
    if "AutoModelForTokenClassification" not in heads:
        named = f"{name}ForTokenClassification"
        tagger = _make(model.__base__, ResidualHead, GenericForTokenClassification, name=named, **shared)
        classes["AutoModelForTokenClassification"] = tagger
    for auto_class, head in heads.items():
        mixin = ResidualLanguageModel if head is causal_lm else ResidualHead
        classes[auto_class] = _make(head, mixin, **shared)
    for auto_class, a_class in classes.items():
        a_class.auto_classes = {key: value.__name__ for key, value in classes.items()}
        a_class.register_for_auto_class(auto_class)
        getattr(transformers, auto_class).register(config_class, a_class, exist_ok=True)
    # Checkpoints have the backbone's tensor names. `transformers` finds renamings by model type or class name.
    of_classes = ((parent.__name__, f"AttnRes{parent.__name__}") for parent in (model, *heads.values()))
    for theirs, ours in ((backbone, config_class.model_type), *of_classes):
        if rules := conversion_mapping.get_checkpoint_conversion_mapping(theirs):
            rules = [_exact(rule) for rule in rules]
            conversion_mapping.register_checkpoint_conversion_mapping(ours, rules, overwrite=True)
    if conversion_mapping.get_checkpoint_conversion_mapping(backbone):
        _adapt_experts_alike(backbone, config_class.model_type)
    return classes


def _layer_class(backbone: str, model: type[PreTrainedModel]) -> type[nn.Module]:
    """Return the class of the layers of a backbone's decoder; raise `ValueError` if the decoder does not name it."""
    # Without a model, no other attribute names the class.
    names = model._no_split_modules
    layer_class = getattr(sys.modules[model.__module__], next(iter(names or ()), ""), None)
    if layer_class is None:
        raise ValueError(
            f"the decoder of {backbone!r} must name the class of its layers, of the same file, first in "
            f"`_no_split_modules`, which is {names!r}."
        )
    return layer_class


def _adapt_experts_alike(backbone: str, model_type: str) -> None:
    """Let PEFT adapt the experts of a model type as it does those of its backbone.

    PEFT finds out by a table of `transformers` how old names of experts, as in `target_modules` and in adapters of
    earlier releases, became new ones. Neither has a function that adds a model type. PEFT makes a copy of the table
    when it is first needed, which may be before this.
    """
    peft = sys.modules.get("peft.utils.transformers_weight_conversion")
    for module in filter(None, (conversion_mapping, peft)):
        table = getattr(module, "_MODEL_TO_CONVERSION_PATTERN", {})
        table[model_type] = table.get(backbone, backbone)  # a model type without a line has names of its own


def _exact(rule: Any) -> Any:
    """Escape the dots in a renaming's targets.

    On saving, `transformers` uses a target such as `.mlp.` as a regular expression, which matches `.mlp_res_proj` too.
    """
    if type(rule) is WeightRenaming and all(re.fullmatch(r"\.[\w.]+\.", name) for name in rule.target_patterns):
        return WeightRenaming(rule.source_patterns, [re.escape(name) for name in rule.target_patterns])
    return rule


def _make(parent: type, *mixins: type, name: str | None = None, **members) -> type:
    """Make the class `AttnRes{parent}` of mixins and a backbone's class, as if it were written in this file."""
    name = f"AttnRes{name or parent.__name__}"
    new_class = type(name, (*mixins, parent), {"__module__": __name__, **members})
    globals()[name] = new_class
    for callback in on_new_class:
        callback(new_class)
    return new_class


def _language_model(backbone: str) -> str:
    """Return the name of a backbone's language model, without its import; an empty string if there is none."""
    name, models = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(backbone), _HEADS["AutoModelForCausalLM"]
    if name is None and CONFIG_MAPPING[backbone] in models:  # a decoder of another package
        name = models[CONFIG_MAPPING[backbone]].__name__  # pyrefly: ignore[missing-attribute]  # one class
    return name or ""


def __getattr__(name: str) -> type:
    """Return a class by name; make the classes of its backbone first."""
    for backbone in BACKBONES:
        prefix = _language_model(backbone).removesuffix("ForCausalLM")
        if prefix and name.startswith(f"AttnRes{prefix}"):
            models_on(backbone)
            if name in globals():
                return globals()[name]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
