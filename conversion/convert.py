"""Plan conversions of checkpoints without loading their weights: retrofit, undo a retrofit, or change its options.

Each conversion is a [`Plan`], which writes the result.
"""

import math
from copy import deepcopy
from itertools import chain
from typing import Any

import torch
from safetensors import safe_open
from torch import nn
from transformers import PreTrainedModel

from attnres import ResidualConfig
from attnres.checkpoints.checkpoint import Checkpoint
from attnres.checkpoints.complete import check_complete, empty_model, has_head
from attnres.checkpoints.shards import DTYPES
from attnres.loading_attnres import added_by_kind
from attnres.residual_attnres import ResidualConnection, residual_tensors

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
from .plan import Plan


def plan_retrofit(source: Checkpoint, residual: str = DEFAULT_CONNECTION, **options: Any) -> Plan:
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
    config = retrofit_config(source.config, residual, **options)
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
    # The plans of gates and value residuals have refused starts that change the function.
    connections = {name: tensor for name, tensor in added.items() if name in residual_tensors(model)}
    difference = config.connection.differs_from_standard(config, connections)
    return Plan(source, config, added, dropped, unused, difference, has_head(model))


def plan_standard(source: Checkpoint) -> Plan:
    """Plan to undo a retrofit: the backbone's checkpoint, without the tensors that were added to it.

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
    return Plan(source, backbone_config(config), dropped=dropped, unused=unused, has_head=has_head(model))


def plan_change(source: Checkpoint, **options: Any) -> Plan:
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
    flags = " ".join(f"--{option.replace('_', '-')} {value}" for option, value in options.items())
    config, model, unused = _read_member(source, f" Give {flags} instead, which makes a retrofit.")
    if lacking := [option for option in options if option not in config.connection.options]:
        names = " and ".join(f"--set-{option.replace('_', '-')}" for option in lacking)
        raise ValueError(
            f"{source.folder} has residual_connection={config.residual_connection!r}, which has no option {names}."
        )
    connections = {name: module for name, module in model.named_modules() if isinstance(module, ResidualConnection)}
    config.connection.plan_change(config, connections, **options)
    return Plan(source, config, unused=unused, has_head=has_head(model))


def _read_member(source: Checkpoint, remedy: str = "") -> tuple[ResidualConfig, PreTrainedModel, frozenset[str]]:
    """Return a copy of the configuration of a model of the family, the model, and the names of unused tensors.

    The model is on the meta device, but the tensors that are added to its backbone are loaded. If the source is not of
    the family, `remedy` ends the message.
    """
    config = deepcopy(source.config)  # a plan changes its fields
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


__all__ = ["plan_change", "plan_retrofit", "plan_standard"]
