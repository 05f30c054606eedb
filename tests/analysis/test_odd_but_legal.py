"""Unusual but legal batches, models and threads give the same numbers as the plain case."""

import threading

import pytest
import torch

from attnres.analysis import depth_attention, depth_mixing, interventions, magnitudes

from ..modeling_attnres.connections import build, double


def padded_left(ids: torch.Tensor) -> dict[str, torch.Tensor]:
    nothing = torch.zeros(len(ids), 3, dtype=torch.long)
    return {"input_ids": torch.cat([nothing, ids], 1), "attention_mask": torch.cat([nothing, torch.ones_like(ids)], 1)}


@pytest.mark.parametrize("case", ["llama", "gemma2"])
def test_nothing_is_predicted_from_padding(backbones, case):
    model, ids = build(backbones, case, "attn_res"), backbones.token_ids()
    result, expected = interventions(model, padded_left(ids)), interventions(model, ids)
    assert result.tokens == expected.tokens == 20
    assert result.loss == pytest.approx(expected.loss, abs=1e-5)
    gradients = magnitudes(model, padded_left(ids)).gradients
    torch.testing.assert_close(gradients, magnitudes(model, ids).gradients, rtol=1e-4, atol=0)


def test_sequences_without_predicted_tokens_do_not_count(backbones):
    model, ids = build(backbones, "llama", "attn_res"), backbones.token_ids()
    assert interventions(model, [ids[:1], ids[1:, :1]]).loss == pytest.approx(interventions(model, ids[:1]).loss)
    with pytest.raises(ValueError, match="at least two tokens"):
        interventions(model, ids[:, :1])
    mask = torch.ones_like(ids)
    mask[1] = 0
    result = magnitudes(model, {"input_ids": ids, "attention_mask": mask})
    torch.testing.assert_close(result.gradients, magnitudes(model, ids[:1]).gradients, rtol=1e-5, atol=0)


def test_all_sequences_may_share_position_ids(backbones):
    model, ids = build(backbones, "llama", "attn_res"), backbones.token_ids()
    batch = {"input_ids": ids, "position_ids": torch.arange(ids.shape[1])[None]}
    torch.testing.assert_close(depth_mixing(model, batch).mean, depth_mixing(model, ids).mean)
    torch.testing.assert_close(magnitudes(model, batch).gradients, magnitudes(model, ids).gradients)


def test_gradients_are_measured_in_inference_mode(backbones):
    model, ids = build(backbones, "llama", "attn_res"), backbones.token_ids()
    expected = magnitudes(model, ids).gradients
    with torch.inference_mode():
        assert torch.equal(magnitudes(model, ids.clone()).gradients, expected)


@pytest.mark.parametrize("connection", ["attn_res", "standard"])
def test_layers_may_be_removed_without_changing_the_configuration(backbones, connection):
    model, ids = build(backbones, "llama", connection), backbones.token_ids()
    model.model.layers = model.model.layers[:3]
    attention = depth_attention(model, ids) if connection == "attn_res" else None
    result = interventions(model, ids, attention)
    assert len(result.depth.consumers) == len(depth_mixing(model, ids).mean) == len(result.uniform) == 7


def test_uniform_weights_leave_out_the_count_prior(backbones):
    model, ids = (
        build(backbones, "llama", "attn_res", attn_res_count_prior=True, attn_res_block_size=3),
        backbones.token_ids(),
    )
    model = double(model)
    result = interventions(model, ids, depth_attention(model, ids)).uniform
    last = model.model.output_attn_res_proj
    last.has_prior = False
    with torch.no_grad():
        last.weight.zero_()
    expected = interventions(model, ids).loss
    last.has_prior = True
    build_again = double(build(backbones, "llama", "attn_res", attn_res_count_prior=True, attn_res_block_size=3))
    assert result[-1].item() == pytest.approx(expected - interventions(build_again, ids).loss, abs=1e-5)


def test_several_threads_may_measure_one_model(backbones):
    model, ids = build(backbones, "llama", "attn_res"), backbones.token_ids()
    expected, result = depth_mixing(model, ids).mean, []
    threads = [threading.Thread(target=lambda: result.append(depth_mixing(model, ids).mean)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(result) == 8 and all(torch.equal(mean, expected) for mean in result)
    assert not any({"forward", "write"} & vars(module).keys() for module in model.modules())


def test_an_offloaded_model_has_the_same_gradients(backbones, tmp_path):
    from accelerate import cpu_offload

    ids = backbones.token_ids()
    expected = magnitudes(build(backbones, "llama", "attn_res"), ids)
    model = cpu_offload(build(backbones, "llama", "attn_res"), execution_device=torch.device("cpu"))
    assert torch.equal(magnitudes(model, ids).gradients, expected.gradients)
