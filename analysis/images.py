"""Make a prompt of images, to show what a model that sees reads at their tokens."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from attnres.utils.wording import counted

_QUESTION = "What is shown?"


@dataclass(frozen=True, eq=False)
class ImagePrompt:
    """A prompt with images.

    Attributes:
        inputs: The arguments of the model: `input_ids` `[1, tokens]` and those of the images.
        start: The index of the first token that is shown, where the first image begins. A system message may precede.
        words: These tokens as words, one for each token. A token of an image is its row and column, which count from 1,
            and the last one of a row ends with a line break.
    """

    inputs: Mapping[str, Tensor]
    start: int
    words: list[str]

    def __str__(self) -> str:
        images = counted(len(self.inputs["image_grid_thw"]), "image")
        return f"{counted(len(self.words), 'token')} that begin with {images}"


def image_prompt(processor: Any, paths: Sequence[Path]) -> ImagePrompt:
    """Make the prompt of a user who asks what images show.

    Args:
        processor: The processor of the model.
        paths: The files of the images.

    Raises:
        OSError, ValueError: An image cannot be read.
    """
    content = [{"type": "image", "path": str(path)} for path in paths]
    messages = [{"role": "user", "content": [*content, {"type": "text", "text": _QUESTION}]}]
    options = {"tokenize": True, "return_dict": True, "return_tensors": "pt", "add_generation_prompt": True}
    inputs = processor.apply_chat_template(messages, **options)
    merge = processor.image_processor.merge_size
    # The placeholders of all images, in their order.
    cells = [
        f"{row + 1},{column + 1}" + ("\n" if column + 1 == columns // merge else " ")
        for _, rows, columns in inputs["image_grid_thw"].tolist()
        for row in range(rows // merge)
        for column in range(columns // merge)
    ]
    cell, placeholder = iter(cells), processor.image_token_id
    ids = inputs["input_ids"][0].tolist()
    start = ids.index(processor.tokenizer.convert_tokens_to_ids("<|media_begin|>"))
    words = [next(cell) if token == placeholder else processor.tokenizer.decode([token]) for token in ids[start:]]
    return ImagePrompt(inputs, start, words)


__all__ = ["ImagePrompt", "image_prompt"]
