"""Generation that looks ahead: a cache of delta attention goes back by drafted tokens, as if it had not read them."""

import copy
import functools
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import AutoModelForCausalLM, DynamicCache, PreTrainedModel
from transformers.cache_utils import LinearAttentionLayer

from attnres import AttnResForCausalLM, delta_attention_attnres, recording_attnres
from attnres.accelerated import delta_attention
from attnres.configuration import load
from attnres.delta_attention_attnres import DeltaAttention

from ..caches import CACHE
from ..conversion.backbones import make_vivid

VOCABULARY = 128


@pytest.fixture(scope="module")
def hybrid(vivid_model) -> AttnResForCausalLM:
    """Return a small hybrid in float64, so that rounding decides no token."""
    # `grouped_mm` of PyTorch has no float64.
    model = vivid_model(attn_res_block_size=3, vocab_size=VOCABULARY)
    model.set_experts_implementation("eager")
    return model.double()


@pytest.fixture(scope="module")
def kimi_k3() -> PreTrainedModel:
    """Return a small Kimi K3 in float64."""
    torch.manual_seed(0)
    config = load("attnres-k3-tiny", vocab_size=VOCABULARY, num_hidden_layers=4)
    model = AutoModelForCausalLM.from_config(config, experts_implementation="eager").eval()
    with torch.no_grad():
        make_vivid(model)
    return model.double()


def draw_ids(*shape: int, seed: int = 0) -> Tensor:
    return torch.randint(3, VOCABULARY, shape, generator=torch.Generator().manual_seed(seed))


# ---- The cache


@st.composite
def passes(draw) -> list[tuple[int, int, int]]:
    """Draw passes: the number of tokens, the number that `crop` drops after it, or -1 without a crop; and a seed."""
    result, since = [], 0
    for _ in range(draw(st.integers(2, 5))):
        length = draw(st.sampled_from([1, 2, 3, 5, 9, 21]))
        since += length
        dropped = draw(st.sampled_from([-1, 0, 1, 2, 4, 8]))
        dropped = min(dropped, since)
        since = since if dropped < 0 else 0
        result.append((length, dropped, draw(st.integers(0, 2**16))))
    return result


@torch.no_grad()
@pytest.mark.slow
@settings(max_examples=25)
@given(drawn=passes(), batch=st.sampled_from([1, 3]), has_padding=st.booleans())
def test_a_cache_that_went_back_continues_as_if_it_had_read_only_what_stayed(hybrid, drawn, batch, has_padding):
    """Drafts of any length are accepted up to any token, in batches, with padding anywhere in prompts and drafts."""
    cache = DynamicCache(config=hybrid.config)
    ids, mask = torch.zeros(batch, 0, dtype=torch.long), torch.zeros(batch, 0, dtype=torch.long)
    with pytest.MonkeyPatch.context() as patch:
        # So that short passes are long ones: at least 8 tokens are recorded.
        for name, value in (("RECORDED", 8), ("CHUNK", 4), ("STEPS", 3)):
            patch.setattr(recording_attnres, name, value)
        cache.activate_past_recording()
        for length, dropped, seed in drawn:
            new = draw_ids(batch, length, seed=seed)
            ids, mask = torch.cat((ids, new), 1), torch.cat((mask, torch.ones_like(new)), 1)
            if has_padding:
                mask[:, -length:] = (torch.rand(new.shape, generator=torch.Generator().manual_seed(seed)) < 0.7).long()
            hybrid(new, attention_mask=mask, **{CACHE: cache})
            if dropped >= 0:
                cache.crop(-dropped)
                stay = ids.shape[1] - dropped
                ids, mask = ids[:, :stay], mask[:, :stay]
        last = draw_ids(batch, 1, seed=99)
        mask = torch.cat((mask, torch.ones_like(last)), 1)
        found = hybrid(last, attention_mask=mask, **{CACHE: cache}).logits[:, -1]
    for row in range(batch):
        kept = torch.cat((ids[row], last[row]))[mask[row].bool()]
        expected = hybrid(kept[None], use_cache=False).logits[0, -1]
        # The recurrence computes in float32, whatever the model's dtype.
        torch.testing.assert_close(found[row], expected, rtol=0, atol=1e-4)


@torch.no_grad()
@pytest.mark.parametrize("form", [delta_attention_attnres, delta_attention], ids=["plain", "accelerated"])
@pytest.mark.parametrize("accepted", range(6))
def test_the_state_after_accepted_tokens_has_the_bits_of_single_tokens(form, accepted):
    generator = torch.Generator().manual_seed(0)
    query, key, value, g = torch.rand(4, 2, 6, 3, 8, generator=generator)
    inputs, state = (query, key, value, -g, g[..., 0]), torch.rand(2, 3, 8, 8, generator=generator)
    mixed = torch.rand(2, 5, 4 + 6, generator=generator)
    layer = LinearAttentionLayer()
    layer.update_conv_state(mixed[..., :4], conv_kernel_size=4)
    layer.update_recurrent_state(state)
    layer.activate_past_recording()
    layer = recording_attnres.RecordingLayer(layer)
    layer.run(form.chunk, form.step, inputs, state, layer.update_conv_state(mixed[..., 4:]), None, None)
    layer.crop(accepted - 6)
    for token in range(accepted):
        _, state = form.step(*(tensor[:, token : token + 1] for tensor in inputs), state, True)
    assert torch.equal(layer.recurrent_states[0], state)
    assert torch.equal(layer.conv_states[0], mixed[..., accepted : accepted + 4])


