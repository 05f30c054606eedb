"""Does a checkpoint hold every tensor of its configuration's model, in its shape? No weight is loaded to see it."""

import re
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import islice
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.utils import CONFIG_NAME

from attnres.loading_attnres import check_shapes
from attnres.residual_attnres import residual_tensors
from attnres.utils.quiet import quiet_transformers

from .checkpoint import DTYPES, NAMED_WEIGHTS, Checkpoint, same_bytes
from .sizes import check_sizes
from .source_code import PIPELINES
from .source_files import check_text

_EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(.+)")
_MAX_NAMED = 10
# Which file has the weights, and which code belongs to them: of a result, neither is so.
_OF_THE_SOURCE = (NAMED_WEIGHTS, PIPELINES)


def read_config(checkpoint: Checkpoint) -> PreTrainedConfig:
    """The configuration of a checkpoint.

    Raises:
        OSError, ValueError: there is none, or it is damaged, or of no model type that `transformers` knows, or says
            that the model is far larger than its weights.
    """
    folder = checkpoint.folder
    if not (folder / CONFIG_NAME).exists():
        raise FileNotFoundError(f"{folder} has no {CONFIG_NAME}.")
    check_text(folder, folder / CONFIG_NAME)
    with explain_config(folder):
        check_sizes(folder / CONFIG_NAME, checkpoint)
        # Code that came with the checkpoint is not needed: a supported backbone is one of `transformers`.
        try:
            config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
        except ValueError as error:  # it names the value at most
            raise ValueError(f"{folder / CONFIG_NAME} cannot be used: {error}") from error
    for field in _OF_THE_SOURCE:
        vars(config).pop(field, None)
    return config


@contextmanager
def explain_config(folder: Path) -> Iterator[None]:
    """Turn whatever a wrong value in the configuration of `folder` makes fail into one kind of error.

    Raises:
        ValueError: naming the file.
    """
    try:
        yield
    except RecursionError as error:
        raise ValueError(f"{folder / CONFIG_NAME} is nested too deeply.") from error
    except (OSError, RuntimeError, ValueError):
        raise
    except Exception as error:
        raise ValueError(f"{folder / CONFIG_NAME} holds a wrong value ({type(error).__name__}: {error}).") from error


def empty_model(config: PreTrainedConfig, checkpoint: Checkpoint) -> PreTrainedModel:
    """The model of a configuration on the meta device: a causal language model, or its decoder if that is all there is.

    Saved by itself, a decoder has tensors without the prefix that they have in a model with a head.
    """
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
        prefix = f"{model.base_model_prefix}."
        heads = {name for name, _ in model.named_parameters() if not name.startswith(prefix)}
        if any(name.startswith(prefix) or name in heads for name in checkpoint.entries):
            return model
        return AutoModel.from_config(config)


def settle_ties(checkpoint: Checkpoint, model: PreTrainedModel, config: PreTrainedConfig) -> None:
    """Let `config` say that the head is not tied where the checkpoint has another tensor for it.

    `transformers` does not tie it then, whatever the configuration says, but who goes by the configuration would.
    """
    for target, source in model.all_tied_weights_keys.items():
        if {target, source} <= checkpoint.entries.keys() and not same_bytes(checkpoint, target, source):
            config.tie_word_embeddings = False


def check_complete(checkpoint: Checkpoint, model: PreTrainedModel, added: Collection[str] = ()) -> frozenset[str]:
    """Load the names, dtypes and shapes alone, as `transformers` would the weights, and see that they fit.

    Quantised weights have other names and shapes than their model's, and are left to their quantiser.

    Args:
        model: one of the checkpoint's configuration.
        added: the tensors of the model that are to be written beside the checkpoint.

    Returns:
        The tensors of the checkpoint that the model does not use.

    Raises:
        FileNotFoundError, RuntimeError: naming the tensors that are missing or have another shape, and where.
    """
    entries, config = checkpoint.entries, model.config
    ignored = model._keys_to_ignore_on_load_unexpected or ()
    unused = {name for name in entries if any(re.search(pattern, name) for pattern in ignored)}
    _check_present(checkpoint, set(residual_tensors(model)) - entries.keys() - set(added))
    if getattr(config, "quantization_config", None) is not None:
        return frozenset(unused)
    info = loading_report(checkpoint, model, added)
    _check_present(checkpoint, info["missing_keys"])
    if info["mismatched_keys"]:
        check_shapes(info["mismatched_keys"], checkpoint.file_of(min(info["mismatched_keys"])[0]))
    return frozenset(unused | (entries.keys() & info["unexpected_keys"]))


