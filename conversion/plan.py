"""The plan of a conversion: the source, and how the result differs from it.

[`write`] copies the shards byte for byte, and writes the added tensors into one more shard. A kind of model with a
layout of its own has a subclass of [`Plan`], which overrides how the result is named, checked and described.
"""

import json
import math
import os
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import chain, count
from pathlib import Path
from typing import Any, ClassVar

from safetensors.torch import save_file
from torch import Tensor
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_MAPPING, PreTrainedConfig, PreTrainedModel
from transformers.dynamic_module_utils import custom_object_save
from transformers.utils import CONFIG_NAME, SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME

from attnres import ResidualConfig
from attnres.checkpoints.checkpoint import Checkpoint
from attnres.checkpoints.shards import Entry, copy_shard
from attnres.checkpoints.side_files import copy_side_files
from attnres.pretrained_attnres import auto_map
from attnres.utils.errors import about
from attnres.utils.files import check_space
from attnres.utils.model_files import SOURCE_CODE

ADDED_SHARD = "model-residual.safetensors"


@dataclass(frozen=True)
class Plan:
    """The result of a conversion before it is written.

    Attributes:
        checkpoint: The source's weights.
        config: The result's configuration.
        added: The tensors to write in addition, by name.
        dropped: The names of the source's tensors to leave out.
        unused: The names of the source's tensors that its model does not read. They may hold NaN.
        difference: Why the result may compute another function than the source; None if it computes the same one.
        has_head: Whether the model is a causal language model, not a decoder by itself.
        notes: Notes for the user.
    """

    checkpoint: Checkpoint
    config: PreTrainedConfig
    added: dict[str, Tensor] = field(default_factory=dict)
    dropped: frozenset[str] = frozenset()
    unused: frozenset[str] = frozenset()
    difference: str | None = None
    has_head: bool = True
    notes: tuple[str, ...] = ()

    has_legacy_settings: ClassVar[bool] = True
    """True moves settings of generation from the source's `config.json` to `generation_config.json`."""

    @property
    def unread(self) -> list[str]:
        """The names of copied tensors that neither the source's model nor the result's reads.

        They include tensors that lie in a file but not in the index.
        """
        return self.checkpoint.unread(self.unused - self.dropped)

    @property
    def num_bytes(self) -> int:
        """The size in bytes of the tensors that are copied from the checkpoint."""
        entries = (entry for shard in self.checkpoint.shards for entry in shard.entries)
        return sum(entry.end - entry.start for entry in entries if entry.name not in self.dropped)

    @property
    def num_values(self) -> int:
        """The number of values in the source's tensors, unpacked: its model takes memory for them."""
        return sum(math.prod(entry.shape) for entry in self.checkpoint.entries.values())

    @property
    def has_code(self) -> bool:
        """True if the result gets the family's code and a model card."""
        return isinstance(self.config, ResidualConfig)

    @property
    def code_folder(self) -> str:
        """The subfolder of the result for code that came with the source, where it cannot replace the family's code."""
        return SOURCE_CODE

    @property
    def title(self) -> str:
        """The kind of the result, for the model card."""
        return "Retrofit" if self.added else "Other options for the residual connections"

    @property
    def model_class(self) -> type[PreTrainedModel] | None:
        """The class that loads both source and result; None if each is loaded by an Auto class."""
        return None

    def describe_layout(self, result: Checkpoint) -> str | None:
        """Return a sentence for the model card on the layout of the written weights; None if it needs none."""
        return None

    def new_name(self, name: str) -> str:
        """Return the name that a copied tensor has in the result."""
        return name

    def names(self) -> dict[str, str]:
        """Return the names that the copied tensors have in the result, by their names in the source.

        Raises:
            ValueError: Two tensors would have one name. The message names both, and the file of one.
        """
        sources: dict[str, str] = {}  # name in the result -> name in the source
        for shard in self.checkpoint.shards:
            for name in (entry.name for entry in shard.entries if entry.name not in self.dropped):
                other = sources.setdefault(self.new_name(name), name)
                if other != name:
                    raise ValueError(
                        f"{shard.source}: `{name}` and `{other}` would both have the name `{self.new_name(name)}` in "
                        "the result. Remove the one that does not belong to the model."
                    )
        return {name: new for new, name in sources.items()}

    def check_integers(self, values: Tensor, entry: Entry, path: Path) -> None:
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
        config = self.config
        model_class: Any = (MODEL_FOR_CAUSAL_LM_MAPPING if self.has_head else MODEL_MAPPING)[type(config)]
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
    plan: Plan,
    target: Path,
    *,
    hard_link: bool = False,
    trust_remote_code: bool = False,
    on_bytes: Callable[[int], None] = lambda n: None,
) -> list[str]:
    """Write the planned model into the empty directory `target`.

    Args:
        plan: The conversion.
        target: The directory.
        hard_link: Whether to link the shards that stay as they are instead of copying them.
        trust_remote_code: Whether to copy code that came with the source, such as its tokenizer's.
        on_bytes: A function that gets the number of bytes of each piece that is written or checked.

    Returns:
        Notes for the user on code that came with the source, one line each.

    Raises:
        OSError: There is too little space, which is checked before anything is written; or a shard is damaged.
        ValueError: A tensor holds NaN or infinite values; or two tensors would have one name.
    """
    checkpoint, dropped = plan.checkpoint, plan.dropped
    new_names = plan.names()
    kept = [shard for shard in checkpoint.shards if any(entry.name not in dropped for entry in shard.entries)]
    # The other shards are linked or, where they lie in the scratch directory, renamed.
    copied = [
        shard
        for shard in kept
        if any(new_names.get(entry.name) != entry.name for entry in shard.entries)
        or not (hard_link or checkpoint.is_temporary)
    ]
    check_space(target.parent, sum(shard.path.stat().st_size for shard in copied))
    plan.write_configuration(target)
    notes = copy_side_files(checkpoint, target, trust_remote_code, plan.has_legacy_settings, plan.code_folder)

    names = plan.file_names([shard.path.name for shard in kept])
    weight_map = {}  # tensor -> file
    for shard, name in zip(kept, names):
        if shard not in copied and not checkpoint.is_temporary:
            # Link before the values are checked: an error is raised before a large file is read.
            _link(shard.path, target / name)
        copy_shard(
            shard,
            target / name if shard in copied else None,
            dropped=dropped,
            unused=plan.unused,
            rename=new_names,
            on_bytes=on_bytes,
            check=plan.check_integers,
        )
        if shard not in copied and checkpoint.is_temporary:
            shard.path.rename(target / name)
        held = (entry.name for entry in shard.entries if entry.name not in dropped)
        weight_map |= {tensor: name for tensor in held if checkpoint.where.get(tensor) is shard}
    if plan.added:
        with about(target / names[-1]):
            save_file(plan.added, target / names[-1], {"format": "pt"})
        weight_map |= dict.fromkeys(plan.added, names[-1])
    # `save_file` makes files that their owner alone may read. The result's files are as open as its configuration.
    for name in names if checkpoint.is_temporary else names[len(kept) :]:
        shutil.copymode(target / CONFIG_NAME, target / name)
    plan.write_index(target, names, weight_map)
    return [*plan.notes, *notes]


def _link(source: Path, target: Path) -> None:
    try:
        # The Hub's cache holds symbolic links, and `os.link` would link these instead of their files.
        os.link(source.resolve(), target)
    except OSError as error:
        raise OSError(f"cannot hard-link {source} ({error.strerror}). Leave out --hard-link to copy.") from error


__all__ = ["ADDED_SHARD", "Plan", "write"]
