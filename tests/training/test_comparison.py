"""Comparisons: held-out text of many documents, the same start and batches for both models, errors by document."""

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from attnres.training.comparison import Trial, compare, comparison_data, difference, split
from attnres.training.runs import Run

from .blocks import WORDS


def document(words: int) -> str:
    return " ".join(WORDS[i % len(WORDS)] for i in range(words))


def test_held_out_blocks_are_from_many_documents_and_have_their_numbers(tokenizer):
    train, held_out = split([document(200 + i) for i in range(40)])
    assert len(held_out) == 10 and not set(train) & set(held_out)
    held_out[1] = "one"  # ends within the block in which the next document begins
    data = comparison_data(train, held_out, tokenizer, length=16, least=8)
    assert data.train.shape[1] == data.held_out.shape[1] == 16
    assert data.documents.unique().tolist() == [0, 2, 3, 4, 5, 6, 7, 8, 9]
    assert data.documents.bincount().max() == 4
    stream = [token for text in held_out for token in [*tokenizer(text)["input_ids"], tokenizer.eos_token_id]]
    for block, number in zip(data.held_out.tolist(), data.documents.tolist(), strict=True):
        starts = [i for i in range(0, len(stream), 16) if stream[i : i + 16] == block]
        assert number in [stream[:start].count(tokenizer.eos_token_id) for start in starts]


def test_too_little_text_is_refused(tokenizer):
    with pytest.raises(ValueError, match=r"sequences of 0 documents.*longer --text"):
        comparison_data([document(500)], [], tokenizer, length=16, least=1)
    with pytest.raises(ValueError, match="gives 0 sequences of 16 tokens to train on"):
        comparison_data([], [document(99)] * 3, tokenizer, length=16, least=1)


@pytest.mark.slow
def test_a_seed_gives_every_model_the_same_start_and_batches(tokenizer):
    data = comparison_data(*split([document(40 + i) for i in range(12)]), tokenizer, length=16, least=8)
    shape = {"vocab_size": 300, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = AutoConfig.for_model("attnres_llama", **shape)
    starts = {label: lambda: AutoModelForCausalLM.from_config(config) for label in ("a", "b")}
    run = Run(steps=3, batch_size=4, learning_rate=1e-2)
    runs = compare(starts, data, run, range(2), on_run=lambda name: None, on_step=lambda: None)
    trials = [trial for trial, _ in runs]
    assert [(trial.label, trial.seed) for trial in trials] == [("a", 0), ("b", 0), ("a", 1), ("b", 1)]
    assert trials[0].curve == trials[1].curve and torch.equal(trials[0].losses, trials[1].losses)
    assert trials[0].curve != trials[2].curve


def test_blocks_of_one_document_do_not_count_as_independent():
    documents = torch.tensor([0, 0, 0, 0, 1, 1, 1, 1, 5, 5, 5, 5])
    by_document = torch.tensor([0.1, 0.4, 0.7], dtype=torch.float64)
    losses = by_document.repeat_interleave(4)
    trials = [Trial("a", seed, [], losses + seed) for seed in range(3)]
    trials += [Trial("b", seed, [], torch.zeros_like(losses)) for seed in range(3)]
    lead = difference(trials, "a", "b", documents)
    assert lead.by_seed == pytest.approx([0.4, 1.4, 2.4])
    assert (lead.mean, lead.over_seeds) == (pytest.approx(1.4), pytest.approx(1.0))
    assert lead.over_documents == pytest.approx(by_document.std().item() / 3**0.5)
