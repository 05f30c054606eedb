"""Saved over an older save, a folder loads as the new model; where the new save fails, as the old one."""

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, PreTrainedModel, modeling_utils

from attnres import AttnResForCausalLM
from attnres.saving_attnres import saved_whole

SHARDS = {"max_shard_size": "40KB"}
KEPT = {"README.md": "mine", "model-card.txt": "mine", "other.safetensors": "mine", "adapter_model.safetensors": "mine"}


@pytest.fixture(scope="module")
def models(tiny_model) -> tuple[AttnResForCausalLM, AttnResForCausalLM]:
    return tiny_model(0, attn_res_block_size=3), tiny_model(1, attn_res_block_size=3)


@pytest.fixture
def folder(tmp_path) -> Path:
    """With files that are no weights of the model."""
    folder = tmp_path / "model"
    folder.mkdir()
    for name, text in KEPT.items():
        (folder / name).write_text(text)
    return folder


def is_whole(folder: Path, model: AttnResForCausalLM) -> bool:
    """Whether the folder loads as the model, and no other weights lie there."""
    loaded = AutoModelForCausalLM.from_pretrained(folder).state_dict()
    index = folder / "model.safetensors.index.json"
    named = set(json.loads(index.read_text())["weight_map"].values()) if index.exists() else {"model.safetensors"}
    weights = {path.name for path in folder.iterdir() if path.suffix in (".safetensors", ".bin")} - KEPT.keys()
    assert weights == named
    assert not [path for path in folder.iterdir() if path.is_dir()]
    assert all((folder / name).read_text() == text for name, text in KEPT.items())
    return all(torch.equal(loaded[name], tensor) for name, tensor in model.state_dict().items())


def convert(model: AttnResForCausalLM, folder: Path) -> None:
    """Save in shards, one of them as `attnres convert` names what it has added."""
    model.save_pretrained(folder, **SHARDS)
    index = folder / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    last = max(content["weight_map"].values())
    (folder / last).rename(folder / "model-residual.safetensors")
    files = {
        name: "model-residual.safetensors" if file == last else file for name, file in content["weight_map"].items()
    }
    index.write_text(json.dumps(content | {"weight_map": files}))


def pickle(model: AttnResForCausalLM, folder: Path) -> None:
    """Save as before safetensors."""
    model.save_pretrained(folder)
    torch.save(model.state_dict(), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()


SAVES: dict[str, Callable[[AttnResForCausalLM, Path], object]] = {
    "one file": lambda model, folder: model.save_pretrained(folder),
    "shards": lambda model, folder: model.save_pretrained(folder, **SHARDS),
    "fewer shards": lambda model, folder: model.save_pretrained(folder, max_shard_size="150KB"),
}


@pytest.mark.parametrize("new", ["one file", "shards"])
@pytest.mark.parametrize("old", [*SAVES, "converted", "pickle"])
def test_the_new_save_takes_the_place_of_the_old_one(models, folder, old, new):
    {**SAVES, "converted": convert, "pickle": pickle}[old](models[0], folder)
    SAVES[new](models[1], folder)
    assert is_whole(folder, models[1])


@pytest.mark.parametrize("new", ["one file", "shards"])
@pytest.mark.parametrize("old", SAVES)
def test_a_save_that_fails_leaves_the_old_one(models, folder, monkeypatch, old, new):
    SAVES[old](models[0], folder)
    models[0].config.save_pretrained(folder)
    before = {path.name: path.read_bytes() for path in folder.iterdir()}

    def full(tensors, filename, *args, **kwargs):
        # The second shard, or the only file.
        if "00001-of" not in str(filename):
            raise OSError("no space left on device")
        save_file(tensors, filename, *args, **kwargs)

    monkeypatch.setattr(modeling_utils, "safe_save_file", full)
    with pytest.raises(OSError, match="no space left"):
        SAVES[new](models[1], folder)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


@pytest.mark.parametrize("killed_at", range(1, 14, 3))
def test_killed_while_files_are_exchanged_nothing_loads(models, folder, monkeypatch, killed_at):
    SAVES["shards"](models[0], folder)
    steps, remove, replace = [], os.remove, os.replace

    def until_killed(do: Callable, *paths):
        steps.append(paths)
        if len(steps) > killed_at:
            raise KeyboardInterrupt
        do(*paths)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(os, "remove", lambda path: until_killed(remove, path))
        patch.setattr(os, "replace", lambda *paths: until_killed(replace, *paths))
        SAVES["fewer shards"](models[1], folder)
    with pytest.raises(OSError, match=r"no file named model\.safetensors"):
        AutoModelForCausalLM.from_pretrained(folder)
    SAVES["one file"](models[1], folder)
    assert is_whole(folder, models[1])


@pytest.mark.parametrize("new", ["one file", "shards"])
def test_where_the_result_is_uploaded_from_the_folder_old_weights_go_too(models, folder, new):
    convert(models[0], folder)
    with saved_whole(folder, in_place=True) as place:
        assert Path(place) == folder
        PreTrainedModel.save_pretrained(models[1], place, **(SHARDS if new == "shards" else {}))
    assert is_whole(folder, models[1])


def test_only_the_main_process_replaces(models, folder):
    SAVES["one file"](models[0], folder)
    models[1].save_pretrained(folder, is_main_process=False, **SHARDS)
    assert is_whole(folder, models[0])


def test_a_variant_replaces_its_own_weights_alone(models, folder):
    SAVES["one file"](models[0], folder)
    models[0].save_pretrained(folder, variant="other")
    models[1].save_pretrained(folder, variant="other", **SHARDS)
    assert not (folder / "model.other.safetensors").exists()
    for variant, model in ((None, models[0]), ("other", models[1])):
        loaded = AutoModelForCausalLM.from_pretrained(folder, variant=variant).state_dict()
        assert all(torch.equal(loaded[name], tensor) for name, tensor in model.state_dict().items())


def test_a_model_is_saved_into_the_folder_that_it_is_mapped_from(models, folder):
    SAVES["one file"](models[0], folder)
    loaded = AutoModelForCausalLM.from_pretrained(folder)
    loaded.save_pretrained(folder, **SHARDS)
    assert is_whole(folder, models[0])


def test_a_link_in_the_place_of_the_stage_goes_and_its_target_stays(models, folder, tmp_path):
    (tmp_path / "precious").mkdir()
    (tmp_path / "precious" / "notes.txt").write_text("mine")
    models[0].save_pretrained(folder)
    (folder / ".saving").symlink_to(tmp_path / "precious")
    models[1].save_pretrained(folder)
    assert is_whole(folder, models[1])
    assert (tmp_path / "precious" / "notes.txt").read_text() == "mine"


def test_the_next_save_clears_what_a_killed_exchange_left(models, folder):
    (folder / ".saving").mkdir()
    (folder / ".saving" / "model.safetensors").write_text("of a killed process")
    models[0].save_pretrained(folder)
    assert is_whole(folder, models[0])
