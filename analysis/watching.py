"""Record or change every read and write of a model's residual connections during its forward passes.

A residual connection reads the input of a sublayer from a state that flows through the depth, and writes the sublayer's
output to that state. All measurements of the depth intercept these two operations by `watched`.
"""

import threading
from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, TypeGuard

import torch
import torch.nn.functional as F
from accelerate import dispatch_model
from torch import Tensor, nn
from transformers import PreTrainedModel

from attnres import BACKBONES
from attnres.conversion.retrofit import check_in_memory, retrofit_part
from attnres.residual_attnres import ResidualConnection

from .batches import Batch, inputs_of, predicted_mask

# Only one measurement runs at a time in a process, since each replaces methods of modules and puts them back.
_MEASURING = threading.RLock()
# The module of the hooks by which `transformers` records outputs. They do nothing unless a call requests outputs.
_OUTPUT_RECORDER = "transformers.utils.output_capturing"


def _is_connection(module: nn.Module) -> TypeGuard[ResidualConnection]:
    """Return whether a module is a residual connection."""
    # Compared by name, since a checkpoint loaded with `trust_remote_code=True` has its own copy of the class.
    return any(parent.__name__ == ResidualConnection.__name__ for parent in type(module).__mro__)


def connections_of(model: nn.Module) -> list[ResidualConnection]:
    """Return the residual connections of a model, in no particular order."""
    return list(filter(_is_connection, model.modules()))


def family_member(model: PreTrainedModel) -> PreTrainedModel:
    """Return a model of the family itself. For a standard model, make a family member that computes the same.

    Args:
        model: A model of the family, or a standard causal language model on a backbone in `BACKBONES`.

    Returns:
        A model with residual connections. The member for a standard model shares that model's tensors and has the
        standard residual stream.

    Raises:
        ValueError: The model is not of the family and cannot become a member: its backbone is not known, it is
            quantised, offloaded or not a causal language model, or it has an adapter or hooks.
    """
    if connections_of(model):
        return model
    inside = getattr(model, "_orig_mod", None)  # the module inside the wrapper of `torch.compile`
    if isinstance(inside, PreTrainedModel):
        model = inside
    if hasattr(model, "peft_config"):
        raise ValueError("a standard model with an adapter cannot be inspected: call `merge_and_unload` first.")
    hooks = [
        hook
        for module in model.modules()
        for hook in (*module._forward_hooks.values(), *module._forward_pre_hooks.values())
    ]
    # A pass of the member calls other modules, so it would skip these hooks silently.
    if any(getattr(hook, "__module__", None) != _OUTPUT_RECORDER for hook in hooks):
        raise ValueError(
            f"{type(model).__name__} has hooks, which would not be called: remove them, or inspect "
            '`attnres.conversion.retrofit(model, "standard")` and register them there.'
        )
    if model.config.model_type not in BACKBONES:
        raise ValueError(
            f"the model type {model.config.model_type!r} cannot be inspected: it must be one of "
            f"{', '.join(map(repr, BACKBONES))}, or of the family. `attnres.add_backbone` adds another backbone."
        )
    check_in_memory(model)
    member = retrofit_part(model, "standard")
    # The member's modules are new, so `accelerate` must place them again.
    device_map = vars(model).get("hf_device_map", {})
    if len(set(device_map.values())) > 1:
        dispatch_model(member, device_map)
    return member


@contextmanager
def measuring(model: nn.Module) -> Generator[None]:
    """Put the model into evaluation mode and turn compiled code off within the block.

    Args:
        model: The model to measure. Each of its modules returns to its own mode at the end.
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
) -> Generator[None]:
    """Replace the read and the write of all residual connections within the block, for passes of this thread.

    The inference plan, which reads without calling the connections, is off within the block.

    Args:
        model: A model of the family.
        read: Called for every read as `read(connection, original, state, *norm)`, in the order of depth. `original` is
            the replaced method; `norm` is the weight of the key norm, if the connection takes one. Like
            `original(state, *norm)`, it must return the input `[batch, seq, hidden]`, the depth weights
            `[sources, batch, seq]` or `None`, and the state. `None` leaves reads as they are.
        write: Called for every write as `write(connection, original, state, output)`. Like `original(state, output)`,
            it must return the new state. `None` leaves writes as they are.
    """
    thread = threading.get_ident()

    def call(
        replacement: Callable[..., Any], connection: ResidualConnection, original: Callable[..., Any], *args: Any
    ) -> Any:
        # Another thread may run the same model meanwhile. Its passes must stay as they are.
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
            holds NaN or infinity, if there is one.
    """
    inputs, device = inputs_of(batch), model.device
    # The device is "meta" if the model's first weight is offloaded. Then hooks move the inputs.
    if device.type != "meta":
        inputs = {name: value.to(device) for name, value in inputs.items()}
    outputs = model(**inputs, use_cache=False, return_dict=True, **kwargs)
    result = outputs.logits if "logits" in outputs else outputs.last_hidden_state
    if not result.isfinite().all():
        broken = (name for name, tensor in model.named_parameters() if not (tensor.is_meta or tensor.isfinite().all()))
        weight = next(broken, None)
        reason = f"`{weight}` holds values that are not finite" if weight else f"they overflow in {model.dtype}"
        raise ValueError(f"the results of {type(model).__name__} are not finite: {reason}.")
    return outputs


def summed_loss(model: PreTrainedModel, batch: Batch) -> Tensor:
    """Run one forward pass and return the loss in nats, summed over all predicted tokens.

    Args:
        model: A causal language model.
        batch: Token ids `[batch, seq]`, or a mapping with `input_ids` among others.

    Returns:
        The sum of the cross entropy, a scalar in float32 or wider, without the losses of a router.

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
def _replaced(module: nn.Module, name: str, replacement: Callable[..., Any]) -> Generator[None]:
    """Replace a method of one module within the block. The replacement is called with the method as first argument."""
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
