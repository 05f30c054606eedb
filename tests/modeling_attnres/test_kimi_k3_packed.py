"""Routed experts of Kimi K3 stay packed in memory, and compute what the unpacked ones do."""

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    PreTrainedModel,
)

from attnres import AttnResKimiK3Config, AttnResKimiK3ForCausalLM
from attnres.kimi_k3_attnres import KimiK3PackedExperts
from attnres.kimi_k3_packed_attnres import MXFP4, NVFP4, PACKINGS, packed_linear

from .. import forks
from . import kimi_k3_release as release

IDS = torch.randint(3, 64, (2, 9), generator=torch.Generator().manual_seed(1))
FORMATS = {"MXFP4": (MXFP4, release.encode_mxfp4), "NVFP4": (NVFP4, release.encode_nvfp4)}
DTYPES = [torch.float32, torch.bfloat16, torch.float64, torch.float16]
pytestmark = pytest.mark.filterwarnings("ignore:Left out of the checkpoint")


def stored(folder: Path) -> dict[str, Tensor]:
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


def write_packed(folder: Path, title: str) -> Path:
    packing, encode = FORMATS[title]
    fields = release.text_fields() | {"quantization_config": release.QUANTIZATION | {"format": packing.name}}
    packed, meant = release.pack_experts(release.random_tensors(fields), encode)
    release.write(folder.with_name(f"{folder.name} meant"), release.text_fields(), meant)
    for name, tensor in packed.items():
        if name.endswith("w1.weight_packed"):
            tensor[tensor == 0x00] = 0x88  # zeros of either sign are one number, and two codes
    return release.write(folder, fields, packed, vision=True)


@pytest.fixture(scope="module", params=FORMATS)
def source(request, tmp_path_factory) -> Path:
    return write_packed(tmp_path_factory.mktemp("packed") / request.param, request.param)


@pytest.fixture(scope="module")
def mxfp4(tmp_path_factory) -> Path:
    return write_packed(tmp_path_factory.mktemp("packed") / "mxfp4", "MXFP4")


def load(source: Path, packed: bool = True, auto: Any = AutoModelForCausalLM, **kwargs: Any) -> PreTrainedModel:
    # The packed experts compute one after another, as this implementation does.
    kwargs.setdefault("experts_implementation", "eager")
    model = auto.from_pretrained(source, packed_experts=packed, **kwargs)
    kinds = {type(layer.mlp.experts) for layer in model.base_model.layers[1:]}
    assert (kinds == {KimiK3PackedExperts}) is packed
    return model


def parts(model: PreTrainedModel) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in model.named_parameters() if ".experts." in name}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_logits_and_gradients_are_those_of_unpacked_experts(source, dtype):
    results = []
    for packed in (False, True):
        model = load(source, packed, dtype=dtype)
        embeds = model.get_input_embeddings()(IDS).detach().requires_grad_()
        logits = model(inputs_embeds=embeds).logits
        logits.float().square().mean().backward()
        grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None and ".experts." not in name}
        results.append({"logits": logits, "input": embeds.grad} | grads)
    assert results[0].keys() == results[1].keys()
    for name, expected in results[0].items():
        assert torch.equal(results[1][name], expected), name


def test_experts_mean_what_was_packed(source):
    logits = load(source.with_name(f"{source.name} meant"), packed=False)(IDS).logits
    assert torch.equal(load(source)(IDS).logits, logits)


def test_parts_are_frozen_bytes_that_no_cast_reaches(source):
    model = load(source, dtype=torch.float32)
    before = {name: tensor.clone() for name, tensor in parts(model).items()}
    model = model.half().to(torch.bfloat16).float()
    assert before.keys() == parts(model).keys()
    for name, tensor in parts(model).items():
        assert (tensor.dtype, tensor.requires_grad) == (torch.uint8, False), name
        assert torch.equal(tensor, before[name]), name


def test_the_memory_of_experts_is_that_of_their_files(source):
    on_disk = sum(tensor.nbytes for name, tensor in stored(source).items() if ".experts." in name)
    assert sum(tensor.nbytes for tensor in parts(load(source)).values()) == on_disk


def test_a_save_has_the_bytes_of_the_release(source, tmp_path):
    load(source).save_pretrained(tmp_path, max_shard_size="100KB")
    before = {name: tensor for name, tensor in stored(source).items() if name.startswith("language_model.")}
    after = stored(tmp_path)
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        assert (after[name].dtype, after[name].shape) == (tensor.dtype, tensor.shape), name
        assert torch.equal(after[name].flatten().view(torch.uint8), tensor.flatten().view(torch.uint8)), name
    fields = [json.loads((folder / "config.json").read_text())["text_config"] for folder in (source, tmp_path)]
    assert fields[0]["quantization_config"] == fields[1]["quantization_config"]
    for packed in (False, True):
        assert torch.equal(load(tmp_path, packed)(IDS).logits, load(source)(IDS).logits)


