"""All uses of private names of `torch` and `transformers`.

If a version lacks such a name, a function here answers that PyTorch's operations are observed, so that no kernel
replaces them.
"""

import sys
from collections.abc import Callable

import torch
from torch import nn
from torch.nn.modules import module as torch_module

try:
    from transformers.utils import output_capturing

    _collector, _recorder_file = output_capturing._active_collector, output_capturing.__name__
except (ImportError, AttributeError):
    _collector, _recorder_file = None, None


def why_operations_are_observed() -> str | None:
    """Return why a kernel may not hide PyTorch's operations, in a few words; `None` if nothing observes them."""
    try:
        if torch._C._functorch.maybe_current_level() is not None:
            return "torch.func transforms the function"
        if torch._C._get_tracing_state() is not None:
            return "the function is traced"
        if torch._C._len_torch_dispatch_stack() > 0:
            return "a dispatch mode observes the operations"
        if torch.autograd.forward_ad._current_level >= 0:
            return "forward-mode derivatives are computed"
    except AttributeError as error:
        return f"this version of torch does not show what observes the operations ({error})"
    return None


def are_backward_passes_compiled() -> bool:
    """Return whether a program has switched compiled autograd on (`torch._dynamo.config.compiled_autograd`)."""
    config = sys.modules.get("torch._dynamo.config")  # importing it takes seconds
    return bool(getattr(config, "compiled_autograd", False))


def is_in_backward_pass() -> bool:
    """Return whether autograd calls this code, or true if this version of torch does not show it."""
    task = getattr(torch._C, "_current_graph_task_id", None)
    return task is None or task() != -1


def has_hooks_on_all_modules() -> bool:
    """Return whether there are hooks that run when any module is called."""
    has_hooks = getattr(torch_module, "_has_any_global_hook", None)
    return has_hooks is None or has_hooks()


def is_silent(hook: Callable) -> bool:
    """Return whether a forward hook only records outputs for `transformers`, and records none now."""
    return _collector is not None and getattr(hook, "__module__", None) == _recorder_file and not _collector.get()


def module_call_is_unpatched() -> bool:
    """Return whether `nn.Module.__call__`, and what it calls, are PyTorch's own."""
    names = ("__call__", "_wrapped_call_impl", "_call_impl")
    codes = [getattr(getattr(nn.Module, name, None), "__code__", None) for name in names]
    return all(code is not None and code.co_filename == torch_module.__file__ for code in codes)


def is_compiled(module: nn.Module) -> bool:
    """Return whether `module.compile()` was called."""
    return vars(module).get("_compiled_call_impl") is not None


__all__ = [
    "are_backward_passes_compiled",
    "has_hooks_on_all_modules",
    "is_compiled",
    "is_in_backward_pass",
    "is_silent",
    "module_call_is_unpatched",
    "why_operations_are_observed",
]
