"""Whole models agree with their equations: the float64 transcription `straight_line.py`, and Kimi Linear."""

import pytest
import torch
import transformers
from packaging.version import Version
from transformers import KimiLinearConfig, KimiLinearForCausalLM

from attnres.residual_attnres import residual_tensors

from ..cases import each_once
from .connections import cached_logits

BLOCK_SIZES = (1, 2, 3, 8, 100)  # 8: the whole depth of 4 layers
# An epsilon large enough to matter: with the usual 1e-5 the norms would hide a wrong scale and a wrong epsilon.
EPS = 0.1
# Logits have a standard deviation of about one. Kimi Linear computes its norms, its gates and the delta rule in float32
# whatever the model's dtype, and deep products amplify that: the float64 model is no closer than the float32 one.
TOLERANCE = 2e-4


@torch.no_grad()
def assert_model_follows_equations(model, token_ids: torch.Tensor, straight_line) -> None:
    expected = straight_line.logits(model.state_dict(), model.config, token_ids)
    assert expected.std() > 0.5
    for dtype in (torch.float32, torch.float64):
        model.to(dtype)
        if dtype == torch.float64:  # the default, a grouped matrix product, does not support it
            model.set_experts_implementation("eager")
        for logits in (model(token_ids).logits, cached_logits(model, token_ids)):
            assert logits.dtype == dtype
            torch.testing.assert_close(logits.double(), expected, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize(("block_size", "scale"), [*each_once(BLOCK_SIZES, ["mean", "sum"]), (1, "sum"), (3, "mean")])
def test_model_follows_its_equations_cached_and_uncached(vivid_model, token_ids, straight_line, block_size, scale):
    model = vivid_model(attn_res_block_size=block_size, attn_res_scale=scale, rms_norm_eps=EPS)
    assert_model_follows_equations(model, token_ids, straight_line)


@pytest.mark.parametrize(
    "fields",
    [
        {"residual_connection": "standard"},
        {"attn_res_block_size": 3, "q_lora_rank": 12},
        {"attn_res_block_size": 3, "n_group": 4, "topk_group": 2},
        {"attn_res_block_size": 3, "n_shared_experts": 2, "norm_topk_prob": False},
        {"attn_res_block_size": 3, "linear_conv_kernel_dim": 3, "linear_num_heads": 3},
        {"attn_res_block_size": 3, "layer_types": ["full_attention"] * 4, "mlp_layer_types": ["dense"] * 4},
        {"attn_res_block_size": 3, "tie_word_embeddings": True},
    ],
    ids=lambda fields: ",".join(fields),
)
def test_model_follows_its_equations_on_other_backbones(vivid_model, token_ids, straight_line, fields):
    assert_model_follows_equations(vivid_model(rms_norm_eps=EPS, **fields), token_ids, straight_line)


@torch.no_grad()
def test_model_follows_its_equations_beyond_one_chunk_of_the_delta_rule(vivid_model, straight_line):
    model = vivid_model(attn_res_block_size=3, rms_norm_eps=EPS)
    token_ids = torch.randint(3, 99, (1, 70), generator=torch.Generator().manual_seed(2))
    expected = straight_line.logits(model.state_dict(), model.config, token_ids)
    torch.testing.assert_close(model(token_ids).logits.double(), expected, rtol=0, atol=TOLERANCE)


def test_block_sizes_scales_and_connections_give_different_logits(vivid_model, token_ids, straight_line):
    variants = [
        {"attn_res_block_size": size, "attn_res_scale": scale} for size in BLOCK_SIZES for scale in ("mean", "sum")
    ]
    tensors = vivid_model().state_dict()
    results = [
        straight_line.logits(tensors, vivid_model(rms_norm_eps=EPS, **variant).config, token_ids)
        for variant in [*variants, {"residual_connection": "standard"}]
    ]
    whole = [{"attn_res_block_size": 8, "attn_res_scale": scale} for scale in ("mean", "sum")]
    first, second = map(variants.index, whole)
    for i, result in enumerate(results):
        for j, other in enumerate(results[:i]):
            difference = (result - other).abs().max()
            # One block holds the whole depth, so its size does not matter.
            if {i, j} in ({first, first + 2}, {second, second + 2}):
                assert difference == 0
            else:
                assert difference > 100 * TOLERANCE


@torch.no_grad()
@pytest.mark.parametrize("block_size", BLOCK_SIZES)
def test_zero_queries_with_scale_sum_give_the_residual_stream(vivid_model, token_ids, block_size):
    standard = vivid_model(residual_connection="standard", rms_norm_eps=EPS)
    model = vivid_model(attn_res_block_size=block_size, attn_res_scale="sum", rms_norm_eps=EPS)
    for name, tensor in residual_tensors(model).items():
        if "_proj" in name:
            tensor.zero_()
    model.load_state_dict(standard.state_dict(), strict=False)
    torch.testing.assert_close(model(token_ids).logits, standard(token_ids).logits, rtol=0, atol=TOLERANCE)


@pytest.fixture
def kimi_linear_and_standard(vivid_model):
    """Return `KimiLinearForCausalLM` and the `"standard"` model with its weights, both with eager attention."""
    standard = vivid_model(residual_connection="standard", attn_implementation="eager")
    fields = {key: value for key, value in standard.config.to_dict().items() if key not in ("model_type", "auto_map")}
    kimi_linear = KimiLinearForCausalLM._from_config(KimiLinearConfig(**fields), attn_implementation="eager").eval()
    assert list(standard.state_dict()) == list(kimi_linear.state_dict())
    kimi_linear.load_state_dict(standard.state_dict())
    return kimi_linear, standard


@torch.no_grad()
def test_the_standard_model_equals_kimi_linear_to_the_last_bit_with_all_its_outputs(
    kimi_linear_and_standard, token_ids
):
    recorded = {"output_hidden_states": True, "output_router_logits": True, "output_attentions": True}
    expected, actual = (model(token_ids, **recorded) for model in kimi_linear_and_standard)
    assert torch.equal(actual.logits, expected.logits)
    lengths = {"hidden_states": 5, "router_logits": 3, "attentions": 2}
    if Version(transformers.__version__) < Version("5.19"):
        del lengths["router_logits"]  # Kimi Linear records none there
    for field, length in lengths.items():
        assert len(actual[field]) == len(expected[field]) == length
        assert all(map(torch.equal, actual[field], expected[field]))
    tokens = [cached_logits(model, token_ids) for model in kimi_linear_and_standard]
    assert torch.equal(*tokens)


def test_the_standard_model_trains_like_kimi_linear_to_the_last_bit(kimi_linear_and_standard, token_ids):
    for model in kimi_linear_and_standard:
        assert model.get_experts_implementation() == {"": "grouped_mm"}
        model.train()(token_ids, labels=token_ids).loss.backward()
    expected, actual = (dict(model.named_parameters()) for model in kimi_linear_and_standard)
    assert all(torch.equal(actual[name].grad, expected[name].grad) for name in expected)
    assert all(parameter.grad.abs().sum() > 0 for name, parameter in actual.items() if "experts" not in name)
