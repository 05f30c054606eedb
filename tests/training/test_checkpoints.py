"""An incomplete or broken checkpoint is refused, with the name of the file."""

import json
import os
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from attnres.training.checkpoints import check_checkpoint

NEEDED = ("model.safetensors", "optimizer.pt", "scheduler.pt", "rng_state.pth", "trainer_state.json")
ARCHIVES = NEEDED[1:4]


@pytest.fixture
def checkpoint(tmp_path) -> Path:
    """Return a checkpoint with the files that `transformers` writes."""
    folder = tmp_path / "checkpoint-4"
    folder.mkdir()
    save_file({"weight": torch.ones(50)}, folder / "model.safetensors")
    for name in ("optimizer.pt", "scheduler.pt", "rng_state.pth"):
        torch.save({"state": torch.ones(50)}, folder / name)
    (folder / "trainer_state.json").write_text(json.dumps({"global_step": 4}))
    return folder


def problem(folder: Path) -> str:
    """Check a checkpoint that must be refused, and return the first part of the message."""
    with pytest.raises(ValueError) as caught:
        check_checkpoint(folder)
    assert "\n" not in str(caught.value)
    assert f"so the run cannot resume from {folder}. Put the file back, or remove that folder" in str(caught.value)
    return str(caught.value).partition(",")[0]


def test_a_whole_checkpoint_is_accepted(checkpoint):
    check_checkpoint(checkpoint)


@pytest.mark.parametrize("name", NEEDED)
def test_a_missing_file_is_named(name, checkpoint):
    (checkpoint / name).unlink()
    assert problem(checkpoint) == f"{checkpoint / name} is missing"


@pytest.mark.parametrize("name", NEEDED)
@pytest.mark.parametrize(
    "damage, message",
    [
        (lambda content: b"", "is empty"),
        (lambda content: content[:-1], "is broken"),
        (lambda content: content[: len(content) // 2], "is broken"),
    ],
    ids=["empty", "a byte short", "half"],
)
def test_a_file_that_is_cut_off_is_named(name: str, damage: Callable[[bytes], bytes], message: str, checkpoint):
    path = checkpoint / name
    path.write_bytes(damage(path.read_bytes()))
    assert problem(checkpoint).startswith(f"{path} {message}")


def test_the_random_state_of_each_process_is_needed(checkpoint):
    (checkpoint / "rng_state.pth").rename(checkpoint / "rng_state_0.pth")
    for number in (1, 2):
        torch.save({}, checkpoint / f"rng_state_{number}.pth")
    check_checkpoint(checkpoint)
    (checkpoint / "rng_state_1.pth").unlink()
    assert problem(checkpoint) == f"{checkpoint / 'rng_state_1.pth'} is missing"


def test_a_missing_shard_of_the_weights_is_named(checkpoint):
    (checkpoint / "model.safetensors").rename(checkpoint / "model-00001-of-00002.safetensors")
    index = {"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}}
    (checkpoint / "model.safetensors.index.json").write_text(json.dumps(index))
    assert problem(checkpoint) == f"{checkpoint / 'model-00002-of-00002.safetensors'} is missing"


def test_the_optimizer_of_an_engine_that_divides_models_may_have_another_name(checkpoint):
    (checkpoint / "optimizer.pt").unlink()
    (checkpoint / "optimizer_0").mkdir()
    check_checkpoint(checkpoint)


@pytest.mark.parametrize("content", ["{}", "[]", "3", '{"global_step": "x"}', '{"global_step": 4, "other": 1}'])
def test_a_trainer_state_without_a_step_is_named(content, checkpoint):
    path = checkpoint / "trainer_state.json"
    path.write_text(content)
    assert problem(checkpoint) == f"{path} is broken (its `global_step` is not a positive number)"


@pytest.mark.parametrize("name", ARCHIVES)
@pytest.mark.parametrize("start", [0, 0.25, 0.5])
def test_a_damaged_file_of_the_right_length_is_named(start, name, checkpoint):
    path = checkpoint / name
    torch.save({"state": torch.ones(5000)}, path)
    content = bytearray(path.read_bytes())
    first, length = int(len(content) * start), len(content) // 4
    content[first : first + length] = bytes(length)
    path.write_bytes(content)
    assert problem(checkpoint).startswith(f"{path} is broken")


@pytest.mark.parametrize("name", ARCHIVES)
def test_an_empty_archive_is_named(name, checkpoint):
    zipfile.ZipFile(checkpoint / name, "w").close()
    assert problem(checkpoint) == f"{checkpoint / name} is broken (it does not hold what training writes there)"


class Hostile:
    def __reduce__(self):
        return os.mkdir, ("ran",)


@pytest.mark.parametrize("name", ARCHIVES)
def test_a_file_that_holds_code_is_named_and_the_code_does_not_run(name, checkpoint, in_tmp_path):
    torch.save({"state": Hostile()}, checkpoint / name)
    assert problem(checkpoint) == f"{checkpoint / name} is broken (it does not hold what training writes there)"
    assert not Path("ran").exists()


def test_a_file_of_weights_that_are_all_zero_is_named(checkpoint):
    path = checkpoint / "model.safetensors"
    save_file({"a": torch.zeros(50), "b": torch.zeros(())}, path)
    assert problem(checkpoint) == f"{path} is broken (it holds nothing but zeros)"
    save_file({"a": torch.zeros(50), "b": torch.ones(()), "c": torch.zeros(0)}, path)
    check_checkpoint(checkpoint)
