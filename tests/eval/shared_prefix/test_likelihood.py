"""`SharedPrefixLM` gives the likelihoods of the harness's model class, and computes fewer tokens."""

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from lm_eval.api.instance import Instance
from lm_eval.api.registry import get_model
from lm_eval.models.huggingface import HFLM
from transformers import AutoModelForCausalLM, KimiLinearConfig

from attnres.eval import prefix_tree
from attnres.eval.shared_prefix import SharedPrefixLM

from .models import MODELS, small
from .prompts import Requests, assert_same, questions, texts, words


@st.composite
def any_requests(draw) -> Requests:
    """Draw requests. Contexts may be empty, begin alike or begin another; continuations may coincide or begin alike."""
    token = st.integers(3, 6)
    texts = draw(st.lists(st.lists(token, min_size=1, max_size=30), min_size=1, max_size=3))
    requests = []
    for _ in range(draw(st.integers(1, 5))):
        text = draw(st.sampled_from(texts))
        context = [1, *text[: draw(st.integers(0, 30))], *draw(st.lists(token, max_size=4))]
        for _ in range(draw(st.integers(1, 4))):
            requests.append((None, context, draw(st.lists(token, min_size=1, max_size=12))))
    return draw(st.permutations(requests))


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_any_requests_have_the_scores_of_the_stock_harness(name, make_model, tokenizer):
    stock = HFLM(make_model(name), tokenizer=tokenizer, batch_size=4, logits_cache=False)
    ours = SharedPrefixLM(make_model(name), tokenizer=tokenizer)
    assert ours.abilities == (True, True)

    @settings(max_examples=6, deadline=None, database=None)
    @given(any_requests(), st.integers(1, 5), st.sampled_from([1, 30, 10**9]), st.sampled_from([12, 512]))
    def check(requests, batch_size, least_saving, max_length):
        stock._max_length = ours.max_length = max_length
        ours.batch_size = batch_size
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(prefix_tree, "PASS_TOKENS", least_saving)
            actual = ours._loglikelihood_tokens(requests)
        # The stock harness would cut off the BOS token of a context that is too long.
        fitting = [
            (None, [1, *context[max(1, len(context) + len(end) - max_length) :]], end) for _, context, end in requests
        ]
        assert_same(actual, stock._loglikelihood_tokens(fitting, disable_tqdm=True))

    check()


@pytest.mark.parametrize("name", ["llama", "block size 2"])
def test_the_tokens_of_greedy_decoding_are_marked_as_greedy(name, make_model, scored):
    model = make_model(name)
    context = words(random.Random(0), 200)
    ids = model.generate(torch.tensor([context]), max_new_tokens=6, do_sample=False, eos_token_id=-1)
    greedy = ids[0, 200:].tolist()
    other = [*greedy[:4], 3 if greedy[4] != 3 else 4]
    actual = scored(SharedPrefixLM, model, [(None, context, c) for c in (greedy, other, greedy[:1], other[4:])])
    assert [is_greedy for _, is_greedy in actual] == [True, False, True, False]


def test_examples_are_computed_once_and_single_token_choices_in_one_pass(model, scored, tokenizer, calls):
    requests = questions(random.Random(0), examples=300, items=8, question=20, choice=1)
    lm = SharedPrefixLM(model, tokenizer=tokenizer, batch_size=4)
    assert lm.abilities.share_prefix
    shapes = calls(model)
    actual = lm._loglikelihood_tokens(requests, disable_tqdm=True)
    assert shapes[0] == (1, 300)
    assert [rows for rows, _ in shapes[1:]] == [4, 4]
    assert all(20 <= length <= 24 for _, length in shapes[1:])
    shapes.clear()
    assert_same(actual, scored(HFLM, model, requests))
    assert sum(rows * length for rows, length in shapes) > 8 * 300


