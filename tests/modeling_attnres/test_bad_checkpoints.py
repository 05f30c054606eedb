"""A damaged checkpoint is reported by the name of the tensor or the file, and never loaded silently."""

import json
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModel, AutoModelForCausalLM

from attnres import AttnResForCausalLM, AttnResForSequenceClassification, peft_modules_to_save
from attnres.residual_attnres import FamilyWarning, residual_tensors

from ..cases import each_once

QUERY = "model.layers.1.mlp_res_proj.weight"
NORM = "model.layers.2.self_attention_res_norm.weight"
OUTPUT_QUERY = "model.output_attn_res_proj.weight"


@pytest.fixture(scope="module")
def saved(tiny_model, tmp_path_factory) -> Path:
    """Save a good checkpoint in one file, `whole`, and in about ten shards, `sharded`, and return their folder."""
    folder = tmp_path_factory.mktemp("saved")
    tiny_model().save_pretrained(folder / "whole")
    tiny_model().save_pretrained(folder / "sharded", max_shard_size="40KB")
    return folder


@pytest.fixture
def whole(saved, tmp_path) -> Path:
    """Return the folder of a copy of the checkpoint in one file."""
    return Path(shutil.copytree(saved / "whole", tmp_path / "whole"))


@pytest.fixture
def sharded(saved, tmp_path) -> Path:
    """Return the folder of a copy of the checkpoint in shards."""
    return Path(shutil.copytree(saved / "sharded", tmp_path / "sharded"))


@pytest.fixture(params=["whole", "sharded"])
def checkpoint(request) -> Path:
    return request.getfixturevalue(request.param)


@pytest.fixture
def loader(checkpoint) -> type:
    """Return the family's class for the checkpoint in one file, and the Auto class for that in shards."""
    return AttnResForCausalLM if checkpoint.name == "whole" else AutoModelForCausalLM


@pytest.fixture
def change(checkpoint) -> Callable[..., Path]:
    """Return `change`, which returns the checkpoint with the given tensors replaced, or removed if `None`."""

    def edit(changes: dict[str, torch.Tensor | None]) -> Path:
        for path in checkpoint.glob("*.safetensors"):
            tensors = load_file(path)
            for name in changes.keys() & tensors.keys():
                del tensors[name]
                if changes[name] is not None:
                    tensors[name] = changes[name]
            save_file(tensors, path, metadata={"format": "pt"})
        return checkpoint

    return edit


def of_either(name: str, *values: object) -> pytest.MarkDecorator:
    """Parametrize a test with values, in turn on the checkpoint in one file and on that in shards."""
    return pytest.mark.parametrize(
        ("checkpoint", name), each_once(["whole", "sharded"], values), indirect=["checkpoint"]
    )


@of_either("missing", [QUERY], [NORM], [OUTPUT_QUERY], [QUERY, NORM, OUTPUT_QUERY])
def test_missing_tensors_are_named(change, loader, missing):
    folder = change(dict.fromkeys(missing))
    with pytest.raises(ValueError, match="missing: ") as error:
        loader.from_pretrained(folder)
    assert f"missing: {', '.join(sorted(missing))}." in str(error.value)
    assert f"{folder} holds {18 - len(missing)} of the 18 tensors added to its backbone" in str(error.value)


@pytest.mark.parametrize(("name", "is_first"), [(QUERY, True), ("model.layers.2.input_layernorm.weight", False)])
def test_a_tensor_in_two_shards_is_refused(sharded, name, is_first):
    """`transformers` would read it from the last file, whatever the index says."""
    files = sorted(sharded.glob("*.safetensors"))
    owner = next(file for file in files if name in load_file(file))
    other = files[0] if is_first else files[-1]
    assert other != owner
    save_file(load_file(other) | {name: load_file(owner)[name] + 1}, other, metadata={"format": "pt"})
    one, two = sorted((owner.name, other.name))
    with pytest.raises(ValueError, match=rf"{sharded}: `{name}` lies in both {one} and {two}, .* the index does not"):
        AutoModelForCausalLM.from_pretrained(sharded)
    # In folders of their own, both files may have one name.
    index, moved = sharded / "model.safetensors.index.json", {}
    for file in files:
        moved[file.name] = f"{file.stem}/one.safetensors"
        (sharded / file.stem).mkdir()
        file.rename(sharded / moved[file.name])
    content = json.loads(index.read_text())
    content["weight_map"] = {key: moved[value] for key, value in content["weight_map"].items()}
    index.write_text(json.dumps(content))
    one, two = (path.replace(".safetensors", "/one.safetensors") for path in (one, two))
    with pytest.raises(ValueError, match=f"`{name}` lies in both {one} and {two},"):
        AutoModelForCausalLM.from_pretrained(sharded)


