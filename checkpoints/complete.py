"""Check that a checkpoint holds every tensor of its configuration's model, in its shape, without loading weights.

The model is made on the meta device, and `transformers` "loads" the names, dtypes and shapes that the headers of the
files give. Its loading report then says what is missing, misshapen or unused.
"""

import re
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping
from itertools import islice

import torch
from transformers import AutoModel, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.utils import CONFIG_NAME

from attnres import AttnResKimiK3Config, ResidualConfig
from attnres.loading_attnres import check_shapes
from attnres.mtp_attnres import MultiTokenPrediction
from attnres.residual_attnres import residual_tensors
from attnres.utils.errors import about
from attnres.utils.quiet import quiet_transformers
from attnres.value_residual_attnres import value_residual_tensors

from . import kimi_k3
from .checkpoint import Checkpoint
from .shards import DTYPES

# A tensor of one expert: "model.layers.0.mlp.experts", the expert's number, and its part, such as "w1.weight".
_EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(.+)")
_MAX_NAMED = 10  # tensors in one message


def empty_model(config: PreTrainedConfig, checkpoint: Checkpoint) -> PreTrainedModel:
    """Return the model of a configuration on the meta device.

    Args:
        config: The configuration.
        checkpoint: The headers of the weights. They show whether the model has a head.

    Returns:
        A causal language model, or its decoder if the checkpoint is that of a decoder alone.
    """
    with about(checkpoint.config_path), torch.device("meta"):
        if isinstance(config, AttnResKimiK3Config):
            # A later `transformers` may give the Auto classes a Kimi K3 of its own.
            return kimi_k3.model_class(kimi_k3.has_head(checkpoint, config))(config)
        model = AutoModelForCausalLM.from_config(config)
        # A decoder that was saved by itself has tensors without the prefix that they have in a model with a head.
        prefix = f"{model.base_model_prefix}."
        heads = {name for name, _ in model.named_parameters() if not name.startswith(prefix)}
        if not any(name.startswith(prefix) or name in heads for name in checkpoint.entries):
            model = AutoModel.from_config(config)
    if isinstance(config, ResidualConfig):
        MultiTokenPrediction.fit(model, checkpoint.entries)
    return model


def check_complete(
    checkpoint: Checkpoint, model: PreTrainedModel, config: PreTrainedConfig, added: Collection[str] = ()
) -> frozenset[str]:
    """Check that a checkpoint holds all tensors of a model in their shapes, and return the names of unused tensors.

    `config.tie_word_embeddings` becomes False if the checkpoint has another tensor for the head than for the embedding.
    `transformers` then ties nothing, whatever the configuration says, but other programs follow the configuration.

    Args:
        checkpoint: The headers of the weights.
        model: The model of [`empty_model`].
        config: The configuration that it was made of.
        added: The names of the model's tensors that will be written beside the checkpoint.

    Returns:
        The names of the checkpoint's tensors that the model does not use.

    Raises:
        FileNotFoundError, RuntimeError: A tensor is missing or has another shape; the message names it and the file.
    """
    for target, source in model.all_tied_weights_keys.items():
        if {target, source} <= checkpoint.entries.keys() and not checkpoint.has_same_bytes(target, source):
            config.tie_word_embeddings = False
    entries = checkpoint.entries
    ignored = model._keys_to_ignore_on_load_unexpected or ()
    unused = {name for name in entries if any(re.search(pattern, name) for pattern in ignored)}
    if isinstance(config, AttnResKimiK3Config) and kimi_k3.is_released(checkpoint, config):
        return kimi_k3.unused_tensors(checkpoint, config)
    needed = residual_tensors(model).keys() | value_residual_tensors(model).keys()
    _check_present(checkpoint, needed - entries.keys() - set(added))
    # Quantised weights have other names and shapes than their model's: their quantiser checks them.
    if getattr(config, "quantization_config", None) is not None:
        return frozenset(unused)
    report = loading_report(checkpoint, model, added)
    _check_present(checkpoint, report["missing_keys"])
    if report["mismatched_keys"]:
        check_shapes(report["mismatched_keys"], checkpoint.file_of(min(report["mismatched_keys"])[0]))
    return frozenset(unused | (entries.keys() & report["unexpected_keys"]))


