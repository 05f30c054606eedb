"""Convert checkpoint directories without loading their weights: retrofit, undo a retrofit, or change its options.

Each conversion is a `Plan`: the source, the configuration of the result, the tensors to add and the tensors to leave
out. `write` copies the shards byte for byte, and writes the added tensors into one more shard.
"""

import json
import math
import os
import shutil
from collections.abc import Callable, Mapping
from copy import deepcopy
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

from attnres import AttnResKimiK3Config, ResidualConfig
from attnres.attention_gate_attnres import gate_tensors
from attnres.decoder_attnres import auto_map
from attnres.kimi_k3_layout_attnres import prefix_of
from attnres.residual_attnres import ResidualConnection, residual_tensors

from . import kimi_k3
from .attention_gate import differs_from_ungated, is_gated
from .checkpoint import DTYPES, Checkpoint, check_space, copy_shard, explain_writing
from .complete import complete_model, explain_config
from .family import DEFAULT_CONNECTION, added_tensors, backbone_config, retrofit_config, start_added
from .side_files import copy_side_files
from .source import ConversionSource
from .source_files import read_object

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
        rename: Returns the name of a tensor in the result. By default it keeps its name.
        texts: The texts of files to write beside the weights. One is `config.json` if `config` is not to be saved.
        is_release: Whether the result is a release of Kimi K3, which gets neither code nor card.
        notes: Notes for the user.
    """

    checkpoint: Checkpoint
    config: PreTrainedConfig
    added: dict[str, Tensor] = field(default_factory=dict)
    dropped: frozenset[str] = frozenset()
    unused: frozenset[str] = frozenset()
    difference: str | None = None
    has_head: bool = True
    rename: Callable[[str], str] | None = None
    texts: Mapping[str, str] = field(default_factory=dict)
    is_release: bool = False
    notes: tuple[str, ...] = ()

    @property
    def unread(self) -> list[str]:
        """The names of copied tensors that neither the source's model nor the result's reads.

        They include tensors that lie in a file but not in the index.
        """
        held = {entry.name for shard in self.checkpoint.shards for entry in shard.entries}
        return sorted((held - self.checkpoint.entries.keys()) | (self.unused - self.dropped))

    @property
    def num_bytes(self) -> int:
        """The size in bytes of the tensors that are copied from the checkpoint."""
        entries = (entry for shard in self.checkpoint.shards for entry in shard.entries)
        return sum(entry.end - entry.start for entry in entries if entry.name not in self.dropped)


def plan_retrofit(source: ConversionSource, residual: str = DEFAULT_CONNECTION, **options: Any) -> Plan:
    """Plan to put other residual connections into a standard decoder, as [`attnres.conversion.retrofit`] does.

    Random initial values of a connection are the same every time.

    Args:
        source: A standard decoder.
        residual: The name of the residual connection.
        options: As in [`attnres.conversion.retrofit`].

    Returns:
        The plan.

    Raises:
        ValueError: The backbone is not supported or has other connections already, or an option is not valid.
        FileNotFoundError, RuntimeError: A tensor is missing, or its shape does not fit the configuration.
    """
    checkpoint = source.checkpoint
    with explain_config(source.folder):
        config = retrofit_config(source.config, residual, **options)
    is_quantized = getattr(source.config, "quantization_config", None) is not None
    if is_gated(config) and not is_gated(source.config) and is_quantized:
        raise ValueError(f"{source.folder} is quantised, and its gates would load as quantised. Convert the original.")
    model, unused = complete_model(checkpoint, config, lambda model: added_tensors(model, source.config).keys())
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        start_added(model, source.config, config.dtype or _stored_dtype(checkpoint))
    added = {name: tensor.detach() for name, tensor in added_tensors(model, source.config).items()}
    # A standard member of the family may have kept trained tensors of connections, which it does not read.
    dropped = frozenset(added.keys() & checkpoint.entries)
    difference = config.connection.differs_from_standard(config, added)
    return Plan(checkpoint, config, added, dropped, unused, difference, _has_head(model))


def plan_standard(source: ConversionSource) -> Plan:
    """Plan to undo a retrofit: the backbone's checkpoint, without the tensors of residual connections and gates.

    Raises:
        ValueError: The source is not a model of the family, or one of its added tensors is not finite or was trained,
            so that no standard decoder computes the same function.
        FileNotFoundError, RuntimeError: A tensor is missing, or its shape does not fit the configuration.
    """
    config, model, unused = _read_member(source)
    tensors, gates = residual_tensors(model), gate_tensors(model)
    difference = config.connection.differs_from_standard(config, tensors) or differs_from_ungated(config, gates)
    if difference:
        raise ValueError(f"no standard decoder computes the same function: {difference}.")
    dropped, has_head = frozenset(tensors | gates), _has_head(model)
    return Plan(source.checkpoint, backbone_config(config), dropped=dropped, unused=unused, has_head=has_head)


def plan_change(source: ConversionSource, **options: Any) -> Plan:
    """Plan to give the residual connections of a checkpoint other options under which the function stays the same.

    Args:
        source: A model of the family.
        options: Options of its connection, such as `block_size`.

    Returns:
        The plan.

    Raises:
        ValueError: The source is not a model of the family, has no such option, or would compute another function.
        FileNotFoundError, RuntimeError: A tensor is missing, or its shape does not fit the configuration.
    """
    config, model, unused = _read_member(source)
    if lacking := [option for option in options if option not in config.connection.options]:
        flags = " and ".join(f"--set-{option.replace('_', '-')}" for option in lacking)
        raise ValueError(
            f"{source.folder} has residual_connection={config.residual_connection!r}, which has no option {flags}."
        )
    connections = {name: module for name, module in model.named_modules() if isinstance(module, ResidualConnection)}
    config.connection.plan_change(config, connections, **options)
    return Plan(source.checkpoint, config, unused=unused, has_head=_has_head(model))


def plan_kimi_k3(source: ConversionSource) -> Plan:
    """Plan to make a directory of a released Kimi K3 that the Auto classes load, with every tensor as it is.

    A `config.json` of the text model alone becomes that of the composite model, whose tensors have a prefix.

    Args:
        source: Kimi K3, in any of the released layouts.

    Raises:
        OSError: A file is damaged.
        ValueError: A tensor is missing, misshapen, or packed where it may not be.
    """
    checkpoint, config = source.checkpoint, deepcopy(source.config)
    model, unused = complete_model(checkpoint, config)
    has_prefix = bool(prefix_of(checkpoint.entries))
    fields = kimi_k3.loadable_config(read_object(source.folder / CONFIG_NAME))
    texts = {CONFIG_NAME: json.dumps(fields, indent=2, ensure_ascii=False) + "\n"}
    if not checkpoint.is_temporary:  # otherwise the result has other tensors than the source
        texts[kimi_k3.RECORD] = kimi_k3.make_record(source.folder, not has_prefix)
    config.auto_map = fields["auto_map"]
    rename = None if has_prefix else kimi_k3.add_prefix
    return Plan(checkpoint, config, unused=unused, has_head=_has_head(model), rename=rename, texts=texts)


def plan_release(source: ConversionSource) -> Plan:
    """Plan to undo [`plan_kimi_k3`]: the released `config.json` and tensors, without the code of this package.

    Where `config.json` was changed since, or there is no record of the released one, its present fields stay.

    Args:
        source: A directory of Kimi K3.

    Raises:
        OSError: A file is damaged.
        ValueError: A tensor is missing, misshapen, or packed where it may not be.
    """
    checkpoint, config = source.checkpoint, deepcopy(source.config)
    model, unused = complete_model(checkpoint, config)
    path, rename = source.folder / CONFIG_NAME, None
    record = kimi_k3.read_record(source.folder)
    if record is None:
        fields = read_object(path)
        fields.pop("auto_map", None)
        text = json.dumps(fields, indent=2, ensure_ascii=False) + "\n"
        notes = [f"{path} is not that of a conversion, so its fields stay, without the code for the Auto classes."]
    else:
        text, prefix = record
        rename = kimi_k3.remove_prefix if prefix else None
        code = kimi_k3.left_code(json.loads(text), source.folder)
        left = f"{CONFIG_NAME} refers to code that conversions leave out: {', '.join(code)}. The release has it."
        notes = [left] if code else []
    return Plan(
        *(checkpoint, config),
        unused=unused,
        has_head=_has_head(model),
        rename=rename,
        texts={CONFIG_NAME: text},
        is_release=True,
        notes=tuple(notes),
    )


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
        ValueError: A tensor holds NaN or infinite values.
    """
    checkpoint, dropped = plan.checkpoint, plan.dropped
    kept = [shard for shard in checkpoint.shards if any(entry.name not in dropped for entry in shard.entries)]
    # The other shards are linked or, where they lie in the scratch directory, renamed.
    copied = [
        shard
        for shard in kept
        if any(entry.name in dropped for entry in shard.entries)
        or plan.rename is not None
        or not (hard_link or checkpoint.is_temporary)
    ]
    check_space(target, sum(shard.path.stat().st_size for shard in copied))
    _write_configuration(plan, target)
    is_kimi_k3 = isinstance(plan.config, AttnResKimiK3Config)
    notes = copy_side_files(checkpoint.folder, target, trust_remote_code, has_legacy_settings=not is_kimi_k3)

    names = [shard.path.name for shard in kept]
    if not is_kimi_k3:  # the files of Kimi K3 keep their names, so that a conversion can be undone
        names = _file_names(names, bool(plan.added))
    weight_map = {}  # tensor -> file
    for shard, name in zip(kept, names):
        if shard not in copied and not checkpoint.is_temporary:
            # Link before the values are checked: an error is raised before a large file is read.
            _link(shard.path, target / name)
        destination = target / name if shard in copied else None
        options = {"dropped": dropped, "unused": plan.unused, "rename": plan.rename}
        if is_kimi_k3:
            options["check"] = kimi_k3.check_packed
        copy_shard(shard, destination, **options, on_bytes=on_bytes)
        if shard not in copied and checkpoint.is_temporary:
            shard.path.rename(target / name)
        held = (entry.name for entry in shard.entries if entry.name not in dropped)
        weight_map |= {tensor: name for tensor in held if checkpoint.where.get(tensor) is shard}
    if plan.added:
        with explain_writing(target / names[-1]):
            save_file(plan.added, target / names[-1], {"format": "pt"})
        weight_map |= dict.fromkeys(plan.added, names[-1])
    # `save_file` makes files that their owner alone may read. The result's files are as open as its configuration.
    for name in names if checkpoint.is_temporary else names[len(kept) :]:
        shutil.copymode(target / CONFIG_NAME, target / name)

    is_published = is_kimi_k3 and not checkpoint.is_temporary
    index_path = checkpoint.folder / SAFE_WEIGHTS_INDEX_NAME
    if is_published and plan.rename is None and index_path.exists():
        shutil.copyfile(index_path, target / SAFE_WEIGHTS_INDEX_NAME)
    elif names != [SAFE_WEIGHTS_NAME]:
        sizes = {entry.name: entry.end - entry.start for entry in checkpoint.entries.values()}
        sizes |= {name: tensor.nbytes for name, tensor in plan.added.items()}
        rename = plan.rename or str
        index = {
            "metadata": {"total_size": sum(map(sizes.get, weight_map))},
            "weight_map": {rename(name): file for name, file in sorted(weight_map.items())},
        }
        if is_published and index_path.exists():
            # The order of its tensors and its metadata stay.
            index = read_object(index_path)
            index["weight_map"] = {rename(name): file for name, file in index["weight_map"].items()}
        (target / SAFE_WEIGHTS_INDEX_NAME).write_text(json.dumps(index, indent=2) + "\n")
    return [*plan.notes, *notes]


