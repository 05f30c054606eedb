"""`SharedPrefixLM` gives what the harness's own model gives, for fewer tokens, and survives a lack of memory."""

import functools
import json
import os
import random
import subprocess
import sys
import weakref
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    AutoTokenizer,
    KimiLinearConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

from attnres.conversion import retrofit
from attnres.eval import prefix_tree
from attnres.eval.benchmarks import benchmarks, load
from attnres.eval.shared_prefix import SharedPrefixLM

lm_eval = pytest.importorskip("lm_eval")
from lm_eval.api.instance import Instance  # noqa: E402
from lm_eval.api.registry import get_model  # noqa: E402
from lm_eval.models.huggingface import HFLM  # noqa: E402

HERE = Path(__file__).parent
Requests = list[tuple[None, list[int], list[int]]]
SMALL = {
    "vocab_size": 99,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size": 64,
    "max_position_embeddings": 512,
    "initializer_range": 0.1,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
# Windows shorter than the sequences below; Gemma's layers take turns between a window and none.
OTHERS = {
    "llama": {},
    "mistral": {"sliding_window": 8},
    "gemma2": {"sliding_window": 8, "final_logit_softcapping": 5.0, "query_pre_attn_scalar": 8},
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 512},
}
MODELS = [*OTHERS, "block size 1", "block size 2", "block size 4", "retrofit of gemma2"]


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    vocabulary = {"<pad>": 0, "<s>": 1, "</s>": 2} | {f"w{i}": i for i in range(3, 99)}
    words = Tokenizer(WordLevel(vocabulary, unk_token="<pad>"))
    words.pre_tokenizer = WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", bos_token="<s>", eos_token="</s>")


@pytest.fixture(scope="module")
def make_model(tiny_model) -> Callable[[str], PreTrainedModel]:
    """`make_model(name)`: one of `MODELS`; the family's have KDA, MLA, experts and uneven depth weights."""

    @functools.cache
    def make(name: str) -> PreTrainedModel:
        if name.startswith("block size"):
            return tiny_model(attn_res_block_size=int(name[-1]))
        if name.startswith("retrofit"):
            return retrofit(make(name.rpartition(" ")[2]), block_size=2)
        torch.manual_seed(0)
        return AutoModelForCausalLM.from_config(AutoConfig.for_model(name, **SMALL | OTHERS[name])).eval()

    return make


@pytest.fixture
def model(make_model) -> PreTrainedModel:
    return make_model("block size 2")


@pytest.fixture
def scored(tokenizer) -> Callable[..., list]:
    """`scored(lm_class, model, requests, **arguments)`: the answers of a new model of the harness."""

    def score(lm_class, model, requests: Requests, batch_size: int = 4, **arguments) -> list:
        lm = lm_class(model, tokenizer=tokenizer, batch_size=batch_size, **arguments)
        return lm._loglikelihood_tokens(requests, disable_tqdm=True)

    return score


@pytest.fixture
def calls(monkeypatch) -> Callable[..., list]:
    """`calls(model)`: the list to which each later forward pass adds the shape of its input."""

    def record(model: PreTrainedModel, most: int = 10**9, error: str | None = None) -> list:
        shapes, forward = [], model.forward

        @functools.wraps(forward)
        def counted(input_ids=None, **kwargs):
            shapes.append(tuple(input_ids.shape))
            if len(input_ids) > most:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried.") if error is None else RuntimeError(error)
            return forward(input_ids, **kwargs)

        monkeypatch.setattr(model, "forward", counted)
        return shapes

    return record


def words(rng: random.Random, length: int) -> list[int]:
    return [rng.randrange(3, 99) for _ in range(length)]


def questions(rng: random.Random, examples: int, items: int, question: int, choice: int) -> Requests:
    """Items of four choices after common examples; lengths in tokens, those of questions and choices up to 4 more."""
    shared, requests = words(rng, examples), []
    for _ in range(items):
        context = shared + words(rng, question + rng.randrange(5))
        requests += [(None, context, words(rng, choice + rng.randrange(5 if choice > 1 else 1))) for _ in range(4)]
    return requests


def assert_same(found: list, expected: list, tolerance: float = 1e-4) -> None:
    assert [greedy for _, greedy in found] == [greedy for _, greedy in expected]
    for (value, _), (reference, _) in zip(found, expected):
        assert value == pytest.approx(reference, abs=tolerance)


