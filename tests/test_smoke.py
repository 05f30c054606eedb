"""The main road, once: a model is saved and loaded, converted, trained for two steps, evaluated on one item.

`make check` runs this file before every commit. The folders beside it test each step for what it promises.
"""

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from . import forks
from .conversion.checkpoints import IDS, assert_same_function, logits_of, save_tokenizer, standard_model

TASK = """
task: sums
dataset_path: json
dataset_kwargs: {data_files: DATA}
test_split: train
output_type: multiple_choice
doc_to_text: question
doc_to_target: answer
doc_to_choice: choices
metric_list: [{metric: acc}]
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A folder with a standard model, a text, and a task of one item."""
    folder = tmp_path_factory.mktemp("smoke")
    standard_model(max_position_embeddings=512).save_pretrained(folder / "source")
    save_tokenizer(folder / "source")
    (folder / "text.txt").write_text("\n\n".join(f"{n} and {n} make {2 * n}." for n in range(2000)))
    (folder / "tasks").mkdir()
    (folder / "tasks" / "data.json").write_text(json.dumps({"question": "1 + 1 =", "choices": ["2", "7"], "answer": 0}))
    (folder / "tasks" / "sums.yaml").write_text(TASK.replace("DATA", str(folder / "tasks" / "data.json")))
    return folder


def attnres(folder: Path, *arguments: object) -> str:
    """Run a command that has to succeed; return what it prints."""
    done = forks.run("-m", "attnres_cli", *arguments, cwd=folder)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def converted(folder) -> Path:
    assert "Verified: " in attnres(folder, "convert", "source", "converted", "--num-blocks", 3)
    return folder / "converted"


@pytest.fixture(scope="module")
def trained(folder, converted) -> Path:
    sizes = ("length=64", "batch_size=2", "micro_batch_size=2", "tokens=null", "steps=2", "save_every=2", "log_every=1")
    attnres(folder, "train", "heal", "model=converted", "train=text.txt", "out=run", *sizes)
    return folder / "run" / "model"


def test_a_saved_model_is_loaded_again(tiny_model, token_ids, tmp_path):
    model = tiny_model()
    model.save_pretrained(tmp_path)
    with torch.no_grad():
        assert torch.equal(AutoModelForCausalLM.from_pretrained(tmp_path)(token_ids).logits, model(token_ids).logits)


def test_a_converted_model_computes_the_same(folder, converted):
    assert_same_function(logits_of(converted), logits_of(folder / "source"))


def test_two_steps_of_training_change_the_model_and_its_depth_weights(converted, trained):
    before, after = (AutoModelForCausalLM.from_pretrained(path) for path in (converted, trained))
    old = dict(before.named_parameters())
    changed = {name for name, parameter in after.named_parameters() if not torch.equal(parameter, old[name])}
    assert {name.rpartition(".")[0].rpartition(".")[2] for name in changed} >= {"mlp_res_proj", "q_proj"}
    assert after(IDS, labels=IDS).loss.isfinite()


def test_a_trained_model_is_evaluated(folder, trained):
    attnres(folder, "eval", trained, "--tasks", "sums", "--include-path", "tasks", "--out", "scores")
    assert json.loads((folder / "scores" / "results.json").read_text())["results"]["sums"]["acc,none"] in (0, 1)