def _read_member(source: ConversionSource) -> tuple[ResidualConfig, PreTrainedModel, frozenset[str]]:
    """Return a copy of the configuration of a model of the family, the model, and the names of unused tensors.

    The model is on the meta device, but the tensors of its residual connections and gates are loaded.
    """
    checkpoint, config = source.checkpoint, deepcopy(source.config)  # a plan changes its fields
    if not isinstance(config, ResidualConfig):
        raise ValueError(
            f"{source.folder} is of model type {config.model_type!r}, which has standard residual connections."
        )
    model, unused = complete_model(checkpoint, config)
    for name in residual_tensors(model) | gate_tensors(model):
        if name not in checkpoint.where:
            raise ValueError(f"{source.folder} has no `{name}`: its attention gates are quantised.")
        path = checkpoint.where[name].path
        with safe_open(path, framework="pt") as file:
            tensor = file.get_tensor(name)
        if not tensor.is_floating_point():
            raise ValueError(f"`{name}` in {path} is {tensor.dtype}, but must be floating point.")
        if not torch.isfinite(tensor).all():
            raise ValueError(f"`{name}` in {path} holds NaN or infinite values. Use an earlier checkpoint.")
        owner, _, key = name.rpartition(".")
        setattr(model.get_submodule(owner), key, nn.Parameter(tensor))
    return config, model, unused


