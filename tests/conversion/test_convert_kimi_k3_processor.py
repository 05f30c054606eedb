"""The image processor of Kimi K3 is converted with its model, and back to the bytes of the release."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from PIL import Image
from transformers import AutoProcessor

from attnres.publishing.publication import make_publication

from ..modeling_attnres.kimi_k3_seeing import write_seeing
from .checkpoints import change_json, convert_well, run_attnres

NAME = "preprocessor_config.json"
CHAT = [{"role": "user", "content": [{"type": "image", "image": Image.new("RGB", (9, 5), "red")}]}]


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> Path:
    """A release, converted and converted back."""
    root = tmp_path_factory.mktemp("k3")
    write_seeing(root / "release", [Path(__file__).read_text(encoding="utf-8")])
    convert_well(root / "release", root / "converted", "--no-verify")
    convert_well(root / "converted", root / "back", "--to", "released", "--no-verify")
    return root


def inputs_of(folder: Path) -> dict[str, torch.Tensor]:
    processor = AutoProcessor.from_pretrained(folder)
    return dict(processor.apply_chat_template(CHAT, tokenize=True, return_dict=True, return_tensors="pt"))


def test_a_conversion_keeps_the_settings_and_goes_back_to_the_bytes(folders):
    texts = {name: (folders / name / NAME).read_bytes() for name in ("release", "converted", "back")}
    assert texts["back"] == texts["release"]
    fields = {name: json.loads(text) for name, text in texts.items()}
    assert fields["converted"]["media_proc_cfg"] == fields["release"]["media_proc_cfg"]
    files = [reference.partition(".")[0] for reference in fields["converted"]["auto_map"].values()]
    assert all((folders / f"converted/{file}.py").is_file() and file.endswith("_attnres") for file in files)
    expected = inputs_of(folders / "release")
    for name in ("converted", "back"):
        assert all(torch.equal(value, expected[key]) for key, value in inputs_of(folders / name).items())


def test_changed_settings_are_kept_on_the_way_back(folders, tmp_path):
    changed = shutil.copytree(folders / "converted", tmp_path / "changed")
    fields = json.loads((changed / NAME).read_text())
    fields["media_proc_cfg"]["in_patch_limit"] = 64
    (changed / NAME).write_text(json.dumps(fields))
    convert_well(changed, tmp_path / "back", "--to", "released", "--no-verify")
    back = json.loads((tmp_path / "back" / NAME).read_text())
    assert back["media_proc_cfg"]["in_patch_limit"] == 64 and "auto_map" not in back


def test_a_published_model_has_its_processor(folders):
    publication = make_publication(folders / "converted")
    assert {NAME, "kimi_k3_images_attnres.py", "kimi_k3_processor_attnres.py"} <= publication.files.keys()


def test_a_conversion_tells_what_of_a_vision_part_is_not_read_and_refuses_one_that_cannot_run(folders, tmp_path):
    fewer, broken = (shutil.copytree(folders / "release", tmp_path / name) for name in ("fewer", "broken"))
    vision = json.loads((fewer / "config.json").read_text())["vision_config"]
    change_json(fewer / "config.json", vision_config=vision | {"vt_num_hidden_layers": 1})
    change_json(broken / "config.json", vision_config=vision | {"projector_ln_eps": -1e-5})
    assert "without the 6 tensors that this model does not read" in convert_well(fewer, tmp_path / "one").out
    line = run_attnres("convert", broken, tmp_path / "two").error
    assert "`projector_ln_eps` is -1e-05, but must be a finite number >= 0" in line and not (tmp_path / "two").exists()
