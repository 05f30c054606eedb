"""Generation: the continuation does not depend on how tokens and caches reach the model."""

import copy
from collections.abc import Callable

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from torch.utils._pytree import tree_leaves
from transformers import ContinuousBatchingConfig, GenerationConfig, PreTrainedTokenizerFast, StaticCache, pipeline

from attnres import AttnResForCausalLM

from ..caches import CACHE

PAD = 0


@pytest.fixture
def model(vivid_model) -> AttnResForCausalLM:
    return vivid_model(attn_res_block_size=3, attn_res_scale="sum")


@pytest.fixture
def generate(model) -> Callable[..., torch.Tensor]:
    """Return `generate(token_ids, **options)`: prompt and 6 greedy tokens, without a stop at the end of sequence."""

    def run(token_ids: torch.Tensor | None = None, **options) -> torch.Tensor:
        options = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None, "pad_token_id": PAD, **options}
        return model.generate(token_ids, **options)

    return run


def assert_same_logits(actual: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-4)


@torch.no_grad()
def greedy_without_generate(model, token_ids: torch.Tensor, count: int) -> torch.Tensor:
    for _ in range(count):
        next_id = model(token_ids, use_cache=False).logits[:, -1].argmax(-1, keepdim=True)
        token_ids = torch.cat([token_ids, next_id], dim=1)
    return token_ids


@pytest.mark.parametrize("use_cache", [True, False])
def test_greedy_search_takes_the_likeliest_token(model, generate, token_ids, use_cache):
    generated = generate(token_ids, use_cache=use_cache)
    assert torch.equal(generated, greedy_without_generate(model, token_ids, 6))
    assert len(set(generated[:, token_ids.shape[1] :].flatten().tolist())) > 3


def test_sampling_depends_on_the_seed_and_not_on_the_cache(generate, token_ids):
    def sample(seed: int, use_cache: bool) -> torch.Tensor:
        torch.manual_seed(seed)
        return generate(token_ids, do_sample=True, top_k=20, top_p=0.9, temperature=1.5, use_cache=use_cache)

    assert torch.equal(sample(0, True), sample(0, False))
    assert not torch.equal(sample(0, True), sample(1, True))


def test_beam_search_finds_the_same_beams_with_and_without_cache(model, generate, token_ids):
    beams = {
        use_cache: generate(
            token_ids,
            num_beams=4,
            num_return_sequences=4,
            use_cache=use_cache,
            output_scores=True,
            return_dict_in_generate=True,
        )
        for use_cache in (True, False)
    }
    assert torch.equal(beams[True].sequences, beams[False].sequences)
    assert_same_logits(beams[True].sequences_scores, beams[False].sequences_scores)
    # The score of a beam is the mean log-probability of its new tokens, so each beam used the right cache.
    sequences, start = beams[True].sequences, token_ids.shape[1]
    with torch.no_grad():
        log_probabilities = model(sequences).logits.log_softmax(-1)[:, start - 1 : -1]
    score = log_probabilities.gather(2, sequences[:, start:, None]).mean((1, 2))
    assert_same_logits(beams[True].sequences_scores, score)


def test_a_prompt_cache_serves_several_continuations(model, generate, token_ids):
    with torch.no_grad():
        prompt_cache = model(token_ids[:, :5], use_cache=True)[CACHE]
    for continuation in (token_ids[:, 5:], token_ids[:, 5:].flip(1)):
        whole = torch.cat([token_ids[:, :5], continuation], dim=1)
        assert torch.equal(generate(whole, **{CACHE: copy.deepcopy(prompt_cache)}), generate(whole))


def test_generation_continues_from_the_cache_of_an_earlier_turn(generate, token_ids):
    first = generate(token_ids, return_dict_in_generate=True)
    prompt = torch.cat([first.sequences, token_ids.flip(1)], dim=1)
    mask = torch.ones_like(prompt)  # without it, a generated padding token would be hidden
    expected = generate(prompt, attention_mask=mask)
    assert torch.equal(generate(prompt, attention_mask=mask, **{CACHE: first[CACHE]}), expected)