@st.composite
def any_requests(draw) -> Requests:
    """Contexts that are empty, begin alike or begin another; continuations that coincide or begin alike."""
    token = st.integers(3, 6)
    texts = draw(st.lists(st.lists(token, min_size=1, max_size=30), min_size=1, max_size=3))
    requests = []
    for _ in range(draw(st.integers(1, 5))):
        text = draw(st.sampled_from(texts))
        context = [1, *text[: draw(st.integers(0, 30))], *draw(st.lists(token, max_size=4))]
        for _ in range(draw(st.integers(1, 4))):
            requests.append((None, context, draw(st.lists(token, min_size=1, max_size=12))))
    return draw(st.permutations(requests))


@pytest.mark.parametrize("name", MODELS)
def test_any_requests_have_the_scores_of_the_stock_harness(name, make_model, tokenizer):
    stock = HFLM(make_model(name), tokenizer=tokenizer, batch_size=4, logits_cache=False)
    ours = SharedPrefixLM(make_model(name), tokenizer=tokenizer)
    assert ours.abilities == (True, True)

    @settings(max_examples=12, deadline=None, database=None)
    @given(any_requests(), st.integers(1, 5), st.sampled_from([1, 30, 10**9]), st.sampled_from([12, 512]))
    def check(requests, batch_size, least_saving, max_length):
        stock._max_length = ours._max_length = max_length
        ours.batch_size_per_gpu = batch_size
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(prefix_tree, "PASS", least_saving)
            found = ours._loglikelihood_tokens(requests)
        assert_same(found, stock._loglikelihood_tokens(requests, disable_tqdm=True))

    check()


@pytest.mark.parametrize("name", ["llama", "block size 2"])
def test_what_greedy_decoding_gives_is_greedy(name, make_model, scored):
    model = make_model(name)
    context = words(random.Random(0), 200)
    ids = model.generate(torch.tensor([context]), max_new_tokens=6, do_sample=False, eos_token_id=-1)
    greedy = ids[0, 200:].tolist()
    other = [*greedy[:4], 3 if greedy[4] != 3 else 4]
    found = scored(SharedPrefixLM, model, [(None, context, c) for c in (greedy, other, greedy[:1], other[4:])])
    assert [is_greedy for _, is_greedy in found] == [True, False, True, False]


def test_examples_are_computed_once_and_single_token_choices_in_one_pass(model, scored, tokenizer, calls):
    requests = questions(random.Random(0), examples=300, items=8, question=20, choice=1)
    lm = SharedPrefixLM(model, tokenizer=tokenizer, batch_size=4)
    assert lm.abilities.share_prefix
    shapes = calls(model)
    found = lm._loglikelihood_tokens(requests, disable_tqdm=True)
    assert shapes[0] == (1, 300)
    assert [rows for rows, _ in shapes[1:]] == [4, 4]
    assert all(20 <= length <= 24 for _, length in shapes[1:])
    shapes.clear()
    assert_same(found, scored(HFLM, model, requests))
    assert sum(rows * length for rows, length in shapes) > 8 * 300


def test_choices_of_several_tokens_share_their_question(model, scored, tokenizer, calls):
    requests = questions(random.Random(0), examples=0, items=4, question=60, choice=9)
    lm = SharedPrefixLM(model, tokenizer=tokenizer, batch_size=4)
    assert lm.abilities.share_prefix
    shapes = calls(model)
    found = lm._loglikelihood_tokens(requests, disable_tqdm=True)
    # The four questions without their last token, cut to the shortest; then the rest of each with its choices.
    assert shapes[0][0] == 4
    assert 59 <= shapes[0][1] < 64
    assert [rows for rows, _ in shapes[1:]] == [4] * 4
    assert all(length < 20 for _, length in shapes[1:])
    assert_same(found, scored(HFLM, model, requests))


def test_a_choice_that_another_begins_with_costs_nothing(model, tokenizer, calls):
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
    lm.batch_size_per_gpu = 2
    lm._loglikelihood_tokens([(None, words(random.Random(i), 50 + i), [3, 4, 5]) for i in range(2)])
    hook.remove()
    assert shapes == [(2, 3)]


def test_cut_at_the_maximum_length_prompts_have_the_scores_of_the_stock_harness(model, scored, caplog):
    requests = questions(random.Random(0), examples=60, items=4, question=10, choice=3)
    found = scored(SharedPrefixLM, model, requests, max_length=50)
    assert "16 of 16 requests lose their beginning: the model reads 50 tokens." in caplog.messages
    assert_same(found, scored(HFLM, model, requests, max_length=50))


