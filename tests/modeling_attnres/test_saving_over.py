"""After a save over an older one, a folder loads as the new model; after a failed save, as the old one."""

import json
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, PreTrainedModel, modeling_utils

from attnres import AttnResForCausalLM
from attnres.saving_attnres import saved_whole

from ..cases import each_once
from ..kills import exit_code, in_child

SHARDS = {"max_shard_size": "40KB"}
KEPT = {"README.md": "mine", "model-card.txt": "mine", "other.safetensors": "mine", "adapter_model.safetensors": "mine"}


@pytest.fixture(scope="module")
def models(tiny_model) -> tuple[AttnResForCausalLM, AttnResForCausalLM]:
    return tiny_model(0, attn_res_block_size=3), tiny_model(1, attn_res_block_size=3)


@pytest.fixture
def folder(tmp_path) -> Path:
    """Return a folder that holds files other than weights of the model."""
    folder = tmp_path / "model"
    folder.mkdir()
    for name, text in KEPT.items():
        (folder / name).write_text(text)
    return folder


def is_whole(folder: Path, model: AttnResForCausalLM) -> bool:
    """Return whether a folder loads as a model; assert that it holds no other weights."""
    loaded = AutoModelForCausalLM.from_pretrained(folder).state_dict()
    index = folder / "model.safetensors.index.json"
    named = set(json.loads(index.read_text())["weight_map"].values()) if index.exists() else {"model.safetensors"}
    weights = {path.name for path in folder.iterdir() if path.suffix in (".safetensors", ".bin")} - KEPT.keys()
    assert weights == named
    assert not [path for path in folder.iterdir() if path.is_dir()]
    assert all((folder / name).read_text() == text for name, text in KEPT.items())
    return all(torch.equal(loaded[name], tensor) for name, tensor in model.state_dict().items())


def is_whole_alone(folder: Path, model: AttnResForCausalLM) -> bool:
    """Return the same for a folder without other files."""
    for name, text in KEPT.items():
        (folder / name).write_text(text)
    return is_whole(folder, model)


