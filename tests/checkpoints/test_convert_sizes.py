"""Numbers in a source that claim a huge model cost neither memory nor time: they are compared with the files first."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from ..conversion.checkpoints import change_json, standard_model, tensors_of

pytestmark = pytest.mark.slow  # every case runs in one process, with limits on memory and time

FIELDS = {
    "layers": ("llama", "num_hidden_layers", 10**9),
    "layers of a listing backbone": ("qwen2", "num_hidden_layers", 10**9),
    "hidden size": ("llama", "hidden_size", 2 * 10**8),
    "vocabulary": ("llama", "vocab_size", 10**12),
    "intermediate size": ("llama", "intermediate_size", 10**12),
    "head size": ("llama", "head_dim", 10**12),
    "heads": ("llama", "num_attention_heads", 10**12),
    "experts": ("mixtral", "num_local_experts", 10**12),
    "labels": ("llama", "num_labels", 10**9),
}


@pytest.fixture(scope="module")
def sources(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("sizes")
    standard_model().save_pretrained(folder / "sound")
    for name, (model_type, field, value) in FIELDS.items():
        standard_model(model_type).save_pretrained(folder / name)
        change_json(folder / name / "config.json", "layer_types", **{field: value})
    standard_model().save_pretrained(folder / "layer types")
    # The file is small enough to be read, but the weights have three layers.
    change_json(folder / "layer types" / "config.json", layer_types=["full_attention"] * 10**6)

    shutil.copytree(folder / "sound", folder / "many tiny layers")
    tensors = load_file(folder / "sound" / "model.safetensors")
    tensors |= {f"model.layers.{i}.x": torch.zeros(1) for i in range(3, 20_000)}
    save_file(tensors, folder / "many tiny layers" / "model.safetensors", {"format": "pt"})
    change_json(folder / "many tiny layers" / "config.json", num_hidden_layers=20_000)

    mixtral = standard_model("mixtral", num_local_experts=4, num_experts_per_tok=2)
    mixtral.save_pretrained(folder / "number of an expert")
    path = folder / "number of an expert" / "model.safetensors"
    tensors = load_file(path)
    name = "model.layers.1.block_sparse_moe.experts.3.w1.weight"
    tensors[name.replace(".3.", ".50000000.")] = tensors.pop(name)
    save_file(tensors, path, {"format": "pt"})

    base = torch.zeros(10**6)
    for name, content in {
        "stride of zero": {"model.norm.weight": torch.ones(1).expand(10**10)},
        "overlapping": {f"model.layers.{i}.x": base[i:] for i in range(2000)},
    }.items():
        shutil.copytree(folder / "sound", folder / name)
        state = tensors_of(folder / name) | content
        (folder / name / "model.safetensors").unlink()
        torch.save(state, folder / name / "pytorch_model.bin")
    return folder


@pytest.fixture(scope="module")
def seen(sources) -> dict:
    script = Path(__file__).with_name("sizes_session.py")
    done = subprocess.run([sys.executable, script, sources], capture_output=True, text=True, timeout=500)
    assert (sources / "seen.json").exists(), done.stderr[-4000:]
    return json.loads((sources / "seen.json").read_text())


def error_of(seen: dict, name: str) -> str:
    """Return the one line that refuses a source, and assert that it comes within the limits."""
    assert name in seen, "the process ended at an earlier case"
    run = seen[name]
    assert run["code"] == 1, run
    assert len(run["error"].strip().splitlines()) == 1, run
    return run["error"]


def test_a_sound_model_is_converted_within_the_limits(seen):
    assert seen["sound"]["code"] == 0


@pytest.mark.parametrize("name", FIELDS)
def test_a_number_that_is_too_large_for_the_weights_is_named(seen, sources, name):
    _, field, value = FIELDS[name]
    error = error_of(seen, name)
    assert f"{sources / name / 'config.json'}: `{field}` is {value:,}, but" in error


def test_a_list_that_is_longer_than_the_number_of_layers_is_named(seen, sources):
    assert str(sources / "layer types" / "config.json") in error_of(seen, "layer types")


def test_layers_of_one_tensor_do_not_count(seen):
    assert "`num_hidden_layers` is 20,000, but" in error_of(seen, "many tiny layers")


def test_a_huge_number_of_one_expert_is_reported_as_missing_experts(seen):
    error = error_of(seen, "number of an expert")
    assert "it lacks `model.layers.0.block_sparse_moe.experts.4.w1.weight`" in error and "more" in error


@pytest.mark.parametrize("name", ["stride of zero", "overlapping"])
def test_tensors_of_a_pickle_that_share_bytes_are_counted_in_full(seen, name):
    assert "bytes, but its tensors would have" in error_of(seen, name)