@torch.no_grad()
@pytest.mark.parametrize("pieces", [[11], [1] * 11, [5, 6], [3, 1, 4, 1, 2], [1, 10], [10, 1]], ids=str)
def test_logits_do_not_depend_on_how_tokens_are_split_between_cached_calls(model, token_ids, pieces):
    expected = model(token_ids, use_cache=False).logits
    cache, logits = None, []
    for piece in token_ids.split(pieces, dim=1):
        outputs = model(piece, **{CACHE: cache}, use_cache=True)
        cache = outputs[CACHE]
        logits.append(outputs.logits)
    assert_same_logits(torch.cat(logits, dim=1), expected)
    assert cache.get_seq_length() == token_ids.shape[1]


@torch.no_grad()
def test_attention_residuals_add_nothing_to_the_cache(vivid_model, token_ids):
    def shapes_in_cache(**fields) -> list[torch.Size]:
        cache = vivid_model(**fields)(token_ids, use_cache=True)[CACHE]
        leaves = tree_leaves([vars(layer) for layer in cache.layers])
        return [leaf.shape for leaf in leaves if isinstance(leaf, torch.Tensor)]

    expected = shapes_in_cache(residual_connection="standard")
    assert len(expected) == 8  # keys and values, or convolution and recurrent state, of 4 layers
    assert shapes_in_cache(attn_res_block_size=1) == shapes_in_cache(attn_res_block_size=3) == expected