def convert(model: AttnResForCausalLM, folder: Path) -> None:
    """Save in shards, and rename one as `attnres convert` names its shards."""
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
    """Save as `pytorch_model.bin`."""
    model.save_pretrained(folder)
    torch.save(model.state_dict(), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()


SAVES: dict[str, Callable[[AttnResForCausalLM, Path], object]] = {
    "one file": lambda model, folder: model.save_pretrained(folder),
    "shards": lambda model, folder: model.save_pretrained(folder, **SHARDS),
    "fewer shards": lambda model, folder: model.save_pretrained(folder, max_shard_size="150KB"),
}


@pytest.mark.parametrize(
    ("old", "new"), [*each_once([*SAVES, "converted", "pickle"], ["shards", "one file"]), ("shards", "shards")]
)
def test_a_new_save_replaces_the_old_one(models, folder, old, new):
    {**SAVES, "converted": convert, "pickle": pickle}[old](models[0], folder)
    SAVES[new](models[1], folder)
    assert is_whole(folder, models[1])


@pytest.mark.parametrize(("old", "new"), each_once([*SAVES], ["one file", "shards"]))
def test_a_failed_save_leaves_the_old_one(models, folder, monkeypatch, old, new):
    SAVES[old](models[0], folder)
    models[0].config.save_pretrained(folder)
    before = {path.name: path.read_bytes() for path in folder.iterdir()}

    def full(tensors, filename, *args, **kwargs):
        # Fail at the second shard or the only file.
        if "00001-of" not in str(filename):
            raise OSError("no space left on device")
        save_file(tensors, filename, *args, **kwargs)

    monkeypatch.setattr(modeling_utils, "safe_save_file", full)
    with pytest.raises(OSError, match="no space left"):
        SAVES[new](models[1], folder)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


def model_in(folder: Path, models: tuple[AttnResForCausalLM, ...]) -> int:
    """Return the index of the model as which a folder loads; tensors and configuration must be of the same model."""
    loaded = AutoModelForCausalLM.from_pretrained(folder)
    tensors = loaded.state_dict()
    (number,) = [
        number
        for number, model in enumerate(models)
        if all(torch.equal(tensors[name], tensor) for name, tensor in model.state_dict().items())
    ]
    assert loaded.config.attn_res_block_size == models[number].config.attn_res_block_size
    return number


@pytest.mark.slow
@pytest.mark.parametrize(("old", "new"), [("shards", "fewer shards"), ("pickle", "shards")])
def test_after_a_kill_at_any_file_call_the_folder_holds_the_old_model_or_the_new_one(
    tiny_model, folder, tmp_path, old, new
):
    models = tiny_model(0, attn_res_block_size=3), tiny_model(1, attn_res_block_size=2)
    {**SAVES, "converted": convert, "pickle": pickle}[old](models[0], folder)
    SAVES[new](models[1], tmp_path / "new")
    for code in [*folder.glob("*.py"), *(tmp_path / "new").glob("*.py")]:
        code.unlink()  # each file costs a file call, and the code is not needed here

    def save(place: Path) -> None:
        with saved_whole(place) as stage:
            shutil.copytree(tmp_path / "new", stage, dirs_exist_ok=True, copy_function=shutil.copyfile)

    held, told = [], 0
    for call in range(1, 100):
        place = tmp_path / str(call)
        shutil.copytree(folder, place)
        code = exit_code(in_child(lambda place=place: save(place), killed_at=call))
        try:
            held.append(model_in(place, models))
        except OSError as error:
            # The old configuration was read before the exchange was completed.
            assert "was interrupted, and is complete now. Load it again" in str(error)
            told += 1
            held.append(model_in(place, models))
        if code == 0:
            break
        if call % 4 == 0 or held[-1] == 1:
            save(place)
            assert is_whole(place, models[1])
    assert held == sorted(held) and held.count(0) >= 4 and held.count(1) >= 6 and told >= 1


@pytest.mark.slow
def test_one_of_several_processes_that_save_at_once_wins(models, tiny_model, folder):
    models = (*models, tiny_model(2, attn_res_block_size=3))
    saves = [lambda number=number: models[number].save_pretrained(folder, **SHARDS) for number in (1, 2)]
    for trial in range(4):
        for path in folder.glob("model*.safetensors*"):
            path.unlink()
        if trial % 2:
            models[0].save_pretrained(folder, **SHARDS)
        assert [exit_code(child) for child in [in_child(save) for save in saves]] == [0, 0]
        assert is_whole(folder, models[1]) or is_whole(folder, models[2])


def test_a_save_into_an_empty_folder_is_not_seen_before_it_is_whole(models, tmp_path):
    models[0].save_pretrained(tmp_path / "new", **SHARDS)
    with saved_whole(tmp_path / "model") as stage:
        shutil.copytree(tmp_path / "new", stage, dirs_exist_ok=True)
        assert os.listdir(tmp_path / "model") == [Path(stage).name]
    assert is_whole_alone(tmp_path / "model", models[0])


def test_the_stage_of_a_killed_process_is_removed_and_a_stage_in_use_stays(models, folder):
    SAVES["one file"](models[0], folder)

    def killed() -> None:
        with saved_whole(folder) as stage:
            (Path(stage) / "model.safetensors").write_text("half")
            os._exit(9)

    assert exit_code(in_child(killed)) == 9
    (abandoned,) = folder.glob(".saving-*")
    with saved_whole(folder) as stage:
        PreTrainedModel.save_pretrained(models[1], stage)
        assert not abandoned.exists()
        models[0].save_pretrained(folder, **SHARDS)
        assert Path(stage).is_dir()
    assert is_whole(folder, models[1])


@pytest.mark.slow
def test_a_load_waits_for_an_exchange_that_is_under_way(models, folder, monkeypatch):
    SAVES["one file"](models[0], folder)
    replace = os.replace

    def slowly(*paths) -> None:
        replace(*paths)
        (folder / "started").touch()
        time.sleep(0.02)

    def save() -> None:
        os.replace = slowly
        SAVES["shards"](models[1], folder)

    child = in_child(save)
    while not (folder / "started").exists():
        time.sleep(0.001)
    loaded = AttnResForCausalLM.from_pretrained(folder).state_dict()
    assert exit_code(child) == 0
    assert all(torch.equal(loaded[name], tensor) for name, tensor in models[1].state_dict().items())


@pytest.mark.parametrize("do", ["save", "load"])
def test_the_error_of_an_exchange_that_cannot_be_completed_names_the_models_folder(models, folder, monkeypatch, do):
    SAVES["one file"](models[0], folder)
    models[1].save_pretrained(folder / ".saved-whole", **SHARDS)

    remove = os.remove

    def refuse(path: Path) -> None:
        if Path(path).parent == folder:
            raise PermissionError(13, "Permission denied", os.fspath(path))
        remove(path)

    with monkeypatch.context() as patch:
        patch.setattr(os, "remove", refuse)
        with pytest.raises(OSError, match=r"nothing is lost: its files lie in .*\.saved-whole\. Make both writable"):
            AttnResForCausalLM.from_pretrained(folder) if do == "load" else SAVES["one file"](models[0], folder)
    with pytest.raises(OSError, match="is complete now"):
        AutoModelForCausalLM.from_pretrained(folder)
    assert is_whole(folder, models[1])


def test_files_of_the_user_in_the_folder_of_an_exchange_stay(models, folder):
    SAVES["one file"](models[0], folder)
    (folder / ".saved-whole").mkdir()
    (folder / ".saved-whole" / "notes.txt").write_text("mine")
    with pytest.raises(OSError, match=r"\.saved-whole is not a saved model\. Move it away and save again\.$"):
        SAVES["one file"](models[1], folder)
    assert os.listdir(folder / ".saved-whole") == ["notes.txt"]
    shutil.rmtree(folder / ".saved-whole")
    assert is_whole(folder, models[0])


def test_only_the_main_process_replaces_a_save(models, folder):
    SAVES["one file"](models[0], folder)
    models[1].save_pretrained(folder, is_main_process=False, **SHARDS)
    assert is_whole(folder, models[0])


def test_a_variant_replaces_only_its_own_weights(models, folder):
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


@pytest.mark.parametrize("name", [".saving-1", ".saved-whole"])
def test_a_link_in_the_place_of_the_stage_is_removed_and_its_target_stays(models, folder, tmp_path, name):
    models[1].save_pretrained(tmp_path / "precious")
    models[0].save_pretrained(folder)
    (folder / name).symlink_to(tmp_path / "precious")
    models[0].save_pretrained(folder)
    assert is_whole(folder, models[0]) and not (folder / name).is_symlink()
    assert is_whole_alone(tmp_path / "precious", models[1])
