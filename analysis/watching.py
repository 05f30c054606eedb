"""The residual connections of a model seen at work: every read and every write of a pass, as it is or changed.

Also found here: what models and batches of token ids have in common, for all measurements of this folder.
"""

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from accelerate import dispatch_model
from torch import Tensor, nn
from transformers import PreTrainedModel

from attnres import BACKBONES
from attnres.accelerated.compat import is_silent
from attnres.conversion import retrofit

_MEASURING = threading.RLock()  # one measurement at a time: each replaces methods, and puts them back
Batch = Tensor | Mapping[str, Tensor]  # token ids [batch, seq], or what a tokenizer returns


def connections_of(model: nn.Module) -> list[nn.Module]:
    """The residual connections of a model, in no particular order; a checkpoint's own code has classes of its own."""
    return [
        module for module in model.modules() if any(c.__name__ == "ResidualConnection" for c in type(module).__mro__)
    ]


def family_member(model: PreTrainedModel) -> PreTrainedModel:
    """The model itself if it is of the family, else one that shares its weights and reads a standard residual stream.

    Raises:
        ValueError: the model is not of the family, and cannot become one: its backbone is not known, or it is
            quantised, offloaded, or no causal language model, or it has an adapter or hooks.
    """
    if connections_of(model):
        return model
    model = getattr(model, "_orig_mod", model)  # what `torch.compile` wraps
    if hasattr(model, "peft_config"):
        raise ValueError("a standard model with an adapter is no member of the family: `merge_and_unload` it first.")
    if any(not is_silent(hook) for module in model.modules() for hook in _hooks(module)):
        raise ValueError(
            f"{type(model).__name__} has hooks, which would not be called: remove them, or inspect "
            '`attnres.conversion.retrofit(model, "standard")` and put them there.'
        )
    if model.config.model_type not in BACKBONES:
        raise ValueError(
            f"the model type {model.config.model_type!r} cannot be inspected: it is not of the family, and none of its "
            f"backbones, {', '.join(map(repr, BACKBONES))}. `attnres.add_backbone` brings the family to others."
        )
    member = retrofit(model, "standard")
    places = getattr(model, "hf_device_map", {})
    return dispatch_model(member, places) if len(set(places.values())) > 1 else member


def _hooks(module: nn.Module) -> list[Callable[..., Any]]:
    return [*module._forward_hooks.values(), *module._forward_pre_hooks.values()]


@contextmanager
def measuring(model: nn.Module) -> Iterator[None]:
    """While this lasts, the model is in eval mode, and what is compiled of it runs as it is written."""
    with _MEASURING:
        training = [module for module in model.modules() if module.training]
        try:
            model.eval()
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
    """While this lasts, `read` and `write` stand between the model and its connections, in this thread.

    They are called as `read(connection, forward, state, norm)` and `write(connection, write, state, output)`, with what
    they stand for as second argument, and return in its place. In `read` the tensors of a connection are there, also
    where they are offloaded; its hooks see what `read` returns. What reads in place of connections without gradients
    does not, while they are watched.
    """
    thread = threading.get_ident()

    def between(see: Callable[..., Any], connection: nn.Module, own: Callable[..., Any], *args: Any) -> Any:
        if threading.get_ident() != thread:  # another thread may run the model meanwhile
            return own(*args)
        return see(connection, own, *args)

    with _MEASURING, ExitStack() as stack:
        for connection in connections_of(model):
            # Where `accelerate` has put its hooks around `forward`, what it calls between them.
            forward = "_old_forward" if hasattr(connection, "_old_forward") else "forward"
            for name, see in ((forward, read), ("write", write)):
                if see is not None:
                    stack.enter_context(_replaced(connection, name, partial(between, see, connection)))
        yield


@contextmanager
def _replaced(module: nn.Module, name: str, make: Callable[..., Any]) -> Iterator[None]:
    """While this lasts, a method of one module is another, which gets the method before its arguments."""
    own, is_own = getattr(module, name), name in vars(module)
    setattr(module, name, partial(make, own))
    try:
        yield
    finally:
        if is_own:
            setattr(module, name, own)
        else:
            delattr(module, name)


