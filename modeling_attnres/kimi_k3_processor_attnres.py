"""The processor of Kimi K3: its tokenizer and chat format with images in the prompt."""

import os
from itertools import pairwise
from pathlib import Path
from typing import Any

from transformers import BatchFeature, ProcessorMixin
from transformers.utils import IMAGE_PROCESSOR_NAME, cached_file

PLACEHOLDER = "<|kimi_image_placeholder|>"
IMAGE_TOKEN = "<|media_pad|>"
_FILE_OPTIONS = ("cache_dir", "force_download", "local_files_only", "revision", "subfolder", "token")


class AttnResKimiK3Processor(ProcessorMixin):
    """The processor of Kimi K3: a tokenizer, and an image processor for the images in a prompt.

    Each `<|kimi_image_placeholder|>` of a text stands for one image. In its place the model gets the size of the image
    as it was given, and one token for each group of patches. `apply_chat_template` writes the placeholders.

    Args:
        image_processor: The image processor.
        tokenizer: The tokenizer.
        chat_template: The chat template; that of the tokenizer by default.
        kwargs: Nothing else: the base class refuses it.
    """

    def __init__(
        self, image_processor: Any = None, tokenizer: Any = None, chat_template: str | None = None, **kwargs: Any
    ) -> None:
        super().__init__(image_processor, tokenizer, chat_template=chat_template or tokenizer.chat_template, **kwargs)
        # `transformers` replaces the first in texts, and marks the second as an image in `mm_token_type_ids`.
        self.image_token = PLACEHOLDER
        self.image_token_id = tokenizer.convert_tokens_to_ids(IMAGE_TOKEN)

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: str | os.PathLike, **kwargs: Any) -> Any:
        """Load the processor of a directory or Hub repository.

        Args:
            pretrained_model_name_or_path: The directory or repository.
            kwargs: Arguments as those of any processor, such as `revision`.

        Returns:
            The processor. For a text model, which has no image processor, its tokenizer, as `AutoProcessor` has it.
        """
        source, options = pretrained_model_name_or_path, {key: kwargs[key] for key in _FILE_OPTIONS if key in kwargs}
        if cached_file(source, IMAGE_PROCESSOR_NAME, _raise_exceptions_for_missing_entries=False, **options) is None:
            return cls._load_tokenizer_from_pretrained("tokenizer", source, **kwargs)
        return super().from_pretrained(source, **kwargs)

    def prepare_inputs_layout(self, images: Any = None, text: Any = None, **kwargs: Any) -> tuple:
        """Open the images, and refuse videos and placeholders without an image, before any other work.

        Args:
            images: Images as the image processor takes them, also in nested lists.
            text: A text, or a list of texts.
            kwargs: Other arguments of the call.

        Returns:
            The images, the list of texts, videos and audio: none of the last two.

        Raises:
            ValueError: There are videos or audio, or not one image for each placeholder, or an image that cannot be
                read.
        """
        if given := [name for name in ("videos", "audio") if kwargs.get(name) is not None]:
            raise ValueError(f"Kimi K3 reads images and no {given[0]}. Give frames of a video as images.")
        texts = [text] if isinstance(text, str) else text
        for group, given in [] if texts is None else _groups(texts, images):
            placeholders, count = sum(one.count(PLACEHOLDER) for one in group), _count(given)
            if placeholders != count:
                raise ValueError(
                    f"the prompt has {placeholders} of {PLACEHOLDER}, but {count} images were given. Put one in the "
                    "prompt for each image, or use apply_chat_template."
                )
        images = images if _count(images) else None  # empty lists too
        return super().prepare_inputs_layout(images=images, text=text, **kwargs)

    def image_prompt(self, width: int, height: int) -> str:
        """Return the text that stands for an image in a prompt.

        Args:
            width: Width of the original image in pixels.
            height: Height of the original image in pixels.

        Returns:
            The size, and one token for each group of patches, between the tokens of media.
        """
        _, rows, columns = self.image_processor.grid(width, height)
        tokens = IMAGE_TOKEN * (rows * columns // self.image_processor.merge_size**2)
        return f"<|media_begin|>image {width}x{height}<|media_content|>{tokens}<|media_end|>"

    def replace_image_token(self, image_inputs: dict[str, Any], image_idx: int, **kwargs: Any) -> str:
        """Return [`image_prompt`] of an image.

        Args:
            image_inputs: What the image processor returned.
            image_idx: The index of the image.
            kwargs: Arguments of the image processor, which have no effect.
        """
        return self.image_prompt(*map(int, image_inputs["image_sizes"][image_idx]))

    @property
    def unused_input_names(self) -> list[str]:
        """Names of the image processor's results that the model does not take."""
        return ["image_sizes"]

    def apply_chat_template(self, conversation: Any, *args: Any, **kwargs: Any) -> Any:
        """Render a conversation, or encode it with its images, as any processor does.

        Args:
            conversation: A list of messages, or a list of such lists. The content of a message may be a list with
                `{"type": "image", "url": ...}`; `path`, `base64` or `image` may take the place of `url`.
            args: Other arguments of the base class.
            kwargs: Other arguments of the base class, and options of the chat format, such as `thinking`.

        Returns:
            The text; with `tokenize=True, return_dict=True` the inputs of the model.

        Raises:
            ValueError: A part of a message is no text and no image; or results of several tools that follow each other
                hold an image: the format puts them in the order of their calls, so images might change places.
        """
        is_batch = bool(conversation) and isinstance(conversation[0], list | tuple)
        for messages in conversation if is_batch else [conversation]:
            for kind, name in (("video", "videos"), ("audio", "audio")):
                if any(_has_part(one, kind) for one in messages):
                    raise ValueError(f"Kimi K3 reads images and no {name}, but a message holds {kind}.")
            for one, other in pairwise(messages):
                if one["role"] == other["role"] == "tool" and (_has_part(one, "image") or _has_part(other, "image")):
                    raise ValueError(
                        "an image is in one of several results of tools, which the chat format puts in the order of "
                        "their calls. Put the image into a message of the user behind them."
                    )
        return super().apply_chat_template(conversation, *args, **kwargs)

    def to_json_file(self, json_file_path: str | os.PathLike) -> None:
        """Write `preprocessor_config.json`, which a release has in place of `processor_config.json`.

        Args:
            json_file_path: The path of `processor_config.json`, which is not written: other engines read the settings
                of images from the released file.
        """
        self.image_processor.to_json_file(Path(json_file_path).with_name(IMAGE_PROCESSOR_NAME))

    def _check_special_mm_tokens(self, text: list[str], text_inputs: BatchFeature, modalities: list[str]) -> None:
        """Raise `ValueError` if truncation cut tokens of images. The base class counts placeholders, no tokens."""
        for one, ids in zip(text, text_inputs["input_ids"], strict=True):
            expected, count = one.count(IMAGE_TOKEN), [*map(int, ids)].count(self.image_token_id)
            if count != expected:
                raise ValueError(
                    f"the images of a prompt have {expected} tokens, but truncation left {count}. Give a larger "
                    "max_length, or smaller images."
                )


def _groups(texts: list[str], images: Any) -> list[tuple[list[str], Any]]:
    """Return texts and the images that belong to them: one pair a text if the images are in lists, one for each."""
    is_nested = isinstance(images, list | tuple) and any(isinstance(one, list | tuple) for one in images)
    if is_nested and len(images) == len(texts):
        return [([text], given) for text, given in zip(texts, images)]
    return [(texts, images)]


def _count(images: Any) -> int:
    """Return the number of images in nested lists."""
    if isinstance(images, list | tuple):
        return sum(map(_count, images))
    return int(images is not None)


def _has_part(message: dict[str, Any], kind: str) -> bool:
    content = message.get("content")
    return isinstance(content, list) and any(part.get("type") in (kind, f"{kind}_url") for part in content)


AttnResKimiK3Processor.register_for_auto_class()


__all__ = ["IMAGE_TOKEN", "PLACEHOLDER", "AttnResKimiK3Processor"]
