"""The code that Kimi K3 was released with has the same tokenizer, chat format and images, and reads what is written."""

import hashlib
import json
import random
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from jinja2 import TemplateError
from PIL import Image
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText
from transformers.utils.chat_template_utils import render_jinja_template

from attnres import AttnResKimiK3ImageProcessor
from attnres.checkpoints.tokenizers import load_tokenizer
from attnres.kimi_k3_images_attnres import RELEASED
from attnres.kimi_tokenizer import K3_CHAT_TEMPLATE
from attnres.training.data.chat import encode_chat

from ..checkpoints.kimi_release import train_vocabulary, write_tokenizer
from ..conversion.checkpoints import convert_well
from ..modeling_attnres import kimi_k3_release as release

pytestmark = [pytest.mark.slow, pytest.mark.engines]
REQUIREMENTS = ("llmcompressor==0.14.0.1", "tiktoken==0.14.0")
# Ranges of characters: twenty scripts, marks, white space, controls, emoji, tags and letters with odd case.
RANGES = (
    *((0x00, 0x20), (0x20, 0x7F), (0xA0, 0x250), (0x300, 0x370), (0x370, 0x400), (0x400, 0x530), (0x590, 0x600)),
    *((0x600, 0x700), (0x900, 0x980), (0xE00, 0xE80), (0x1100, 0x1200), (0x1E00, 0x2000), (0x2000, 0x2070)),
    *((0x2E80, 0x2FE0), (0x3000, 0x3040), (0x3040, 0x3100), (0x4E00, 0x9FFF), (0xAC00, 0xD7A4), (0xFE00, 0xFE10)),
    *((0xFF00, 0xFFF0), (0x10000, 0x10100), (0x1D400, 0x1D800), (0x1F300, 0x1FAFF), (0x20000, 0x20100)),
)
BETWEEN = (" ", "\n", "\r\n", "  ", "\t", "'s", "'S", "'\u017f", "'LL", "\x85", "\xa0", "\u2028", "\x1c", "<|sep|>")
WORDS = (
    "hi",
    "a & b",
    'say "x"',
    "<|open|>",
    " lead",
    "trail ",
    "\n\nx\n",
    "日本",
    "<tag>&amp;",
    "{{ x }}",
    "",
    "é",
    "_k",
)
SCHEMAS: tuple[Any, ...] = (
    *("json_object", {"type": "json_object"}, {"type": "text"}),
    *({"type": "json_schema", "json_schema": schema} for schema in ({"schema": {"b": 1, "a": 2}}, {"b": {"d": 1}})),
)


@pytest.fixture(scope="module")
def folder(assets, tmp_path_factory) -> Path:
    """A release whose table has 8,000 ranks, of books, code and other scripts."""
    books = (assets / "corpora" / "wikitext2" / "valid.txt").read_text(encoding="utf-8")
    code = [path.read_text(encoding="utf-8") for path in sorted(Path(json.__file__).parents[1].glob("*.py"))[:40]]
    random_texts = [text_of(random.Random(seed)) for seed in range(300)]
    vocabulary = train_vocabulary([books, *code, *random_texts], 8000)
    return write_tokenizer(vocabulary, tmp_path_factory.mktemp("release"))


def text_of(rng: random.Random) -> str:
    parts = []
    for _ in range(rng.randint(1, 40)):
        first, end = rng.choice(RANGES)
        parts.append("".join(chr(rng.randrange(first, end)) for _ in range(rng.randint(1, 8))))
        parts.append(rng.choice(BETWEEN) if rng.random() < 0.4 else "")
    text = "".join(parts) if rng.random() < 0.9 else rng.randbytes(100).decode("utf-8", "replace")
    return text.encode("utf-8", "ignore").decode()


def words(rng: random.Random) -> str:
    return rng.choice(WORDS)


def content(rng: random.Random) -> Any:
    part = rng.random()
    if part < 0.8:
        return words(rng) if part < 0.7 else None
    parts = ({"type": "text", "text": words(rng)}, {"type": "image"}, {"type": "image_url", "image_url": {"url": "x"}})
    return [rng.choice(parts) for _ in range(rng.randint(0, 3))]