def test_rotary_embeddings_that_depend_on_the_length_are_not_shared_across_it(scored):
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "long_factor": [4.0] * 4, "short_factor": [1.0] * 4}
    rope |= {"original_max_position_embeddings": 64}
    torch.manual_seed(0)
    config = AutoConfig.for_model("phi3", **SMALL, rope_parameters=rope, original_max_position_embeddings=64)
    model = AutoModelForCausalLM.from_config(config).eval()
    requests = questions(random.Random(0), examples=55, items=8, question=3, choice=6)  # some go beyond 64 tokens
    assert_same(scored(SharedPrefixLM, model, requests), scored(HFLM, model, requests, batch_size=1))


@pytest.mark.parametrize(
    "name, overrides",
    [
        # Its Mamba layers compute several tokens at once as if nothing came before them.
        ("jamba", {"mamba_d_state": 8, "num_experts": 2, "attn_layer_period": 2, "attn_layer_offset": 1}),
        ("rwkv", {"attention_hidden_size": 32}),  # has no cache of `transformers`
    ],
)
def test_a_model_that_cannot_go_on_from_its_cache_is_computed_whole(name, overrides, scored, caplog):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(name, **SMALL | overrides)).eval()
    requests = questions(random.Random(0), examples=150, items=3, question=9, choice=3)
    found = scored(SharedPrefixLM, model, requests)
    assert sum("cannot go on from a copy of its cache: prefixes are not shared." in m for m in caplog.messages) == 1
    assert_same(found, scored(HFLM, model, requests))


def test_a_model_that_fails_with_a_cache_is_computed_without_one(tiny_config, scored):
    """Kimi Linear of KDA layers alone does: no layer of its cache knows how many tokens there are."""
    fields = tiny_config().to_dict() | {"model_type": "kimi_linear", "layer_types": ["linear_attention"] * 4}
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(KimiLinearConfig(**fields)).eval()
    requests = questions(random.Random(0), examples=150, items=2, question=9, choice=3)
    with pytest.raises(ValueError, match="only contain LinearAttention layers"):
        scored(HFLM, model, requests)
    found = scored(SharedPrefixLM, model, requests)
    model.config.use_cache = False
    assert_same(found, scored(HFLM, model, requests))


def test_in_bfloat16_the_choices_are_those_of_the_stock_harness(make_model, scored):
    model = AutoModelForCausalLM.from_config(make_model("llama").config).eval().bfloat16()
    requests = questions(random.Random(0), examples=100, items=12, question=9, choice=2)
    found, expected = (scored(lm, model, requests, softmax_dtype="float32") for lm in (SharedPrefixLM, HFLM))
    noise = max(abs(a - b) for (a, _), (b, _) in zip(found, expected))
    assert noise < 0.1
    for i in range(0, len(requests), 4):
        values = [value for value, _ in expected[i : i + 4]]
        best = max(range(4), key=lambda c: found[i + c][0])
        assert values[best] >= max(values) - 2 * noise


def test_the_cache_of_requests_gets_every_answer(model, tokenizer):
    stored = {}
    lm = SharedPrefixLM(model, tokenizer=tokenizer, batch_size=2)
    lm.cache_hook.add_partial = lambda kind, texts, answer: stored.update({(kind, texts): answer})
    pairs = [(f"w5 w{i}", f" w{j} w9") for i in range(3, 6) for j in range(3, 7)]
    answers = lm.loglikelihood([Instance("loglikelihood", {}, pair, i) for i, pair in enumerate(pairs)])
    assert stored == {("loglikelihood", pair): answer for pair, answer in zip(pairs, answers)}


def generation(contexts: list[str], **arguments) -> list[Instance]:
    arguments = {"until": ["w7"], "max_gen_toks": 6, "do_sample": False} | arguments
    return [Instance("generate_until", {}, (context, arguments), i) for i, context in enumerate(contexts)]


def texts(rng: random.Random, *lengths: int) -> list[str]:
    return [" ".join(f"w{token}" for token in words(rng, length)) for length in lengths]


@pytest.mark.parametrize("name", ["llama", "block size 2"])
def test_generation_in_batches_is_that_of_each_prompt_alone(name, make_model, tokenizer):
    requests = generation(texts(random.Random(1), 1, 2, 30, 9, 70, 4, 5))
    stock = HFLM(make_model(name), tokenizer=tokenizer, batch_size=1)
    expected = stock.generate_until(requests, disable_tqdm=True)
    assert len(set(expected)) > 3
    for batch_size in (1, 3, 7):
        lm = SharedPrefixLM(make_model(name), tokenizer=tokenizer, batch_size=batch_size)
        assert lm.generate_until(requests, disable_tqdm=True) == expected