def test_an_unpacked_save_names_no_quantisation(mxfp4, tmp_path):
    load(mxfp4, packed=False).save_pretrained(tmp_path)
    assert "quantization_config" not in (tmp_path / "config.json").read_text()
    with pytest.raises(ValueError, match=r"`packed_experts` is true, but the checkpoint holds `.*w1.weight`") as error:
        load(tmp_path)
    assert "\n" not in str(error.value)


def rewritten(source: Path, folder: Path, change: Callable[[dict[str, Tensor]], object]) -> Path:
    """Write the text model of a release again, after `change` of its tensors by their names without a prefix."""
    fields = json.loads((source / "config.json").read_text())["text_config"]
    prefix = "language_model."
    tensors = {name.removeprefix(prefix): t for name, t in stored(source).items() if name.startswith(prefix)}
    change(tensors)
    return release.write(folder, fields, tensors)


@pytest.mark.parametrize("name", ["w2.weight_scale", "w3.weight_packed"])
def test_a_part_that_is_missing_is_named(mxfp4, tmp_path, name):
    name = f"model.layers.2.block_sparse_moe.experts.3.{name}"
    with pytest.raises(ValueError, match=f"lacks `.*{name}`|holds quantised tensors"):
        load(rewritten(mxfp4, tmp_path / "broken", lambda tensors: tensors.pop(name)))


def test_a_scale_of_nan_is_refused(source, tmp_path):
    def break_scale(tensors: dict[str, Tensor]) -> None:
        code = 0x7F if is_nvfp4 else 0xFF
        tensors["model.layers.2.block_sparse_moe.experts.3.w1.weight_scale"].view(torch.uint8)[0, 0] = code

    is_nvfp4 = AttnResKimiK3Config.from_pretrained(source).packing is NVFP4
    with pytest.raises(ValueError, match=r"experts\.3\.w1\.weight_scale` holds a scale of NaN"):
        load(rewritten(source, tmp_path / "broken", break_scale))


def test_scales_of_activations_are_left_out(tmp_path):
    source = write_packed(tmp_path / "source", "NVFP4")
    name = "model.layers.2.block_sparse_moe.experts.3.w1.input_global_scale"
    changed = rewritten(source, tmp_path / "changed", lambda tensors: tensors.update({name: torch.ones(1)}))
    config = json.loads((changed / "config.json").read_text())
    group = config["text_config"]["quantization_config"]["config_groups"]["group_0"]
    group["input_activations"] = {"num_bits": 4, "type": "float", "dynamic": "local"}
    (changed / "config.json").write_text(json.dumps(config))
    model = load(changed)
    assert torch.equal(model(IDS).logits, load(source)(IDS).logits)
    model.save_pretrained(tmp_path / "out")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    group = config["text_config"]["quantization_config"]["config_groups"]["group_0"]
    assert group["input_activations"] is None


def test_generation_is_that_of_unpacked_experts(mxfp4):
    mask = torch.ones_like(IDS)
    mask[0, :3] = 0  # padding on the left
    settings = {"max_new_tokens": 6, "do_sample": False, "attention_mask": mask}
    first, second = (load(mxfp4, packed).generate(IDS, **settings) for packed in (False, True))
    assert torch.equal(first, second)


def test_an_implementation_of_experts_does_not_reach_packed_ones(mxfp4):
    logits = load(mxfp4)(IDS).logits
    for implementation in ("grouped_mm", "batched_mm"):
        model = load(mxfp4, experts_implementation=implementation)
        assert torch.equal(model(IDS).logits, logits)
        model = load(mxfp4)
        model.set_experts_implementation(implementation)
        assert torch.equal(model(IDS).logits, logits)


def test_checkpointing_keeps_gradients(mxfp4):
    grads = []
    for is_checkpointed in (False, True):
        model = load(mxfp4, dtype=torch.float32).train()
        if is_checkpointed:
            model.gradient_checkpointing_enable()
        model(IDS, labels=IDS).loss.backward()
        grads.append(model.get_input_embeddings().weight.grad)
    assert torch.equal(*grads)


def test_the_backward_pass_keeps_no_decoded_weights(source):
    packing = AttnResKimiK3Config.from_pretrained(source).packing
    experts = load(source).model.layers[1].mlp.experts
    x = torch.randn(3, experts.hidden_dim, requires_grad=True)
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor):
        result = packed_linear(x, packing, [getattr(experts, f"gate_up_proj_{part}")[0] for part in packing.parts])
    assert kept
    assert {tensor.dtype for tensor in kept} == {torch.uint8}
    result.sum().backward()
    assert x.grad is not None


