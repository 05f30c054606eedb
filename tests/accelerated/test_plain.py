"""The checks tell modules that compute what their class defines from modules that do more."""

from functools import wraps

import pytest
import torch
from torch import nn
from transformers.models.gemma2.modeling_gemma2 import Gemma2RMSNorm
from transformers.models.kimi_linear.modeling_kimi_linear import KimiLinearRMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.olmo2.modeling_olmo2 import Olmo2RMSNorm
from transformers.utils import output_capturing

from attnres.accelerated import compat
from attnres.accelerated.plain import is_plain_rms_norm, is_unpatched, modules_are_called_plainly, runs_forward_alone
from attnres.attn_res_attnres import AttnRes

BOTH = (torch.float32, torch.bfloat16)


class Clamped(nn.Module):
    """Llama's RMSNorm with one more line."""

    def __init__(self, width: int):
        super().__init__()
        self.weight, self.variance_epsilon = nn.Parameter(torch.ones(width)), 1e-6

    def forward(self, x):
        wide = x.float()
        x = self.weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)).to(x.dtype)
        return x.clamp(-1, 1)


@pytest.mark.parametrize(
    ("norm", "plain_in"),
    [
        (LlamaRMSNorm(8), BOTH),
        (KimiLinearRMSNorm(8), BOTH),
        (Olmo2RMSNorm(8), (torch.float32,)),  # rounds after the weight, which float32 does not show
        (Gemma2RMSNorm(8), ()),  # multiplies by one more than the weight
        (Clamped(8), ()),
        (nn.RMSNorm(8), ()),
        (nn.LayerNorm(8), ()),
    ],
    ids=lambda case: type(case).__name__ if isinstance(case, nn.Module) else "",
)
def test_a_norm_is_plain_by_what_it_computes(norm, plain_in):
    assert tuple(dtype for dtype in BOTH if is_plain_rms_norm(norm, dtype)) == plain_in


def watched(norm: nn.Module) -> None:
    norm.register_forward_hook(lambda *args: None)


def replaced(norm: nn.Module) -> None:
    norm.forward = lambda x: x


@pytest.mark.parametrize(
    "change",
    [
        watched,
        replaced,
        lambda norm: norm.register_forward_pre_hook(lambda *args: None),
        lambda norm: norm.register_full_backward_hook(lambda *args: None),
        lambda norm: norm.compile(),
        lambda norm: setattr(norm, "variance_epsilon", torch.ones(())),
    ],
)
def test_a_norm_that_does_more_is_not_plain(change):
    norm = LlamaRMSNorm(4)
    assert runs_forward_alone(norm) and is_plain_rms_norm(norm, torch.float32)
    change(norm)
    assert not is_plain_rms_norm(norm, torch.float32)


def mine(self, x):
    return x


@wraps(LlamaRMSNorm.forward)
def wrapped(self, x, forward=LlamaRMSNorm.forward):
    return 2 * forward(self, x)


@pytest.mark.parametrize("patch", [mine, wrapped, LlamaRMSNorm.extra_repr, torch.compile(mine)])
def test_a_norm_of_a_patched_class_is_not_plain(monkeypatch, patch):
    norm = LlamaRMSNorm(4)
    monkeypatch.setattr(LlamaRMSNorm, "forward", patch)
    assert not runs_forward_alone(norm) and not is_plain_rms_norm(norm, torch.float32)
    monkeypatch.undo()
    assert is_plain_rms_norm(norm, torch.float32)


def test_a_patched_module_call_is_found(monkeypatch):
    assert modules_are_called_plainly()
    monkeypatch.setattr(nn.Module, "__call__", lambda self, *args: self.forward(*args))
    assert not modules_are_called_plainly()
    monkeypatch.undo()
    monkeypatch.setattr(LlamaRMSNorm, "__call__", lambda self, *args: self.forward(*args))
    assert modules_are_called_plainly() and not runs_forward_alone(LlamaRMSNorm(4))


def test_a_hook_on_all_modules_is_found():
    with nn.modules.module.register_module_forward_hook(lambda *args: None):
        assert not modules_are_called_plainly()
    assert modules_are_called_plainly()


def test_a_patched_method_is_found(monkeypatch):
    assert is_unpatched(AttnRes, "write")
    monkeypatch.setattr(AttnRes, "write", mine)
    assert not is_unpatched(AttnRes, "write")


def test_a_recording_hook_counts_only_while_it_records():
    norm = LlamaRMSNorm(4)
    output_capturing.install_output_capuring_hook(norm, "norms", 0)
    assert runs_forward_alone(norm)
    token = output_capturing._active_collector.set({"norms": []})
    assert not runs_forward_alone(norm)
    output_capturing._active_collector.reset(token)
    assert runs_forward_alone(norm)


def test_operations_count_as_observed_if_a_version_lacks_a_name(monkeypatch):
    monkeypatch.setattr(compat, "_collector", None)
    norm = LlamaRMSNorm(4)
    output_capturing.install_output_capuring_hook(norm, "norms", 0)
    assert not runs_forward_alone(norm)
    monkeypatch.delattr(nn.modules.module, "_has_any_global_hook")
    assert not modules_are_called_plainly()
    monkeypatch.delattr(torch._C, "_len_torch_dispatch_stack")
    assert "does not show" in compat.why_operations_are_observed()
