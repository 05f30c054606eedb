"""The learned depth attention of a model: how much each consumer takes from each source, and how that varies by token.

    h_l = sum_i a_{i->l} s_i        l = 0, ..., L - 1 for the sublayers, l = L for the output; i = the sources of l

The weight `a_{i->l}` is one number for each token. The statistics here are over the tokens of a text.
"""

import math
import os
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from attnres.residual_attnres import ResidualConnection

from .axis import DepthAxis, depth_axis
from .batches import Batch, as_batches, mask_of
from .measurement import DrawableMeasurement, standard_deviation
from .watching import family_member, measuring, run, watched

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class NoDepthAttention(ValueError):
    """Raised for a model whose residual connections do not attend over the depth."""


@dataclass(frozen=True, eq=False, repr=False)
class DepthAttention(DrawableMeasurement):
    """The depth weights of each consumer, over the tokens of a text. All tensors are in float64.

    Attributes:
        depth: The names of consumers and sources, and the block size.
        mean: The mean weights `[L + 1, sources]`: a row for each sublayer in turn and one for the output. Rows sum to
            one, unless weights are sigmoids. Sources that a consumer does not have are NaN. Sources that a window
            drops are zero.
        spread: The standard deviations of the weights over tokens, `[L + 1, sources]`. Weights can differ from token
            to token although their mean is uniform.
        entropy: `H(a) / log K` with K sources, `[L + 1]`, a mean over tokens: 1 for uniform weights, 0 if one source
            has all the weight; NaN where K is 1.
        distance: The distance from uniform weights, `sum_i |a_i - 1/K| / 2` with the weights as shares of their sum,
            `[L + 1]`, a mean over tokens. This share of the weight would have to move to make the weights uniform.
        tokens: The number of counted tokens.
    """

    depth: DepthAxis
    mean: Tensor
    spread: Tensor
    entropy: Tensor
    distance: Tensor
    tokens: int

    @cached_property
    def num_sources(self) -> list[int]:
        """The number of sources of each consumer."""
        return (~self.mean.isnan()).sum(1).tolist()

    @property
    def embedding(self) -> Tensor:
        """The mean weight on the embedding, `[L + 1]`."""
        return self.mean[:, 0]

    @property
    def nearest(self) -> Tensor:
        """The mean weight on the last source, `[L + 1]`: the newest output or, in blocks, the sum that holds it."""
        return torch.stack([row[count - 1] for row, count in zip(self.mean, self.num_sources)])

    @property
    def rest(self) -> Tensor:
        """The mean weight on all sources between the embedding and the last, `[L + 1]`; NaN if there are none."""
        return torch.stack(
            [
                row[1 : count - 1].sum() if count > 2 else row.new_tensor(math.nan)
                for row, count in zip(self.mean, self.num_sources)
            ]
        )

    def most_read(self, consumer: int, count: int = 3) -> list[tuple[str, float]]:
        """Return the sources that have the largest mean weights.

        Args:
            consumer: The index of a sublayer; -1 or L for the output.
            count: The number of sources to return, at most.

        Returns:
            Pairs of the source's name and its mean weight, the largest first.
        """
        weights = self.mean[consumer, : self.num_sources[consumer]]
        return [(self.depth.sources[i], weights[i].item()) for i in weights.argsort(descending=True)[:count].tolist()]

    def plot(self, path: str | os.PathLike | None = None, values: str = "weight") -> "Figure":
        """Draw the weights as maps of consumers by sources.

        Args:
            path: The `.png` or `.svg` file to write, in a folder that exists; `None` to write no file.
            values: "weight", "spread" over tokens, or "relative" to uniform weights.

        Returns:
            The figure, which a notebook shows if it is the last value of a cell.

        Raises:
            ModuleNotFoundError: matplotlib is not installed.
            ValueError: The file name has another suffix, or `values` is not one of these.
            FileNotFoundError: The folder does not exist.
        """
        return DrawableMeasurement.figure_maker(self, path, values=values)


