"""Depth attention holds the mean and spread of the recorded weights over tokens, with names for rows and columns."""

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from attnres import AttnResForCausalLM
from attnres.analysis import depth_attention


def test_rows_are_mean_weights_and_sum_to_one(tiny_model, token_ids):
    model = tiny_model(attn_res_block_size=3)
    attention = depth_attention(model, [token_ids[:1], token_ids[1:, :5]])
    assert attention.mean.shape == attention.spread.shape == (9, 4)  # 8 sublayers, output; embedding and 3 blocks
    assert attention.tokens == 16
    torch.testing.assert_close(attention.mean.nansum(1), torch.ones(9, dtype=torch.float64))
    with torch.no_grad():
        recorded = [
            model(ids, output_depth_attentions=True).depth_attentions for ids in (token_ids[:1], token_ids[1:, :5])
        ]
    for sublayer in range(9):
        tokens = torch.cat([r[sublayer].flatten(1) for r in recorded], dim=1).double()
        for row, expected in ((attention.mean, tokens.mean(1)), (attention.spread, tokens.std(1, correction=0))):
            torch.testing.assert_close(row[sublayer, : len(tokens)], expected, atol=1e-6, rtol=1e-5)
            assert row[sublayer, len(tokens) :].isnan().all()


def test_zero_queries_give_uniform_rows(tiny_config, token_ids):
    attention = depth_attention(AttnResForCausalLM(tiny_config(attn_res_block_size=1)), token_ids)
    for sublayer in range(9):
        expected = torch.full((sublayer + 1,), 1 / (sublayer + 1), dtype=torch.float64)
        torch.testing.assert_close(attention.mean[sublayer, : sublayer + 1], expected, atol=1e-6, rtol=0)
    assert attention.distance.abs().max() < 1e-6
    assert attention.entropy[0].isnan() and (attention.entropy[1:] - 1).abs().max() < 1e-6


def test_a_model_without_depth_attention_is_rejected(tiny_model, token_ids):
    for connection in ("standard", "denseformer", "identity_hc"):
        with pytest.raises(ValueError, match="no attention residuals"):
            depth_attention(tiny_model(residual_connection=connection), [token_ids])
    with pytest.raises(ValueError, match="no batch"):
        depth_attention(tiny_model(), [])


@pytest.mark.parametrize(
    ("model_type", "names"),
    [
        ("attnres_llama", ["attention 0", "MLP 0", "attention 1", "MLP 1"]),
        ("attnres_gpt_neox", ["layer 0", "layer 1"]),  # parallel residual
    ],
)
def test_every_row_has_the_name_of_its_sublayer(model_type, names, token_ids):
    shape = {"vocab_size": 99, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = AutoConfig.for_model(model_type, **shape, attn_res_block_size=1)
    attention = depth_attention(AutoModelForCausalLM.from_config(config), token_ids)
    assert attention.depth.consumers == (*names, "output")
    assert attention.depth.sources == ("embedding", *names)
    assert len(attention.mean) == len(names) + 1


@pytest.mark.parametrize(
    ("block_size", "sources"),
    [
        (1, ("embedding", "attention 0", "MLP 0", "attention 1")),
        (3, ("embedding", "block 1", "block 2", "block 3")),
        (8, ("embedding", "block 1")),
    ],
)
def test_block_size_and_sources_follow_from_the_weights(tiny_model, token_ids, block_size, sources):
    depth = depth_attention(tiny_model(attn_res_block_size=block_size), token_ids).depth
    assert depth.block_size == block_size
    assert depth.sources[:4] == sources
