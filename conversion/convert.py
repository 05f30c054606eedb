"""Convert checkpoints without loading their weights: retrofit, undo a retrofit, or change its options.

Each `prepare_*` function checks a source and returns a [`Conversion`], whose method `write` copies the shards byte for
byte, and writes the added tensors into one more shard.
"""

import json
import math
import os
import shutil
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from itertools import chain, count
from pathlib import Path
from typing import Any, ClassVar

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_MAPPING, PreTrainedConfig, PreTrainedModel
from transformers.dynamic_module_utils import custom_object_save
from transformers.utils import CONFIG_NAME, SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME

from attnres import CONNECTIONS, ResidualConfig
from attnres.checkpoints.checkpoint import Checkpoint
from attnres.checkpoints.complete import check_complete, empty_model
from attnres.checkpoints.shards import DTYPES, StoredTensor, copy_shard
from attnres.checkpoints.side_files import copy_side_files
from attnres.loading_attnres import added_by_kind
from attnres.mtp_attnres import MultiTokenPrediction
from attnres.pretrained_attnres import auto_map
from attnres.residual_attnres import ResidualConnection, residual_tensors
from attnres.utils.errors import about
from attnres.utils.files import check_space
from attnres.utils.model_files import SOURCE_CODE

from .family import (
    DEFAULT_CONNECTION,
    added_tensors,
    backbone_config,
    differs_from_ungated,
    differs_from_unmixed,
    is_gated,
    retrofit_config,
    start_added,
)

ADDED_SHARD = "model-residual.safetensors"