def depth_attention(model: PreTrainedModel, batches: Batch | Iterable[Batch]) -> DepthAttention:
    """Measure the depth weights `a_{i->l}` of every consumer over all tokens of the batches.

    Args:
        model: A model of the family whose residual connections attend over the depth.
        batches: One or several, each token ids `[batch, seq]` or the mapping that a tokenizer returns. Tokens that
            an attention mask leaves out do not count.

    Returns:
        Mean and standard deviation of each weight over tokens, and measures of how uniform the weights are.

    Raises:
        NoDepthAttention: The model has no depth attention.
        ValueError: There is no batch, or the model's results are not finite.
    """
    model, sums, tokens = family_member(model), None, 0
    for batch in as_batches(batches):
        mask = mask_of(batch)
        # Only sums over tokens are kept, so batches can be streamed: for each consumer in turn, the list of four sums
        # that `_sum_over_tokens` returns.
        batch_sums = [
            _sum_over_tokens(weights[:, mask.to(weights.device)].double().cpu())
            for weights in weights_by_token(model, batch)
        ]
        sums = batch_sums if sums is None else [[a + b for a, b in zip(*pair)] for pair in zip(sums, batch_sums)]
        tokens += int(mask.sum())
    if sums is None:
        raise ValueError("no batch of token ids was given.")
    mean, square = (_table([consumer[i] / tokens for consumer in sums]) for i in (0, 1))
    entropy, distance = (torch.stack([consumer[i] / tokens for consumer in sums]) for i in (2, 3))
    depth = depth_axis(model, [len(consumer[0]) for consumer in sums])
    return DepthAttention(depth, mean, standard_deviation(mean, square), entropy, distance, tokens)


@torch.no_grad()
def weights_by_token(model: PreTrainedModel, batch: Batch) -> list[Tensor]:
    """Run one pass and return the depth weights of each token.

    Args:
        model: A model of the family.
        batch: Token ids `[batch, seq]`, or the mapping that a tokenizer returns.

    Returns:
        One tensor `[sources, batch, seq]` for each consumer in turn, on the device and in the dtype of the model.

    Raises:
        NoDepthAttention: The model has no depth attention.
        ValueError: The model's results are not finite.
    """
    recorded: list[Tensor | None] = []

    def read(connection: ResidualConnection, original: Any, *arguments: Any) -> Any:
        result = original(*arguments)
        recorded.append(result[1])
        return result

    with measuring(model), watched(model, read):
        run(model, batch)
    # Connections without depth attention return `None` in place of weights.
    weights = [tensor for tensor in recorded if tensor is not None]
    if not recorded or len(weights) < len(recorded):
        raise NoDepthAttention(
            f"{type(model).__name__} has no attention residuals, so it has no depth attention: use `depth_mixing`."
        )
    return weights


def share_measures(weights: Tensor) -> tuple[Tensor, Tensor]:
    """Compute how uniform depth weights are, token by token.

    The weights are divided by their sum, since sigmoids do not sum to one. K also counts sources that a window drops,
    so weights within a window are never uniform.

    Args:
        weights: Depth weights `[K, ...]`, K sources.

    Returns:
        The entropy `H(a) / log K` and the distance from uniform weights `sum_i |a_i - 1/K| / 2`, each `[...]`. The
        entropy is NaN where K is 1.
    """
    shares = weights / weights.sum(0)
    # `entr(a)` is `-a log a`, and 0 where a is 0.
    entropy = torch.special.entr(shares).sum(0) / (math.log(len(shares)) if len(shares) > 1 else math.nan)
    return entropy, (shares - 1 / len(shares)).abs().sum(0) / 2


def _sum_over_tokens(weights: Tensor) -> list[Tensor]:
    """Sum the weights, their squares, the entropy and the distance of weights `[sources, tokens]` over tokens."""
    return [weights.sum(1), weights.square().sum(1), *(measure.sum() for measure in share_measures(weights))]


def _table(rows: list[Tensor]) -> Tensor:
    """Stack rows of different lengths, and fill the ends of short ones with NaN."""
    table = torch.full((len(rows), max(map(len, rows))), math.nan, dtype=torch.float64)
    for row, values in zip(table, rows):
        row[: len(values)] = values
    return table


__all__ = ["DepthAttention", "NoDepthAttention", "depth_attention", "share_measures", "weights_by_token"]
