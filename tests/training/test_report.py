"""The model of a run appears whole: a kill while it replaces an earlier one leaves the old one or the new one."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import TrainingArguments

from attnres.training.recipe import Recipe
from attnres.training.report import write_run
from attnres.training.run_folder import hold_folder
from attnres.training.trainer import AttnResTrainer

from ..kills import exit_code, in_child

RESULTS = {"held_out_loss": 2.0, "steps": 1, "tokens": 64, "training_loss": [[1, 2.5]], "held_out_losses": [[1, 2.0]]}


@pytest.fixture(params=["model", "merged"])
def trainer(request, tiny_model, tmp_path) -> AttnResTrainer:
    """Return a trainer of a model, or of adapters that are written beside a merged model."""
    lora = {"rank": 2} if request.param == "merged" else None
    out = str(tmp_path / "out")
    recipe = Recipe(str(tmp_path), ("a.txt",), out, steps=1, lora=lora, merge=lora is not None)
    model = tiny_model()
    if lora:
        lora_module = pytest.importorskip("attnres.training.lora")
        model = lora_module.add_adapters(model, **lora)
    return AttnResTrainer(model, recipe, TrainingArguments(out, report_to="none", use_cpu=True))


@pytest.fixture
def write(trainer, tokenizer) -> Callable[..., int]:
    """Return `write(killed_before)`, which writes the run in a child process and returns its exit code.

    The child is killed before it renames a folder of the name `killed_before`. The parent's model is never merged.
    """

    def do(killed_before: str | None) -> None:
        rename = os.rename

        def rename_or_die(source, target) -> None:
            if Path(source).name == killed_before:
                os._exit(9)
            rename(source, target)

        os.rename = rename_or_die
        with hold_folder(Path(trainer.recipe.out), trainer.recipe):
            write_run(trainer, tokenizer, "", RESULTS)

    return lambda killed_before=None: exit_code(in_child(lambda: do(killed_before)))


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.slow
@pytest.mark.parametrize("killed_before", ["model", ".model.partial"])
def test_a_kill_while_a_model_is_replaced_loses_neither_the_old_one_nor_the_new_one(
    killed_before, trainer, write, tmp_path
):
    out = tmp_path / "out"
    assert write() == 0
    old = content(out / "model")
    (out / "results.json").unlink()  # as if the run had been killed before it wrote this file
    with torch.no_grad():
        for parameter in trainer.model.parameters():
            parameter.add_(0.1)
    assert write(killed_before) == 9
    assert not (out / "results.json").exists()
    held = [path for path in (out / "model", out / ".model.replaced") if path.exists()]
    assert [content(path) for path in held] == [old]
    assert write() == 0
    new = content(out / "model")
    assert new.keys() == old.keys()
    assert new["model.safetensors"] != old["model.safetensors"]
    assert not list(out.glob(".*"))


@pytest.mark.slow
def test_a_kill_before_the_model_has_its_name_leaves_none(write, tmp_path):
    out = tmp_path / "out"
    assert write(".model.partial") == 9
    assert not (out / "model").exists()
    assert write() == 0
    assert (out / "model" / "model.safetensors").exists() and (out / "results.json").exists()
    assert not list(out.glob(".*"))
