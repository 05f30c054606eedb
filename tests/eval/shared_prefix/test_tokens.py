"""A model receives one BOS token, no EOS token at the end of a prompt, and no empty continuation."""

import random
from collections.abc import Callable

import pytest
import torch
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM
from tokenizers import AddedToken, Tokenizer
from tokenizers.models import BPE, WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from attnres.eval.shared_prefix import SharedPrefixLM

from .prompts import generation, texts


@pytest.fixture(scope="module")
def adding() -> Callable[..., PreTrainedTokenizerFast]:
    """Return `adding(template, eos, bos)`: the tokenizer of the other tests, which adds tokens to a text."""

    def make(template: str = "<s> $A", eos: str = "</s>", bos: str | None = "<s>") -> PreTrainedTokenizerFast:
        words = Tokenizer(WordLevel({"<pad>": 0, "<s>": 1, "</s>": 2} | {f"w{i}": i for i in range(3, 99)}, "<pad>"))
        words.pre_tokenizer = WhitespaceSplit()
        words.add_special_tokens([AddedToken(token, special=True) for token in ("<s>", "</s>", "<pad>")])
        words.post_processor = TemplateProcessing(single=template, special_tokens=[("<s>", 1), ("</s>", 2)])
        return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", bos_token=bos, eos_token=eos)

    return make


@pytest.fixture
def read(monkeypatch) -> list[tuple[list[int], list[int]]]:
    """Return the list to which the context and the continuation of every computed request are added."""
    pairs = []
    compute = SharedPrefixLM._loglikelihood_tokens

    def record(lm, requests, **arguments):
        pairs.extend((context, continuation) for _, context, continuation in requests)
        return compute(lm, requests, **arguments)

    monkeypatch.setattr(SharedPrefixLM, "_loglikelihood_tokens", record)
    return pairs


def rolling(*documents: str) -> list[Instance]:
    return [Instance("loglikelihood_rolling", {}, (text,), i) for i, text in enumerate(documents)]


def pairs_of(*pairs: tuple[str, str]) -> list[Instance]:
    return [Instance("loglikelihood", {}, pair, i) for i, pair in enumerate(pairs)]


TEMPLATES = ["$A", "<s> $A", "<s> $A </s>"]


@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize("written", ["", "<s> "])
def test_a_long_text_is_scored_after_one_bos_token(template, written, model, tokenizer, adding, read):
    """Whatever the tokenizer adds, the sum equals that of the stock harness with a tokenizer that adds nothing."""
    documents = texts(random.Random(0), 70, 9, 19, 20, 21)
    stock = HFLM(model, tokenizer=tokenizer, batch_size=2, max_length=20)
    ours = SharedPrefixLM(model, tokenizer=adding(template), batch_size=2, max_length=20)
    actual = ours.loglikelihood_rolling(rolling(*(written + text for text in documents)), disable_tqdm=True)
    assert actual == pytest.approx(stock.loglikelihood_rolling(rolling(*documents), disable_tqdm=True), abs=1e-4)
    assert sum(len(continuation) for _, continuation in read) == sum(len(text.split()) for text in documents)
    assert not any(token in (1, 2) for _, continuation in read for token in continuation)


def test_the_stock_harness_scores_a_second_bos_token(model, tokenizer, adding):
    """If this fails, `loglikelihood_rolling` of the stock harness may be right by now, and the guide outdated."""
    requests = rolling(*texts(random.Random(0), 9))
    lms = [HFLM(model, tokenizer=used, batch_size=1) for used in (tokenizer, adding())]
    right, stock = (lm.loglikelihood_rolling(requests, disable_tqdm=True)[0] for lm in lms)
    assert abs(right - stock) > 0.5


@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize(
    ("context", "expected"), [("w5 w6", [1, 5, 6]), ("<s> w5 w6", [1, 5, 6]), ("", [1]), ("  ", [1]), ("<s>", [1])]
)
def test_a_context_has_one_bos_token_and_no_eos_token(template, context, expected, model, adding, read):
    lm = SharedPrefixLM(model, tokenizer=adding(template), batch_size=2)
    lm.loglikelihood(pairs_of((context, " w7 w8")), disable_tqdm=True)
    adds_bos = template != "$A" or not context.startswith("w")
    assert read == [(expected if adds_bos else expected[1:], [7, 8])]


@pytest.mark.parametrize("written", ["", "<s> "])
def test_a_prompt_for_generation_does_not_end_in_an_eos_token(written, model, tokenizer, adding):
    documents = texts(random.Random(1), 30, 9, 70, 4)
    expected = HFLM(model, tokenizer=tokenizer, batch_size=1)
    expected = expected.generate_until(generation([f"<s> {text}" for text in documents]), disable_tqdm=True)
    for max_length in (None, 90):
        lm = SharedPrefixLM(model, tokenizer=adding("<s> $A </s>"), batch_size=3, max_length=max_length)
        actual = lm.generate_until(generation([written + text for text in documents]), disable_tqdm=True)
        assert actual == expected


