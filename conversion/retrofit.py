"""Retrofit a model in memory: give its weights another residual connection under which the function stays the same.

Each connection defines its own initial values. Attention residuals start with zero pseudo-queries, which give each of
the n sources of sublayer l the weight 1/n. With `scale="sum"` the sublayer therefore reads

    h_l = n * sum_i (1/n) s_i = v_0 + v_1 + ... + v_{l-1},

the standard residual stream, term by term and for every block size.
"""

import os
import warnings
from collections.abc import Collection, Generator
from contextlib import contextmanager
from copy import deepcopy
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, KimiLinearPreTrainedModel, PreTrainedModel

from attnres import AttnResPreTrainedModel, ResidualConfig
from attnres.checkpoints.checkpoint import Checkpoint
from attnres.checkpoints.whole import check_whole, load_whole, reading_only
from attnres.mtp_attnres import MtpLayer, MultiTokenPrediction
from attnres.residual_attnres import FamilyWarning
from attnres.utils.quiet import quiet_transformers

from .family import DEFAULT_CONNECTION, added_tensors, retrofit_config, start_added


def retrofit(
    model_or_path: PreTrainedModel | str | os.PathLike, residual: str = DEFAULT_CONNECTION, **options: Any
) -> PreTrainedModel:
    """Put other residual connections, by default attention residuals, into a standard causal language model.

    Args:
        model_or_path: A model, or the directory or Hub id of one, which is loaded in its stored dtype.
        residual: The name of the residual connection, a key of `attnres.CONNECTIONS`, or of a preset in
            `attnres.PRESETS`.
        options: Options of the connection. Attention residuals take one of `block_size` (S in sublayers: two per
            decoder layer, one where attention and MLP are parallel), `num_blocks` (8 by default) and `full=True`. They
            also take `scale`: `"sum"` by default, while `"mean"` is the same function only up to the epsilons of the
            norms. Every configuration field of the connection is an option too, such as `attn_res_gated=True`, and so
            is every field of attention gates and value residuals: `attention_gate="sdpa"` also adds gates to the
            attention, and `value_residual="standard"` mixes its values with those of the first layer.

    Returns:
        A model that computes the same function, with these connections at their initial values. It **shares** its
        backbone weights with the given model: training one changes the other. Its head is tied to the embedding if the
        two are one tensor in the given model, whatever that model's configuration says. Routing biases, which no
        gradient trains, are copied to float32 if the given model has them in 16 bits; a `FamilyWarning` says so.

    Raises:
        TypeError: `model_or_path` is neither a model of `transformers` nor a name, or wraps the model, as
            `torch.compile` and `DataParallel` do.
        ValueError: The backbone is not supported, has another residual connection already, is quantised, offloaded
            or on several devices; or the connection does not exist, cannot start as the standard one, or has no such
            option; or the head shares its tensor with a module other than the embedding, which no checkpoint can
            express; or the model has adapters or compiled parts inside.
        OSError, RuntimeError: The directory or repository is missing, damaged or incomplete.
    """
    if isinstance(model_or_path, str | os.PathLike):
        source = load_source(str(model_or_path), dtype="auto")
    else:
        source = model_or_path
    _check_plain(source, "a model, a directory or a Hub id")
    check_in_memory(source)
    device_map: Any = getattr(source, "hf_device_map", None) or {}
    devices = sorted(map(str, set(device_map.values())))
    if len(devices) > 1:
        raise ValueError(
            f"the model is spread over the devices {', '.join(devices)}, by hooks that a retrofit would lack. Retrofit "
            "its directory with `attnres convert`, or a model on one device, and load the result with `device_map`."
        )
    model = retrofit_part(source, residual, **options)
    _warn_of_rounding(model, source)
    return model


def check_in_memory(source: PreTrainedModel) -> None:
    """Raise unless a model holds all its parameters.

    Args:
        source: The model.

    Raises:
        ValueError: A parameter is offloaded or on the meta device.
    """
    if offloaded := next((name for name, parameter in source.named_parameters() if parameter.is_meta), None):
        raise ValueError(f"`{offloaded}` is offloaded or on the meta device; load the model without `device_map`.")


def retrofit_part(source: PreTrainedModel, residual: str = DEFAULT_CONNECTION, **options: Any) -> PreTrainedModel:
    """Retrofit a model of which this process may hold only some tensors, while the others are on the meta device.

    Args:
        source: The model. Each decoder layer is held or on the meta device as a whole.
        residual: As in [`retrofit`].
        options: As in [`retrofit`].

    Returns:
        As [`retrofit`]. Tensors of layers that are on the meta device are on it too. The others have the values that
        they have in a retrofit of the whole model.

    Raises:
        TypeError, ValueError: As in [`retrofit`].
    """
    _check_plain(source, "a model")
    config = config_for(source, residual, **options)
    _check_loaded(source)
    config.tie_word_embeddings = _is_tied(source)
    implementations = {
        "attn_implementation": source.config._attn_implementation,
        "experts_implementation": source.config._experts_implementation,
    }

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=source.dtype, **implementations)
    added = added_tensors(model, source.config)
    ahead = MultiTokenPrediction.names(model)
    _share_tensors(model, source, {*added, *ahead})
    if ahead:
        _load_layer_ahead(model, source, ahead)
    start_added(model, source.config, source.dtype)
    for module_name in {name.rpartition(".")[0] for name in added}:
        model.get_submodule(module_name).to(_device_beside(source, module_name))
    # `transformers` marks the modules that it has initialised, but not on the meta device. Without the mark, a later
    # `post_init()`, such as that of a model around this one, would draw the weights anew, and the source shares them.
    for module in model.modules():
        module._is_hf_initialized = True
    model.generation_config = source.generation_config
    return model.train(source.training)


