"""`attnres convert` writes its target whole or not at all, whatever exists there and whenever it is stopped."""

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from attnres.conversion.convert import ADDED_SHARD

from .. import forks
from .checkpoints import (
    change_tensors,
    convert,
    convert_well,
    files_of,
    save_tokenizer,
    standard_model,
)

# ---- Where the result goes


def test_an_existing_target_is_not_touched(copy, tmp_path, refusal):
    (tmp_path / "result").mkdir()
    (tmp_path / "result" / "thesis.txt").write_text("years of work")
    assert f"{tmp_path / 'result'} exists" in refusal()
    assert "does not hold a model" in refusal("--overwrite")
    (tmp_path / "result" / "config.json").write_text('{"port": 80}')
    assert 'it has no config.json with "model_type"' in refusal("--overwrite")
    (tmp_path / "result" / "config.json").write_text('{"model_type": "llama"}')
    assert "holds thesis.txt, which is not part of a model. Move it away" in refusal("--overwrite")
    assert (tmp_path / "result" / "thesis.txt").read_text() == "years of work"


def test_a_target_that_is_a_file_is_refused(copy, tmp_path, refusal):
    (tmp_path / "result").write_text("mine")
    assert "exists" in refusal()
    assert "does not hold a model" in refusal("--overwrite")
    assert (tmp_path / "result").read_text() == "mine"
    assert convert(copy, tmp_path / "result" / "in").code == 1


def test_a_model_is_replaced_on_request(copy, models, tmp_path):
    convert_well(copy, tmp_path / "result", "--block-size", "2", "--no-verify")
    convert_well(models / "whole", tmp_path / "result", "--overwrite", "--no-verify")
    assert json.loads((tmp_path / "result" / "config.json").read_text())["attn_res_block_size"] == 1
    assert len(list((tmp_path / "result").glob("*.safetensors"))) == 2
    assert sorted(os.listdir(tmp_path)) == ["result", "source"]


def test_a_model_among_other_files_is_not_replaced(copy, tmp_path, refusal):
    """The folder of a training run holds checkpoints; a repository has its history; a person writes notes."""
    result = tmp_path / "result"
    shutil.copytree(copy, result)
    for folder in (".git", "checkpoint-500"):
        shutil.copytree(copy, result / folder)
    for name in ("notes.md", "optimizer.safetensors", "train.py", "model.fp16.safetensors"):
        (result / name).write_text("mine")
    before = files_of(result)
    assert "holds .git, checkpoint-500, model.fp16.safetensors and 3 more, which are not part" in refusal("--overwrite")
    assert files_of(result) == before


# Files that `convert` copies from a source, beside the tokenizer of `save_pretrained`.
_SIDE_FILES = (
    *("vocab-large.txt", "merges.txt", "spiece.model", "qwen.tiktoken", "tekken.json", "tokenizer.model.v3"),
    *("chat_template.jinja", "additional_chat_templates/tool_use.jinja", "LICENSE", "NOTICE.md"),
)


@pytest.mark.parametrize("source", ["whole", "sharded"])
def test_a_conversion_of_a_model_with_all_kinds_of_files_is_replaced_on_request(copy, models, tmp_path, source):
    folder = tmp_path / "all"
    shutil.copytree(copy if source == "sharded" else models / "whole", folder)
    if source == "sharded":  # an index may name its files as it likes
        index = folder / "model.safetensors.index.json"
        shards = sorted({*json.loads(index.read_text())["weight_map"].values()})
        index.write_text(index.read_text().replace(shards[0], "weights.safetensors"))
        (folder / shards[0]).rename(folder / "weights.safetensors")
    save_tokenizer(folder)
    for name in _SIDE_FILES:
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text("{}" if name.endswith(".json") else "")
    (folder / "special").mkdir()
    (folder / "special" / "code.py").write_text("class Processor: ...\n")
    (folder / "processor_config.json").write_text('{"auto_map": {"AutoProcessor": "special/code.Processor"}}')
    result = tmp_path / "result"
    convert_well(folder, result, "--no-verify", "--trust-remote-code")
    assert {*_SIDE_FILES, "README.md", "source_code/special/code.py"} <= files_of(result).keys()
    before = files_of(result)
    convert_well(folder, result, "--no-verify", "--trust-remote-code", "--overwrite")
    assert files_of(result) == before
    convert_well(folder, result, "--no-verify", "--overwrite")
    assert "source_code/special/code.py" not in files_of(result)