@torch.no_grad()
def test_a_long_prompt_is_not_recorded_as_a_whole(hybrid):
    cache = DynamicCache(config=hybrid.config)
    cache.activate_past_recording()
    hybrid(draw_ids(1, 50), **{CACHE: cache})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(recording_attnres, "RECORDED", 64)
        hybrid(draw_ids(1, 600), **{CACHE: cache})
    # Whole chunks of 64 tokens go unrecorded, and 64 tokens or more stay. Nothing can go back through that gap.
    with pytest.raises(RuntimeError, match="go back by 0 to 88 tokens, not 89"):
        cache.crop(-89)
    (record,) = cache.layers[0].passes
    assert record.length == 88
    for tensor in (record.mixed, *record.inputs):
        assert tensor.untyped_storage().nbytes() == tensor.nbytes


@torch.no_grad()
def test_a_cache_goes_back_only_where_it_was_asked_to_record(hybrid):
    cache, ids = DynamicCache(config=hybrid.config), draw_ids(1, 5)
    hybrid(ids, **{CACHE: cache})
    cache.activate_past_recording()
    hybrid(ids[:, :2], **{CACHE: cache})
    assert not cache.layers[0].is_croppable or cache.layers[0].passes
    with pytest.raises(RuntimeError, match="go back by 0 to 2 tokens, not 3"):
        cache.crop(-3)
    cache.reset()
    with pytest.raises(RuntimeError, match="go back by 0 to 0 tokens, not 1"):
        cache.crop(-1)
    assert torch.equal(hybrid(ids, **{CACHE: cache}).logits, hybrid(ids, use_cache=False).logits)


# ---- Generation


def test_embeddings_are_refused_because_the_first_pass_would_read_no_drafts(hybrid):
    ids = draw_ids(1, 4)
    embeddings = hybrid.get_input_embeddings()(ids)
    for given_ids in ({}, {"input_ids": ids}):
        with pytest.raises(ValueError, match="assisted generation needs tokens: pass `input_ids` and no"):
            hybrid.generate(inputs_embeds=embeddings, **given_ids, prompt_lookup_num_tokens=3, max_new_tokens=2)


@pytest.fixture(params=["hybrid", "kimi_k3", "plain"])
def model(request) -> PreTrainedModel:
    """Return a model; the last one runs the delta attention that a model without `attnres` runs."""
    if request.param != "plain":
        return request.getfixturevalue(request.param)
    model = copy.deepcopy(request.getfixturevalue("hybrid"))
    for module in model.modules():
        if isinstance(module, DeltaAttention):
            module.chunk, module.step = delta_attention_attnres.chunk, delta_attention_attnres.step
            module.convolve = delta_attention_attnres.convolve
            module.convolve_step = delta_attention_attnres.convolve_step
    return model


def noisy_copy(model: PreTrainedModel, scale: float) -> PreTrainedModel:
    """Return a copy that mostly chooses the same tokens, and drafts 4 at a time."""
    model, generator = copy.deepcopy(model), torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
                parameter.add_(noise.to(parameter.dtype), alpha=scale * parameter.std().item())
    draft = {"num_assistant_tokens": 4, "num_assistant_tokens_schedule": "constant"}
    model.generation_config.update(**draft, assistant_confidence_threshold=0.0)
    return model


@pytest.fixture
def compare(model, monkeypatch) -> Callable[..., None]:
    """Return `compare(ids, **options)`, which asserts that greedy tokens do not depend on the options.

    It also asserts that some drafted tokens were accepted and some were not.
    """

    def run(ids: Tensor, cache: DynamicCache | None = None, **options) -> None:
        fixed = {"max_new_tokens": 24, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
        expected = model.generate(ids, **fixed)
        calls: list[int] = []
        forward, crop = model.forward, DynamicCache.crop
        dropped: list[int] = []
        # `generate` reads the names of the arguments, and drops a mask of ones if there is one for a mask.
        counted = functools.wraps(forward)(lambda *args, **more: calls.append(1) or forward(*args, **more))
        monkeypatch.setattr(model, "forward", counted)
        monkeypatch.setattr(DynamicCache, "crop", lambda self, n: dropped.append(n) or crop(self, n))
        if cache is not None:
            options |= {CACHE: cache, "attention_mask": torch.ones_like(ids)}
        assert torch.equal(model.generate(ids, **fixed, **options), expected)
        monkeypatch.undo()
        assert len(calls) < 24 and min(dropped) < 0

    return run


REPETITIVE = draw_ids(1, 5, seed=3).repeat(1, 4)


@pytest.mark.slow
def test_prompt_lookup_gives_the_greedy_tokens(model, compare):
    ids = model.generate(REPETITIVE, max_new_tokens=40, do_sample=False, eos_token_id=None)
    compare(ids, prompt_lookup_num_tokens=4)


@pytest.mark.slow
def test_an_assistant_gives_the_greedy_tokens(model, compare):
    compare(draw_ids(1, 9), assistant_model=noisy_copy(model, 0.02))


@pytest.mark.slow
@torch.no_grad()
def test_an_assistant_gives_the_greedy_tokens_after_a_prompt_in_chunks(model, compare):
    """A caller may have read a part of the prompt already, in chunks of any size."""
    ids, cache = draw_ids(1, 12), DynamicCache(config=model.config)
    for chunk in ids[:, :-1].split([4, 1, 6], 1):
        model(chunk, **{CACHE: cache})
    compare(ids, cache, assistant_model=noisy_copy(model, 0.02))
