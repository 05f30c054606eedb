"""`attnres convert` makes releases of Kimi K3 load by the Auto classes, keeps every byte, and undoes."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from attnres import (
    AttnResKimiK3Config,
    AttnResKimiK3ForCausalLM,
    AttnResKimiK3ForConditionalGeneration,
    AttnResKimiK3Model,
)
from attnres.configuration import load
from attnres.conversion import retrofit
from attnres.residual_attnres import FamilyWarning

from ..modeling_attnres import kimi_k3_release as release
from .checkpoints import INDEX, change_json, convert, convert_well, files_of, save_tokenizer, standard_model, tensors_of

IDS = torch.randint(3, 64, (2, 11), generator=torch.Generator().manual_seed(1))
PREFIX = "language_model."
LAYOUTS = ("composite", "text", "packed", "packed text")
# Each way to name tensors, and to store experts.
EACH_WAY = pytest.mark.parametrize("layout", ["composite", "packed text"])


@pytest.fixture(scope="module")
def releases(tmp_path_factory) -> Path:
    """Return a folder of releases that tests must not change, one for each of `LAYOUTS`."""
    folder, fields = tmp_path_factory.mktemp("releases"), release.text_fields()
    tensors = release.random_tensors(fields)
    packed, _ = release.pack_experts(tensors)
    packed_fields = fields | {"quantization_config": release.QUANTIZATION}
    release.write(folder / "composite", fields, tensors, vision=True)
    release.write(folder / "text", fields, tensors, layout="text")
    release.write(folder / "packed", packed_fields, packed, vision=True)
    release.write(folder / "packed text", packed_fields, packed, layout="text", shards=1)
    return folder


@pytest.fixture(scope="module")
def results(releases, tmp_path_factory) -> dict[str, Path]:
    """Return the conversion of each release."""
    folder = tmp_path_factory.mktemp("results")
    for layout in LAYOUTS:
        run = convert(releases / layout, folder / layout)
        assert run.code == 0, run.err
        assert run.err == ""
        assert "Verified: max |logit difference| 0.0e+00" in run.out
    return {layout: folder / layout for layout in LAYOUTS}


@pytest.fixture
def source(releases, tmp_path) -> Callable[[str], Path]:
    """Return `source(layout)`: a copy of a release as `source`, where a test may damage it."""
    return lambda layout: Path(shutil.copytree(releases / layout, tmp_path / "source"))


def logits(model: torch.nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(IDS).logits


@EACH_WAY
def test_a_release_loads_by_the_auto_class_and_computes_what_it_computed(releases, results, layout):
    model = AutoModelForCausalLM.from_pretrained(results[layout])
    assert type(model) is AttnResKimiK3ForCausalLM
    assert torch.equal(logits(model), logits(AttnResKimiK3ForCausalLM.from_pretrained(releases / layout)))


@EACH_WAY
def test_every_tensor_keeps_its_bytes_and_gets_the_name_of_the_composite_release(releases, results, layout):
    before, after = tensors_of(releases / layout), tensors_of(results[layout])
    prefix = PREFIX if "text" in layout else ""
    assert after.keys() == {prefix + name for name in before}
    for name, tensor in before.items():
        assert after[prefix + name].dtype == tensor.dtype
        assert torch.equal(after[prefix + name].view(torch.uint8), tensor.view(torch.uint8)), name


@EACH_WAY
def test_the_index_names_every_tensor_by_its_file(results, layout):
    weight_map = json.loads((results[layout] / INDEX).read_text())["weight_map"]
    for file in set(weight_map.values()):
        assert load_file(results[layout] / file).keys() == {name for name in weight_map if weight_map[name] == file}
    assert all((results[layout] / file).exists() for file in weight_map.values())


@EACH_WAY
def test_a_conversion_is_undone_to_the_released_files(releases, results, tmp_path, layout):
    convert_well(results[layout], tmp_path / "again", "--to", "released")
    before, after = files_of(releases / layout), files_of(tmp_path / "again")
    assert json.loads(after.pop(INDEX)) == json.loads(before.pop(INDEX))
    assert after == before


def test_only_the_configuration_and_code_differ_from_a_composite_release(releases, results):
    before, after = files_of(releases / "composite"), files_of(results["composite"])
    assert [name for name in before if before[name] != after[name]] == ["config.json"]
    added = {name for name in after.keys() - before.keys() if not name.endswith("_attnres.py")}
    assert added == {"README.md", "released_config.json"}
    old, new = (json.loads(files["config.json"]) for files in (before, after))
    assert new.pop("auto_map").keys() == {"AutoConfig", *AttnResKimiK3ForConditionalGeneration.auto_classes}
    old.pop("auto_map")
    assert new == old


def test_the_card_says_which_layout_the_weights_have(results):
    layout = "composite model, under `language_model`, with routed experts packed as MXFP4, with a vision part"
    assert layout in (results["packed"] / "README.md").read_text()
    assert "MXFP4" not in (results["text"] / "README.md").read_text()


def test_the_weights_of_a_composite_release_can_be_linked(source, tmp_path):
    folder = source("composite")
    convert_well(folder, tmp_path / "result", "--hard-link")
    assert all(os.path.samefile(path, tmp_path / "result" / path.name) for path in folder.glob("*.safetensors"))


def test_a_model_that_was_trained_since_goes_back_in_the_layout_that_it_has(results, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(results["packed"])
    with torch.no_grad():
        model.model.norm.weight.mul_(2)
    folder = Path(shutil.copytree(results["packed"], tmp_path / "trained"))
    model.save_pretrained(folder)  # over the files of the conversion, whose record is out of date now
    run = convert_well(folder, tmp_path / "back", "--to", "released")
    assert "was changed since the conversion: kept config.json and removed `auto_map`." in run.out
    config = json.loads((tmp_path / "back" / "config.json").read_text())
    assert "auto_map" not in config and "quantization_config" not in config["text_config"]
    assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(tmp_path / "back")), logits(model))


@pytest.mark.slow
def test_a_model_of_the_named_configuration_is_converted_and_converted_back(tmp_path):
    model = AttnResKimiK3ForCausalLM(load("attnres-k3-tiny"))
    model.save_pretrained(tmp_path / "model")
    convert_well(tmp_path / "model", tmp_path / "result")
    convert_well(tmp_path / "result", tmp_path / "back", "--to", "released")
    before, after = files_of(tmp_path / "model"), files_of(tmp_path / "back")
    assert all(after[name] == before[name] for name in after)
    assert "model.safetensors" in after


def test_a_checkpoint_of_a_training_run_gets_released_names(tmp_path):
    model = AttnResKimiK3ForCausalLM(load("attnres-k3-tiny"))
    model.save_pretrained(tmp_path / "checkpoint-7", save_original_format=False)
    assert any(".forget_gate." in name for name in tensors_of(tmp_path / "checkpoint-7"))
    convert_well(tmp_path / "checkpoint-7", tmp_path / "result")
    model.save_pretrained(tmp_path / "saved")
    expected, actual = tensors_of(tmp_path / "saved"), tensors_of(tmp_path / "result")
    assert actual.keys() == expected.keys()
    assert all(torch.equal(actual[name], expected[name]) for name in expected)


def test_a_decoder_without_a_head_is_converted(tmp_path):
    AttnResKimiK3Model(AttnResKimiK3Config(**release_arguments())).save_pretrained(tmp_path / "decoder")
    convert_well(tmp_path / "decoder", tmp_path / "result")
    assert tensors_of(tmp_path / "result").keys() == tensors_of(tmp_path / "decoder").keys()


def release_arguments() -> dict:
    """Return the fields of the tiny release as arguments of the configuration."""
    return AttnResKimiK3Config.fields_of_file(release.text_fields()) | {"checkpoint_layout": "composite"}


@pytest.mark.parametrize(
    "options",
    [
        ("--block-size", "2"),
        ("--num-blocks", "4"),
        ("--full",),
        ("--scale", "sum"),
        ("--residual", "mhc", "--streams", "2"),
        ("--set", "attn_res_gated=true"),
        ("--set-block-size", "3"),
        ("--to", "standard"),
    ],
    ids=lambda options: options[0],
)
def test_options_of_a_retrofit_are_refused(source, refusal, options):
    source("composite")
    line = refusal(*options)
    assert "is Kimi K3" in line
    assert options[0] in line or "--to released" in line


def test_a_release_is_given_back_of_kimi_k3_alone(tmp_path, refusal):
    standard_model().save_pretrained(tmp_path / "source")
    assert "'llama'" in (line := refusal("--to", "released")) and "--to standard" in line


def test_a_retrofit_in_memory_is_refused(releases):
    model = AttnResKimiK3ForCausalLM.from_pretrained(releases / "text")
    with pytest.raises(ValueError, match="Kimi K3, which takes no retrofit"):
        retrofit(model)
    with pytest.raises(ValueError, match=r"holds Kimi K3.*attnres convert"):
        retrofit(releases / "text")


def change_tensor(folder: Path, name: str, change: Callable[[torch.Tensor], torch.Tensor | None]) -> Path:
    """Change a tensor of a release, or remove it also from the index; return the file that held it."""
    index = json.loads((folder / INDEX).read_text())
    path = folder / index["weight_map"][name]
    tensors = load_file(path)
    tensor = change(tensors.pop(name))
    if tensor is None:
        del index["weight_map"][name]
        (folder / INDEX).write_text(json.dumps(index))
    else:
        tensors[name] = tensor
    release.save_file(tensors, path, metadata={"format": "pt"})
    return path


EXPERT = f"{PREFIX}model.layers.2.block_sparse_moe.experts.3.w1.weight"
A_LOG = f"{PREFIX}model.layers.1.self_attn.A_log"


def test_a_missing_tensor_is_named(source, refusal):
    folder = source("composite")
    change_tensor(folder, f"{PREFIX}model.layers.3.self_attn.kv_b_proj.weight", lambda tensor: None)
    line = refusal()
    assert "kv_b_proj" in line and str(folder) in line


@pytest.mark.parametrize(
    ("name", "change", "words"),
    [
        (f"{EXPERT}_scale", lambda tensor: None, "lacks"),
        (f"{EXPERT}_scale", lambda tensor: tensor[:, :0], "must have [32, 1]"),
        (f"{EXPERT}_packed", lambda tensor: tensor.float(), "uint8"),
        (f"{EXPERT}_packed", lambda tensor: tensor[:, :-1].contiguous(), "must have [32, 16]"),
        (f"{EXPERT}_scale", lambda tensor: tensor.view(torch.int8), "uint8"),
        (f"{EXPERT}_scale", lambda tensor: tensor.fill_(255), "a scale of NaN"),
        (A_LOG, lambda tensor: tensor[:2], "at least 3"),
        (A_LOG, lambda tensor: tensor + 1, "must be zero after its first 3 entries"),
        (A_LOG, lambda tensor: torch.cat([tensor, tensor[3:]]), "All must have one shape"),
    ],
    ids=[
        *("no scale", "a scale of the wrong shape", "weights of a wrong dtype", "weights of a wrong shape"),
        *("a scale of a wrong dtype", "a scale of NaN", "too few heads", "more heads", "another length"),
    ],
)
def test_a_wrong_tensor_is_named_with_its_file(source, refusal, name, change, words):
    folder = source("packed")
    path = change_tensor(folder, name, change)
    line = refusal("--no-verify")
    assert name in line and words in line
    assert str(path if words != "lacks" else folder) in line


def test_a_packed_tensor_without_a_rule_is_named(source, refusal):
    folder = source("packed")
    name = f"{PREFIX}model.layers.0.mlp.up_proj.weight"
    index = json.loads((folder / INDEX).read_text())
    path = folder / index["weight_map"][name]
    index["weight_map"][f"{name}_packed"] = path.name
    (folder / INDEX).write_text(json.dumps(index))
    tensors = load_file(path)
    release.save_file(tensors | {f"{name}_packed": torch.zeros(2, 2, dtype=torch.uint8)}, path, {"format": "pt"})
    assert f"{name}_packed" in refusal()


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"attn_res_block_size": 0}, "attn_res_block_size"),
        ({"moe_magic": 3}, "moe_magic"),
        ({"kda_layers": [1, 2, 3, 4, 5]}, "layer 4 is in both"),
        ({"kda_layers": [1, 2, 3]}, "layer 5 is in neither"),
    ],
    ids=["no block", "an unknown field", "lists that overlap", "a layer left out"],
)
@pytest.mark.parametrize("layout", ["composite", "text"])
def test_a_wrong_field_is_named_with_its_file(source, refusal, layout, fields, words):
    folder = source(layout)
    text = release.text_fields(**fields)
    change_json(folder / "config.json", **(text if layout == "text" else {"text_config": text}))
    line = refusal()
    assert words in line and str(folder / "config.json") in line


def test_a_conversion_names_the_field_because_of_which_tensors_are_not_read(source, tmp_path):
    folder = source("composite")
    change_json(folder / "config.json", text_config=release.text_fields(mla_use_output_gate=False))
    with pytest.warns(FamilyWarning, match=r"self_attn.g_proj.weight`.*Because of `mla_use_output_gate`"):
        convert_well(folder, tmp_path / "result", "--no-verify")


@pytest.mark.parametrize("text", [None, {}])
def test_a_release_without_fields_of_its_text_model_is_refused(source, refusal, text):
    path = source("composite") / "config.json"
    change_json(path, text_config=text)
    error = refusal("--no-verify")
    assert error.startswith("`text_config` is empty") and f"(in {path})" in error


@pytest.mark.parametrize("layout", ["composite", "text"])
def test_code_of_a_release_is_left_out_and_its_file_comes_back_byte_for_byte(source, tmp_path, layout):
    folder = source(layout)
    fields = json.loads((folder / "config.json").read_text())
    code = {"custom_pipelines": {"text-generation": {"impl": "other/repository--pipe.Evil", "pt": ["AutoModel"]}}}
    fields |= code
    if layout == "composite":
        fields["note"] = "\ud800"  # no UTF-8 can express this character
        fields["text_config"] = (
            fields["text_config"] | code | {"auto_map": {"AutoModel": "other/repository--code.Evil"}}
        )
    text = json.dumps(fields, indent=2).replace("\n", "\r\n")
    (folder / "config.json").write_bytes(text.encode())
    run = convert_well(folder, tmp_path / "result", "--no-verify")
    assert "Left out: " in run.out and "`custom_pipelines` of config.json" in run.out
    result = (tmp_path / "result" / "config.json").read_text()
    assert "Evil" not in result and json.loads(result)["auto_map"].keys() >= {"AutoModelForCausalLM"}
    convert_well(tmp_path / "result", tmp_path / "again", "--to", "released", "--no-verify")
    assert (tmp_path / "again" / "config.json").read_bytes() == text.encode()


def test_code_of_a_release_lies_at_the_top_level_again(source, tmp_path):
    """A conversion moves it out of the way of the model's code, and `--to released` moves it back."""
    folder = source("composite")
    (folder / "tokenization_mine.py").write_text("from .tool_mine import TOOL\n\n\nclass Mine:\n    pass\n")
    (folder / "processing_mine.py").write_text("class Processor:\n    pass\n")
    (folder / "tool_mine.py").write_text("TOOL = 1\n")
    fields = {
        "tokenizer_config.json": {"auto_map": {"AutoTokenizer": ["tokenization_mine.Mine", None]}},
        "preprocessor_config.json": {"auto_map": {"AutoProcessor": "processing_mine.Processor"}},
    }
    for name, content in fields.items():
        (folder / name).write_text(json.dumps(content))
    options = ("--no-verify", "--trust-remote-code")
    convert_well(folder, tmp_path / "result", *options)
    moved = json.loads((tmp_path / "result" / "preprocessor_config.json").read_text())["auto_map"]
    assert moved == {"AutoProcessor": "source_code/processing_mine.Processor"}
    convert_well(tmp_path / "result", tmp_path / "again", "--to", "released", *options)
    for name, content in fields.items():
        assert json.loads((tmp_path / "again" / name).read_text()) == content
    before, after = files_of(folder), files_of(tmp_path / "again")
    assert {name for name in after if name.endswith(".py")} == {name for name in before if name.endswith(".py")}
    assert not (tmp_path / "again" / "source_code").exists()


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["composite", "text"])
def test_a_release_without_experts_gets_the_fields_that_llama_cpp_takes_and_goes_back_byte_for_byte(tmp_path, layout):
    """Its own fields may be those of a model with experts, where they have no effect."""
    fields = release.text_fields(num_experts=None, first_k_dense_replace=1)
    release.write(tmp_path / "source", fields, release.random_tensors(fields), layout=layout)
    convert_well(tmp_path / "source", tmp_path / "result")
    text = json.loads((tmp_path / "result" / "config.json").read_text())["text_config"]
    assert (text["num_experts"], text["num_experts_per_token"], text["first_k_dense_replace"]) == (None, 0, 7)
    convert_well(tmp_path / "result", tmp_path / "again", "--to", "released")
    config = (tmp_path / "again" / "config.json").read_bytes()
    assert config == (tmp_path / "source" / "config.json").read_bytes()


