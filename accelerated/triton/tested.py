"""Remember that the tests for GPUs have passed on this machine.

The direct path of a read was never measured on a GPU. So `auto` leaves it out until its tests have passed where it is
to run: `python -m benchmarks --device cuda` runs them, and records that they passed. By the name `"triton"`, models
take it always.
"""

import hashlib
from pathlib import Path

import torch

from ..machine_code import usual_parents, writable_folder

_FOLDER = Path(__file__).parent


def have_passed() -> bool:
    """Return whether an earlier process has recorded that the tests of this code passed, with this PyTorch."""
    return any((parent / _name()).exists() for parent in usual_parents(__file__))


def record() -> None:
    """Record that the tests passed; later processes take the direct path.

    Raises:
        OSError: no folder can be written to.
    """
    writable_folder(_name(), usual_parents(__file__))


def _name() -> str:
    digest = hashlib.sha256(torch.__version__.encode())
    for name in ("direct.py", "host.cpp", "host.py", "kernels.py", "launch.py"):
        digest.update((_FOLDER / name).read_bytes())
    return f"gpu-tests-passed-{digest.hexdigest()[:32]}"


__all__ = ["have_passed", "record"]
