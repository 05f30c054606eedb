"""Turn images into the patches that Kimi K3 sees, as the released code does.

An image keeps its size where it fits the limits, and is made smaller otherwise. Transparent pixels show a chessboard.
The result is padded to whole groups of patches and cut into patches. Videos are refused: the release reads images.
"""

import base64
import math
import os
import warnings
from collections.abc import Callable, Mapping
from copy import deepcopy
from io import BytesIO
from pathlib import Path
from typing import Any, NamedTuple

import torch
from huggingface_hub import get_session
from PIL import Image
from torch import Tensor
from transformers.image_processing_utils import BaseImageProcessor, BatchFeature
from transformers.image_transforms import to_pil_image
from transformers.image_utils import make_flat_list_of_images, to_numpy_array
from transformers.utils import TensorType

# The settings of the released model. A release has them in `preprocessor_config.json` under this name.
_SETTINGS = "media_proc_cfg"
RELEASED: dict[str, Any] = {
    "in_patch_limit": 65536,
    "patch_limit_on_one_side": 512,
    "patch_size": 14,
    "merge_kernel_size": 2,
    "fixed_output_tokens": None,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
    "transparent_bg_config": {
        "pattern": "chessboard",
        "chessboard_square_size": 8,
        "chessboard_square_on_top_left": True,
        "chessboard_white_value": 255,
        "chessboard_gray_value": 180,
    },
    "transparent_bg_fill_stage": "after_resize",
}
# What the released code takes where the settings of a background lack a field.
_BACKGROUND = {
    "pattern": "black",
    "chessboard_square_size": 16,
    "chessboard_square_on_top_left": True,
    "chessboard_white_value": 255,
    "chessboard_gray_value": 200,
}
_PLAIN = {"white": 255, "black": 0, "gray": 128}


class ImageSizes(NamedTuple):
    """The sizes of an image on its way to patches, in pixels."""

    width: int
    """Width after it was made smaller."""
    height: int
    """Height after it was made smaller."""
    padded_width: int
    """Width after padding on the right."""
    padded_height: int
    """Height after padding at the bottom."""


