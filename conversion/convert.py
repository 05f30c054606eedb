"""Convert checkpoint directories without loading their weights: retrofit, its undoing, and other block sizes.

Each conversion is a `Plan`: the checkpoint, the configuration of the result, the tensors to add and those to leave out.
`write` carries it out: shards are copied byte for byte, what is added goes into one more shard.
"""

import json
import os
import shutil
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedConfig
from transformers.dynamic_module_utils import custom_object_save, get_relative_import_files
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME

from attnres import ResidualConfig
from attnres.cli_support import quiet_transformers
from attnres.decoder_attnres import auto_map
from attnres.loading_attnres import attn_res_tensors, check_shapes

from .checkpoint import DTYPES, SIDE_FILES, Checkpoint, Shard, check_space, copy_shard
from .family import backbone_config, initial_tensor, member_config, pick_block_size

ADDED_SHARD = "model-attn-res.safetensors"


@dataclass(frozen=True)
class Plan:
    """What to write: the `checkpoint` under `config`, with the tensors `added` and without those `dropped`.

    `exact`: the result computes the same function as the source, to rounding.
    """

    checkpoint: Checkpoint
    config: PreTrainedConfig
    added: dict[str, Tensor] = field(default_factory=dict)
    dropped: frozenset[str] = frozenset()
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
    config = member_config(_read_config(checkpoint.folder))
    config.residual_connection, config.attn_res_scale = "attn_res", scale
    config.attn_res_block_size = pick_block_size(config, block_size, num_blocks, full)
    config.check_fields()
    model = _empty_model(config)
    dtype = config.dtype or _stored_dtype(checkpoint)
    added = {name: initial_tensor(name, t.shape, dtype) for name, t in attn_res_tensors(model).items()}
    _check_complete(checkpoint, config, added)
    return Plan(checkpoint, config, added=added, exact=scale == "sum")


def plan_standard(checkpoint: Checkpoint) -> Plan:
    """Plan to undo a retrofit: the backbone's own checkpoint, without the AttnRes tensors.

    Raises:
        ValueError: it is not an AttnRes checkpoint, or a pseudo-query is not zero, so that there is no standard decoder
            of the same function.
        FileNotFoundError, RuntimeError: a tensor is missing or has another shape than the configuration says.
    """
    config, model = _read_attn_res(checkpoint)
    largest, name = max((query.abs().max().item(), name) for name, query in _queries(checkpoint, model).items())
    if largest > 0:
        raise ValueError(
            f"the pseudo-queries have been trained: the largest entry is {largest:.3g}, in `{name}`. "
            "No standard decoder computes the same function."
        )
    dropped = frozenset(attn_res_tensors(model))
    return Plan(checkpoint, backbone_config(config), dropped=dropped, exact=config.attn_res_scale == "sum")


def plan_block_size(checkpoint: Checkpoint, block_size: int) -> Plan:
    """Plan to regroup the sublayers of an AttnRes checkpoint into blocks of another size, where the function stays.

    Up to sublayer `min(S, S')` the sources are the same. A later one must have a zero pseudo-query and the scale "sum":
    then it reads the sum of all that came before, in whatever groups.

    Raises:
        ValueError: it is not an AttnRes checkpoint, or the function would change.
        FileNotFoundError, RuntimeError: a tensor is missing or has another shape than the configuration says.
    """
    config, model = _read_attn_res(checkpoint)
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
    return Plan(checkpoint, config)


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
    hard_link |= checkpoint.is_temporary
    linked = {shard.path for shard in checkpoint.shards if hard_link and not _drops(shard, plan.dropped)}
    check_space(target, sum(shard.path.stat().st_size for shard in checkpoint.shards if shard.path not in linked))
    kept = [shard for shard in checkpoint.shards if any(entry.name not in plan.dropped for entry in shard.entries)]
    names = _file_names([shard.path.name for shard in kept], bool(plan.added))
    weight_map = {}
    for shard, name in zip(kept, names):
        if shard.path in linked:
            copy_shard(shard, None, (), on_bytes)
            _link(shard.path, target / name)
        else:
            copy_shard(shard, target / name, plan.dropped, on_bytes)
        held = (e.name for e in shard.entries if e.name not in plan.dropped)
        weight_map |= {tensor: name for tensor in held if checkpoint.where.get(tensor) is shard}
    if plan.added:
        save_file(plan.added, target / names[-1], {"format": "pt"})
        shutil.copymode(checkpoint.shards[0].path, target / names[-1])  # it is written for its owner alone
        weight_map |= dict.fromkeys(plan.added, names[-1])
    if names != [SAFE_WEIGHTS_NAME]:
        sizes = {e.name: e.end - e.start for e in checkpoint.entries.values()}
        sizes |= {name: tensor.nbytes for name, tensor in plan.added.items()}
        index = {
            "metadata": {"total_size": sum(map(sizes.get, weight_map))},
            "weight_map": dict(sorted(weight_map.items())),
        }
        (target / SAFE_WEIGHTS_INDEX_NAME).write_text(json.dumps(index, indent=2) + "\n")
    _write_configuration(plan.config, target)
    _copy_side_files(checkpoint.folder, target)


