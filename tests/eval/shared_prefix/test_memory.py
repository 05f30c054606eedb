"""`SharedPrefixLM` survives a lack of memory: smaller batches, the same answers."""

import functools
import random
import weakref

import pytest
import torch
from lm_eval.models.huggingface import HFLM

from attnres.eval.shared_prefix import SharedPrefixLM

from .prompts import assert_same, generation, questions, texts, words


@pytest.mark.slow
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


@pytest.mark.slow
def test_out_of_memory_below_shared_prefixes_changes_no_score(model, tokenizer, scored, calls, caplog):
    requests = questions(random.Random(0), examples=150, items=6, question=40, choice=6)
    expected = scored(HFLM, model, requests)
    lm = SharedPrefixLM(model, tokenizer=tokenizer, batch_size=16)
    assert lm.abilities.share_prefix
    shapes = calls(model, most=3)
    assert_same(lm._loglikelihood_tokens(requests), expected)
    # The examples; the contexts of six questions, then of three; their choices, three at a time.
    assert shapes[0] == (1, 150)
    assert [rows for rows, _ in shapes[1:]] == [6, *([3] * 5) * 2]
    assert caplog.messages[-1] == "Out of memory at batch size 6: going on with 3."


@pytest.mark.slow
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


def test_the_memory_of_a_failed_batch_is_freed_before_it_is_repeated(model, tokenizer, monkeypatch):
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
def test_a_single_sequence_that_does_not_fit_raises_the_error_of_the_device(kind, model, tokenizer, calls):
    lm = SharedPrefixLM(model, tokenizer=tokenizer, batch_size=2)
    assert lm.abilities
    calls(model, most=0)
    with pytest.raises(torch.OutOfMemoryError):
        if kind == "likelihood":
            lm._loglikelihood_tokens([(None, words(random.Random(i), 39), [3, 4]) for i in range(3)])
        else:
            lm.generate_until(generation(texts(random.Random(0), 40, 5)))


def test_other_errors_are_not_taken_for_a_lack_of_memory(model, tokenizer, calls):
    lm = SharedPrefixLM(model, tokenizer=tokenizer, batch_size=2)
    assert lm.abilities
    shapes = calls(model, most=0, error="mat1 and mat2 shapes cannot be multiplied")
    with pytest.raises(RuntimeError, match=r"^mat1 and mat2 shapes cannot be multiplied$"):
        lm._loglikelihood_tokens([(None, [3, 4], [5]), (None, [3, 5], [5])])
    assert len(shapes) == 1
