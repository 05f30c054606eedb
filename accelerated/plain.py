"""Find out whether a module does only what the source of its class says, so that a kernel may compute it instead.

The norm that a sublayer begins with is the only reader of depth attention's result, so one kernel can compute both. The
question is asked before each forward pass, since hooks, adapters and patches may come at any time.
"""

import sys
from collections.abc import Callable
from functools import cache
from types import SimpleNamespace

import torch
from torch import Tensor, nn

from . import compat


def has_no_hooks(module: nn.Module) -> bool:
    """Return whether calling a module runs the `forward` that the file of its class defines, and nothing else.

    It is false if an adapter, an offloading engine or a patch has changed the module or its class, or if it has hooks.
    The hooks by which `transformers` records outputs do not count while nothing is recorded. Conditions that hold for
    all modules are left to [`modules_are_called_plainly`].
    """
    return is_plain_module(module) and is_unpatched(type(module), "forward")


def is_plain_module(module: nn.Module) -> bool:
    """Return whether a module itself has no hooks and no `forward` of its own; its class is not looked at."""
    own = vars(module)
    if "forward" in own or own["_forward_pre_hooks"] or own["_backward_hooks"] or own["_backward_pre_hooks"]:
        return False
    hooks = own["_forward_hooks"]
    if hooks and not all(compat.is_silent(hook) for hook in hooks.values()):
        return False
    return not compat.is_compiled(module)


def modules_are_called_plainly() -> bool:
    """Return whether calling modules is PyTorch's own code, without hooks on all modules."""
    return not compat.has_hooks_on_all_modules() and compat.calls_forward_alone()


def is_unpatched(module_class: type[nn.Module], name: str) -> bool:
    """Return whether a method is the one in the source of its class, and calls go through `nn.Module.__call__`.

    Args:
        module_class: class of a module.
        name: name of the method.
    """
    return module_class.__call__ is nn.Module.__call__ and _is_of_its_file(
        module_class, name, getattr(module_class, name, None)
    )


@cache
def _is_of_its_file(module_class: type, name: str, method: Callable | None) -> bool:
    owner = next((c for c in module_class.__mro__ if name in vars(c) and vars(c)[name] is method), None)
    if owner is None or hasattr(method, "__wrapped__") or not hasattr(method, "__code__"):
        return False
    file = getattr(sys.modules.get(owner.__module__), "__file__", None)
    return method.__code__.co_filename == file and method.__qualname__ == f"{owner.__qualname__}.{name}"


def is_plain_rms_norm(module: nn.Module, dtype: torch.dtype) -> bool:
    """Return whether calling a module on numbers of `dtype` is `weight * (x * rsqrt(mean(x^2) + variance_epsilon))`.

    The mean must be in float32, and the bracket rounded to `dtype`. A trial on some numbers decides, bit for bit.

    Args:
        module: the norm.
        dtype: dtype of its input.
    """
    if not isinstance(vars(module).get("variance_epsilon"), float) or not has_no_hooks(module):
        return False
    weight = module._parameters.get("weight")
    return weight is not None and weight.ndim == 1 and _computes_rms_norm(type(module).forward, dtype)


@cache
def _computes_rms_norm(forward: Callable, dtype: torch.dtype) -> bool:
    rows = torch.arange(1, 1 + 24 * 32, dtype=torch.float32, device="cpu").view(24, 32)
    # Rows of several magnitudes and one of zeros, so that the weight, both roundings and epsilon show.
    x = (rows.sin() * torch.logspace(-4, 3, 24, dtype=torch.float32, device="cpu")[:, None]).to(dtype)
    x[3] = 0
    weight = (1 + 0.3 * rows[0].cos()).to(dtype)
    stand_in = SimpleNamespace(weight=weight, variance_epsilon=0.01)  # a norm that uses other attributes raises here
    try:
        with torch.no_grad(), torch.autocast("cpu", enabled=False):
            return all(_equal(forward(stand_in, part), _rms_norm(part, weight, 0.01)) for part in (x, x[None, :5]))
    except Exception:  # a norm that needs more than the stand-in has
        return False


def _rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = x.to(torch.float32)
    return weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype)


def _equal(one: object, other: Tensor) -> bool:
    return isinstance(one, Tensor) and one.dtype is other.dtype and torch.equal(one, other)


__all__ = ["is_plain_module", "has_no_hooks", "is_plain_rms_norm", "is_unpatched", "modules_are_called_plainly"]
