"""`SharedPrefixLM` generates in batches the same texts as alone, and reports its progress."""

import copy
import random

import pytest
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM

from attnres.eval.shared_prefix import SharedPrefixLM

from .prompts import generation, texts


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


def test_settings_beside_a_model_do_not_change_greedy_decoding(make_model, tokenizer, monkeypatch):
    """Settings of the task count."""
    model = make_model("llama")
    requests = generation(texts(random.Random(1), 3, 9, 30), until=[], max_gen_toks=12)
    lm = SharedPrefixLM(model, tokenizer=tokenizer, batch_size=2)
    greedy = lm.generate_until(requests, disable_tqdm=True)
    assert lm.ignored_settings == {}
    settings = {"repetition_penalty": 1.9, "no_repeat_ngram_size": 1, "max_new_tokens": 2, "num_beams": 1}
    changed = copy.deepcopy(model.generation_config)
    changed.update(**settings)
    monkeypatch.setattr(model, "generation_config", changed)
    stock = HFLM(model, tokenizer=tokenizer, batch_size=2)
    assert stock.generate_until(requests, disable_tqdm=True) != greedy
    assert lm.generate_until(requests, disable_tqdm=True) == greedy
    assert lm.ignored_settings == {name: value for name, value in settings.items() if name != "num_beams"}
    assert model.generation_config is changed and changed.repetition_penalty == 1.9
    own = generation(texts(random.Random(1), 3, 9, 30), until=[], max_gen_toks=12, repetition_penalty=1.9)
    assert lm.generate_until(own, disable_tqdm=True) != greedy


def test_progress_replaces_bars(model, tokenizer, capfd):
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
