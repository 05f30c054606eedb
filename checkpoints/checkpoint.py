"""Read a checkpoint directory as a table of tensors: name, dtype, shape, file and place in the file.

No weight is loaded.
"""

import json
import os
from collections.abc import Collection
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import takewhile
from pathlib import Path

from huggingface_hub import snapshot_download
from huggingface_hub.utils import httpx
from safetensors.torch import save_file
from transformers.utils import CONFIG_NAME, SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME, WEIGHTS_INDEX_NAME, WEIGHTS_NAME

from attnres.loading_attnres import check_files, explain_broken_shard
from attnres.residual_attnres import explain_source
from attnres.saving_attnres import complete_save
from attnres.utils.files import check_space
from attnres.utils.hub import ADAPTER_CONFIG, check_no_lone_adapter, check_path
from attnres.utils.model_files import RECORD, SIDE_FILES

from .pickles import read_pickle, read_pickle_shapes
from .shards import DTYPES, Entry, Shard, explain_writing, read_pieces, read_shard
from .source_files import check_no_pipe, read_object

NAMED_WEIGHTS = "transformers_weights"  # the field in which a configuration may name the file of its weights


@dataclass(frozen=True)
class Checkpoint:
    """The headers of a checkpoint's weights.

    Attributes:
        folder: The model's directory.
        shards: The files.
        where: Name of a tensor of the checkpoint -> the file that holds it. A file may also hold tensors that the index
            does not name. They are copied with the file, and ignored otherwise.
        is_temporary: Whether the files were rewritten in a scratch directory, and may be moved from there.
    """

    folder: Path
    shards: tuple[Shard, ...]
    where: dict[str, Shard]
    is_temporary: bool = False

    @cached_property
    def entries(self) -> dict[str, Entry]:
        """The tensors by name."""
        return {e.name: e for shard in self.shards for e in shard.entries if self.where.get(e.name) is shard}

    @property
    def num_bytes(self) -> int:
        """The size of the files in bytes."""
        return sum(shard.path.stat().st_size for shard in self.shards)

    def unread(self, unused: Collection[str]) -> list[str]:
        """Return the sorted names of tensors in the files that a model does not read.

        They include tensors that lie in a file but not in the index.

        Args:
            unused: The names of the checkpoint's tensors that the model does not use.
        """
        held = {entry.name for shard in self.shards for entry in shard.entries}
        return sorted((held - self.entries.keys()) | set(unused))

    def file_of(self, name: str) -> Path:
        """Return the file of a tensor of the model.

        `transformers` may merge or rename tensors when it loads them. For such a tensor, the file with the most similar
        name is returned.
        """

        def shared_parts(other: str) -> int:
            pairs = zip(name.split("."), other.split("."))
            return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))

        return self.where[name if name in self.where else max(self.where, key=shared_parts)].source


def find(source: str | os.PathLike, revision: str | None = None) -> Path:
    """Return the local directory of a model: `source` itself, or a snapshot of the repository on the Hub.

    If a `save_pretrained` into the directory was killed while it replaced files, the replacement is completed first.

    Args:
        source: The directory or Hub id.
        revision: The branch, tag or commit on the Hub.

    Returns:
        The directory.

    Raises:
        FileNotFoundError: It is neither a directory nor on the Hub, or the Hub cannot be reached; or it is the
            directory of a training run.
        OSError: The replacement of files cannot be completed, or a named pipe or a device is in place of a file.
        ValueError: A `revision` is given for a directory, or the directory or repository holds an adapter without a
            model.
    """
    folder = Path(source)
    if folder.is_dir():
        if revision is not None:
            raise ValueError(f"{source} is a directory, which has no revisions. Leave out --revision.")
        for path in folder.iterdir():
            check_no_pipe(path)
        complete_save(folder)  # before a file in it is read
        check_path(source)
        return folder
    check_path(source)
    small_files = ["config.json", "README.md", "*.py", RECORD, *SIDE_FILES]
    try:
        folder = Path(
            snapshot_download(str(source), revision=revision, allow_patterns=[*small_files, "model*.safetensors*"])
        )
        if not (folder / CONFIG_NAME).exists():  # the file below says why
            snapshot_download(str(source), revision=revision, allow_patterns=[ADAPTER_CONFIG])
        # Pickles are large, and downloaded only if there is nothing else.
        if not any(folder.glob("model*.safetensors")):
            snapshot_download(str(source), revision=revision, allow_patterns=["pytorch_model*.bin*"])
    except (OSError, httpx.HTTPError) as error:  # a broken connection raises no `OSError`
        # The message is joined, because its first line may be only "404 Client Error."
        reason = " ".join(str(error).split())
        raise FileNotFoundError(f"{source} is not a directory, and the Hub does not give it: {reason}") from error
    check_no_lone_adapter(folder, source)
    return folder


