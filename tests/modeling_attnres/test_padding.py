"""Padding anywhere, and masks of every form: the model computes the same as without padding, or refuses the mask."""

from copy import deepcopy
from functools import partial
from itertools import pairwise

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache, StaticCache

from attnres import AttnResForCausalLM
from attnres.conversion import retrofit
from attnres.residual_attnres import FamilyWarning

from ..caches import CACHE
from ..cases import each_once
from ..conversion.backbones import build
from .rows import TOLERANCE, alone, error, of_travelled_code, refused


@pytest.fixture(scope="module")
def model(vivid_model) -> AttnResForCausalLM:
    return vivid_model()


@pytest.fixture(scope="module")
def dense(vivid_model) -> AttnResForCausalLM:
    """Return a model without experts, because rounding can change their choice."""
    return vivid_model(mlp_layer_types=["dense"] * 4)


# Padding `[batch, seq]`; the last row is padding alone.
RIGHT = (torch.arange(12) < torch.tensor([12, 7, 2, 0])[:, None]).long()
GAPS = RIGHT.clone()
GAPS[0] = torch.tensor([0, 1, 1, 0, 0, 1, 1, 1, 0, 1, 0, 0])
GAPS[1] = torch.tensor([1, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1])
PADDINGS = {"left": RIGHT.flip(1), "right": RIGHT, "in the middle": GAPS}


@pytest.fixture(scope="module")
def ids() -> Tensor:
    return torch.randint(3, 99, (4, 20), generator=torch.Generator().manual_seed(4))


def assert_as_without_padding(model, ids: Tensor, mask: Tensor, logits: Tensor) -> None:
    for tokens, is_real, found in zip(ids, mask.bool(), logits):
        if is_real.any():
            assert error(found[is_real], model(tokens[is_real].unsqueeze(0)).logits[0]) < TOLERANCE


@pytest.mark.parametrize("padding", PADDINGS)
def test_padding_changes_nothing(model, ids, padding):
    mask = PADDINGS[padding]
    assert_as_without_padding(model, ids[:, :12], mask, model(ids[:, :12], attention_mask=mask).logits)


# `None`: the model makes one.
@pytest.mark.parametrize(("padding", "cache_class"), each_once([*PADDINGS], [None, DynamicCache, StaticCache]))
def test_a_cache_continues_after_a_padded_prompt_as_without_padding(model, ids, padding, cache_class):
    options = {"max_cache_len": 20} if cache_class is StaticCache else {}
    cache, logits, end = cache_class and cache_class(config=model.config, **options), [], 0
    # A prompt, two single tokens, five tokens with padding, and a single token that is padding in one row.
    parts = PADDINGS[padding], torch.ones(4, 1), torch.ones(4, 1), RIGHT[:, 4:9], torch.tensor([[1], [0], [1], [1]])
    for i in range(len(parts)):
        mask = torch.cat(parts[: i + 1], 1).long()
        start, end = end, mask.shape[1]
        with torch.no_grad():
            output = model(ids[:, start:end], attention_mask=mask, **{CACHE: cache})
        cache = output[CACHE]
        logits.append(output.logits)
    assert_as_without_padding(model, ids, mask, torch.cat(logits, 1))


def test_the_travelled_code_continues_right_padded_prompts_alike(model, ids):
    found = []
    for form in (model, of_travelled_code(model)):
        cache = DynamicCache(config=model.config)
        form(ids[:, :12], attention_mask=RIGHT, **{CACHE: cache})
        mask = torch.cat([RIGHT, torch.ones(4, 1, dtype=torch.long)], 1)
        found.append(form(ids[:, 12:13], attention_mask=mask, **{CACHE: cache}).logits)
    assert error(*found) < TOLERANCE


def test_position_ids_of_left_padded_rows_are_not_taken_for_documents(model, ids):
    mask = PADDINGS["left"][:3]
    counted = mask.cumsum(-1) - 1
    expected = model(ids[:3, :12], attention_mask=mask)
    for positions in (counted.clamp(min=0), counted.masked_fill(mask == 0, 1), counted.masked_fill(mask == 0, 0)):
        outputs = model(ids[:3, :12], attention_mask=mask, position_ids=positions)
        assert torch.equal(outputs.logits, expected.logits)
        assert outputs.get(CACHE) is not None
    model.generation_config.pad_token_id = 0
    generate = partial(model.generate, max_new_tokens=4, do_sample=False)
    together = generate(ids[:3, :12], attention_mask=mask)[:, -4:]
    for tokens, is_real, new in zip(ids[:3, :12], mask.bool(), together):
        assert torch.equal(new, generate(tokens[is_real].unsqueeze(0))[0, -4:])


