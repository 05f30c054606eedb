"""Conversations with images: a sequence for each conversation, whose images are prepared when a batch is made.

Text is cut into blocks of equal length (`blocks.py`). A conversation with images stays whole, since an image cannot be
cut, and batches are padded. The cache holds tokens, and of images their bytes or paths: patches would take more space.
"""

import hashlib
import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch.nn.utils.rnn import pad_sequence

from attnres.utils.extras import require_extra
from attnres.utils.wording import counted

from . import IGNORED
from .blocks import DIGEST, build_once, select_rows
from .chat import encode_chat, image_parts, is_image
from .documents import DataSpec, Documents, Skipped, key_of
from .loaders import Document

with require_extra("train"):
    import datasets.config
    import pyarrow as pa
    from datasets import Dataset
    from datasets.fingerprint import Hasher

_VERSION = 1  # of the cache's content: raise it when the same data would give other rows
_ROWS, _COUNTS = "rows.arrow", "counts.json"
_IMAGE = pa.struct({"path": pa.string(), "bytes": pa.binary()})
_SCHEMA = pa.schema(
    {
        "input_ids": pa.list_(pa.int32()),
        "labels": pa.list_(pa.int32()),
        "images": pa.list_(_IMAGE),
        "documents": pa.string(),
    }
)

logger = logging.getLogger(__name__)


def load_conversations(
    spec: DataSpec, processor: Any, length: int, *, seed: int | None, cache: Path | None = None
) -> Dataset:
    """Load conversations with images, each as one sequence.

    An image is a part `{"type": "image", "path": ...}` of a message's content; `image` may take the place of `path`,
    with a path, bytes, or `{"bytes": ..., "path": ...}`. Parts without either are filled, in order, from a column
    `images` or `image` of the row. A path is relative to the folder of the data file.

    Args:
        spec: The documents to read.
        processor: The processor of the model.
        length: The most tokens of a conversation, those of images included.
        seed: The seed of the order; `None` keeps the order of the files.
        cache: A folder for the rows. By default a folder within the cache of `datasets`.

    Returns:
        Rows `{"input_ids": [tokens], "labels": [tokens], "images": [...], "documents": "chats.jsonl:17"}`: lists of
        integers, and for each image its `path` or `bytes`. `info.description` holds the number of documents and tokens.

    Raises:
        OSError: A file is absent or cannot be read, or the cache cannot be written.
        ValueError: A data set, file, row or image cannot be used (see [`DataSpec`]).
    """
    documents = Documents(spec, whole_rows=True)
    cache = Path(cache or Path(datasets.config.HF_DATASETS_CACHE) / "attnres")
    encode = encode_chat(processor.tokenizer, spec.column, processor)
    settings = Hasher.hash((encode, processor.image_processor.to_dict(), processor.chat_template))
    folders = [str(Path(source.name).parent.resolve()) for source in documents.sources]
    key = key_of(_VERSION, documents.identities(), folders, spec.column, spec.bad_rows, spec.limit, length, settings)

    def build(folder: Path) -> None:
        digest, counts = hashlib.blake2b(digest_size=16), {"document": 0, "token": 0}
        with pa.ipc.new_stream(str(folder / _ROWS), _SCHEMA) as file:
            for row in _encoded(documents, encode, processor, length):
                file.write_batch(pa.RecordBatch.from_pylist([row], schema=_SCHEMA))
                digest.update(repr((row["input_ids"], row["labels"], row["images"])).encode())
                counts["document"] += 1
                counts["token"] += len(row["input_ids"])
        if not counts["document"]:
            raise ValueError(f"{' '.join(spec.paths)} holds no conversation. {documents.skipped}")
        (folder / DIGEST).write_text(digest.hexdigest())
        (folder / _COUNTS).write_text(json.dumps({"counts": counts, "skipped": vars(documents.skipped)}))

    folder = build_once(cache / f"images-{key}", build)
    numbers = json.loads((folder / _COUNTS).read_text())
    if skipped := Skipped(**numbers["skipped"]):
        logger.warning("%s", skipped)
    rows = Dataset.from_file(str(folder / _ROWS))
    if seed is not None:
        rows = select_rows(rows, np.random.default_rng(seed).permutation(len(rows)))
    rows.info.description = ", ".join(counted(number, noun) for noun, number in numbers["counts"].items())
    return rows


def _encoded(documents: Documents, encode: Any, processor: Any, length: int) -> Iterator[dict[str, Any]]:
    """Yield the rows of the conversations that can be used. `bad_rows` of `documents` decides about the others."""
    for document in documents:
        try:
            yield _encode(document, documents.spec.column, encode, processor, length)
        except ValueError as error:
            documents.skip_row(ValueError(f"{document.source}:{document.first}: {error}"))


