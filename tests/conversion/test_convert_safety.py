"""Whatever is wrong with a source or a target, `attnres convert` says so in one line, and leaves nothing behind."""

import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from .checkpoints import (
    INDEX,
    QUERY,
    change_json,
    change_tensors,
    convert,
    convert_well,
    files_of,
    forget,
    save_tokenizer,
    standard_model,
    tensors_of,
)

WEIGHT = "model.layers.1.self_attn.q_proj.weight"
EXPERT = "model.layers.1.block_sparse_moe.experts.2"
Refusal = Callable[..., str]


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> Path:
    """`llama` in shards, `whole` in one file, `mixtral` in shards; not to be changed."""
    folder = tmp_path_factory.mktemp("models")
    standard_model().save_pretrained(folder / "llama", max_shard_size="20KB")
    standard_model().save_pretrained(folder / "whole")
    model = standard_model("mixtral", num_local_experts=4, num_experts_per_tok=2)
    model.save_pretrained(folder / "mixtral", max_shard_size="20KB")
    return folder


@pytest.fixture
def copy_of(models, tmp_path) -> Callable[[str], Path]:
    """`copy_of(name)`: a copy of a model at `source`, to be damaged."""
    return lambda name: Path(shutil.copytree(models / name, tmp_path / "source"))


@pytest.fixture
def copy(copy_of) -> Path:
    return copy_of("llama")


@pytest.fixture
def refusal(tmp_path) -> Refusal:
    """`refusal(*options)`: the line with which converting `source` fails, having left nothing behind."""

    def run(*options: str) -> str:
        before = sorted(os.listdir(tmp_path))
        error = convert(tmp_path / "source", tmp_path / "result", *options).error
        assert sorted(os.listdir(tmp_path)) == before
        return error

    return run


def file_of(folder: Path, name: str) -> Path:
    return folder / json.loads((folder / INDEX).read_text())["weight_map"][name]


# ---- Weights that are not as they should be


def test_a_missing_shard_is_named(copy, refusal):
    path = file_of(copy, WEIGHT)
    path.unlink()
    assert f"names {path.name}, which is not there" in refusal()


def test_a_tensor_missing_from_its_shard_is_named_with_it(copy, refusal):
    path = file_of(copy, WEIGHT)
    change_tensors(copy, {WEIGHT: None})
    error = refusal()
    assert f"`{WEIGHT}`" in error and path.name in error


@pytest.mark.parametrize("name", ["llama", "whole"])
def test_a_tensor_missing_altogether_is_named(copy_of, refusal, name):
    copy = copy_of(name)
    if name == "llama":
        forget(copy, WEIGHT)
    change_tensors(copy, {WEIGHT: None})
    assert refusal() == f"{copy} is incomplete: it lacks `{WEIGHT}`."


def test_of_many_missing_tensors_some_are_named(copy, refusal):
    change_json(copy / "config.json", num_hidden_layers=5)
    error = refusal()
    assert "`model.layers.3.input_layernorm.weight`" in error and error.endswith(" and 8 more.")


@pytest.mark.parametrize("options", [["--to", "standard"], ["--set-block-size", "2"]], ids=" ".join)
def test_a_missing_attn_res_tensor_is_named(models, tmp_path, refusal, options):
    convert_well(models / "llama", tmp_path / "source", "--no-verify")
    forget(tmp_path / "source", QUERY)
    change_tensors(tmp_path / "source", {QUERY: None})
    assert refusal(*options) == f"{tmp_path / 'source'} is incomplete: it lacks `{QUERY}`."


@pytest.mark.parametrize("keep", [0.0, 0.001, 0.5, 0.9999])
def test_a_truncated_shard_is_named(copy, refusal, keep):
    path = file_of(copy, WEIGHT)
    os.truncate(path, int(path.stat().st_size * keep))
    assert f"{path} is truncated or damaged" in refusal()


def test_so_is_one_that_was_never_fetched(copy, refusal):
    path = file_of(copy, WEIGHT)
    path.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")
    assert f"{path} is truncated or damaged" in refusal()


def test_one_that_shrinks_while_it_is_read_is_named(copy, refusal, monkeypatch):
    path = file_of(copy, WEIGHT)
    check_space = shutil.disk_usage

    def truncate(folder):
        os.truncate(path, path.stat().st_size - 100)
        return check_space(folder)

    monkeypatch.setattr(shutil, "disk_usage", truncate)
    assert f"{path} ends within " in refusal()


