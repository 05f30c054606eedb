"""Load models only if their checkpoint holds all their tensors, in the shapes of the configuration.

`transformers` initialises missing tensors at random and reports it in a table of its log, so a command would go on with
another model than the user means. It also allocates tensors of the sizes in the configuration before it compares
shapes, so a wrong number there takes all memory. The functions here compare the headers of the files first.
"""

import math
import os
import warnings
from collections.abc import Callable, Collection, Generator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel
from transformers.utils import CONFIG_NAME

from attnres.loading_attnres import added_by_kind, check_added, check_shapes
from attnres.mtp_attnres import MultiTokenPrediction
from attnres.residual_attnres import FamilyWarning, is_count
from attnres.utils.errors import about
from attnres.utils.memory import free_memory
from attnres.utils.wording import counted, show_bytes

from .checkpoint import Checkpoint
from .complete import loading_report
from .kimi_k3 import check_kimi_k3, is_released
from .shards import DTYPES

# A model may have `_MAX_RATIO` values for each value in the files, or `_ALWAYS_ALLOWED` in total. New residual
# connections and buffers, such as tables of positions, are not in the files. They may be most of a small model.
_MAX_RATIO, _ALWAYS_ALLOWED = 4, 2**24
# Arguments of `from_pretrained` that do not change shapes. A configuration would keep them as fields.
_LOADING_ARGUMENTS = ("dtype", "torch_dtype", "device_map", "distributed_config")
# A function that gives the names of the tensors to load, for the whole model on the meta device.
Part = Callable[[PreTrainedModel], frozenset[str]]


def check_whole(model: nn.Module, missing: Collection[str], source: str, *, starts_anew: bool = False) -> None:
    """Raise ValueError if tensors of a model are missing in its checkpoint.

    Args:
        model: The model as it was loaded.
        missing: The names in `missing_keys` of the loading report.
        source: The directory or Hub id, for the message.
        starts_anew: Whether the tensors of its residual connections, gates and value residuals may be missing, and a
            whole layer for multi-token prediction. Loading then gives them their initial values.

    Raises:
        ValueError: A tensor is missing. The message names one.
    """
    if starts_anew:
        missing = set(missing).difference(*added_by_kind(model))
        ahead = MultiTokenPrediction.names(model)
        missing -= ahead if ahead <= missing else set()
    if missing := sorted(missing):
        others = f" and {counted(len(missing) - 1, 'other tensor')}" if len(missing) > 1 else ""
        raise ValueError(f"{source} is incomplete: it lacks `{missing[0]}`{others}. Restore it from its source.")


def check_memory(needed: int, subject: str, remedy: str) -> None:
    """Raise ValueError if more memory is needed than is free. The system might end the process otherwise.

    Args:
        needed: The number of bytes.
        subject: What needs them, for the message: `the weights of MODEL`.
        remedy: What to do, for the message.

    Raises:
        ValueError: Fewer bytes are free.
    """
    free = free_memory()
    if needed > free:
        raise ValueError(f"{subject} take {show_bytes(needed)} of memory, but {show_bytes(free)} are free. {remedy}")


def check_loadable(checkpoint: Checkpoint) -> None:
    """Check without building a model that `transformers` can load a checkpoint as the model that it is.

    The numbers in `config.json` are compared with the headers of the weights. A command calls this before it loads even
    the tokenizer of a checkpoint: for that too `transformers` reads the configuration, and makes lists of the lengths
    given there.

    Args:
        checkpoint: The checkpoint.

    Raises:
        OSError: A file is missing, truncated or damaged.
        ValueError: A number does not fit the weights, or a field of Kimi K3 is wrong. The message names the file, the
            field and its value. Or the directory holds Kimi K3, but the Auto classes would build another model from it.
    """
    if checkpoint.lacks_metadata:
        raise OSError(
            f"{checkpoint.weights_path} has no object `metadata`, so transformers cannot load the weights. Add "
            f'`"metadata": {{}}` to it, or let `attnres convert` write a whole index.'
        )
    checkpoint.check_sizes()
    check_kimi_k3(checkpoint)