def tools(rng: random.Random) -> list[dict]:
    schema = {"type": "object", "properties": {"b": {"type": "string"}, "a": {"enum": [1, "é"]}}}
    function = {"name": "f", "description": words(rng), "parameters": schema}
    return [{"type": "function", "function": function} for _ in range(rng.randint(1, 2))]


def call(rng: random.Random, number: int) -> dict:
    values = (words(rng), 1, 2.5, True, None, [1, "a"], {"b": 1, "a": [{"z": 1, "y": "é"}]}, -3, 1e30, [])
    function: dict[str, Any] = {"name": rng.choice(("f", "get_weather", "a.b:0", 'q"t'))}
    if rng.random() < 0.9:
        arguments = {words(rng): rng.choice(values) for _ in range(rng.randint(0, 3))}
        function["arguments"] = rng.choice(({}, arguments, None, ""))
    made: dict[str, Any] = {"function": function} if rng.random() < 0.8 else dict(function)
    return made | ({"id": rng.choice((f"call_{number}", number, "c1", None))} if rng.random() < 0.8 else {})


def conversation(rng: random.Random) -> tuple[list[dict], dict]:
    """Messages and options, such as users of the format give them, and odder ones."""
    messages: list[dict] = []
    for _ in range(rng.randint(1, 6)):
        message: dict[str, Any] = {"role": rng.choice(("system", "user", "assistant", "tool")), "content": content(rng)}
        calls: list[dict] = []
        if message["role"] == "tool":
            message |= rng.choice(({}, {"tool_call_id": "c1"}, {"tool": words(rng) or "n"}, {"name": "n"}))
        elif rng.random() < 0.2:
            message["name"] = words(rng)
        if message["role"] == "system" and rng.random() < 0.3:
            message["tools"] = tools(rng)
        if message["role"] == "assistant":
            if rng.random() < 0.5:
                message[rng.choice(("reasoning_content", "reasoning"))] = rng.choice((words(rng), None))
            if rng.random() < 0.6:
                message["tool_calls"] = calls = [call(rng, i) for i in range(rng.randint(0, 3))]
        messages.append(message)
        for answered in rng.sample(calls, rng.randint(0, len(calls))):  # in any order, and not all of them
            result = {"role": "tool", "content": content(rng), "tool_call_id": answered.get("id")}
            messages.append(result | ({"name": "stale"} if rng.random() < 0.3 else {}))
    options: dict[str, Any] = {"add_generation_prompt": rng.random() < 0.5, "thinking": rng.random() < 0.7}
    optional = {
        "tools": tools(rng),
        "thinking_effort": rng.choice(("low", "high", "max", None)),
        "tool_choice": rng.choice(("required", "none", "auto")),
        "response_format": rng.choice(SCHEMAS),
        "response_schema": {"z": 1, "a": 2},
    }
    return messages, options | {key: value for key, value in optional.items() if rng.random() < 0.3}


@pytest.fixture(scope="module")
def given(folder, assets) -> dict[str, Any]:
    rng = random.Random(0)
    books = (assets / "corpora" / "classics" / "valid.txt").read_text(encoding="utf-8")
    config = json.loads((folder / "tokenizer_config.json").read_text())
    ranks = (folder / "tiktoken.model").read_text().count("\n")
    named = {int(i): token["content"] for i, token in config["added_tokens_decoder"].items()}
    control = "".join(named.get(i, f"<|reserved_token_{i}|>") for i in range(ranks, ranks + 256))
    runs = [f"x {fill * (130_000 // len(fill))} y" for fill in ("a", " ", "面", "ab ", "\n", "a1", "🎉")]
    texts = [books, books[:900_000].replace(" ", "", 50_000), control, *runs, *(text_of(rng) for _ in range(3000))]
    return {
        "folder": str(folder),
        "texts": texts,
        "conversations": [conversation(rng) for _ in range(2000)],
    }


@pytest.fixture
def released(given, python_with, run_session, tmp_path) -> dict[str, Sequence]:
    (tmp_path / "given.json").write_text(json.dumps(given))
    python = python_with("kimi-release", *REQUIREMENTS, dependencies=False)
    return run_session(python, "kimi_release_session.py", tmp_path / "given.json")


def render(messages: list[dict], options: dict) -> str | None:
    template = K3_CHAT_TEMPLATE.read_text(encoding="utf-8")
    try:
        return render_jinja_template([messages], chat_template=template, **options)[0][0]
    except (TemplateError, TypeError):
        return None


