"""Convert adapters of Kimi K3 between PEFT's form for stacked experts and the names of the released checkpoint.

    here        ...layers.1.mlp.experts.base_layer.lora_A.weight        [experts * rank, in]
    released    ...layers.1.block_sparse_moe.experts.0.w1.lora_A.weight          [rank, in]

Other programs write and read the second form, which has an adapter for each matrix of the released checkpoint. There
the gate and up projections of an expert, w1 and w3, have an adapter each. Here they are one stacked projection with one
adapter. Converted to the second form, it gives both the same A. In the other direction, two adapters with different A
become one adapter, whose rank is the sum of theirs:

    [w1; w3] x + [[B1, 0], [0, B3]] [A1; A3] x
"""

import math
import re
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.utils import ADAPTER_CONFIG_NAME, ADAPTER_SAFE_WEIGHTS_NAME

from attnres import AttnResKimiK3Config
from attnres.checkpoints.source import ModelSource
from attnres.checkpoints.source_files import json_text, read_object
from attnres.kimi_k3_configuration_attnres import COMPOSITE
from attnres.kimi_k3_layout_attnres import PREFIX
from attnres.kimi_k3_shapes_attnres import released_shapes
from attnres.utils.errors import about
from attnres.utils.files import atomic_directory
from attnres.utils.model_files import WRITTEN_ADAPTER

_ROOT = "base_model.model."  # PEFT's prefix of all names
# Parts of tensor names that differ: the part in our models, the part in releases, and a pattern that must follow both.
_RENAMED = (
    (".self_attn.forget_gate.", ".self_attn.", "(?=f_[ab]_proj|A_log|dt_bias)"),
    (".mlp.", ".block_sparse_moe.", "(?!(?:gate|up|down)_proj)"),  # dense layers have `mlp` there too
)
_EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(w[123])\Z")
_FACTOR = re.compile(r"(.+)\.lora_([AB])\.weight\Z")


def convert_adapter(source: Path, target: Path, form: str, *, overwrite: bool = False) -> None:
    """Convert an adapter of Kimi K3.

    Args:
        source: The folder of the adapter, whose `adapter_config.json` names the base model.
        target: The folder to write.
        form: `released` for released names, with an adapter for each expert; `attnres` for PEFT's form of the models
            here.
        overwrite: Whether to replace `target` if it holds an adapter and nothing else.

    Raises:
        OSError: A file is missing or cannot be written.
        ValueError: The adapter is not of this base, not in the other form, damaged, or no LoRA.
    """
    fields = read_object(source / ADAPTER_CONFIG_NAME)
    if (kind := fields.get("peft_type")) != "LORA":
        raise ValueError(f"the adapter in {source} is of the type {kind!r}, but --adapter takes 'LORA' alone.")
    with about(source / ADAPTER_SAFE_WEIGHTS_NAME, "Copy it again."):
        tensors = load_file(source / ADAPTER_SAFE_WEIGHTS_NAME)
    config = _base_of(source, fields)
    factors, others = _factors(tensors, source)
    convert = _to_released if form == "released" else _from_released
    result, changed = convert(config, fields, factors, others, source)
    with atomic_directory(target, WRITTEN_ADAPTER, overwrite=overwrite) as folder:
        save_file(result, folder / ADAPTER_SAFE_WEIGHTS_NAME, metadata={"format": "pt"})
        (folder / ADAPTER_CONFIG_NAME).write_text(json_text(fields | changed), encoding="utf-8")


def _base_of(source: Path, fields: Mapping[str, Any]) -> AttnResKimiK3Config:
    """Return the configuration of the base model that an adapter names."""
    base = fields.get("base_model_name_or_path")
    base = base if isinstance(base, str) else ""
    try:
        config = ModelSource(base).config()
    except OSError as error:
        raise FileNotFoundError(
            f"the base model {base!r} of the adapter is not found: put its directory or Hub id into "
            f"`base_model_name_or_path` of {source / ADAPTER_CONFIG_NAME}."
        ) from error
    if not isinstance(config, AttnResKimiK3Config):
        raise ValueError(f"the base model {base} of the adapter is {config.model_type}, but must be Kimi K3.")
    return config