def config_for(source: PreTrainedModel, residual: str = DEFAULT_CONNECTION, **options: Any) -> ResidualConfig:
    """Return the configuration of a model's retrofit, with a layer for multi-token prediction if its checkpoint has it.

    Args:
        source: The model.
        residual: As in [`retrofit`].
        options: As in [`retrofit`].

    Raises:
        ValueError: As in [`retrofit`].
    """
    config = retrofit_config(source.config, residual, **options)
    if MultiTokenPrediction.is_on(config):
        try:
            names = Checkpoint.open(source.name_or_path).entries if source.name_or_path else ()
        except (OSError, ValueError) as error:
            names = ()
            message = (
                f"the layer for multi-token prediction that the model's configuration names is left out, because "
                f"{source.name_or_path} cannot be read ({error}). Retrofit the directory to keep it."
            )
            warnings.warn(message, FamilyWarning, stacklevel=3)
        MultiTokenPrediction.fit_config(config, names)
    return config


def load_source(source: str, **options: Any) -> PreTrainedModel:
    """Load a standard causal language model to retrofit, with the tensors in float32 that the retrofit keeps so.

    Args:
        source: The directory or Hub id.
        options: The other arguments of [`attnres.checkpoints.whole.load_whole`].

    Returns:
        The model.

    Raises:
        OSError, RuntimeError, ValueError: As [`attnres.checkpoints.whole.load_whole`].
    """
    with _family_tensors_in_float32():
        return load_whole(AutoModelForCausalLM, source, **options)


@contextmanager
def _family_tensors_in_float32() -> Generator[None]:
    """Make standard Kimi Linear keep the same tensors in float32 as the family, while the block runs.

    Before transformers 5.24, loading a checkpoint in bfloat16 rounds its float32 routing biases. A retrofit would share
    the rounded tensors.
    """
    field = "_keep_in_fp32_modules_strict"
    before = getattr(KimiLinearPreTrainedModel, field)
    setattr(KimiLinearPreTrainedModel, field, getattr(AttnResPreTrainedModel, field))
    try:
        yield
    finally:
        setattr(KimiLinearPreTrainedModel, field, before)


def _check_plain(source: object, expected: str) -> None:
    """Raise unless an object is a model of `transformers` whose tensors have the names of its checkpoint.

    Args:
        source: The object.
        expected: What the caller accepts, for the message.

    Raises:
        TypeError: It is no such model, or wraps one.
        ValueError: The model has adapters or compiled parts inside.
    """
    kind = type(source).__name__
    modules = dict(source.named_modules()) if isinstance(source, nn.Module) else {}
    model = next((module for module in modules.values() if isinstance(module, PreTrainedModel)), None)
    if model is None:
        raise TypeError(f"retrofit takes {expected}, got an object of type {kind}. Load a model by `from_pretrained`.")
    # Adapters first: the model inside a `PeftModel` has its adapters too.
    if adapter := next((name for name, module in model.named_modules() if _package(module) == "peft"), None):
        peft_model = "model" if hasattr(source, "merge_and_unload") else "PeftModel.from_pretrained(BASE, ADAPTER)"
        raise ValueError(
            f"the {kind} has adapters inside, such as `{adapter}`. Merge them first, and retrofit the model that "
            f"`{peft_model}.merge_and_unload()` returns."
        )
    if model is not source:
        raise TypeError(
            f"retrofit takes {expected}, got an object of type {kind}, which wraps a model. Give that "
            f"{type(model).__name__} itself, as it was before `torch.compile` or another wrapper."
        )
    if compiled := next((name for name, module in modules.items() if hasattr(module, "_orig_mod")), None):
        raise ValueError(f"`{compiled}` of the model is compiled. Retrofit the model first, then call `torch.compile`.")


def _package(module: nn.Module) -> str:
    """Return the name of the package that defines the class of a module."""
    return type(module).__module__.partition(".")[0]


def _check_loaded(source: PreTrainedModel) -> None:
    """Raise ValueError unless a model is a causal language model whose weights are not quantised."""
    if not source.can_generate():
        raise ValueError(f"{type(source).__name__} is not a causal language model; load it as one.")
    if getattr(source, "hf_quantizer", None) is not None:
        raise ValueError(
            "the model is quantised; `attnres convert` retrofits its directory, which then loads quantised."
        )


