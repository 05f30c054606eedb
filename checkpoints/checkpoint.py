"""One opened checkpoint: a directory or a snapshot of the Hub, each of whose parts is read and checked once, on demand.

No weight is loaded. The files of weights are read as a table of tensors: name, dtype, shape, file and place in it.
"""

import json
import os
from collections.abc import Collection, Sequence
from copy import copy, deepcopy
from functools import cached_property
from itertools import takewhile
from pathlib import Path
from typing import Any

from huggingface_hub import snapshot_download
from huggingface_hub.utils import httpx
from transformers import CONFIG_MAPPING, GenerationConfig, PreTrainedConfig, PreTrainedTokenizerBase
from transformers.utils import (
    CONFIG_NAME,
    GENERATION_CONFIG_NAME,
    SAFE_WEIGHTS_INDEX_NAME,
    SAFE_WEIGHTS_NAME,
    WEIGHTS_INDEX_NAME,
    WEIGHTS_NAME,
)

from attnres import AttnResKimiK3Config, ResidualConfig
from attnres.kimi_linear_configuration_attnres import is_kimi_k3
from attnres.kimi_tokenizer import read_kimi_tokenizer
from attnres.loading_attnres import check_files
from attnres.mtp_attnres import MultiTokenPrediction
from attnres.saving_attnres import complete_save
from attnres.utils.errors import about
from attnres.utils.hub import ADAPTER_CONFIG, check_no_lone_adapter, check_path
from attnres.utils.model_files import RECORD, SIDE_FILES, TOKENIZER_FILES
from attnres.utils.quiet import quiet_transformers

from .pickles import read_pickle_shapes
from .shards import DTYPES, Shard, StoredTensor, read_pieces, read_shard
from .sizes import check_sizes
from .source_files import PIPELINES, check_file, check_no_pipe, read_object
from .tokenizers import NoTokenizerError, load_beside_config

NAMED_WEIGHTS = "transformers_weights"  # the field in which a configuration may name the file of its weights
TOKENIZER_CONFIG = "tokenizer_config.json"
# The files of weights and their indices, in the order in which `transformers` looks for them.
WEIGHTS = (SAFE_WEIGHTS_NAME, SAFE_WEIGHTS_INDEX_NAME, WEIGHTS_NAME, WEIGHTS_INDEX_NAME)
# Fields that name a source's file of weights and its code. A result has other files.
_FIELDS_OF_FILES = (NAMED_WEIGHTS, PIPELINES)