@dataclass
class Conversion:
    """A conversion that was checked and is ready to be written.

    A kind of model with a layout of its own has a subclass, which overrides how the result is named and written.

    Attributes:
        checkpoint: The source.
        config: The result's configuration.
        model: The model of the source or of the result, on the meta device.
        title: The kind of the result, for the model card.
        added: The tensors to write in addition, by name.
        dropped: The names of the source's tensors to leave out.
        unused: The names of the source's tensors that its model does not read. They may hold NaN.
        difference: The reason for which the result may compute another function than the source; None if there is
            none.
        has_code: Whether the result gets the family's code and a model card.
        code_folder: The subfolder of the result for code that came with the source, where it cannot replace the
            family's code.
        model_class: The class that loads both source and result; None if each is loaded by an Auto class.
        notes: Notes for the user.
        original: The checkpoint that the user gave, if the source was made of it and holds other weights.
        new_names: The names that the copied tensors have in the result, by their names in the source.
        unread: The names of copied tensors that neither the source's model nor the result's reads. They include
            tensors that lie in a file but not in the index.
        num_bytes: The size in bytes of the tensors that are copied.
    """

    checkpoint: Checkpoint
    config: PreTrainedConfig
    model: PreTrainedModel
    title: str = ""
    added: dict[str, Tensor] = field(default_factory=dict)
    dropped: frozenset[str] = frozenset()
    unused: frozenset[str] = frozenset()
    difference: str | None = None
    has_code: bool = True
    code_folder: str = SOURCE_CODE
    model_class: type[PreTrainedModel] | None = None
    notes: tuple[str, ...] = ()
    original: Checkpoint | None = None
    new_names: dict[str, str] = field(init=False)
    unread: list[str] = field(init=False)
    num_bytes: int = field(init=False)

    has_legacy_settings: ClassVar[bool] = True
    """True moves settings of generation from the source's `config.json` to `generation_config.json`."""

    def __post_init__(self) -> None:
        """Derive the names, the unread tensors and the size.

        Raises:
            ValueError: Two tensors would have one name. The message names both, and the file of one.
        """
        sources: dict[str, str] = {}  # name in the result -> name in the source
        self.num_bytes = 0
        for shard in self.checkpoint.shards:
            for entry in shard.entries:
                if entry.name in self.dropped:
                    continue
                self.num_bytes += entry.end - entry.start
                new_name = self.new_name(entry.name)
                other = sources.setdefault(new_name, entry.name)
                if other != entry.name:
                    raise ValueError(
                        f"{shard.source}: `{entry.name}` and `{other}` would both have the name `{new_name}` in the "
                        "result. Remove the one that does not belong to the model."
                    )
        self.new_names = {name: new for new, name in sources.items()}
        self.unread = self.checkpoint.unread(self.unused - self.dropped)

    def new_name(self, name: str) -> str:
        """Return the name that a copied tensor has in the result."""
        return name

    def check_integers(self, values: Tensor, entry: StoredTensor, path: Path) -> None:
        """Check a piece of a tensor of integers, which [`attnres.checkpoints.shards.copy_shard`] copies.

        Args:
            values: The bytes of the piece, uint8.
            entry: The tensor.
            path: The file.

        Raises:
            ValueError: The values cannot be used.
        """

    def file_names(self, sources: Sequence[str]) -> list[str]:
        """Return the names of the result's shards for those of the copied ones, and one more for added tensors."""
        if not self.added:
            return [SAFE_WEIGHTS_NAME] if len(sources) == 1 else [*sources]
        # `transformers` ignores an index beside a file `model.safetensors`, so a single shard gets another name.
        if len(sources) == 1:
            return [f"model-{i:05d}-of-00002.safetensors" for i in (1, 2)]
        added = Path(ADDED_SHARD)
        numbered = (f"{added.stem}-{i}{added.suffix}" for i in count(2))
        return [*sources, next(name for name in chain([ADDED_SHARD], numbered) if name not in sources)]

    def write_configuration(self, target: Path) -> None:
        """Write `config.json` and, for a member of the family, the code that loads it."""
        config, has_head = self.config, self.model.get_output_embeddings() is not None
        model_class: Any = (MODEL_FOR_CAUSAL_LM_MAPPING if has_head else MODEL_MAPPING)[type(config)]
        config.architectures = [model_class.__name__]
        if isinstance(config, ResidualConfig):
            config.auto_map = auto_map(model_class)
            custom_object_save(model_class, target)
        config.save_pretrained(target)

    def write_index(self, target: Path, names: Sequence[str], weight_map: dict[str, str]) -> None:
        """Write the index of the shards, unless a single file needs none.

        Args:
            target: The result's directory.
            names: The names of the shards.
            weight_map: The names of tensors in the source, or of added ones -> the names of their shards.
        """
        if names == [SAFE_WEIGHTS_NAME]:
            return
        sizes = {entry.name: entry.end - entry.start for entry in self.checkpoint.entries.values()}
        sizes |= {name: tensor.nbytes for name, tensor in self.added.items()}
        index = {
            "metadata": {"total_size": sum(sizes[name] for name in weight_map)},
            "weight_map": {self.new_name(name): file for name, file in sorted(weight_map.items())},
        }
        (target / SAFE_WEIGHTS_INDEX_NAME).write_text(json.dumps(index, indent=2) + "\n")

    def write(
        self,
        target: Path,
        *,
        hard_link: bool = False,
        trust_remote_code: bool = False,
        on_bytes: Callable[[int], None] = lambda n: None,
    ) -> list[str]:
        """Write the result into the empty directory `target`.

        Args:
            target: The directory.
            hard_link: Whether to link the shards that stay as they are instead of copying them.
            trust_remote_code: Whether to copy code that came with the source, such as its tokenizer's.
            on_bytes: A function that gets the number of bytes of each piece that is written or checked.

        Returns:
            Notes for the user on code that came with the source, one line each.

        Raises:
            OSError: There is too little space, which is checked before anything is written; or a shard is damaged.
            ValueError: A tensor holds NaN or infinite values.
        """
        checkpoint, dropped, new_names = self.checkpoint, self.dropped, self.new_names
        kept = [shard for shard in checkpoint.shards if any(entry.name not in dropped for entry in shard.entries)]
        # The other shards are linked or, where they lie in the scratch directory, renamed.
        copied = [
            shard
            for shard in kept
            if any(new_names.get(entry.name) != entry.name for entry in shard.entries)
            or not (hard_link or checkpoint.is_temporary)
        ]
        names = self.file_names([shard.path.name for shard in kept])
        files = {shard.path: name for shard, name in zip(kept, names)}
        weight_map = {name: files[shard.path] for name, shard in checkpoint.where.items() if name not in dropped}
        weight_map |= dict.fromkeys(self.added, names[-1])
        check_space(target.parent, sum(shard.path.stat().st_size for shard in copied))
        self.write_configuration(target)
        self.write_index(target, names, weight_map)
        notes = copy_side_files(checkpoint, target, trust_remote_code, self.has_legacy_settings, self.code_folder)
        for shard, name in zip(kept, names):
            if shard not in copied and not checkpoint.is_temporary:
                # Link before the values are checked: an error is raised before a large file is read.
                _link_file(shard.path, target / name)
            copy_shard(
                shard,
                target / name if shard in copied else None,
                dropped=dropped,
                unused=self.unused,
                rename=new_names,
                on_bytes=on_bytes,
                check=self.check_integers,
            )
            if shard not in copied and checkpoint.is_temporary:
                shard.path.rename(target / name)
        if self.added:
            with about(target / names[-1]):
                save_file(self.added, target / names[-1], {"format": "pt"})
        # `save_file` makes files that their owner alone may read. The result's files are as open as its configuration.
        for name in names if checkpoint.is_temporary else names[len(kept) :]:
            shutil.copymode(target / CONFIG_NAME, target / name)
        return [*self.notes, *notes]


