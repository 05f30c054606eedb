"""Saved and converted models of Kimi K3 are the same models where `attnres` is not installed.

A process that cannot import `attnres` (`kimi_k3_session.py`) loads them with `trust_remote_code=True`. Another one
(`kimi_k3_later_session.py`) has a `transformers` with classes of its own for Kimi K3.
"""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from attnres import AttnResKimiK3Config, AttnResKimiK3ForCausalLM, AttnResKimiK3ForConditionalGeneration

from ..conversion.checkpoints import convert_well
from . import kimi_k3_release as release
from .connections import close

# Its cases run in a process that has not imported `attnres`.
pytestmark = pytest.mark.slow

IDS = torch.randint(3, 64, (2, 9), generator=torch.Generator().manual_seed(1))
IDS_WITH_IMAGE = torch.tensor([[5, *[release.PLACEHOLDER] * 2, 9, 21]])
_pixels = torch.randn(8, 3, 2, 2, generator=torch.Generator().manual_seed(2))
IMAGE = {"pixel_values": _pixels, "image_grid_thw": torch.tensor([[1, 2, 4]])}
# The first two as `save_pretrained` leaves them, the others as `attnres convert` does.
FOLDERS = ["saved composite", "saved text", "converted text", "converted packed"]


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> Path:
    """Return a folder with a model for each of `FOLDERS`, in float32, so that routing does not hang on rounding."""
    root, fields = tmp_path_factory.mktemp("kimi-k3"), release.text_fields()
    tensors = release.random_tensors(fields, torch.float32)
    packed, _ = release.pack_experts(tensors)
    quantized = fields | {"quantization_config": release.QUANTIZATION}
    release.write(root / "releases" / "packed", quantized, packed, vision=True)
    for layout in ("composite", "text"):
        folder = release.write(root / "releases" / layout, fields, tensors, layout=layout)
        AttnResKimiK3ForCausalLM.from_pretrained(folder).save_pretrained(root / "models" / f"saved {layout}")
    for name in ("text", "packed"):
        convert_well(root / "releases" / name, root / "models" / f"converted {name}", "--no-verify")
    return root / "models"


@pytest.fixture(scope="module")
def remote(models, run) -> dict:
    """Return the results of a process without `attnres`."""
    out = models.parent / "seen"
    torch.save({"ids": IDS, "input_ids": IDS_WITH_IMAGE, **IMAGE}, out)
    run("kimi_k3_session.py", models, out)
    return torch.load(out)


def test_the_process_never_imported_attnres(remote):
    assert remote["attnres_modules"] == []


@pytest.mark.parametrize("folder", FOLDERS)
def test_the_classes_come_from_the_files_beside_the_weights(remote, folder):
    modules, names = zip(*remote[folder]["classes"])
    assert names == ("AttnResKimiK3Config", "AttnResKimiK3ForCausalLM", "AttnResKimiK3Model")
    assert all(module.startswith("transformers_modules.") for module in modules)


@pytest.mark.parametrize("folder", FOLDERS)
def test_the_configuration_is_identical(remote, models, folder):
    assert remote[folder]["config"] == AttnResKimiK3Config.from_pretrained(models / folder).to_dict()


@torch.no_grad()
@pytest.mark.parametrize("folder", FOLDERS)
def test_logits_hidden_states_and_tokens_are_identical(remote, models, folder):
    seen = remote[folder]
    model = AttnResKimiK3ForCausalLM.from_pretrained(models / folder, dtype=torch.float32)
    assert not any(seen["left"][kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    # Without the package's fast delta attention.
    assert close(seen["logits"], model(IDS).logits)
    assert close(seen["hidden"], model.model(IDS).last_hidden_state)
    assert torch.equal(seen["generated"], model.generate(IDS, max_new_tokens=4, do_sample=False, eos_token_id=None))


@torch.no_grad()
def test_the_model_that_sees_is_identical_and_saves_the_same_release(remote, models):
    folder, again = models / "converted packed", models.parent / "again" / "that sees"
    model = AttnResKimiK3ForConditionalGeneration.from_pretrained(folder, dtype=torch.float32)
    assert remote["that sees"]["class"].startswith("transformers_modules.")
    assert close(remote["that sees"]["logits"], model(IDS_WITH_IMAGE, **IMAGE).logits)
    model.save_pretrained(expected := models.parent / "expected" / "that sees")
    assert {path.name for path in again.iterdir()} == {path.name for path in expected.iterdir()}
    actual, expected = (load_file(path / "model.safetensors") for path in (again, expected))
    assert actual.keys() == expected.keys()
    assert all(torch.equal(actual[name], expected[name]) for name in expected)


def test_experts_stay_packed_if_asked(remote):
    seen = remote["converted packed"]
    name, logits = seen["packed"]
    assert name == "KimiK3PackedExperts"
    assert close(logits, seen["logits"])


@pytest.mark.parametrize("folder", FOLDERS)
def test_a_model_saved_again_by_that_process_is_the_same_release(remote, models, folder):
    again = models.parent / "again" / folder
    saved = AttnResKimiK3ForCausalLM.from_pretrained(models / folder, dtype=torch.float32)
    saved.save_pretrained(expected := models.parent / "expected" / folder)
    assert {path.name for path in again.iterdir()} == {path.name for path in expected.iterdir()}
    actual, expected = (load_file(path / "model.safetensors") for path in (again, expected))
    assert actual.keys() == expected.keys()
    assert all(torch.equal(actual[name], expected[name]) for name in expected)


@pytest.mark.slow
@torch.no_grad()
def test_a_transformers_with_a_kimi_k3_keeps_its_classes_and_ours_work_by_name(models, run):
    out, folder = models.parent / "later", models / "saved composite"
    torch.save(IDS, out)
    run("kimi_k3_later_session.py", folder, out, with_attnres=True)
    seen = torch.load(out)
    assert (seen["auto"], seen["by configuration"]) == ("LlamaConfig", "AttnResKimiK3ForCausalLM")
    assert not any(seen["left"].values())
    assert close(seen["logits"], AttnResKimiK3ForCausalLM.from_pretrained(folder, dtype=torch.float32)(IDS).logits)
    files = (path / "model.safetensors" for path in (folder, models.parent / "saved later"))
    before, after = map(load_file, files)
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)
