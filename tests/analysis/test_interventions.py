"""The losses of interventions equal those of models that are written out with the intervention."""

import math

import pytest
import torch
from transformers import BatchEncoding

from attnres.analysis import depth_attention, interventions
from attnres.analysis.interventions import count_passes

from ..cases import each_once
from ..modeling_attnres.connections import FORMS, build, double
from .lines import Reads, loss_of

SUBLAYERS = 10


@pytest.fixture(scope="module")
def cases(backbones):
    """Return a function of block size and scale that returns a member and a standard model, both in float64."""

    def make(size: int, scale: str):
        member = double(build(backbones, "llama", "attn_res", attn_res_block_size=size, attn_res_scale=scale))
        return member, double(backbones.build("llama"))

    return make


@pytest.mark.parametrize(("size", "scale"), [(1, "mean"), (4, "sum")])
def test_losses_equal_those_of_models_written_out_with_the_intervention(backbones, cases, size, scale):
    member, standard = cases(size, scale)
    ids = backbones.token_ids()
    result = interventions(member, ids.split(1), depth_attention(member, ids))

    @torch.no_grad()
    def rise(**change) -> float:
        return loss_of(backbones.straight_line(standard, ids, Reads(member, **change)), ids).item() - result.loss

    assert abs(rise()) < 5e-6
    sources = 1 + math.ceil(SUBLAYERS / size)
    assert result.hidden.tolist() == pytest.approx([rise(hidden=source) for source in range(sources)], abs=5e-6)
    expected = [rise(uniform=reader) for reader in range(1, SUBLAYERS + 1)]
    assert result.uniform[1:].tolist() == pytest.approx(expected, abs=5e-6)
    assert result.uniform[0].isnan() and result.tokens == 20
    # A hidden source differs from a masked one only by the scale of the input, which the norms cancel.
    masked = [rise(masked=source) for source in range(sources)]
    assert result.hidden.tolist() == pytest.approx(masked, rel=0.02, abs=2e-3)
    assert min(result.hidden.abs().max(), result.uniform[1:].abs().max()) > 0.01


@torch.no_grad()
def test_hiding_a_source_of_a_residual_stream_leaves_its_output_out_of_the_sum(backbones):
    member, standard = double(build(backbones, "llama", "standard")), double(backbones.build("llama"))
    ids = backbones.token_ids()
    result = interventions(member, ids)
    assert result.depth.sources == result.depth.outputs and result.uniform.isnan().all()
    for source in range(SUBLAYERS + 1):

        def read(outputs, source=source):
            return sum(v for i, v in enumerate(outputs) if i != source or len(outputs) == 1)

        loss = loss_of(backbones.straight_line(standard, ids, read), ids).item()
        assert result.loss + result.hidden[source].item() == pytest.approx(loss, abs=5e-6)


@torch.no_grad()
@pytest.mark.parametrize(
    ("connection", "case"),
    each_once(["denseformer", "highway", "hyper_connections", "identity_hc", "mhc"], ["llama", "llama", "kimi_linear"]),
)
def test_sources_of_every_connection_can_be_hidden(backbones, case, connection):
    model, ids = build(backbones, case, connection), backbones.token_ids()
    logits = model(ids).logits
    result = interventions(model, ids)
    assert torch.equal(model(ids).logits, logits)
    assert result.hidden.shape == (SUBLAYERS + 1,) and result.hidden.isfinite().all()
    assert result.hidden.abs().min() > 1e-6
    assert result.loss == pytest.approx(loss_of(logits, ids).item(), abs=5e-6)


@torch.no_grad()
@pytest.mark.parametrize("form", FORMS)
def test_interventions_work_on_every_form_of_attention_residuals(backbones, form):
    model, ids = build(backbones, "llama", form), backbones.token_ids()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    result = interventions(model, ids, depth_attention(model, ids))
    assert result.hidden.isfinite().all() and result.uniform[1:].abs().max() > 1e-4
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_uniform_weights_change_nothing_if_the_weights_were_uniform(backbones):
    model, ids = build(backbones, "llama", "attn_res"), backbones.token_ids()
    with torch.no_grad():
        for name, tensor in model.named_parameters():
            if name.endswith("_res_proj.weight"):
                tensor.zero_()
    attention = depth_attention(model, ids)
    result = interventions(model, ids, attention)
    assert result.uniform[1:].tolist() == [0.0] * SUBLAYERS
    assert result.hidden.abs().max() > 0.01


def test_tokens_that_a_mask_leaves_out_are_not_predicted(backbones):
    model, ids = build(backbones, "llama", "standard"), backbones.token_ids()[:1]
    padded = torch.cat([ids, torch.zeros_like(ids)], dim=1)
    mask = torch.cat([torch.ones_like(ids), torch.zeros_like(ids)], dim=1)
    result = interventions(model, BatchEncoding({"input_ids": padded, "attention_mask": mask}))
    alone = interventions(model, ids)
    assert result.tokens == alone.tokens == 10
    torch.testing.assert_close(result.hidden, alone.hidden, rtol=1e-4, atol=1e-5)


def test_advance_is_called_after_each_pass(backbones):
    model, ids, calls = build(backbones, "llama", "attn_res"), backbones.token_ids(), []
    attention = depth_attention(model, ids)
    interventions(model, ids, attention, lambda: calls.append(1))
    assert len(calls) == count_passes(attention.depth, attention) == 1 + len(attention.depth.sources) + SUBLAYERS
    with pytest.raises(ValueError, match="no batch"):
        interventions(model, [])
