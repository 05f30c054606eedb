"""What a source and a row are worth: losses held against models whose readers were written out without them."""

import math

import pytest
import torch
from transformers import BatchEncoding

from attnres.analysis import depth_attention, interventions
from attnres.analysis.interventions import count_passes

from ..modeling_attnres.connections import BACKBONES, FORMS, build, double
from .lines import Reads, loss_of

SUBLAYERS = 10


@pytest.fixture(scope="module")
def cases(backbones):
    """The member and the standard model with its backbone, in float64, for a block size and a scale."""

    def make(size: int, scale: str):
        member = double(build(backbones, "llama", "attn_res", attn_res_block_size=size, attn_res_scale=scale))
        return member, double(backbones.build("llama"))

    return make


@pytest.mark.parametrize(("size", "scale"), [(1, "mean"), (3, "mean"), (4, "sum"), (10, "sum")])
def test_losses_are_those_of_models_that_read_so(backbones, cases, size, scale):
    member, standard = cases(size, scale)
    ids = backbones.token_ids()
    found = interventions(member, ids.split(1), depth_attention(member, ids))

    @torch.no_grad()
    def rise(**change) -> float:
        return loss_of(backbones.straight_line(standard, ids, Reads(member, **change)), ids).item() - found.loss

    assert abs(rise()) < 5e-6
    sources = 1 + math.ceil(SUBLAYERS / size)
    assert found.hidden.tolist() == pytest.approx([rise(hidden=source) for source in range(sources)], abs=5e-6)
    expected = [rise(uniform=reader) for reader in range(1, SUBLAYERS + 1)]
    assert found.uniform[1:].tolist() == pytest.approx(expected, abs=5e-6)
    assert found.uniform[0].isnan() and found.tokens == 20
    # By the scale of the input, which norms take out, hidden sources are as masked ones.
    masked = [rise(masked=source) for source in range(sources)]
    assert found.hidden.tolist() == pytest.approx(masked, rel=0.02, abs=2e-3)
    assert min(found.hidden.abs().max(), found.uniform[1:].abs().max()) > 0.01


@torch.no_grad()
def test_in_a_residual_stream_a_hidden_source_is_an_output_that_is_left_out(backbones):
    member, standard = double(build(backbones, "llama", "standard")), double(backbones.build("llama"))
    ids = backbones.token_ids()
    found = interventions(member, ids)
    assert found.depth.sources == found.depth.outputs and found.uniform.isnan().all()
    for source in range(SUBLAYERS + 1):

        def read(outputs, source=source):
            return sum(v for i, v in enumerate(outputs) if i != source or len(outputs) == 1)

        loss = loss_of(backbones.straight_line(standard, ids, read), ids).item()
        assert found.loss + found.hidden[source].item() == pytest.approx(loss, abs=5e-6)


@torch.no_grad()
@pytest.mark.parametrize("connection", ["denseformer", "highway", "hyper_connections", "identity_hc", "mhc"])
@pytest.mark.parametrize("case", BACKBONES)
def test_every_connection_has_interventions(backbones, case, connection):
    model, ids = build(backbones, case, connection), backbones.token_ids()
    logits = model(ids).logits
    found = interventions(model, ids)
    assert torch.equal(model(ids).logits, logits)
    assert found.hidden.shape == (SUBLAYERS + 1,) and found.hidden.isfinite().all()
    assert found.hidden.abs().min() > 1e-6
    assert found.loss == pytest.approx(loss_of(logits, ids).item(), abs=5e-6)


@torch.no_grad()
@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_attention_residuals_has_interventions(backbones, form):
    model, ids = build(backbones, "llama", form), backbones.token_ids()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    found = interventions(model, ids, depth_attention(model, ids))
    assert found.hidden.isfinite().all() and found.uniform[1:].abs().max() > 1e-4
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_uniform_rows_change_nothing_where_weights_are_uniform(backbones):
    model, ids = build(backbones, "llama", "attn_res"), backbones.token_ids()
    with torch.no_grad():
        for name, tensor in model.named_parameters():
            if name.endswith("_res_proj.weight"):
                tensor.zero_()
    attention = depth_attention(model, ids)
    found = interventions(model, ids, attention)
    assert found.uniform[1:].tolist() == [0.0] * SUBLAYERS
    assert found.hidden.abs().max() > 0.01


def test_tokens_that_a_mask_leaves_out_are_not_predicted(backbones):
    model, ids = build(backbones, "llama", "standard"), backbones.token_ids()[:1]
    padded = torch.cat([ids, torch.zeros_like(ids)], dim=1)
    mask = torch.cat([torch.ones_like(ids), torch.zeros_like(ids)], dim=1)
    found = interventions(model, BatchEncoding({"input_ids": padded, "attention_mask": mask}))
    alone = interventions(model, ids)
    assert found.tokens == alone.tokens == 10
    torch.testing.assert_close(found.hidden, alone.hidden, rtol=1e-4, atol=1e-5)


def test_each_pass_is_told(backbones):
    model, ids, told = build(backbones, "llama", "attn_res"), backbones.token_ids(), []
    attention = depth_attention(model, ids)
    interventions(model, ids, attention, lambda: told.append(1))
    assert len(told) == count_passes(attention.depth, attention) == 1 + len(attention.depth.sources) + SUBLAYERS
    with pytest.raises(ValueError, match="no batch"):
        interventions(model, [])
