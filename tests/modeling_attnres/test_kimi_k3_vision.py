"""Kimi K3 that sees: its tower and projector, images in prompts, and releases with their vision part."""

import inspect
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModel, AutoModelForCausalLM, AutoModelForImageTextToText, GenerationMixin
from transformers.distributed import DistributedConfig

from attnres import AttnResKimiK3Config, AttnResKimiK3ForCausalLM, AttnResKimiK3ForConditionalGeneration
from attnres.residual_attnres import FamilyWarning

from .. import forks
from . import kimi_k3_release as release

GRIDS = torch.tensor([[1, 4, 6], [1, 2, 2], [1, 6, 4]])  # of images with 6, 1 and 6 tokens
PLACEHOLDER = release.PLACEHOLDER
# Two prompts. The first has two images, the second has one and is padded on the left.
FIRST = [5, 9, *[PLACEHOLDER] * 6, 3, 7, PLACEHOLDER, 8, 21]
SECOND = [11, *[PLACEHOLDER] * 6, 4]
PADDING = len(FIRST) - len(SECOND)
IDS = torch.tensor([FIRST, [0] * PADDING + SECOND])
MASK = torch.tensor([[1] * len(FIRST), [0] * PADDING + [1] * len(SECOND)])


def patches(grids: Tensor, seed: int = 0, size: int = 2) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(int(grids.prod(-1).sum()), 3, size, size, generator=generator)


IMAGES = {"pixel_values": patches(GRIDS), "image_grid_thw": GRIDS}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    fields = release.text_fields()
    return release.write(tmp_path_factory.mktemp("k3") / "release", fields, release.random_tensors(fields), vision=True)


@pytest.fixture(scope="module")
def model(folder) -> AttnResKimiK3ForConditionalGeneration:
    model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).eval()
    model.generation_config.eos_token_id = None
    return model


def stored(folder: Path) -> dict[str, Tensor]:
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


