"""Kimi K3 is trained on conversations with images: their rows, batches and losses, and what a run saves."""

import json
import math
import shutil
from io import BytesIO
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from safetensors.torch import load_file
from transformers import AutoModelForImageTextToText, AutoProcessor

from attnres import AttnResKimiK3Processor
from attnres.training.data import IGNORED
from attnres.training.data.chat import encode_chat
from attnres.training.data.documents import DataSpec
from attnres.training.data.images import collate_images, load_conversations
from attnres.training.recipe import read_recipe
from attnres.training.train import run_train

from ..modeling_attnres.kimi_k3_seeing import write_seeing

IMAGE = {"type": "image"}


@pytest.fixture(scope="module")
def release(tmp_path_factory) -> Path:
    return write_seeing(tmp_path_factory.mktemp("k3"), [Path(__file__).read_text(encoding="utf-8")])


@pytest.fixture(scope="module")
def processor(release) -> AttnResKimiK3Processor:
    return AutoProcessor.from_pretrained(release)


def picture(number: int) -> Image.Image:
    torch.manual_seed(number)
    shape = (4 + number % 3, 5 + 3 * number % 11, 3)
    return Image.fromarray(torch.randint(0, 256, shape, dtype=torch.uint8).numpy())


def png(number: int) -> bytes:
    picture(number).save(file := BytesIO(), "PNG")
    return file.getvalue()


def row(*parts: dict | str, answer: object = "It is small.") -> dict:
    content = [{"type": "text", "text": part} if isinstance(part, str) else part for part in parts]
    return {"messages": [{"role": "user", "content": content}, {"role": "assistant", "content": answer}]}


def write_rows(folder: Path, rows: list[dict]) -> Path:
    """Write rows, and eight images into `images/` beside them."""
    (folder / "images").mkdir(exist_ok=True)
    for number in range(8):
        (folder / f"images/{number}.png").write_bytes(png(number))
    (folder / "chats.jsonl").write_text("".join(json.dumps(one) + "\n" for one in rows))
    return folder / "chats.jsonl"


def file(number: int) -> dict:
    return IMAGE | {"path": f"images/{number}.png"}


def load(path: Path, processor, length: int = 500, **options) -> list[dict]:
    spec = DataSpec((str(path),), column="messages", **options)
    return [*load_conversations(spec, processor, length, seed=None, cache=path.parent / "cache")]


def encoded(processor, messages: list[dict]) -> dict:
    """The inputs of a conversation by `transformers`, with the mask of the assistant's tokens."""
    return processor.apply_chat_template(
        messages, tokenize=True, return_dict=True, return_tensors="pt", return_assistant_tokens_mask=True
    )


def test_rows_are_the_conversations_of_the_processor_with_labels_on_the_answers_text(processor, tmp_path):
    answer = [IMAGE | {"path": "images/2.png"}, {"type": "text", "text": "So it is."}]
    path = write_rows(tmp_path, [row(file(0), "What is", file(1), "here?", answer=answer), row("No image.")])
    with_image, without = load(path, processor)
    messages = row(*[IMAGE | {"image": picture(0)}, "What is", IMAGE | {"image": picture(1)}, "here?"])["messages"]
    messages[1]["content"] = [IMAGE | {"image": picture(2)}, answer[1]]
    expected = encoded(processor, messages)
    assert with_image["input_ids"] == expected["input_ids"][0].tolist()
    ids, labels = (torch.tensor(with_image[name]) for name in ("input_ids", "labels"))
    is_answer = expected["assistant_masks"][0].bool()
    assert (ids[is_answer] == processor.image_token_id).any()
    assert torch.equal(labels != IGNORED, is_answer & (ids != processor.image_token_id))
    assert [Path(image["path"]) for image in with_image["images"]] == [tmp_path / f"images/{i}.png" for i in range(3)]
    assert without["images"] == [] and without["documents"] == f"{path}:2"


