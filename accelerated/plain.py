"""Check that a module computes what the source of its class defines, so that a kernel may compute it instead.

A sublayer begins with a norm, and nothing else reads the result of its depth attention. So one kernel can compute both.
The checks run before each forward pass, because hooks, adapters and patches may be added at any time.
"""

import sys
from collections.abc import Callable, Sequence
from functools import cache
from types import SimpleNamespace
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from . import compat

if TYPE_CHECKING:
    from .interface import Connection

# A connection, its key norm, and the module, usually a norm, that runs next, if there is one.
Read = tuple["Connection", nn.Module, nn.Module | None]


def runs_forward_alone(module: nn.Module) -> bool:
    """Return whether calling a module runs the `forward` in the file of its class, and nothing else.

    It does not if the module has hooks, or if an adapter, an offloading engine or a patch has changed the module or its
    class. [`modules_are_called_plainly`] checks what concerns all modules.
    """
    return is_plain_module(module) and is_unpatched(type(module), "forward")


def is_plain_module(module: nn.Module) -> bool:
    """Return whether a module has no hooks, is not compiled, and has no attribute `forward` that hides its class's.

    It does not check the class. A hook by which `transformers` records outputs counts only while it records.
    """
    attributes = vars(module)
    if "forward" in attributes or attributes["_forward_pre_hooks"]:
        return False
    if attributes["_backward_hooks"] or attributes["_backward_pre_hooks"]:
        return False
    hooks = attributes["_forward_hooks"]
    if hooks and not all(compat.is_silent(hook) for hook in hooks.values()):
        return False
    return not compat.is_compiled(module)


def modules_are_called_plainly() -> bool:
    """Return whether PyTorch's own code calls modules, without hooks on all modules."""
    return not compat.has_hooks_on_all_modules() and compat.module_call_is_unpatched()


def is_unpatched(module_class: type[nn.Module], name: str) -> bool:
    """Return whether a method is the one in the source of its class, and calls go through `nn.Module.__call__`.

    Args:
        module_class: class of a module.
        name: name of the method.
    """
    # An argument of the cached function, so that a patch of the method makes a new entry.
    method = getattr(module_class, name, None)
    return module_class.__call__ is nn.Module.__call__ and _is_of_its_file(module_class, name, method)


def are_plain(reads: Sequence[Read]) -> bool:
    """Return whether the connections and key norms of a pass compute what their classes define, and nothing observes.

    Args:
        reads: all reads of the pass.
    """
    if torch.compiler.is_compiling() or compat.why_operations_are_observed() is not None:
        return False
    if not reads or not modules_are_called_plainly():
        return False
    connection_class, key_norm_class = type(reads[0][0]), type(reads[0][1])
    # A patched `write` may make another state, which the connection must read itself.
    methods = (connection_class, "forward"), (connection_class, "write"), (key_norm_class, "forward")
    if not all(is_unpatched(*method) for method in methods):
        return False
    return all(
        type(connection) is connection_class
        and type(key_norm) is key_norm_class
        and "write" not in vars(connection)
        and is_plain_module(connection)
        and is_plain_module(key_norm)
        for connection, key_norm, _ in reads
    )


@cache
def _is_of_its_file(module_class: type, name: str, method: Callable | None) -> bool:
    """Return whether a method was written under its name in the file of the class that has it, without a wrapper."""
    owner = next((c for c in module_class.__mro__ if name in vars(c) and vars(c)[name] is method), None)
    if owner is None or method is None or hasattr(method, "__wrapped__") or not hasattr(method, "__code__"):
        return False
    file = getattr(sys.modules.get(owner.__module__), "__file__", None)
    return method.__code__.co_filename == file and method.__qualname__ == f"{owner.__qualname__}.{name}"


def is_plain_rms_norm(module: nn.Module, *dtypes: torch.dtype) -> bool:
    """Return whether calling a module is `weight * (x * rsqrt(mean(x^2) + variance_epsilon))`.

    The mean must be in float32, and the product in parentheses rounded to the dtype of `x`. A trial on some numbers
    must agree bit for bit.

    Args:
        module: the norm.
        dtypes: dtypes of its input `x`, for all of which this must hold.
    """
    if not isinstance(vars(module).get("variance_epsilon"), float) or not runs_forward_alone(module):
        return False
    weight = module._parameters.get("weight")
    is_vector = weight is not None and weight.ndim == 1
    return is_vector and all(_computes_rms_norm(type(module).forward, dtype) for dtype in dtypes)


@cache
def _computes_rms_norm(forward: Callable, dtype: torch.dtype) -> bool:
    rows = torch.arange(1, 1 + 24 * 32, dtype=torch.float32, device="cpu").view(24, 32)
    # Rows of several magnitudes and one of zeros show the weight, both roundings and epsilon.
    x = (rows.sin() * torch.logspace(-4, 3, 24, dtype=torch.float32, device="cpu")[:, None]).to(dtype)
    x[3] = 0
    weight = (1 + 0.3 * rows[0].cos()).to(dtype)
    stand_in = SimpleNamespace(weight=weight, variance_epsilon=0.01)
    try:
        with torch.no_grad(), torch.autocast("cpu", enabled=False):
            return all(_equal(forward(stand_in, part), _rms_norm(part, weight, 0.01)) for part in (x, x[None, :5]))
    except Exception:  # a norm that needs other attributes than the stand-in has
        return False


def _rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = x.to(torch.float32)
    return weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype)


def _equal(one: object, other: Tensor) -> bool:
    return isinstance(one, Tensor) and one.dtype is other.dtype and torch.equal(one, other)


__all__ = [
    "Read",
    "are_plain",
    "is_plain_module",
    "is_plain_rms_norm",
    "is_unpatched",
    "modules_are_called_plainly",
    "runs_forward_alone",
]