def test_a_tensor_in_two_pickles_is_refused(sharded):
    index = sharded / "model.safetensors.index.json"
    text = index.read_text().replace(".safetensors", ".bin")
    for path in sharded.glob("*.safetensors"):
        torch.save(load_file(path) | {QUERY: torch.ones(1, 32)}, path.with_suffix(".bin"))
        path.unlink()
    index.unlink()
    (sharded / "pytorch_model.bin.index.json").write_text(text)
    with pytest.raises(ValueError, match=f"`{QUERY}` lies in both .*bin and .*bin"):
        AutoModelForCausalLM.from_pretrained(sharded)


@pytest.mark.parametrize("head", [AutoModel, AttnResForSequenceClassification])
def test_the_other_heads_name_missing_tensors_too(change, head):
    folder = change({QUERY: None})
    with pytest.raises(ValueError, match="missing: ") as error:
        head.from_pretrained(folder)
    assert QUERY.removeprefix("model.") in str(error.value)


@of_either(
    "changed",
    (QUERY, torch.zeros(1, 31)),
    (QUERY, torch.zeros(2, 32)),
    (QUERY, torch.zeros(32)),
    (NORM, torch.ones(33)),
    (NORM, torch.ones(1, 32)),
    (NORM, torch.ones(1)),
    (OUTPUT_QUERY, torch.zeros(32, 1)),
)
def test_a_misshapen_tensor_is_refused_and_named(change, loader, caplog, changed):
    name, tensor = changed
    folder = change({name: tensor})
    with pytest.raises(RuntimeError) as error:
        loader.from_pretrained(folder)
    assert str(folder) in str(error.value)
    assert f"`{name}` has shape {list(tensor.shape)}, but must be" in str(error.value)
    rows = [line for line in caplog.text.splitlines() if line.startswith(name)]
    assert len(rows) == 1
    assert "MISMATCH" in rows[0]
    assert f"ckpt: {tensor.shape}" in rows[0]


@of_either("changed", (QUERY, torch.nan), (NORM, torch.inf), (OUTPUT_QUERY, -torch.inf), (QUERY, torch.inf))
def test_a_tensor_that_is_not_finite_is_named(change, loader, changed):
    name, value = changed
    tensor = torch.zeros(1, 32) if name != NORM else torch.ones(32)
    tensor.view(-1)[5] = value
    folder = change({name: tensor})
    with pytest.raises(ValueError, match="NaN or infinite") as error:
        loader.from_pretrained(folder)
    assert str(folder) in str(error.value)
    assert f"`{name}`" in str(error.value)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_nan_in_half_precision_is_named(tiny_model, tmp_path, dtype):
    model = tiny_model().to(dtype)
    residual_tensors(model)[QUERY].data[0, 3] = torch.nan
    model.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=QUERY):
        AutoModelForCausalLM.from_pretrained(tmp_path)


@pytest.mark.parametrize(
    "value", [None, torch.full((1, 32), torch.nan), torch.zeros(1, 31)], ids=["missing", "nan", "misshapen"]
)
def test_a_bad_tensor_is_named_when_it_is_offloaded_to_disk(change, loader, tmp_path, caplog, value):
    folder = change({QUERY: value})
    with pytest.raises((ValueError, RuntimeError)) as error:
        loader.from_pretrained(
            folder, device_map="auto", max_memory={"cpu": "40KB"}, offload_folder=tmp_path / "offload"
        )
    assert QUERY in str(error.value) + caplog.text


def truncate(path: Path, size: int) -> Path:
    """Cut a file to its first `size` bytes; cut off `-size` bytes if `size` is negative."""
    content = path.read_bytes()
    path.write_bytes(content[:size])
    assert path.stat().st_size < len(content)
    return path


