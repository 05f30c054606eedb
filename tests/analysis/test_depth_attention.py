"""Depth-attention maps are the averages of the recorded weights, and the figures of them are written."""

import pytest
import torch

from attnres.analysis.depth_attention import depth_attention_map
from attnres.analysis.figures import plot_depth_attention, plot_loss_curves


def test_rows_are_mean_weights_and_sum_to_one(tiny_model, token_ids):
    model = tiny_model(attn_res_block_size=3)
    weights = depth_attention_map(model, [token_ids[:1], token_ids[1:, :5]])
    assert weights.shape == (9, 4)  # 8 sublayers and the output; embedding and 3 blocks
    assert torch.allclose(weights.nansum(1), torch.ones(9))
    with torch.no_grad():
        recorded = [
            model(ids, output_depth_attentions=True).depth_attentions for ids in (token_ids[:1], token_ids[1:, :5])
        ]
    for sublayer in range(9):
        tokens = torch.cat([r[sublayer].flatten(1) for r in recorded], dim=1)
        row = weights[sublayer]
        assert torch.allclose(row[: len(tokens)], tokens.mean(1), atol=1e-6)
        assert row[len(tokens) :].isnan().all()


def test_zero_queries_give_uniform_rows(tiny_config, token_ids):
    from attnres import AttnResForCausalLM

    weights = depth_attention_map(AttnResForCausalLM(tiny_config(attn_res_block_size=1)).eval(), [token_ids])
    for sublayer in range(9):
        assert torch.allclose(weights[sublayer, : sublayer + 1], torch.tensor(1 / (sublayer + 1)))


def test_a_model_without_depth_attention_is_refused(tiny_model, token_ids):
    with pytest.raises(ValueError, match="no attention residuals"):
        depth_attention_map(tiny_model(residual_connection="standard"), [token_ids])
    with pytest.raises(ValueError, match="no batch"):
        depth_attention_map(tiny_model(), [])


def test_figures_are_png_files(tiny_model, token_ids, tmp_path):
    plot_depth_attention(depth_attention_map(tiny_model(attn_res_block_size=2), [token_ids]), tmp_path / "map.png", 2)
    curves = {"a": [(1, 3.0), (2, 2.5)], "b": [(2, 2.6)], "c": [(2, 2.5)]}
    plot_loss_curves(curves, tmp_path / "loss.png")
    plot_loss_curves(curves, tmp_path / "difference.png", compare=("b", "c"))
    for name in ("map.png", "loss.png", "difference.png"):
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")