Factors = dict[str, dict[str, Tensor]]


def _factors(tensors: Mapping[str, Tensor], source: Path) -> tuple[Factors, dict[str, Tensor]]:
    """Return the factors A and B of each adapted module by its name, and the other tensors, both without a prefix.

    Raises:
        ValueError: A factor is missing, is no matrix, or holds NaN; or a tensor of the adapter is no factor.
    """
    factors: Factors = defaultdict(dict)
    others = {}
    for full_name, tensor in tensors.items():
        name = full_name.removeprefix(_ROOT).removeprefix(PREFIX)
        match = _FACTOR.match(name)
        if match is None and "lora_" in name:  # such as the magnitudes of DoRA, which have no other form
            raise ValueError(f"the adapter in {source} has `{full_name}`, but --adapter takes A and B of LoRA alone.")
        if not tensor.is_floating_point() or not tensor.isfinite().all() or (match and tensor.dim() != 2):
            kind = "a matrix of finite numbers" if match else "finite numbers"
            raise ValueError(f"`{full_name}` of the adapter in {source} must hold {kind}. Copy it again.")
        if match:
            factors[match[1]][match[2]] = tensor
        else:
            others[name] = tensor
    for name, parts in factors.items():
        if len(parts) < 2:
            raise ValueError(f"the adapter in {source} lacks one of lora_A and lora_B of `{name}`. Copy it again.")
    if not factors:
        raise ValueError(f"the adapter in {source} has no tensors of LoRA. Copy it again.")
    return factors, others


def _released_name(name: str) -> str:
    for own, released, following in _RENAMED:
        name = re.sub(re.escape(own) + following, released, name)
    return name


def _own_name(name: str) -> str:
    for own, released, following in _RENAMED:
        name = re.sub(re.escape(released) + following, own, name)
    return name


def _check(config: AttnResKimiK3Config, factors: Factors, others: Mapping[str, Tensor], source: Path) -> None:
    """Raise ValueError if released tensors do not fit the base model: factors, and tensors that were trained whole."""
    shapes = released_shapes(config)
    fits = {f"{n}.weight": ((len(p["B"]), p["A"].shape[1]), len(p["A"]) == p["B"].shape[1]) for n, p in factors.items()}
    fits |= {name: (tuple(tensor.shape), True) for name, tensor in others.items()}
    for name, (shape, is_whole) in fits.items():
        must = shapes.get(name)
        if shape != must or not is_whole:
            problem = "has no such tensor" if must is None else f"has the shape {list(must)} there"
            raise ValueError(
                f"the adapter in {source} is of another base model: the base that it names {problem}, `{name}`."
            )


def _strength(fields: Mapping[str, Any], name: str, rank: int, source: Path) -> float:
    """Return the factor by which PEFT scales an adapter, by the name of its module or parameter.

    Raises:
        ValueError: The tensors have another rank than the configuration, or the factor is no number.
    """
    set_rank, alpha = (_of_pattern(fields, key, pattern, name) for key, pattern in _STRENGTHS)
    path = source / ADAPTER_CONFIG_NAME
    if set_rank != rank:
        raise ValueError(
            f"the adapter in {source} has the rank {rank} for `{name}` of the base that it names, but {path.name} says "
            f"{set_rank!r}. Copy both files again, or name the right base there."
        )
    if isinstance(alpha, bool) or not isinstance(alpha, int | float) or not math.isfinite(alpha):
        raise ValueError(f"{path}: `lora_alpha` of `{name}` is {alpha!r}, but must be a number.")
    return alpha / rank**0.5 if fields.get("use_rslora") else alpha / rank


_STRENGTHS = (("r", "rank_pattern"), ("lora_alpha", "alpha_pattern"))


def _of_pattern(fields: Mapping[str, Any], key: str, pattern: str, name: str) -> Any:
    """Return the rank or alpha of a module: of the first pattern that its name ends in, as PEFT reads them.

    A pattern may be the whole name of a module of the composite layout, with its prefix.
    """
    patterns: dict[str, Any] = fields.get(pattern) or {}
    for ending, value in patterns.items():
        if any(re.match(rf"(.*\.)?({ending})$", whole) for whole in (name, PREFIX + name)):
            return value
    return fields.get(key)


