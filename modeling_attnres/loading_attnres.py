"""Checks of a checkpoint that is loaded as a model of the family, with errors that name the tensor or the file."""

import os
import warnings
from collections.abc import Collection, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from copy import copy
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.integrations.accelerate import load_offloaded_parameter

from .connections_attnres import ATTENTION_CHANGES, CONNECTIONS
from .residual_attnres import FamilyWarning, residual_tensors

_SHOWN = 3  # tensors in a message


def added_by_kind(model: nn.Module) -> tuple[dict[str, nn.Parameter], ...]:
    """Return the tensors that are added to a backbone, by name: those of connections, then of each attention change."""
    return residual_tensors(model), *(change.tensors(model) for change in ATTENTION_CHANGES)


def added_fields(config: PreTrainedConfig) -> dict[str, Any]:
    """Return the fields that say how a model differs from its backbone, with their values."""
    fields = dict(CONNECTIONS[config.residual_connection].fields)
    for change in ATTENTION_CHANGES:
        fields |= change.fields
    return {name: getattr(config, name, fields.get(name)) for name in ("residual_connection", *fields)}


def put_back_changed(config: PreTrainedConfig, built_with: Mapping[str, Any]) -> None:
    """Give fields that were changed since the model was made their values of then, and warn.

    The connections do not read the configuration again. Saved with a changed field, the model would be loaded with
    another function.

    Args:
        config: the model's configuration, which is changed.
        built_with: the fields when the model was made, from [`added_fields`].
    """
    changed = {field: value for field, value in built_with.items() if getattr(config, field) != value}
    if not changed:
        return
    now = ", ".join(f"`{field}` to {getattr(config, field)!r}" for field in changed)
    for field, value in changed.items():
        setattr(config, field, value)
    message = (
        f"the configuration was changed after the model was made: {now}. The model does not use this, so "
        f"{', '.join(f'{value!r}' for value in changed.values())} is saved. Pass such fields to `from_pretrained`."
    )
    warnings.warn(message, FamilyWarning, stacklevel=3)


def check_added(model: PreTrainedModel, added: dict, missing: Collection[str], source: str | os.PathLike) -> None:
    """Raise if a checkpoint holds only some of the tensors that are added to a backbone, or values that are not finite.

    Args:
        model: the loaded model.
        added: its added tensors by name.
        missing: names of the tensors that the checkpoint lacks.
        source: the checkpoint, for the message.

    Raises:
        ValueError: some of the tensors are missing and others are not, or one holds NaN or infinite values.
    """
    absent = sorted(set(added) & set(missing))
    if absent and len(absent) < len(added):
        raise ValueError(
            f"{source} holds {len(added) - len(absent)} of the {len(added)} tensors added to its backbone; missing: "
            f"{', '.join(absent)}. Restore them, or remove all to start anew."
        )
    for name, tensor in added.items():
        if tensor.is_meta and hasattr(model, "hf_device_map"):  # offloaded
            shape, tensor = tensor.shape, load_offloaded_parameter(model, name)
            if tensor.shape != shape:
                check_shapes([(name, tensor.shape, shape)], source)
        is_quantised = getattr(model, "hf_quantizer", None) is not None
        parts = _parts(tensor) if is_quantised else [tensor]
        if not all(part.is_meta or torch.isfinite(part).all() for part in parts):
            raise ValueError(f"{source}: `{name}` holds NaN or infinite values. Use an earlier checkpoint.")


def _parts(tensor: Tensor) -> list[Tensor]:
    """Return the wide tensors that a quantised tensor consists of, such as its scales.

    A quantised tensor itself answers few questions. Its scales hold the NaN and infinite values that it was made of.
    """
    if hasattr(tensor, "__tensor_flatten__"):
        names, _ = tensor.__tensor_flatten__()
        return [part for name in names for part in _parts(getattr(tensor, name))]
    return [tensor] if tensor.dtype.itemsize > 1 else []


def names_in(file: str, weights_only: bool) -> Collection[str]:
    """Return the names of the tensors in a file of weights, without their values.

    Args:
        file: the file, safetensors or a pickle.
        weights_only: whether a pickle may hold nothing but tensors.
    """
    if file.endswith(".safetensors"):
        with safe_open(file, framework="pt") as tensors:
            return tensors.keys()
    return torch.load(file, map_location="meta", weights_only=weights_only).keys()


def check_files(names: Mapping[str, Iterable[str]]) -> None:
    """Raise if a tensor lies in two files of a checkpoint: `transformers` reads the last one, whatever the index says.

    Args:
        names: names of the tensors in each file, by its path: files in two folders may have one name.

    Raises:
        ValueError: there is such a tensor.
    """
    files: dict[str, str] = {}
    for file, held in names.items():
        for name in held:
            if files.setdefault(name, file) != file:
                paths = files[name], file
                both = " and ".join(os.path.relpath(path, os.path.commonpath(paths)) for path in paths)
                remedy = "Remove it from the file that the index does not name for it."
                raise ValueError(f"`{name}` lies in both {both}, but must lie in one file. {remedy}")


def check_shapes(mismatched: Collection[tuple[str, Sequence[int], Sequence[int]]], source: str | os.PathLike) -> None:
    """Raise if tensors have other shapes in the checkpoint than in the model.

    Args:
        mismatched: for each such tensor its name, the shape in the checkpoint, the shape in the model.
        source: the checkpoint, for the message.

    Raises:
        RuntimeError: there is such a tensor.
    """
    tensors = [f"`{name}` has shape {list(has)}, but must be {list(must)}" for name, has, must in sorted(mismatched)]
    if len(tensors) > _SHOWN:
        tensors[_SHOWN:] = [f"{len(tensors) - _SHOWN} others do not fit either"]
    if tensors:
        raise RuntimeError(f"{source}: {'; '.join(tensors)}. Use the checkpoint's own config.json.")