# The cut is in the header's length, in the header, in the last tensor, after a few tensors.
SIZES = [0, 4, 8, 300, -1, -20_000]


@of_either("size", *SIZES)
def test_a_truncated_file_is_named(checkpoint, loader, size):
    path = truncate(sorted(checkpoint.glob("*.safetensors"))[len(list(checkpoint.glob("*.safetensors"))) // 2], size)
    with pytest.raises(OSError, match="truncated or damaged") as error:
        loader.from_pretrained(checkpoint)
    assert str(path) in str(error.value)


@pytest.mark.parametrize("size", [300, -1])
def test_a_truncated_shard_is_named_when_it_would_be_offloaded_to_disk(sharded, tmp_path, size):
    path = truncate(sorted(sharded.glob("*.safetensors"))[3], size)
    with pytest.raises(OSError, match="truncated or damaged") as error:
        AutoModelForCausalLM.from_pretrained(
            sharded, device_map="auto", max_memory={"cpu": "40KB"}, offload_folder=tmp_path / "offload"
        )
    assert str(path) in str(error.value)


def test_a_truncated_file_in_a_subfolder_is_named(whole, tmp_path):
    path = truncate(whole / "model.safetensors", -1)
    with pytest.raises(OSError, match="truncated or damaged") as error:
        AttnResForCausalLM.from_pretrained(tmp_path, subfolder="whole")
    assert str(path) in str(error.value)


def test_a_missing_shard_is_named(sharded):
    path = sorted(sharded.glob("*.safetensors"))[4]
    path.unlink()
    with pytest.raises(OSError, match=path.name):
        AutoModelForCausalLM.from_pretrained(sharded)


def test_attn_res_tensors_loaded_into_a_standard_model_are_reported_as_unexpected(
    checkpoint, loader, tiny_model, caplog
):
    model, report = loader.from_pretrained(checkpoint, residual_connection="standard", output_loading_info=True)
    assert set(report["unexpected_keys"]) == set(residual_tensors(tiny_model()))
    assert not residual_tensors(model)
    assert "UNEXPECTED" in caplog.text


def test_a_good_checkpoint_is_loaded_without_a_report(change, loader, caplog):
    folder = change({})
    model, report = loader.from_pretrained(folder, output_loading_info=True)
    assert type(model) is AttnResForCausalLM
    assert not report["missing_keys"]
    assert "LOAD REPORT" not in caplog.text


def test_ignore_mismatched_sizes_initialises_a_misshapen_tensor(change, loader):
    folder = change({NORM: torch.full((31,), 2.0)})
    model = loader.from_pretrained(folder, ignore_mismatched_sizes=True)
    assert torch.equal(residual_tensors(model)[NORM], torch.ones(32))


def test_the_base_of_an_adapter_is_checked_too(change, loader, tmp_path):
    folder = change({})
    model = AttnResForCausalLM.from_pretrained(folder)
    adapters = LoraConfig(target_modules=["o_proj"], modules_to_save=peft_modules_to_save(model))
    get_peft_model(model, adapters).save_pretrained(tmp_path / "adapter")
    with warnings.catch_warnings():
        warnings.simplefilter("error", FamilyWarning)
        assert [*loader.from_pretrained(tmp_path / "adapter").peft_config] == ["default"]
    path = tmp_path / "adapter/adapter_model.safetensors"
    tensors = load_file(path)
    save_file({name: tensor[:, :7].contiguous() for name, tensor in tensors.items() if "lora_A" in name}, path)
    with pytest.raises(RuntimeError, match=rf"{path.parent}: `.*lora_A.*` has shape \[8, 7\], but must be \[8, 32\]"):
        loader.from_pretrained(tmp_path / "adapter")
    save_file(tensors, path)
    change({QUERY: None})
    with pytest.raises(ValueError, match=f"{folder} holds 17 of the 18 tensors .*missing: {QUERY}"):
        loader.from_pretrained(tmp_path / "adapter")
    change({"model.norm.weight": torch.zeros(7)})
    with pytest.raises(RuntimeError, match=rf"{folder}: `model\.norm\.weight` has shape \[7\], but must be \[32\]"):
        loader.from_pretrained(tmp_path / "adapter")