def _split_rules(strengths: Mapping[str, tuple[int, float]]) -> dict[str, Any]:
    """Return the fields of a configuration for the rank and the strength of each module.

    The pair of the last module is the default, and the others are patterns.
    """
    by_pair = defaultdict(list)
    for name, (rank, strength) in strengths.items():
        by_pair[rank, rank * strength].append(name)
    *rest, (rank, alpha) = sorted(by_pair, key=lambda pair: [*strengths].index(by_pair[pair][-1]))
    patterns = {pair: "|".join(map(re.escape, sorted(by_pair[pair]))) for pair in rest}
    return {
        "r": rank,
        "lora_alpha": alpha,
        "rank_pattern": {pattern: pair[0] for pair, pattern in patterns.items()},
        "alpha_pattern": {pattern: pair[1] for pair, pattern in patterns.items()},
        "use_rslora": False,
    }


def _end(name: str) -> str:
    """Return the name of a module within its layer."""
    return re.sub(r"^model\.layers\.\d+\.", "", name)


Result = tuple[dict[str, Tensor], dict[str, Any]]


def _to_released(
    config: AttnResKimiK3Config, fields: Mapping[str, Any], factors: Factors, others: dict[str, Tensor], source: Path
) -> Result:
    count = config.num_local_experts or 1
    targets = fields.get("target_parameters") or ()
    released: Factors = {}
    strengths: dict[str, tuple[int, float]] = {}
    for name, parts in factors.items():
        if ".block_sparse_moe." in name:
            raise ValueError(f"the adapter in {source} has released names already, such as `{name}`.")
        if not name.removesuffix(".base_layer").endswith(".experts"):
            released[_released_name(name)] = parts
            rank = len(parts["A"])
            strengths[_released_name(name)] = rank, _strength(fields, name, rank, source)
            continue
        a, b = parts["A"], parts["B"]
        # PEFT nests the wrappers of two parameters: the name of the inner one ends in `.base_layer`. A single wrapper
        # has the name of the module.
        is_gate_up = name.endswith(".base_layer") or not any("down_proj" in key for key in targets)
        stacked = f"{name.removesuffix('.base_layer')}.{'gate_up_proj' if is_gate_up else 'down_proj'}"
        owner, rank = _released_name(f"{name.removesuffix('.base_layer')}."), len(a) // count
        if not rank or rank * count != len(a) or b.shape[1] != len(a):
            raise ValueError(
                f"the adapter in {source} is of another base model: the base that it names has {count} experts, which "
                f"do not divide the {len(a)} rows of `{name}.lora_A`."
            )
        strength = _strength(fields, stacked, rank, source)
        for expert, (one_a, one_b) in enumerate(
            zip(a.view(count, rank, -1).unbind(0), b.view(len(b), rank, count).unbind(-1))
        ):
            # The rows of B are the gate's, then the up projection's.
            halves = zip(("w1", "w3"), one_b.chunk(2)) if is_gate_up else [("w2", one_b)]
            for part, rows in halves:
                released[f"{owner}{expert}.{part}"] = {"A": one_a, "B": rows}
                strengths[part] = rank, strength
    others = {_released_name(name): tensor for name, tensor in others.items()}
    _check(config, released, others, source)
    prefix = _ROOT + (PREFIX if config.checkpoint_layout == COMPOSITE else "")
    result = {f"{prefix}{n}.lora_{f}.weight": t.clone() for n, parts in released.items() for f, t in parts.items()}
    result |= {prefix + name: tensor for name, tensor in others.items()}
    ends: dict[str, set[tuple[int, float]]] = defaultdict(set)
    for name, pair in strengths.items():
        ends[_end(name)].add(pair)
    # The end of a name stands for all layers, unless they differ.
    by_end = {_end(name) if len(ends[_end(name)]) == 1 else name: pair for name, pair in strengths.items()}
    return result, {"target_modules": sorted(by_end), "target_parameters": None, **_split_rules(by_end)}