def check_source_sizes(source: str | os.PathLike, revision: str | None = None) -> Checkpoint | None:
    """Open a checkpoint, and check it as [`check_loadable`] does.

    Args:
        source: The directory or Hub id. A repository on the Hub is downloaded.
        revision: The branch, tag or commit on the Hub.

    Returns:
        The checkpoint, or None if it has no headers to compare with. Loading the model then raises the error.

    Raises:
        OSError: As [`check_loadable`], or `source` is the directory of a training run.
        ValueError: As [`check_loadable`], or `source` is an adapter.
    """
    is_folder = os.path.isdir(source)
    try:
        checkpoint = Checkpoint.open(source, None if is_folder else revision)
    except FileNotFoundError:
        if is_folder:
            raise
        return None
    check_loadable(checkpoint)
    return checkpoint if checkpoint.has_weights else None


def _check_before_loading(
    auto_class: Any, source: str, *, starts_anew: bool = False, part: Part | None = None, **options: Any
) -> tuple[type[PreTrainedModel], frozenset[str]] | None:
    """Check on the meta device that the weights of a checkpoint are those of its configuration's model.

    A `FamilyWarning` names tensors that the model does not read, such as those of layers that were left out.

    Args:
        auto_class: A class with `from_config`, such as `AutoModelForCausalLM`.
        source: The directory or Hub id.
        starts_anew: See [`check_whole`].
        part: See [`load_whole`].
        options: The other arguments of `from_pretrained`. Fields of the configuration may be among them.

    Returns:
        The class of the model and the names that `part` gives; `None` if the whole model is to be loaded.

    Raises:
        OSError, RuntimeError, ValueError: A tensor is missing or has another shape, or the model is far larger than
            its weights or than the free memory. The message is one line that names the source or file, and the field
            or tensor.
    """
    revision, code = options.pop("revision", None), options.pop("trust_remote_code", False)
    # The shapes in a GGUF file are not known before it is loaded, and the checks read the folder itself, no subfolder.
    if options.get("gguf_file") is not None or options.get("subfolder"):
        return None
    if (checkpoint := check_source_sizes(source, revision)) is None:
        return None
    loading = {name: options.pop(name, None) for name in _LOADING_ARGUMENTS}
    if options.get("quantization_config") is None:
        options.pop("quantization_config", None)  # the one in `config.json` stays
    # Warnings about the configuration are repeated when the model is loaded.
    with about(checkpoint.config_path), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        # Two values, with `return_unused_kwargs`. The folder is local by now, so options about the Hub are not needed.
        loaded: Any = AutoConfig.from_pretrained(
            checkpoint.folder, trust_remote_code=code, return_unused_kwargs=True, **options
        )
        config: PreTrainedConfig = loaded[0]
        try:
            with torch.device("meta"):
                model = auto_class.from_config(config, trust_remote_code=code)
        except RuntimeError as error:
            reason = " ".join(str(error).split())
            raise ValueError(f"{checkpoint.folder / CONFIG_NAME} does not fit any model: {reason}") from error
    _check_total(model, checkpoint)
    if getattr(config, "quantization_config", None) is not None:
        return None  # its tensors have other names and shapes, which the quantiser checks
    names = None if part is None else part(model)
    if loading["distributed_config"] is None and loading["device_map"] in (None, "cpu", {"": "cpu"}):
        dtype: Any = loading["dtype"] or loading["torch_dtype"]
        dtype = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
        # Without a dtype, `transformers` takes that of the weights, which is hardly ever smaller than bfloat16.
        stored: Any = config.dtype
        size = (dtype or stored or torch.bfloat16).itemsize
        needed = sum(
            # Packed experts are bytes in every dtype.
            parameter.numel() * (size if parameter.is_floating_point() else parameter.itemsize)
            for name, parameter in model.named_parameters()
            if names is None or name in names
        )
        subject = f"the weights of {source}" if names is None else f"a stage's weights of {source}"
        check_memory(needed, subject, "Use a smaller model, or a machine with more memory.")
    report = loading_report(checkpoint, model)
    check_shapes(report["mismatched_keys"], source)
    # `transformers` reads layers for multi-token prediction, which follow the last one, only to generate by them.
    number: Any = getattr(config, "num_nextn_predict_layers", None)  # `transformers` does not check its type
    first = config.get_text_config().num_hidden_layers
    ahead = tuple(f"model.layers.{first + i}." for i in range(number if is_count(number) else 0))
    unread = sorted(name for name in report["unexpected_keys"] if not name.startswith(ahead))
    if unread and not is_released(checkpoint, config):  # Kimi K3 says itself that it leaves out the vision tower
        tensors = counted(len(unread), "tensor")
        message = (
            f"the model does not read {tensors} of {source}, such as `{unread[0]}`: see that its {CONFIG_NAME} fits."
        )
        warnings.warn(message, FamilyWarning, stacklevel=2)
    for added in added_by_kind(model):
        check_added(model, added, report["missing_keys"], source)
    check_whole(model, report["missing_keys"], source, starts_anew=starts_anew)
    # Missing tensors are drawn at random. In a part, they would get other numbers than in the whole model.
    return None if names is None or report["missing_keys"] else (type(model), names)


