"""Compute what Kimi K3 makes of images by the code that it was released with, which `llmcompressor` carries.

    python kimi_release_vision_session.py FOLDER IMAGES OUT

FOLDER is a whole release. IMAGES has `cases`, each with `pixel_values` and `image_grid_thw`, and `ids`, a prompt with
one placeholder for each image of the first case. OUT gets the names that the code's model lacks or has more, the
`tokens` of each case in float64, and the `logits` of the prompt in float32.
"""

import json
import sys
from pathlib import Path

import torch
from kimi_release_model_session import PREFIX, prepare_imports, read, text_tensors


def main(folder: Path, images: Path, out: Path) -> None:
    prepare_imports()
    from kimi_k3.configuration_kimi_k3 import KimiK3Config
    from kimi_k3.modeling_kimi_k3 import KimiK3ForConditionalGeneration

    config = KimiK3Config(**json.loads((folder / "config.json").read_text()))
    config.vision_config._attn_implementation = "eager"  # FlashAttention needs a GPU
    model = KimiK3ForConditionalGeneration(config).eval()
    for block in model.vision_tower.encoder.blocks:
        block.attn_implementation = "eager"  # the base class of `transformers` has changed it
    tensors = read(folder)
    text = text_tensors(tensors, config.text_config.linear_attn_config["num_heads"])
    others = {name: tensor for name, tensor in tensors.items() if not name.startswith(PREFIX)}
    missing, unexpected = model.load_state_dict(
        others | {PREFIX + name: tensor for name, tensor in text.items()}, False
    )
    given = torch.load(images)
    first, ids = given["cases"][0], torch.tensor([given["ids"]])
    with torch.no_grad():
        logits = model.float()(
            ids,
            pixel_values=first["pixel_values"].float(),
            grid_thws=first["image_grid_thw"],
            attention_mask=torch.ones_like(ids),
            use_cache=False,
            return_dict=True,
        ).logits[0]
        model.vision_tower.double(), model.mm_projector.double()
        tokens = [
            torch.cat(model.mm_projector(model.vision_tower(case["pixel_values"].double(), case["image_grid_thw"])))
            for case in given["cases"]
        ]
    seen = {"missing": missing, "unexpected": unexpected, "logits": logits.tolist()}
    out.write_text(json.dumps(seen | {"tokens": [of_case.tolist() for of_case in tokens]}))


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
