"""`attnres convert` keeps a checkpoint's function and files, and adds a few tensors."""

import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, KimiLinearForCausalLM
from transformers.integrations.bitnet import pack_weights

from attnres import AttnResForCausalLM
from attnres.attn_res_attnres import AttnRes
from attnres.residual_attnres import residual_tensors

from ..cases import each_once
from ..modeling_attnres import test_published_layout
from .checkpoints import (
    IDS,
    INDEX,
    assert_same_function,
    change_json,
    change_tensors,
    convert,
    convert_well,
    files_of,
    logits_of,
    standard_model,
    tensors_of,
)

# Different layouts on disk: experts apart, layers without a second norm, four norms, a multiplier of the embedding.
BACKBONES = {
    "llama": {},
    "llama, tied": {"tie_word_embeddings": True},
    "gpt_neox": {},
    "gpt_neox, sequential": {"use_parallel_residual": False},
    "gemma3_text": {"head_dim": 8, "sliding_window": 4},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "head_dim": 8},
}


published = test_published_layout.published  # a fixture: the layout in which Kimi Linear was published, written by hand


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Path:
    """Return a Llama in about ten shards, which tests must not change."""
    folder = tmp_path_factory.mktemp("source") / "llama"
    standard_model().save_pretrained(folder, max_shard_size="20KB")
    return folder


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    """Return the model of `source` in one file, which tests must not change."""
    folder = tmp_path_factory.mktemp("whole") / "llama"
    standard_model().save_pretrained(folder)
    return folder


@pytest.fixture
def copy(whole, tmp_path) -> Path:
    """Return a copy of `whole` that a test may change."""
    return Path(shutil.copytree(whole, tmp_path / "source"))


@pytest.mark.parametrize(("case", "shard_size"), each_once([*BACKBONES], ["20KB", "1GB"]))
def test_the_result_computes_the_same_function(case, shard_size, tmp_path):
    model = standard_model(case.split(",")[0], **BACKBONES[case])
    model.save_pretrained(tmp_path / "source", max_shard_size=shard_size)
    convert_well(tmp_path / "source", tmp_path / "result", "--block-size", "3", "--no-verify")
    result = AutoModelForCausalLM.from_pretrained(tmp_path / "result").eval()
    assert result.config.residual_connection == "attn_res"
    with torch.no_grad():
        assert_same_function(result(IDS).logits, model(IDS).logits)


def test_shards_are_copied_byte_for_byte_and_one_is_added(source, tmp_path):
    convert_well(source, tmp_path / "result")
    before, after = files_of(source), files_of(tmp_path / "result")
    shards = {name for name in before if name.endswith(".safetensors")}
    assert len(shards) > 5
    assert all(after[name] == before[name] for name in shards)
    (added,) = {name for name in after if name.endswith(".safetensors")} - shards
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "result")
    assert set(load_file(tmp_path / "result" / added)) == set(residual_tensors(model))
    old, new = json.loads(before[INDEX]), json.loads(after[INDEX])
    assert new["weight_map"] == old["weight_map"] | dict.fromkeys(residual_tensors(model), added)
    assert new["metadata"]["total_size"] == sum(t.nbytes for t in tensors_of(tmp_path / "result").values())


def test_a_single_file_is_copied_and_a_second_one_is_added(whole, tmp_path):
    convert_well(whole, tmp_path / "result")
    before, after = files_of(whole), files_of(tmp_path / "result")
    assert after["model-00001-of-00002.safetensors"] == before["model.safetensors"]
    assert "model.safetensors" not in after, "transformers ignores an index beside this file"
    assert set(json.loads(after[INDEX])["weight_map"]) == set(tensors_of(tmp_path / "result"))


def test_the_new_tensors_are_zero_queries_and_unit_norms(whole, tmp_path):
    convert_well(whole, tmp_path / "result")
    for name, tensor in residual_tensors(AutoModelForCausalLM.from_pretrained(tmp_path / "result")).items():
        expected = torch.zeros_like(tensor) if name.endswith("_proj.weight") else torch.ones_like(tensor)
        assert torch.equal(tensor, expected), name