def test_choices_of_several_tokens_share_their_question(model, scored, tokenizer, calls):
    requests = questions(random.Random(0), examples=0, items=4, question=60, choice=9)
    lm = SharedPrefixLM(model, tokenizer=tokenizer, batch_size=4)
    assert lm.abilities.share_prefix
    shapes = calls(model)
    actual = lm._loglikelihood_tokens(requests, disable_tqdm=True)
    # First the four contexts without their last token, cut to the shortest. Then the rest of each with its choices.
    assert shapes[0][0] == 4
    assert 59 <= shapes[0][1] < 64
    assert [rows for rows, _ in shapes[1:]] == [4] * 4
    assert all(length < 20 for _, length in shapes[1:])
    assert_same(actual, scored(HFLM, model, requests))


def test_a_choice_that_is_the_beginning_of_another_costs_nothing(model, tokenizer, calls):
    lm = SharedPrefixLM(model, tokenizer=tokenizer, batch_size=4)
    assert lm.abilities
    shapes = calls(model)
    lm._loglikelihood_tokens([(None, [5] * 9, choice) for choice in ([7, 8, 9], [7, 8], [7], [7, 8, 3])])
    assert shapes == [(1, 11)]


@pytest.mark.parametrize("name", ["llama", "block size 2", "gemma2"])
def test_logits_are_computed_at_the_continuation_only(name, make_model, tokenizer):
    model = make_model(name)
    lm = SharedPrefixLM(model, tokenizer=tokenizer)
    assert lm.abilities.keep_logits
    shapes = []
    hook = model.lm_head.register_forward_hook(lambda module, inputs, output: shapes.append(output.shape[:2]))
    lm.batch_size = 2
    lm._loglikelihood_tokens([(None, words(random.Random(i), 50 + i), [3, 4, 5]) for i in range(2)])
    hook.remove()
    assert shapes == [(2, 3)]


def test_prompts_cut_at_the_maximum_length_have_the_scores_of_the_stock_harness(model, scored, caplog):
    requests = questions(random.Random(0), examples=60, items=4, question=10, choice=3)
    actual = scored(SharedPrefixLM, model, requests, max_length=50)
    assert "16 of 16 requests lose their beginning: the model reads 50 tokens." in caplog.messages
    assert_same(actual, scored(HFLM, model, requests, max_length=50))


def test_rotary_embeddings_that_depend_on_the_length_are_not_shared_across_it(scored):
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "long_factor": [4.0] * 4, "short_factor": [1.0] * 4}
    rope |= {"original_max_position_embeddings": 64}
    model = small("phi3", rope_parameters=rope, original_max_position_embeddings=64)
    requests = questions(random.Random(0), examples=55, items=8, question=3, choice=6)  # some are longer than 64 tokens
    assert_same(scored(SharedPrefixLM, model, requests), scored(HFLM, model, requests, batch_size=1))


@pytest.mark.parametrize(
    "name, overrides",
    [
        # The Mamba layers compute several tokens at once as if nothing came before them.
        ("jamba", {"mamba_d_state": 8, "num_experts": 2, "attn_layer_period": 2, "attn_layer_offset": 1}),
        ("rwkv", {"attention_hidden_size": 32}),  # has no cache of `transformers`
    ],
)
def test_a_model_that_cannot_go_on_from_its_cache_is_computed_whole(name, overrides, scored, caplog):
    model = small(name, **overrides)
    requests = questions(random.Random(0), examples=150, items=3, question=9, choice=3)
    actual = scored(SharedPrefixLM, model, requests)
    assert sum("cannot go on from a copy of its cache: prefixes are not shared." in m for m in caplog.messages) == 1
    assert_same(actual, scored(HFLM, model, requests))


def test_a_model_that_fails_with_a_cache_is_computed_without_one(tiny_config, scored):
    """Kimi Linear with KDA layers alone is such a model: no layer of its cache counts the tokens."""
    fields = tiny_config().to_dict() | {"model_type": "kimi_linear", "layer_types": ["linear_attention"] * 4}
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(KimiLinearConfig(**fields)).eval()
    requests = questions(random.Random(0), examples=150, items=2, question=9, choice=3)
    with pytest.raises(ValueError, match="only contain LinearAttention layers"):
        scored(HFLM, model, requests)
    actual = scored(SharedPrefixLM, model, requests)
    model.config.use_cache = False
    assert_same(actual, scored(HFLM, model, requests))


