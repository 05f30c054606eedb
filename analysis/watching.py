"""Passes of a model in which every read and write of its residual connections is seen, or changed.

A residual connection reads the input of a sublayer from a state that flows through the depth, and writes the sublayer's
output to that state. All measurements of the depth stand between the model and these two operations (`watched`).
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from accelerate import dispatch_model
from torch import Tensor, nn
from transformers import PreTrainedModel

from attnres import BACKBONES
from attnres.conversion import retrofit

from .batches import Batch, inputs_of, predicted_mask

# Only one measurement runs at a time in a process, since each replaces methods of modules and puts them back.
_MEASURING = threading.RLock()
# The module of the hooks by which `transformers` records outputs. They do nothing unless a call asks for outputs.
_OUTPUT_RECORDER = "transformers.utils.output_capturing"


def connections_of(model: nn.Module) -> list[nn.Module]:
    """Return the residual connections of a model, in no particular order."""
    # Compared by name, since a checkpoint loaded with `trust_remote_code=True` has its own copy of the class.
    return [
        module for module in model.modules() if any(c.__name__ == "ResidualConnection" for c in type(module).__mro__)
    ]


def family_member(model: PreTrainedModel) -> PreTrainedModel:
    """Return the model itself if it is of the family, else a family member that computes the same with its weights.

    Args:
        model: A model of the family, or a standard causal language model on a backbone that the family knows.

    Returns:
        A model with residual connections. Made from a standard model, it shares its tensors and has the standard
        residual stream.

    Raises:
        ValueError: The model is not of the family and cannot become a member: its backbone is not known, it is
            quantised, offloaded or not a causal language model, or it has an adapter or hooks.
    """
    if connections_of(model):
        return model
    model = getattr(model, "_orig_mod", model)  # the module inside the wrapper of `torch.compile`
    if hasattr(model, "peft_config"):
        raise ValueError("a standard model must not have an adapter to be inspected: call `merge_and_unload` first.")
    hooks = [
        hook
        for module in model.modules()
        for hook in (*module._forward_hooks.values(), *module._forward_pre_hooks.values())
    ]
    # A pass of the member calls other modules than these, so it would skip their hooks without a word.
    if any(getattr(hook, "__module__", None) != _OUTPUT_RECORDER for hook in hooks):
        raise ValueError(
            f"{type(model).__name__} has hooks, which would not be called: remove them, or inspect "
            '`attnres.conversion.retrofit(model, "standard")` and put them there.'
        )
    if model.config.model_type not in BACKBONES:
        raise ValueError(
            f"the model type {model.config.model_type!r} cannot be inspected: it must be of the family or one of its "
            f"backbones, {', '.join(map(repr, BACKBONES))}. `attnres.add_backbone` brings the family to others."
        )
    member = retrofit(model, "standard")
    places = getattr(model, "hf_device_map", {})
    return dispatch_model(member, places) if len(set(places.values())) > 1 else member


@contextmanager
def measuring(model: nn.Module) -> Iterator[None]:
    """Keep the model in evaluation mode and its compiled parts uncompiled within the block.

    Args:
        model: The model to measure. The mode of each of its modules is restored at the end.
    """
    with _MEASURING:
        training = [module for module in model.modules() if module.training]
        try:
            model.eval()
            # Compiled code does not call the methods that `watched` replaces.
            with torch.compiler.set_stance("force_eager"):
                yield
        finally:
            for module in training:
                module.training = True


@contextmanager
def watched(
    model: nn.Module,
    read: Callable[..., tuple[Tensor, Tensor | None, Any]] | None = None,
    write: Callable[..., Any] | None = None,
) -> Iterator[None]:
    """Put `read` and `write` between the model and its connections within the block, in this thread.

    Within the block, connections are read one by one: the inference plan, which would read in their place, is off.

    Args:
        model: A model of the family.
        read: Called for every read as `read(connection, original, state, *norm)`, in the order of depth. `original`
            is the method that it replaces; `norm` is the weight of the key norm, if the connection takes one. It
            returns what `original(state, *norm)` returns: the input `[batch, seq, hidden]`, the depth weights
            `[sources, batch, seq]` or `None`, and the state. `None` leaves reads as they are.
        write: Called for every write as `write(connection, original, state, output)`. It returns the new state, as
            `original(state, output)` does. `None` leaves writes as they are.
    """
    thread = threading.get_ident()

    def call(replacement: Callable[..., Any], connection: nn.Module, original: Callable[..., Any], *args: Any) -> Any:
        # Another thread may run the same model meanwhile. Its passes are not watched.
        if threading.get_ident() != thread:
            return original(*args)
        return replacement(connection, original, *args)

    with _MEASURING, ExitStack() as stack:
        for connection in connections_of(model):
            # `accelerate` wraps `forward` in its hooks and keeps the wrapped method under this name. Replacing the
            # inner one lets the hooks load offloaded tensors before `read`, and move what `read` returns.
            forward = "_old_forward" if hasattr(connection, "_old_forward") else "forward"
            for name, replacement in ((forward, read), ("write", write)):
                if replacement is not None:
                    stack.enter_context(_replaced(connection, name, partial(call, replacement, connection)))
        yield


def run(model: PreTrainedModel, batch: Batch, **kwargs: Any) -> Any:
    """Run one forward pass over a batch and check that its result is finite.

    Args:
        model: The model to run.
        batch: Token ids `[batch, seq]`, or a mapping with `input_ids` among others. It is moved to the model's device.
        kwargs: Other arguments of the model.

    Returns:
        The outputs of the model.

    Raises:
        ValueError: The logits, or the last hidden state, hold NaN or infinity. The message names the first weight that
            does, if there is one.
    """
    inputs, device = inputs_of(batch), model.device
    # The device is "meta" where the model's first weight is offloaded. Hooks move the inputs then.
    if device.type != "meta":
        inputs = {name: value.to(device) for name, value in inputs.items()}
    outputs = model(**inputs, use_cache=False, return_dict=True, **kwargs)
    result = outputs.logits if "logits" in outputs else outputs.last_hidden_state
    if not result.isfinite().all():
        broken = (name for name, tensor in model.named_parameters() if not (tensor.is_meta or tensor.isfinite().all()))
        weight = next(broken, None)
        why = f"`{weight}` holds values that are not finite" if weight else f"they overflow in {model.dtype}"
        raise ValueError(f"the results of {type(model).__name__} are not finite: {why}.")
    return outputs


def summed_loss(model: PreTrainedModel, batch: Batch) -> Tensor:
    """Run one forward pass and return the loss of all predicted tokens together, in nats.

    Args:
        model: A causal language model.
        batch: Token ids `[batch, seq]`, or a mapping with `input_ids` among others.

    Returns:
        The sum over tokens of the cross entropy, a scalar in float32 or wider. Losses of a router are not in it.

    Raises:
        ValueError: The model is not a causal language model, or its results are not finite.
    """
    logits = getattr(run(model, batch), "logits", None)
    if logits is None or logits.ndim != 3:
        raise ValueError(f"{type(model).__name__} predicts no tokens: load it with AutoModelForCausalLM.")
    # The logits of a token predict the token after it.
    mask, ids = predicted_mask(batch)[:, 1:].to(logits.device), inputs_of(batch)["input_ids"].to(logits.device)
    wide = torch.promote_types(logits.dtype, torch.float32)
    return F.cross_entropy(logits[:, :-1][mask].to(wide), ids[:, 1:][mask], reduction="sum")


@contextmanager
def _replaced(module: nn.Module, name: str, replacement: Callable[..., Any]) -> Iterator[None]:
    """Replace a method of one module within the block; the replacement gets the method before its arguments."""
    original, is_on_instance = getattr(module, name), name in vars(module)
    setattr(module, name, partial(replacement, original))
    try:
        yield
    finally:
        if is_on_instance:
            setattr(module, name, original)
        else:
            delattr(module, name)


__all__ = ["connections_of", "family_member", "measuring", "run", "summed_loss", "watched"]