def test_ids_and_chats_are_those_of_the_released_code(given, folder, released):
    tokenizer = load_tokenizer(folder)
    ids = [tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"] for text in given["texts"]]
    assert [i for i, (ours, theirs) in enumerate(zip(ids, released["ids"], strict=True)) if ours != theirs] == []
    rendered = [render(*one) for one in given["conversations"]]
    assert sum(text is not None for text in rendered) > 1000
    differ = [i for i, pair in enumerate(zip(rendered, released["rendered"], strict=True)) if pair[0] != pair[1]]
    assert [given["conversations"][i] for i in differ] == []
    # Conversations as `train sft` encodes them, which has no options of the format but tools.
    encode = encode_chat(tokenizer)
    equal = 0
    for (messages, options), theirs in zip(given["conversations"], released["chat_ids"], strict=True):
        if theirs is None or options.keys() - {"add_generation_prompt", "thinking", "tools"}:
            continue
        if options["add_generation_prompt"] or not options["thinking"]:
            continue
        try:
            ours = encode({"messages": messages, "tools": options.get("tools")})["input_ids"]
        except ValueError:  # no turn of the assistant, or it comes first
            continue
        assert ours == theirs or has_joined_text(messages), messages
        equal += ours == theirs
    assert equal > 20


def has_joined_text(messages: list[dict]) -> bool:
    """Return whether a name or the parts of a message may join the text beside them, as the guide says."""
    names = [message[key] for message in messages for key in ("name", "tool") if message.get(key)]
    for call in (call for message in messages for call in message.get("tool_calls") or []):
        function = call.get("function", call)
        names += [function["name"], *(function.get("arguments") or {})]
    in_parts = any(isinstance(message["content"], list) and len(message["content"]) > 1 for message in messages)
    return in_parts or any(re.search(r"^[^\w ]|^_|[^\w]$|_$", name) for name in names)


@torch.no_grad()
@pytest.mark.parametrize("options", [("--pack-experts",), ()], ids=["packed", "unpacked"])
def test_the_released_code_reads_a_whole_release_of_a_tuned_model(python_with, run_session, tmp_path, options):
    release.write_packed(tmp_path / "release", vision=True, use_cache=False)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "release", dtype="auto")
    torch.manual_seed(0)
    for parameter in model.parameters():
        parameter.mul_(1 + 0.05 * torch.randn_like(parameter))
    model.save_pretrained(tmp_path / "tuned")
    convert_well(tmp_path / "tuned", tmp_path / "whole", "--with-parts", tmp_path / "release", *options, "--no-verify")
    convert_well(tmp_path / "whole", tmp_path / "again", "--to", "released", "--no-verify")
    ids = [5, 9, 33, 7, 60, 12, 44, 3, 21]
    expected = AutoModelForCausalLM.from_pretrained(tmp_path / "whole", dtype=torch.float32).eval()
    expected = expected(torch.tensor([ids])).logits[0]
    python = python_with("kimi-release", *REQUIREMENTS, dependencies=False)
    for folder in ("whole", "again"):
        seen = run_session(python, "kimi_release_model_session.py", tmp_path / folder, json.dumps(ids))
        assert (seen["missing"], seen["unexpected"]) == ([], [])
        assert seen["quantization"] == ("mxfp4-pack-quantized" if options else None)
        assert (torch.tensor(seen["logits"]) - expected).abs().max() < 1e-4 * expected.abs().max()


def draw(rng: random.Random, number: int, folder: Path) -> str:
    """Write an image of a random size, mode and kind of file, and return its path."""
    sizes = [(rng.randint(1, 40), rng.randint(1, 40)), (rng.randint(50, 900), rng.randint(50, 900))]
    sizes += [(rng.randint(7000, 9000), rng.randint(1, 30)), (rng.randint(1, 30), rng.randint(7000, 9000))]
    width, height = (4200, 3700) if number == 0 else rng.choice(sizes)
    mode = ("RGBA", "LA", "P", "L", "RGB", "CMYK", "I;16", "1", "PA", "I")[number % 10]
    if mode in ("I;16", "I"):
        image = Image.frombytes(mode, (width, height), rng.randbytes(width * height * (2 if mode == "I;16" else 4)))
        image = image if mode == "I;16" else image.point(lambda value: value * 0.0005)
    else:
        image = Image.frombytes("RGBA", (width, height), rng.randbytes(width * height * 4)).convert(mode)
    options: dict[str, Any] = {"transparency": 7} if mode == "P" and rng.random() < 0.7 else {}
    if mode == "RGB" and rng.random() < 0.5:
        options = {"transparency": (0, 0, 0)}
    suffix = {"CMYK": "jpg", "PA": "tiff", "I": "tiff"}.get(mode, "png")
    if mode == "RGB" and rng.random() < 0.5:
        exif = image.getexif()
        exif[0x0112] = rng.randint(2, 8)
        options, suffix = {"exif": exif}, "jpg"
    image.save(path := folder / f"{number}.{suffix}", **options)
    return str(path)


