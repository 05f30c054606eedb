"""`--to standard` and `--set-block-size` are allowed exactly where the function stays the same."""

import json
import shutil
import tempfile
from functools import cache
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, PreTrainedModel

from attnres.attn_res_attnres import AttnRes
from attnres.checkpoints.checkpoint import Checkpoint
from attnres.checkpoints.copies import copyable
from attnres.conversion import retrofit
from attnres.conversion.convert import prepare_change
from attnres.residual_attnres import residual_tensors

from .checkpoints import (
    IDS,
    INDEX,
    QUERY,
    assert_same_function,
    change_tensors,
    convert,
    convert_well,
    files_of,
    logits_of,
    standard_model,
    tensors_of,
)

SUBLAYERS = 6


@pytest.fixture(scope="module", params=["20KB", "1GB"], ids=["sharded", "whole"])
def source(request, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("source") / "llama"
    standard_model().save_pretrained(folder, max_shard_size=request.param)
    return folder


@pytest.fixture(scope="module")
def retrofitted(source) -> Path:
    folder = source.with_name("retrofitted")
    convert_well(source, folder, "--block-size", "2", "--no-verify")
    return folder


@pytest.fixture
def copy(retrofitted, tmp_path) -> Path:
    return Path(shutil.copytree(retrofitted, tmp_path / "copy"))


def test_a_retrofit_is_undone_to_the_last_byte(source, retrofitted, tmp_path):
    run = convert_well(retrofitted, tmp_path / "back", "--to", "standard")
    assert "Verified: " in run.out
    before, after = files_of(source), files_of(tmp_path / "back")
    assert after.keys() == before.keys()
    assert [name for name in before if after[name] != before[name] and name != INDEX] == []
    if INDEX in before:
        assert json.loads(after[INDEX]) == json.loads(before[INDEX]) | {
            "metadata": json.loads(after[INDEX])["metadata"]
        }


@pytest.mark.parametrize("shard_size", ["30KB", "1GB"])
def test_a_retrofit_that_was_loaded_and_saved_again_is_undone(source, retrofitted, tmp_path, shard_size):
    model = AutoModelForCausalLM.from_pretrained(retrofitted)
    model.save_pretrained(tmp_path / "saved", max_shard_size=shard_size)
    convert_well(tmp_path / "saved", tmp_path / "back", "--to", "standard")
    before, after = tensors_of(source), tensors_of(tmp_path / "back")
    assert after.keys() == before.keys() and all(torch.equal(after[name], before[name]) for name in before)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "back")
    assert type(model).__name__ == "LlamaForCausalLM"
    assert not (tmp_path / "back" / "modeling_attnres.py").exists()
    assert_same_function(logits_of(tmp_path / "back"), logits_of(source))


def test_a_trained_retrofit_is_not_undone_and_its_query_is_named(copy, tmp_path):
    query = torch.zeros(1, 32)
    query[0, 7] = -0.0125
    change_tensors(copy, {QUERY: query, QUERY.replace("layers.1", "layers.2"): query / 2})
    error = convert(copy, tmp_path / "back", "--to", "standard").error
    assert "0.0125" in error and f"`{QUERY}`" in error


@pytest.mark.parametrize("options", [["--to", "standard"], ["--set-block-size", "3"]], ids=" ".join)
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_a_query_that_is_not_finite_is_refused(copy, tmp_path, options, value):
    query = torch.zeros(1, 32)
    query[0, 7] = value
    change_tensors(copy, {QUERY: query})
    error = convert(copy, tmp_path / "result", "--no-verify", *options).error
    assert f"`{QUERY}` in {copy}" in error and "NaN or infinite" in error


@pytest.mark.parametrize("options", [["--to", "standard"], ["--set-block-size", "3"]], ids=" ".join)
def test_a_standard_model_has_nothing_to_undo_or_to_regroup(source, tmp_path, options):
    error = convert(source, tmp_path / "result", *options).error
    assert "'llama', which has standard residual connections." in error
    assert ("Give --block-size 3 instead, which makes a retrofit." in error) == (options[0] == "--set-block-size")