def test_bytes_a_column_of_images_and_typed_placeholders(processor, tmp_path):
    typed = f"Say {processor.image_token} or <|media_pad|>"
    answer = [{"type": "text", "text": "Two."}]
    rows = [
        row(IMAGE, "one", IMAGE, typed, answer=answer) | {"images": [{"bytes": png(i), "path": None} for i in (3, 4)]}
    ]
    pq.write_table(pa.Table.from_pylist(rows), path := tmp_path / "chats.parquet")
    (loaded,) = load(path, processor)
    assert [image["bytes"] for image in loaded["images"]] == [png(3), png(4)]
    messages = row(IMAGE | {"image": picture(3)}, "one", IMAGE | {"image": picture(4)}, "TYPED")["messages"]
    patches = encoded(processor, messages)["pixel_values"]
    batch = collate_images(processor, [loaded])
    assert torch.equal(batch["pixel_values"], patches)
    # The names in the text are text: they neither stand for an image nor become a token of one.
    assert (batch["input_ids"] == processor.image_token_id).sum() == len(patches) // 4
    assert typed in processor.decode(loaded["input_ids"])


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (row(file(9), "x"), "images/9.png cannot be read as an image"),
        (row(IMAGE, "x"), "must have a `path`, `image` or `bytes`, or be in `images`"),
        (row("x") | {"images": ["images/0.png"]}, "the row has 1 image, but messages with places for 0"),
        (row({"type": "video", "path": "x.mp4"}, "x"), "message 0 of `messages` has a part of type 'video'. Give text"),
        (row(IMAGE | {"image": 3}, "x"), "an image must be a path or bytes, but is of the type int"),
        (row(file(0), "word " * 300), "but `length` is 500. Give a larger `length` or smaller images"),
        ({"messages": [*row("x")["messages"], {"role": "tool", "content": [file(0)]}]}, "a result of a tool holds"),
    ],
)
def test_a_bad_row_is_named_or_skipped(processor, tmp_path, bad, message):
    path = write_rows(tmp_path, [row("Fine."), bad])
    with pytest.raises(ValueError, match=r"chats\.jsonl:2: ") as refused:
        load(path, processor)
    assert message in str(refused.value) and "\n" not in str(refused.value)
    assert len(load(path, processor, bad_rows="skip")) == 1


def test_text_training_refuses_rows_with_images(processor):
    with pytest.raises(ValueError, match=r"`messages` holds an image. Give images=true"):
        encode_chat(processor.tokenizer)(row(file(0), "x"))


@torch.no_grad()
def test_the_loss_of_a_padded_batch_is_that_of_its_rows(release, processor, tmp_path):
    rows = load(write_rows(tmp_path, [row(file(0), "a", file(1)), row("no image"), row(file(2), "b c")]), processor)
    model = AutoModelForImageTextToText.from_pretrained(release, dtype=torch.float32).eval()

    def loss_of(*chosen: dict) -> tuple[float, int]:
        batch = collate_images(processor, chosen)
        del batch["documents"]
        count = int((batch["labels"][:, 1:] != IGNORED).sum())
        return model(**batch).loss.item() * count, count

    single = [loss_of(one) for one in rows]
    total, count = loss_of(*rows)
    assert count == sum(number for _, number in single)
    assert math.isclose(total, sum(loss for loss, _ in single), rel_tol=1e-5)
    # A batch without images has one that no token sees.
    text = rows[1]
    assert len(collate_images(processor, [text])["pixel_values"]) == 4
    plain = {name: torch.tensor([text[name]]) for name in ("input_ids", "labels")}
    assert math.isclose(single[1][0] / single[1][1], model(**plain).loss.item(), rel_tol=1e-5)


def recipe_of(release: Path, path: Path, out: Path, *changes: str, name: str = "sft"):
    sizes = ("length=400", "batch_size=4", "micro_batch_size=2", "steps=2", "epochs=null", "warmup=0")
    rates = ("log_every=1", "learning_rate=1e-2", "held_out_sequences=4", "config.dtype=float32", "images=true")
    return read_recipe(name, [f"model={release}", f"train={path}", f"out={out}", *sizes, *rates, *changes])