def loading_report(
    checkpoint: Checkpoint, model: PreTrainedModel, added: Collection[str] = ()
) -> Mapping[str, Collection]:
    """Return the report of loading the names, dtypes and shapes of a checkpoint, without their values.

    Args:
        checkpoint: Its weights are not quantised.
        model: A model of the configuration, on the meta device.
        added: As in [`check_complete`].

    Returns:
        What `from_pretrained` returns with `output_loading_info=True`: `missing_keys`, `mismatched_keys` and others.

    Raises:
        FileNotFoundError, RuntimeError: Tensors that `transformers` merges or splits do not fit each other.
    """
    _check_experts(checkpoint)
    # A dtype that is not known here is none of a weight: of the others, names and shapes are enough.
    state = {
        name: torch.empty(entry.shape, dtype=DTYPES.get(entry.dtype), device="meta")
        for name, entry in checkpoint.entries.items()
    }
    state |= {name: tensor for name, tensor in model.named_parameters() if name in added}
    try:
        with quiet_transformers():
            # Not the method of the model's own class: the family's raises errors that name the source, which is None.
            _, info = PreTrainedModel.from_pretrained.__func__(
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
    return info


def _check_present(checkpoint: Checkpoint, missing: Collection[str]) -> None:
    if missing:
        raise _incomplete(checkpoint, sorted(missing), len(missing))


def _incomplete(checkpoint: Checkpoint, names: Iterable[str], count: int) -> FileNotFoundError:
    """The error that so many tensors are missing, of which the first are named."""
    named = [f"`{name}`" for name in islice(names, _MAX_NAMED)]
    if count > _MAX_NAMED:
        named.append(f"and {count - _MAX_NAMED} more")
    return FileNotFoundError(f"{checkpoint.folder} is incomplete: it lacks {', '.join(named)}.")


def _check_experts(checkpoint: Checkpoint) -> None:
    """Check that all experts have the same tensors: `transformers` merges them, and cannot say which one is wrong."""
    found = defaultdict(dict)  # tensor of an expert, such as "w1.weight" -> (experts of a layer, index) -> entry
    for entry in checkpoint.entries.values():
        if match := _EXPERT.fullmatch(entry.name):
            found[match[3]][match[1], int(match[2])] = entry
    experts = {(layer, index) for one_per_expert in found.values() for layer, index in one_per_expert}
    if not experts:
        return
    layers, count = sorted({layer for layer, _ in experts}), 1 + max(index for _, index in experts)
    for part, one_per_expert in found.items():
        # The number of an expert is only a name in the file, which may say anything: nothing is made of that size.
        absent = (f"{x}.{i}.{part}" for x in layers for i in range(count) if (x, i) not in one_per_expert)
        if len(one_per_expert) < len(layers) * count:
            raise _incomplete(checkpoint, absent, len(layers) * count - len(one_per_expert))
        ((usual, _),) = Counter(entry.shape for entry in one_per_expert.values()).most_common(1)
        wrong = [(entry.name, entry.shape, usual) for entry in one_per_expert.values() if entry.shape != usual]
        if wrong:
            check_shapes(wrong, checkpoint.file_of(min(wrong)[0]))


__all__ = ["check_complete", "empty_model", "explain_config", "loading_report", "read_config", "settle_ties"]