@pytest.mark.slow
@pytest.mark.parametrize("size", ["20KB", "1GB"])
@pytest.mark.parametrize("case", ["kimi_linear", "mixtral", "qwen3_moe"])
def test_a_training_checkpoint_is_converted_to_the_published_layout(case, size, backbones, tmp_path):
    model = retrofit(backbones.build(case))
    run, published = tmp_path / "checkpoint-3", tmp_path / "published"
    for folder in (run, published):
        model.save_pretrained(folder, max_shard_size=size)
    assert tensors_of(run).keys() == model.state_dict().keys() != tensors_of(published).keys()
    for options in (["--set-block-size", "3"], ["--to", "standard"]):
        out = tmp_path / options[-1]
        assert "Verified: " in convert_well(run, out, *options).out
        expected, tensors = tensors_of(published), tensors_of(out)
        if "standard" in options:
            expected = {name: expected[name] for name in expected.keys() - residual_tensors(model).keys()}
        assert tensors.keys() == expected.keys()
        assert all(torch.equal(tensors[name], expected[name]) for name in expected)
    assert not (out / "modeling_attnres.py").exists()


def test_a_retrofit_of_a_training_checkpoint_has_the_published_layout(backbones, tmp_path):
    model = backbones.build("mixtral")
    model.save_pretrained(tmp_path / "unpublished", save_original_format=False)
    model.save_pretrained(tmp_path / "published")
    convert_well(tmp_path / "unpublished", tmp_path / "result")
    added = residual_tensors(AutoModelForCausalLM.from_pretrained(tmp_path / "result"))
    assert tensors_of(tmp_path / "result").keys() - added.keys() == tensors_of(tmp_path / "published").keys()


def test_a_retrofit_is_not_retrofitted(retrofitted, tmp_path):
    assert "residual_connection='attn_res' already" in convert(retrofitted, tmp_path / "result").error


def test_regrouping_changes_one_field_and_the_card_and_no_weight(retrofitted, tmp_path):
    run = convert_well(retrofitted, tmp_path / "result", "--set-block-size", "5")
    assert "Verified: " in run.out
    before, after = files_of(retrofitted), files_of(tmp_path / "result")
    assert {name for name in before.keys() | after.keys() if before.get(name) != after.get(name)} == {
        *("config.json", "README.md")
    }
    old, new = json.loads(before["config.json"]), json.loads(after["config.json"])
    assert new == old | {"attn_res_block_size": 5}


def test_the_error_of_refused_regrouping_names_the_query(copy, tmp_path):
    change_tensors(copy, {QUERY: torch.full((1, 32), 0.25)})
    error = convert(copy, tmp_path / "result", "--set-block-size", "1").error
    assert "blocks of 1 sublayers would change the function" in error and f"`{QUERY}`" in error and "0.25" in error


@cache
def blank_model(block_size: int, scale: str) -> PreTrainedModel:
    # With a large epsilon of the norms, the scale "mean" is another function for each block size.
    fields = {"vocab_size": 99, "rms_norm_eps": 0.3}
    model = standard_model(
        "attnres_llama",
        attn_res_block_size=block_size,
        attn_res_scale=scale,
        num_hidden_layers=SUBLAYERS // 2,
        **fields,
    )
    for tensor in residual_tensors(model).values():
        torch.nn.init.ones_(tensor)
    return model


def set_queries(model: PreTrainedModel, trained: set[int]) -> None:
    """Give these sublayers random pseudo-queries, and all others zero. The last sublayer is the output."""
    generator = torch.Generator().manual_seed(0)
    for module in model.modules():
        if isinstance(module, AttnRes):
            query = torch.randn(1, 32, generator=generator)
            module.weight.data = query * (module.sublayer in trained)


@pytest.mark.slow
@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    sizes=st.tuples(*[st.integers(1, SUBLAYERS + 2)] * 2),
    scale=st.sampled_from(["sum", "sum", "mean"]),
    trained=st.one_of(
        st.just(set()),
        st.sets(st.integers(0, SUBLAYERS), max_size=2),
        st.integers(0, SUBLAYERS).map(lambda last: set(range(last + 1))),
    ),
)
def test_regrouping_is_allowed_exactly_where_the_logits_stay(sizes, scale, trained):
    old, new = (blank_model(size, scale) for size in sizes)
    for model in (old, new):
        set_queries(model, trained)
    with torch.no_grad():
        before, after = old(IDS % 99).logits, new(IDS % 99).logits
    stays = bool((after - before).abs().max() <= 1e-5 * before.abs().max())
    with tempfile.TemporaryDirectory() as folder:
        old.save_pretrained(folder)
        source = copyable(Checkpoint(Path(folder)), Path(folder))
        try:
            conversion = prepare_change(source, block_size=sizes[1])
        except ValueError as error:
            assert "would change the function" in str(error)
            assert not stays, f"refused, but the logits are the same: {error}"
        else:
            assert conversion.config.attn_res_block_size == sizes[1]
            assert stays, "allowed, but the logits differ"
