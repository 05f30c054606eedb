"""The weight on the first token equals that of the attention weights that `transformers` returns."""

import pytest
import torch
from transformers import BatchEncoding

from attnres.analysis import attention_sinks

from ..modeling_attnres.connections import build


@torch.no_grad()
@pytest.mark.parametrize("case", ["llama", "gemma2", "qwen3", "gpt_neox"])
def test_sinks_equal_the_weights_that_transformers_returns(backbones, case):
    model, standard, ids = build(backbones, case, "standard"), backbones.build(case), backbones.token_ids()
    before, implementation = model(ids).logits, model.config._attn_implementation
    result = attention_sinks(model, ids.split(1))
    standard.set_attn_implementation("eager")
    on_first = [a[:, :, 1:, 0].double() for a in standard(ids, output_attentions=True).attentions]
    heads = torch.stack([a.mean((0, 2)) for a in on_first])  # [layers, heads]
    torch.testing.assert_close(result.mean, heads.mean(1), rtol=1e-4, atol=1e-7)
    torch.testing.assert_close(result.strongest, heads.amax(1), rtol=1e-4, atol=1e-7)
    assert result.uniform == pytest.approx(sum(1 / t for t in range(2, 12)) / 10)
    assert model.config._attn_implementation == implementation and torch.equal(model(ids).logits, before)


def test_linear_attention_has_no_sinks(backbones):
    model = build(backbones, "kimi_linear", "attn_res")
    result = attention_sinks(model, backbones.token_ids())
    linear = [kind == "linear_attention" for kind in model.config.layer_types]
    assert result.mean.isnan().tolist() == result.strongest.isnan().tolist() == linear
    assert any(linear) and not all(linear)


def test_the_first_token_of_a_padded_sequence_is_the_first_that_counts(backbones):
    model, ids = build(backbones, "llama", "attn_res"), backbones.token_ids()
    expected = attention_sinks(model, ids)
    ones, zeros = torch.ones_like(ids), torch.zeros_like(ids[:, :3])
    for inputs, mask in (
        (torch.cat([zeros, ids], 1), torch.cat([zeros, ones], 1)),
        (torch.cat([ids, zeros], 1), torch.cat([ones, zeros], 1)),
    ):
        result = attention_sinks(model, BatchEncoding({"input_ids": inputs, "attention_mask": mask}))
        torch.testing.assert_close(result.mean, expected.mean, rtol=1e-3, atol=1e-5)
        assert result.uniform == pytest.approx(expected.uniform)


def test_a_sequence_of_one_token_is_rejected(backbones):
    with pytest.raises(ValueError, match="no sequence of at least two tokens"):
        attention_sinks(build(backbones, "llama", "attn_res"), torch.tensor([[5]]))