@pytest.mark.parametrize("name", ["llama", "whole"])
def test_a_misshapen_tensor_is_named_with_its_file_and_both_shapes(copy_of, refusal, name):
    copy = copy_of(name)
    path = file_of(copy, WEIGHT) if name == "llama" else copy / "model.safetensors"
    change_tensors(copy, {WEIGHT: torch.zeros(32, 31)})
    assert refusal().startswith(f"{path}: `{WEIGHT}` has shape [32, 31], but must be [32, 32].")


@pytest.mark.parametrize(("part", "shape"), [("w1", [48, 32]), ("w2", [32, 48]), ("w3", [48, 32])])
def test_so_is_one_of_an_expert(copy_of, refusal, part, shape):
    copy = copy_of("mixtral")
    path = file_of(copy, f"{EXPERT}.{part}.weight")
    change_tensors(copy, {f"{EXPERT}.{part}.weight": torch.zeros(shape[0], shape[1] - 1)})
    expected = f"{path}: `{EXPERT}.{part}.weight` has shape [{shape[0]}, {shape[1] - 1}], but must be {shape}."
    assert refusal().startswith(expected)


def test_experts_that_are_all_misshapen_are_named_by_their_layer(copy_of, refusal):
    copy = copy_of("mixtral")
    change_json(copy / "config.json", intermediate_size=40)
    assert "model.layers.0" in refusal()


@pytest.mark.parametrize("experts", [[2], [3], [0, 1, 2, 3]], ids=str)
@pytest.mark.parametrize("part", ["w1", "w2"])
def test_tensors_of_experts_that_are_missing_are_named(copy_of, refusal, experts, part):
    copy = copy_of("mixtral")
    names = [f"{EXPERT[:-1]}{expert}.{part}.weight" for expert in experts]
    for name in names:
        forget(copy, name)
    assert refusal().endswith(f"it lacks {', '.join(f'`{name}`' for name in names)}.")


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_values_that_are_no_numbers_are_found(copy, refusal, value, dtype):
    path = file_of(copy, WEIGHT)
    weight = tensors_of(copy)[WEIGHT].to(dtype)
    weight[31, 31] = value
    change_tensors(copy, {WEIGHT: weight})
    for options in (["--no-verify"], ["--no-verify", "--hard-link"]):
        assert refusal(*options).startswith(f"`{WEIGHT}` in {path} holds NaN or infinite values")


def test_so_are_those_of_an_8_bit_float(copy, refusal):
    weight = tensors_of(copy)[WEIGHT].to(torch.float8_e4m3fn)
    weight.view(torch.uint8)[5, 5] = 0x7F
    change_tensors(copy, {WEIGHT: weight})
    assert f"`{WEIGHT}`" in refusal("--no-verify")


def test_a_value_at_the_end_of_a_tensor_larger_than_a_piece_is_found(tmp_path, refusal):
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


def test_an_index_that_leads_elsewhere_is_refused(copy, tmp_path, refusal):
    path = file_of(copy, WEIGHT)
    path.rename(tmp_path / path.name)
    weight_map = json.loads((copy / INDEX).read_text())["weight_map"]
    weight_map = {name: f"../{file}" if file == path.name else file for name, file in weight_map.items()}
    change_json(copy / INDEX, weight_map=weight_map)
    assert f"../{path.name}, which does not lie beside it" in refusal()


def test_a_directory_without_anything_or_without_weights_is_named(copy, tmp_path, refusal):
    for path in copy.glob("model*"):
        path.unlink()
    assert f"{copy} has no weights" in refusal()
    shutil.rmtree(copy)
    copy.mkdir()
    assert f"{copy} has no weights" in refusal()


def test_a_missing_configuration_is_named(copy, refusal):
    (copy / "config.json").unlink()
    assert refusal() == f"{copy} has no config.json."


@pytest.mark.parametrize("content", ["", "{", "[]", "{}", "null"])
def test_a_broken_configuration_is_named(copy, refusal, content):
    (copy / "config.json").write_text(content)
    error = refusal()
    assert str(copy) in error and "config" in error