def test_the_configuration_is_the_old_one_with_the_new_fields(copy, tmp_path):
    old = change_json(copy / "config.json", rms_norm_eps=3e-5, use_cache=False, mine={"a": [1]})
    convert_well(copy, tmp_path / "result", "--block-size", "4")
    new = json.loads((tmp_path / "result" / "config.json").read_text())
    changed = {key for key in old.keys() | new.keys() if old.get(key) != new.get(key)}
    fields = {"residual_connection", "attn_res_block_size", "attn_res_scale"}
    # The window is null, as if it were missing.
    added = {"residual_connection", *AttnRes.fields} - {"attn_res_window"}
    assert changed == {"model_type", "architectures", "auto_map", *added}
    assert all(new[field] == value for field, value in AttnRes.fields.items() if field not in fields)
    assert (new["model_type"], new["architectures"]) == ("attnres_llama", ["AttnResLlamaForCausalLM"])
    assert [new[field] for field in sorted(fields)] == [4, "sum", "attn_res"]
    heads = ("CausalLM", "QuestionAnswering", "SequenceClassification", "TokenClassification")
    assert new["auto_map"].keys() == {"AutoConfig", "AutoModel", *(f"AutoModelFor{head}" for head in heads)}
    for reference in new["auto_map"].values():
        assert (tmp_path / "result" / f"{reference.split('.')[0]}.py").is_file()


@pytest.mark.parametrize(
    ("options", "block_size"),
    [([], 1), (["--full"], 1), (["--block-size", "5"], 5), (["--num-blocks", "2"], 3), (["--num-blocks", "4"], 2)],
    ids=str,
)
def test_the_block_size_can_be_chosen(whole, tmp_path, options, block_size):
    convert_well(whole, tmp_path / "result", "--no-verify", *options)
    assert json.loads((tmp_path / "result" / "config.json").read_text())["attn_res_block_size"] == block_size


@pytest.mark.parametrize(
    "options, note",
    [
        (("--num-blocks", "4"), "Note: --num-blocks 4 becomes 3: 6 sublayers, 2 to a block.\n"),
        (("--num-blocks", "50"), "Note: --num-blocks 50 becomes Full AttnRes: there are 6 sublayers, each a block.\n"),
        (("--block-size", "100"), "Note: a block size of 100 puts all 6 sublayers into one block, "),
        (("--num-blocks", "3"), None),
        (("--full",), None),
        ((), None),
        (("--residual", "denseformer"), None),
    ],
)
def test_a_note_says_where_the_blocks_differ_from_the_request(whole, tmp_path, options, note):
    shown = convert_well(whole, tmp_path / "result", "--no-verify", *options).out
    assert note in shown if note else "Note:" not in shown


def test_a_retrofit_is_not_retrofitted_and_the_error_names_the_options_that_change_it(whole, tmp_path):
    convert_well(whole, tmp_path / "one", "--no-verify")
    error = convert(tmp_path / "one", tmp_path / "two", "--block-size", "3").error
    assert f"the model, loaded from {tmp_path / 'one'}, has residual_connection='attn_res' already" in error
    assert "--set-block-size S regroups its blocks, and --to standard undoes an untrained retrofit." in error


@pytest.mark.parametrize(
    "options, described",
    [
        (("--residual", "denseformer"), "attnres_llama: DenseFormer (6 sublayers)"),
        (("--residual", "identity_hc", "--streams", "3"), "attnres_llama: Identity Hyper-Connections, 3 streams"),
    ],
)
def test_other_connections_are_shown_by_their_names(whole, tmp_path, options, described):
    assert f"\n{described}\n" in convert_well(whole, tmp_path / "result", "--no-verify", *options).out


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("is_named", [True, False], ids=["dtype in config.json", "no dtype in config.json"])
def test_the_dtype_is_kept_and_the_new_tensors_have_it(tmp_path, dtype, is_named):
    standard_model().to(dtype).save_pretrained(tmp_path / "source")
    if not is_named:
        change_json(tmp_path / "source" / "config.json", "dtype")
    convert_well(tmp_path / "source", tmp_path / "result")
    assert {tensor.dtype for tensor in tensors_of(tmp_path / "result").values()} == {dtype}


@pytest.fixture
def quantised(whole, tmp_path) -> Path:
    """Return a model with ternary weights, as BitNet stores them: it runs on a CPU without further packages."""
    folder = tmp_path / "quantised"
    shutil.copytree(whole, folder)
    tensors = load_file(folder / "model.safetensors")
    for name, tensor in list(tensors.items()):
        if "_proj" in name:
            scale = 1 / tensor.abs().mean()
            tensors[name] = pack_weights((tensor * scale).round().clamp(-1, 1)).contiguous()
            tensors[f"{name}_scale"] = scale.reshape(1)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    method = {"quant_method": "bitnet", "linear_class": "bitlinear", "modules_to_not_convert": ["lm_head"]}
    change_json(folder / "config.json", quantization_config=method)
    return folder


