"""The combinations of the sandbox's layers that this machine's kernel supports."""

import pytest

from attnres.eval import sandbox

try:
    AVAILABLE = sandbox.available()
except RuntimeError as error:
    pytest.skip(str(error), allow_module_level=True)

ALTERNATIVES = [("namespaces", "seccomp"), ("landlock", "seccomp")]
EACH_ALTERNATIVE, EACH_COMBINATION = (
    pytest.mark.parametrize("layers", [layers for layers in all_layers if {*layers} <= {*AVAILABLE}], ids="+".join)
    for all_layers in (ALTERNATIVES, [*ALTERNATIVES, sandbox.LAYERS])
)
