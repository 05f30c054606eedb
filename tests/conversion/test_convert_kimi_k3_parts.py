"""`attnres convert` packs the experts of Kimi K3, and gives a tuned text model the other parts of its release again."""

import json
import math
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from attnres import AttnResKimiK3ForCausalLM
from attnres.conversion.kimi_k3_parts import Rewriting
from attnres.kimi_k3_packed_attnres import decode_mxfp4
from attnres.kimi_k3_packing_attnres import encode_mxfp4

from ..checkpoints.kimi_release import train_vocabulary, write_tokenizer
from ..modeling_attnres import kimi_k3_release as release
from .checkpoints import change_json, convert, convert_well, save_tokenizer, standard_model, tensors_of

IDS = torch.randint(3, 64, (2, 11), generator=torch.Generator().manual_seed(1))
PREFIX = "language_model."
EXPERT = "model.layers.2.block_sparse_moe.experts.3.w1.weight"


def with_small_codes(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Give a packed expert a group whose largest weight is 1.5 units of its scale, and zeros of both signs."""
    packed = tensors[f"{EXPERT}_packed"].clone()
    packed[0] = torch.tensor([0x31, 0x80, 0x08, 0x12] * 4, dtype=torch.uint8)
    return tensors | {f"{EXPERT}_packed": packed}


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> Path:
    """Return a folder with `release` (packed, with a vision part and a layer for multi-token prediction), `plain` (the
    same in bfloat16), `text` (the text model of the release, saved unpacked) and `tuned`, which tests must not change.
    """
    folder, fields = tmp_path_factory.mktemp("parts"), release.text_fields(num_nextn_predict_layers=1)
    packed, _ = release.pack_experts(release.random_tensors(fields))
    packed = with_small_codes(packed)
    release.write(folder / "release", fields | {"quantization_config": release.QUANTIZATION}, packed, vision=True)
    (folder / "release" / "preprocessor_config.json").write_text('{"patch_size": 14}')
    model = AutoModelForCausalLM.from_pretrained(folder / "release", dtype="auto")
    model.save_pretrained(folder / "text")
    release.write(folder / "plain", fields, {n.removeprefix(PREFIX): t for n, t in tensors_of(folder / "text").items()})
    with torch.no_grad():
        model.model.norm.weight.mul_(1.125)
        model.model.layers[2].mlp.experts.gate_up_proj[3, :32].mul_(1.02)  # w1 of one expert
    model.save_pretrained(folder / "tuned")
    return folder


@pytest.fixture
def copied(folders, tmp_path) -> Callable[..., Path]:
    """Return `copied(name)`: a copy of a folder as `source` or another name, where a test may damage it."""
    return lambda name, target="source": Path(shutil.copytree(folders / name, tmp_path / target))


def logits(folder: Path) -> Tensor:
    with torch.no_grad():
        return AutoModelForCausalLM.from_pretrained(folder).eval()(IDS).logits


def assert_same_files(one: Path, other: Path, pattern: str) -> None:
    names = sorted(path.name for path in one.glob(pattern))
    assert names and names == sorted(path.name for path in other.glob(pattern))
    assert [name for name in names if (one / name).read_bytes() != (other / name).read_bytes()] == []


def changed_tensors(one: Path, other: Path) -> set[str]:
    before, after = tensors_of(one), tensors_of(other)
    assert before.keys() == after.keys()
    return {name for name in before if before[name].view(torch.uint8).ne(after[name].view(torch.uint8)).any()}


def test_an_untuned_model_becomes_the_release_byte_for_byte(folders, tmp_path):
    run = convert_well(folders / "text", tmp_path / "whole", "--with-parts", folders / "release")
    assert "Verified: max |logit difference| 0.0e+00" in run.out and "packed, weights" not in run.out
    assert_same_files(folders / "release", tmp_path / "whole", "model[-.]*")
    assert_same_files(folders / "release", tmp_path / "whole", "preprocessor_config.json")
    before, after = (
        json.loads((path / "config.json").read_text()) for path in (folders / "release", tmp_path / "whole")
    )
    assert after | {"auto_map": before["auto_map"]} == before
    convert_well(tmp_path / "whole", tmp_path / "again", "--to", "released", "--no-verify")
    assert_same_files(folders / "release", tmp_path / "again", "[cmp]*[!y]")


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["composite", "text"])
def test_a_release_that_was_converted_gives_its_parts_too(folders, tmp_path, layout):
    source = release.write_packed(tmp_path / "source", layout, layout == "composite")
    convert_well(source, tmp_path / "converted", "--no-verify")
    AutoModelForCausalLM.from_pretrained(tmp_path / "converted", dtype="auto").save_pretrained(tmp_path / "text")
    for parts in (source, tmp_path / "converted"):
        target = tmp_path / f"whole {parts.name}"
        convert_well(tmp_path / "text", target, "--with-parts", parts, "--no-verify")
        convert_well(target, tmp_path / f"again {parts.name}", "--to", "released", "--no-verify")
        assert_same_files(source, tmp_path / f"again {parts.name}", "config.json")
        assert changed_tensors(source, tmp_path / f"again {parts.name}") == set()


def test_a_tuned_model_keeps_the_bytes_of_all_that_was_not_trained(folders, tmp_path):
    options = ("--with-parts", folders / "release", "--pack-experts")
    run = convert_well(folders / "tuned", tmp_path / "whole", *options)
    expert = f"{PREFIX}{EXPERT}"
    changed = {f"{PREFIX}model.norm.weight", f"{expert}_packed", f"{expert}_scale"}
    assert changed_tensors(folders / "release", tmp_path / "whole") == changed
    tuned, whole = tensors_of(folders / "tuned"), tensors_of(tmp_path / "whole")
    assert torch.equal(whole[f"{PREFIX}model.norm.weight"], tuned[f"{PREFIX}model.norm.weight"])
    packed = encode_mxfp4(tuned[expert])
    assert torch.equal(whole[f"{expert}_packed"], packed[0]) and torch.equal(whole[f"{expert}_scale"], packed[1])
    # The report, against other code.
    change = decode_mxfp4(*packed).double() - tuned[expert].double()
    relative = math.sqrt(float(change.square().sum() / tuned[expert].double().square().sum()))
    largest = float(change.abs().max())
    line = f"1 tensor packed, weights moved by {relative:.1e} of their norm, the farthest by {largest:.1e}"
    assert f"Layer 2: {line}." in run.out and f"All layers: {line}." in run.out
    assert re.search(r"Not the same: max \|logit difference\| \d\.\de", run.out)
    assert f"experts were packed as MXFP4 ({line})" in (tmp_path / "whole" / "README.md").read_text()


def test_experts_that_have_changed_are_packed_only_if_asked(folders, tmp_path):
    run = convert_well(folders / "tuned", tmp_path / "whole", "--with-parts", folders / "release")
    assert "Verified: max |logit difference| 0.0e+00" in run.out
    tuned, whole = tensors_of(folders / "tuned"), tensors_of(tmp_path / "whole")
    others = whole.keys() - tuned.keys()
    assert others and all(name.startswith(("vision_tower.", "mm_projector.")) for name in others)
    assert all(torch.equal(whole[name], tensor) for name, tensor in tuned.items())
    config = json.loads((tmp_path / "whole" / "config.json").read_text())
    assert "quantization_config" not in config["text_config"] and config["vision_config"] == release.VISION


def test_a_model_is_packed_without_its_release(folders, tmp_path):
    convert_well(folders / "text", tmp_path / "packed", "--pack-experts", "--no-verify")
    assert torch.equal(logits(tmp_path / "packed"), logits(folders / "text"))
    config = json.loads((tmp_path / "packed" / "config.json").read_text())
    assert config["text_config"]["quantization_config"]["format"] == "mxfp4-pack-quantized"
    before, after = tensors_of(folders / "release"), tensors_of(tmp_path / "packed")
    # Only the source has the scale of the group with small codes.
    differ = {name for name, tensor in after.items() if not torch.equal(tensor, before[name])}
    assert differ == {f"{PREFIX}{EXPERT}_packed", f"{PREFIX}{EXPERT}_scale"}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["float32", "text model alone", "checkpoint-7"])
def test_a_model_that_was_saved_in_another_way_becomes_the_release(folders, tmp_path, name):
    model = AttnResKimiK3ForCausalLM.from_pretrained(
        folders / "text", dtype=torch.float32 if name == "float32" else torch.bfloat16
    )
    if name == "text model alone":
        model.config.checkpoint_layout = "text"
    model.save_pretrained(tmp_path / name)
    convert_well(tmp_path / name, tmp_path / "whole", "--with-parts", folders / "release", "--no-verify")
    assert changed_tensors(folders / "release", tmp_path / "whole") == set()
    dtype = json.loads((tmp_path / "whole" / "config.json").read_text())["dtype"]
    assert dtype == ("float32" if name == "float32" else "bfloat16")


@pytest.mark.slow
def test_a_release_in_bfloat16_gives_its_parts_too(folders, tmp_path):
    convert_well(folders / "tuned", tmp_path / "whole", "--with-parts", folders / "plain", "--no-verify")
    expected = {f"{PREFIX}model.norm.weight", f"{PREFIX}{EXPERT}"}
    assert changed_tensors(folders / "plain", tmp_path / "whole") == expected
    convert_well(folders / "plain", tmp_path / "packed", "--pack-experts", "--no-verify")
    options = ("--with-parts", folders / "plain", "--pack-experts", "--no-verify")
    convert_well(folders / "text", tmp_path / "whole and packed", *options)
    assert changed_tensors(tmp_path / "packed", tmp_path / "whole and packed") == set()


def test_a_packed_model_keeps_its_bytes(folders, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(folders / "release", dtype="auto", packed_experts=True)
    with torch.no_grad():
        model.model.norm.weight.mul_(1.125)
    model.save_pretrained(tmp_path / "packed")
    convert_well(tmp_path / "packed", tmp_path / "whole", "--with-parts", folders / "release", "--no-verify")
    assert changed_tensors(folders / "release", tmp_path / "whole") == {f"{PREFIX}model.norm.weight"}


def test_the_tokenizer_is_that_of_the_release(folders, copied, tmp_path):
    source, parts = copied("text"), copied("release", "parts")
    for folder in (source, parts):
        save_tokenizer(folder)
    (parts / "chat_template.jinja").write_text("{{ messages }}")
    config = json.loads((parts / "config.json").read_text())
    change_json(parts / "config.json", text_config=config["text_config"])
    convert_well(source, tmp_path / "whole", "--with-parts", parts, "--no-verify")
    assert_same_files(parts, tmp_path / "whole", "*.jinja")
    assert_same_files(parts, tmp_path / "whole", "tokenizer.json")


def other_fields(**changes: Any) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        fields = release.text_fields(**changes)
        shutil.rmtree(folder)
        release.write(folder, fields, release.random_tensors(fields), vision=True)

    return change


def set_field(name: str, value: Any) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text())
        change_json(folder / "config.json", text_config=config["text_config"] | {name: value})

    return change


def change_part(end: str, change: Callable[[Tensor], Tensor]) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        for path in folder.glob("*.safetensors"):
            tensors = load_file(path)
            if (name := f"{PREFIX}{EXPERT}{end}") in tensors:
                release.save_file(tensors | {name: change(tensors[name])}, path, metadata={"format": "pt"})

    return damage


def truncate(folder: Path) -> None:
    path = max(folder.glob("*.safetensors"))
    path.write_bytes(path.read_bytes()[:-1000])


def give_other_tokenizers(folder: Path) -> None:
    save_tokenizer(folder.parent / "source")
    write_tokenizer(train_vocabulary(["a text of another model"], 300), folder)


def damage_the_tokenizer(folder: Path) -> None:
    write_tokenizer(train_vocabulary(["a text of the model"], 300), folder)
    lines = (folder / "tiktoken.model").read_text().splitlines()
    (folder / "tiktoken.model").write_text("\n".join(lines[2:]))


def give_the_model_a_tokenizer(folder: Path) -> None:
    save_tokenizer(folder.parent / "source")


def become_llama(folder: Path) -> None:
    shutil.rmtree(folder)
    standard_model().save_pretrained(folder)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (other_fields(num_experts=4), "`num_experts` is 8 there, and 4 in"),
        (other_fields(vocab_size=65), "`vocab_size` is 64 there, and 65 in"),
        (other_fields(), "does not hold, such as `model.layers.7."),  # without the layer for multi-token prediction
        (other_fields(hidden_size=32), "`hidden_size` is 64 there, and 32 in"),
        (set_field("routed_scaling_factor", 1.0), "`routed_scaling_factor` is 1.7 there, and 1.0 in"),
        (give_other_tokenizers, "their tokenizers have other tokens"),
        (damage_the_tokenizer, "tiktoken.model must hold each rank once"),
        (give_the_model_a_tokenizer, "has no tokenizer that loads here, but"),
        (become_llama, "--with-parts belongs to Kimi K3, but"),
        (truncate, "truncated or damaged"),
        (
            change_part("_packed", lambda t: t[:-1].clone()),
            "`language_model.model.layers.2.block_sparse_moe.experts.3.w1",
        ),
        (change_part("_scale", lambda t: t.clone().fill_(255)), "a scale of NaN"),
    ],
)
def test_parts_of_another_or_a_damaged_model_are_refused_before_any_work(
    copied, tmp_path, refusal, monkeypatch, change, words
):
    monkeypatch.setattr(Rewriting, "write", lambda *args, **options: pytest.fail("the work has begun"))
    copied("text")
    change(copied("release", "parts"))
    assert words in refusal("--with-parts", str(tmp_path / "parts"))


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"num_experts": None}, "has no routed experts. Leave out --pack-experts."),
        ({"moe_intermediate_size": 48}, "`moe_intermediate_size` is 48, but must be a multiple of 32"),
        ({"routed_expert_hidden_size": 16}, "`routed_expert_hidden_size` is 16, but must be a multiple of 32"),
        ({"routed_expert_hidden_size": None, "hidden_size": 80}, "`hidden_size` is 80, but must be a multiple of 32"),
    ],
)
def test_experts_that_cannot_be_packed_are_refused(tmp_path, refusal, fields, words):
    fields = release.text_fields(**fields)
    release.write(tmp_path / "source", fields, release.random_tensors(fields))
    assert words in refusal("--pack-experts")


def test_a_weight_that_is_not_finite_is_named(copied, refusal):
    folder = copied("plain")
    change_part("", lambda t: t.clone().fill_(math.nan))(folder)
    assert f"`{PREFIX}{EXPERT}` cannot be packed: the weight holds NaN" in refusal("--pack-experts")
    # The file that is named is the model's, not that of the release.
    message = refusal("--with-parts", str(copied("release", "parts")))
    assert f"`{PREFIX}{EXPERT}` in {folder}" in message and "holds NaN or infinite values" in message


def test_other_models_and_options_are_refused(folders, tmp_path, refusal):
    standard_model().save_pretrained(tmp_path / "source")
    assert "--pack-experts belongs to Kimi K3, but" in refusal("--pack-experts")
    parts = ("--with-parts", str(folders / "release"))
    for options, words in (
        (("--pack-experts", "--to", "released"), "--to and --pack-experts exclude each other"),
        ((*parts, "--full"), "--full and --with-parts exclude each other"),
    ):
        run = convert(folders / "text", tmp_path / "result", *options)
        assert run.code == 2 and words in run.err
    assert "nowhere" in refusal("--with-parts", "nowhere/at-all")
    (tmp_path / "result").mkdir()
    (tmp_path / "result" / "notes.txt").write_text("mine")
    assert "result" in convert(folders / "text", tmp_path / "result", "--pack-experts").error