def _encode(document: Document, column: str, encode: Any, processor: Any, length: int) -> dict[str, Any]:
    """Return the tokens, labels and images of a conversation. Raise ValueError if it cannot be used."""
    folder = Path(document.source).parent if Path(document.source).is_file() else Path()
    row = dict(document.row)
    sources: list[Any] = []
    if isinstance(row.get(column), list):
        row[column], sources = _with_sizes(row, column, folder, processor)
    encoded = encode(row)
    if len(encoded["input_ids"]) > length:
        images = encoded["input_ids"].count(processor.image_token_id)
        raise ValueError(
            f"the conversation has {len(encoded['input_ids']):,} tokens, {images:,} of them of images, but `length` is "
            f"{length:,}. Give a larger `length` or smaller images."
        )
    return encoded | {"images": sources, "documents": f"{document.source}:{document.first}"}


def _with_sizes(
    row: Mapping[str, Any], column: str, folder: Path, processor: Any
) -> tuple[list[Any], list[dict[str, Any]]]:
    """Return the messages of a row, with the sizes of images in place of images; and the images, as the cache has them.

    Raises:
        ValueError: An image cannot be read, is missing, or is one too many.
    """
    given = row.get("images", row.get("image"))
    others = [] if given is None else [*given] if isinstance(given, list | tuple) else [given]
    waiting, messages, sources = iter(others), [], []
    for message in row[column]:
        if not isinstance(message, dict) or not image_parts(message):
            messages.append(message)
            continue
        if message.get("role") == "tool":
            raise ValueError("a result of a tool holds an image. Put it into a message of the user.")
        content = []
        for part in message["content"]:
            if is_image(part):
                source = next((part[key] for key in ("image", "path", "bytes") if part.get(key) is not None), None)
                source = next(waiting, None) if source is None else source
                if source is None:
                    raise ValueError("an image of a message must have a `path`, `image` or `bytes`, or be in `images`.")
                sources.append(_as_stored(source, folder))
                image = processor.image_processor.fetch_images(_opened(sources[-1]))  # decoded now, not in a later step
                part = {"type": "image", "size": [*image.size]}
            content.append(part)
        messages.append(message | {"content": content})
    if left := [*waiting]:
        raise ValueError(
            f"the row has {counted(len(others), 'image')}, but messages with places for {len(others) - len(left)}. Put "
            '{"type": "image"} where each belongs.'
        )
    return messages, sources


def _as_stored(source: Any, folder: Path) -> dict[str, Any]:
    """Return an image of a row as the cache has it: its bytes, or the absolute path of its file."""
    if isinstance(source, dict):
        source = source.get("bytes") or source.get("path")
    if isinstance(source, bytes):
        return {"path": None, "bytes": source}
    if isinstance(source, str):
        return {"path": str((folder / source).absolute()), "bytes": None}
    if not hasattr(source, "save"):  # of PIL, as `datasets` decodes images
        raise ValueError(f"an image must be a path or bytes, but is of the type {type(source).__name__}.")
    source.save(file := BytesIO(), "PNG")
    return {"path": None, "bytes": file.getvalue()}


def _opened(stored: Mapping[str, Any]) -> Any:
    """Return what the image processor opens."""
    return stored["bytes"] or Path(stored["path"])


def collate_images(processor: Any, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Make a batch of conversations with images.

    Args:
        processor: The processor of the model.
        rows: Rows of [`load_conversations`].

    Returns:
        `input_ids`, `attention_mask` and `labels`, int64 `[batch, seq]`, padded on the right; `pixel_values` and
        `image_grid_thw` of all images; `documents`, the places of the rows. A batch without images has a small black
        one behind its padding, which no token sees: a process whose batch leaves the tower out would keep others, which
        share the tower's weights, waiting.
    """
    images = [_opened(image) for row in rows for image in row["images"]]
    ids = [torch.tensor(row["input_ids"]) for row in rows]
    # By PyTorch's 0: no label and no token looks at padding.
    pad = partial(pad_sequence, batch_first=True)
    batch = {
        "input_ids": pad(ids),
        "attention_mask": pad([torch.ones_like(one) for one in ids]),
        "labels": pad([torch.tensor(row["labels"]) for row in rows], padding_value=IGNORED),
    }
    image_processor = processor.image_processor
    if not images:
        side = image_processor.patch_size * image_processor.merge_size
        images = [torch.zeros(3, side, side, dtype=torch.uint8)]
        for name, padding in {"input_ids": 0, "attention_mask": 0, "labels": IGNORED}.items():
            batch[name] = F.pad(batch[name], (0, 1), value=padding)
        batch["input_ids"][-1, -1] = processor.image_token_id  # the one token of the image, in the last row
    prepared = image_processor(images, return_tensors="pt")
    return batch | {
        "pixel_values": prepared["pixel_values"],
        "image_grid_thw": prepared["image_grid_thw"],
        "documents": [row["documents"] for row in rows],
    }


__all__ = ["collate_images", "load_conversations"]
