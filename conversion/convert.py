"""Convert checkpoint directories without loading their weights: retrofit, its undoing, and other block sizes.

Each conversion is a `Plan`: the checkpoint, the configuration of the result, the tensors to add and those to leave out.
`write` carries it out: shards are copied byte for byte, what is added goes into one more shard.
"""

import json
import os
import shutil
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, PreTrainedConfig
from transformers.dynamic_module_utils import custom_object_save
from transformers.utils import CONFIG_NAME, SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME

from attnres import ResidualConfig
from attnres.decoder_attnres import auto_map
from attnres.loading_attnres import attn_res_tensors

from .checkpoint import DTYPES, Checkpoint, Shard, check_space, copy_shard
from .complete import check_complete, empty_model, explain_config, read_config
from .family import backbone_config, initial_tensor, retrofit_config
from .side_files import copy_side_files

ADDED_SHARD = "model-attn-res.safetensors"


@dataclass(frozen=True)
class Plan:
    """What to write: the `checkpoint` under `config`, with the tensors `added` and without those `dropped`.

    `unused`: what the model does not read, and may hold anything. `exact`: the result computes the same function as the
    source, to rounding.
    """

    checkpoint: Checkpoint
    config: PreTrainedConfig
    added: dict[str, Tensor] = field(default_factory=dict)
    dropped: frozenset[str] = frozenset()
    unused: frozenset[str] = frozenset()
    exact: bool = True

    @property
    def num_bytes(self) -> int:
        """Bytes of the tensors that are read from the checkpoint."""
        entries = (entry for shard in self.checkpoint.shards for entry in shard.entries)
        return sum(entry.end - entry.start for entry in entries if entry.name not in self.dropped)


def plan_retrofit(
    checkpoint: Checkpoint,
    *,
    block_size: int | None = None,
    num_blocks: int | None = None,
    full: bool = False,
    scale: str = "sum",
) -> Plan:
    """Plan to put attention residuals into a standard decoder; the arguments as in [`attnres.conversion.retrofit`].

    Raises:
        ValueError: the backbone is not supported or has attention residuals already, or the block size is not valid.
        FileNotFoundError, RuntimeError: a tensor is missing or has another shape than the configuration says.
    """
    with explain_config(checkpoint.folder):
        config = read_config(checkpoint.folder)
        config = retrofit_config(config, block_size=block_size, num_blocks=num_blocks, full=full, scale=scale)
        model = empty_model(config)
    dtype = config.dtype or _stored_dtype(checkpoint)
    added = {name: initial_tensor(name, t.shape, dtype) for name, t in attn_res_tensors(model).items()}
    unused = check_complete(checkpoint, model, added)
    # A standard member of the family may have kept trained AttnRes tensors, which it does not read.
    dropped = frozenset(added.keys() & checkpoint.entries)
    return Plan(checkpoint, config, added, dropped, unused, exact=scale == "sum")


def plan_standard(checkpoint: Checkpoint) -> Plan:
    """Plan to undo a retrofit: the backbone's own checkpoint, without the AttnRes tensors.

    Raises:
        ValueError: it is not an AttnRes checkpoint, or a pseudo-query is not zero or not finite, so that there is no
            standard decoder of the same function.
        FileNotFoundError, RuntimeError: a tensor is missing or has another shape than the configuration says.
    """
    config, model, unused = _read_attn_res(checkpoint)
    largest, name = max((query.abs().max().item(), name) for name, query in _queries(checkpoint, model).items())
    if largest > 0:
        raise ValueError(
            f"the pseudo-queries have been trained: the largest entry is {largest:.3g}, in `{name}`. "
            "No standard decoder computes the same function."
        )
    dropped = frozenset(attn_res_tensors(model))
    exact = config.attn_res_scale == "sum"
    return Plan(checkpoint, backbone_config(config), dropped=dropped, unused=unused, exact=exact)