def test_a_quantised_model_stays_quantised_and_the_new_tensors_are_not(quantised, tmp_path):
    # Full AttnRes adds in the order of the standard model. Another order would round, and 8 bits would show it.
    run = convert_well(quantised, tmp_path / "result", "--full")
    assert "Not verified: quantised" in run.out
    files = files_of(tmp_path / "result")
    assert files["model-00001-of-00002.safetensors"] == files_of(quantised)["model.safetensors"]
    old, new = (json.loads((folder / "config.json").read_text()) for folder in (quantised, tmp_path / "result"))
    assert old["quantization_config"].items() <= new["quantization_config"].items()
    added = load_file(tmp_path / "result" / "model-00002-of-00002.safetensors")
    assert {tensor.dtype for tensor in added.values()} == {torch.float32}
    with torch.compiler.set_stance("force_eager"):  # compiling needs a C++ compiler
        assert torch.equal(logits_of(tmp_path / "result"), logits_of(quantised))
        assert "Verified: " in convert_well(quantised, tmp_path / "verified", "--full", "--verify").out


def test_the_new_tensors_are_never_of_a_quantised_dtype(copy, tmp_path):
    """Without a dtype in `config.json`, the first tensor does not decide: it may be an 8-bit float."""
    tensors = {name: tensor.to(torch.float8_e4m3fn) for name, tensor in tensors_of(copy).items()}
    save_file(tensors, copy / "model.safetensors", metadata={"format": "pt"})
    change_json(copy / "config.json", "dtype", quantization_config={"quant_method": "fp8"})
    convert_well(copy, tmp_path / "result", "--no-verify")
    added = load_file(tmp_path / "result" / "model-00002-of-00002.safetensors")
    assert {tensor.dtype for tensor in added.values()} == {torch.float32}


def test_with_hard_links_no_shard_is_copied(source, tmp_path):
    shutil.copytree(source, tmp_path / "source")
    for path in (tmp_path / "source").glob("*.safetensors"):
        path.chmod(0o440)
    convert_well(tmp_path / "source", tmp_path / "result", "--hard-link")
    shards = list((tmp_path / "source").glob("*.safetensors"))
    assert all(path.samefile(tmp_path / "result" / path.name) for path in shards)
    assert {path.stat().st_mode & 0o777 for path in shards} == {0o440}
    assert_same_function(logits_of(tmp_path / "result"), logits_of(source))


def test_where_links_are_not_possible_the_error_proposes_to_copy(whole, tmp_path, monkeypatch):
    def refuse(*arguments, **options):
        raise OSError(18, "Invalid cross-device link")

    monkeypatch.setattr(os, "link", refuse)
    assert "Leave out --hard-link to copy" in convert(whole, tmp_path / "result", "--hard-link").error
    assert os.listdir(tmp_path) == []


def test_all_files_have_the_usual_permissions(source, tmp_path):
    (tmp_path / "mine").write_text("")
    convert_well(source, tmp_path / "result", "--no-verify")
    usual = (tmp_path / "mine").stat().st_mode
    assert {path.name for path in (tmp_path / "result").iterdir() if path.stat().st_mode != usual} == set()


def test_a_snapshot_of_symbolic_links_is_read_through_them(source, tmp_path):
    cached = tmp_path / "models--lab--model"
    snapshot, blobs = cached / "snapshots" / "0123", cached / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for i, path in enumerate(source.iterdir()):
        shutil.copyfile(path, blobs / str(i))
        (snapshot / path.name).symlink_to(f"../../blobs/{i}")
    for options in ([], ["--hard-link"]):
        result = tmp_path / f"result{len(options)}"
        convert_well(snapshot, result, *options)
        assert not [path for path in result.iterdir() if path.is_symlink()]
        assert_same_function(logits_of(result), logits_of(source))


def test_tensors_that_the_model_does_not_read_are_copied_whatever_they_hold(tmp_path):
    """Pythia's checkpoints hold a mask of -1e9 in float16, which is minus infinity."""
    standard_model("gpt_neox").save_pretrained(tmp_path / "source")
    path = tmp_path / "source" / "model.safetensors"
    unused = {"gpt_neox.layers.0.attention.masked_bias": torch.tensor(-torch.inf, dtype=torch.float16)}
    unused["gpt_neox.old_head.weight"] = torch.tensor([torch.nan])
    save_file(load_file(path) | unused, path, metadata={"format": "pt"})
    convert_well(tmp_path / "source", tmp_path / "result")
    assert unused.keys() <= tensors_of(tmp_path / "result").keys()