def square(is_seen: Tensor, form: str) -> Tensor:
    """Return a mask over pairs of tokens `[batch, 1, seq, seq]`, boolean or additive."""
    least = torch.finfo(torch.float32).min
    return (is_seen if form == "boolean" else torch.where(is_seen, 0.0, least)).unsqueeze(1)


CAUSAL = torch.ones(12, 12, dtype=torch.bool).tril()


@pytest.mark.parametrize("form", ["boolean", "added"])
def test_a_mask_over_pairs_of_tokens_that_hides_padding_or_documents_is_honoured(model, ids, form):
    for mask in PADDINGS.values():
        mask = mask[:3]
        logits = model(ids[:3, :12], attention_mask=square(CAUSAL & mask[:, None].bool(), form)).logits
        assert_as_without_padding(model, ids[:3, :12], mask, logits)
    numbers = torch.tensor([0] * 5 + [1] * 4 + [2] * 3)
    logits = model(ids[:1, :12], attention_mask=square((CAUSAL & (numbers[:, None] == numbers))[None], form)).logits
    parts = [ids[:1, start:end] for start, end in pairwise((0, 5, 9, 12))]
    assert error(logits, alone(model, parts)) < TOLERANCE


def test_a_mask_over_pairs_of_tokens_may_continue_from_a_cache(model, ids):
    cache = DynamicCache(config=model.config)
    first = model(ids[:1, :12], **{CACHE: cache}, attention_mask=square(CAUSAL[None], "boolean")).logits
    is_seen = torch.ones(8, 20, dtype=torch.bool).tril(12)
    rest = model(ids[:1, 12:], **{CACHE: cache}, attention_mask=square(is_seen[None], "boolean")).logits
    assert error(torch.cat([first, rest], 1), model(ids[:1]).logits) < TOLERANCE


@pytest.fixture(scope="module")
def dense64(dense) -> AttnResForCausalLM:
    """Return a model in float64; only the recurrence and its state stay in float32."""
    return deepcopy(dense).double()


PROMPT = torch.tensor([[0] * 5 + [1] * 15, [1] * 20, [0] * 9 + [1] * 11])
GAPPED = torch.tensor([[1] * 4 + [0] * 3 + [1] * 13, [1] * 20, [0, 1, 0, 1] * 5])


@pytest.mark.parametrize(
    ("mask", "form", "cache_class"),
    [
        (PROMPT, "boolean", None),  # the model makes one
        (PROMPT, "added", DynamicCache),
        (GAPPED, "boolean", DynamicCache),
        (GAPPED, "added", None),
    ],
)
def test_a_padded_prompt_may_be_read_in_chunks_with_masks_over_pairs(dense64, ids, mask, form, cache_class):
    ids = ids[:3]
    pairs = torch.ones(20, 20, dtype=torch.bool).tril() & mask[:, None].bool()
    cache, logits = cache_class and cache_class(config=dense64.config), []
    with torch.no_grad():
        for start, end in pairwise((0, 8, 13, 14, 20)):
            seen = square(pairs[:, start:end, :end], form).to(torch.float64 if form == "added" else torch.bool)
            output = dense64(ids[:, start:end], attention_mask=seen, **{CACHE: cache})
            cache = output[CACHE]
            logits.append(output.logits)
        found = torch.cat(logits, 1)
        for tokens, is_real, logits_of_row in zip(ids, mask.bool(), found):
            assert error(logits_of_row[is_real], dense64(tokens[is_real][None]).logits[0]) < 5e-6


@torch.no_grad()
def test_padding_that_is_no_longer_in_the_cache_is_forgotten(model, ids):
    cache = DynamicCache(config=model.config)
    pairs = torch.ones(1, 1, 12, 12, dtype=torch.bool).tril()
    model(ids[:1, :8], attention_mask=pairs[..., :8, :8] & PROMPT[0, :8].bool(), **{CACHE: cache})
    cache.reset()
    expected = model(ids[:1, :12]).logits[:, 8:]
    model(ids[:1, :8], **{CACHE: cache})
    assert error(model(ids[:1, 8:12], attention_mask=pairs[..., 8:, :], **{CACHE: cache}).logits, expected) < TOLERANCE