def test_each_prompt_is_generated_with_its_own_arguments_beside_prompts_of_its_length(model, tokenizer, calls):
    requests = generation(texts(random.Random(1), 3, 40, 4, 41), max_gen_toks=2, until=[])
    requests += generation(texts(random.Random(2), 5, 6), max_gen_toks=5, until=[])
    lm = SharedPrefixLM(model, tokenizer=tokenizer, batch_size=2)
    shapes = calls(model)
    generated = lm.generate_until(requests[::2] + requests[1::2], disable_tqdm=True)
    assert [len(text.split()) for text in generated] == [2, 2, 5, 2, 2, 5]
    assert [shape for shape in shapes if shape[1] > 1] == [(2, 41), (2, 4), (2, 6)]


@pytest.mark.parametrize("error", [None, "MPS backend out of memory (MPS allocated: 1 GB)."])
def test_out_of_memory_halves_the_batch_and_repeats_only_what_failed(error, model, tokenizer, scored, calls, caplog):
    requests = [(None, words(random.Random(i), 40), [3, 4]) for i in range(16)]
    expected = scored(HFLM, model, requests)
    done = []
    lm = SharedPrefixLM(model, tokenizer=tokenizer, batch_size=8, progress=done.append)
    assert lm.abilities
    caplog.clear()
    shapes = calls(model, most=4, error=error)
    assert_same(lm._loglikelihood_tokens(requests), expected)
    assert [rows for rows, _ in shapes] == [8, 4, 4, 4, 4]
    assert caplog.messages == ["Out of memory at batch size 8: going on with 4."]
    assert done == [4, 8, 12, 16]
    assert lm.batch_size == 4


def test_out_of_memory_below_shared_prefixes_changes_no_score(model, tokenizer, scored, calls, caplog):
    requests = questions(random.Random(0), examples=150, items=6, question=40, choice=6)
    expected = scored(HFLM, model, requests)
    lm = SharedPrefixLM(model, tokenizer=tokenizer, batch_size=16)
    assert lm.abilities.share_prefix
    shapes = calls(model, most=3)
    assert_same(lm._loglikelihood_tokens(requests), expected)
    # The examples; the beginnings of six questions, then of three; their choices, three at a time.
    assert shapes[0] == (1, 150)
    assert [rows for rows, _ in shapes[1:]] == [6, *([3] * 5) * 2]
    assert caplog.messages[-1] == "Out of memory at batch size 6: going on with 3."


def test_out_of_memory_halves_the_batch_of_generation(model, tokenizer, calls, caplog):
    requests = generation(texts(random.Random(1), *range(3, 13)))
    expected = SharedPrefixLM(model, tokenizer=tokenizer, batch_size=1).generate_until(requests, disable_tqdm=True)
    done = []
    lm = SharedPrefixLM(model, tokenizer=tokenizer, batch_size=8, progress=done.append)
    caplog.clear()
    calls(model, most=2)
    assert lm.generate_until(requests) == expected
    halved = [message for message in caplog.messages if "memory" in message]
    assert halved == [f"Out of memory at batch size {n}: going on with {n // 2}." for n in (8, 4)]
    assert done == [2, 4, 6, 8, 10]


def test_before_a_batch_is_repeated_what_it_held_is_freed(model, tokenizer, monkeypatch):
    lm = SharedPrefixLM(model, tokenizer=tokenizer, batch_size=4)
    assert lm.abilities
    held, freed, forward = [], [], model.forward

    @functools.wraps(forward)
    def failing_at_first(input_ids=None, **kwargs):
        if not held:
            activations = input_ids.float()
            held.append(weakref.ref(activations))
            raise torch.OutOfMemoryError("CUDA out of memory.")
        freed.append(held[0]() is None)
        return forward(input_ids, **kwargs)

    monkeypatch.setattr(model, "forward", failing_at_first)
    lm._loglikelihood_tokens([(None, words(random.Random(i), 9), [3]) for i in range(4)])
    assert freed == [True, True]


@pytest.mark.parametrize("kind", ["likelihood", "generation"])
def test_one_sequence_too_long_for_the_memory_is_a_line_that_says_so(kind, model, tokenizer, calls):
    lm = SharedPrefixLM(model, tokenizer=tokenizer, batch_size=2)
    assert lm.abilities
    calls(model, most=0)
    with pytest.raises(
        RuntimeError, match=r"^Out of memory at batch size 1; the longest sequence has 40 tokens"
    ) as error:
        if kind == "likelihood":
            lm._loglikelihood_tokens([(None, words(random.Random(i), 39), [3, 4]) for i in range(3)])
        else:
            lm.generate_until(generation(texts(random.Random(0), 40, 5)))
    assert "\n" not in str(error.value)