def _has_head(model: PreTrainedModel) -> bool:
    return model.get_output_embeddings() is not None


def _stored_dtype(checkpoint: Checkpoint) -> torch.dtype:
    """Return the dtype of the largest tensor that is not quantised, for a configuration without a dtype.

    The first tensor may have another dtype: routing biases are float32 in checkpoints of bfloat16.
    """
    sizes = {}
    for entry in checkpoint.entries.values():
        dtype = DTYPES.get(entry.dtype)
        if dtype is not None and dtype.is_floating_point and dtype.itemsize > 1:
            sizes[dtype] = max(sizes.get(dtype, 0), math.prod(entry.shape))
    return max(sizes, key=sizes.get, default=torch.float32)


def _file_names(sources: list[str], has_added: bool) -> list[str]:
    """Return the names of the result's shards: the source's if possible, and one more for the added tensors."""
    if not has_added:
        return [SAFE_WEIGHTS_NAME] if len(sources) == 1 else sources
    # `transformers` ignores an index beside a file `model.safetensors`, so a single shard gets another name.
    if len(sources) == 1:
        return [f"model-{i:05d}-of-00002.safetensors" for i in (1, 2)]
    added = Path(ADDED_SHARD)
    numbered = (f"{added.stem}-{i}{added.suffix}" for i in count(2))
    return [*sources, next(name for name in chain([ADDED_SHARD], numbered) if name not in sources)]


def _link(source: Path, target: Path) -> None:
    try:
        # `os.link` would link a symbolic link itself, such as those of the Hub's cache.
        os.link(source.resolve(), target)
    except OSError as error:
        raise OSError(f"cannot hard-link {source} ({error.strerror}). Leave out --hard-link to copy.") from error


def _write_configuration(plan: Plan, target: Path) -> None:
    """Write `config.json` and, for a member of the family, the code that loads it."""
    config = plan.config
    for name, text in plan.texts.items():
        (target / name).write_text(text, encoding="utf-8")
    if isinstance(config, AttnResKimiK3Config):
        if not plan.is_release:
            custom_object_save(kimi_k3.model_class(plan.has_head), target)
        return
    model_class = (MODEL_FOR_CAUSAL_LM_MAPPING if plan.has_head else MODEL_MAPPING)[type(config)]
    config.architectures = [model_class.__name__]
    if isinstance(config, ResidualConfig):
        config.auto_map = auto_map(model_class)
        custom_object_save(model_class, target)
    config.save_pretrained(target)


__all__ = ["Plan", "plan_change", "plan_kimi_k3", "plan_release", "plan_retrofit", "plan_standard", "write"]