class Checkpoint:
    """An opened checkpoint. Its other parts are read when they are first asked for, and then kept.

    Attributes:
        folder: The model's directory.
        config_path: The path of `config.json`.
        fields: The fields of `config.json`.
        name: The directory or Hub id as the user gave it, for messages.
        is_temporary: Whether the files of weights were rewritten in a scratch directory, and may be moved from there.
    """

    def __init__(self, folder: str | os.PathLike, name: str | os.PathLike | None = None):
        """Read the `config.json` of a model's directory, and nothing else yet.

        Args:
            folder: The directory.
            name: The name for messages. By default that of the directory.

        Raises:
            FileNotFoundError: There is no `config.json`.
            OSError: It is damaged, or a named pipe or a device is in place of a file.
        """
        self.folder = Path(folder)
        self.config_path = self.folder / CONFIG_NAME
        self.name = str(folder if name is None else name)
        self.is_temporary = False
        for path in self.folder.iterdir():
            check_no_pipe(path)
        if not self.config_path.exists():
            raise FileNotFoundError(f"{self.folder} has no {CONFIG_NAME}.")
        self.fields: dict[str, Any] = read_object(self.config_path)

    @classmethod
    def open(cls, source: str | os.PathLike, revision: str | None = None) -> "Checkpoint":
        """Open a directory, or a snapshot of a repository on the Hub, which is downloaded.

        If a `save_pretrained` into the directory was killed while it replaced files, the replacement is completed
        first.

        Args:
            source: The directory or Hub id.
            revision: The branch, tag or commit on the Hub.

        Raises:
            FileNotFoundError: It is neither a directory nor on the Hub, or the Hub cannot be reached; or it is the
                directory of a training run.
            OSError: The replacement of files cannot be completed, `config.json` is damaged, or a named pipe or a device
                is in place of a file.
            ValueError: A `revision` is given for a directory, or the directory or repository holds an adapter without
                a model.
        """
        if Path(source).is_dir():
            if revision is not None:
                raise ValueError(f"{source} is a directory, which has no revisions. Leave out --revision.")
            complete_save(source)  # before a file in it is read
            check_path(source)
            return cls(source)
        check_path(source)
        folder = _download(str(source), revision)
        check_no_lone_adapter(folder, source)
        return cls(folder, source)

    # --- Configuration -----------------------------------------------------------------------------------------------

    @property
    def is_kimi_k3(self) -> bool:
        """Return whether the model is Kimi K3. Its configuration may name the model type of Kimi Linear."""
        return is_kimi_k3(self.fields)

    @cached_property
    def config(self) -> PreTrainedConfig:
        """The configuration.

        Raises:
            OSError: A file of weights is damaged.
            ValueError: It has a wrong value or a model type that `transformers` does not know, or describes a model
                that is far larger than the weights.
        """
        # The Auto class is not asked for Kimi K3: the file may name Kimi Linear's model type. Code that came with the
        # checkpoint is not needed: a supported backbone is one of `transformers`.
        model_type = AttnResKimiK3Config.model_type if self.is_kimi_k3 else self.fields.get("model_type")
        self.check_sizes()
        if not isinstance(model_type, str) or model_type not in CONFIG_MAPPING:
            raise ValueError(
                f"{self.config_path} cannot be used: transformers has no model type {model_type!r}. Name one that it "
                "has, or update transformers."
            )
        with about(self.config_path):
            config = CONFIG_MAPPING[model_type].from_dict(deepcopy(self.fields))
            if self.is_kimi_k3:
                config.check_fields()
        if isinstance(config, ResidualConfig) and self.has_weights:
            MultiTokenPrediction.fit_config(config, self.entries)
        config.name_or_path = str(self.folder)
        for field in _FIELDS_OF_FILES:
            vars(config).pop(field, None)
        return config

    def check_sizes(self) -> None:
        """Compare the numbers in `config.json` with the headers of the weights, without building a configuration.

        Raises:
            OSError: A file is damaged.
            ValueError: A value does not fit. The message names the file, the field and its value.
        """
        if self.has_weights:
            check_sizes(self.config_path, self.fields, self.num_bytes, self.entries)
        else:
            check_sizes(self.config_path, self.fields)

    @cached_property
    def generation_path(self) -> Path:
        """The file of the settings of generation: `config.json` if there is no `generation_config.json`."""
        path = self.folder / GENERATION_CONFIG_NAME
        # A broken link is an error, not an absent file.
        return path if path.exists() or path.is_symlink() else self.config_path

    @cached_property
    def generation_config(self) -> GenerationConfig:
        """The settings of generation, as `from_pretrained` reads them. Settings that only warn are accepted.

        Raises:
            OSError: The file is damaged.
            ValueError: `transformers` refuses the settings, or the file is a link out of the directory.
        """
        path = self.generation_path
        is_legacy = path == self.config_path
        check_file(self.folder, path)
        with about(path, "Correct these settings there, or remove them."), quiet_transformers():
            if is_legacy:
                return GenerationConfig.from_model_config(deepcopy(self.fields))
            return GenerationConfig.from_pretrained(self.folder)

    # --- Tokenizer ---------------------------------------------------------------------------------------------------

    @cached_property
    def tokenizer_files(self) -> list[str]:
        """The names of the files that show that there is a tokenizer; empty without one."""
        return [name for name in TOKENIZER_FILES if (self.folder / name).exists()]

    @cached_property
    def tokenizer_config(self) -> dict[str, Any]:
        """The fields of `tokenizer_config.json`; empty if there is none."""
        path = self.folder / TOKENIZER_CONFIG
        return read_object(path) if path.exists() else {}

    @cached_property
    def kimi_tokenizer(self) -> PreTrainedTokenizerBase | None:
        """The tokenizer of a Kimi release, whose files are a table and code; None for any other checkpoint.

        Raises:
            ValueError: The table is damaged.
        """
        return read_kimi_tokenizer(self.folder, self.tokenizer_config)

    @cached_property
    def tokenizer(self) -> PreTrainedTokenizerBase | None:
        """The tokenizer that loads without code of the checkpoint, or None if there is none.

        Raises:
            OSError, ValueError: A file of it is damaged, or the `config.json` beside it cannot be used.
        """
        if not self.tokenizer_files or self.kimi_tokenizer is not None:
            return self.kimi_tokenizer
        check_sizes(self.config_path, self.fields)
        try:
            # The configuration may be read by a class that is not the model's: that of Kimi Linear for the text model
            # of Kimi K3. Its warnings do not concern the tokenizer.
            with quiet_transformers():
                return load_beside_config(self.folder)
        except NoTokenizerError:
            return None  # it needs its code, or a package that may not be here

    # --- Weights -----------------------------------------------------------------------------------------------------

    @cached_property
    def weights_path(self) -> Path | None:
        """The file of weights or the index by which `transformers` loads the model.

        It is None if there are no weights in a format whose shapes are known before they are loaded.
        """
        named_file = self.fields.get(NAMED_WEIGHTS)
        names = [*([named_file] if isinstance(named_file, str) else []), *WEIGHTS]
        return next((self.folder / name for name in names if (self.folder / name).is_file()), None)

    @property
    def has_weights(self) -> bool:
        """Return whether `transformers` would load the weights of the directory, and their headers can be read."""
        # It loads an adapter in the directory instead, onto a base from another checkpoint.
        return self.weights_path is not None and not (self.folder / ADAPTER_CONFIG).is_file()

    @cached_property
    def index(self) -> dict[str, Any] | None:
        """The fields of the index of the weights; None if they are one file without an index.

        Raises:
            OSError: It is not an index.
        """
        path = self.weights_path
        if path is None or path.suffix != ".json":
            return None
        try:
            index = json.loads(path.read_text(encoding="utf-8"))
            if not index["weight_map"]:
                raise ValueError("it names no tensor")
            # `fspath` raises TypeError for a value that is not a text.
            return index | {"weight_map": {name: os.fspath(file) for name, file in index["weight_map"].items()}}
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise OSError(f"{path} is not an index of weights ({error!r}). Copy it again.") from error

    @property
    def weight_files(self) -> list[str]:
        """The names of the files of weights. Those that an index names may lie in other folders.

        Raises:
            OSError: The index is damaged.
        """
        if self.weights_path is None:
            return []
        return [self.weights_path.name] if self.index is None else sorted(set(self.index["weight_map"].values()))

    @property
    def lacks_metadata(self) -> bool:
        """Return whether the index lacks the object `metadata`; then `transformers` does not load the weights."""
        return self.index is not None and not isinstance(self.index.get("metadata"), dict)

    @cached_property
    def shards(self) -> tuple[Shard, ...]:
        """The headers of the files of weights. Entries of pickles have no place in the file: it is 0.

        Raises:
            FileNotFoundError: There are no weights, or the index names a file that does not exist.
            OSError: A file is truncated or damaged.
            ValueError: A pickle runs code when it is loaded, or its tensors are larger than the file.
        """
        path = self.weights_path
        if path is None:
            raise FileNotFoundError(
                f"{self.folder} has no weights: neither {SAFE_WEIGHTS_NAME} nor {WEIGHTS_NAME}, nor an index."
            )
        for file in self.weight_files:
            if not (self.folder / file).exists():
                raise FileNotFoundError(f"{self.folder} is incomplete: {path.name} names {file}, which is not there.")
            check_no_pipe(self.folder / file)
        return tuple(_read_header(self.folder / file) for file in self.weight_files)

    @cached_property
    def where(self) -> dict[str, Shard]:
        """Name of a tensor of the checkpoint -> the file that holds it.

        A file may also hold tensors that the index does not name. They are copied with the file, and ignored otherwise.

        Raises:
            FileNotFoundError: A file lacks a tensor that the index assigns to it.
            ValueError: A tensor lies in two files.
        """
        held = {entry.name: shard for shard in self.shards for entry in shard.entries}
        with about(self.folder):
            check_files({str(shard.path): [entry.name for entry in shard.entries] for shard in self.shards})
        if self.index is None or self.is_temporary:
            return held
        for name, file in self.index["weight_map"].items():
            if name not in held or held[name].path != self.folder / file:
                raise FileNotFoundError(
                    f"{self.folder} is incomplete: {file} lacks `{name}`, which the index assigns to it."
                )
        return {name: held[name] for name in self.index["weight_map"]}

    @cached_property
    def entries(self) -> dict[str, StoredTensor]:
        """The tensors by name."""
        return {e.name: e for shard in self.shards for e in shard.entries if self.where.get(e.name) is shard}

    @property
    def num_bytes(self) -> int:
        """The size of the files of weights in bytes."""
        return sum(shard.path.stat().st_size for shard in self.shards)

    def with_shards(self, shards: Sequence[Shard]) -> "Checkpoint":
        """Return this checkpoint with weights that were rewritten in a scratch directory."""
        other = copy(self)
        for name in ("where", "entries"):
            vars(other).pop(name, None)
        other.shards, other.is_temporary = tuple(shards), True
        return other

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

    def has_same_bytes(self, a: str, b: str) -> bool:
        """Return whether the tensors named `a` and `b` have the same dtype, shape and bytes."""
        paths = [self.where[name].path for name in (a, b)]
        entries = [self.entries[name] for name in (a, b)]
        if (entries[0].dtype, entries[0].shape) != (entries[1].dtype, entries[1].shape):
            return False
        with paths[0].open("rb") as one, paths[1].open("rb") as other:
            pieces = map(read_pieces, (one, other), entries, paths)
            return all(x == y for x, y in zip(*pieces))


