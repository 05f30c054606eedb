"""A small release of Kimi K3 that sees: weights, tokenizer and image processor, with patches of 2 x 2 pixels."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from attnres.kimi_k3_images_attnres import RELEASED

from ..checkpoints.kimi_release import NAMES, train_vocabulary, write_tokenizer
from . import kimi_k3_release as release

CODE = {"AutoImageProcessor": "kimi_k3_vision_processing.KimiK3VisionProcessor"}
CODE |= {"AutoProcessor": "kimi_k3_processor.KimiK3Processor"}
_MEDIA_PAD = next(i for i, name in NAMES.items() if name == "<|media_pad|>")
_LAYERS = {"num_hidden_layers": 4, "full_attn_layers": [4], "kda_layers": [1, 2, 3]}


def write_seeing(folder: Path, texts: Iterable[str], size: int = 600, **changes: Any) -> Path:
    """Write a release with packed experts, 4 layers, a vision part, and a tokenizer of `texts`; return the folder.

    Its code must not run.
    """
    vocabulary = train_vocabulary(texts, size)
    first = len(vocabulary)
    special = {"vocab_size": first + 256, "bos_token_id": first, "eos_token_id": first + 2, "pad_token_id": first + 255}
    release.write_packed(folder, vision=True, **special, **_LAYERS | changes)
    config = json.loads((folder / "config.json").read_text())
    config["media_placeholder_token_id"] = first + _MEDIA_PAD
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    write_tokenizer(vocabulary, folder)
    settings = {"auto_map": CODE, "media_proc_cfg": RELEASED | {"patch_size": 2}}
    (folder / "preprocessor_config.json").write_text(json.dumps(settings, indent=2))
    for name in CODE.values():
        (folder / f"{name.partition('.')[0]}.py").write_text("raise SystemExit('this code must not run')\n")
    return folder
