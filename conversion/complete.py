"""Does a checkpoint hold every tensor of its configuration's model, in its shape? No weight is loaded to see it."""

import re
from collections import Counter, defaultdict
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.utils import CONFIG_NAME

from attnres.cli_support import quiet_transformers
from attnres.loading_attnres import attn_res_tensors, check_shapes

from .checkpoint import DTYPES, Checkpoint

_EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(.+)")
_MAX_NAMED = 10


def read_config(folder: Path) -> PreTrainedConfig:
    """The configuration in a directory.

    Raises:
        OSError, ValueError: there is none, or it is damaged, or of no model type that `transformers` knows.
    """
    if not (folder / CONFIG_NAME).is_file():
        raise FileNotFoundError(f"{folder} has no {CONFIG_NAME}.")
    with explain_config(folder):
        # Code that came with the checkpoint is not needed: a supported backbone is one of `transformers`.
        return AutoConfig.from_pretrained(folder, trust_remote_code=False)


@contextmanager
def explain_config(folder: Path) -> Iterator[None]:
    """Turn whatever a wrong value in the configuration of `folder` makes fail into one kind of error.

    Raises:
        ValueError: naming the file.
    """
    try:
        yield
    except (OSError, RuntimeError, ValueError):
        raise
    except Exception as error:
        raise ValueError(f"{folder / CONFIG_NAME} holds a wrong value ({type(error).__name__}: {error}).") from error


def empty_model(config: PreTrainedConfig) -> PreTrainedModel:
    """The causal language model of a configuration, on the meta device."""
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)


def check_complete(checkpoint: Checkpoint, model: PreTrainedModel, added: dict[str, Tensor]) -> frozenset[str]:
    """Load the names, dtypes and shapes alone, as `transformers` would the weights, and see that they fit.

    Quantised weights have other names and shapes than their model's, and are left to their quantiser.

    Args:
        model: one of the checkpoint's configuration.
        added: what is to be written beside the checkpoint.

    Returns:
        The tensors of the checkpoint that the model does not use.

    Raises:
        FileNotFoundError, RuntimeError: naming the tensors that are missing or have another shape, and where.
    """
    entries, config = checkpoint.entries, model.config
    ignored = model._keys_to_ignore_on_load_unexpected or ()
    unused = {name for name in entries if any(re.search(pattern, name) for pattern in ignored)}
    _check_present(checkpoint, set(attn_res_tensors(model)) - entries.keys() - added.keys())
    if getattr(config, "quantization_config", None) is not None:
        return frozenset(unused)
    _check_experts(checkpoint)
    # A dtype that is not known here is none of a weight: of the others, names and shapes are enough.
    state = {name: torch.empty(e.shape, dtype=DTYPES.get(e.dtype), device="meta") for name, e in entries.items()}
    state |= {name: tensor.to("meta") for name, tensor in added.items()}
    try:
        with quiet_transformers():
            _, info = type(model).from_pretrained(
                None,
                config=config,
                state_dict=state,
                device_map="meta",
                ignore_mismatched_sizes=True,
                output_loading_info=True,
            )
    except RuntimeError as error:  # tensors that `transformers` merges or splits do not fit each other
        raise RuntimeError(f"the tensors of {checkpoint.folder} do not fit its {CONFIG_NAME}: {error}") from error
    _check_present(checkpoint, info["missing_keys"])
    if info["mismatched_keys"]:
        check_shapes(info["mismatched_keys"], checkpoint.file_of(min(info["mismatched_keys"])[0]))
    return frozenset(unused | (entries.keys() & info["unexpected_keys"]))


def _check_present(checkpoint: Checkpoint, missing: Collection[str]) -> None:
    if missing:
        names = [f"`{name}`" for name in sorted(missing)]
        if len(names) > _MAX_NAMED:
            names[_MAX_NAMED:] = [f"and {len(names) - _MAX_NAMED} more"]
        raise FileNotFoundError(f"{checkpoint.folder} is incomplete: it lacks {', '.join(names)}.")


def _check_experts(checkpoint: Checkpoint) -> None:
    """Check that all experts have the same tensors: `transformers` merges them, and cannot say which one is wrong."""
    found = defaultdict(dict)  # tensor of an expert, such as "w1.weight" -> (experts of a layer, index) -> entry
    for entry in checkpoint.entries.values():
        if match := _EXPERT.fullmatch(entry.name):
            found[match[3]][match[1], int(match[2])] = entry
    experts = {(layer, index) for one_per_expert in found.values() for layer, index in one_per_expert}
    if not experts:
        return
    layers, count = {layer for layer, _ in experts}, 1 + max(index for _, index in experts)
    every = {(layer, index) for layer in layers for index in range(count)}
    for part, one_per_expert in found.items():
        _check_present(checkpoint, [f"{layer}.{index}.{part}" for layer, index in every - one_per_expert.keys()])
        ((usual, _),) = Counter(entry.shape for entry in one_per_expert.values()).most_common(1)
        wrong = [(entry.name, entry.shape, usual) for entry in one_per_expert.values() if entry.shape != usual]
        if wrong:
            check_shapes(wrong, checkpoint.file_of(min(wrong)[0]))


__all__ = ["check_complete", "empty_model", "explain_config", "read_config"]
