"""`attnres push` checks weights, and removes from a repository the measurements of other weights."""

import json
import math
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from ..conversion.checkpoints import change_json


@pytest.fixture
def copy(published_copy) -> Path:
    return published_copy


def retrained(copy: Path) -> Path:
    """Change one weight of a model."""
    path = next(copy.glob("model*.safetensors"))
    tensors = load_file(path)
    next(tensor for tensor in tensors.values() if tensor.is_floating_point()).view(-1)[0] += 1
    save_file(tensors, path, {"format": "pt"})
    return copy


def measured(folder: Path) -> None:
    """Write results and a report of inspection into a folder."""
    entry = "- dataset: {id: openai/gsm8k, task_id: gsm8k}\n  value: 77.7\n"
    (folder / ".eval_results").mkdir()
    (folder / ".eval_results" / "gsm8k_8shot.yaml").write_text(f"# gsm8k_8shot.yaml, written by attnres eval\n{entry}")
    (folder / ".eval_results" / "mine.yaml").write_text(entry.replace("77.7", "66.6"))
    (folder / "inspection").mkdir()
    for name in ("inspection.json", "depth_attention.png"):
        (folder / "inspection" / name).write_text('{"written_by": "attnres inspect"}')


MEASUREMENTS = [
    ".eval_results/gsm8k_8shot.yaml",
    "inspection/depth_attention.png",
    "inspection/inspection.json",
]


def test_measurements_of_other_weights_are_removed_with_them(push, copy):
    measured(copy)
    push("push", copy.name, "me/measured")
    push.edit("me/measured", "inspection/notes.txt", "of a person")
    assert "77.7" in push.card("me/measured") and "depth_attention.png" in push.card("me/measured")
    for name in (".eval_results", "inspection"):
        shutil.rmtree(copy / name)

    same = push("push", copy.name, "me/measured")
    assert same["status"] == 0, same["err"]
    assert "other weights" not in same["out"] and "have changed" not in same["out"]
    assert {*MEASUREMENTS} <= push.hub.files("me/measured").keys()

    before = len(push.commits("me/measured"))
    done = push("push", retrained(copy).name, "me/measured")
    assert done["status"] == 0, done["err"]
    line = f"Removed from the repository, as they belong to other weights: {', '.join(MEASUREMENTS)}."
    assert line in done["out"]
    names = push.hub.files("me/measured").keys()
    assert not {*MEASUREMENTS} & names
    assert {".eval_results/mine.yaml", "inspection/notes.txt"} <= names
    assert "`hf repos delete-files me/measured .eval_results/mine.yaml`" in done["out"]
    assert push.commits("me/measured")[before:] == ["Upload model", "Model card: the commit to load"]
    card = push.card("me/measured")
    assert "77.7" not in card and "depth_attention.png" not in card


def test_new_results_replace_all_older_ones_and_text_of_a_person_stays_with_a_note(push, copy):
    measured(copy)
    push("push", copy.name, "me/replaced")
    push.edit("me/replaced", "README.md", push.card("me/replaced").replace("77.7", "77.8"))
    shutil.rmtree(copy / "inspection")
    results = copy / ".eval_results"
    (results / "mine.yaml").unlink()
    (results / "gsm8k_8shot.yaml").rename(results / "gsm8k_0shot.yaml")
    done = push("push", retrained(copy).name, "me/replaced", "--create-pr")
    assert done["status"] == 0, done["err"]
    names = push.hub.files("me/replaced", "refs/pr/1").keys()
    assert ".eval_results/gsm8k_0shot.yaml" in names
    assert not {*MEASUREMENTS} & names
    assert "a person has edited the results in README.md" in done["out"]
    assert "77.8" in push.card("me/replaced", "refs/pr/1")
    assert "delete-files me/replaced .eval_results/mine.yaml --revision refs/pr/1`" in done["out"]
    assert {*MEASUREMENTS} <= push.hub.files("me/replaced").keys()


def test_files_of_another_model_that_would_be_loaded_are_named_and_stay(push, published_model):
    push.run("from huggingface_hub import HfApi; HfApi().create_repo('me/mixed')")
    others = [
        "added_tokens.json",
        "additional_chat_templates/tools.jinja",
        "chat_template.jinja",
        "preprocessor_config.json",
    ]
    for name in [*others, "LICENSE", "notes.txt", "tokenizer.json"]:
        push.edit("me/mixed", name, "{}")
    done = push("push", "model", "me/mixed")
    assert done["status"] == 0, done["err"]
    (note,) = [line for line in done["out"].splitlines() if "from_pretrained" in line]
    assert note.startswith("Note: the repository holds files that model does not have")
    assert f"read them with this model: {', '.join(others)}. " in note
    assert note.endswith(f"`hf repos delete-files me/mixed {' '.join(others)}`.")
    assert {*others} <= push.hub.files("me/mixed").keys()
    push.run(f"from huggingface_hub import HfApi; HfApi().delete_files('me/mixed', {others})")
    assert "from_pretrained" not in push("push", "model", "me/mixed")["out"]


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_weights_that_are_not_finite_are_refused(push, copy, value):
    path = max(copy.glob("model*.safetensors"))
    tensors = load_file(path)
    name = max(tensors)
    tensors[name].view(-1)[-1] = value
    save_file(tensors, path, {"format": "pt"})
    push.hub.forget()
    done = push("push", copy.name, "me/nan")
    assert done["status"] == 1
    assert len(done["err"].splitlines()) == 1
    assert f"`{name}` in {copy.name}/{path.name} holds NaN or infinite values" in done["err"]
    assert not push.hub.log()


def test_tensors_that_the_model_does_not_read_are_named(push, copy):
    path = max(copy.glob("model*.safetensors"))
    save_file(load_file(path) | {"model.layers.99.w": torch.full((2,), math.nan)}, path, {"format": "pt"})
    done = push("push", copy.name, "me/more", "--dry-run")
    assert done["status"] == 0, done["err"]
    (warning,) = [line for line in done["out"].splitlines() if "does not read" in line]
    assert warning == (
        f"Warning: the model does not read 1 tensor of {copy.name}: `model.layers.99.w`. Published unchanged."
    )


def test_layers_that_the_configuration_leaves_out_are_named(push, copy):
    layers = json.loads((copy / "config.json").read_text())["num_hidden_layers"]
    change_json(copy / "config.json", num_hidden_layers=layers - 1)
    done = push("push", copy.name, "me/less", "--dry-run")
    assert done["status"] == 0, done["err"]
    (warning,) = [line for line in done["out"].splitlines() if "does not read" in line]
    assert f"`model.layers.{layers - 1}." in warning
