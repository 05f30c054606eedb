"""Depth-mixing matrices of every connection rebuild the inputs from the outputs, and have the rank of the theory."""

import pytest
import torch
from transformers import BatchEncoding

import attnres
from attnres.analysis import (
    attention_sinks,
    depth_attention,
    depth_mixing,
    interventions,
    magnitudes,
    mixing_matrix,
    semiseparable_rank,
    token_mixing,
)

from ..modeling_attnres.connections import FORMS, build, difference

SUBLAYERS = 10
# Connection -> fields with which its rank is known, and the semiseparable rank of each token's matrix.
KNOWN = {
    "laurel": ({"laurel_form": "rw"}, 1),
    "scaled": ({"scaled_form": "shifted"}, 1),
    "residual_scalars": ({}, 2),
    "attn_res": ({"attn_res_block_size": 3}, 4),
}
# The rank of a connection with n streams is n, and of one with a single stream 1; any other rank may be right.
STATES = {"1": ({}, 1), "n": ({"residual_streams": 3}, 3)}
RANKS = {
    name: KNOWN.get(name) or STATES.get(connection.state_size, ({}, None))
    for name, connection in attnres.CONNECTIONS.items()
    if not connection.mixes_channels or name in KNOWN
} | dict.fromkeys(FORMS, ({}, None))


@torch.no_grad()
@pytest.mark.parametrize(
    ("case", "connection"),
    [*(("llama", name) for name in RANKS), *(("kimi_linear", name) for name in ("attn_res", "denseformer", "mhc"))],
)
def test_inputs_are_rebuilt_from_the_outputs(backbones, case, connection):
    fields, rank = RANKS[connection]
    model, token_ids = build(backbones, case, connection, **fields), backbones.token_ids()
    logits = model(token_ids).logits
    mixing = token_mixing(model, token_ids)
    # The recording leaves no trace in the model.
    assert torch.equal(model(token_ids).logits, logits)
    assert not any("write" in vars(module) or module._forward_hooks for module in model.modules())
    assert mixing.inputs.shape == mixing.outputs.shape == (SUBLAYERS + 1, *token_ids.shape, model.config.hidden_size)
    assert mixing.matrices.shape[:4] == (SUBLAYERS + 1, SUBLAYERS + 1, *token_ids.shape)
    assert difference(mixing.rebuilt(), mixing.inputs) < 1e-5
    assert not mixing.matrices.permute(2, 3, 4, 0, 1).triu(1).any()
    # The recorded inputs equal the hidden states that the model returns.
    hidden = model(token_ids, output_hidden_states=True).hidden_states
    per_layer = len(model.config.sublayers)
    for layer, state in enumerate(hidden[:-1]):
        torch.testing.assert_close(mixing.inputs[per_layer * layer], state.double(), rtol=0, atol=0)
    if rank is not None:
        chosen = [mixing.matrices[:, :, b, t, channel] for b, t in ((0, 0), (1, 7)) for channel in (0, -1)]
        assert {semiseparable_rank(matrix) for matrix in chosen} == {rank}


@torch.no_grad()
def test_the_matrix_of_a_model_is_the_mean_over_tokens_that_count(backbones):
    model, token_ids = build(backbones, "llama", "attn_res"), backbones.token_ids()
    mask = torch.ones_like(token_ids)
    mask[0, :4] = 0
    inputs = BatchEncoding({"input_ids": token_ids, "attention_mask": mask})
    every = token_mixing(model, inputs).matrices.squeeze(-1)
    torch.testing.assert_close(mixing_matrix(model, inputs), every[:, :, mask.bool()].mean(-1), rtol=1e-6, atol=1e-7)
    matrix = mixing_matrix(model, token_ids)
    torch.testing.assert_close(matrix, token_mixing(model, token_ids).matrices.mean((2, 3, 4)), rtol=1e-6, atol=1e-7)
    assert not torch.equal(matrix, mixing_matrix(model, inputs))


@torch.no_grad()
def test_entries_of_the_matrix_of_full_attention_residuals_equal_the_depth_weights(backbones):
    model, token_ids = build(backbones, "llama", "attn_res", attn_res_block_size=1), backbones.token_ids()
    recorded = model(token_ids, output_depth_attentions=True).depth_attentions
    matrices = token_mixing(model, token_ids).matrices.squeeze(-1)
    for row, weights in zip(matrices, recorded, strict=True):
        torch.testing.assert_close(row[: len(weights)], weights.double(), rtol=1e-4, atol=1e-6)


def test_the_rank_of_a_sum_of_n_outer_products_is_n():
    generator = torch.Generator().manual_seed(0)
    for n in (1, 2, 5):
        left, right = torch.randn(2, 20, n, generator=generator, dtype=torch.float64)
        assert semiseparable_rank((left @ right.T).tril()) == n
    assert semiseparable_rank(torch.eye(9)) == 1
    assert semiseparable_rank(torch.ones(9, 9).tril()) == 1


def test_a_standard_model_is_measured_as_a_member_with_its_weights(backbones):
    standard, token_ids = backbones.build("llama"), backbones.token_ids()
    mixing = token_mixing(standard, token_ids)
    assert mixing.matrices.unique().tolist() == [0.0, 1.0]
    hidden = standard(token_ids, output_hidden_states=True).hidden_states
    for layer, state in enumerate(hidden[:-1]):
        assert difference(mixing.inputs[2 * layer], state.double()) < 1e-5
    assert "standard" not in vars(standard.config) and type(standard).__name__ == "LlamaForCausalLM"


@pytest.mark.parametrize(
    ("batch", "given"),
    [
        ("some text", "str"),
        ({"input_ids": [[1, 2]]}, "list"),
        (torch.tensor([1, 2]), r"a tensor of shape \[2\]"),
        ([[1, 2]], "list"),
    ],
)
def test_a_wrong_batch_is_rejected_with_its_type(backbones, batch, given):
    model = build(backbones, "llama", "attn_res")
    for measure in (depth_mixing, depth_attention, magnitudes, attention_sinks, interventions):
        with pytest.raises(ValueError, match=f"must be a tensor .*, got {given}: call .*return_tensors='pt'"):
            measure(model, batch)


def test_arguments_that_are_no_tensors_are_ignored_and_a_wrong_mask_is_rejected(backbones):
    model, token_ids = build(backbones, "llama", "mhc"), backbones.token_ids()
    expected = mixing_matrix(model, token_ids)
    assert torch.equal(
        mixing_matrix(model, {"input_ids": token_ids, "attention_mask": None, "use_cache": True}), expected
    )
    with pytest.raises(ValueError, match=r"the attention mask must have shape \[batch, seq\], got \[2, 1, 11, 11\]"):
        mixing_matrix(model, {"input_ids": token_ids, "attention_mask": torch.ones(2, 1, 11, 11)})
