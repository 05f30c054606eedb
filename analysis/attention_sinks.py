"""Attention sinks: the share of the attention over the sequence that goes to its first token, layer by layer."""

import math
import threading
from collections.abc import Generator, Iterable
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from .axis import decoder_of
from .batches import Batch, as_batches, mask_of
from .measurement import DrawableMeasurement
from .watching import family_member, measuring, run

_ATTENTIONS = ("self_attn", "attention")  # names of the attention module in the decoder layers of backbones


@dataclass(frozen=True, eq=False, repr=False)
class AttentionSinks(DrawableMeasurement):
    """The attention weight on the first token, by decoder layer: a mean over the tokens after it.

    Attributes:
        mean: The mean over heads, `[layers]` in float64; NaN where attention is linear and has no weights.
        strongest: The weight of the head that gives the first token most, `[layers]` in float64; NaN likewise.
        uniform: The weight on the first token if every token attended equally to all tokens up to itself.
    """

    mean: Tensor
    strongest: Tensor
    uniform: float


def attention_sinks(model: PreTrainedModel, batches: Batch | Iterable[Batch]) -> AttentionSinks:
    """Measure the attention weight on the first token over the batches.

    The model uses the `eager` implementation of attention meanwhile, since others do not return their weights. No other
    thread may run the model during this call.

    Args:
        model: A causal language model of the family, or a standard one on a backbone in `BACKBONES`.
        batches: One or several, each token ids `[batch, seq]` or the mapping that a tokenizer returns. The first token
            of a sequence is the first that its attention mask keeps.

    Returns:
        The weights by layer, over all tokens but the first of each sequence.

    Raises:
        ValueError: There is no batch, or no sequence has two tokens; or the model's results are not finite.
    """
    model = family_member(model)
    layers = decoder_of(model).depth_layers
    totals: list[Tensor | None] = [None] * len(layers)  # sums over tokens, [heads] for each layer
    uniform, num_queries, thread = 0.0, 0, threading.get_ident()
    with measuring(model), _eager(model), torch.no_grad():
        for batch in as_batches(batches):
            mask = mask_of(batch)
            first, later = mask.int().argmax(1), mask & (mask.cumsum(1) > 1)  # [batch], [batch, seq]

            # `first` and `later` are bound as defaults, since the loop gives them other values for the next batch.
            def add_weights(index: int, result: Any, first: Tensor = first, later: Tensor = later) -> None:
                if threading.get_ident() != thread:  # a pass of another thread
                    return
                weights = result[1] if isinstance(result, tuple) and len(result) > 1 else None
                if not (isinstance(weights, Tensor) and weights.ndim == 4):  # linear attention has no weights
                    return
                # The weights are [batch, heads, queries, keys].
                on_first = weights[torch.arange(len(first)), :, :, first]  # [batch, heads, queries]
                total = on_first.transpose(1, 2)[later.to(weights.device)].double().sum(0).cpu()  # [heads]
                before = totals[index]
                totals[index] = total if before is None else before + total

            with ExitStack() as hooks:
                for index, layer in enumerate(layers):
                    for attention in (getattr(layer, name) for name in _ATTENTIONS if hasattr(layer, name)):
                        handle = attention.register_forward_hook(
                            lambda *call, index=index, add_weights=add_weights: add_weights(index, call[-1])
                        )
                        hooks.callback(handle.remove)
                run(model, batch)
            num_queries += int(later.sum())
            uniform += float((1 / mask.cumsum(1).double())[later].sum())
    if not num_queries:
        raise ValueError("no sequence of at least two tokens was given.")
    missing = torch.tensor(math.nan, dtype=torch.float64)
    mean = torch.stack([missing if total is None else total.mean() / num_queries for total in totals])
    strongest = torch.stack([missing if total is None else total.max() / num_queries for total in totals])
    return AttentionSinks(mean, strongest, uniform / num_queries)


@contextmanager
def _eager(model: PreTrainedModel) -> Generator[None]:
    """Use the `eager` implementation of attention within the block."""
    before = model.config._attn_implementation or "eager"
    model.set_attn_implementation("eager")
    try:
        yield
    finally:
        model.set_attn_implementation(before)


__all__ = ["AttentionSinks", "attention_sinks"]
