"""Checkpoints in the released layouts of Kimi K3 load, and are saved byte by byte as they were."""

import json
import re
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

from attnres import AttnResConfig, AttnResForCausalLM, AttnResKimiK3Config, AttnResKimiK3ForCausalLM, AttnResKimiK3Model
from attnres.family import describe_connection
from attnres.kimi_k3_packed_attnres import decode_mxfp4
from attnres.kimi_k3_packing_attnres import encode_mxfp4
from attnres.kimi_k3_shapes_attnres import released_shapes
from attnres.residual_attnres import FamilyWarning

from . import kimi_k3_release as release

IDS = torch.randint(3, 64, (2, 9), generator=torch.Generator().manual_seed(1))


def stored(folder: Path) -> dict[str, Tensor]:
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


def assert_same_bytes(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert actual.keys() == expected.keys()
    for name, tensor in expected.items():
        assert actual[name].dtype == tensor.dtype, name
        assert actual[name].shape == tensor.shape, name
        assert torch.equal(actual[name].flatten().view(torch.uint8), tensor.flatten().view(torch.uint8)), name


@pytest.fixture(scope="module")
def fields() -> dict[str, Any]:
    return release.text_fields()


@pytest.fixture(scope="module")
def tensors(fields) -> dict[str, Tensor]:
    return release.random_tensors(fields)


@pytest.fixture(scope="module")
def composite(tmp_path_factory, fields, tensors) -> Path:
    return release.write(tmp_path_factory.mktemp("release") / "composite", fields, tensors, vision=True)


@pytest.fixture
def changed(tmp_path, composite) -> Callable[..., Path]:
    """`changed(change)`: a copy of the composite release; `change(config, tensors)` changes both in place."""

    def build(change: Callable[[dict, dict], None]) -> Path:
        config, tensors = json.loads((composite / "config.json").read_text()), stored(composite)
        change(config, tensors)
        folder = tmp_path / "changed"
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(config))
        save_file({name: t.contiguous() for name, t in tensors.items()}, folder / "model.safetensors", {"format": "pt"})
        return folder

    return build


def test_a_composite_release_is_saved_as_it_was(composite, tmp_path):
    with pytest.warns(FamilyWarning) as caught:
        model = AutoModelForCausalLM.from_pretrained(composite)
    assert type(model) is AttnResKimiK3ForCausalLM
    (message,) = {str(warning.message) for warning in caught}
    assert "mm_projector.*: 3 tensors, vision_tower.*: 15 tensors." in message
    model.save_pretrained(tmp_path, max_shard_size="100KB")
    assert (tmp_path / "model.safetensors.index.json").exists()
    assert not (tmp_path / "kimi_k3_vision_attnres.py").exists()  # the code of a model that sees
    text = {name: tensor for name, tensor in stored(composite).items() if name.startswith("language_model.")}
    assert_same_bytes(stored(tmp_path), text)
    before, after = (json.loads((folder / "config.json").read_text()) for folder in (composite, tmp_path))
    for config in (before, after):
        for name in ("auto_map", "transformers_version"):
            config.pop(name, None)
        config["text_config"].pop("dtype", None)
    assert after.pop("tie_word_embeddings") is False
    added = {"attention_bias": False, "attention_dropout": 0.0}
    assert after["text_config"] == before["text_config"] | added
    # The saved model promises no part that it lacks.
    del before["vision_config"], before["media_placeholder_token_id"]
    assert {**after, "text_config": None} == {**before, "text_config": None}


def test_a_saved_model_promises_no_layers_for_multi_token_prediction(fields, tensors, tmp_path):
    source = release.write(tmp_path / "source", fields | {"num_nextn_predict_layers": 1}, tensors)
    AutoModelForCausalLM.from_pretrained(source).save_pretrained(tmp_path / "saved")
    config = json.loads((tmp_path / "saved" / "config.json").read_text())
    assert config["text_config"]["num_nextn_predict_layers"] == 0


def test_a_release_of_the_text_model_is_saved_as_it_was(tmp_path, fields, tensors):
    source = release.write(tmp_path / "text", fields, tensors, layout="text")
    model = AttnResKimiK3ForCausalLM.from_pretrained(source)
    model.save_pretrained(tmp_path / "out")
    assert_same_bytes(stored(tmp_path / "out"), tensors)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (config["model_type"], config["architectures"]) == ("kimi_linear", ["KimiLinearForCausalLM"])
    assert config.items() >= {name: fields[name] for name in fields}.items()
    again = AttnResKimiK3ForCausalLM.from_pretrained(tmp_path / "out")
    assert torch.equal(again(IDS).logits, model(IDS).logits)


