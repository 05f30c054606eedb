"""Attention Residuals for Transformers: each layer attends over the outputs of earlier layers.

Importing this package registers the model family with the Auto classes of `transformers`.
"""

import transformers

from .configuration_attnres import AttnResConfig
from .functional_attnres import depth_attention, depth_attention_reference
from .modeling_attnres import (
    AUTO_CLASSES,
    AttnResForCausalLM,
    AttnResForSequenceClassification,
    AttnResModel,
    AttnResPreTrainedModel,
)

__version__ = "0.1.0"

transformers.AutoConfig.register(AttnResConfig.model_type, AttnResConfig, exist_ok=True)
for _auto_class, _model_class in AUTO_CLASSES.items():
    getattr(transformers, _auto_class).register(AttnResConfig, _model_class, exist_ok=True)

__all__ = [
    "AttnResConfig",
    "AttnResForCausalLM",
    "AttnResForSequenceClassification",
    "AttnResModel",
    "AttnResPreTrainedModel",
    "depth_attention",
    "depth_attention_reference",
]
