"""Attention sinks: how much of the attention over the sequence goes to its first token, layer by layer."""

import math
import os
import threading
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from .names import Measurement, decoder_of
from .watching import Batch, family_member, mask_of, measuring, run, several

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_ATTENTIONS = ("self_attn", "attention")  # in a decoder layer, what mixes tokens


@dataclass(frozen=True, eq=False, repr=False)
class AttentionSinks(Measurement):
    """The attention weight on the first token, a mean over the tokens after it, by decoder layer.

    Attributes:
        mean: over heads too, `[layers]` in float64; NaN where a layer's attention is linear and has no weights.
        strongest: of the head that gives it most, likewise.
        uniform: what it would be if every token attended to all up to itself alike.
    """

    mean: Tensor
    strongest: Tensor
    uniform: float

    def plot(self, path: str | os.PathLike | None = None) -> "Figure":
        """Draw them by layer; see [`attnres.analysis.figures.draw_sinks`]."""
        from .figures import draw_sinks, finish

        return finish(draw_sinks({"": self}), path)


def attention_sinks(model: PreTrainedModel, batches: Batch | Iterable[Batch]) -> AttentionSinks:
    """Measure the weight on the first token over the batches, which may be streamed.

    The attention is computed by the implementation `eager` meanwhile, since others do not show their weights. No other
    thread may run the model then.

    Args:
        model: a causal language model of the family, or a standard one on a backbone that the family knows.
        batches: one or several, each token ids `[batch, seq]` or what a tokenizer returns; of what an attention mask
            leaves, the first token of a sequence is meant.

    Raises:
        ValueError: there is no batch, or no sequence has two tokens; or what the model computes is not finite.
    """
    model = family_member(model)
    layers = decoder_of(model).layers
    totals: list[Tensor | None] = [None] * len(layers)
    uniform, queries, thread = 0.0, 0, threading.get_ident()
    with measuring(model), _eager(model), torch.no_grad():
        for batch in several(batches):
            mask = mask_of(batch)
            first, later = mask.int().argmax(1), mask & (mask.cumsum(1) > 1)

            def see(place: int, result: Any, first: Tensor = first, later: Tensor = later) -> None:
                if threading.get_ident() != thread:
                    return
                weights = result[1] if isinstance(result, tuple) and len(result) > 1 else None
                if not (isinstance(weights, Tensor) and weights.ndim == 4):
                    return  # linear attention
                on_first = weights[torch.arange(len(first)), :, :, first]  # [batch, heads, queries]
                total = on_first.transpose(1, 2)[later.to(weights.device)].double().sum(0).cpu()
                totals[place] = total if totals[place] is None else totals[place] + total

            with ExitStack() as stack:
                for place, layer in enumerate(layers):
                    for attention in (getattr(layer, name) for name in _ATTENTIONS if hasattr(layer, name)):
                        hook = attention.register_forward_hook(lambda *call, place=place, see=see: see(place, call[-1]))
                        stack.callback(hook.remove)
                run(model, batch)
            queries += int(later.sum())
            uniform += float((1 / mask.cumsum(1).double())[later].sum())
    if not queries:
        raise ValueError("no sequence of at least two tokens was given.")
    nothing = torch.tensor(math.nan, dtype=torch.float64)
    mean = torch.stack([nothing if total is None else total.mean() / queries for total in totals])
    strongest = torch.stack([nothing if total is None else total.max() / queries for total in totals])
    return AttentionSinks(mean, strongest, uniform / queries)


@contextmanager
def _eager(model: PreTrainedModel) -> Iterator[None]:
    before = model.config._attn_implementation
    model.set_attn_implementation("eager")
    try:
        yield
    finally:
        model.set_attn_implementation(before)


__all__ = ["AttentionSinks", "attention_sinks"]