def test_both_layouts_are_one_model(tmp_path, composite, fields, tensors):
    source = release.write(tmp_path / "text", fields, tensors, layout="text")
    logits = AttnResKimiK3ForCausalLM.from_pretrained(source)(IDS).logits
    assert torch.equal(AutoModelForCausalLM.from_pretrained(composite)(IDS).logits, logits)


def test_the_decoder_loads_and_saves_alone(composite, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(composite)
    decoder = AttnResKimiK3Model.from_pretrained(composite)
    assert torch.equal(decoder(IDS).last_hidden_state, model.model(IDS).last_hidden_state)
    decoder.save_pretrained(tmp_path)
    names = {name for name in stored(composite) if name.startswith("language_model.model.")}
    assert stored(tmp_path).keys() == names
    assert torch.equal(AttnResKimiK3Model.from_pretrained(tmp_path)(IDS)[0], decoder(IDS)[0])


def test_a_new_model_is_saved_in_the_composite_layout_with_padded_heads(fields, tmp_path):
    model = AttnResKimiK3ForCausalLM(AttnResKimiK3Config.from_dict(fields | {"model_type": "kimi_k3"})).eval()
    model.save_pretrained(tmp_path)
    shapes = {f"language_model.{name}": shape for name, shape in release.shapes(fields).items()}
    assert {name: tuple(tensor.shape) for name, tensor in stored(tmp_path).items()} == shapes
    assert torch.equal(AutoModelForCausalLM.from_pretrained(tmp_path)(IDS).logits, model(IDS).logits)


@pytest.mark.parametrize("shape", [[3], [128], [256], [1, 1, 3, 1]])
def test_a_log_is_saved_in_the_shape_that_it_had(changed, tmp_path, shape):
    def change(config, tensors):
        for name in tensors:
            if name.endswith("A_log"):
                length = torch.tensor(shape).prod()
                tensors[name] = torch.nn.functional.pad(tensors[name][:3], (0, length - 3)).view(shape)

    source = changed(change)
    AutoModelForCausalLM.from_pretrained(source).save_pretrained(tmp_path / "out")
    text = {name: tensor for name, tensor in stored(source).items() if name.startswith("language_model.")}
    assert_same_bytes(stored(tmp_path / "out"), text)


def test_tensors_of_the_release_in_float32_stay_so(composite):
    model = AutoModelForCausalLM.from_pretrained(composite).to(torch.bfloat16)
    dtypes = {name: tensor.dtype for name, tensor in model.state_dict().items()}
    wide = {name for name, dtype in dtypes.items() if dtype == torch.float32}
    expected = ("A_log", "dt_bias", "conv1d.weight", "o_norm.weight", "e_score_correction_bias")
    assert wide == {name for name in dtypes if name.endswith(expected)}
    assert {*dtypes.values()} == {torch.float32, torch.bfloat16}


def test_names_and_shapes_are_those_of_the_release(fields):
    shapes = released_shapes(AttnResKimiK3Config.from_dict(fields))
    padded = {name: (release.A_LOG_LENGTH,) if name.endswith("A_log") else shape for name, shape in shapes.items()}
    assert padded == release.shapes(fields)


def test_mxfp4_decodes_every_byte_and_every_scale():
    packed = torch.arange(256, dtype=torch.uint8).repeat(253, 1)  # (out, in / 2)
    scale = torch.arange(253, dtype=torch.uint8).unsqueeze(1).expand(-1, 16)
    halves = [0, 1, 2, 3, 4, 6, 8, 12]
    values = [sign * half / 2 for sign in (1.0, -1.0) for half in halves]
    row = torch.tensor([value for byte in range(256) for value in (values[byte % 16], values[byte // 16])]).double()
    expected = row * 2.0 ** (torch.arange(253).double().unsqueeze(1) - 127)
    decoded = decode_mxfp4(packed, scale)
    assert decoded.dtype == torch.bfloat16
    assert torch.equal(decoded.double(), expected)
    assert torch.equal(decoded.signbit(), row.signbit().expand_as(decoded))


@pytest.fixture(scope="module")
def packed_release(tmp_path_factory, fields, tensors) -> tuple[Path, dict[str, Tensor]]:
    """A checkpoint with packed experts, and the tensors that it means."""
    packed, meant = release.pack_experts(tensors)
    fields = fields | {"quantization_config": release.QUANTIZATION}
    return release.write(tmp_path_factory.mktemp("packed"), fields, packed, shards=3), meant


def test_packed_experts_decode_exactly_and_are_saved_in_bfloat16(packed_release, tmp_path):
    source, meant = packed_release
    model = AutoModelForCausalLM.from_pretrained(source)
    assert not hasattr(model.config, "quantization_config")
    model.save_pretrained(tmp_path)
    assert_same_bytes(stored(tmp_path), {f"language_model.{name}": tensor for name, tensor in meant.items()})
    assert "quantization_config" not in (tmp_path / "config.json").read_text()


@pytest.mark.parametrize("layout", ["composite", "text"])
def test_a_model_that_was_loaded_unpacked_is_packed_again_byte_by_byte(fields, tensors, tmp_path, layout):
    packed, _ = release.pack_experts(tensors)
    fields = fields | {"quantization_config": release.QUANTIZATION}
    source = release.write(tmp_path / "source", fields, packed, layout=layout)
    model = AttnResKimiK3ForCausalLM.from_pretrained(source, dtype="auto")
    model.save_pretrained(tmp_path / "packed", packed_experts=True)
    assert_same_bytes(stored(tmp_path / "packed"), stored(source))
    config = json.loads((tmp_path / "packed" / "config.json").read_text())
    assert config.get("text_config", config)["quantization_config"] == release.QUANTIZATION
    again = AttnResKimiK3ForCausalLM.from_pretrained(tmp_path / "packed", dtype="auto")
    assert torch.equal(again(IDS).logits, model(IDS).logits)
    model.save_pretrained(tmp_path / "plain")  # the model itself stays as it is
    assert not any(name.endswith("_packed") for name in stored(tmp_path / "plain"))
    assert "quantization_config" not in (tmp_path / "plain" / "config.json").read_text()


def test_a_new_model_is_saved_with_packed_experts(fields, tmp_path):
    model = AttnResKimiK3ForCausalLM(AttnResKimiK3Config.from_dict(fields | {"model_type": "kimi_k3"})).eval()
    model.save_pretrained(tmp_path, packed_experts=True)
    config = json.loads((tmp_path / "config.json").read_text())["text_config"]["quantization_config"]
    assert (config["quant_method"], config["format"]) == ("compressed-tensors", "mxfp4-pack-quantized")
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    for name, weight in model.state_dict().items():
        expected = weight
        if ".experts." in name:
            expected = torch.stack([decode_mxfp4(*encode_mxfp4(one)) for one in weight])
        assert torch.equal(again.state_dict()[name], expected.to(weight.dtype)), name


def test_a_model_that_cannot_be_packed_is_refused_and_nothing_is_saved(fields, tmp_path):
    dense = AttnResKimiK3ForCausalLM(AttnResKimiK3Config.from_dict(release.text_fields(num_experts=None)))
    with pytest.raises(ValueError, match="no routed experts"):
        dense.save_pretrained(tmp_path / "out", packed_experts=True)
    model = AttnResKimiK3ForCausalLM(AttnResKimiK3Config.from_dict(release.text_fields(moe_intermediate_size=48)))
    with pytest.raises(ValueError, match=r"`model.layers.1.mlp.experts.down_proj` cannot be packed: .* has 48 of them"):
        model.save_pretrained(tmp_path / "out", packed_experts=True)
    assert not (tmp_path / "out").exists()


def test_packed_experts_are_decoded_one_by_one(tmp_path, peak_bytes):
    fields = release.text_fields(moe_intermediate_size=256, routed_expert_hidden_size=256, num_experts=16)
    tensors, generator = {}, torch.Generator().manual_seed(0)
    for name, shape in release.shapes(fields).items():
        if ".experts." not in name:
            tensors[name] = torch.zeros(shape, dtype=torch.bfloat16)
            continue
        rows, columns = shape
        for part, width, low, high in (("packed", columns // 2, 0, 256), ("scale", columns // 32, 120, 130)):
            values = torch.randint(low, high, (rows, width), generator=generator, dtype=torch.uint8)
            tensors[name.replace("weight", f"weight_{part}")] = values
    source = release.write(tmp_path, fields | {"quantization_config": release.QUANTIZATION}, tensors)
    size = 2 * sum(torch.Size(shape).numel() for shape in release.shapes(fields).values())
    of_layer = 2 * 3 * 16 * 256 * 256
    peak = peak_bytes(lambda: AutoModelForCausalLM.from_pretrained(source))
    assert peak < size + 2.5 * of_layer < 2 * size


def test_a_model_that_is_saved_by_its_own_names_resumes(composite, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(composite)
    model.save_pretrained(tmp_path / "checkpoint-7")
    assert any(".forget_gate." in name for name in stored(tmp_path / "checkpoint-7"))
    assert torch.equal(AutoModelForCausalLM.from_pretrained(tmp_path / "checkpoint-7")(IDS).logits, model(IDS).logits)


@pytest.mark.parametrize("end", ["layers.1.mlp.experts.down_proj", "lm_head.weight", "0.self_attn.forget_gate.A_log"])
def test_a_training_checkpoint_that_lacks_a_tensor_is_refused(composite, tmp_path, end):
    """Otherwise `transformers` would draw the tensor at random."""
    folder = tmp_path / "checkpoint-7"
    AutoModelForCausalLM.from_pretrained(composite).save_pretrained(folder)
    (file,) = folder.glob("*.safetensors")
    tensors = load_file(file)
    del tensors[layer(tensors, end)]
    save_file(tensors, file, {"format": "pt"})
    with pytest.raises(ValueError, match=rf"the checkpoint lacks `.*{end}`"):
        AutoModelForCausalLM.from_pretrained(folder)


@torch.no_grad()
def test_other_connections_are_saved_too(fields, tmp_path):
    config = AttnResKimiK3Config.from_dict(fields | {"residual_connection": "mhc"})
    model = AttnResKimiK3ForCausalLM(config).eval()
    model.save_pretrained(tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("error", FamilyWarning)  # all tensors are read
        again = AttnResKimiK3ForCausalLM.from_pretrained(tmp_path)
    assert again.config.residual_connection == "mhc"
    assert torch.equal(again(IDS).logits, model(IDS).logits)


def layer(tensors: dict[str, Tensor], end: str) -> str:
    return next(name for name in sorted(tensors) if name.endswith(end))


def remove(end: str) -> Callable[[dict, dict], None]:
    return lambda config, tensors: tensors.pop(layer(tensors, end))


def replace(end: str, tensor: Tensor) -> Callable[[dict, dict], None]:
    return lambda config, tensors: tensors.update({layer(tensors, end): tensor})


def field(name: str, value: Any, owner: str = "") -> Callable[[dict, dict], None]:
    def change(config, tensors):
        text = config["text_config"]
        (text[owner] if owner else text)[name] = value

    return change


_PARTS = ("", "configuration_", "layout_", "packed_", "packing_", "shapes_", "vision_configuration_", "vision_")
KIMI_K3 = tuple(f"kimi_k3_{part}attnres.py" for part in _PARTS)
LISTS = "linear_attn_config"
LAYERS = "language_model.model.layers."


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            remove("layers.3.self_attn.q_a_proj.weight"),
            r"lacks `language_model.model.layers.3.self_attn.q_a_proj.weight`",
        ),
        (remove("layers.3.self_attn.g_proj.weight"), r"lacks `.*layers.3.self_attn.g_proj.weight`"),
        (remove("layers.2.mlp_res_proj.weight"), r"lacks `.*layers.2.mlp_res_proj.weight`"),
        (remove("experts.3.w2.weight"), r"lacks `.*experts.3.w2.weight`"),
        (remove("lm_head.weight"), r"lacks `language_model.lm_head.weight`"),
        (replace("layers.0.self_attn.A_log", torch.zeros(2)), r"layers.0.self_attn.A_log` has 2 entries, .* least 3"),
        (replace("layers.0.self_attn.A_log", torch.ones(128)), r"layers.0.self_attn.A_log` must be zero after .* 3 "),
        (
            replace("layers.1.mlp_res_norm.weight", torch.ones(63)),
            r"mlp_res_norm.weight` has the shape \[63\], .* \[64\]",
        ),
        (replace("experts.2.w1.weight", torch.ones(32, 31)), r"w1.weight` has the shape \[32, 31\], .* \[32, 32\]"),
        (
            replace("layers.0.self_attn.q_proj.weight", torch.ones(24, 64, dtype=torch.int8)),
            r"layers.0.self_attn.q_proj.weight` has the dtype I8, but must have one of F64",
        ),
        (
            lambda config, tensors: tensors.update(
                {f"{LAYERS}1.block_sparse_moe.experts.8.w1.weight": torch.ones(32, 32).bfloat16()}
            ),
            r"holds `.*experts.8.w1.weight`, but `num_experts` of its config.json is 8",
        ),
        (
            lambda config, tensors: tensors.update(
                {f"{LAYERS}1.block_sparse_moe.experts.7.w1.weight_packed": torch.ones(32, 16, dtype=torch.uint8)}
            ),
            r"holds both `.*experts.7.w1.weight` and `.*experts.7.w1.weight_packed`",
        ),
        (
            # Names like the model's own in another part do not make it a training checkpoint.
            lambda config, tensors: (
                tensors.update({"vision_tower.forget_gate.x": torch.zeros(1)}),
                remove("experts.3.w2.weight")(config, tensors),
            ),
            r"lacks `.*experts.3.w2.weight`",
        ),
        (field("num_experts", 10**9), r"holds \d+ tensors, too few for the 1,000,000,000 experts in `num_experts`"),
        (field("q_lora_rank", -1), "`q_lora_rank` is -1, but must be an integer >= 1"),
        (field("head_dim", 0, LISTS), "`linear_head_dim` is 0, but must be an integer >= 1"),
        (field("moe_intermediate_size", -1), "`moe_intermediate_size` is -1, but must be an integer >= 1"),
        (field("dtype", 7), "`dtype` is 7, but must be the name of a dtype"),
        (field("num_hidden_layers", 10**12), "layer 8 is in neither `full_attn_layers` nor `kda_layers`"),
        (field("num_hidden_layers", "7"), "`num_hidden_layers` is '7', but must be an integer"),
        (field("first_k_dense_replace", "1"), "`first_k_dense_replace` is '1', but must be an integer"),
        (field("full_attn_layers", 4, LISTS), "`full_attn_layers` is 4, but must be a list of layers"),
        (field("linear_attn_config", [1]), r"`linear_attn_config` is \[1\], but must be an object"),
        (field("quantization_config", "mxfp4"), "`quantization_config` is 'mxfp4', but must be an object"),
        (field("quantization_config", {"format": ["mxfp4"]}), r"`quantization_config` has the format \['mxfp4'\], but"),
        (lambda config, tensors: config.update(text_config="x"), "`text_config` is 'x', but must be an object"),
        (field("attn_res_block_size", 0), "`attn_res_block_size` is 0, .* an integer >= 1"),
        (field("full_attn_layers", [3, 4, 6, 7], LISTS), "layer 3 is in both `full_attn_layers` and `kda_layers`"),
        (field("full_attn_layers", [4, 6], LISTS), "layer 7 is in neither `full_attn_layers` nor `kda_layers`"),
        (field("full_attn_layers", [0, 4, 6, 7], LISTS), "`full_attn_layers` has the layer 0, .* from 1 to 7"),
        (field("full_attn_layers", [4, 6, 7, 8], LISTS), "`full_attn_layers` has the layer 8, .* from 1 to 7"),
        (field("gate_lower_bound", 1.0, LISTS), "`gate_lower_bound` is 1.0, .* a finite number < 0, or null"),
        (field("safe_gate", True, LISTS), "`linear_attn_config` has the field `safe_gate`"),
        (field("attn_logit_softcapping", 30.0), "`attn_logit_softcapping` .30.0. may change what the model computes"),
        (field("activation_situ_beta", None), "`activation_situ_beta` is None, .* a finite number > 0"),
        (field("activation_situ_beta", True), "`activation_situ_beta` is True, .* a finite number > 0"),
        (
            field("activation_situ_linear_beta", 10**400),
            "`activation_situ_linear_beta` is 10+.+0, .* finite number > 0",
        ),
        (
            field("hidden_act", "silu"),
            "`activation_situ_beta` is 4.0, .* null where `hidden_act` is 'silu'",
        ),
        (field("hidden_act", None), "`activation_situ_beta` is 4.0, .* null where `hidden_act` is None"),
        (field("routed_scaling_factor", float("nan")), "`routed_scaling_factor` is nan, .* a finite number"),
        (field("mla_use_nope", False), "`mla_use_nope` is False, .* no position encoding"),
        (field("moe_router_activation_func", "softmax"), "`moe_router_activation_func` is 'softmax', .* 'sigmoid'"),
        (field("topk_method", "greedy"), "`topk_method` is 'greedy'"),
        (field("hidden_act", "sitou"), "`hidden_act` is 'sitou'"),
        (
            field("quantization_config", {"format": "float-quantized"}),
            "`quantization_config` has the format 'float",
        ),
    ],
)
def test_a_wrong_checkpoint_is_refused_in_one_line(changed, change, message):
    source = changed(change)
    with pytest.raises(ValueError, match=message) as error:
        AutoModelForCausalLM.from_pretrained(source)
    assert "\n" not in str(error.value)
    assert str(error.value).startswith(f"{source}: ")


def test_a_tensor_in_two_shards_is_refused(composite, tmp_path):
    (tmp_path / "config.json").write_bytes((composite / "config.json").read_bytes())
    tensors = stored(composite)
    names = sorted(tensors)
    shards = {"model-1.safetensors": names[:9], "model-2.safetensors": names[8:]}
    for file, held in shards.items():
        save_file({name: tensors[name] for name in held}, tmp_path / file, {"format": "pt"})
    weight_map = {name: file for file, held in shards.items() for name in held}
    index = {"metadata": {}, "weight_map": weight_map}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    message = f"{tmp_path}: `{names[8]}` lies in both model-1.safetensors and model-2.safetensors"
    with pytest.raises(ValueError, match=message):
        AutoModelForCausalLM.from_pretrained(tmp_path)


@pytest.mark.parametrize(
    ("change", "tensor"),
    [
        (field("mla_use_output_gate", False), "layers.3.self_attn.g_proj"),
        (field("num_shared_experts", None), "layers.1.block_sparse_moe.shared_experts.down_proj"),
        (field("latent_moe_use_norm", False), "layers.1.block_sparse_moe.routed_expert_norm"),
        (field("attn_res_block_size", None), "layers.0.mlp_res_norm"),
    ],
)
def test_tensors_that_a_wrong_field_leaves_out_are_named(changed, change, tensor):
    with pytest.warns(FamilyWarning, match=rf"holds `.*{tensor}.weight`.*Because of `.* the model does not read them"):
        _, info = AutoModelForCausalLM.from_pretrained(changed(change), output_loading_info=True)
    # Of unexpected tensors `transformers` reports that they can be ignored.
    assert not info["unexpected_keys"]


@pytest.mark.parametrize("end", ["layers.0.self_attn.q_proj.bias", "layers.3.self_attn.q_a_proj.bias"])
def test_no_field_is_blamed_for_a_stray_tensor(changed, end):
    source = changed(lambda config, tensors: tensors.update({f"{LAYERS.removesuffix('layers.')}{end}": torch.ones(1)}))
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "the checkpoint holds", FamilyWarning)
        _, info = AutoModelForCausalLM.from_pretrained(source, output_loading_info=True)
    assert info["unexpected_keys"] == {f"model.{end}"}


def test_a_decoder_that_is_loaded_as_a_language_model_names_the_class_that_loads_it(composite, tmp_path):
    AutoModel.from_pretrained(composite).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"lacks `language_model.lm_head.weight`.*decoder without a head.*`AutoModel`"):
        AutoModelForCausalLM.from_pretrained(tmp_path)


@pytest.mark.parametrize(
    ("end", "new", "message"),
    [
        ("experts.1.w1.weight_scale", None, r"lacks `.*experts.1.w1.weight_scale`, a part"),
        (
            "experts.1.w1.weight_scale",
            torch.zeros(32, 2, dtype=torch.uint8),
            r"w1.weight_scale` has the shape \[32, 2\]",
        ),
        ("experts.1.w2.weight_packed", torch.zeros(32, 16), r"w2.weight_packed` has .* the dtype F32, .* uint8"),
        ("experts.1.w3.weight_packed", None, r"quantised tensors that no rule covers: `.*experts.1.w3.weight_scale`"),
        ("experts.1.w3.weight_scale", torch.full((32, 1), 255, dtype=torch.uint8), r"experts.1.w3.* scale of NaN"),
        ("shared_experts.up_proj.weight_packed", torch.zeros(64, 32, dtype=torch.uint8), "no rule covers: .*shared"),
    ],
)
def test_a_wrong_packed_tensor_is_refused_in_one_line(packed_release, tmp_path, end, new, message):
    source = tmp_path / "source"
    shutil.copytree(packed_release[0], source)
    shards = [(file, load_file(file)) for file in source.glob("*.safetensors")]
    prefix = "language_model.model.layers.1.block_sparse_moe."
    file, tensors = next((shard for shard in shards if f"{prefix}{end}" in shard[1]), shards[0])
    tensors.pop(f"{prefix}{end}", None)
    if new is not None:
        tensors[f"{prefix}{end}"] = new
    save_file(tensors, file, {"format": "pt"})
    with pytest.raises(ValueError, match=message) as error:
        AutoModelForCausalLM.from_pretrained(source)
    assert "\n" not in str(error.value)


def test_layers_of_multi_token_prediction_are_left_out_and_named(changed):
    def change(config, tensors):
        config["text_config"]["num_nextn_predict_layers"] = 1
        tensors["language_model.model.layers.7.input_layernorm.weight"] = torch.ones(64)

    with pytest.warns(FamilyWarning, match=r"model\.layers\.7\.\* \(beyond the last layer\): 1 tensor,"):
        model = AutoModelForCausalLM.from_pretrained(changed(change))
    assert len(model.model.layers) == 7


def test_the_unused_pair_of_the_first_layer_may_be_missing(changed, composite):
    def change(config, tensors):
        for part in ("proj", "norm"):
            del tensors[f"language_model.model.layers.0.self_attention_res_{part}.weight"]

    expected = AutoModelForCausalLM.from_pretrained(composite)(IDS).logits
    assert torch.equal(AutoModelForCausalLM.from_pretrained(changed(change))(IDS).logits, expected)


def test_no_kimi_linear_is_built_from_the_fields_of_kimi_k3(tmp_path, fields, tensors):
    source = release.write(tmp_path / "text", fields, tensors, layout="text")
    for load in (AttnResForCausalLM.from_pretrained, AttnResConfig.from_pretrained):
        with pytest.raises(ValueError, match="fields of Kimi K3"):
            load(source)
    for name in ("routed_expert_hidden_size", "mla_use_output_gate"):
        with pytest.raises(ValueError, match="fields of Kimi K3"):
            AttnResConfig(**{name: fields[name]})
    only_blocks = {"model_type": "kimi_linear", "attn_res_block_size": 3}
    (tmp_path / "config.json").write_text(json.dumps(only_blocks))
    with pytest.raises(ValueError, match="fields of Kimi K3"):
        AttnResConfig.from_pretrained(tmp_path)


def test_a_configuration_is_the_same_after_a_round_trip(composite, tmp_path):
    config = AutoConfig.from_pretrained(composite)
    assert type(config) is AttnResKimiK3Config
    assert AttnResKimiK3Config.from_dict(config.to_dict()).to_dict() == config.to_dict()
    assert (config.attn_res_block_size, config.num_local_experts, config.n_shared_experts) == (3, 8, 2)
    assert config.layer_types == [
        *["linear_attention"] * 3,
        *["full_attention", "linear_attention"],
        *["full_attention"] * 2,
    ]
    config.save_pretrained(tmp_path)
    assert AutoConfig.from_pretrained(tmp_path).to_dict() == config.to_dict()
    assert re.search(r"Block AttnRes, 3 blocks of 3 layers \(7 layers\)", describe_connection(config))


def test_fields_of_the_parts_that_a_saved_model_lacks_are_left_out(changed, tmp_path):
    def change(config, tensors):
        config["media_begin_token_id"] = 41

    AutoModelForCausalLM.from_pretrained(changed(change)).save_pretrained(tmp_path / "out")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config.keys().isdisjoint({"media_begin_token_id", "media_placeholder_token_id", "vision_config"})


def test_the_code_of_kimi_k3_does_not_travel_with_other_models(tiny_model, tmp_path):
    tiny_model().save_pretrained(tmp_path)
    assert (tmp_path / "modeling_attnres.py").exists()
    assert not {path.name for path in tmp_path.iterdir()} & {*KIMI_K3}