def stored_fields(source: str | os.PathLike, **options: Any) -> dict[str, Any]:
    """Return the fields of a checkpoint's `config.json` unchanged; an empty dictionary without such a file.

    Args:
        source: a directory or Hub id.
        options: arguments of `from_pretrained`; only those that locate the file are used.
    """
    where = ("cache_dir", "proxies", "token", "revision", "local_files_only", "subfolder")
    try:
        # The family's class would replace a backbone's model type.
        fields, _ = PreTrainedConfig.get_config_dict(source, **{key: options[key] for key in where if key in options})
    except OSError:
        return {}
    return fields


def warn_of_change(
    model: PreTrainedModel, stored: Mapping[str, Any], source: str | os.PathLike, info: Mapping[str, Collection[str]]
) -> None:
    """Warn if a model has other fields than its checkpoint, so that it computes another function.

    Args:
        model: the loaded model.
        stored: the fields in the checkpoint's `config.json`.
        source: the checkpoint, for the message.
        info: the loading info of `from_pretrained`, of which missing and unexpected keys are read.
    """
    config: Any = model.config
    if stored.get("model_type") != config.model_type:
        _warn_of_start(config, source)
        return  # a backbone's checkpoint has no tensors of connections
    name = stored.get("residual_connection", type(config).residual_connection)
    defaults = {"residual_connection": type(config).residual_connection}
    if name == config.residual_connection:
        defaults |= {f: d for f, d in CONNECTIONS[name].fields.items() if f not in CONNECTIONS[name].start_fields}
    changed = {f: (stored.get(f, d), getattr(config, f)) for f, d in defaults.items()}
    changed = {field: values for field, values in changed.items() if values[0] != values[1]}
    before = {field: values[0] for field, values in changed.items()}
    if changed and _is_standard(model, before, info["unexpected_keys"]):
        changed = {}
    for change in ATTENTION_CHANGES:
        differing, tensors = change.differing_fields(config, stored), change.tensors(model)
        changed |= differing
        start = change.start(config)
        if start and tensors and change.field not in differing and not tensors.keys() - set(info["missing_keys"]):
            message = (
                f"{source}: its config.json has the `{change.field}` {getattr(config, change.field)!r}, but its "
                f"weights hold no tensors of it, so these start {start}. Restore them, or remove the field."
            )
            warnings.warn(message, FamilyWarning, stacklevel=3)
    if changed:
        differences = "; ".join(
            f"`{f}` is {before!r} in its config.json, and {now!r} here" for f, (before, now) in changed.items()
        )
        message = (
            f"{source}: {differences}. The model computes another function than was saved; remove the arguments that "
            "you did not intend."
        )
        warnings.warn(message, FamilyWarning, stacklevel=3)


def _warn_of_start(config: Any, source: str | os.PathLike) -> None:
    """Warn if the connections of a model, which start anew on a backbone's weights, do not keep their function."""
    fields = CONNECTIONS[config.residual_connection].retrofit  # `None`: there is no such start
    differing = [] if fields is None else [f"{f}={v!r}" for f, v in fields.items() if getattr(config, f) != v]
    if fields is None or differing:
        passed = ", ".join(differing)
        remedy = f" To keep it, pass {passed}, or call `attnres.conversion.retrofit`." if differing else ""
        message = (
            f"{source} is a checkpoint of the backbone. Its residual connections become {config.residual_connection!r} "
            f"at their start, which changes the function of the model.{remedy}"
        )
        warnings.warn(message, FamilyWarning, stacklevel=4)


def _is_standard(model: PreTrainedModel, stored: Mapping[str, Any], unexpected: Collection[str]) -> bool:
    """Return whether the model is the standard decoder, both as it is and with the fields of its checkpoint.

    Args:
        model: the loaded model.
        stored: the fields that differ, with their values in the checkpoint.
        unexpected: names of the checkpoint's tensors that were not loaded.
    """
    before, tensors = copy(model.config), residual_tensors(model)
    owners = {name.rpartition(".")[0] for name in tensors}
    if any(name.rpartition(".")[0] in owners for name in unexpected):
        return False  # the connections had more tensors, which may have been trained
    if stored.get("residual_connection", "standard") != "standard":
        return False  # the tensors of the checkpoint's connection are not loaded
    for field, value in stored.items():
        setattr(before, field, value)
    if any(tensor.is_meta for tensor in tensors.values()):
        return False  # offloaded tensors: too slow to read for a warning
    configs = before, model.config
    return all(c.connection.differs_from_standard(c, tensors) is None for c in configs)


@contextmanager
def explain_broken_shard(source: str | os.PathLike, subfolder: str = "") -> Generator[None]:
    """Replace errors of a damaged shard, which name no file, by an OSError that names the file in `source`."""
    try:
        yield
    except SafetensorError as error:
        for path in sorted(Path(source, subfolder).glob("*.safetensors")):
            try:
                with safe_open(path, framework="pt"):
                    pass
            except SafetensorError as shard_error:
                raise OSError(f"{path} is truncated or damaged ({shard_error}). Copy it again.") from error
        raise