@pytest.mark.parametrize("stage", ["after_resize", "before_resize"])
def test_images_become_the_bytes_and_prompts_of_the_released_code(stage, python_with, run_session, tmp_path):
    rng = random.Random(0)
    paths = [draw(rng, number, tmp_path) for number in range(40)]
    settings = RELEASED | {"transparent_bg_fill_stage": stage}
    (given := tmp_path / "given.json").write_text(
        json.dumps({"settings": {"media_proc_cfg": settings}, "paths": paths})
    )
    python = python_with("kimi-release", *REQUIREMENTS, dependencies=False)
    released = run_session(python, "kimi_release_images_session.py", given)["images"]
    assert sum(one is not None for one in released) >= 36
    processor = AttnResKimiK3ImageProcessor(settings)
    for path, theirs in zip(paths, released, strict=True):
        if theirs is None:
            with pytest.raises(ValueError, match=Path(path).name):
                processor(path)
            continue
        seen = processor(path)
        width, height = seen["image_sizes"][0].tolist()
        assert seen["image_grid_thw"].tolist() == [theirs["grid"]], path
        assert f"image {width}x{height}<" in theirs["prompt"]
        assert hashlib.sha256(seen["pixel_values"].numpy().tobytes()).hexdigest() == theirs["digest"], path


@torch.no_grad()
def test_the_released_code_sees_the_same_in_images(python_with, run_session, tmp_path):
    rng, generator = random.Random(0), torch.Generator().manual_seed(0)
    fields = release.text_fields(use_cache=False)
    release.write(tmp_path / "release", fields, release.random_tensors(fields), vision=True)
    cases = []
    for _ in range(40):
        grids = [[1, 2 * rng.randint(1, 9), 2 * rng.randint(1, 9)] for _ in range(rng.randint(1, 3))]
        if len(grids) == 1:
            grids[0][0] = rng.randint(1, 4)  # a clip
        grids = torch.tensor(grids)
        pixels = torch.randn(int(grids.prod(-1).sum()), 3, 2, 2, generator=generator, dtype=torch.float64)
        cases.append({"pixel_values": pixels, "image_grid_thw": grids})
    ids = [5, 9, *(t for _ in cases[0]["image_grid_thw"] for t in (release.PLACEHOLDER, 33)), 7, 60]
    torch.save({"cases": cases, "ids": ids}, tmp_path / "images")
    model = AutoModelForImageTextToText.from_pretrained(tmp_path / "release", dtype=torch.float64).eval()
    seen = [model.get_image_features(**case).pooler_output for case in cases]
    # The released code makes of one placeholder as many as the image has tokens.
    counts = iter(len(tokens) for tokens in seen[0])
    ids = [token for t in ids for token in [t] * (next(counts) if t == release.PLACEHOLDER else 1)]
    logits = model.float()(torch.tensor([ids]), **cases[0]).logits[0]
    python = python_with("kimi-release", *REQUIREMENTS, dependencies=False)
    given = (tmp_path / "release", tmp_path / "images")
    released = run_session(python, "kimi_release_vision_session.py", *given, TORCHDYNAMO_DISABLE="1")
    assert (released["missing"], released["unexpected"]) == ([], [])
    # It turns queries and keys in complex64, whatever the dtype.
    for ours, theirs in zip(map(torch.cat, seen), map(torch.tensor, released["tokens"]), strict=True):
        assert (ours - theirs).abs().max() < 1e-5 * ours.abs().max()
    theirs = torch.tensor(released["logits"])
    assert (theirs - logits).abs().max() < 1e-4 * theirs.abs().max()
