"""Depth-attention maps are the averages of the recorded weights, and the figures of them are written."""

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from attnres.analysis import figures
from attnres.analysis.depth_attention import depth_attention_map
from attnres.analysis.figures import plot_depth_attention, plot_loss_curves, plot_paired_runs, sublayer_names


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
    for connection in ("standard", "denseformer", "identity_hc"):
        with pytest.raises(ValueError, match="no attention residuals"):
            depth_attention_map(tiny_model(residual_connection=connection), [token_ids])
    with pytest.raises(ValueError, match="no batch"):
        depth_attention_map(tiny_model(), [])


@pytest.mark.parametrize(
    ("model_type", "names"),
    [
        ("attnres_llama", ["attention 0", "MLP 0", "attention 1", "MLP 1"]),
        ("attnres_gpt_neox", ["layer 0", "layer 1"]),  # parallel residual
    ],
)
def test_every_row_of_a_map_has_the_name_of_its_sublayer(model_type, names, token_ids, tmp_path):
    shape = {"vocab_size": 99, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = AutoConfig.for_model(model_type, **shape, attn_res_block_size=1)
    weights = depth_attention_map(AutoModelForCausalLM.from_config(config).eval(), [token_ids])
    assert sublayer_names(config) == names
    assert len(weights) == len(names) + 1
    plot_depth_attention(weights, tmp_path / "map.png", config)


def test_figures_are_png_files(tiny_model, token_ids, tmp_path):
    model = tiny_model(attn_res_block_size=2)
    plot_depth_attention(depth_attention_map(model, [token_ids]), tmp_path / "map.png", model.config)
    curves = {"a": [(1, 3.0), (2, 2.5)], "b": [(2, 2.6)], "c": [(2, 2.5)]}
    plot_loss_curves(curves, tmp_path / "loss.png")
    plot_loss_curves(curves, tmp_path / "difference.png", compare=("b", "c"))
    for name in ("map.png", "loss.png", "difference.png"):
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("block_size", "axis", "sources"),
    [
        (1, "source: sublayer output", ["embedding", "attention 0", "MLP 0", "attention 1"]),
        (3, "source: block of 3 sublayers", ["embedding", "1", "2", "3"]),
        (8, "source: block of 8 sublayers", ["embedding", "1"]),
    ],
)
def test_the_sources_of_a_figure_are_read_from_the_map(
    tiny_model, token_ids, tmp_path, monkeypatch, block_size, axis, sources
):
    drawn = []
    monkeypatch.setattr(figures, "_write", lambda figure, path: drawn.append(figure.axes[0]))
    model = tiny_model(attn_res_block_size=block_size)
    plot_depth_attention(depth_attention_map(model, [token_ids]), tmp_path / "map.png", model.config)
    assert drawn[0].get_xlabel() == axis
    assert [label.get_text() for label in drawn[0].get_xticklabels()][:4] == sources


def test_lines_are_means_over_seeds_and_the_difference_is_taken_within_a_seed(tmp_path, monkeypatch):
    drawn = []
    monkeypatch.setattr(figures, "_write", lambda figure, path: drawn.append(figure))
    steps = range(2, 42, 2)
    runs = {
        "a": [[(step, seed + 1.0 / step) for step in steps] for seed in range(3)],
        "b": [[(step, seed + 0.5 + 1.0 / step) for step in steps] for seed in range(3)],
    }
    plot_paired_runs(runs, tmp_path / "runs.png", points=5)
    upper, lower = drawn[0].axes
    (a, b) = upper.get_lines()
    assert a.get_xdata()[0] == 5.0  # the mean of steps 2, 4, 6 and 8
    assert a.get_ydata()[0] == pytest.approx(1.0 + (1 / 2 + 1 / 4 + 1 / 6 + 1 / 8) / 4)
    assert (b.get_ydata() - a.get_ydata()) == pytest.approx([0.5] * 5)
    assert lower.get_lines()[0].get_ydata() == pytest.approx([-0.5] * 5)
    (band,) = lower.collections
    assert band.get_paths()[0].get_extents().height < 1e-9  # seeds that differ in both alike


@pytest.mark.parametrize("spread", [0.01, 0.5])
def test_a_map_has_contrast_however_little_its_weights_differ(tiny_config, tmp_path, monkeypatch, spread):
    drawn = []
    monkeypatch.setattr(figures, "_write", lambda figure, path: drawn.append(figure.axes[0].images[0]))
    weights = torch.full((9, 3), float("nan"))
    weights[:, 0] = 1.0
    weights[1:, :2] = torch.tensor([0.5 - 0.1 * spread, 0.5 + 0.1 * spread])
    weights[5:] = torch.tensor([1 - spread, 1.0, 1 + spread]) / 3
    plot_depth_attention(weights, tmp_path / "map.png", tiny_config(attn_res_block_size=4))
    (image,) = drawn
    assert image.norm.vmin == -image.norm.vmax
    strongest = abs(image.get_array()).max()
    assert strongest >= 0.25 * image.norm.vmax
    assert (strongest >= image.norm.vmax) == (spread > 0.1)  # what is nearly uniform is not drawn as strong