def test_tensors_that_the_model_does_not_read_are_named_in_a_warning(source, tmp_path):
    folder = shutil.copytree(source, tmp_path / "source")
    index = json.loads((folder / INDEX).read_text())
    file = index["weight_map"]["model.norm.weight"]
    names = ["model.vision.weight", *(f"model.layers.9.{i}" for i in range(11)), "[red]not in the index\n"]
    path = folder / file
    save_file(load_file(path) | {name: torch.ones(2) for name in names}, path, metadata={"format": "pt"})
    change_json(folder / INDEX, weight_map=index["weight_map"] | dict.fromkeys(names[:-1], file))
    out = convert_well(folder, tmp_path / "result").out
    (warning,) = [line for line in out.splitlines() if line.startswith("Warning:")]
    assert "does not read 13 tensors of the source: `[red]not in the index\\n`, `model.layers.9.0`, " in warning
    assert "and 3 more" in warning and "not verified" in warning
    (verified,) = [line for line in out.splitlines() if line.startswith("Verified:")]
    assert verified.endswith("without the 13 tensors that this model does not read")
    assert set(names) <= tensors_of(tmp_path / "result").keys()


def test_a_source_without_unread_tensors_gives_no_warning(source, tmp_path):
    assert "does not read" not in convert_well(source, tmp_path / "result").out


@pytest.mark.slow
def test_a_standard_member_of_the_family_is_retrofitted_without_its_old_attn_res_tensors(whole, tmp_path):
    convert_well(whole, tmp_path / "first")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "first")
    for tensor in residual_tensors(model).values():
        torch.nn.init.normal_(tensor)
    model.save_pretrained(tmp_path / "trained")
    change_json(tmp_path / "trained" / "config.json", residual_connection="standard")
    convert_well(tmp_path / "trained", tmp_path / "result")
    assert_same_function(logits_of(tmp_path / "result"), logits_of(whole))
    held = [name for path in (tmp_path / "result").glob("*.safetensors") for name in load_file(path)]
    assert len(held) == len(set(held)), "the trained tensors must not stay in another file"


def test_kimi_linear_as_transformers_saves_it_becomes_attnres(tiny_config, tmp_path):
    fields = tiny_config().to_dict()
    kimi = standard_model("kimi_linear", **{k: v for k, v in fields.items() if "res" not in k and k != "model_type"})
    kimi.save_pretrained(tmp_path / "source", max_shard_size="40KB")
    convert_well(tmp_path / "source", tmp_path / "result", "--block-size", "3")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "result")
    assert type(model) is AttnResForCausalLM
    ids = IDS % kimi.config.vocab_size
    with torch.no_grad():
        assert_same_function(model(ids).logits, kimi(ids).logits)


@pytest.mark.slow
def test_kimi_linear_as_it_was_published_becomes_attnres_and_back(published, tmp_path):
    convert_well(published, tmp_path / "result", "--block-size", "3")
    assert {path.name for path in published.glob("*.safetensors")} < files_of(tmp_path / "result").keys()
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "result")
    assert type(model) is AttnResForCausalLM
    kimi = KimiLinearForCausalLM.from_pretrained(published)
    ids = IDS % kimi.config.vocab_size
    with torch.no_grad():
        assert_same_function(model(ids).logits, kimi(ids).logits)
    convert_well(tmp_path / "result", tmp_path / "back", "--to", "standard")
    before, after = tensors_of(published), tensors_of(tmp_path / "back")
    assert after.keys() == before.keys() and all(torch.equal(after[name], before[name]) for name in before)
    with torch.no_grad():
        assert torch.equal(KimiLinearForCausalLM.from_pretrained(tmp_path / "back")(ids).logits, kimi(ids).logits)


def test_a_model_without_generation_config_keeps_the_generation_settings_of_its_configuration(copy, tmp_path):
    (copy / "generation_config.json").unlink()
    change_json(copy / "config.json", do_sample=True, top_k=7, max_length=33)
    convert_well(copy, tmp_path / "result")
    settings = AutoModelForCausalLM.from_pretrained(tmp_path / "result").generation_config
    assert settings.to_dict() == AutoModelForCausalLM.from_pretrained(copy).generation_config.to_dict()
    assert (settings.do_sample, settings.top_k, settings.max_length) == (True, 7, 33)


def test_the_scale_mean_is_reported_as_another_function(copy, tmp_path):
    change_json(copy / "config.json", rms_norm_eps=0.1)
    run = convert_well(copy, tmp_path / "result", "--scale", "mean")
    assert "Not the same function: with the scale 'mean'" in run.out
    assert (logits_of(tmp_path / "result") - logits_of(copy)).abs().max() > 0.01
    assert json.loads((tmp_path / "result" / "config.json").read_text())["attn_res_scale"] == "mean"