def test_a_mask_over_pairs_that_hides_real_tokens_in_the_cache_is_refused(model, ids):
    pairs = CAUSAL[None, None].expand(3, 1, -1, -1)
    start = model(ids[:3, :8], attention_mask=pairs[..., :8, :8])
    hidden = pairs[..., 8:, :].clone()
    hidden[..., :2] = False
    message = refused(model, input_ids=ids[:3, 8:12], attention_mask=hidden, **{CACHE: start[CACHE]})
    assert "it must show the 8 tokens in the cache" in message
    # Tokens that were hidden as padding must stay hidden, too.
    start = model(ids[:3, :8], attention_mask=pairs[..., :8, :8] & PROMPT[:, None, None, :8].bool())
    message = refused(model, input_ids=ids[:3, 8:12], attention_mask=pairs[..., 8:, :], **{CACHE: start[CACHE]})
    assert "it must show the 8 tokens in the cache" in message


@torch.no_grad()
def test_linear_attention_ignores_a_mask_that_it_cannot_apply_as_in_transformers_and_a_warning_says_so(ids):
    standard = build("kimi_linear")
    model = retrofit(standard)
    window = CAUSAL & ~CAUSAL.tril(-3)
    # Of the last mask no entry is zero, so that its tokens must not pass for padding.
    biases = torch.full((12, 12), -torch.inf).triu(1) + torch.linspace(-1, 1, 12)
    token_ids, causal = ids[:2, :12] % standard.config.vocab_size, standard(ids[:2, :12] % standard.config.vocab_size)
    for mask in (window, torch.ones_like(CAUSAL), biases):
        mask = mask.expand(2, 1, 12, 12)
        expected = standard(token_ids, attention_mask=mask).logits
        assert error(expected, causal.logits) > 1e-3  # full attention applies it
        with pytest.warns(FamilyWarning, match="holds for full attention alone"):
            actual = model(token_ids, attention_mask=mask).logits
        assert error(actual, expected) < TOLERANCE
        # The caller may choose what linear attention sees.
        masks = {"full_attention": mask, "linear_attention": None}
        assert error(model(token_ids, attention_mask=masks).logits, expected) < TOLERANCE


@pytest.mark.parametrize("first", [1, 2])
def test_a_first_chunk_of_padding_alone_changes_no_state(model, ids, first):
    mask = torch.tensor([[0, 1, 1, 1], [1, 1, 1, 1]])
    start = model(ids[:2, :first], attention_mask=mask[:, :first])
    rest = model(ids[:2, first:4], attention_mask=mask, **{CACHE: start[CACHE]})
    assert_as_without_padding(model, ids[:2, :4], mask, torch.cat([start.logits, rest.logits], 1))


def test_a_compiled_graph_sees_that_a_single_token_is_padding(model, ids):
    column = torch.tensor([[1], [0]])
    torch.compiler.reset()
    prepare = torch.compile(model.model.prepare_rows, fullgraph=True, backend="eager")
    for mask in (column, {"full_attention": None, "linear_attention": column}):
        found = prepare({"input_ids": ids[:2, :1], "attention_mask": mask, CACHE: DynamicCache(config=model.config)})
        assert torch.equal(found["rows"].is_real, column.bool())


def test_a_mask_as_long_as_a_static_cache_is_cut_to_the_tokens_so_far(model, ids):
    cache, mask = StaticCache(config=model.config, max_cache_len=20), torch.zeros(4, 20, dtype=torch.long)
    mask[:, :12] = 1
    with torch.no_grad():
        found = model(ids[:, :12], attention_mask=mask, **{CACHE: cache}).logits
    assert error(found, model(ids[:, :12]).logits) < TOLERANCE


@pytest.mark.parametrize(("sign", "full"), each_once(["seq_idx", "position_ids"], [None, "sdpa", "eager"]))
def test_documents_are_kept_apart_with_a_mask_for_each_kind_of_layer(model, ids, sign, full):
    numbers = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 2]])
    signs = {"seq_idx": numbers, "position_ids": torch.tensor([[0, 1, 2, 0, 1, 2, 3, 0]])}
    pairs = ((numbers[0][:, None] == numbers[0]) & torch.ones(8, 8, dtype=torch.bool).tril())[None, None]
    row = ids[:1, :8]
    alone = torch.cat([model(part).logits for part in row.split([3, 4, 1], 1)], 1)
    if full is None or full == "sdpa":
        masks = {"full_attention": full and pairs, "linear_attention": None}
        assert error(model(row, attention_mask=masks, **{sign: signs[sign]}).logits, alone) < TOLERANCE
        return
    model.set_attn_implementation("eager")
    try:
        assert error(model(row, attention_mask=pairs).logits, alone) < TOLERANCE
    finally:
        model.set_attn_implementation("sdpa")