def test_code_goes_out_of_a_result_whose_record_is_lost(source, tmp_path):
    folder = source("composite")
    change_json(folder / "config.json", custom_pipelines={"text-generation": {"impl": "other/repository--pipe.Evil"}})
    run = convert_well(folder, tmp_path / "again", "--to", "released", "--no-verify")
    assert "No record of the release: kept config.json and removed `auto_map` and `custom_pipelines`." in run.out
    assert "Evil" not in (tmp_path / "again" / "config.json").read_text()


def test_two_tensors_that_would_get_one_name_are_named(results, tmp_path, refusal):
    folder = Path(shutil.copytree(results["text"], tmp_path / "source"))
    index = json.loads((folder / INDEX).read_text())
    path = folder / index["weight_map"][f"{PREFIX}model.norm.weight"]
    index["weight_map"]["lm_head.weight"] = path.name
    (folder / INDEX).write_text(json.dumps(index))
    release.save_file(load_file(path) | {"lm_head.weight": torch.ones(2)}, path, {"format": "pt"})
    line = refusal("--to", "released", "--no-verify")
    assert "`lm_head.weight`" in line and f"`{PREFIX}lm_head.weight`" in line
    assert "would both have the name `lm_head.weight`" in line


@pytest.mark.parametrize(("layout", "removed"), [("composite", ()), ("text", ("metadata",))], ids=["null", "absent"])
def test_a_result_has_a_whole_index_though_its_source_has_none(source, tmp_path, layout, removed):
    folder = source(layout)
    change_json(folder / INDEX, *removed, metadata=None)
    with pytest.raises((KeyError, TypeError)):
        AttnResKimiK3ForCausalLM.from_pretrained(folder)
    assert "Not verified: transformers cannot load the source" in convert_well(folder, tmp_path / "result").out
    index = json.loads((tmp_path / "result" / INDEX).read_text())
    assert index["metadata"] == {"total_size": sum(tensor.nbytes for tensor in tensors_of(folder).values())}
    assert type(AutoModelForCausalLM.from_pretrained(tmp_path / "result")) is AttnResKimiK3ForCausalLM