def _from_released(
    config: AttnResKimiK3Config, fields: Mapping[str, Any], factors: Factors, others: dict[str, Tensor], source: Path
) -> Result:
    _check(config, factors, others, source)
    own: Factors = {}
    strengths: dict[str, tuple[int, float]] = {}
    experts: dict[str, dict[str, dict[int, dict[str, Tensor]]]] = defaultdict(lambda: defaultdict(dict))
    for name, parts in factors.items():
        if match := _EXPERT.match(name):
            experts[match[1]][match[3]][int(match[2])] = parts
        else:
            own[_own_name(name)], rank = parts, len(parts["A"])
            strengths[_own_name(name)] = rank, _strength(fields, name, rank, source)
    stacks: dict[str, list[tuple[Tensor, Tensor]]] = {}
    for owner, by_part in experts.items():
        name = _own_name(f"{owner}.").removesuffix(".")
        for stack, names in (("gate_up_proj", ("w1", "w3")), ("down_proj", ("w2",))):
            if any(part in by_part for part in names):
                # `_scaled` multiplies B by the strength of its adapter, because w1 and w3 may differ in strength.
                stacks[f"{name}.{stack}"] = [
                    _join([_scaled(fields, owner, by_part, part, expert, config, source) for part in names])
                    for expert in range(config.num_local_experts or 0)
                ]
    # All stacks get one rank: PEFT takes the rank of parameters from the default, and ignores patterns for them.
    rank = max((len(a) for pairs in stacks.values() for a, _ in pairs), default=0)
    for stack, pairs in stacks.items():
        name = stack.rpartition(".")[0]
        a = torch.cat([_padded(a, rank, 0) for a, _ in pairs])
        b = torch.stack([_padded(b, rank, 1) for _, b in pairs], -1).flatten(1)
        # PEFT puts the wrapper of `down_proj` around the other one.
        inner = ".base_layer" if stack.endswith(".gate_up_proj") and f"{name}.down_proj" in stacks else ""
        own[name + inner] = {"A": a, "B": b}
        strengths[stack] = rank, 1.0
    result = {f"{_ROOT}{n}.lora_{f}.weight": t.contiguous() for n, parts in own.items() for f, t in parts.items()}
    result |= {_ROOT + _own_name(name): tensor for name, tensor in others.items()}
    modules = [name for name in strengths if name not in stacks]
    changed = {"target_modules": modules, "target_parameters": [*stacks] or None}
    return result, changed | _split_rules(strengths)


def _scaled(
    fields: Mapping[str, Any],
    owner: str,
    by_part: Mapping[str, Mapping[int, dict[str, Tensor]]],
    part: str,
    expert: int,
    config: AttnResKimiK3Config,
    source: Path,
) -> tuple[Tensor, Tensor]:
    """Return A, and B times the strength, of an expert's matrix; zeros if it has no adapter."""
    name = f"{owner}.{expert}.{part}"
    pair = by_part.get(part, {}).get(expert)
    if pair is None:
        if part in by_part:
            raise ValueError(f"the adapter in {source} lacks `{name}`, which it has for other experts. Copy it again.")
        rows, columns = released_shapes(config)[f"{name}.weight"]
        return torch.zeros(0, columns), torch.zeros(rows, 0)
    return pair["A"], pair["B"] * _strength(fields, name, len(pair["A"]), source)


def _join(pairs: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Return the factors of matrices that are stacked along their rows."""
    (first, _), *rest = pairs
    if all(torch.equal(first, a) for a, _ in rest):
        return first, torch.cat([b for _, b in pairs])
    return torch.cat([a for a, _ in pairs]), torch.block_diag(*(b for _, b in pairs))


def _padded(tensor: Tensor, rank: int, axis: int) -> Tensor:
    """Return a factor with zeros up to a rank along an axis."""
    missing = rank - tensor.shape[axis]
    return torch.nn.functional.pad(tensor, (0, missing) if axis == 1 else (0, 0, 0, missing))


__all__ = ["convert_adapter"]
