"""Convert checkpoint directories without loading their weights: retrofit, its undoing, and a change of its options.

Each conversion is a `Plan`: the checkpoint, the configuration of the result, the tensors to add and those to leave out.
`write` carries it out: shards are copied byte for byte, what is added goes into one more shard.
"""

import json
import math
import os
import shutil
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from itertools import chain, count
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_MAPPING, PreTrainedConfig, PreTrainedModel
from transformers.dynamic_module_utils import custom_object_save
from transformers.utils import CONFIG_NAME, SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME

from attnres import ResidualConfig
from attnres.attention_gate_attnres import gate_tensors
from attnres.decoder_attnres import auto_map
from attnres.residual_attnres import ResidualConnection, residual_tensors

from .attention_gate import differs_from_ungated, is_gated
from .checkpoint import DTYPES, Checkpoint, Shard, check_space, copy_shard, explain_writing
from .complete import check_complete, empty_model, explain_config, read_config, settle_ties
from .family import DEFAULT_CONNECTION, added_tensors, backbone_config, retrofit_config, start_added
from .side_files import copy_side_files

ADDED_SHARD = "model-residual.safetensors"


@dataclass(frozen=True)
class Plan:
    """What to write: the `checkpoint` under `config`, with the tensors `added` and without those `dropped`.

    `unused`: what the model does not read, and may hold anything. `difference`: why the result may compute another
    function than the source, if it may. `has_head`: it is a causal language model, not the decoder of one by itself.
    """

    checkpoint: Checkpoint
    config: PreTrainedConfig
    added: dict[str, Tensor] = field(default_factory=dict)
    dropped: frozenset[str] = frozenset()
    unused: frozenset[str] = frozenset()
    difference: str | None = None
    has_head: bool = True

    @property
    def unread(self) -> list[str]:
        """The tensors that are copied though neither the source's model nor the result's reads them, by name.

        Also those that a file holds beside what the index says of it.
        """
        held = {entry.name for shard in self.checkpoint.shards for entry in shard.entries}
        return sorted((held - self.checkpoint.entries.keys()) | (self.unused - self.dropped))

    @property
    def num_bytes(self) -> int:
        """Bytes of the tensors that are read from the checkpoint."""
        entries = (entry for shard in self.checkpoint.shards for entry in shard.entries)
        return sum(entry.end - entry.start for entry in entries if entry.name not in self.dropped)


def plan_retrofit(checkpoint: Checkpoint, residual: str = DEFAULT_CONNECTION, **options: Any) -> Plan:
    """Plan to put other residual connections into a standard decoder, as [`attnres.conversion.retrofit`] does.

    What is random in their start is the same every time.

    Raises:
        ValueError: the backbone is not supported or has other connections already, or an option is not valid.
        FileNotFoundError, RuntimeError: a tensor is missing or has another shape than the configuration says.
    """
    with explain_config(checkpoint.folder):
        source = read_config(checkpoint)
        config = retrofit_config(source, residual, **options)
        model = empty_model(config, checkpoint)
    names = added_tensors(model, source).keys()
    if is_gated(config) and not is_gated(source) and getattr(source, "quantization_config", None) is not None:
        raise ValueError(f"{checkpoint.folder} is quantised, and its gates would load as quantised. Gate the original.")
    unused = check_complete(checkpoint, model, names)
    settle_ties(checkpoint, model, config)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        start_added(model, source, config.dtype or _stored_dtype(checkpoint))
    added = {name: tensor.detach() for name, tensor in added_tensors(model, source).items()}
    # A standard member of the family may have kept trained tensors of connections, which it does not read.
    dropped = frozenset(added.keys() & checkpoint.entries)
    difference = config.connection.differs_from_standard(config, added)
    return Plan(checkpoint, config, added, dropped, unused, difference, _has_head(model))