@pytest.mark.parametrize(
    ("field", "value"),
    [("hidden_size", "x"), ("num_hidden_layers", None), ("hidden_act", "x"), ("num_attention_heads", 0)],
)
def test_a_field_that_cannot_be_is_reported(copy, refusal, field, value):
    change_json(copy / "config.json", **{field: value})
    assert f"{copy / 'config.json'} holds a wrong value" in refusal()


@pytest.mark.parametrize("model_type", [3, "nonsense"])
def test_an_unknown_model_type_is_named(copy, refusal, model_type):
    change_json(copy / "config.json", model_type=model_type)
    assert f"model type `{model_type}`" in refusal()


def test_an_unsupported_model_type_is_named_with_those_that_are_supported(copy, refusal):
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


def test_missing_code_of_a_tokenizer_is_named(copy, refusal):
    save_tokenizer(copy)
    change_json(copy / "tokenizer_config.json", auto_map={"AutoTokenizer": ["tokenization_mine.Mine", None]})
    assert f"{copy / 'tokenization_mine.py'}" in refusal()


# ---- pytorch_model.bin


class Trap:
    """Unpickled, it makes a file."""

    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self):
        return open, (str(self.path), "w")


@pytest.fixture
def pickled(copy_of, tmp_path) -> Callable[..., Path]:
    """`pickled(what, **options)`: `source` with this in place of its weights."""

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
    assert refusal() == f"{path} needs code to be loaded, which may do anything: it is refused."
    torch.load(path, weights_only=False)
    assert (tmp_path / "sprung").exists(), "the trap must work where code is run"


@pytest.mark.parametrize("is_zip", [True, False], ids=["zip", "before PyTorch 1.6"])
@pytest.mark.parametrize("keep", [0.0, 0.005, 0.5, 0.999])
def test_a_truncated_pickle_is_named(pickled, models, refusal, is_zip, keep):
    path = pickled(tensors_of(models / "whole"), _use_new_zipfile_serialization=is_zip)
    os.truncate(path, int(path.stat().st_size * keep))
    assert f"{path} is truncated or damaged" in refusal()


def test_so_is_a_pickle_that_was_never_fetched(pickled, models, refusal):
    path = pickled({})
    path.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")
    assert f"{path} is truncated or damaged (it is not a pickle)" in refusal()


@pytest.mark.parametrize(
    "content", [[1], {"state_dict": {"a": torch.zeros(1)}}, torch.zeros(1)], ids=["list", "nested", "tensor"]
)
def test_a_pickle_of_something_else_is_named(pickled, refusal, content):
    path = pickled(content)
    assert refusal() == f"{path} is not a dictionary of tensors."


# ---- Where the result goes


def test_an_existing_target_is_not_touched(copy, tmp_path, refusal):
    (tmp_path / "result").mkdir()
    (tmp_path / "result" / "thesis.txt").write_text("years of work")
    assert f"{tmp_path / 'result'} exists" in refusal()
    assert "was not written by this command" in refusal("--overwrite")
    (tmp_path / "result" / "config.json").write_text('{"port": 80}')
    assert "was not written by this command" in refusal("--overwrite")
    assert (tmp_path / "result" / "thesis.txt").read_text() == "years of work"


def test_a_file_is_no_target(copy, tmp_path, refusal):
    (tmp_path / "result").write_text("mine")
    assert "exists" in refusal()
    assert "was not written by this command" in refusal("--overwrite")
    assert (tmp_path / "result").read_text() == "mine"
    assert convert(copy, tmp_path / "result" / "in").code == 1


def test_a_model_is_replaced_when_asked(copy, models, tmp_path):
    convert_well(copy, tmp_path / "result", "--block-size", "2", "--no-verify")
    convert_well(models / "whole", tmp_path / "result", "--overwrite", "--no-verify")
    assert json.loads((tmp_path / "result" / "config.json").read_text())["attn_res_block_size"] == 1
    assert len(list((tmp_path / "result").glob("*.safetensors"))) == 2
    assert sorted(os.listdir(tmp_path)) == ["result", "source"]


def test_but_not_by_a_conversion_that_fails(copy, tmp_path, refusal):
    convert_well(copy, tmp_path / "result", "--block-size", "2", "--no-verify")
    before = files_of(tmp_path / "result")
    change_tensors(copy, {"model.norm.weight": torch.full((32,), torch.nan)})
    assert "`model.norm.weight`" in refusal("--overwrite")
    assert files_of(tmp_path / "result") == before