def _is_tied(source: PreTrainedModel) -> bool:
    """Return whether the head and the embedding are one tensor, whatever the configuration says.

    If a checkpoint has a tensor for each, `transformers` loads both and ties nothing.

    Raises:
        ValueError: The head shares its tensor with another module.
    """
    head: Any = source.get_output_embeddings()
    embedding: Any = source.get_input_embeddings()
    for name, parameter in source.named_parameters(remove_duplicate=False):
        is_elsewhere = source.get_submodule(name.rpartition(".")[0]) not in (head, embedding)
        if is_elsewhere and _is_one(parameter, head.weight):
            raise ValueError(f"the head of the model is one tensor with `{name}`. Give the head a separate tensor.")
    return _is_one(head.weight, embedding.weight) and head.weight.shape == embedding.weight.shape


def _load_layer_ahead(model: Any, source: PreTrainedModel, names: set[str]) -> None:
    """Put the layer for multi-token prediction into a model, which the source's class has left in its checkpoint.

    Args:
        model: The retrofit, whose layer is on the meta device.
        source: The model that it is made from.
        names: The names of the layer's tensors in the model.

    Raises:
        ValueError: The checkpoint holds a part of the layer only.
    """
    layer: Any = MultiTokenPrediction.layer(model)
    if source.name_or_path:
        with quiet_transformers(), reading_only(type(model), names):
            config = deepcopy(model.config)
            options = {"config": config, "dtype": source.dtype, "output_loading_info": True}
            part, report = type(model).from_pretrained(source.name_or_path, **options)
        # A part of the layer would be drawn at random; the whole one may be, if it is to be trained.
        check_whole(part, names & {*report["missing_keys"]}, source.name_or_path, starts_anew=True)
        layer.load_state_dict(cast(MtpLayer, MultiTokenPrediction.layer(part)).state_dict(), assign=True)
    else:  # a new layer
        layer.to_empty(device="cpu").to(source.dtype)
        for module in layer.modules():
            model._init_weights(module)
    layer.to(source.device).requires_grad_(bool(model.config.mtp_loss_weight))


def _is_one(tensor: Tensor, other: Tensor) -> bool:
    """Return whether two tensors share their memory; on the meta device, where there is none, whether they are one."""
    return tensor is other or (not tensor.is_meta and tensor.data_ptr() == other.data_ptr())


def _share_tensors(model: Any, source: nn.Module, added: Collection[str]) -> None:
    """Put every tensor of `source` into `model`, whose tensors are on the meta device, under the same name."""
    shared = source.state_dict(keep_vars=True)
    # Parameters stay the same objects, so that training one model trains the other. Routing biases are buffers, which
    # training moves by steps that 16 bits would lose.
    for name in model.tensors_kept_in_float32().keys() & shared.keys():
        if not isinstance(shared[name], nn.Parameter):
            shared[name] = shared[name].to(torch.promote_types(shared[name].dtype, torch.float32))
    # `assign=True` below gives each shared parameter the requires_grad of the one it replaces.
    for name, parameter in model.named_parameters():
        if name in shared:
            parameter.requires_grad_(shared[name].requires_grad)
    incompatible = model.load_state_dict(shared, strict=False, assign=True)
    missing = sorted(set(incompatible.missing_keys) - set(added))
    if missing or incompatible.unexpected_keys:
        unexpected = incompatible.unexpected_keys
        raise ValueError(f"the backbone's tensors do not fit: missing {missing}, unexpected {unexpected}.")
    for name, buffer in source.named_buffers(remove_duplicate=False):
        # No checkpoint holds these buffers: frequencies of the rotary embedding, scale of the token embedding.
        if name not in shared:
            owner, _, key = name.rpartition(".")
            model.get_submodule(owner).register_buffer(key, buffer, persistent=False)
            # Plain attributes of dynamic rotary embeddings hold the length that their frequencies are for.
            numbers = {key: value for key, value in vars(source.get_submodule(owner)).items() if _is_number(value)}
            vars(model.get_submodule(owner)).update(numbers)


def _warn_of_rounding(model: Any, source: PreTrainedModel) -> None:
    """Warn if a retrofit holds a buffer in float32 that its source has in 16 bits, where it was probably rounded."""
    kept = model.tensors_kept_in_float32()
    for name, buffer in source.named_buffers():
        if name in kept and buffer.dtype != kept[name].dtype and buffer.any():  # zeros are the start, not rounded
            message = (
                f"`{name}` of the model is in {buffer.dtype}. If its checkpoint holds more digits, they were lost when "
                "it was loaded, and tokens may go to other experts. Give retrofit the directory or Hub id, "
                f"{source.name_or_path or 'not the model'}, which is then read in float32."
            )
            warnings.warn(message, FamilyWarning, stacklevel=3)
            return


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float, Tensor)) and not isinstance(value, bool)


def _device_beside(source: PreTrainedModel, name: str) -> torch.device:
    """Return the device of the decoder layer with the connection or gate `name`; of the last layer for the output's."""
    owner: Any = source.get_submodule(name.rpartition(".")[0])
    if hasattr(owner, "layers"):  # the decoder: the final norm follows its last layer
        owner = owner.layers[-1]
    return next(owner.parameters()).device


__all__ = ["check_in_memory", "load_source", "retrofit", "retrofit_part"]
