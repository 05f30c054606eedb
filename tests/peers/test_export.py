"""`torch.export` makes one graph of a retrofit, for any batch and length; and the first call may be a compiled one."""

import pytest
import torch
from torch.export import Dim, export
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from attnres.conversion import retrofit
from attnres.residual_attnres import residual_tensors

from .. import forks

SMALL = {
    "vocab_size": 99,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}


@pytest.fixture(params=["llama", "qwen3"])
def model(request) -> PreTrainedModel:
    """In blocks of three sublayers, with depth weights far from uniform."""
    torch.manual_seed(0)
    standard = AutoModelForCausalLM.from_config(AutoConfig.for_model(request.param, **SMALL))
    model = retrofit(standard, block_size=3).eval()
    for tensor in residual_tensors(model).values():
        torch.nn.init.normal_(tensor, mean=1.0 if tensor.ndim == 1 else 0.0, std=0.5)
    return model


@pytest.mark.slow
@torch.no_grad()
def test_the_exported_program_computes_the_same_for_any_shape(model):
    shapes = {"input_ids": {0: Dim("batch", min=1, max=16), 1: Dim("length", min=2, max=64)}, "use_cache": None}
    example, other = (torch.randint(3, SMALL["vocab_size"], shape) for shape in ((2, 11), (3, 19)))
    program = export(model, (), {"input_ids": example, "use_cache": False}, dynamic_shapes=shapes).module()
    for token_ids in (example, other):
        expected = model(token_ids, use_cache=False).logits
        found = program(input_ids=token_ids, use_cache=False).logits
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-4)


FIRST_CALL = f"""
import torch
from transformers import AutoConfig, AutoModelForCausalLM
from attnres.conversion import retrofit
standard = AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **{SMALL!r}))
model, token_ids = retrofit(standard, block_size=3).eval(), torch.tensor([[3, 4, 5, 6]])
with torch.no_grad():
    found = torch.compile(model, fullgraph=True, backend="eager")(token_ids, use_cache=False).logits
    torch.testing.assert_close(found, model(token_ids, use_cache=False).logits, rtol=0, atol=1e-4)
"""


@pytest.mark.slow
def test_the_first_call_of_all_may_be_a_compiled_one():
    """In a process of its own: what an earlier call has put in place would not have to be compiled."""
    done = forks.run("-c", FIRST_CALL)
    assert done.returncode == 0, done.stderr[-4000:]
