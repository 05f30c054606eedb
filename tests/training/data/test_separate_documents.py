"""Blocks whose documents are kept apart give the loss and the gradients of each document by itself."""

from itertools import pairwise

import pytest
import torch
from transformers import AutoModelForCausalLM, KimiLinearConfig, TrainingArguments

from attnres.training.recipe import Recipe
from attnres.training.trainer import AttnResTrainer, collate

from ..blocks import load, some_texts, write

pytestmark = pytest.mark.usefixtures("in_tmp_path")


def recipe(**fields) -> Recipe:
    return Recipe(model="unused", train=("unused",), out="out", steps=1, separate_documents=True, **fields)


def trainer(model, **fields) -> AttnResTrainer:
    arguments = TrainingArguments("out", report_to=[], use_cpu=True)
    return AttnResTrainer(model, recipe(**fields), arguments)


@pytest.mark.parametrize("streaming", [False, True], ids=["cached", "streamed"])
def test_separate_documents_keep_the_tokens_of_blocks_and_restart_the_positions(tokenizer, streaming):
    data = write("train.jsonl", some_texts(40))
    apart = list(load((data,), tokenizer, seed=None, separate=True, streaming=streaming))
    together = list(load((data,), tokenizer, seed=None, streaming=streaming))
    assert [row["input_ids"].tolist() for row in apart] == [row["input_ids"].tolist() for row in together]
    assert all("position_ids" not in row for row in together)
    for row, same in zip(apart, together):
        ends = same["input_ids"][:-1] == tokenizer.eos_token_id
        assert row["position_ids"][0] == 0
        assert torch.equal(row["position_ids"][1:] == 0, ends)
        assert torch.equal(row["labels"], same["labels"].masked_fill(row["position_ids"] == 0, -100))


@pytest.mark.parametrize("backbone", ["kimi_linear", "llama"])
def test_a_batch_has_the_loss_and_gradients_of_its_documents_one_by_one(backbone, tiny_model, backbones, tokenizer):
    torch.manual_seed(0)
    size = {"vocab_size": len(tokenizer)}
    hybrid = tiny_model(**size) if backbone == "kimi_linear" else None
    model = hybrid or AutoModelForCausalLM.from_config(backbones.member_config(backbone, **size))
    blocks = list(load((write("train.jsonl", some_texts(40)),), tokenizer, length=24, separate=True))[:3]
    batch = collate(blocks)

    model.train()
    losses = []
    for row in blocks:
        starts = [*(row["position_ids"] == 0).nonzero().flatten().tolist(), 24]
        for start, end in pairwise(starts):
            if end - start > 1:
                ids = row["input_ids"][None, start:end]
                losses.append((model(ids, labels=ids, use_cache=False).loss, end - start - 1))
    assert len(losses) > len(blocks)
    expected = sum(loss * count for loss, count in losses) / sum(count for _, count in losses)
    expected.backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()

    loss = trainer(model).compute_loss(model, batch)
    loss.backward()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
    largest = max(gradient.abs().max() for gradient in gradients.values())
    for name, parameter in model.named_parameters():
        if name in gradients:
            assert (parameter.grad - gradients[name]).abs().max() < 1e-4 * largest, name


def test_a_standard_model_with_linear_attention_is_refused(tiny_config):
    fields = {key: value for key, value in tiny_config().to_dict().items() if key in KimiLinearConfig().to_dict()}
    fields.pop("model_type")
    standard = AutoModelForCausalLM.from_config(KimiLinearConfig(**fields))
    with pytest.raises(ValueError, match=r"carry a state .*Retrofit a Kimi Linear"):
        trainer(standard)


def test_flash_attention_takes_one_row_at_a_time(tiny_model, monkeypatch):
    model = tiny_model()
    monkeypatch.setattr(model.config, "_attn_implementation_internal", "flash_attention_2")
    with pytest.raises(ValueError, match="micro_batch_size=1"):
        trainer(model, micro_batch_size=2)