@pytest.mark.parametrize("logits_cache", [True, False])
def test_a_context_that_is_cut_keeps_its_bos_token(logits_cache, model, tokenizer, adding):
    """The model reads 20 tokens: BOS, the end of the context, and the continuation without its last token."""
    words = texts(random.Random(0), 40)[0].split()
    ours = SharedPrefixLM(model, tokenizer=adding(), batch_size=2, max_length=20, logits_cache=logits_cache)
    actual = ours.loglikelihood(pairs_of((" ".join(words), " w7 w8"), (" ".join(words), " w9")), disable_tqdm=True)
    stock = HFLM(model, tokenizer=tokenizer, batch_size=1)
    fitting = [f"<s> {' '.join(words[-kept:])}" for kept in (18, 19)]
    expected = stock.loglikelihood(pairs_of((fitting[0], " w7 w8"), (fitting[1], " w9")), disable_tqdm=True)
    assert [value for value, _ in actual] == pytest.approx([value for value, _ in expected], abs=1e-4)
    assert ours.cut_requests == 2


@pytest.mark.parametrize("template", TEMPLATES)
def test_a_prompt_for_generation_that_is_cut_keeps_its_bos_token(template, model, tokenizer, adding):
    documents = texts(random.Random(1), 30, 13, 12, 4)  # with BOS, the second just fits into the 14 tokens of a prompt
    stock = HFLM(model, tokenizer=tokenizer, batch_size=1)
    begins = "" if template == "$A" else "<s> "
    kept = 14 if template == "$A" else 13
    fitting = [begins + " ".join(text.split()[-kept:]) for text in documents]
    expected = stock.generate_until(generation(fitting, until=[]), disable_tqdm=True)
    lm = SharedPrefixLM(model, tokenizer=adding(template), batch_size=4, max_length=20)
    assert lm.generate_until(generation(documents, until=[]), disable_tqdm=True) == expected
    assert lm.cut_requests == 1


def test_no_token_of_a_text_is_dropped_where_the_tokenizer_adds_none(model, adding):
    lm = SharedPrefixLM(model, tokenizer=adding("<s> $A </s>"), add_bos_token=False)
    assert lm.tok_encode("w5 w6") == [5, 6]
    # Without BOS, a text that begins with EOS has its first token already.
    lm = SharedPrefixLM(model, tokenizer=adding("$A </s>", bos=None))
    assert lm.tok_encode("</s> w5 w6") == [2, 5, 6]


@pytest.mark.slow
def test_an_answer_ends_at_the_tokenizers_eos_token_whatever_else_is_in_its_batch(model, tokenizer, adding):
    """The model's configuration has another EOS. The stock harness then reads on after the tokenizer's, in a batch."""
    requests = generation(texts(random.Random(1), 30, 9, 70, 4, 5, 12), max_gen_toks=12, until=[])
    stock = HFLM(model, tokenizer=tokenizer, batch_size=1)
    words = [text.split() for text in stock.generate_until(requests, disable_tqdm=True)]
    end = next(word for text in words for word in text[2:6] if any(word not in other for other in words))
    expected = [" ".join(text[: text.index(end)] if end in text else text) for text in words]
    assert any(text for text in expected) and any(len(text.split()) == 12 for text in expected)
    for batch_size in (1, 6):
        lm = SharedPrefixLM(model, tokenizer=adding("$A", eos=end), batch_size=batch_size)
        assert lm.generate_until(requests, disable_tqdm=True) == expected


def test_a_continuation_that_is_joined_with_its_context_is_scored_alone(model, read):
    """`w` and `5` are one token together, so cutting after the context's tokens leaves nothing."""
    vocabulary = {"<s>": 0, "w": 3, "5": 4, "w5": 5, "x": 6}
    joined = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(BPE(vocabulary, [("w", "5")])), pad_token="<s>", bos_token="<s>", eos_token="<s>"
    )
    lm = SharedPrefixLM(model, tokenizer=joined, batch_size=2)
    both = lm.loglikelihood(pairs_of(("xw", "5"), ("xw", "x")), disable_tqdm=True)
    assert read == [([6, 3], [4]), ([6, 3], [6])]
    assert all(value < -0.1 for value, _ in both)


@pytest.mark.parametrize(
    ("pair", "length"),
    [(("w5", ""), "one has 0: ''"), (("w5", " w6" * 30), "one has 30: ' w6 w6")],
    ids=["empty", "long"],
)
def test_an_empty_or_too_long_continuation_raises_an_error_of_one_line(pair, length, model, adding):
    lm = SharedPrefixLM(model, tokenizer=adding(), batch_size=2, max_length=20)
    with pytest.raises(RuntimeError, match=f"must have 1 to 20 tokens, after a context .* but {length}") as error:
        lm.loglikelihood(pairs_of(("w5", " w6"), pair), disable_tqdm=True)
    assert "\n" not in str(error.value)


def test_logits_that_are_nan_raise_an_error(make_model, tokenizer):
    """The harness would take the first of NaN values as the largest: a broken model would always answer A.

    It would take a text generated from them as a wrong answer.
    """
    model = make_model("llama")
    weight = model.lm_head.weight
    before = weight.detach().clone()
    try:
        with torch.no_grad():
            weight[7] = float("nan")
        for logits_cache in (True, False):
            lm = SharedPrefixLM(model, tokenizer=tokenizer, batch_size=2, logits_cache=logits_cache)
            with pytest.raises(RuntimeError, match="NaN: its weights are damaged"):
                lm.loglikelihood(pairs_of(("w5", " w6"), ("w5", " w8")), disable_tqdm=True)
            with pytest.raises(RuntimeError, match="NaN or infinite: its weights are damaged"):
                lm.generate_until(generation(["w5 w6"]), disable_tqdm=True)
    finally:
        with torch.no_grad():
            weight.copy_(before)
