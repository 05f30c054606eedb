"""If a source is damaged, `attnres convert` names file and tensor in one line, and leaves nothing behind."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from .checkpoints import (
    INDEX,
    QUERY,
    change_json,
    change_tensors,
    convert_well,
    forget,
    save_tokenizer,
    standard_model,
    tensors_of,
)

WEIGHT = "model.layers.1.self_attn.q_proj.weight"
EXPERT = "model.layers.1.block_sparse_moe.experts.2"
Refusal = Callable[..., str]


def file_of(folder: Path, name: str) -> Path:
    return folder / json.loads((folder / INDEX).read_text())["weight_map"][name]


# ---- Damaged weights


def test_a_missing_shard_is_named(copy, refusal):
    path = file_of(copy, WEIGHT)
    path.unlink()
    assert f"names {path.name}, which is not there" in refusal()


def test_a_save_that_was_killed_before_its_last_files_is_completed_and_converted(copy, tmp_path):
    files = {path.name: path.read_bytes() for path in copy.iterdir() if path.is_file()}
    (copy / ".saved-whole").mkdir()
    for path in (file_of(copy, WEIGHT), copy / INDEX):
        path.rename(copy / ".saved-whole" / path.name)
    convert_well(copy, tmp_path / "result")
    assert {path.name: path.read_bytes() for path in copy.iterdir()} == files


def test_a_tensor_missing_from_its_shard_is_named_with_the_file(copy, refusal):
    path = file_of(copy, WEIGHT)
    change_tensors(copy, {WEIGHT: None})
    error = refusal()
    assert f"`{WEIGHT}`" in error and path.name in error


@pytest.mark.parametrize("name", ["llama", "whole"])
def test_a_tensor_missing_from_index_and_files_is_named(copy_of, refusal, name):
    copy = copy_of(name)
    if name == "llama":
        forget(copy, WEIGHT)
    change_tensors(copy, {WEIGHT: None})
    assert refusal() == f"{copy} is incomplete: it lacks `{WEIGHT}`."


def test_only_the_first_of_many_missing_tensors_are_named(copy, refusal):
    change_json(copy / "config.json", num_hidden_layers=5)
    error = refusal()
    assert "`model.layers.3.input_layernorm.weight`" in error and error.endswith(" and 8 more.")


@pytest.mark.parametrize("options", [["--to", "standard"], ["--set-block-size", "2"]], ids=" ".join)
def test_a_missing_attn_res_tensor_is_named(models, tmp_path, refusal, options):
    convert_well(models / "llama", tmp_path / "source", "--no-verify")
    forget(tmp_path / "source", QUERY)
    change_tensors(tmp_path / "source", {QUERY: None})
    assert refusal(*options) == f"{tmp_path / 'source'} is incomplete: it lacks `{QUERY}`."


def test_a_tensor_in_two_shards_is_named(copy, refusal):
    owner = file_of(copy, WEIGHT)
    other = next(path for path in sorted(copy.glob("*.safetensors"), reverse=True) if path != owner)
    save_file(load_file(other) | {WEIGHT: torch.ones(2)}, other, {"format": "pt"})
    one, two = sorted((owner.name, other.name))
    error = refusal()
    assert f"`{WEIGHT}` lies in both {one} and {two}" in error and f"(in {copy})" in error


def test_a_header_over_the_limit_of_the_format_is_reported_with_its_file(copy, refusal):
    path = file_of(copy, WEIGHT)
    with path.open("r+b") as file:
        file.write((200 * 10**6).to_bytes(8, "little"))
        file.truncate(300 * 10**6)
    error = refusal()
    assert f"{path} is truncated or damaged" in error and "header too large" in error


def test_a_header_that_is_only_large_is_read(copy, tmp_path):
    path = file_of(copy, WEIGHT)
    save_file(load_file(path), path, {"format": "pt", "note": "x" * (26 * 10**6)})
    convert_well(copy, tmp_path / "result", "--no-verify")


@pytest.mark.parametrize("keep", [0.0, 0.001, 0.5, 0.9999])
def test_a_truncated_shard_is_named(copy, refusal, keep):
    path = file_of(copy, WEIGHT)
    os.truncate(path, int(path.stat().st_size * keep))
    assert f"{path} is truncated or damaged" in refusal()


def test_a_shard_that_git_lfs_never_fetched_is_named(copy, refusal):
    path = file_of(copy, WEIGHT)
    path.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")
    assert f"{path} is truncated or damaged" in refusal()


def test_a_shard_that_shrinks_while_it_is_read_is_named(copy, refusal, monkeypatch):
    path = file_of(copy, WEIGHT)
    disk_usage, measured = shutil.disk_usage, []

    def truncate(folder):
        measured.append(folder)
        if len(measured) == 2:  # the first time is before the headers are read
            os.truncate(path, path.stat().st_size - 100)
        return disk_usage(folder)

    monkeypatch.setattr(shutil, "disk_usage", truncate)
    assert f"{path} ends within " in refusal()


@pytest.mark.parametrize("name", ["llama", "whole"])
def test_a_misshapen_tensor_is_named_with_its_file_and_both_shapes(copy_of, refusal, name):
    copy = copy_of(name)
    path = file_of(copy, WEIGHT) if name == "llama" else copy / "model.safetensors"
    change_tensors(copy, {WEIGHT: torch.zeros(32, 31)})
    assert refusal().startswith(f"{path}: `{WEIGHT}` has shape [32, 31], but must be [32, 32].")


@pytest.mark.parametrize(("part", "shape"), [("w1", [48, 32]), ("w2", [32, 48]), ("w3", [48, 32])])
def test_a_misshapen_tensor_of_an_expert_is_named_with_its_file_and_both_shapes(copy_of, refusal, part, shape):
    copy = copy_of("mixtral")
    path = file_of(copy, f"{EXPERT}.{part}.weight")
    change_tensors(copy, {f"{EXPERT}.{part}.weight": torch.zeros(shape[0], shape[1] - 1)})
    expected = f"{path}: `{EXPERT}.{part}.weight` has shape [{shape[0]}, {shape[1] - 1}], but must be {shape}."
    assert refusal().startswith(expected)


def test_experts_that_are_all_misshapen_are_named_by_their_layer(copy_of, refusal):
    copy = copy_of("mixtral")
    change_json(copy / "config.json", intermediate_size=40)
    assert "model.layers.0" in refusal()


@pytest.mark.parametrize(
    ("experts", "part"), [([2], "w1"), ([3], "w2"), ([0, 1, 2, 3], "w1"), ([0, 1, 2, 3], "w2")], ids=str
)
def test_tensors_of_experts_that_are_missing_are_named(copy_of, refusal, experts, part):
    copy = copy_of("mixtral")
    names = [f"{EXPERT[:-1]}{expert}.{part}.weight" for expert in experts]
    for name in names:
        forget(copy, name)
    assert refusal().endswith(f"it lacks {', '.join(f'`{name}`' for name in names)}.")


@pytest.mark.parametrize(
    ("dtype", "value"),
    [(torch.float32, torch.nan), (torch.bfloat16, torch.inf), (torch.float16, -torch.inf)],
    ids=str,
)
def test_values_that_are_not_finite_are_refused(copy, refusal, value, dtype):
    path = file_of(copy, WEIGHT)
    weight = tensors_of(copy)[WEIGHT].to(dtype)
    weight[31, 31] = value
    change_tensors(copy, {WEIGHT: weight})
    for options in (["--no-verify"], ["--no-verify", "--hard-link"]):
        assert refusal(*options).startswith(f"`{WEIGHT}` in {path} holds NaN or infinite values")


def test_nan_in_an_8_bit_float_is_refused(copy, refusal):
    weight = tensors_of(copy)[WEIGHT].to(torch.float8_e4m3fn)
    weight.view(torch.uint8)[5, 5] = 0x7F
    change_tensors(copy, {WEIGHT: weight})
    assert f"`{WEIGHT}`" in refusal("--no-verify")


def test_nan_at_the_end_of_a_tensor_larger_than_a_piece_is_refused(tmp_path, refusal):
    model = standard_model(vocab_size=9000)  # 1.15 MB
    model.lm_head.weight.data[-1, -1] = torch.nan
    model.save_pretrained(tmp_path / "source")
    assert "`lm_head.weight`" in refusal("--no-verify")


# ---- Other files


@pytest.mark.parametrize(
    "content", ["", "{", "[1]", "{}", '{"weight_map": [1]}', '{"weight_map": {"a": 1}}', "\udcff\udcfe"], ids=repr
)
def test_a_broken_index_is_named(copy, refusal, content):
    (copy / INDEX).write_text(content, errors="surrogateescape")
    assert f"{copy / INDEX} is not an index of weights" in refusal()


def test_an_index_that_leads_out_of_the_directory_is_refused(copy, tmp_path, refusal):
    path = file_of(copy, WEIGHT)
    path.rename(tmp_path / path.name)
    weight_map = json.loads((copy / INDEX).read_text())["weight_map"]
    weight_map = {name: f"../{file}" if file == path.name else file for name, file in weight_map.items()}
    change_json(copy / INDEX, weight_map=weight_map)
    assert f"../{path.name}, which does not lie beside it" in refusal()


@pytest.mark.parametrize("name", ["", ".", "..", "model/", "/etc/passwd", "sub/model.safetensors"])
def test_an_index_that_names_no_file_beside_it_is_refused(copy, refusal, name):
    weight_map = json.loads((copy / INDEX).read_text())["weight_map"]
    change_json(copy / INDEX, weight_map=weight_map | {WEIGHT: name})
    error = refusal()
    assert str(copy / INDEX) in error and f"names {name or chr(34) * 2}, which does not lie beside it" in error


@pytest.mark.parametrize("name", ["config.json", "residual_attnres.py", "model.bin", "folder.safetensors"])
def test_an_index_that_names_another_kind_of_file_is_refused(copy, refusal, name):
    path = file_of(copy, WEIGHT)
    if name.startswith("folder"):
        (copy / name).mkdir()
    elif name != "config.json":
        path.rename(copy / name)
    weight_map = json.loads((copy / INDEX).read_text())["weight_map"]
    weight_map = {tensor: name if file == path.name else file for tensor, file in weight_map.items()}
    change_json(copy / INDEX, weight_map=weight_map)
    error = refusal()
    assert str(copy / INDEX) in error and f"names {name}, which is not a .safetensors file" in error


def test_a_shard_that_is_text_is_named(copy, refusal):
    path = file_of(copy, WEIGHT)
    path.write_text("no tensors here")
    assert f"{path} is truncated or damaged" in refusal()


def test_an_index_of_pickles_that_names_safetensors_is_refused(copy_of, refusal):
    copy = copy_of("whole")
    (copy / "model.safetensors").rename(copy / "pytorch_model-1.safetensors")
    index = copy / "pytorch_model.bin.index.json"
    index.write_text(json.dumps({"weight_map": {WEIGHT: "pytorch_model-1.safetensors"}}))
    assert f"{index} names pytorch_model-1.safetensors, which is not a .bin file" in refusal()


def test_a_directory_without_weights_is_named(copy, tmp_path, refusal):
    for path in copy.glob("model*"):
        path.unlink()
    assert f"{copy} has no weights" in refusal()


def test_a_missing_configuration_is_named(copy, refusal):
    (copy / "config.json").unlink()
    message = f"{copy} has no config.json: give the directory of a model."
    assert refusal() == message
    shutil.rmtree(copy)
    copy.mkdir()
    assert refusal() == message


@pytest.mark.parametrize("content", ["", "{", "[]", "{}", "null"])
def test_a_broken_configuration_is_named(copy, refusal, content):
    (copy / "config.json").write_text(content)
    error = refusal()
    assert str(copy) in error and "config" in error


@pytest.mark.parametrize(
    ("field", "value"),
    [("hidden_size", "x"), ("num_hidden_layers", None), ("hidden_act", "x"), ("num_attention_heads", 0)],
)
def test_a_field_with_an_impossible_value_is_reported(copy, refusal, field, value):
    change_json(copy / "config.json", **{field: value})
    error = refusal()
    assert f"(in {copy / 'config.json'})" in error and "unforeseen" not in error


@pytest.mark.parametrize("model_type", [3, "nonsense"])
def test_an_unknown_model_type_is_named(copy, refusal, model_type):
    change_json(copy / "config.json", model_type=model_type)
    assert f"{copy / 'config.json'} cannot be used: transformers has no model type {model_type!r}" in refusal()


def test_an_unsupported_model_type_is_named_with_the_supported_ones(copy, refusal):
    change_json(copy / "config.json", model_type="gpt2")
    error = refusal()
    assert "'gpt2'" in error and "'llama'" in error and "add_backbone" in error


@pytest.mark.parametrize(
    ("file", "content"), [("tokenizer.json", "{"), ("tokenizer.json", "{}"), ("tokenizer_config.json", "[]")]
)
def test_a_broken_tokenizer_is_named(copy, refusal, file, content):
    save_tokenizer(copy)
    (copy / file).write_text(content)
    assert f"{copy / file} is damaged" in refusal()


# ---- pytorch_model.bin


class Trap:
    """An object that makes a file when it is unpickled."""

    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self):
        return open, (str(self.path), "w")


@pytest.fixture
def pickled(copy_of, tmp_path) -> Callable[..., Path]:
    """Return `pickled(content, **options)`, which puts a pickle in place of the weights of `source`."""

    def save(content: object, **options) -> Path:
        copy = copy_of("whole")
        (copy / "model.safetensors").unlink()
        torch.save(content, copy / "pytorch_model.bin", **options)
        return copy / "pytorch_model.bin"

    return save


@pytest.mark.parametrize("is_zip", [True, False], ids=["zip", "before PyTorch 1.6"])
def test_code_in_a_pickle_is_not_run(pickled, models, tmp_path, refusal, is_zip):
    trapped = tensors_of(models / "whole") | {"trap": Trap(tmp_path / "sprung")}
    path = pickled(trapped, _use_new_zipfile_serialization=is_zip)
    assert refusal() == f"{path} runs code when it is loaded, so it is refused. Use weights in safetensors."
    torch.load(path, weights_only=False)
    assert (tmp_path / "sprung").exists(), "the trap must work if the code is run"


@pytest.mark.parametrize("is_zip", [True, False], ids=["zip", "before PyTorch 1.6"])
@pytest.mark.parametrize("keep", [0.0, 0.005, 0.5, 0.999])
def test_a_truncated_pickle_is_named(pickled, models, refusal, is_zip, keep):
    path = pickled(tensors_of(models / "whole"), _use_new_zipfile_serialization=is_zip)
    os.truncate(path, int(path.stat().st_size * keep))
    assert f"{path} is truncated or damaged" in refusal()


def test_a_pickle_that_git_lfs_never_fetched_is_named(pickled, models, refusal):
    path = pickled({})
    path.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")
    assert f"{path} is truncated or damaged (it is not a pickle)" in refusal()


@pytest.mark.parametrize(
    "content", [[1], {"state_dict": {"a": torch.zeros(1)}}, torch.zeros(1)], ids=["list", "nested", "tensor"]
)
def test_a_pickle_of_something_other_than_tensors_is_named(pickled, refusal, content):
    path = pickled(content)
    assert refusal() == f"{path} is not a dictionary of tensors."


@pytest.mark.parametrize(
    ("key", "tensor"),
    [("extra", torch.eye(3).to_sparse()), ("extra", torch.zeros(3, device="meta")), (3, torch.zeros(1))],
    ids=["sparse", "without values", "key that is not a text"],
)
def test_a_pickle_that_only_a_library_refuses_is_named(pickled, models, refusal, key, tensor):
    path = pickled(tensors_of(models / "whole") | {key: tensor})
    assert f"(in {path})" in refusal()


def test_a_dtype_that_safetensors_does_not_support_is_reported(pickled, models, refusal):
    path = pickled(tensors_of(models / "whole") | {"extra.weight": torch.zeros(2, dtype=torch.complex128)})
    error = refusal()
    assert "`extra.weight`" in error and str(path) in error and "complex128" in error