class AttnResKimiK3ImageProcessor(BaseImageProcessor):
    """The image processor of Kimi K3, on PIL and PyTorch.

    Args:
        media_proc_cfg: The settings, as a released `preprocessor_config.json` has them; fields that it lacks are those
            of the release. Others, such as settings of videos, are kept and not used.
        kwargs: Other fields of that file.

    Raises:
        ValueError: A setting is not supported.
    """

    model_input_names = ("pixel_values", "image_grid_thw")

    def __init__(self, media_proc_cfg: Mapping[str, Any] | None = None, **kwargs: Any) -> None:
        kwargs.pop("auto_map", None)  # the code of the release, which is not run
        super().__init__(**kwargs)
        self.media_proc_cfg = deepcopy(dict(RELEASED if media_proc_cfg is None else media_proc_cfg))
        settings = self._settings
        background = settings["transparent_bg_config"] or _BACKGROUND
        for name, value, allowed in (
            ("fixed_output_tokens", settings["fixed_output_tokens"], [None]),
            ("transparent_bg_fill_stage", settings["transparent_bg_fill_stage"], ["before_resize", "after_resize"]),
            ("pattern", (_BACKGROUND | background)["pattern"], ["chessboard", *_PLAIN]),
        ):
            if value not in allowed:
                one_of = " or ".join(map(repr, allowed))
                raise ValueError(f"`{name}` of `{_SETTINGS}` is {value!r}, but must be {one_of}.")
        # By others, images would become too small or black, or their pixels NaN.
        for name in ("in_patch_limit", "patch_limit_on_one_side", "patch_size", "merge_kernel_size"):
            if not isinstance(settings[name], int) or settings[name] < 1:
                raise ValueError(f"`{name}` of `{_SETTINGS}` is {settings[name]!r}, but must be an integer >= 1.")
        for name, least in (("image_mean", -math.inf), ("image_std", 0)):
            values = settings[name]
            is_list = isinstance(values, list | tuple) and all(isinstance(value, int | float) for value in values)
            if not is_list or len(values) != 3 or not all(least < value < math.inf for value in values):
                raise ValueError(f"`{name}` of `{_SETTINGS}` is {values!r}, but must be three numbers for the colours.")

    @property
    def _settings(self) -> dict[str, Any]:
        """The settings with the defaults of the released code for missing fields."""
        absent = {"transparent_bg_config": None, "transparent_bg_fill_stage": "before_resize"}
        return RELEASED | absent | self.media_proc_cfg

    @property
    def patch_size(self) -> int:
        """Height and width of a patch, in pixels."""
        return self._settings["patch_size"]

    @property
    def merge_size(self) -> int:
        """Height and width, in patches, of the group that becomes one image token."""
        return self._settings["merge_kernel_size"]

    def sizes(self, width: int, height: int) -> ImageSizes:
        """Compute how small an image is made and how far it is padded.

        Args:
            width: Width of the image in pixels.
            height: Height of the image in pixels.

        Returns:
            The sizes. The padded sides are multiples of `patch_size * merge_size`. Padding comes after the limit on
            patches, so that an image may have a few more.
        """
        settings, patch = self._settings, self.patch_size
        longest = settings["patch_limit_on_one_side"] * patch
        patches = max(1, width // patch) * max(1, height // patch)
        scale = min(1.0, math.sqrt(settings["in_patch_limit"] / patches), longest / width, longest / height)
        smaller = [min(max(1, int(side * scale)), longest) for side in (width, height)]
        group = patch * self.merge_size
        return ImageSizes(*smaller, *(math.ceil(side / group) * group for side in smaller))

    def grid(self, width: int, height: int) -> list[int]:
        """Return 1 and the numbers of rows and columns of patches of an image.

        Args:
            width: Width of the image in pixels.
            height: Height of the image in pixels.
        """
        sizes = self.sizes(width, height)
        return [1, sizes.padded_height // self.patch_size, sizes.padded_width // self.patch_size]

    def fetch_images(self, images: Any) -> Any:
        """Open images, and keep their transparency, which `transformers` drops from files.

        The orientation in EXIF data has no effect, as in the released code.

        Args:
            images: An image, or nested lists of them: a path, an `http(s)` or `data:` address, a text in base64, bytes
                of a file, an image of PIL, or an array or tensor of one image, with values from 0 to 255, or from 0 to
                1 in booleans and floating-point numbers.

        Returns:
            Decoded images of PIL in the same nesting.

        Raises:
            ValueError: An image cannot be read, has no pixels, or has more pixels than PIL allows.
        """
        if isinstance(images, list | tuple):
            return [self.fetch_images(image) for image in images]
        name = str(images) if isinstance(images, str | os.PathLike) else f"the image given as {type(images).__name__}"
        name = name if len(name) <= 100 else f"{name[:100]}..."
        image = _reading(name, lambda: _open(images))
        if not image.width or not image.height:
            raise ValueError(f"{name} has {image.width} x {image.height} pixels, but must have one at least.")
        if Image.MAX_IMAGE_PIXELS is not None and image.width * image.height > 2 * Image.MAX_IMAGE_PIXELS:
            raise ValueError(_too_large(name))  # PIL checks files alone
        _reading(name, image.load)
        if image.mode.startswith(("I", "F")):  # more than 8 bits
            least, most = image.getextrema()
            is_unit = image.mode == "F" and 0 < most <= 1
            if is_unit or not (0 <= least <= most <= 255):
                message = (
                    f"{name} has values from {least:g} to {most:g}, but 0 is black and 255 white for the model, as for "
                    "the released code. Scale them to 0 to 255."
                )
                warnings.warn(message, stacklevel=2)
        return image

    def preprocess(self, images: Any, return_tensors: str | TensorType | None = None) -> BatchFeature:
        """Turn images into patches.

        Args:
            images: Images as in [`fetch_images`], also in nested lists.
            return_tensors: `"pt"` or `"np"`; tensors of PyTorch by default.

        Returns:
            `pixel_values` (patches of all images, 3, patch size, patch size), float32, in rows from top to bottom;
            `image_grid_thw` (images, 3), int64: 1, and the numbers of rows and columns of patches; and `image_sizes`
            (images, 2), int64: width and height of the images as they were given.

        Raises:
            ValueError: An image cannot be read, has no pixels, or has more pixels than PIL allows.
        """
        opened: Any = make_flat_list_of_images(self.fetch_images(images))  # of PIL, as fetched
        values = [self._patches(image) for image in opened]
        data = {
            "pixel_values": torch.cat(values),
            "image_grid_thw": torch.tensor([self.grid(*image.size) for image in opened]),
            "image_sizes": torch.tensor([image.size for image in opened]),
        }
        return BatchFeature(data=data, tensor_type=return_tensors)

    def _patches(self, image: Image.Image) -> Tensor:
        """Return the normalised patches of an image: (patches, 3, patch size, patch size), float32."""
        settings, sizes = self._settings, self.sizes(*image.size)
        is_after = settings["transparent_bg_fill_stage"] == "after_resize"
        if not is_after:
            image = self._fill(image)
        # The image is resized in its own mode: its transparency is resized too, and a palette is not interpolated.
        image = image.resize((sizes.width, sizes.height), resample=Image.Resampling.BICUBIC)
        pixels = torch.from_numpy(to_numpy_array(self._fill(image) if is_after else image))
        padding = (0, 0, 0, sizes.padded_width - sizes.width, 0, sizes.padded_height - sizes.height)
        pixels = torch.nn.functional.pad(pixels, padding)  # by black, before the values are normalised
        values = pixels.float() / 255
        values = values.sub_(torch.tensor(settings["image_mean"])).mul_(1 / torch.tensor(settings["image_std"]))
        # (rows, patch, columns, patch, 3) -> (rows, columns, 3, patch, patch)
        patch = self.patch_size
        grid = values.unflatten(1, (-1, patch)).unflatten(0, (-1, patch))
        return grid.permute(0, 2, 4, 1, 3).reshape(-1, 3, patch, patch)

    def _fill(self, image: Image.Image) -> Image.Image:
        """Return an image in RGB, its transparent pixels mixed with the background."""
        settings = self._settings["transparent_bg_config"]
        if settings is None or not ("A" in image.getbands() or "transparency" in image.info) or image.mode == "RGB":
            return image.convert("RGB")
        pixels = torch.from_numpy(to_numpy_array(image.convert("RGBA")))
        colours, alpha = pixels[..., :3], pixels[..., 3:].float() / 255
        board = _board(image.height, image.width, _BACKGROUND | settings)
        return Image.fromarray((alpha * colours + (1 - alpha) * board).to(torch.uint8).numpy())


def _open(image: Any) -> Image.Image:
    """Open an image without decoding a file's pixels."""
    if isinstance(image, Image.Image):
        return image
    if isinstance(image, os.PathLike):
        if os.path.exists(image) and not os.path.isfile(image):  # a pipe would keep the caller waiting
            raise ValueError("it is not a file")
        return Image.open(image)
    if isinstance(image, bytes):
        return Image.open(BytesIO(image))
    if not isinstance(image, str):
        array = to_numpy_array(image)
        # `transformers` takes 0 and 1 for bytes where there are no other values, so that white would be black.
        is_unit = array.dtype.kind in "bf" and 0 <= array.min() <= array.max() <= 1
        return to_pil_image(array, do_rescale=True if is_unit else None)
    if image.startswith(("http://", "https://")):
        return Image.open(BytesIO(get_session().get(image, follow_redirects=True).raise_for_status().content))
    if image.startswith("data:"):
        return Image.open(BytesIO(base64.b64decode(image.partition(",")[2])))
    if "." in image or os.path.exists(image):  # base64 has no dot
        return _open(Path(image))
    return Image.open(BytesIO(base64.b64decode(image)))


def _reading(name: str, read: Callable[[], Any]) -> Any:
    """Return what a function reads of an image, or raise `ValueError` of one line if it fails."""
    try:
        return read()
    except Image.DecompressionBombError as error:
        raise ValueError(_too_large(name)) from error
    except Exception as error:  # the decoders of damaged files fail in any way
        reason = " ".join(str(error).split())
        raise ValueError(f"{name} cannot be read as an image ({reason}). Give a file that PIL opens.") from error


def _too_large(name: str) -> str:
    limit = 2 * (Image.MAX_IMAGE_PIXELS or 0)
    return f"{name} has more than {limit:,} pixels. Make it smaller, or raise PIL.Image.MAX_IMAGE_PIXELS."


def _board(height: int, width: int, settings: Mapping[str, Any]) -> Tensor:
    """Return a background: (height, width, 1), float32, from 0 to 255."""
    if settings["pattern"] != "chessboard":
        return torch.full((height, width, 1), float(_PLAIN[settings["pattern"]]))
    rows, columns = (torch.arange(n) // settings["chessboard_square_size"] for n in (height, width))
    is_odd = (rows[:, None] + columns) % 2 == 1
    is_gray = is_odd if settings["chessboard_square_on_top_left"] else ~is_odd
    white, gray = (float(settings[f"chessboard_{name}_value"]) for name in ("white", "gray"))
    return torch.where(is_gray, gray, white)[..., None]


AttnResKimiK3ImageProcessor.register_for_auto_class()


__all__ = ["RELEASED", "AttnResKimiK3ImageProcessor", "ImageSizes"]
