"""The norm that a sublayer begins with reads what depth attention wrote, and nothing else does: one pass for both.

The backbones' own norms stay the modules that they are. Which of them may be computed elsewhere is asked at each call.
"""

from collections.abc import Callable
from functools import cache

from torch import nn
from torch.nn.modules import module as torch_module
from transformers.models.llama.modeling_llama import LlamaRMSNorm


def is_plain_rms_norm(module: nn.Module) -> bool:
    """Whether calling `module` is `weight * x / sqrt(mean(x^2) + variance_epsilon)` and nothing else.

    False for what an adapter, an offloading engine or a kernel took the place of, and for what has hooks: those run.
    """
    if not _is_llamas(type(module).forward) or "forward" in vars(module):
        return False
    hooks = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks)
    return not any(hooks) and not torch_module._has_any_global_hook()


@cache
def _is_llamas(forward: Callable) -> bool:
    """Whether a method is that of Llama's norm, line by line: backbones have classes of their own, mostly alike."""
    ours, theirs = (getattr(function, "__code__", None) for function in (forward, LlamaRMSNorm.forward))
    if ours is None or theirs is None:
        return False
    return (ours.co_code, ours.co_names, ours.co_consts) == (theirs.co_code, theirs.co_names, theirs.co_consts)


__all__ = ["is_plain_rms_norm"]
