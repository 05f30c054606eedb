"""An incomplete or broken checkpoint is refused, with the name of the file."""

import json
import os
import pickle
import re
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file

from attnres.training.resuming import check_best, check_checkpoint, check_weights

# What training writes into files of `torch.save`.
CONTENT = {
    "optimizer.pt": {"state": {}, "param_groups": []},
    "scheduler.pt": {"last_epoch": 4, "_step_count": 5},
    "rng_state.pth": {"python": (), "numpy": (), "cpu": torch.ones(50)},
}
ARCHIVES = [*CONTENT]
NEEDED = ("model.safetensors", *ARCHIVES, "trainer_state.json")


@pytest.fixture
def checkpoint(tmp_path) -> Path:
    """Return a checkpoint with the files that `transformers` writes."""
    folder = tmp_path / "checkpoint-4"
    folder.mkdir()
    save_file({"weight": torch.ones(50)}, folder / "model.safetensors")
    for name, content in CONTENT.items():
        torch.save(content, folder / name)
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
        torch.save(CONTENT["rng_state.pth"], checkpoint / f"rng_state_{number}.pth")
    check_checkpoint(checkpoint)
    (checkpoint / "rng_state_1.pth").unlink()
    assert problem(checkpoint) == f"{checkpoint / 'rng_state_1.pth'} is missing"
    (checkpoint / "rng_state_2.pth").unlink()  # one process alone has another name
    assert problem(checkpoint) == f"{checkpoint / 'rng_state_1.pth'} is missing"


SHARDS = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
INDEX = "model.safetensors.index.json"


@pytest.fixture
def sharded(checkpoint) -> Path:
    """Return a checkpoint whose weights are in two files with an index."""
    (checkpoint / "model.safetensors").unlink()
    for name, shard in zip("ab", SHARDS):
        save_file({name: torch.ones(50)}, checkpoint / shard)
    (checkpoint / INDEX).write_text(json.dumps({"weight_map": dict(zip("ab", SHARDS))}))
    check_checkpoint(checkpoint)
    return checkpoint


@pytest.mark.parametrize("name", [SHARDS[1], INDEX])
def test_a_missing_shard_or_index_of_the_weights_is_named(name, sharded):
    (sharded / name).unlink()
    assert problem(sharded) == f"{sharded / name} is missing"


@pytest.mark.parametrize(
    "content, message",
    [
        ([], "it has no `weight_map` of files"),
        ({"metadata": {}}, "it has no `weight_map` of files"),
        ({"weight_map": {"a": 1}}, "it has no `weight_map` of files"),
        ({"weight_map": {"a": SHARDS[0]}}, f"it has b in None, not in {SHARDS[1]}"),
        ({"weight_map": {"a": SHARDS[0], "b": SHARDS[0]}}, f"it has b in {SHARDS[0]}, not in {SHARDS[1]}"),
        ({"weight_map": {"a": SHARDS[0], "b": SHARDS[1], "c": SHARDS[1]}}, f"it has c in {SHARDS[1]}, not in None"),
    ],
)
def test_an_index_that_is_not_that_of_the_weights_is_named(content, message, sharded):
    (sharded / INDEX).write_text(json.dumps(content))
    with pytest.raises(ValueError, match=re.escape(f"{sharded / INDEX} is broken ({message}), so the run cannot")):
        check_checkpoint(sharded)


def test_a_missing_part_of_sharded_weights_is_named(checkpoint):
    (checkpoint / "model.safetensors").rename(checkpoint / "shard-00001-model-00001-of-00002.safetensors")
    for number in (0, 1):
        torch.save(CONTENT["rng_state.pth"], checkpoint / f"rng_state_{number}.pth")
    (checkpoint / "rng_state.pth").unlink()
    assert problem(checkpoint) == f"{checkpoint}/shard-00002-model-*.safetensors is missing"


@pytest.fixture(params=["optimizer", "optimizer_0"])
def parts(request, checkpoint) -> Path:
    """Return the folder of an optimizer in parts, by the name of `transformers` or of accelerate's FSDP."""
    (checkpoint / "optimizer.pt").unlink()
    state = {"optimizer": {"weight": torch.arange(500.0), "layout": torch.bfloat16, "step": 3}}
    dcp.save(state, checkpoint_id=checkpoint / request.param, no_dist=True)
    check_checkpoint(checkpoint)
    return checkpoint / request.param


PART = "__0_0.distcp"


