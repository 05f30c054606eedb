"""On every backbone a retrofitted model computes the same function as the model it was made from."""

import copy

import pytest
import torch
from torch import Tensor

from attnres.conversion import retrofit

# Blocks of 3 sublayers end within layers, and the last one is shorter.
BLOCK_SIZES = {"full": 1, "S=3": 3}
# A backbone of each form: pre-norm, norm after, sandwich, multipliers, parallel, experts, and delta attention.
IN_BFLOAT16 = ["llama", "olmo2", "gemma3_text", "granite", "gpt_neox", "mixtral", "kimi_linear"]


def relative_difference(a: Tensor, b: Tensor) -> float:
    return ((a - b).abs().max() / b.abs().max()).item()


@pytest.mark.parametrize("block_size", [1, 2, 3])
def test_logits_stay_the_same(original, block_size):
    model = retrofit(original.model, block_size=block_size)
    assert (model.config.residual_connection, model.config.attn_res_scale) == ("attn_res", "sum")
    with torch.no_grad():
        logits = model(original.token_ids).logits
    assert original.logits.abs().max() >= 5, "the comparison needs logits of some size"
    assert relative_difference(logits, original.logits) <= 1e-4
    assert torch.equal(logits.argmax(-1), original.logits.argmax(-1))


def test_cached_generation_under_left_padding_stays_the_same(original, generate):
    sequences, step_logits = generate(retrofit(original.model, block_size=3), original.token_ids)
    assert torch.equal(sequences, original.sequences)
    assert relative_difference(step_logits, original.step_logits) <= 1e-4


def test_shared_weights_get_the_same_gradients(original, gradients):
    actual = gradients(retrofit(original.model, block_size=3), original.token_ids)
    assert set(original.gradients) <= set(actual)
    # A softmax cancels some biases of its keys: their gradients are rounding, far below those of the whole model.
    scale = max(gradient.abs().max() for gradient in original.gradients.values())
    for name, expected in original.gradients.items():
        difference = (actual[name] - expected).abs().max()
        assert difference <= 1e-4 * max(expected.abs().max(), 1e-3 * scale), name


@pytest.mark.parametrize("original", IN_BFLOAT16, indirect=True)
def test_in_bf16_a_retrofit_differs_no_more_than_evaluation_orders_of_the_original(original, backbones):
    """The orders are: the residual stream added from the last term to the first, or with the embedding last; and eager
    attention, which rounds in other places. Depth attention is one more such order: it adds blocks, in float32.

    The median token is compared: where rounding changes the experts of a token, any order moves it by whole experts.
    The medians of 264 tokens scatter by some percent.
    """
    model = copy.deepcopy(original.model)
    # A model loaded in bf16 keeps its buffers, frequencies and router biases, in float32.
    for parameter in model.parameters():
        parameter.data = parameter.to(torch.bfloat16)
    token_ids = torch.randint(3, backbones.VOCABULARY, (24, 11), generator=torch.Generator().manual_seed(7))
    with torch.no_grad():
        expected = model(token_ids).logits.float()

    def difference(logits: Tensor) -> float:
        return (logits.float() - expected).square().mean(-1).sqrt().median().item()

    last_to_first = backbones.straight_line(model, token_ids, lambda v: sum(reversed(v[:-1]), v[-1]))
    embedding_last = backbones.straight_line(model, token_ids, lambda v: sum(v[2:], v[1]) + v[0] if v[1:] else v[0])
    with torch.no_grad():
        attention = model.config._attn_implementation
        model.set_attn_implementation("eager")
        eager = model(token_ids).logits
        model.set_attn_implementation(attention)
        for block_size in BLOCK_SIZES.values():
            logits = retrofit(model, block_size=block_size)(token_ids).logits
            assert logits.dtype == torch.bfloat16
            largest = max(map(difference, (last_to_first, embedding_last, eager)))
            assert 0 < difference(logits) <= 1.05 * largest