def test_in_bfloat16_the_choices_are_those_of_the_stock_harness(scored):
    model = small("llama").bfloat16()
    requests = questions(random.Random(0), examples=100, items=12, question=9, choice=2)
    actual, expected = (scored(lm, model, requests, softmax_dtype="float32") for lm in (SharedPrefixLM, HFLM))
    noise = max(abs(a - b) for (a, _), (b, _) in zip(actual, expected))
    assert noise < 0.1
    for i in range(0, len(requests), 4):
        values = [value for value, _ in expected[i : i + 4]]
        best = max(range(4), key=lambda c: actual[i + c][0])
        assert values[best] >= max(values) - 2 * noise


@pytest.mark.parametrize("logits_cache", [True, False])
def test_in_bfloat16_the_sums_are_in_float32_unless_another_dtype_is_chosen(logits_cache, scored):
    model = small("llama").bfloat16()
    requests = questions(random.Random(0), examples=9, items=2, question=9, choice=12)
    default, single, half = (
        [value for value, _ in scored(SharedPrefixLM, model, requests, logits_cache=logits_cache, **dtype)]
        for dtype in ({}, {"softmax_dtype": "float32"}, {"softmax_dtype": "bfloat16"})
    )
    assert default == single != half
    assert max(default) < -32  # where numbers of bfloat16 are multiples of 0.25
    assert all(value % 0.25 == 0 for value in half) and not any(value % 0.25 == 0 for value in default)


def test_the_cache_of_requests_gets_every_answer(model, tokenizer):
    stored = {}
    lm = SharedPrefixLM(model, tokenizer=tokenizer, batch_size=2)
    lm.cache_hook.add_partial = lambda kind, texts, answer: stored.update({(kind, texts): answer})
    pairs = [(f"w5 w{i}", f" w{j} w9") for i in range(3, 6) for j in range(3, 7)]
    answers = lm.loglikelihood([Instance("loglikelihood", {}, pair, i) for i, pair in enumerate(pairs)])
    assert stored == {("loglikelihood", pair): answer for pair, answer in zip(pairs, answers)}


def test_the_likelihood_of_a_long_text_is_that_of_the_stock_harness(model, tokenizer):
    requests = [
        Instance("loglikelihood_rolling", {}, (text,), i) for i, text in enumerate(texts(random.Random(0), 70, 9))
    ]
    done = []
    stock = HFLM(model, tokenizer=tokenizer, batch_size=2, max_length=20)
    ours = SharedPrefixLM(model, tokenizer=tokenizer, batch_size=2, max_length=20, progress=done.append)
    expected = stock.loglikelihood_rolling(requests, disable_tqdm=True)
    assert ours.loglikelihood_rolling(requests, disable_tqdm=True) == pytest.approx(expected, abs=1e-4)
    assert not done


def test_without_the_logits_cache_each_request_is_computed_on_its_own(model, tokenizer, scored, calls):
    requests = questions(random.Random(0), examples=150, items=2, question=9, choice=1)
    lm = SharedPrefixLM(model, tokenizer=tokenizer, batch_size=4, logits_cache=False)
    assert lm.abilities
    shapes = calls(model)
    actual = lm._loglikelihood_tokens(requests, disable_tqdm=True)
    assert [rows for rows, _ in shapes] == [4, 4] and all(length > 150 for _, length in shapes)
    assert_same(actual, scored(HFLM, model, requests))


def test_an_automatic_batch_size_starts_at_the_maximum(model, tokenizer):
    lm = SharedPrefixLM(model, tokenizer=tokenizer, batch_size="auto", max_batch_size=6)
    assert lm.batch_size == 6


def test_the_harness_knows_the_model_by_name():
    assert get_model("attnres") is SharedPrefixLM
