"""The learned depth attention of a model: how much each sublayer takes from each source, and how that differs by token.

h_l = sum_i a_{i->l} s_i         a_{i->l} one number for each token, source i and reader l, the output last
"""

import math
import os
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from .names import Depth, Measurement, depth_of, deviation
from .watching import Batch, family_member, mask_of, measuring, run, several, watched

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class NoDepthAttention(ValueError):
    """The residual connections of a model do not attend over the depth."""


@dataclass(frozen=True, eq=False, repr=False)
class DepthAttention(Measurement):
    """The depth weights of each reader, over the tokens of a text.

    Attributes:
        depth: the names of readers and sources, and the block size.
        mean: `[L + 1, sources]` in float64: a row for each sublayer in turn and one for the output. Rows sum to one,
            unless they are sigmoids; sources that a sublayer does not have are NaN, those that a window drops zero.
        spread: the standard deviation over tokens, likewise. Where the mean is uniform, weights may still differ from
            token to token.
        entropy: `H(a) / log K` with K sources, `[L + 1]`, a mean over tokens: 1 for uniform weights, 0 for one source;
            NaN where K is 1.
        distance: from uniform weights, `sum_i |a_i - 1/K| / 2` of shares that add up to one, `[L + 1]`, a mean over
            tokens: the share of the weight that would have to move.
        tokens: how many were counted.
    """

    depth: Depth
    mean: Tensor
    spread: Tensor
    entropy: Tensor
    distance: Tensor
    tokens: int

    @cached_property
    def num_sources(self) -> list[int]:
        """How many sources each reader has."""
        return (~self.mean.isnan()).sum(1).tolist()

    @property
    def embedding(self) -> Tensor:
        """The weight on the embedding, `[L + 1]`."""
        return self.mean[:, 0]

    @property
    def nearest(self) -> Tensor:
        """The weight on the last source, `[L + 1]`: the newest output or, in blocks, the sum that holds it."""
        return torch.stack([row[count - 1] for row, count in zip(self.mean, self.num_sources)])

    @property
    def rest(self) -> Tensor:
        """The weight on the sources between these two, `[L + 1]`; NaN where there are none."""
        return torch.stack(
            [
                row[1 : count - 1].sum() if count > 2 else row.new_tensor(math.nan)
                for row, count in zip(self.mean, self.num_sources)
            ]
        )

    def most_read(self, reader: int, count: int = 3) -> list[tuple[str, float]]:
        """The sources that a reader takes most from, by name, with their mean weights."""
        weights = self.mean[reader, : self.num_sources[reader]]
        return [(self.depth.sources[i], weights[i].item()) for i in weights.argsort(descending=True)[:count].tolist()]

    def plot(self, path: str | os.PathLike | None = None, values: str = "weight") -> "Figure":
        """Draw the map: `values` are "weight", "spread" over tokens, or "relative" to uniform weights."""
        from .figures import draw_depth_attention, finish

        return finish(draw_depth_attention(self, values), path)


def depth_attention(model: PreTrainedModel, batches: Batch | Iterable[Batch]) -> DepthAttention:
    """Measure the depth weights `a_{i->l}` of every reader over all tokens of the batches, which may be streamed.

    Args:
        model: a model of the family whose residual connections attend over the depth.
        batches: one or several, each token ids `[batch, seq]` or what a tokenizer returns; tokens that an attention
            mask leaves out do not count.

    Raises:
        NoDepthAttention: the model has none.
        ValueError: there is no batch, or what the model computes is not finite.
    """
    model, sums, tokens = family_member(model), None, 0
    for batch in several(batches):
        mask = mask_of(batch)
        parts = [
            _sums(weights[:, mask.to(weights.device)].double().cpu()) for weights in weights_by_token(model, batch)
        ]
        sums = parts if sums is None else [[a + b for a, b in zip(*pair)] for pair in zip(sums, parts)]
        tokens += int(mask.sum())
    if sums is None:
        raise ValueError("no batch of token ids was given.")
    mean, square = (_table([of[i] / tokens for of in sums]) for i in (0, 1))
    entropy, distance = (torch.stack([of[i] / tokens for of in sums]) for i in (2, 3))
    depth = depth_of(model, [len(of[0]) for of in sums])
    return DepthAttention(depth, mean, deviation(mean, square), entropy, distance, tokens)


@torch.no_grad()
def weights_by_token(model: PreTrainedModel, batch: Batch) -> list[Tensor]:
    """The weights of each reader in turn, `[sources, batch, seq]` as the model computes them.

    Raises:
        NoDepthAttention: there are none.
        ValueError: what the model computes is not finite.
    """
    recorded: list[Tensor | None] = []

    def read(connection: nn.Module, forward: Any, *arguments: Any) -> Any:
        result = forward(*arguments)
        recorded.append(result[1])
        return result

    with measuring(model), watched(model, read):
        run(model, batch)
    if not recorded or any(weights is None for weights in recorded):
        raise NoDepthAttention(f"{type(model).__name__} recorded no depth attention: it has no attention residuals.")
    return recorded


def share_measures(weights: Tensor) -> tuple[Tensor, Tensor]:
    """`H(a) / log K` and `sum_i |a_i - 1/K| / 2` of weights `[sources, ...]`, each `[...]`.

    They are taken as shares of their sum, since sigmoids do not add up to one. K counts sources that a window drops,
    too: weights within a window are never uniform.
    """
    shares = weights / weights.sum(0)
    entropy = torch.special.entr(shares).sum(0) / (math.log(len(shares)) if len(shares) > 1 else math.nan)
    return entropy, (shares - 1 / len(shares)).abs().sum(0) / 2


def _sums(weights: Tensor) -> list[Tensor]:
    """What is added up over tokens, of weights `[sources, tokens]`."""
    return [weights.sum(1), weights.square().sum(1), *(measure.sum() for measure in share_measures(weights))]


def _table(rows: list[Tensor]) -> Tensor:
    table = torch.full((len(rows), max(map(len, rows))), math.nan, dtype=torch.float64)
    for row, values in zip(table, rows):
        row[: len(values)] = values
    return table


__all__ = ["DepthAttention", "NoDepthAttention", "depth_attention", "share_measures", "weights_by_token"]