@pytest.mark.parametrize("name", [PART, ".metadata"])
def test_a_missing_part_of_an_optimizer_is_named(name, parts):
    (parts / name).unlink()
    assert problem(parts.parent) == f"{parts / name} is missing"


@pytest.mark.parametrize("name", [PART, ".metadata"])
@pytest.mark.parametrize(
    "damage",
    [
        lambda content: content[: len(content) // 2],
        lambda content: bytes(len(content)),
        lambda content: content[:400] + bytes(b ^ 255 for b in content[400:464]) + content[464:],
    ],
    ids=["half", "zeros", "flipped"],
)
def test_a_damaged_part_of_an_optimizer_is_named(name, damage, parts):
    (parts / name).write_bytes(damage((parts / name).read_bytes()))
    assert problem(parts.parent).startswith(f"{parts / name} is broken")


@pytest.mark.parametrize("content", [pickle.dumps([]), pickle.dumps(os.system), b"cos\nsystem\n(S'mkdir ran'\ntR."])
def test_a_table_of_contents_with_other_objects_is_named_and_no_code_runs(content, parts, in_tmp_path):
    (parts / ".metadata").write_bytes(content)
    assert problem(parts.parent).startswith(f"{parts / '.metadata'} is broken")
    assert not Path("ran").exists()


@pytest.mark.parametrize("name", ARCHIVES)
def test_a_file_of_another_program_is_named(name, checkpoint):
    torch.save({"a": 1}, checkpoint / name)
    assert problem(checkpoint) == f"{checkpoint / name} is broken (it does not hold what training writes there)"


def test_weights_that_are_not_those_of_the_model_are_named(tiny_model, tmp_path):
    """`Trainer` would go on with the tensors that the run began with, or show a traceback."""
    model = tiny_model(tie_word_embeddings=True)
    model.save_pretrained(tmp_path, save_original_format=False)
    check_weights(model, tmp_path)
    path, name = tmp_path / "model.safetensors", "model.layers.1.mlp.gate.weight"
    tensors = load_file(path)
    save_file({key: tensors[key] for key in tensors if key != name}, path)
    with pytest.raises(ValueError, match=re.escape(f"{path} lacks {name}, so the run cannot resume from {tmp_path}")):
        check_weights(model, tmp_path)
    save_file(tensors | {name: tensors[name][:, :5].clone()}, path)
    with pytest.raises(ValueError, match=re.escape(f"{path} has {name} of size [8, 5], but the model has [8, 32]")):
        check_weights(model, tmp_path)


def test_the_best_checkpoint_must_be_there_to_resume(checkpoint):
    state = checkpoint / "trainer_state.json"
    state.write_text(json.dumps({"global_step": 4, "best_global_step": 4}))
    check_best(checkpoint)
    state.write_text(json.dumps({"global_step": 4, "best_global_step": 2}))
    with pytest.raises(ValueError, match=r"checkpoint-2 is missing, which has the lowest held-out loss so far"):
        check_best(checkpoint)
    shutil.copytree(checkpoint, checkpoint.with_name("checkpoint-2"))
    check_best(checkpoint)


@pytest.mark.parametrize("content", ["{}", "[]", "3", '{"global_step": "x"}', '{"global_step": 4, "other": 1}'])
def test_a_trainer_state_without_a_step_is_named(content, checkpoint):
    path = checkpoint / "trainer_state.json"
    path.write_text(content)
    assert problem(checkpoint) == f"{path} is broken (its `global_step` is not a positive number)"


@pytest.mark.parametrize("name", ARCHIVES)
@pytest.mark.parametrize("start", [0, 0.25, 0.5])
def test_a_damaged_file_of_the_right_length_is_named(start, name, checkpoint):
    path = checkpoint / name
    torch.save(CONTENT[name] | {"more": torch.ones(5000)}, path)
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
    torch.save(CONTENT[name] | {"more": Hostile()}, checkpoint / name)
    assert problem(checkpoint) == f"{checkpoint / name} is broken (it does not hold what training writes there)"
    assert not Path("ran").exists()


def test_a_file_of_weights_that_are_all_zero_is_named(checkpoint):
    path = checkpoint / "model.safetensors"
    save_file({"a": torch.zeros(50), "b": torch.zeros(())}, path)
    assert problem(checkpoint) == f"{path} is broken (it holds nothing but zeros)"
    save_file({"a": torch.zeros(50), "b": torch.ones(()), "c": torch.zeros(0)}, path)
    check_checkpoint(checkpoint)
