"""The registry: the residual connections by name, the changes of attention, and multi-token prediction.

This file is only installed. Beside weights, `save_pretrained` writes another in its place, which lists what the model
uses. So the imports here are not relative: `transformers` saves every file that a relative import names.
"""

from importlib import import_module

from attnres.attention_change_attnres import AttentionChange
from attnres.attention_gate_attnres import AttentionGate
from attnres.mtp_attnres import MultiTokenPrediction
from attnres.residual_attnres import ResidualConnection
from attnres.utils.declared import declared_connections, presets
from attnres.value_residual_attnres import ValueResiduals

# The first connection is the default. `family` adds the connections of other packages and files.
CONNECTIONS: dict[str, type[ResidualConnection]] = {
    name: getattr(import_module(declared.module), declared.class_name)
    for name, declared in declared_connections().items()
    if declared.module.rpartition(".")[0] == __package__ and name not in presets()
}
# In this order they are made in a layer.
ATTENTION_CHANGES: tuple[type[AttentionChange], ...] = AttentionGate, ValueResiduals
# `None` in the code of a model without a layer for it.
MTP: type[MultiTokenPrediction] | None = MultiTokenPrediction