def plan_standard(checkpoint: Checkpoint) -> Plan:
    """Plan to undo a retrofit: the backbone's own checkpoint, without the tensors of residual connections and gates.

    Raises:
        ValueError: it is none of the family, or a tensor is not finite or has been trained, so that no standard decoder
            computes the same function.
        FileNotFoundError, RuntimeError: a tensor is missing or has another shape than the configuration says.
    """
    config, model, unused = _read_member(checkpoint)
    tensors, gates = residual_tensors(model), gate_tensors(model)
    difference = config.connection.differs_from_standard(config, tensors) or differs_from_ungated(config, gates)
    if difference:
        raise ValueError(f"no standard decoder computes the same function: {difference}.")
    dropped, has_head = frozenset(tensors | gates), _has_head(model)
    return Plan(checkpoint, backbone_config(config), dropped=dropped, unused=unused, has_head=has_head)


def plan_change(checkpoint: Checkpoint, **options: Any) -> Plan:
    """Plan to give the residual connections of a checkpoint other options, where the function stays.

    Raises:
        ValueError: it is none of the family, or the function would change.
        FileNotFoundError, RuntimeError: a tensor is missing or has another shape than the configuration says.
    """
    config, model, unused = _read_member(checkpoint)
    if lacking := [option for option in options if option not in config.connection.options]:
        flags = " and ".join(f"--set-{option.replace('_', '-')}" for option in lacking)
        raise ValueError(
            f"{checkpoint.folder} has residual_connection={config.residual_connection!r}, where {flags} has "
            "nothing to set."
        )
    connections = {name: module for name, module in model.named_modules() if isinstance(module, ResidualConnection)}
    config.connection.plan_change(config, connections, **options)
    return Plan(checkpoint, config, unused=unused, has_head=_has_head(model))


def write(
    plan: Plan,
    target: Path,
    *,
    hard_link: bool = False,
    trust_remote_code: bool = False,
    on_bytes: Callable[[int], None] = lambda n: None,
) -> list[str]:
    """Write the planned model into the empty directory `target`; `on_bytes` is told of every piece that is done.

    Args:
        hard_link: link the shards that stay as they are instead of copying them.
        trust_remote_code: take code along that came with the source, such as that of its tokenizer.

    Returns:
        What to tell the user of code that came with the source, line by line.

    Raises:
        OSError: too little space, noticed before anything is written; or a shard is damaged.
        ValueError: a tensor holds NaN or infinite values.
    """
    checkpoint = plan.checkpoint
    kept = [shard for shard in checkpoint.shards if any(entry.name not in plan.dropped for entry in shard.entries)]
    copied = [s for s in kept if _drops(s, plan.dropped) or not (hard_link or checkpoint.is_temporary)]
    check_space(target, sum(shard.path.stat().st_size for shard in copied))
    _write_configuration(plan, target)
    notes = copy_side_files(checkpoint.folder, target, trust_remote_code)
    names = _file_names([shard.path.name for shard in kept], bool(plan.added))
    weight_map = {}
    for shard, name in zip(kept, names):
        if shard not in copied and not checkpoint.is_temporary:
            _link(shard.path, target / name)  # first: where it is not possible, nothing needs to be read
        sink = target / name if shard in copied else None
        copy_shard(shard, sink, dropped=plan.dropped, unused=plan.unused, on_bytes=on_bytes)
        if shard not in copied and checkpoint.is_temporary:
            shard.path.rename(target / name)
        held = (e.name for e in shard.entries if e.name not in plan.dropped)
        weight_map |= {tensor: name for tensor in held if checkpoint.where.get(tensor) is shard}
    if plan.added:
        with explain_writing(target / names[-1]):
            save_file(plan.added, target / names[-1], {"format": "pt"})
        weight_map |= dict.fromkeys(plan.added, names[-1])
    for name in names if checkpoint.is_temporary else names[len(kept) :]:
        shutil.copymode(target / CONFIG_NAME, target / name)  # `save_file` lets its owner alone read them
    if names != [SAFE_WEIGHTS_NAME]:
        sizes = {e.name: e.end - e.start for e in checkpoint.entries.values()}
        sizes |= {name: tensor.nbytes for name, tensor in plan.added.items()}
        index = {
            "metadata": {"total_size": sum(map(sizes.get, weight_map))},
            "weight_map": dict(sorted(weight_map.items())),
        }
        (target / SAFE_WEIGHTS_INDEX_NAME).write_text(json.dumps(index, indent=2) + "\n")
    return notes