def test_other_errors_are_not_taken_for_a_lack_of_memory(model, tokenizer, calls):
    lm = SharedPrefixLM(model, tokenizer=tokenizer, batch_size=2)
    assert lm.abilities
    shapes = calls(model, most=0, error="mat1 and mat2 shapes cannot be multiplied")
    with pytest.raises(RuntimeError, match=r"^mat1 and mat2 shapes cannot be multiplied$"):
        lm._loglikelihood_tokens([(None, [3, 4], [5]), (None, [3, 5], [5])])
    assert len(shapes) == 1


def test_progress_takes_the_place_of_bars(model, tokenizer, capfd):
    done = []
    lm = SharedPrefixLM(model, tokenizer=tokenizer, batch_size=2, progress=done.append)
    pairs = [(context, f" w{j} w9") for context in texts(random.Random(0), 4, 9, 200) for j in range(3, 7)]
    capfd.readouterr()
    lm.loglikelihood([Instance("loglikelihood", {}, pair, i) for i, pair in enumerate(pairs)])
    assert done == sorted(set(done))
    assert done[-1] == 12
    done.clear()
    lm.generate_until(generation(texts(random.Random(0), 5, 9, 12)))
    assert done == [2, 3]
    assert "it/s" not in capfd.readouterr().err


def test_without_progress_there_is_a_bar_as_in_the_stock_harness(model, tokenizer, capfd):
    SharedPrefixLM(model, tokenizer=tokenizer)._loglikelihood_tokens([(None, [3, 4], [5]), (None, [3, 5], [5])])
    assert "Running loglikelihood requests: 100%" in capfd.readouterr().err


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


def test_without_the_logits_cache_requests_are_computed_by_the_stock_harness(model, tokenizer, scored, calls):
    requests = questions(random.Random(0), examples=150, items=2, question=9, choice=1)
    shapes = calls(model)
    assert_same(scored(SharedPrefixLM, model, requests, logits_cache=False), scored(HFLM, model, requests))
    assert [rows for rows, _ in shapes[:2]] == [4, 4]


def test_an_encoder_decoder_is_computed_by_the_stock_harness(scored):
    fields = {
        "d_model": 32,
        "d_kv": 8,
        "d_ff": 64,
        "num_layers": 2,
        "num_heads": 4,
        "vocab_size": 99,
        "n_positions": 64,
    }
    torch.manual_seed(0)
    config = AutoConfig.for_model("t5", **fields, pad_token_id=0, eos_token_id=2, decoder_start_token_id=0)
    model = AutoModelForSeq2SeqLM.from_config(config).eval()
    requests = questions(random.Random(0), examples=20, items=3, question=9, choice=3)
    assert_same(scored(SharedPrefixLM, model, requests), scored(HFLM, model, requests))


def test_an_automatic_batch_size_starts_at_the_maximum(model, tokenizer):
    lm = SharedPrefixLM(model, tokenizer=tokenizer, batch_size="auto", max_batch_size=6)
    assert lm.batch_size == 6


def test_the_harness_knows_the_model_by_name():
    assert get_model("attnres") is SharedPrefixLM


@pytest.fixture(scope="module")
def source(assets) -> Path:
    return assets / "checkpoints" / "stories260K-hf"


def evaluate(lm: HFLM, name: str, data: Path, limit: int) -> dict:
    return lm_eval.evaluate(lm, load(benchmarks()[name], data), limit=limit, bootstrap_iters=0)["results"]


@pytest.mark.parametrize("name", ["hellaswag", "arc_challenge"])
def test_real_questions_have_the_results_of_the_stock_harness(name, source, assets):
    """Prompts of ARC are longer than the model reads: their beginning is cut off."""
    tokenizer = AutoTokenizer.from_pretrained(source)
    model = AutoModelForCausalLM.from_pretrained(source).eval()
    results = [
        evaluate(lm(made, tokenizer=tokenizer, batch_size=8), name, assets / "hub", limit=10)
        for lm, made in ((HFLM, model), (SharedPrefixLM, model), (SharedPrefixLM, retrofit(model, block_size=2)))
    ]
    assert results[0] == results[1] == results[2]


@pytest.mark.slow
def test_several_processes_share_the_questions(source, assets, tmp_path):
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command = [*launch, HERE / "shared_prefix_session.py", source, assets / "hub", tmp_path / "results.json"]
    environment = os.environ | {"ACCELERATE_USE_CPU": "true"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads((tmp_path / "results.json").read_text())
    assert found["processes"] == 2
    assert found["requests"] == 16  # four of the seven questions
    expected = evaluate(HFLM(str(source), device="cpu", batch_size=4), "hellaswag", assets / "hub", limit=7)
    assert found["results"] == expected
