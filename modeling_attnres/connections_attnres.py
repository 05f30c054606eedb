"""The registry: the residual connections by name, and the changes of attention.

This file is only installed. Beside weights, `save_pretrained` writes another in its place, which lists what the model
uses. So the imports here are not relative: `transformers` saves every file that a relative import names.
"""

from importlib import import_module

from attnres.attention_change_attnres import AttentionChange
from attnres.attention_gate_attnres import AttentionGate
from attnres.residual_attnres import ResidualConnection
from attnres.utils.declared import declared_connections
from attnres.value_residual_attnres import ValueResiduals

# The first is the default. A preset names a class that is there already.
CONNECTIONS: dict[str, type[ResidualConnection]] = {
    connection.name: connection
    for connection in (getattr(import_module(d.module), d.class_name) for d in declared_connections().values())
}
# In this order they are made in a layer.
ATTENTION_CHANGES: tuple[type[AttentionChange], ...] = AttentionGate, ValueResiduals