def open_checkpoint(folder: Path, scratch: Path) -> Checkpoint:
    """Read the headers of the weights that a conversion copies: safetensors, or else legacy `pytorch_model.bin`.

    Legacy files are first rewritten as safetensors, without running code from them.

    Args:
        folder: The model's directory.
        scratch: The directory for rewritten files.

    Returns:
        The table of tensors.

    Raises:
        FileNotFoundError: There are no weights, or the index names a file or tensor that does not exist.
        OSError: A file is truncated or damaged.
        ValueError: A pickle runs code when it is loaded, or the configuration names another file of weights.
    """
    for single, index in ((SAFE_WEIGHTS_NAME, SAFE_WEIGHTS_INDEX_NAME), (WEIGHTS_NAME, WEIGHTS_INDEX_NAME)):
        if (folder / single).exists():
            files, weight_map = [single], None
        elif (folder / index).exists():
            weight_map = _read_index(folder / index)
            files = sorted(set(weight_map.values()))
        else:
            continue
        _check_named(folder, single if weight_map is None else index)
        if weight_map is not None:
            _check_index(folder / index, files, Path(single).suffix)
        if single == WEIGHTS_NAME:
            check_space(scratch.parent, sum((folder / file).stat().st_size for file in files))
            shards = []
            for i, file in enumerate(files, 1):
                name = SAFE_WEIGHTS_NAME if len(files) == 1 else f"model-{i:05d}-of-{len(files):05d}.safetensors"
                tensors = read_pickle(folder / file, DTYPES.values())
                with explain_writing(scratch / name):
                    save_file(tensors, scratch / name, {"format": "pt"})
                shards.append(replace(read_shard(scratch / name), original=folder / file))
            return make_checkpoint(folder, shards, is_temporary=True)
        with explain_broken_shard(folder):
            shards = [read_shard(folder / file) for file in files]
        return make_checkpoint(folder, shards, weight_map)
    raise FileNotFoundError(f"{folder} has no weights: neither {SAFE_WEIGHTS_NAME} nor {WEIGHTS_NAME}, nor an index.")


def read_headers(folder: Path) -> Checkpoint | None:
    """Return names, dtypes and shapes of the weights that `transformers` would load from a directory.

    Nothing is copied, so links may lead out of the directory, unlike in [`open_checkpoint`]. Pickles are not rewritten:
    `start` and `end` of their entries are 0.

    Args:
        folder: The model's directory.

    Returns:
        The table, or None if there are no weights in a format whose shapes are known before they are loaded.

    Raises:
        OSError: A file or tensor that an index names is not there, or a file is truncated or damaged.
        ValueError: A pickle runs code when it is loaded, or its tensors are larger than the file.
    """
    config = folder / CONFIG_NAME
    named_file = read_object(config).get(NAMED_WEIGHTS) if config.is_file() else None
    for single, index in (
        (named_file, named_file),  # the configuration may name a file of weights or an index
        (SAFE_WEIGHTS_NAME, SAFE_WEIGHTS_INDEX_NAME),
        (WEIGHTS_NAME, WEIGHTS_INDEX_NAME),
    ):
        if not isinstance(single, str):
            continue
        if (folder / single).is_file() and not single.endswith(".json"):
            files, weight_map = [single], None
        elif index.endswith(".json") and (folder / index).is_file():
            weight_map = _read_index(folder / index)
            if lacks_metadata(folder / index):
                raise OSError(
                    f"{folder / index} has no object `metadata`, so transformers cannot load the weights. Add "
                    f'`"metadata": {{}}` to it, or let `attnres convert` write a whole index.'
                )
            files = sorted(set(weight_map.values()))
            if lacking := [file for file in files if not (folder / file).is_file()]:
                raise FileNotFoundError(f"{folder} is incomplete: {index} names {lacking[0]}, which is not there.")
        else:
            continue
        with explain_broken_shard(folder):
            shards = [_read_header(folder / file) for file in files]
        return make_checkpoint(folder, shards, weight_map)
    return None


def _read_header(path: Path) -> Shard:
    """Read the header of a safetensors file, or the dtypes and shapes of a pickle."""
    if path.suffix == ".safetensors":
        return read_shard(path)
    names = {dtype: name for name, dtype in DTYPES.items()}
    shapes = read_pickle_shapes(path, names)
    return Shard(path, tuple(Entry(name, names[dtype], shape, 0, 0) for name, (dtype, shape) in shapes.items()), 0, {})