def left_padded(token_ids: torch.Tensor, lengths: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the last `lengths[i]` tokens of each row after padding, and the attention mask."""
    mask = torch.stack([torch.arange(token_ids.shape[1]) >= token_ids.shape[1] - length for length in lengths])
    return token_ids.masked_fill(~mask, PAD), mask.long()


@torch.no_grad()
def test_left_padding_does_not_change_logits(model, token_ids):
    padded, mask = left_padded(token_ids, [4, 9])
    together = model(padded, attention_mask=mask, use_cache=False).logits
    # The prompt comes in two pieces; the first row of the first piece is all padding.
    first = model(padded[:, :7], attention_mask=mask[:, :7], use_cache=True)
    last = model(padded[:, 7:], attention_mask=mask, **{CACHE: first[CACHE]})
    for row, length in enumerate([4, 9]):
        alone = model(token_ids[row : row + 1, -length:], use_cache=False).logits[0]
        assert_same_logits(together[row, -length:], alone)
        assert_same_logits(last.logits[row], alone[-4:])


@pytest.mark.parametrize("options", [{}, {"num_beams": 3}, {"use_cache": False}], ids=str)
def test_left_padding_does_not_change_generation(generate, token_ids, options):
    padded, mask = left_padded(token_ids, [4, 9])
    together = generate(padded, attention_mask=mask, **options)
    for row, length in enumerate([4, 9]):
        alone = generate(token_ids[row : row + 1, -length:], **options)
        assert torch.equal(together[row, -length - 6 :], alone[0])


def test_embeddings_may_take_the_place_of_tokens(model, generate, token_ids):
    embeddings = model.get_input_embeddings()(token_ids)
    with torch.no_grad():
        assert torch.equal(model(inputs_embeds=embeddings).logits, model(token_ids).logits)
    new_tokens = generate(token_ids)[:, token_ids.shape[1] :]
    assert torch.equal(generate(inputs_embeds=embeddings), new_tokens)
    padded, mask = left_padded(token_ids, [4, 9])
    from_embeddings = generate(inputs_embeds=model.get_input_embeddings()(padded), attention_mask=mask)
    assert torch.equal(from_embeddings, generate(padded, attention_mask=mask)[:, token_ids.shape[1] :])


@pytest.mark.parametrize("given", [(), ("input_ids", "inputs_embeds")], ids=["neither", "both"])
def test_exactly_one_of_tokens_and_embeddings_is_required(model, token_ids, given):
    arguments = {"input_ids": token_ids, "inputs_embeds": torch.ones(2, 11, 32)}
    with pytest.raises(ValueError, match="exactly one of input_ids or inputs_embeds"):
        model(**{name: arguments[name] for name in given})


@torch.no_grad()
def test_logits_to_keep_selects_positions(model, token_ids):
    logits = model(token_ids).logits
    assert logits.shape == (2, 11, 99)
    positions = torch.tensor([0, 7, 10])
    torch.testing.assert_close(model(token_ids, logits_to_keep=1).logits, logits[:, -1:])
    torch.testing.assert_close(model(token_ids, logits_to_keep=4).logits, logits[:, -4:])
    torch.testing.assert_close(model(token_ids, logits_to_keep=positions).logits, logits[:, positions])


def test_a_static_cache_changes_nothing(model, generate, token_ids):
    padded, mask = left_padded(token_ids, [4, 9])
    static = generate(padded, attention_mask=mask, cache_implementation="static", return_dict_in_generate=True)
    assert isinstance(static[CACHE], StaticCache)
    assert torch.equal(static.sequences, generate(padded, attention_mask=mask))


@pytest.mark.slow
def test_compiled_decoding_is_one_graph_and_changes_nothing(generate, token_ids, counted_compilation):
    options, graphs = counted_compilation
    compiled = generate(token_ids, cache_implementation="static", compile_config=options, max_new_tokens=9)
    assert len(graphs) == 1
    assert torch.equal(compiled, generate(token_ids, max_new_tokens=9))


def test_generation_stops_at_the_end_of_sequence_token(generate, token_ids):
    free = generate(token_ids[:1])[0, token_ids.shape[1] :].tolist()
    stopped = generate(token_ids[:1], eos_token_id=free[2])[0, token_ids.shape[1] :].tolist()
    assert stopped == free[: free.index(free[2]) + 1]


@pytest.fixture
def tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer of whole words: `w3` is token 3."""
    words = {"<pad>": 0, "<bos>": 1, "<eos>": 2} | {f"w{i}": i for i in range(3, 99)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<eos>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>", padding_side="left"
    )


def test_text_generation_pipeline_continues_a_batch_of_texts(model, generate, tokenizer, token_ids):
    texts = [" ".join(f"w{token}" for token in row) for row in (token_ids[0, -4:].tolist(), token_ids[1].tolist())]
    generator = pipeline("text-generation", model=model, tokenizer=tokenizer, device="cpu")
    options = {"max_new_tokens": 6, "do_sample": False, "return_full_text": False}
    continuations = generator(texts, batch_size=2, eos_token_id=None, pad_token_id=PAD, **options)
    for row, length, [continuation] in zip(token_ids, (4, 11), continuations, strict=True):
        expected = generate(row[None, -length:])[0, length:]
        assert continuation["generated_text"].split() == tokenizer.decode(expected, skip_special_tokens=True).split()


def test_continuous_batching_is_refused_where_a_layer_keeps_a_state(tiny_model):
    with pytest.raises(ValueError, match="linear attention keeps a state: call `generate`"):
        tiny_model().generate_batch([[3, 4, 5]], GenerationConfig(max_new_tokens=2))


def test_a_cache_of_keys_and_values_alone_is_refused_where_a_layer_keeps_a_state(tiny_model):
    """PEFT's prefix tuning makes such a cache."""
    peft = pytest.importorskip("peft")
    adapted = peft.get_peft_model(tiny_model(), peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2))
    with pytest.raises(ValueError, match=r"keys and values for layer 0, .*PEFT's prefix tuning makes such a cache"):
        adapted(torch.tensor([[3, 4, 5]]))


@pytest.mark.parametrize("case", ["llama", "gemma3_text"])
def test_continuous_batching_generates_what_each_prompt_alone_does(backbones, case):
    """Its passes hold tokens of several requests in one row, beside a paged cache."""
    model, generator = backbones.build_member(case), torch.Generator().manual_seed(2)
    prompts = [torch.randint(3, 90, (length,), generator=generator).tolist() for length in (3, 9, 1, 17)]
    options = GenerationConfig(max_new_tokens=6, do_sample=False, eos_token_id=98, pad_token_id=0)
    # By default the paged cache takes most of the free memory.
    small = ContinuousBatchingConfig(num_blocks=16, max_batch_tokens=64)
    found = model.generate_batch(prompts, generation_config=options, continuous_batching_config=small)
    expected = [model.generate(torch.tensor([prompt]), options)[0, len(prompt) :].tolist() for prompt in prompts]
    assert [
        found[name].generated_tokens for name in sorted(found, key=lambda name: int(name.rpartition("_")[2]))
    ] == expected
