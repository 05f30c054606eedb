"""Modules that do what their class does and nothing else: these may be computed elsewhere, together with others.

The norm that a sublayer begins with reads what depth attention wrote, and nothing else does: one pass for both. The
backbones' own norms stay the modules that they are; which of them may be computed elsewhere is asked at each call.
"""

from collections.abc import Callable
from functools import cache

from torch import nn
from torch.nn.modules.module import _has_any_global_hook as has_hooks_on_all_modules
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.utils.output_capturing import OutputRecorder


def is_untouched(module: nn.Module) -> bool:
    """Whether calling a module runs the `forward` of its class and nothing else.

    False for what an adapter or an offloading engine changed, and for what has hooks: those run. Not counted are those
    of `transformers`, which record nothing unasked, and hooks on all modules: `has_hooks_on_all_modules()`.
    """
    own = vars(module)
    if "forward" in own or own["_forward_pre_hooks"] or own["_backward_hooks"] or own["_backward_pre_hooks"]:
        return False
    hooks = own["_forward_hooks"]
    return not hooks or all(hook.__module__ == OutputRecorder.__module__ for hook in hooks.values())


def is_plain_rms_norm(module: nn.Module) -> bool:
    """Whether calling `module` is `weight * x / sqrt(mean(x^2) + variance_epsilon)` and nothing else."""
    return _is_llamas(type(module).forward) and is_untouched(module)


@cache
def _is_llamas(forward: Callable) -> bool:
    """Whether a method is that of Llama's norm, line by line: backbones have classes of their own, mostly alike."""
    ours, theirs = (getattr(function, "__code__", None) for function in (forward, LlamaRMSNorm.forward))
    if ours is None or theirs is None:
        return False
    return (ours.co_code, ours.co_names, ours.co_consts) == (theirs.co_code, theirs.co_names, theirs.co_consts)


__all__ = ["has_hooks_on_all_modules", "is_plain_rms_norm", "is_untouched"]
