"""The combinations of the sandbox's layers that this machine's kernel supports."""

import pytest

from attnres.eval import sandbox

try:
    AVAILABLE = sandbox.available()
except RuntimeError as error:
    pytest.skip(str(error), allow_module_level=True)

COMBINATIONS = [("namespaces", "seccomp"), ("landlock", "seccomp"), sandbox.LAYERS]
EACH_COMBINATION = pytest.mark.parametrize(
    "layers", [layers for layers in COMBINATIONS if {*layers} <= {*AVAILABLE}], ids="+".join
)
