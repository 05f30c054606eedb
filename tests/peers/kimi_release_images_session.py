"""Prepare images by the code that Kimi K3 was released with, which `llmcompressor` carries.

    python kimi_release_images_session.py INPUT OUT

INPUT is a JSON file with `settings`, the content of a released `preprocessor_config.json`, and `paths` of images. OUT
gets for each image the `prompt` that stands for it, its `grid` of patches, and the `digest` of its values' bytes; or
None if the code refuses it.
"""

import hashlib
import json
import sys
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

PACKAGE = "released_kimi_k3"


def main(source: Path, out: Path) -> None:
    # The package itself asks for others, but the released files stand alone.
    (package,) = find_spec("llmcompressor").submodule_search_locations
    sys.modules[PACKAGE] = ModuleType(PACKAGE)
    sys.modules[PACKAGE].__path__ = [f"{package}/modeling/kimi_k3"]
    from released_kimi_k3.kimi_k3_vision_processing import KimiK3VisionProcessor

    given = json.loads(source.read_text())
    processor = KimiK3VisionProcessor.from_dict(given["settings"])

    def prepare(path: str) -> dict | None:
        media = {"type": "image", "image": path}
        try:
            values = processor.preprocess([media], return_tensors="pt")
        except (OSError, ValueError):
            return None
        digest = hashlib.sha256(values["pixel_values"].numpy().tobytes()).hexdigest()
        prompt = processor.make_image_prompt(*media["image"].size)
        return {"prompt": prompt, "grid": values["grid_thws"][0].tolist(), "digest": digest}

    out.write_text(json.dumps({"images": [prepare(path) for path in given["paths"]]}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