def test_a_wrong_tensor_of_a_pickle_is_named_with_the_pickle(source, refusal):
    folder = source("packed")
    tensors = tensors_of(folder)
    tensors[f"{EXPERT}_scale"].fill_(255)
    for path in folder.glob("model*"):
        path.unlink()
    torch.save(tensors, folder / "pytorch_model.bin")
    line = refusal("--no-verify")
    assert f"{folder / 'pytorch_model.bin'}: `{EXPERT}_scale` holds a scale of NaN" in line


def test_no_warning_is_about_an_id_that_no_file_has(source, tmp_path, caplog):
    """`AutoTokenizer` reads the file as Kimi Linear's, whose default for padding is beyond this vocabulary."""
    folder = source("text")
    change_json(folder / "config.json", "pad_token_id")
    save_tokenizer(folder)
    convert_well(folder, tmp_path / "result", "--no-verify")
    assert "pad_token_id" not in caplog.text


def test_layers_for_multi_token_prediction_are_kept_and_named(source, tmp_path):
    folder = source("composite")
    name = f"{PREFIX}model.layers.7.input_layernorm.weight"
    index = json.loads((folder / INDEX).read_text())
    path = folder / next(iter(index["weight_map"].values()))
    index["weight_map"][name] = path.name
    (folder / INDEX).write_text(json.dumps(index))
    release.save_file(load_file(path) | {name: torch.ones(64)}, path, {"format": "pt"})
    assert name in convert_well(folder, tmp_path / "result").out
    assert name in tensors_of(tmp_path / "result")


def test_a_damaged_record_is_named(results, tmp_path, refusal):
    folder = Path(shutil.copytree(results["text"], tmp_path / "source"))
    (folder / "released_config.json").write_text("{}")
    assert "released_config.json is damaged" in refusal("--to", "released")