@pytest.fixture(scope="module")
def conversations(tmp_path_factory) -> Path:
    rows = [row(*map(file, range(i % 3)), f"What is it, {i}?", answer=f"It is {i}.") for i in range(12)]
    return write_rows(tmp_path_factory.mktemp("rows"), rows)


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for path in folder.glob("*.safetensors") for name, tensor in load_file(path).items()}


@pytest.mark.slow
def test_sft_trains_the_text_model_on_images_and_keeps_the_vision_part(release, processor, conversations, tmp_path):
    results = run_train(recipe_of(release, conversations, tmp_path / "run"), "sft")
    model, data = tmp_path / "run/model", [*load_conversations_of(conversations, processor)]
    trained = AutoModelForImageTextToText.from_pretrained(model, dtype=torch.float32).eval()
    saved = AutoProcessor.from_pretrained(model)
    assert type(saved) is AttnResKimiK3Processor
    losses, count = 0.0, 0
    for one in data[-4:]:  # the held-out rows
        batch = collate_images(saved, [one])
        labels = batch.pop("labels")[0, 1:]
        del batch["documents"]
        with torch.no_grad():
            logits = trained(**batch).logits[0, :-1]
        losses += F.cross_entropy(logits, labels, ignore_index=IGNORED, reduction="sum").item()
        count += int((labels != IGNORED).sum())
    assert math.isclose(results["held_out_loss"], losses / count, rel_tol=1e-5)
    assert results["held_out_losses"][0][1] > results["held_out_loss"]
    before, after = tensors_of(release), tensors_of(model)
    vision = [name for name in before if name.startswith(("vision_tower.", "mm_projector."))]
    assert vision and all(torch.equal(before[name].float(), after[name]) for name in vision)
    assert not torch.equal(before["language_model.lm_head.weight"].float(), after["language_model.lm_head.weight"])


def load_conversations_of(path: Path, processor):
    spec = DataSpec((str(path),), column="messages")
    return load_conversations(spec, processor, 400, seed=0, cache=path.parent / "cache")


@pytest.mark.slow
def test_lora_adapts_the_text_model_alone_and_merges_into_the_whole(release, conversations, tmp_path):
    chat = ("chat=true", "column=messages", "merge=true", "lora.rank=2", "lora.experts=false")
    run_train(recipe_of(release, conversations, tmp_path / "run", *chat, name="lora"), "lora")
    adapter = tensors_of(tmp_path / "run/adapter")
    assert adapter and not any("vision" in name or "projector" in name for name in adapter)
    before, merged = tensors_of(release), tensors_of(tmp_path / "run/model")
    name = "mm_projector.proj.0.weight"
    assert torch.equal(before[name].float(), merged[name].float())
    assert isinstance(AutoProcessor.from_pretrained(tmp_path / "run/model"), AttnResKimiK3Processor)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("chat=false", "`images` of the recipe is for conversations"),
        ("model=attnres-tiny", "starts from scratch and has no vision part"),
        ("pipeline={stages: 2, microbatches: 2}", "does not work with `pipeline`"),
        ("separate_documents=true", "does not work with `separate_documents`"),
        ("distributed={tp_size: 2}", "does not work with `distributed.tp_size`"),
    ],
)
def test_keys_that_do_not_work_with_images_are_refused(tmp_path, change, message):
    with pytest.raises(ValueError, match=message) as refused:
        recipe_of(tmp_path, tmp_path / "rows.jsonl", tmp_path / "out", change)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("lacks", ["vision_config", "preprocessor_config.json"])
def test_a_model_that_reads_no_images_is_refused_before_the_data_is_read(release, tmp_path, lacks):
    folder = shutil.copytree(release, tmp_path / "model", ignore=shutil.ignore_patterns(lacks))
    if lacks == "vision_config":
        config = json.loads((release / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({k: v for k, v in config.items() if k != lacks}))
    with pytest.raises(ValueError, match=r"reads text alone|has no image processor") as refused:
        run_train(recipe_of(folder, tmp_path / "rows.jsonl", tmp_path / "out"), "sft")
    assert "\n" not in str(refused.value)
