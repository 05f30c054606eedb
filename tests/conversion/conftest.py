"""Fixtures of the conversion tests: a standard model of every backbone with its outputs, and small checkpoints."""

import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from . import backbones as _backbones
from .checkpoints import convert, standard_model


@dataclass
class Original:
    """A standard model and its outputs, computed before any retrofit of it."""

    case: str
    model: PreTrainedModel
    token_ids: Tensor  # [2, 11]
    logits: Tensor  # [2, 11, vocab]
    sequences: Tensor  # [batch, prompt and new tokens], of `generate`
    step_logits: Tensor  # [step, batch, vocab]
    gradients: dict[str, Tensor]


@pytest.fixture(scope="session")
def generate():
    """Return `generate(model, token_ids)`: 8 greedy tokens for a batch whose first row is padded on the left.

    It returns the sequences, and the logits of every step, `[step, batch, vocab]`.
    """

    def run(model: PreTrainedModel, token_ids: Tensor) -> tuple[Tensor, Tensor]:
        mask = torch.ones_like(token_ids)
        mask[0, :4] = 0
        outputs = model.generate(
            token_ids.masked_fill(mask == 0, 0),
            attention_mask=mask,
            max_new_tokens=8,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
            output_logits=True,
            return_dict_in_generate=True,
        )
        return outputs.sequences, torch.stack(outputs.logits)

    return run


@pytest.fixture(scope="session")
def gradients():
    """Return `gradients(model, token_ids)`: the gradients of the language modelling loss by parameter."""

    def run(model: PreTrainedModel, token_ids: Tensor) -> dict[str, Tensor]:
        model.zero_grad()
        model(token_ids, labels=token_ids).loss.backward()
        result = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
        model.zero_grad()
        return result

    return run


@pytest.fixture(scope="session", params=_backbones.CASES)
def original(request, generate, gradients) -> Original:
    """Return the models of `backbones.py` one after the other."""
    model, token_ids = _backbones.build(request.param), _backbones.token_ids()
    with torch.no_grad():
        logits = model(token_ids).logits
    sequences, step_logits = generate(model, token_ids)
    return Original(request.param, model, token_ids, logits, sequences, step_logits, gradients(model, token_ids))


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> Path:
    """Return a folder of models that tests must not change: `llama` and `mixtral` in shards, `whole` in one file."""
    folder = tmp_path_factory.mktemp("models")
    standard_model().save_pretrained(folder / "llama", max_shard_size="20KB")
    standard_model().save_pretrained(folder / "whole")
    model = standard_model("mixtral", num_local_experts=4, num_experts_per_tok=2)
    model.save_pretrained(folder / "mixtral", max_shard_size="20KB")
    return folder


@pytest.fixture
def copy_of(models, tmp_path) -> Callable[[str], Path]:
    """Return `copy_of(name)`, which copies a model to `source`, where a test may damage it."""
    return lambda name: Path(shutil.copytree(models / name, tmp_path / "source"))


@pytest.fixture
def copy(copy_of) -> Path:
    """Return a copy of the sharded Llama, `source`, which a test may change."""
    return copy_of("llama")


@pytest.fixture
def refusal(tmp_path) -> Callable[..., str]:
    """Return `refusal(*options)`: the error of a conversion of `source`, which must leave nothing behind."""

    def run(*options: str) -> str:
        before = sorted(os.listdir(tmp_path))
        error = convert(tmp_path / "source", tmp_path / "result", *options).error
        assert sorted(os.listdir(tmp_path)) == before
        return error

    return run