def _check_total(model: nn.Module, checkpoint: Checkpoint) -> None:
    """Raise ValueError if the model would have far more values than the files can hold."""
    entries, held = checkpoint.entries, sum(math.prod(entry.shape) for entry in checkpoint.entries.values())
    # A packed weight takes at least one bit.
    packed = any(not _is_float(entry.dtype) for entry in entries.values())
    allowed = max(8 * checkpoint.num_bytes if packed else _MAX_RATIO * held, _ALWAYS_ALLOWED)
    sizes = dict((*model.named_parameters(), *model.named_buffers()))
    total = sum(tensor.numel() for tensor in sizes.values())
    if total > allowed:
        largest = max(sizes, key=lambda name: sizes[name].numel())
        raise ValueError(
            f"{checkpoint.folder / CONFIG_NAME} does not fit the weights beside it: they have {held:,} values, "
            f"but its model has {total:,}, and `{largest}` would have shape {list(sizes[largest].shape)}. Use the "
            f"checkpoint's own {CONFIG_NAME}."
        )


def _is_float(dtype: str) -> bool:
    return dtype in DTYPES and DTYPES[dtype].is_floating_point


def load_whole(
    auto_class: Any, source: str, *, starts_anew: bool = False, part: Part | None = None, **options: Any
) -> PreTrainedModel:
    """Load a model by an Auto class, and check that nothing of it is missing.

    Args:
        auto_class: A class with `from_pretrained` and `from_config`, such as `AutoModelForCausalLM`.
        source: The directory or Hub id.
        starts_anew: See [`check_whole`].
        part: A function that gives the names of the tensors to load. The others are not read, and stay on the meta
            device; non-persistent buffers are made. Without it, and where the checkpoint is quantised, a GGUF file, or
            lacks tensors that start anew, all tensors are loaded.
        options: The other arguments of `from_pretrained`. Code that comes with the model runs only with
            `trust_remote_code=True`, and nobody is asked.

    Returns:
        The model.

    Raises:
        OSError, RuntimeError, ValueError: As [`_check_before_loading`], before memory is taken; or the checkpoint lacks
            tensors of the model. The message names one.
    """
    # Without this, `transformers` would ask whether it may run code that comes with the model.
    options.setdefault("trust_remote_code", False)
    chosen = _check_before_loading(auto_class, source, starts_anew=starts_anew, part=part, **options)
    with nullcontext() if chosen is None else reading_only(*chosen):
        model, report = auto_class.from_pretrained(source, **options, output_loading_info=True)
    check_whole(model, report["missing_keys"], source, starts_anew=starts_anew)
    return model


@contextmanager
def reading_only(model_class: type[PreTrainedModel], names: Collection[str]) -> Generator[None]:
    """Make `from_pretrained` of a class read only these tensors while the block runs.

    `from_pretrained` makes a model on the meta device, and reads the tensors that its `state_dict` names. There is no
    option to leave tensors out.
    """
    inherited: Any = model_class.state_dict

    def state_dict(self: PreTrainedModel, *args: Any, **kwargs: Any) -> dict[str, Any]:
        tensors = inherited(self, *args, **kwargs)
        return {name: tensor for name, tensor in tensors.items() if name in names}

    model_class.state_dict = state_dict
    try:
        yield
    finally:
        del model_class.state_dict


__all__ = [
    "Part",
    "check_memory",
    "check_loadable",
    "check_source_sizes",
    "check_whole",
    "load_whole",
    "reading_only",
]
