"""Models compute the same by the Triton kernels as by PyTorch's operations, in training and inference."""

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from attnres import backbones_attnres
from attnres.accelerated import phases
from attnres.accelerated.triton import implementation
from attnres.accelerated.triton.plan import GpuPlan

from .triton_cases import DEVICE, DTYPES, KERNELS

pytestmark = KERNELS


@pytest.fixture(autouse=True)
def wherever_the_kernels_run(monkeypatch):
    """In the interpreter the kernels' device is the CPU."""
    if DEVICE == "cpu":
        make = implementation.make_plan
        monkeypatch.setattr(
            implementation, "make_plan", lambda plan_class, device, reads: make(plan_class, DEVICE, reads)
        )
        monkeypatch.setattr(implementation, "why_not_on", lambda device, width: None)


def make_model(block_size: int, num_hidden_layers: int, depth_attention: str = "triton") -> PreTrainedModel:
    torch.manual_seed(0)
    shape = {"vocab_size": 50, "hidden_size": 24, "intermediate_size": 32, "num_hidden_layers": num_hidden_layers}
    config = backbones_attnres.config_on("llama")(num_attention_heads=2, attn_res_block_size=block_size, **shape)
    model = AutoModelForCausalLM.from_config(config).to(DEVICE)
    model.config.depth_attention_implementation = depth_attention
    for name, parameter in model.named_parameters():
        if "_res_" in name:
            nn.init.normal_(parameter)
    return model


@pytest.mark.slow
@pytest.mark.parametrize("block_size", [1, 3])
def test_training_adds_the_gradients_of_later_reads_and_checkpointing_changes_no_gradient(block_size, monkeypatch):
    tokens = torch.arange(40, device=DEVICE).view(2, -1)

    def gradients(model: PreTrainedModel) -> list[Tensor]:
        model.zero_grad()
        model(tokens, labels=tokens, use_cache=False).loss.backward()
        return [parameter.grad for parameter in model.parameters()]

    expected = gradients(make_model(block_size, 3, "eager").train())
    model = make_model(block_size, 3).train()
    later, all_or_none = [], implementation.all_or_none
    monkeypatch.setattr(implementation, "all_or_none", lambda grads: later.append(grads) or all_or_none(grads))
    actual = gradients(model)
    torch.testing.assert_close(actual, expected, rtol=1e-3, atol=1e-5)
    # The backward pass begins with the last read, which no read follows. All sources of other reads are read later too.
    assert [any(grad is None for grad in grads) for grads in later] == [True] + [False] * 6
    for reentrant in (False, True):
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        if reentrant:
            model.enable_input_require_grads()
        assert all(map(torch.equal, gradients(model), actual))


@pytest.mark.slow
@pytest.mark.parametrize("block_size", [1, 2, 3])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_plan_computes_the_reads_of_the_connections(block_size, dtype, monkeypatch):
    monkeypatch.setattr(phases, "_CACHED", 0)
    model = make_model(block_size, num_hidden_layers=6).eval().to(dtype)
    tokens = torch.arange(40, device=DEVICE).view(2, -1)
    expected = make_model(block_size, 6, "eager").eval().to(dtype).double()(tokens).logits.detach()
    calls = []
    monkeypatch.setattr(GpuPlan, "_read", counted(GpuPlan._read, calls))
    with torch.no_grad():
        logits = model(tokens).logits
    assert len(calls) == 2 * 6 + 1 and logits.dtype == dtype
    slack = {torch.float32: 1e-5, torch.float16: 0.02, torch.bfloat16: 0.1}[dtype]
    torch.testing.assert_close(logits.double(), expected, rtol=0, atol=slack * expected.abs().max().item())


def counted(function, calls: list):
    def call(*arguments):
        calls.append(arguments)
        return function(*arguments)

    return call