def plan_block_size(checkpoint: Checkpoint, block_size: int) -> Plan:
    """Plan to regroup the sublayers of an AttnRes checkpoint into blocks of another size, where the function stays.

    Up to sublayer `min(S, S')` the sources are the same. A later one must have a zero pseudo-query and the scale "sum":
    then it reads the sum of all that came before, in whatever groups.

    Raises:
        ValueError: it is not an AttnRes checkpoint, or the function would change.
        FileNotFoundError, RuntimeError: a tensor is missing or has another shape than the configuration says.
    """
    config, model, unused = _read_attn_res(checkpoint)
    same_until = min(config.attn_res_block_size, block_size)
    if block_size == config.attn_res_block_size:
        same_until = config.num_sublayers
    queries = _queries(checkpoint, model)
    for name, module in model.named_modules():
        query = queries.get(f"{name}.weight")
        if query is None or module.sublayer <= same_until:
            continue
        largest = query.abs().max().item()
        if largest > 0 or config.attn_res_scale != "sum":
            reason = f"its largest entry is {largest:.3g}" if largest > 0 else 'the scale is "mean"'
            raise ValueError(
                f"blocks of {block_size} sublayers would change the function: `{name}.weight` reads other sources "
                f"then, and {reason}. The function stays for zero queries with the scale 'sum'."
            )
    config.attn_res_block_size = block_size
    config.check_fields()
    return Plan(checkpoint, config, unused=unused)


def write(
    plan: Plan, target: Path, *, hard_link: bool = False, on_bytes: Callable[[int], None] = lambda n: None
) -> None:
    """Write the planned model into the empty directory `target`; `on_bytes` is told of every piece that is done.

    Args:
        hard_link: link the shards that stay as they are instead of copying them.

    Raises:
        OSError: too little space, noticed before anything is written; or a shard is damaged.
        ValueError: a tensor holds NaN or infinite values.
    """
    checkpoint = plan.checkpoint
    kept = [shard for shard in checkpoint.shards if any(entry.name not in plan.dropped for entry in shard.entries)]
    copied = [s for s in kept if _drops(s, plan.dropped) or not (hard_link or checkpoint.is_temporary)]
    check_space(target, sum(shard.path.stat().st_size for shard in copied))
    _write_configuration(plan.config, target)
    copy_side_files(checkpoint.folder, target)
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


def _read_attn_res(checkpoint: Checkpoint) -> tuple[ResidualConfig, nn.Module, frozenset[str]]:
    """The configuration of a complete AttnRes checkpoint, its model on the meta device, and what that does not use."""
    with explain_config(checkpoint.folder):
        config = read_config(checkpoint.folder)
        if not isinstance(config, ResidualConfig) or config.residual_connection != "attn_res":
            raise ValueError(
                f"{checkpoint.folder} is of model type {config.model_type!r} and has no attention residuals."
            )
        model = empty_model(config)
    return config, model, check_complete(checkpoint, model, {})


def _stored_dtype(checkpoint: Checkpoint) -> torch.dtype:
    """The first dtype of a checkpoint that is not a quantised one, where the configuration names none."""
    dtypes = (DTYPES.get(entry.dtype) for entry in checkpoint.entries.values())
    wide = (d for d in dtypes if d is not None and d.is_floating_point and d.itemsize > 1)
    return next(wide, torch.float32)


def _queries(checkpoint: Checkpoint, model: nn.Module) -> dict[str, Tensor]:
    """The pseudo-queries of a checkpoint, in float32."""
    queries = {}
    for name in attn_res_tensors(model):
        if name.endswith("_proj.weight"):
            path = checkpoint.where[name].path
            with safe_open(path, framework="pt") as file:
                queries[name] = file.get_tensor(name).float()
            if not torch.isfinite(queries[name]).all():
                raise ValueError(f"`{name}` in {path} holds NaN or infinite values. Use an earlier checkpoint.")
    return queries


def _drops(shard: Shard, dropped: Collection[str]) -> bool:
    return any(entry.name in dropped for entry in shard.entries)


def _file_names(sources: list[str], adds: bool) -> list[str]:
    """The names of the shards written: those of the source, as far as `transformers` will read them together."""
    if not adds:
        return [SAFE_WEIGHTS_NAME] if len(sources) == 1 else sources
    if len(sources) == 1:  # beside a file `model.safetensors` an index is not looked at
        return [f"model-{i:05d}-of-00002.safetensors" for i in (1, 2)]
    return [*sources, ADDED_SHARD]


def _link(source: Path, target: Path) -> None:
    try:
        os.link(source.resolve(), target)
    except OSError as error:
        raise OSError(f"cannot hard-link {source} ({error.strerror}). Leave out --hard-link to copy.") from error


def _write_configuration(config: PreTrainedConfig, target: Path) -> None:
    """Write `config.json` and, for a member of the family, the code that loads it."""
    model_class = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    config.architectures = [model_class.__name__]
    if isinstance(config, ResidualConfig):
        config.auto_map = auto_map(model_class)
        custom_object_save(model_class, target)
    config.save_pretrained(target)


__all__ = ["Plan", "plan_block_size", "plan_retrofit", "plan_standard", "write"]
