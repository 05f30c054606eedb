"""The processor of Kimi K3 prepares images and prompts as the release does, without code from the release."""

import base64
import json
import os
import shutil
from io import BytesIO
from pathlib import Path

import pytest
import torch
from PIL import Image
from transformers import AutoConfig, AutoImageProcessor, AutoProcessor, PreTrainedTokenizerBase

from attnres import AttnResKimiK3ImageProcessor, AttnResKimiK3Processor
from attnres.kimi_k3_images_attnres import RELEASED

from ..checkpoints.kimi_release import NAMES, train_vocabulary, write_tokenizer
from . import kimi_k3_release as release

# Width and height of an image -> its number of tokens, as the released code counts them.
TOKENS = {
    (224, 224): 64,
    (303, 181): 77,
    (448, 449): 272,
    (640, 480): 414,
    (1024, 768): 1036,
    (1920, 1080): 2691,
    (4000, 3000): 15444,
    (7168, 7168): 16384,
    (20000, 300): 1024,
    (1861, 7041): 16817,
    (1, 1): 1,
}
CODE = {"AutoImageProcessor": "kimi_k3_vision_processing.KimiK3VisionProcessor"}
CODE |= {"AutoProcessor": "kimi_k3_processor.KimiK3Processor"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A release with an image processor, whose code must not run."""
    folder = tmp_path_factory.mktemp("k3")
    vocabulary = train_vocabulary([Path(__file__).read_text(encoding="utf-8")], 600)
    fields = {"text_config": release.text_fields(vocab_size=len(vocabulary) + 256), "model_type": "kimi_k3"}
    (folder / "config.json").write_text(json.dumps(fields | {"vision_config": release.VISION}))
    write_tokenizer(vocabulary, folder)
    settings = {"auto_map": CODE, "media_proc_cfg": RELEASED | {"sample_fps": 8.0}}
    (folder / "preprocessor_config.json").write_text(json.dumps(settings))
    for name in CODE.values():
        (folder / f"{name.partition('.')[0]}.py").write_text("raise SystemExit('this code must not run')\n")
    return folder


@pytest.fixture(scope="module")
def processor(folder) -> AttnResKimiK3Processor:
    return AutoProcessor.from_pretrained(folder)


def noise(width: int, height: int, mode: str = "RGB") -> Image.Image:
    torch.manual_seed(width)
    pixels = torch.randint(0, 256, (height, width, 4), dtype=torch.uint8).numpy()
    return Image.fromarray(pixels, "RGBA").convert(mode)


def image_of(values: torch.Tensor, grid: torch.Tensor) -> torch.Tensor:
    """The bytes of an image (height, width, 3) from its patches, by their definition."""
    _, rows, columns = grid.tolist()
    patch = values.shape[-1]
    pixels = torch.zeros(rows * patch, columns * patch, 3)
    for i, one in enumerate(values):
        row, column = divmod(i, columns)
        pixels[row * patch : (row + 1) * patch, column * patch : (column + 1) * patch] = one.permute(1, 2, 0)
    return ((pixels / 2 + 0.5) * 255).round().to(torch.uint8)


def chat(*parts: str | Image.Image) -> list[dict]:
    kinds = [("text" if isinstance(part, str) else "image", part) for part in parts]
    return [{"role": "user", "content": [{"type": kind, kind: part} for kind, part in kinds]}]


def test_sizes_give_the_numbers_of_tokens_of_the_release():
    processor = AttnResKimiK3ImageProcessor()
    for size, tokens in TOKENS.items():
        sizes = processor.sizes(*size)
        assert sizes.padded_width * sizes.padded_height == tokens * 28 * 28, size


def test_patches_are_in_rows_and_padded_by_black():
    given = noise(303, 181)
    out = AttnResKimiK3ImageProcessor()([given, noise(20, 60, "L")], return_tensors="pt")
    assert out["image_grid_thw"].tolist() == [[1, 14, 22], [1, 6, 2]]
    assert out["pixel_values"].shape == (14 * 22 + 6 * 2, 3, 14, 14) and out["pixel_values"].dtype == torch.float32
    pixels = image_of(out["pixel_values"][: 14 * 22], out["image_grid_thw"][0])
    original = torch.frombuffer(bytearray(given.tobytes()), dtype=torch.uint8).view(181, 303, 3)
    assert torch.equal(pixels[:181, :303], original)
    assert not pixels[181:].any() and not pixels[:, 303:].any()


def test_transparent_pixels_show_a_chessboard_behind_the_resized_image():
    processor = AttnResKimiK3ImageProcessor({**RELEASED, "in_patch_limit": 16})  # 4 x 4 patches
    image = Image.new("RGBA", (112, 112), (100, 0, 0, 51))  # alpha is 1/5
    out = processor(image, return_tensors="pt")
    pixels = image_of(out["pixel_values"], out["image_grid_thw"][0])
    assert pixels.shape == (56, 56, 3)  # squares of 8 pixels of the smaller image
    white, gray = torch.tensor([224, 204, 204]), torch.tensor([164, 144, 144])
    for y in (0, 7, 8, 55):
        for x in (0, 7, 8, 23, 24):
            expected = gray if (y // 8 + x // 8) % 2 else white
            assert (pixels[y, x].int() - expected).abs().max() <= 1  # a fraction is cut off, and alpha is rounded
    # The board is not resized, and a palette's transparent colour counts too.
    palette = Image.new("P", (16, 16), 3)
    palette.info["transparency"] = 3
    out = AttnResKimiK3ImageProcessor()(palette, return_tensors="pt")
    pixels = image_of(out["pixel_values"], out["image_grid_thw"][0])[:16, :16]
    assert pixels[..., 0].unique().tolist() == [180, 255] and pixels[0, 0, 0] == pixels[8, 8, 0] == 255


def test_files_keep_transparency_and_orientation_in_every_form(tmp_path):
    clear, turned = Image.new("RGBA", (30, 20), (9, 9, 9, 0)), noise(30, 20)
    exif = turned.getexif()
    exif[0x0112] = 6  # turned by 90 degrees, which the release does not look at
    clear.save(path := tmp_path / "clear.png")
    turned.save(tmp_path / "turned.png", exif=exif)
    data = path.read_bytes()
    text = base64.b64encode(data).decode()
    processor = AttnResKimiK3ImageProcessor()
    expected = processor(clear)["pixel_values"]
    assert expected.max() == 1
    for given in (path, str(path), data, f"data:image/png;base64,{text}", text):
        assert torch.equal(processor(given)["pixel_values"], expected), type(given)
    assert processor(tmp_path / "turned.png")["image_sizes"].tolist() == [[30, 20]]
    array = torch.tensor(bytearray(turned.tobytes()), dtype=torch.uint8).view(20, 30, 3)
    for given in (array.numpy(), array.permute(2, 0, 1)):
        assert torch.equal(processor(given)["pixel_values"], processor(turned)["pixel_values"])
    # White, in numbers from 0 to 1 that could be bytes, too.
    for white in (torch.ones(3, 28, 28), torch.ones(28, 28, 3).bool().numpy()):
        assert processor(white)["pixel_values"].min() == 1


def test_a_prompt_holds_the_original_size_and_a_token_for_each_group(processor):
    large, small = noise(2000, 1500), noise(40, 30)
    out = processor.apply_chat_template(
        chat("first ", large, " then ", small), tokenize=True, return_dict=True, return_tensors="pt"
    )
    tokens = [54 * 72, 2 * 2]
    start, between, middle, end = (f"<|{name}|>" for name in ("media_begin", "media_content", "media_pad", "media_end"))
    shown = [f"{start}image {size}{between}{middle * n}{end}" for size, n in zip(("2000x1500", "40x30"), tokens)]
    text = processor.decode(out["input_ids"][0])
    assert f"first {shown[0]} then {shown[1]}<|close|>" in text
    assert (out["input_ids"] == processor.image_token_id).sum() == sum(tokens) == len(out["pixel_values"]) // 4
    assert set(out) == {"input_ids", "attention_mask", "pixel_values", "image_grid_thw"}
    ranks = processor.tokenizer.convert_tokens_to_ids("[BOS]")
    assert processor.image_token_id == ranks + next(i for i, name in NAMES.items() if name == "<|media_pad|>")


def test_a_batch_of_conversations_keeps_images_with_their_text(processor):
    batch = [chat("a b", noise(30, 30)), chat("no image"), chat(noise(60, 30), "c d", noise(90, 30))]
    out = processor.apply_chat_template(
        batch, tokenize=True, return_dict=True, return_tensors="pt", processor_kwargs={"padding": True}
    )
    counts = (out["input_ids"] == processor.image_token_id).sum(1)
    assert counts.tolist() == [4, 0, 6 + 8] and len(out["image_grid_thw"]) == 3


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (b"no image", "the image given as bytes cannot be read as an image"),
        ("missing.png", r"missing\.png cannot be read as an image \(.*No such file"),
        ("data:image/png;base64,!", "cannot be read as an image"),
        (3, "the image given as int cannot be read as an image"),
        (Image.new("RGB", (0, 0)), "has 0 x 0 pixels, but must have one at least"),
        (Image.new("1", (20_000, 20_000)), "has more than 178,956,970 pixels"),
    ],
)
def test_bad_images_are_refused_in_one_line(processor, given, message):
    for call in (processor.image_processor, lambda image: processor(text=processor.image_token, images=image)):
        with pytest.raises(ValueError, match=message) as refused:
            call(given)
        assert "\n" not in str(refused.value)


def test_grey_values_of_more_than_8_bits_do_not_become_white_or_black_in_silence(processor, tmp_path, recwarn):
    ramp = torch.arange(16.0).view(4, 4)
    for name, values, is_warned in (
        ("bits.png", (ramp * 4000).to(torch.uint16), True),
        ("shares.tiff", ramp / 15, True),
        ("bytes.tiff", ramp * 17, False),
    ):
        Image.fromarray(values.numpy()).save(tmp_path / name)
        recwarn.clear()
        processor.image_processor(tmp_path / name)
        assert any(f"{name} has values from 0 to" in str(warning.message) for warning in recwarn) == is_warned


def test_damaged_and_huge_files_are_refused_in_one_line(processor, tmp_path):
    file = BytesIO()
    noise(300, 300).save(file, "PNG")
    with pytest.raises(ValueError, match="the image given as bytes cannot be read as an image"):
        processor.image_processor(file.getvalue()[:20_000])
    (path := tmp_path / "huge.pbm").write_bytes(b"P4 100000 100000\n")
    with pytest.raises(ValueError, match=r"huge\.pbm has more than 178,956,970 pixels. Make it smaller"):
        processor.image_processor(path)
    os.mkfifo(pipe := tmp_path / "pipe.png")  # reading it would wait for a writer
    for given in (pipe, str(pipe)):
        with pytest.raises(ValueError, match=r"pipe\.png cannot be read as an image \(it is not a file\)"):
            processor.image_processor(given)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"text": "x", "images": [noise(9, 9)]}, "the prompt has 0 of <|kimi_image_placeholder|>, but 1 images"),
        ({"text": ["<|kimi_image_placeholder|>"] * 2, "images": [noise(9, 9)]}, "the prompt has 2 of"),
        ({"text": "<|kimi_image_placeholder|>"}, "the prompt has 1 of <|kimi_image_placeholder|>, but 0 images"),
        ({"text": ["<|kimi_image_placeholder|>"] * 2, "images": [[noise(9, 9)] * 2, []]}, "but 2 images were given"),
        ({"text": "x", "videos": [[noise(9, 9)]]}, "Kimi K3 reads images and no videos"),
        (
            {"text": "<|kimi_image_placeholder|>", "images": noise(200, 200), "truncation": True, "max_length": 30},
            "the images of a prompt have 64 tokens, but truncation left",
        ),
    ],
)
def test_prompts_that_do_not_fit_their_images_are_refused(processor, options, message):
    with pytest.raises(ValueError) as refused:
        processor(**options)
    assert message in str(refused.value) and "\n" not in str(refused.value)


def test_images_in_reordered_results_of_tools_and_videos_in_chats_are_refused(processor):
    image = {"role": "tool", "tool": "f", "content": [{"type": "image", "image": noise(9, 9)}]}
    with pytest.raises(ValueError, match="in one of several results of tools"):
        processor.apply_chat_template([*chat("look at this"), image, image | {"content": "x"}], tokenize=True)
    video = [{"role": "user", "content": [{"type": "video", "path": "x.mp4"}]}]
    for tokenize in (True, False):
        with pytest.raises(ValueError, match="Kimi K3 reads images and no videos"):
            processor.apply_chat_template(video, tokenize=tokenize)


def test_empty_lists_of_images_are_no_images(processor):
    assert processor(text="x", images=[]) == processor(text=["x"], images=[[]]) == processor(text="x")


@pytest.mark.parametrize(
    "change",
    [
        {"fixed_output_tokens": 64},
        {"transparent_bg_config": {"pattern": "dots"}},
        {"in_patch_limit": 0},
        {"patch_size": -2},
        {"merge_kernel_size": [2, 2]},
        {"image_std": [0.5, 0.5, 0]},
        {"image_mean": [float("nan")] * 3},
        {"image_mean": None},
    ],
)
def test_unknown_settings_are_refused(change):
    with pytest.raises(ValueError, match=r"of `media_proc_cfg` is .* but must be"):
        AttnResKimiK3ImageProcessor(RELEASED | change)


def test_a_text_model_has_a_tokenizer_for_its_processor(folder, tmp_path):
    text = shutil.copytree(folder, tmp_path / "text", ignore=shutil.ignore_patterns("preprocessor_config.json"))
    assert isinstance(AutoProcessor.from_pretrained(text), PreTrainedTokenizerBase)


def test_a_saved_processor_has_the_released_settings(folder, tmp_path):
    processor = AutoProcessor.from_pretrained(folder)
    processor.save_pretrained(tmp_path)
    saved, source = (json.loads((at / "preprocessor_config.json").read_text()) for at in (tmp_path, folder))
    assert saved["media_proc_cfg"] == source["media_proc_cfg"]
    assert not (tmp_path / "processor_config.json").exists()
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    again, messages = AutoProcessor.from_pretrained(tmp_path), chat("what is ", noise(50, 70, "RGBA"))
    assert type(again) is AttnResKimiK3Processor
    assert type(AutoImageProcessor.from_pretrained(tmp_path)) is AttnResKimiK3ImageProcessor
    first, second = (
        one.apply_chat_template(messages, tokenize=True, return_dict=True, return_tensors="pt")
        for one in (processor, again)
    )
    assert first.keys() == second.keys() and all(torch.equal(first[key], second[key]) for key in first)


@pytest.mark.slow
def test_a_saved_processor_travels_with_its_code(folder, run, tmp_path):
    """A process that cannot import `attnres` prepares the same inputs."""
    processor, model = AutoProcessor.from_pretrained(folder), tmp_path / "model"
    AutoConfig.from_pretrained(folder).save_pretrained(model)
    processor.save_pretrained(model)
    noise(50, 70, "RGBA").save(image := tmp_path / "image.png")
    run("kimi_k3_images_session.py", model, image, tmp_path / "seen")
    seen = torch.load(tmp_path / "seen")
    assert all(module.startswith("transformers_modules.") for module in seen["modules"]) and not seen["attnres"]
    expected = processor.apply_chat_template(
        chat(Image.open(image), "What is it?"), tokenize=True, return_dict=True, return_tensors="pt"
    )
    assert seen["inputs"].keys() == expected.keys()
    assert all(torch.equal(seen["inputs"][key], expected[key]) for key in expected)