@pytest.mark.parametrize("packing", PACKINGS.values(), ids=lambda packing: packing.title)
def test_gradients_agree_with_finite_differences(packing):
    shapes = packing.byte_shapes(6, 32)
    generator = torch.Generator().manual_seed(0)
    parts = {"packed": torch.randint(256, shapes["packed"], dtype=torch.uint8, generator=generator)}
    codes = (40, 100) if packing is NVFP4 else (120, 130)
    parts["scale"] = torch.randint(*codes, shapes["scale"], dtype=torch.uint8, generator=generator)
    parts["global_scale"] = torch.tensor([3.0]).view(torch.uint8)
    x = torch.randn(2, 32, dtype=torch.float64, generator=generator, requires_grad=True)

    def function(x: Tensor) -> Tensor:
        return packed_linear(x, packing, [parts[part] for part in packing.parts])

    assert torch.autograd.gradcheck(function, x)
    assert torch.autograd.gradgradcheck(function, x)
    weight = packing.decode(*(parts[part] for part in packing.parts)).double()
    torch.testing.assert_close(torch.func.jacrev(function)(x.detach())[0, :, 0], weight)


def test_copies_and_files_of_state_are_the_same_model(mxfp4, tmp_path):
    model = load(mxfp4)
    logits = model(IDS).logits
    assert torch.equal(copy.deepcopy(model)(IDS).logits, logits)
    torch.save(model.state_dict(), tmp_path / "state.pt")
    other = AttnResKimiK3ForCausalLM(model.config)
    other.load_state_dict(torch.load(tmp_path / "state.pt"))
    assert torch.equal(other.to(model.dtype).eval()(IDS).logits, logits)


def test_a_checkpoint_under_own_names_loads_packed(mxfp4, tmp_path):
    model = load(mxfp4)
    model.save_pretrained(tmp_path / "checkpoint-7")
    assert any(name.endswith("experts.gate_up_proj_packed") for name in stored(tmp_path / "checkpoint-7"))
    assert torch.equal(load(tmp_path / "checkpoint-7")(IDS).logits, model(IDS).logits)


def test_other_heads_keep_experts_packed(mxfp4):
    assert torch.equal(load(mxfp4, auto=AutoModel)(IDS)[0], load(mxfp4, False, auto=AutoModel)(IDS)[0])
    for auto in (AutoModelForSequenceClassification, AutoModelForTokenClassification):
        model = load(mxfp4, auto=auto, num_labels=3)
        assert model(IDS).logits.shape[-1] == 3


@pytest.mark.slow
def test_processes_share_packed_experts(source, tmp_path):
    """With FSDP2 and expert parallelism, two processes hold half each, and train as one does."""
    done = forks.launch(Path(__file__).with_name("kimi_k3_packed_session.py"), source, tmp_path)
    assert done.returncode == 0, done.stderr
    for way, result in json.loads((tmp_path / "results.json").read_text()).items():
        assert result["difference"] <= 2e-5, way
        assert result["share"] == 0.5, way
        before = {name: tensor for name, tensor in stored(source).items() if ".experts." in name}
        after = stored(tmp_path / way)
        for name, tensor in before.items():
            assert torch.equal(after[name].view(torch.uint8), tensor.view(torch.uint8)), (way, name)


@pytest.mark.slow
def test_offloaded_experts_stay_packed_on_disk(source, tmp_path):
    model = load(source)
    places = {name: "cpu" for name, _ in model.named_modules() if name.count(".") == 1} | {"lm_head": "cpu"}
    del places["model.layers"]
    places |= {f"model.layers.{i}": "disk" if i in (2, 3) else "cpu" for i in range(7)}
    offloaded = load(source, device_map=places, offload_folder=tmp_path / "offload")
    assert torch.equal(offloaded(IDS).logits, model(IDS).logits)
    offloaded.save_pretrained(tmp_path / "saved")
    for name, tensor in stored(tmp_path / "saved").items():
        if ".experts." in name:
            assert torch.equal(tensor.view(torch.uint8), stored(source)[name].view(torch.uint8)), name


@pytest.mark.slow
def test_compiled_experts_compute_the_same(source):
    experts = load(source, dtype=torch.float32).model.layers[1].mlp.experts
    compiled = torch.compile(experts, backend="aot_eager")
    generator = torch.Generator().manual_seed(0)
    index, weights = torch.randint(0, 8, (6, 2), generator=generator), torch.rand(6, 2, generator=generator)
    results = []
    for function in (experts, compiled):
        x = torch.randn(6, experts.hidden_dim, generator=torch.Generator().manual_seed(1)).requires_grad_()
        result = function(x, index, weights)
        result.square().sum().backward()
        results.append((result, x.grad))
    for ours, expected in zip(results[1], results[0]):
        torch.testing.assert_close(ours, expected)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_gpu_decodes_as_a_cpu_does(source):
    packing = AttnResKimiK3Config.from_pretrained(source).packing
    experts = load(source).model.layers[1].mlp.experts
    parts = [getattr(experts, f"gate_up_proj_{part}")[0] for part in packing.parts]
    for dtype in DTYPES:
        decoded = packing.decode(*(part.cuda() for part in parts), dtype)
        assert torch.equal(decoded.cpu(), packing.decode(*parts, dtype))
    expected = load(source, dtype=torch.float32)(IDS).logits
    torch.testing.assert_close(load(source, dtype=torch.float32).cuda()(IDS.cuda()).logits.cpu(), expected)