def _read_member(checkpoint: Checkpoint) -> tuple[ResidualConfig, PreTrainedModel, frozenset[str]]:
    """The configuration of a complete checkpoint of the family, its model, and what that does not use.

    The model is on the meta device, but for the tensors of its residual connections and gates.
    """
    with explain_config(checkpoint.folder):
        config = read_config(checkpoint)
        if not isinstance(config, ResidualConfig):
            raise ValueError(
                f"{checkpoint.folder} is of model type {config.model_type!r}, which has standard residual connections."
            )
        model = empty_model(config, checkpoint)
    unused = check_complete(checkpoint, model)
    settle_ties(checkpoint, model, config)
    for name in residual_tensors(model) | gate_tensors(model):
        if name not in checkpoint.where:
            raise ValueError(f"{checkpoint.folder} has no `{name}`: its attention gates are quantised.")
        path = checkpoint.where[name].path
        with safe_open(path, framework="pt") as file:
            tensor = file.get_tensor(name)
        if not tensor.is_floating_point():
            raise ValueError(f"`{name}` in {path} is {tensor.dtype}, but must be of floating point.")
        if not torch.isfinite(tensor).all():
            raise ValueError(f"`{name}` in {path} holds NaN or infinite values. Use an earlier checkpoint.")
        owner, _, key = name.rpartition(".")
        setattr(model.get_submodule(owner), key, nn.Parameter(tensor))
    return config, model, unused


def _has_head(model: PreTrainedModel) -> bool:
    return model.get_output_embeddings() is not None


def _stored_dtype(checkpoint: Checkpoint) -> torch.dtype:
    """Return the dtype of the largest tensor that is not quantised, for a configuration that names none.

    Not of the first one: routing biases are float32 in checkpoints of bfloat16.
    """
    sizes = {}
    for entry in checkpoint.entries.values():
        dtype = DTYPES.get(entry.dtype)
        if dtype is not None and dtype.is_floating_point and dtype.itemsize > 1:
            sizes[dtype] = max(sizes.get(dtype, 0), math.prod(entry.shape))
    return max(sizes, key=sizes.get, default=torch.float32)


def _drops(shard: Shard, dropped: Collection[str]) -> bool:
    return any(entry.name in dropped for entry in shard.entries)


def _file_names(sources: list[str], adds: bool) -> list[str]:
    """The names of the shards written: those of the source, as far as `transformers` will read them together."""
    if not adds:
        return [SAFE_WEIGHTS_NAME] if len(sources) == 1 else sources
    if len(sources) == 1:  # beside a file `model.safetensors` an index is not looked at
        return [f"model-{i:05d}-of-00002.safetensors" for i in (1, 2)]
    added = Path(ADDED_SHARD)
    numbered = (f"{added.stem}-{i}{added.suffix}" for i in count(2))
    return [*sources, next(name for name in chain([ADDED_SHARD], numbered) if name not in sources)]


def _link(source: Path, target: Path) -> None:
    try:
        os.link(source.resolve(), target)
    except OSError as error:
        raise OSError(f"cannot hard-link {source} ({error.strerror}). Leave out --hard-link to copy.") from error


def _write_configuration(plan: Plan, target: Path) -> None:
    """Write `config.json` and, for a member of the family, the code that loads it."""
    config = plan.config
    model_class = (MODEL_FOR_CAUSAL_LM_MAPPING if plan.has_head else MODEL_MAPPING)[type(config)]
    config.architectures = [model_class.__name__]
    if isinstance(config, ResidualConfig):
        config.auto_map = auto_map(model_class)
        custom_object_save(model_class, target)
    config.save_pretrained(target)


__all__ = ["Plan", "plan_change", "plan_retrofit", "plan_standard", "write"]