def see(tensors: dict[str, Tensor], pixels: Tensor, grids: Tensor, vision: dict[str, Any]) -> Tensor:
    """The tokens of images, by the equations of the released tensors, in float64 and without the code under test."""
    w = {name: tensor.double() for name, tensor in tensors.items()}
    heads, width = vision["vt_num_attention_heads"], vision["vt_hidden_size"]
    size = vision["qkv_hidden_size"] // heads

    def norm(x: Tensor, name: str, eps: float) -> Tensor:
        return x * (x.square().mean(-1, keepdim=True) + eps).rsqrt() * w[name]

    results = []
    for (frames, height, columns), x in zip(grids.tolist(), pixels.double().split(grids.prod(-1).tolist())):
        x = F.conv2d(x, w["vision_tower.patch_embed.proj.weight"], stride=vision["patch_size"]).flatten(1)
        table = w["vision_tower.patch_embed.pos_emb.weight"].permute(2, 0, 1)[None]
        table = F.interpolate(table, (height, columns), mode="bilinear", align_corners=False)[0].flatten(1).T
        rates = 10000.0 ** (-torch.arange(width // 2).double() / (width // 2))
        time = torch.stack([torch.cat([(k * rates).sin(), (k * rates).cos()]) for k in range(frames)]) * (frames > 1)
        x = x + (table[None] + time[:, None]).flatten(0, 1)
        row, column = (
            t.flatten().repeat(frames)
            for t in torch.meshgrid(torch.arange(height), torch.arange(columns), indexing="ij")
        )
        rates = 10000.0 ** (-4 * torch.arange(size // 4).double() / size)
        # Even pairs turn by the column, and odd pairs by the row.
        angles = torch.stack([column[:, None] * rates, row[:, None] * rates], -1).flatten(1)
        turn = torch.polar(torch.ones_like(angles), angles)[:, None]
        for i in range(vision["vt_num_hidden_layers"]):
            block = f"vision_tower.encoder.blocks.{i}."
            qkv = norm(x, f"{block}norm0.weight", 1.1920929e-07) @ w[f"{block}wqkv.weight"].T
            q, k, v = qkv.view(len(x), 3, heads, size).unbind(1)
            q, k = (
                torch.view_as_real(torch.view_as_complex(t.unflatten(-1, (-1, 2)).contiguous()) * turn).flatten(2)
                for t in (q, k)
            )
            weights = torch.einsum("ihd,jhd->hij", q, k).mul(size**-0.5).softmax(-1)
            x = x + torch.einsum("hij,jhd->ihd", weights, v).flatten(1) @ w[f"{block}wo.weight"].T
            inner = norm(x, f"{block}norm1.weight", 1.1920929e-07) @ w[f"{block}mlp.fc0.weight"].T
            x = x + F.gelu(inner, approximate="tanh") @ w[f"{block}mlp.fc1.weight"].T
        x = norm(x, "vision_tower.encoder.final_layernorm.weight", 1.1920929e-07)
        x = x.view(frames, height // 2, 2, columns // 2, 2, width).mean(0).transpose(1, 2).flatten(2).flatten(0, 1)
        x = F.gelu(x @ w["mm_projector.proj.0.weight"].T) @ w["mm_projector.proj.2.weight"].T
        results.append(norm(x, "mm_projector.post_norm.weight", vision["projector_ln_eps"]))
    return torch.cat(results)


@torch.no_grad()
def test_tower_and_projector_follow_the_equations(folder):
    model = AttnResKimiK3ForConditionalGeneration.from_pretrained(folder, dtype=torch.float64)
    # Also clips of several frames, for which the tower is made.
    grids = torch.tensor([[1, 4, 6], [1, 2, 2], [3, 2, 4], [1, 4, 4], [4, 6, 2], [1, 2, 18]])
    tokens = model.get_image_features(patches(grids), grids)
    counts = (grids[:, 1] * grids[:, 2] // 4).tolist()
    assert [len(of_image) for of_image in tokens.pooler_output] == counts
    expected = see(stored(folder), patches(grids), grids, release.VISION)
    # Positions and angles are computed in float32, as in the release.
    assert (torch.cat(tokens.pooler_output) - expected).abs().max() < 1e-5 * expected.abs().max()


@torch.no_grad()
def test_tower_and_projector_give_the_numbers_of_the_released_code(tmp_path):
    # The released code gave these numbers in float64, for these weights.
    tensors = {}
    for rank, (name, shape) in enumerate(sorted(release.vision_shapes(20).items())):
        wave = torch.sin(0.7 * torch.arange(torch.Size(shape).numel(), dtype=torch.float64) + 1.3 * rank)
        tensors[name] = (1 + 0.1 * wave if "norm" in name else 0.3 * wave).view(shape)
    pixels = torch.cos(0.37 * torch.arange(52 * 12, dtype=torch.float64)).view(52, 3, 2, 2)
    fields = release.text_fields(hidden_size=20)
    source = release.write(tmp_path, fields, release.random_tensors(fields), vision=tensors)
    model = AttnResKimiK3ForConditionalGeneration.from_pretrained(source, dtype=torch.float64)
    tokens = torch.cat(model.get_image_features(pixels, torch.tensor([[1, 4, 6], [1, 2, 2], [3, 2, 4]])).pooler_output)
    assert tokens.sum().item() == pytest.approx(1.384831225, abs=1e-5)
    assert tokens.abs().mean().item() == pytest.approx(0.906266798, abs=1e-6)
    first, last = [1.350858977, 0.739124172, -0.440597107, -1.350272596], [-0.848384268, 0.264361891, 1.305173875]
    assert tokens[0, :4].tolist() == pytest.approx(first, abs=1e-5)
    assert tokens[8, :3].tolist() == pytest.approx(last, abs=1e-5)


@torch.no_grad()
def test_image_tokens_are_the_first_source_in_the_place_of_placeholders(model):
    outputs = model(IDS, attention_mask=MASK, **IMAGES, output_hidden_states=True, output_depth_attentions=True)
    tokens = torch.cat(model.get_image_features(**IMAGES).pooler_output)
    embeddings = model.get_input_embeddings()(IDS)
    is_image = IDS == PLACEHOLDER
    # The first layer reads the embeddings themselves.
    first = outputs.hidden_states[0]
    assert torch.equal(first[is_image], tokens) and torch.equal(first[~is_image], embeddings[~is_image])
    assert all(weights.shape[1:] == IDS.shape for weights in outputs.depth_attentions)
    by_embeddings = model(inputs_embeds=first, attention_mask=MASK).logits
    assert torch.equal(by_embeddings[MASK == 1], outputs.logits[MASK == 1])


@torch.no_grad()
def test_generation_in_a_batch_gives_each_prompt_its_own_tokens(model):
    options = {"max_new_tokens": 6, "do_sample": False}
    apart = [
        model.generate(torch.tensor([FIRST]), **part_of_images(0, 2), **options)[0, len(FIRST) :],
        model.generate(torch.tensor([SECOND]), **part_of_images(2, 3), **options)[0, len(SECOND) :],
    ]
    expected = torch.stack(apart)
    # Releases of `transformers` that do not encode images before the prompt neither read it in chunks nor repeat it.
    encodes = hasattr(GenerationMixin, "_supports_mm_encoder_outputs")
    ways: list[dict[str, Any]] = [{}, {"use_cache": False}, {"cache_implementation": "static"}]
    for changes in ways + ([{"prefill_chunk_size": 3}] if encodes else []):
        given = model.generate(IDS, attention_mask=MASK, **IMAGES, **options, **changes)
        assert torch.equal(given[:, IDS.shape[1] :], expected), changes
    embeddings = model.get_input_embeddings()(IDS)
    given = model.generate(inputs_embeds=embeddings, attention_mask=MASK, **IMAGES, **options)
    assert torch.equal(given, expected)
    # Each beam has the images of its prompt.
    beams = {"max_new_tokens": 4, "num_beams": 2, "do_sample": False}
    if not encodes:
        for refused in (beams, options | {"prefill_chunk_size": 3}):
            with pytest.raises(ValueError, match=r"this `transformers` .* update it"):
                model.generate(IDS, attention_mask=MASK, **IMAGES, **refused)
        return
    given = model.generate(IDS, attention_mask=MASK, **IMAGES, **beams)
    alone = model.generate(torch.tensor([FIRST]), **part_of_images(0, 2), **beams)
    assert torch.equal(given[0], alone[0])


def part_of_images(start: int, stop: int) -> dict[str, Tensor]:
    sizes = GRIDS.prod(-1).tolist()
    parts = IMAGES["pixel_values"].split(sizes)
    return {"pixel_values": torch.cat(parts[start:stop]), "image_grid_thw": GRIDS[start:stop]}


def test_the_loss_counts_no_placeholder_and_trains_every_tensor_of_the_vision_part(model):
    labels = IDS.masked_fill(MASK == 0, -100)
    outputs = model(IDS, attention_mask=MASK, labels=labels, **IMAGES)
    logits, targets = outputs.logits[:, :-1], labels.masked_fill(IDS == PLACEHOLDER, -100)[:, 1:]
    assert outputs.loss.item() == pytest.approx(F.cross_entropy(logits.transpose(1, 2), targets).item(), rel=1e-5)
    embeds = model.get_input_embeddings()(IDS)  # their placeholders are not counted either
    again = model(inputs_embeds=embeds, attention_mask=MASK, labels=labels, **IMAGES)
    assert again.loss.item() == pytest.approx(outputs.loss.item(), rel=1e-6)
    outputs.loss.backward()
    vision = {name: p for name, p in model.named_parameters() if "vision_tower" in name or "mm_projector" in name}
    assert len(vision) == 2 * 8 + 3 + 3 and all(p.grad.abs().max() > 0 for p in vision.values())
    model.zero_grad()


@pytest.mark.parametrize("packed", [False, True], ids=["plain", "packed"])
def test_a_release_is_saved_as_it_was(folder, tmp_path, packed):
    options = {}
    if packed:
        fields = release.text_fields()
        tensors, _ = release.pack_experts(release.random_tensors(fields))
        fields |= {"quantization_config": release.QUANTIZATION}
        folder, options = release.write(tmp_path / "source", fields, tensors, vision=True), {"packed_experts": True}
    model = AutoModelForImageTextToText.from_pretrained(folder, dtype="auto", **options)
    assert type(model) is AttnResKimiK3ForConditionalGeneration and model.dtype is torch.bfloat16
    model.save_pretrained(tmp_path / "saved")
    before, after = stored(folder), stored(tmp_path / "saved")
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        assert after[name].dtype == tensor.dtype and torch.equal(
            after[name].view(torch.uint8), tensor.view(torch.uint8)
        )
    old, new = (json.loads((path / "config.json").read_text()) for path in (folder, tmp_path / "saved"))
    # How attention is computed is no property of the weights.
    del old["vision_config"]["_attn_implementation"]
    for name in ("vision_config", "media_placeholder_token_id", "architectures", "model_type"):
        assert new[name] == old[name]
    again = AutoModelForImageTextToText.from_pretrained(tmp_path / "saved", dtype="auto", **options)
    with torch.no_grad():
        assert torch.equal(again(IDS, MASK, **IMAGES).logits, model(IDS, MASK, **IMAGES).logits)


def test_the_text_model_alone_is_loaded_by_its_auto_classes(folder, model):
    with pytest.warns(FamilyWarning, match="`AutoModelForImageTextToText` loads a vision part"):
        text = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    assert type(text) is AttnResKimiK3ForCausalLM and not any("vision" in name for name in text.state_dict())
    words = IDS.masked_fill(IDS == PLACEHOLDER, 6)
    with torch.no_grad():
        assert torch.equal(text(words, MASK).logits, model(words, MASK).logits)
    with pytest.raises(ValueError, match="`pixel_values` are given, but this is the text model alone"):
        text(IDS, MASK, **IMAGES)
    with pytest.warns(FamilyWarning):
        assert type(AutoModel.from_pretrained(folder)).__name__ == "AttnResKimiK3Model"


BAD = {
    "no images": (IDS, (0, 3), {"pixel_values": None}, "hold 13 placeholders .id 40., but no images are given"),
    "more placeholders": (
        torch.tensor([[*FIRST, PLACEHOLDER]]),
        (0, 2),
        {},
        "hold 8 placeholders .id 40., but .* 7 tokens",
    ),
    "fewer placeholders": (torch.tensor([SECOND]), (0, 3), {}, "hold 6 placeholders .id 40., but .* 13 tokens"),
    "no grid": (IDS, (0, 3), {"image_grid_thw": None}, r"must have the shape \[images, 3\], but has None"),
    "other grid": (
        IDS,
        (0, 3),
        {"image_grid_thw": torch.tensor([[5, 2, 2]])},
        "has the grid .* a clip has 1 to 4 frames",
    ),
    "odd grid": (IDS, (0, 3), {"image_grid_thw": torch.tensor([[1, 3, 4]])}, "must be multiples of 2 and 2"),
    "long grid": (IDS, (0, 3), {"image_grid_thw": torch.tensor([[1, 2, 514]])}, "at most 512 patches"),
    "too few patches": (IDS, (0, 2), {"image_grid_thw": GRIDS}, "counts 52 patches, but `pixel_values` has 28"),
    "video": (IDS, (0, 3), {"pixel_values_videos": torch.zeros(4, 3, 2, 2)}, "Kimi K3 reads images"),
    "whole image": (
        IDS,
        (0, 3),
        {"pixel_values": torch.zeros(1, 3, 8, 8)},
        r"\[patches, 3, 2, 2\], but has \[1, 3, 8, 8\]",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_images_that_do_not_fit_are_refused_in_one_line(model, case):
    ids, images, changes, message = BAD[case]
    with pytest.raises(ValueError, match=message) as error:
        model(ids, **part_of_images(*images) | changes)
    assert "\n" not in str(error.value)


def test_a_checkpoint_without_a_whole_vision_part_is_refused_in_one_line(tmp_path):
    fields = release.text_fields()
    tensors = release.random_tensors(fields)
    bare = release.write(tmp_path / "bare", fields, tensors)
    with pytest.raises(ValueError, match=r"the checkpoint lacks .* `AutoModelForCausalLM` loads the text model alone"):
        AutoModelForImageTextToText.from_pretrained(bare)
    vision = release.vision_tensors(64) | {"mm_projector.post_norm.weight": torch.ones(63)}
    wrong = release.write(tmp_path / "wrong", fields, tensors, vision=vision)
    with pytest.raises(ValueError, match=r"`mm_projector.post_norm.weight` has the shape \[63\], but must have \[64\]"):
        AutoModelForImageTextToText.from_pretrained(wrong)
    text = AttnResKimiK3ForCausalLM.from_pretrained(bare)
    text.save_pretrained(tmp_path / "text")
    with pytest.raises(ValueError, match="no `vision_config`: this is the text model alone"):
        AutoModelForImageTextToText.from_pretrained(tmp_path / "text")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("norm_type", "layernorm"),
        ("attn_bias", True),
        ("qkv_hidden_size", 26),
        ("projector_ln_eps", -1e-5),
        ("projector_ln_eps", float("nan")),
        ("init_pos_emb_width", 5),
        ("patch_size", 0),
    ],
)
def test_a_vision_part_of_another_design_is_refused_where_it_would_run(name, value):
    outer = {"model_type": "kimi_k3", "text_config": release.text_fields(), "media_placeholder_token_id": PLACEHOLDER}
    config = AttnResKimiK3Config.from_dict(outer | {"vision_config": release.VISION | {name: value}})
    AttnResKimiK3ForCausalLM(config)
    with pytest.raises(ValueError, match=f"`{name.replace('init_', '')}`.*{value}"):
        AttnResKimiK3ForConditionalGeneration(config)


def test_defaults_are_those_of_the_release():
    with torch.device("meta"):
        config = AttnResKimiK3Config(vision_config={}, num_hidden_layers=1)
        model = AttnResKimiK3ForConditionalGeneration(config)
    sizes = [sum(p.numel() for p in part.parameters()) for part in (model.model.vision_tower, model.model.mm_projector)]
    assert sizes == [401_214_464, 46_144_512]


@pytest.mark.skipif(
    "ep_size" not in inspect.signature(DistributedConfig).parameters, reason="this transformers shards no experts"
)
@pytest.mark.slow
def test_a_step_sharded_by_fsdp2_and_experts_is_that_of_one_process(folder, model, tmp_path):
    torch.save(
        {"input_ids": IDS, "attention_mask": MASK, "labels": IDS.masked_fill(MASK == 0, -100), **IMAGES},
        tmp_path / "batch",
    )
    session, environment = (
        Path(__file__).with_name("kimi_k3_vision_session.py"),
        os.environ | {"CUDA_VISIBLE_DEVICES": ""},
    )
    done = forks.launch(session, folder, tmp_path / "batch", tmp_path, env=environment)
    assert done.returncode == 0, done.stderr[-4000:]
    seen = torch.load(tmp_path / "seen")
    model.zero_grad()
    loss = model(**torch.load(tmp_path / "batch")).loss
    loss.backward()
    assert seen["loss"] == pytest.approx(loss.item(), rel=1e-5)
    expected = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert seen["gradients"].keys() == expected.keys()
    for name, gradient in expected.items():
        assert (seen["gradients"][name] - gradient).norm() <= 1e-4 * gradient.norm(), name
    model.zero_grad()
    before, after = stored(folder), stored(tmp_path / "saved")
    assert before.keys() == after.keys() and all(torch.equal(after[name], t.float()) for name, t in before.items())
