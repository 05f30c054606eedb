"""The combinations of the sandbox's layers that this machine's kernel supports."""

import pytest

from attnres.eval import sandbox

try:
    AVAILABLE = sandbox.available()
except RuntimeError as error:
    pytest.skip(str(error), allow_module_level=True)

ALTERNATIVES = [("namespaces", "seccomp"), ("landlock", "seccomp")]
SUPPORTED, combinations = (
    [layers for layers in all_layers if {*layers} <= {*AVAILABLE}]
    for all_layers in (ALTERNATIVES, [*ALTERNATIVES, sandbox.LAYERS])
)
EACH_COMBINATION = pytest.mark.parametrize("layers", combinations, ids="+".join)