def run(model: PreTrainedModel, batch: Batch, **kwargs: Any) -> Any:
    """One pass over a batch.

    Raises:
        ValueError: what comes out is not finite; the message names the first weight that is not, if there is one.
    """
    inputs, device = inputs_of(batch), model.device
    if device.type != "meta":  # else its first weight is offloaded: hooks move what it is called with
        inputs = {name: value.to(device) for name, value in inputs.items()}
    outputs = model(**inputs, use_cache=False, return_dict=True, **kwargs)
    result = outputs.logits if "logits" in outputs else outputs.last_hidden_state
    if not result.isfinite().all():
        broken = (name for name, tensor in model.named_parameters() if not (tensor.is_meta or tensor.isfinite().all()))
        weight = next(broken, None)
        why = f"`{weight}` holds values that are not finite" if weight else f"they overflow in {model.dtype}"
        raise ValueError(f"what {type(model).__name__} computes is not finite: {why}.")
    return outputs


def inputs_of(batch: Batch) -> dict[str, Tensor]:
    """The tensors among what a model is called with.

    Raises:
        ValueError: the token ids are no tensor `[batch, seq]`.
    """
    given = batch if isinstance(batch, Mapping) else {"input_ids": batch}
    ids = given.get("input_ids")
    if not isinstance(ids, Tensor) or ids.ndim != 2:
        what = f"a tensor of shape {list(ids.shape)}" if isinstance(ids, Tensor) else type(ids).__name__
        raise ValueError(
            f"token ids must be a tensor [batch, seq], as of a tokenizer with return_tensors='pt', not {what}."
        )
    return {name: value for name, value in given.items() if isinstance(value, Tensor)}


def mask_of(batch: Batch) -> Tensor:
    """Which tokens count, `[batch, seq]`: all but those that the attention mask leaves out.

    Raises:
        ValueError: the mask is not `[batch, seq]`, or leaves out all of them.
    """
    inputs = inputs_of(batch)
    ids = inputs["input_ids"]
    mask = inputs.get("attention_mask", torch.ones_like(ids))
    if mask.shape != ids.shape:
        raise ValueError(f"the attention mask has shape {list(mask.shape)}, but must be [batch, seq].")
    if not mask.any():
        raise ValueError("the attention mask leaves out every token.")
    return mask.bool()


def predicted(batch: Batch) -> Tensor:
    """Which tokens are predicted, `[batch, seq]`: those that count, after one that counts."""
    mask = mask_of(batch)
    return torch.cat([torch.zeros_like(mask[:, :1]), mask[:, 1:] & mask[:, :-1]], 1)


def summed_loss(model: PreTrainedModel, batch: Batch) -> Tensor:
    """The loss of all predicted tokens together, in nats; without what experts' routers add to it in training.

    Raises:
        ValueError: the model is no causal language model, or what it computes is not finite.
    """
    logits = getattr(run(model, batch), "logits", None)
    if logits is None or logits.ndim != 3:
        raise ValueError(f"{type(model).__name__} predicts no tokens: load it with AutoModelForCausalLM.")
    mask, ids = predicted(batch)[:, 1:].to(logits.device), inputs_of(batch)["input_ids"].to(logits.device)
    wide = torch.promote_types(logits.dtype, torch.float32)
    return F.cross_entropy(logits[:, :-1][mask].to(wide), ids[:, 1:][mask], reduction="sum")


def sequences(batch: Batch) -> list[dict[str, Tensor]]:
    """Those of a batch that have a token that counts, each as a batch; what has one row is of all of them."""
    inputs, mask = inputs_of(batch), mask_of(batch)
    rows = (i for i in range(len(mask)) if mask[i].any())
    return [
        {
            name: value[i : i + 1] if value.ndim > 1 and len(value) == len(mask) else value
            for name, value in inputs.items()
        }
        for i in rows
    ]


def several(batches: Batch | Iterable[Batch]) -> Iterable[Batch]:
    """One batch, or several, as several."""
    return [batches] if isinstance(batches, (Tensor, Mapping, str)) else batches


__all__ = [
    "Batch",
    "connections_of",
    "family_member",
    "inputs_of",
    "mask_of",
    "measuring",
    "predicted",
    "run",
    "sequences",
    "several",
    "summed_loss",
    "watched",
]
