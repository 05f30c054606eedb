"""Modules that do what the source of their class says and nothing else: these may be computed elsewhere.

The norm that a sublayer begins with reads what depth attention wrote, and nothing else does: one pass for both. Whether
a module may be passed over is asked before each forward pass, since hooks, adapters and patches come at any time.
"""

import sys
from collections.abc import Callable
from functools import cache
from types import SimpleNamespace

import torch
from torch import Tensor, nn

from . import compat


def has_no_hooks(module: nn.Module) -> bool:
    """Whether calling a module runs the `forward` that the file of its class defines, and nothing else.

    False for what an adapter, an offloading engine or a patch changed, of the module or of its class, and for what has
    hooks: those run. Not counted are those of `transformers`, while nothing is recorded. What holds for all modules
    [`modules_are_called_plainly`] says.
    """
    return is_plain_module(module) and is_unpatched(type(module), "forward")


def is_plain_module(module: nn.Module) -> bool:
    """[`has_no_hooks`] as far as the module goes, and not its class."""
    own = vars(module)
    if "forward" in own or own["_forward_pre_hooks"] or own["_backward_hooks"] or own["_backward_pre_hooks"]:
        return False
    hooks = own["_forward_hooks"]
    if hooks and not all(compat.is_silent(hook) for hook in hooks.values()):
        return False
    return not compat.is_compiled(module)


def modules_are_called_plainly() -> bool:
    """Whether calling a module is PyTorch's own, without hooks on all modules."""
    return not compat.has_hooks_on_all_modules() and compat.calls_forward_alone()


def is_unpatched(module_class: type[nn.Module], name: str) -> bool:
    """Whether a method is the one that the source of its class defines, and calling is that of `nn.Module`."""
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
    """Whether calling `module` on numbers of `dtype` is `weight * (x * rsqrt(mean(x^2) + variance_epsilon))`.

    The mean in float32, and the bracket rounded to `dtype`; by what its function makes of some numbers, bit for bit.
    """
    if not isinstance(vars(module).get("variance_epsilon"), float) or not has_no_hooks(module):
        return False
    weight = module._parameters.get("weight")
    return weight is not None and weight.ndim == 1 and _computes_rms_norm(type(module).forward, dtype)


@cache
def _computes_rms_norm(forward: Callable, dtype: torch.dtype) -> bool:
    rows = torch.arange(1, 1 + 24 * 32, dtype=torch.float32, device="cpu").view(24, 32)
    # Of several sizes, zeros among them, so that the weight, both roundings and epsilon show.
    x = (rows.sin() * torch.logspace(-4, 3, 24, dtype=torch.float32, device="cpu")[:, None]).to(dtype)
    x[3] = 0
    weight = (1 + 0.3 * rows[0].cos()).to(dtype)
    stand_in = SimpleNamespace(weight=weight, variance_epsilon=0.01)  # what uses more of itself is another norm
    try:
        with torch.no_grad(), torch.autocast("cpu", enabled=False):
            return all(_equal(forward(stand_in, part), _rms_norm(part, weight, 0.01)) for part in (x, x[None, :5]))
    except Exception:  # whatever somebody's norm needs that is not here
        return False


def _rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = x.to(torch.float32)
    return weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype)


def _equal(one: object, other: Tensor) -> bool:
    return isinstance(one, Tensor) and one.dtype is other.dtype and torch.equal(one, other)


__all__ = ["is_plain_module", "has_no_hooks", "is_plain_rms_norm", "is_unpatched", "modules_are_called_plainly"]
