"""The space that a run needs on the disk is known before its first step."""

import shutil
from collections import namedtuple
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from attnres.conversion import retrofit
from attnres.training import train as train_module
from attnres.training.recipe import Recipe
from attnres.training.saving import check_disk, checkpoint_bytes, model_bytes
from attnres.training.train import run_train

from .blocks import some_texts, write

Usage = namedtuple("Usage", "total used free")
SIZES = {"vocab_size": 2000, "hidden_size": 64, "intermediate_size": 256, "num_hidden_layers": 4}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 4}


@pytest.fixture
def recipe(tokenizer, tmp_path) -> Callable[..., Recipe]:
    """Return `recipe(**fields)`, a recipe of two steps with a checkpoint for each."""
    torch.manual_seed(0)
    retrofit(LlamaForCausalLM(LlamaConfig(**SIZES, **HEADS))).save_pretrained(tmp_path / "source")
    tokenizer.save_pretrained(tmp_path / "source")
    data = write(str(tmp_path / "a.jsonl"), some_texts(40))
    steps = {"length": 16, "batch_size": 2, "steps": 2, "save_every": 1, "keep": 1, "held_out_sequences": 1}
    return lambda **fields: Recipe(str(tmp_path / "source"), (data,), str(tmp_path / "out"), **steps | fields)


def size_of(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.suffix in (".safetensors", ".pt"))


@pytest.mark.slow
@pytest.mark.parametrize(
    "fields", [{}, {"optimizer": "muon"}, {"lora": {"rank": 32}}, {"lora": {"rank": 32}, "merge": True}], ids=str
)
def test_the_sizes_are_those_of_the_files(fields, recipe, monkeypatch):
    sizes = []

    def note(trainer, recipe, steps_made) -> None:
        sizes.extend([checkpoint_bytes(trainer, recipe), model_bytes(trainer, recipe)])
        check_disk(trainer, recipe, steps_made)

    monkeypatch.setattr(train_module, "check_disk", note)
    run = recipe(**fields)
    run_train(run)
    out = Path(run.out)
    assert sizes[0] == pytest.approx(size_of(out / "checkpoint-2"), rel=0.05)
    assert sizes[1] == pytest.approx(size_of(out / "model") + size_of(out / "adapter"), rel=0.05)


def free(monkeypatch, size: int) -> None:
    """Leave `size` bytes free on every disk."""
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: Usage(10**12, 10**12 - size, size))


@pytest.mark.slow
def test_a_run_that_does_not_fit_ends_before_its_first_step(recipe, monkeypatch, capsys):
    sizes = []
    monkeypatch.setattr(
        train_module, "check_disk", lambda *args: sizes.append(checkpoint_bytes(*args[:2])) or check_disk(*args)
    )
    free(monkeypatch, 1_000_000)
    run = recipe()
    with pytest.raises(OSError, match=r"not enough space in .*out: .* are needed, 1\.00 MB are free\. Free some"):
        run_train(run)
    assert not Path(run.out).exists()
    # While the second checkpoint is written, the first is still there.
    free(monkeypatch, 2 * sizes[0] - 1)
    with pytest.raises(OSError, match="not enough space"):
        run_train(run)
    free(monkeypatch, 2 * sizes[0])
    run_train(run)
    # A finished run that cannot go on stays as it was.
    free(monkeypatch, 0)
    before = (Path(run.out) / "results.json").read_text()
    with pytest.raises(OSError, match="not enough space"):
        run_train(recipe(steps=4))
    assert (Path(run.out) / "results.json").read_text() == before
    # The longer run writes over what this one has written: it needs a checkpoint more, not two.
    free(monkeypatch, sizes[0])
    run_train(recipe(steps=4))