def prepare_retrofit(source: Checkpoint, residual: str = DEFAULT_CONNECTION, **options: Any) -> Conversion:
    """Prepare to put other residual connections into a standard decoder, as [`attnres.conversion.retrofit`] does.

    Random initial values of a connection are the same every time.

    Args:
        source: A standard decoder.
        residual: The name of the residual connection.
        options: As in [`attnres.conversion.retrofit`].

    Returns:
        The conversion.

    Raises:
        ValueError: The backbone is not supported or has other connections already, or an option is not valid.
        FileNotFoundError, RuntimeError: A tensor is missing, or its shape does not fit the configuration.
    """
    config = retrofit_config(source.config, residual, **options)
    MultiTokenPrediction.fit_config(config, source.entries)
    is_quantized = getattr(source.config, "quantization_config", None) is not None
    if is_gated(config) and not is_gated(source.config) and is_quantized:
        raise ValueError(f"{source.folder} is quantised, and its gates would load as quantised. Convert the original.")
    model = empty_model(config, source)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        dtype = config.dtype if isinstance(config.dtype, torch.dtype) else _stored_dtype(source)
        start_added(model, source.config, dtype)
    added = {name: tensor.detach() for name, tensor in added_tensors(model, source.config).items()}
    unused = check_complete(source, model, config, added)
    # A standard member of the family may have kept trained tensors of connections, which it does not read.
    dropped = frozenset(added.keys() & source.entries)
    # `retrofit_config` has refused starts that change the function.
    connections = {name: tensor for name, tensor in added.items() if name in residual_tensors(model)}
    difference = config.connection.differs_from_standard(config, connections)
    return Conversion(
        source,
        config,
        model,
        title="Retrofit",
        added=added,
        dropped=dropped,
        unused=unused,
        difference=difference,
    )


def prepare_standard(source: Checkpoint) -> Conversion:
    """Prepare to undo a retrofit: the backbone's checkpoint, without the tensors that were added to it.

    Raises:
        ValueError: The source is not a model of the family, or one of its added tensors is not finite or was trained,
            so that no standard decoder computes the same function.
        FileNotFoundError, RuntimeError: A tensor is missing, or its shape does not fit the configuration.
    """
    config, model, unused = _read_member(source)
    tensors, gates, values = added_by_kind(model)
    difference = (
        config.connection.differs_from_standard(config, tensors)
        or differs_from_ungated(config, gates)
        or differs_from_unmixed(values)
    )
    if difference:
        raise ValueError(f"no standard decoder computes the same function: {difference}.")
    dropped = frozenset(tensors | gates | values)
    return Conversion(
        source,
        backbone_config(config),
        model,
        dropped=dropped,
        unused=unused,
        has_code=False,
    )


