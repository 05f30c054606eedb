"""With tokenizers of several kinds, `SharedPrefixLM` gives the numbers and texts of the harness's own model class."""

import random
from collections.abc import Callable

import pytest
import torch
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from tokenizers.processors import TemplateProcessing
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerFast

from attnres.eval.shared_prefix import SharedPrefixLM

from .models import small


@pytest.fixture(scope="module")
def text(assets) -> str:
    with (assets / "corpora" / "tinystories" / "valid.txt").open() as file:
        return file.read(100_000)


def byte_level(text: str) -> PreTrainedTokenizerFast:
    """Return a tokenizer like that of GPT-2, which adds no tokens and has no BOS."""
    words = Tokenizer(models.BPE())
    words.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    words.decoder = decoders.ByteLevel()
    special = ["<|endoftext|>", "<pad>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=special, initial_alphabet=alphabet)
    words.train_from_iterator([text], trainer)
    return PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<|endoftext|>", pad_token="<pad>")


def unigram(text: str) -> PreTrainedTokenizerFast:
    """Return a tokenizer like that of Gemma, which begins a text with BOS, and has no padding token."""
    words = Tokenizer(models.Unigram())
    words.pre_tokenizer, words.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    trainer = trainers.UnigramTrainer(vocab_size=400, special_tokens=["<unk>", "<s>", "</s>"], unk_token="<unk>")
    words.train_from_iterator([text], trainer)
    words.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return PreTrainedTokenizerFast(tokenizer_object=words, unk_token="<unk>", bos_token="<s>", eos_token="</s>")


@pytest.fixture
def make_pair(assets, text) -> Callable[[str], tuple[PreTrainedModel, PreTrainedTokenizerFast]]:
    """Return `make_pair(name)`: a model and its tokenizer."""

    def make(name: str) -> tuple[PreTrainedModel, PreTrainedTokenizerFast]:
        if name == "sentencepiece":
            folder = assets / "checkpoints" / "stories260K-hf"
            model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
            return model, AutoTokenizer.from_pretrained(folder)
        tokenizer = {"byte level": byte_level, "unigram": unigram}[name](text)
        # If the model's EOS were another one, the stock harness would read on after the tokenizer's.
        return small("llama", vocab_size=400, eos_token_id=tokenizer.eos_token_id), tokenizer

    return make


@pytest.mark.slow
@pytest.mark.parametrize("name", ["sentencepiece", "byte level", "unigram"])
def test_words_have_the_numbers_and_answers_of_the_stock_harness(name, make_pair, text):
    model, tokenizer = make_pair(name)
    rng = random.Random(0)
    lines = [line for line in text.split("\n") if len(line) > 40]
    contexts = [" ".join(line.split(" ")[:30]) for line in rng.sample(lines, 12)]
    endings = [" " + " ".join(line.split(" ")[: rng.randrange(1, 6)]) for line in lines]
    pairs = [(context, ending) for context in contexts for ending in rng.sample(endings, 4)]
    pairs += [("", "Once upon"), ("Lily ", " ran"), ("One day, ", "Tom"), ("Q: is it?\nA:", " yes")]
    prompts = [(context, {"until": ["\n", "."], "max_gen_toks": 12}) for context in contexts]
    stock, ours = (lm(model, tokenizer=tokenizer, batch_size=5) for lm in (HFLM, SharedPrefixLM))

    def ask(lm: HFLM | SharedPrefixLM, kind: str, requests: list[tuple]) -> list:
        instances = [Instance(kind, {}, request, index) for index, request in enumerate(requests)]
        return getattr(lm, kind)(instances, disable_tqdm=True)

    expected, actual = (ask(lm, "loglikelihood", pairs) for lm in (stock, ours))
    assert [value for value, _ in actual] == pytest.approx([value for value, _ in expected], rel=1e-5)
    assert [is_greedy for _, is_greedy in actual] == [is_greedy for _, is_greedy in expected]
    expected, actual = (ask(lm, "generate_until", prompts) for lm in (stock, ours))
    assert actual == expected and len(set(actual)) > 6
    if name == "byte level":  # where the tokenizer adds BOS, the stock harness scores a second one
        expected, actual = (ask(lm, "loglikelihood_rolling", [(line,) for line in lines[:6]]) for lm in (stock, ours))
        assert actual == pytest.approx(expected, rel=1e-5)