def _download(name: str, revision: str | None) -> Path:
    """Download the files of a model that this package reads, and return the folder of the snapshot."""
    small_files = ["config.json", "README.md", "*.py", RECORD, *SIDE_FILES]
    try:
        folder = Path(snapshot_download(name, revision=revision, allow_patterns=[*small_files, "model*.safetensors*"]))
        if not (folder / CONFIG_NAME).exists():  # the file below says why
            snapshot_download(name, revision=revision, allow_patterns=[ADAPTER_CONFIG])
        # Pickles are large, and downloaded only if there is nothing else.
        if not any(folder.glob("model*.safetensors")):
            snapshot_download(name, revision=revision, allow_patterns=["pytorch_model*.bin*"])
    except (OSError, httpx.HTTPError) as error:  # a broken connection raises no `OSError`
        # The message is joined, because its first line may be only "404 Client Error."
        reason = " ".join(str(error).split())
        raise FileNotFoundError(f"{name} is not a directory, and the Hub does not give it: {reason}") from error
    return folder


def _read_header(path: Path) -> Shard:
    """Read the header of a safetensors file, or the dtypes and shapes of a pickle."""
    if path.suffix == ".safetensors":
        return read_shard(path)
    names = {dtype: name for name, dtype in DTYPES.items()}
    with about(path):
        shapes = read_pickle_shapes(path, names)
    return Shard(
        path, tuple(StoredTensor(name, names[dtype], shape, 0, 0) for name, (dtype, shape) in shapes.items()), 0, {}
    )


__all__ = ["NAMED_WEIGHTS", "TOKENIZER_CONFIG", "WEIGHTS", "Checkpoint"]