def prepare_change(source: Checkpoint, **options: Any) -> Conversion:
    """Prepare to give the residual connections of a checkpoint other options under which the function stays the same.

    Args:
        source: A model of the family.
        options: Options of its connection, such as `block_size`.

    Returns:
        The conversion.

    Raises:
        ValueError: The source is not a model of the family, has no such option, or would compute another function.
        FileNotFoundError, RuntimeError: A tensor is missing, or its shape does not fit the configuration.
    """
    flags = " ".join(f"--{option.replace('_', '-')} {value}" for option, value in options.items())
    config, model, unused = _read_member(source, f" Give {flags} instead, which makes a retrofit.")
    if lacking := [option for option in options if option not in config.connection.options]:
        names = " and ".join(f"--set-{option.replace('_', '-')}" for option in lacking)
        raise ValueError(
            f"{source.folder} has residual_connection={config.residual_connection!r}, which has no option {names}."
        )
    connections = {name: module for name, module in model.named_modules() if isinstance(module, ResidualConnection)}
    CONNECTIONS[config.residual_connection].plan_change(config, connections, **options)
    title = "Other options for the residual connections"
    return Conversion(source, config, model, title, unused=unused)


def _read_member(source: Checkpoint, remedy: str = "") -> tuple[ResidualConfig, PreTrainedModel, frozenset[str]]:
    """Return a copy of the configuration of a model of the family, the model, and the names of unused tensors.

    The model is on the meta device, but the tensors that are added to its backbone are loaded. If the source is not of
    the family, `remedy` ends the message.
    """
    config = deepcopy(source.config)  # a conversion changes its fields
    if not isinstance(config, ResidualConfig):
        raise ValueError(
            f"{source.folder} is of model type {config.model_type!r}, which has standard residual connections.{remedy}"
        )
    model = empty_model(config, source)
    unused = check_complete(source, model, config)
    for name in chain(*added_by_kind(model)):
        if name not in source.where:
            raise ValueError(f"{source.folder} has no `{name}`: its attention gates are quantised.")
        path = source.where[name].source
        with safe_open(source.where[name].path, framework="pt") as file:
            tensor = file.get_tensor(name)
        if not tensor.is_floating_point():
            raise ValueError(f"`{name}` in {path} is {tensor.dtype}, but must be floating point.")
        if not torch.isfinite(tensor).all():
            raise ValueError(f"`{name}` in {path} holds NaN or infinite values. Use an earlier checkpoint.")
        owner, _, key = name.rpartition(".")
        setattr(model.get_submodule(owner), key, nn.Parameter(tensor))
    return config, model, unused


def _stored_dtype(checkpoint: Checkpoint) -> torch.dtype:
    """Return the dtype of the largest tensor that is not quantised, for a configuration without a dtype.

    The first tensor may have another dtype: routing biases are float32 in checkpoints of bfloat16.
    """
    sizes: dict[torch.dtype, int] = {}
    for entry in checkpoint.entries.values():
        dtype = DTYPES.get(entry.dtype)
        if dtype is not None and dtype.is_floating_point and dtype.itemsize > 1:
            sizes[dtype] = max(sizes.get(dtype, 0), math.prod(entry.shape))
    return max(sizes, key=lambda dtype: sizes[dtype], default=torch.float32)


def _link_file(source: Path, target: Path) -> None:
    try:
        # The Hub's cache holds symbolic links, and `os.link` would link these instead of their files.
        os.link(source.resolve(), target)
    except OSError as error:
        raise OSError(f"cannot hard-link {source} ({error.strerror}). Leave out --hard-link to copy.") from error


__all__ = ["ADDED_SHARD", "Conversion", "prepare_change", "prepare_retrofit", "prepare_standard"]