def loading_report(
    checkpoint: Checkpoint, model: PreTrainedModel, added: Collection[str] = ()
) -> Mapping[str, Collection]:
    """Return the report of loading the names, dtypes and shapes of a checkpoint, without their values.

    Args:
        checkpoint: The headers of the weights, which must not be quantised.
        model: The model of the checkpoint's configuration, on the meta device.
        added: The names of the model's tensors that will be written beside the checkpoint.

    Returns:
        The report of `from_pretrained(..., output_loading_info=True)`: `missing_keys`, `mismatched_keys` and others.

    Raises:
        FileNotFoundError, RuntimeError: Tensors that `transformers` merges or splits do not fit each other.
    """
    config = model.config
    if isinstance(config, AttnResKimiK3Config) and kimi_k3.is_released(checkpoint, config):
        unused = kimi_k3.unused_tensors(checkpoint, config)  # raises if a tensor is missing or misshapen
        return {"missing_keys": set(), "mismatched_keys": set(), "unexpected_keys": unused}
    _check_experts(checkpoint)
    # A tensor whose dtype is not in `DTYPES` is not a weight, so its name and shape are enough: its dtype may be wrong.
    state = {
        name: torch.empty(entry.shape, dtype=DTYPES.get(entry.dtype), device="meta")
        for name, entry in checkpoint.entries.items()
    }
    state |= {name: tensor for name, tensor in model.named_parameters() if name in added}
    try:
        with quiet_transformers():
            # The family's `from_pretrained` names the source in its errors. There is none here, so the base class's
            # method is called.
            _, report = PreTrainedModel.from_pretrained.__func__(
                type(model),
                None,
                config=model.config,
                state_dict=state,
                device_map="meta",
                ignore_mismatched_sizes=True,
                output_loading_info=True,
            )
    except RuntimeError as error:
        raise RuntimeError(f"the tensors of {checkpoint.folder} do not fit its {CONFIG_NAME}: {error}") from error
    return report


def _check_present(checkpoint: Checkpoint, missing: Collection[str]) -> None:
    if missing:
        raise _incomplete(checkpoint, sorted(missing), len(missing))


def _incomplete(checkpoint: Checkpoint, names: Iterable[str], count: int) -> FileNotFoundError:
    """Return the error that `count` tensors are missing. It names the first of them."""
    shown = [f"`{name}`" for name in islice(names, _MAX_NAMED)]
    if count > _MAX_NAMED:
        shown.append(f"and {count - _MAX_NAMED} more")
    return FileNotFoundError(f"{checkpoint.folder} is incomplete: it lacks {', '.join(shown)}.")


def _check_experts(checkpoint: Checkpoint) -> None:
    """Check that all experts have the same tensors: `transformers` merges them, and does not name a wrong one."""
    parts = defaultdict(dict)  # part of an expert, such as "w1.weight" -> (experts of a layer, number) -> entry
    for entry in checkpoint.entries.values():
        if match := _EXPERT.fullmatch(entry.name):
            parts[match[3]][match[1], int(match[2])] = entry
    experts = {expert for entries in parts.values() for expert in entries}
    if not experts:
        return
    layers, count = sorted({layer for layer, _ in experts}), 1 + max(number for _, number in experts)
    for part, entries in parts.items():
        # An expert's number is part of a name in the file, so it may be huge. The missing names are generated one by
        # one as the message takes them, and no list of that length is made.
        pairs = ((layer, number) for layer in layers for number in range(count))
        missing = (f"{layer}.{number}.{part}" for layer, number in pairs if (layer, number) not in entries)
        if len(entries) < len(layers) * count:
            raise _incomplete(checkpoint, missing, len(layers) * count - len(entries))
        ((usual_shape, _),) = Counter(entry.shape for entry in entries.values()).most_common(1)
        wrong = [(e.name, e.shape, usual_shape) for e in entries.values() if e.shape != usual_shape]
        if wrong:
            check_shapes(wrong, checkpoint.file_of(min(wrong)[0]))


__all__ = ["check_complete", "empty_model", "loading_report"]