def test_a_conversion_that_fails_replaces_nothing(copy, tmp_path, refusal):
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
def test_source_and_target_must_not_contain_each_other(copy, tmp_path, source, target):
    (tmp_path / "link").symlink_to(copy)
    shutil.copytree(copy, tmp_path / "in")
    (tmp_path / "in").rename(copy / "in")
    before = files_of(copy)
    error = convert(tmp_path / source, tmp_path / target, "--overwrite").error
    assert "lie in each other" in error
    assert files_of(copy) == before


def test_folders_above_the_target_are_made_and_removed_after_a_failure(copy, tmp_path):
    convert_well(copy, tmp_path / "new" / "er" / "result", "--no-verify")
    shutil.rmtree(tmp_path / "new")
    (copy / "config.json").unlink()
    assert convert(copy, tmp_path / "new" / "er" / "result").error
    assert os.listdir(tmp_path) == ["source"]


def test_names_with_brackets_and_the_current_folder_are_read_literally(copy, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run = convert_well("source", "[/a]", "--no-verify")
    assert run.out.endswith("Written to [/a].\n")
    monkeypatch.chdir(tmp_path / "[")
    assert "exists" in convert("../source", ".").error


def test_a_target_that_cannot_be_written_is_reported(copy):
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
    """Return a file system of 100 kB, which is too small for a model."""
    folder = tmp_path / "disk"
    folder.mkdir()
    if os.system(f"mount -t tmpfs -o size=100k tmpfs '{folder}' 2>/dev/null"):
        pytest.skip("mounting a file system needs root")
    yield folder
    os.system(f"umount '{folder}'")


def test_a_full_disk_is_left_as_it_was(models, small_disk, monkeypatch):
    error = convert(models / "llama", small_disk / "result", "--no-verify").error
    assert "not enough space" in error and str(small_disk) in error
    assert os.listdir(small_disk) == []
    usage = shutil.disk_usage(small_disk)
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: usage._replace(free=10**9))  # let the check pass
    error = convert(models / "llama", small_disk / "result", "--no-verify").error
    assert "No space left" in error and str(small_disk / ".result.partial") in error
    assert os.listdir(small_disk) == []


# Runs `attnres convert` with a limit on the size of files.
_LIMITED = """
import resource, sys
from unittest import mock
from attnres.commands.main import main

limit, sys.argv = int(sys.argv[1]), ["attnres", "convert", *sys.argv[2:]]
sys.dont_write_bytecode = True  # Python would store cut bytecode
resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
main()
"""


@pytest.mark.parametrize("options", [["--hard-link"], []], ids=["added", "copied"])
def test_a_file_that_exceeds_a_limit_is_named(tmp_path, options):
    """The limit on the size of files is like a quota. Only the added tensors, or the weights, exceed it."""
    fields = {"hidden_size": 512, "num_hidden_layers": 10, "vocab_size": 8, "intermediate_size": 4, "head_dim": 2}
    model = standard_model(**fields, num_attention_heads=1, num_key_value_heads=1)
    model.save_pretrained(tmp_path / "source", max_shard_size="20KB" if options else "1GB")  # 86 kB will be added
    arguments = ["60000", tmp_path / "source", tmp_path / "result", "--no-verify", *options]
    done = forks.run("-c", _LIMITED, *arguments)
    assert done.returncode == 1, done.stderr
    (line,) = done.stderr.strip().splitlines()
    assert "File too large" in line and str(tmp_path / ".result.partial" / "model") in line
    assert ("model-residual" in line) == bool(options)
    assert os.listdir(tmp_path) == ["source"]


def test_a_source_file_with_the_name_of_the_added_shard_is_kept(copy, tmp_path):
    path = next(copy.glob("*.safetensors"))
    index = (copy / "model.safetensors.index.json").read_text()
    (copy / "model.safetensors.index.json").write_text(index.replace(path.name, ADDED_SHARD))
    path.rename(copy / ADDED_SHARD)
    convert_well(copy, tmp_path / "result")
    assert (tmp_path / "result" / ADDED_SHARD).read_bytes() == (copy / ADDED_SHARD).read_bytes()


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
    assert next(option for option in options if option.startswith("--")) in run.err or "No such option" in run.err
    assert os.listdir(tmp_path) == ["source"]


def test_a_source_that_is_a_file_or_missing_is_named(copy, tmp_path):
    for source in (copy / "config.json", tmp_path / "absent"):
        assert convert(source, tmp_path / "result").error == f"{source} is not a directory."


def test_a_revision_of_a_directory_is_refused(copy, refusal):
    assert "Leave out --revision" in refusal("--revision", "main")