def test_a_tensor_of_a_rare_dtype_is_copied(copy, tmp_path):
    path = copy / "model.safetensors"
    rare = {"counts": torch.arange(4).to(torch.uint16), "scales": torch.ones(4).to(torch.float8_e8m0fnu)}
    save_file(load_file(path) | rare, path, metadata={"format": "pt"})
    convert_well(copy, tmp_path / "result")
    assert {name: tensors_of(tmp_path / "result")[name].dtype for name in rare} == {n: t.dtype for n, t in rare.items()}


# ---- pytorch_model.bin


def save_pickle(folder: Path, state: dict, num_files: int = 1, **options) -> None:
    """Save weights as `pytorch_model.bin`, or as several files with an index."""
    names = list(state)
    parts = [names[i::num_files] for i in range(num_files)]
    files = [f"pytorch_model-{i + 1:05d}-of-{num_files:05d}.bin" for i in range(num_files)]
    if num_files == 1:
        files = ["pytorch_model.bin"]
    else:
        weight_map = {name: file for file, part in zip(files, parts) for name in part}
        (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    for file, part in zip(files, parts):
        torch.save({name: state[name] for name in part}, folder / file, **options)


@pytest.fixture(params=[1, 3], ids=["one file", "three files"])
def num_files(request) -> int:
    return request.param


@pytest.mark.parametrize(("is_old", "is_tied"), [(False, True), (True, False)], ids=["zip, tied", "before PyTorch 1.6"])
def test_pickled_weights_are_rewritten(tmp_path, num_files, is_old, is_tied):
    model = standard_model(tie_word_embeddings=is_tied)
    model.config.save_pretrained(tmp_path / "source")
    save_pickle(tmp_path / "source", model.state_dict(), num_files, _use_new_zipfile_serialization=not is_old)
    convert_well(tmp_path / "source", tmp_path / "result")
    with torch.no_grad():
        assert_same_function(logits_of(tmp_path / "result"), model(IDS).logits)
    tensors, state = tensors_of(tmp_path / "result"), model.state_dict()
    assert all(torch.equal(tensors[name], state[name]) for name in tensors if "_res_" not in name)
    weights = {path.name for path in (tmp_path / "result").iterdir() if path.suffix in (".safetensors", ".bin")}
    assert weights == set(json.loads((tmp_path / "result" / INDEX).read_text())["weight_map"].values())


@pytest.mark.slow
def test_a_pickled_retrofit_is_undone_and_regrouped(whole, tmp_path, num_files):
    convert_well(whole, tmp_path / "first")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "first")
    model.config.save_pretrained(tmp_path / "pickled")
    save_pickle(tmp_path / "pickled", model.state_dict(), num_files)
    convert_well(tmp_path / "pickled", tmp_path / "standard", "--to", "standard")
    convert_well(tmp_path / "pickled", tmp_path / "regrouped", "--set-block-size", "3")
    expected = tensors_of(whole)
    tensors = tensors_of(tmp_path / "standard")
    assert tensors.keys() == expected.keys() and all(torch.equal(tensors[name], expected[name]) for name in expected)
    assert_same_function(logits_of(tmp_path / "regrouped"), logits_of(whole))


def test_pickled_parameters_and_views_of_one_storage_are_converted(whole, tmp_path):
    shutil.copytree(whole, tmp_path / "source")
    state = load_file(tmp_path / "source" / "model.safetensors")
    (tmp_path / "source" / "model.safetensors").unlink()
    attention = "model.layers.1.self_attn"
    both = torch.randn(64, 32)
    state |= {f"{attention}.q_proj.weight": both[:32], f"{attention}.o_proj.weight": both[32:]}
    square = torch.randn(32, 32)  # and its transpose: the same memory and shape, but other strides
    attention = "model.layers.2.self_attn"
    state |= {f"{attention}.q_proj.weight": square, f"{attention}.o_proj.weight": square.T}
    state["lm_head.weight"] = torch.nn.Parameter(state["lm_head.weight"])
    torch.save(state, tmp_path / "source" / "pytorch_model.bin")
    convert_well(tmp_path / "source", tmp_path / "result")
    tensors = tensors_of(tmp_path / "result")
    assert all(torch.equal(tensors[name], tensor) for name, tensor in state.items())


def test_safetensors_are_preferred_to_pickles(copy, tmp_path):
    (copy / "pytorch_model.bin").write_text("never read")
    convert_well(copy, tmp_path / "result")


def test_a_changed_tensor_would_fail_the_comparisons_here(whole, copy):
    change_tensors(copy, {"model.norm.weight": torch.ones(32)})
    with pytest.raises(AssertionError):
        assert_same_function(logits_of(copy), logits_of(whole))