def _read_config(folder: Path) -> PreTrainedConfig:
    # Code that came with the checkpoint is not needed: a supported backbone is one of `transformers`.
    return AutoConfig.from_pretrained(folder, trust_remote_code=False)


def _read_attn_res(checkpoint: Checkpoint) -> tuple[ResidualConfig, nn.Module]:
    """The configuration of a complete AttnRes checkpoint, and its model on the meta device."""
    config = _read_config(checkpoint.folder)
    if not isinstance(config, ResidualConfig) or config.residual_connection != "attn_res":
        raise ValueError(f"{checkpoint.folder} is of model type {config.model_type!r} and has no attention residuals.")
    model = _empty_model(config)
    _check_complete(checkpoint, config, {})
    return config, model


def _empty_model(config: PreTrainedConfig) -> nn.Module:
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)


def _stored_dtype(checkpoint: Checkpoint) -> torch.dtype:
    """The first floating dtype of a checkpoint, where the configuration names none."""
    dtypes = (DTYPES.get(entry.dtype) for entry in checkpoint.entries.values())
    return next(dtype for dtype in dtypes if dtype is not None and dtype.is_floating_point)


def _queries(checkpoint: Checkpoint, model: nn.Module) -> dict[str, Tensor]:
    """The pseudo-queries of a checkpoint, in float32."""
    queries = {}
    for name in attn_res_tensors(model):
        if name.endswith("_proj.weight"):
            with safe_open(checkpoint.where[name].path, framework="pt") as file:
                queries[name] = file.get_tensor(name).float()
    return queries


def _check_complete(checkpoint: Checkpoint, config: PreTrainedConfig, added: dict[str, Tensor]) -> None:
    """Load the names, dtypes and shapes alone, as `transformers` would the weights, and see that they fit.

    Quantised weights have other names and shapes than their model's, and are left to their quantiser.
    """
    if getattr(config, "quantization_config", None) is not None:
        return
    state = {e.name: torch.empty(e.shape, dtype=DTYPES[e.dtype], device="meta") for e in checkpoint.entries.values()}
    state |= {name: tensor.to("meta") for name, tensor in added.items()}
    model_class = type(_empty_model(config))
    with quiet_transformers():
        _, info = model_class.from_pretrained(
            None,
            config=config,
            state_dict=state,
            device_map="meta",
            ignore_mismatched_sizes=True,
            output_loading_info=True,
        )
    if info["missing_keys"]:
        missing = ", ".join(f"`{name}`" for name in sorted(info["missing_keys"]))
        raise FileNotFoundError(f"{checkpoint.folder} is incomplete: it lacks {missing}.")
    if info["mismatched_keys"]:
        check_shapes(info["mismatched_keys"], checkpoint.file_of(min(info["mismatched_keys"])[0]))


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
    model = _empty_model(config)
    config.architectures = [type(model).__name__]
    if isinstance(config, ResidualConfig):
        config.auto_map = auto_map(type(model))
        custom_object_save(model, target)
    config.save_pretrained(target)


def _copy_side_files(folder: Path, target: Path) -> None:
    """Copy tokenizer, chat template, generation configuration and licences."""
    for path in sorted(folder.iterdir()):
        if path.is_file() and any(fnmatch(path.name, pattern) for pattern in SIDE_FILES):
            shutil.copyfile(path, target / path.name)
    templates = folder / "additional_chat_templates"
    if templates.is_dir():
        shutil.copytree(templates, target / templates.name)
    path = target / "tokenizer_config.json"
    if not path.exists():
        return
    tokenizer = json.loads(path.read_text())
    if "auto_map" in tokenizer:
        _copy_tokenizer_code(tokenizer["auto_map"], folder, target)
    else:
        _name_tokenizer_class(tokenizer, folder, path)


def _copy_tokenizer_code(auto_map: dict | list, folder: Path, target: Path) -> None:
    references = auto_map["AutoTokenizer"] if isinstance(auto_map, dict) else auto_map
    for reference in [references] if isinstance(references, str) else references:
        if reference and "--" not in reference:  # otherwise the code is in another repository
            code = folder / f"{reference.partition('.')[0]}.py"
            for path in (code, *map(Path, get_relative_import_files(code))):
                shutil.copyfile(path, target / path.name)


def _name_tokenizer_class(tokenizer: dict, folder: Path, path: Path) -> None:
    """Name the class that `AutoTokenizer` takes for the source: it also goes by the model type, which changes."""
    try:
        name = type(AutoTokenizer.from_pretrained(folder, trust_remote_code=False)).__name__
    except (ImportError, OSError, ValueError):  # it needs a package that is not here
        return
    if tokenizer.get("tokenizer_class") != name:
        path.write_text(json.dumps(tokenizer | {"tokenizer_class": name}, indent=2, ensure_ascii=False) + "\n")


__all__ = ["Plan", "plan_block_size", "plan_retrofit", "plan_standard", "write"]