@pytest.mark.parametrize(
    ("source", "target"),
    [
        ("source", "source"),
        ("source", "source/in"),
        ("source", "source/../source"),
        ("source/in", "source"),
        ("source", "link"),
    ],
)
def test_source_and_target_must_lie_apart(copy, tmp_path, source, target):
    (tmp_path / "link").symlink_to(copy)
    shutil.copytree(copy, tmp_path / "in")
    (tmp_path / "in").rename(copy / "in")
    before = files_of(copy)
    error = convert(tmp_path / source, tmp_path / target, "--overwrite").error
    assert "lie in each other" in error
    assert files_of(copy) == before


def test_folders_above_the_target_are_made_and_go_if_it_fails(copy, tmp_path):
    convert_well(copy, tmp_path / "new" / "er" / "result", "--no-verify")
    shutil.rmtree(tmp_path / "new")
    (copy / "config.json").unlink()
    assert convert(copy, tmp_path / "new" / "er" / "result").error
    assert os.listdir(tmp_path) == ["source"]


def test_the_current_folder_and_names_with_brackets_are_taken(copy, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run = convert_well("source", "[/a]", "--no-verify")
    assert run.out.endswith("Written to [/a].\n")
    monkeypatch.chdir(tmp_path / "[")
    assert "exists" in convert("../source", ".").error


def test_a_target_where_nothing_can_be_written_is_reported(copy):
    error = convert(copy, "/proc/result").error
    assert "another process" not in error


# ---- Space


def test_too_little_space_is_noticed_before_anything_is_written(copy, tmp_path, refusal, monkeypatch):
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: usage._replace(free=100_000))
    monkeypatch.setattr("attnres.conversion.convert.copy_shard", None)
    assert "not enough space" in refusal()


@pytest.fixture
def small_disk(tmp_path) -> Iterator[Path]:
    """A file system of 100 kB, of which a model needs more."""
    folder = tmp_path / "disk"
    folder.mkdir()
    if os.system(f"mount -t tmpfs -o size=100k tmpfs '{folder}' 2>/dev/null"):
        pytest.skip("mounting a file system takes more rights")
    yield folder
    os.system(f"umount '{folder}'")


def test_a_full_disk_is_left_as_it_was(models, small_disk, monkeypatch):
    error = convert(models / "llama", small_disk / "result", "--no-verify").error
    assert "not enough space" in error and str(small_disk) in error
    assert os.listdir(small_disk) == []
    usage = shutil.disk_usage(small_disk)
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: usage._replace(free=10**9))  # as if it had been free
    assert "No space left" in convert(models / "llama", small_disk / "result", "--no-verify").error
    assert os.listdir(small_disk) == []


def test_hard_links_need_no_space(copy, tmp_path, monkeypatch):
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: usage._replace(free=1000))
    convert_well(copy, tmp_path / "result", "--hard-link", "--no-verify")


# ---- Usage


@pytest.mark.parametrize(
    "options",
    [
        ["--block-size", "2", "--full"],
        ["--block-size", "2", "--num-blocks", "2"],
        ["--set-block-size", "2", "--full"],
        ["--to", "standard", "--num-blocks", "2"],
        ["--to", "standard", "--scale", "mean"],
        ["--set-block-size", "2", "--scale", "mean"],
        ["--block-size", "0"],
        ["--num-blocks", "-1"],
        ["--set-block-size", "x"],
        ["--scale", "max"],
        ["--to", "nowhere"],
        ["--nonsense"],
    ],
    ids=" ".join,
)
def test_bad_usage_exits_with_2_and_names_the_option(copy, tmp_path, options):
    run = convert(copy, tmp_path / "result", *options)
    assert run.code == 2
    assert [option for option in options if option.startswith("--")][0] in run.err or "No such option" in run.err
    assert os.listdir(tmp_path) == ["source"]


def test_a_source_that_is_a_file_or_not_there_is_named(copy, tmp_path):
    for source in (copy / "config.json", tmp_path / "absent"):
        assert convert(source, tmp_path / "result").error == f"{source} is not a directory."


def test_a_directory_has_no_revisions(copy, refusal):
    assert "Leave out --revision" in refusal("--revision", "main")