def make_checkpoint(
    folder: Path, shards: list[Shard], weight_map: dict[str, str] | None = None, is_temporary: bool = False
) -> Checkpoint:
    """Return the checkpoint that consists of given shards.

    Args:
        folder: The model's directory.
        shards: The headers of the files.
        weight_map: Tensor -> name of its file, as in an index. By default all tensors in the files.
        is_temporary: Whether the files may be moved; see [`Checkpoint`].

    Returns:
        The checkpoint.

    Raises:
        FileNotFoundError: A file lacks a tensor that `weight_map` assigns to it.
        ValueError: A tensor lies in two files.
    """
    with explain_source(folder):
        check_files({shard.source.name: [entry.name for entry in shard.entries] for shard in shards})
    by_file = {shard.path.name: shard for shard in shards}
    held = {(shard.path.name, entry.name) for shard in shards for entry in shard.entries}
    if weight_map is None:
        weight_map = {name: file for file, name in sorted(held)}
    for name, file in weight_map.items():
        if (file, name) not in held:
            raise FileNotFoundError(f"{folder} is incomplete: {file} lacks `{name}`, which the index assigns to it.")
    return Checkpoint(folder, tuple(shards), {name: by_file[file] for name, file in weight_map.items()}, is_temporary)


def same_bytes(checkpoint: Checkpoint, a: str, b: str) -> bool:
    """Return whether the tensors named `a` and `b` of a checkpoint have the same dtype, shape and bytes."""
    paths = [checkpoint.where[name].path for name in (a, b)]
    entries = [checkpoint.entries[name] for name in (a, b)]
    if (entries[0].dtype, entries[0].shape) != (entries[1].dtype, entries[1].shape):
        return False
    with paths[0].open("rb") as one, paths[1].open("rb") as other:
        pieces = map(read_pieces, (one, other), entries, paths)
        return all(x == y for x, y in zip(*pieces))


def _check_named(folder: Path, taken: str) -> None:
    """Raise ValueError if the configuration names a file of weights other than `taken`: `transformers` reads it."""
    path = folder / CONFIG_NAME
    if not path.exists():
        return  # `read_config` raises an error for it
    named_file = read_object(path).get(NAMED_WEIGHTS)
    if named_file not in (None, taken):
        raise ValueError(
            f"{path} names its weights by `{NAMED_WEIGHTS}`: {json.dumps(named_file)}, but beside it lies {taken}. "
            f"Remove the field, or rename the file that it names to {taken}."
        )


def _check_index(index: Path, files: Collection[str], suffix: str) -> None:
    """Raise unless an index names only files of weights that lie beside it."""
    for file in files:
        path = index.parent / file
        if file in ("", ".", "..") or Path(file).name != file:
            raise ValueError(f"{index} names {file or chr(34) * 2}, which does not lie beside it. Move it there.")
        # The result's shards get the same names, which must not be those of its other files.
        if path.suffix != suffix or path.is_dir():
            raise ValueError(f"{index} names {file}, which is not a {suffix} file of weights. Copy the index again.")
        if not path.exists():
            raise FileNotFoundError(f"{index.parent} is incomplete: {index.name} names {file}, which is not there.")


def _read_index(path: Path) -> dict[str, str]:
    try:
        weight_map = json.loads(path.read_text())["weight_map"]
        if not weight_map:
            raise ValueError("it names no tensor")
        # `fspath` raises TypeError for a value that is not a text.
        return {name: os.fspath(file) for name, file in weight_map.items()}
    except (AttributeError, KeyError, RecursionError, TypeError, ValueError) as error:
        raise OSError(f"{path} is not an index of weights ({error!r}). Copy it again.") from error


def lacks_metadata(index: Path) -> bool:
    """Return whether an index of weights lacks the object `metadata`. `transformers` does not load it then."""
    return not isinstance(read_object(index).get("metadata"), dict)


def broken_index(folder: Path) -> Path | None:
    """Return the index by which `transformers` would load the weights of a directory, if it [`lacks_metadata`]."""
    for single, index in ((SAFE_WEIGHTS_NAME, SAFE_WEIGHTS_INDEX_NAME), (WEIGHTS_NAME, WEIGHTS_INDEX_NAME)):
        if (folder / single).exists():
            return None
        if (folder / index).exists():
            return folder / index if lacks_metadata(folder / index) else None
    return None


__all__ = [
    "NAMED_WEIGHTS",
    "Checkpoint",
    "broken_index",
    "find",
    "lacks_metadata",
    "make_checkpoint",
    "open_checkpoint",
    "read_headers",
    "same_bytes",
]
