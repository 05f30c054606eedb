"""Magnitudes by depth: what sublayers read and put out, the stream between them, and the gradients (Figure 5).

A magnitude is a root mean square over tokens and channels.
"""

import math
import os
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from .names import Depth, Measurement, depth_of
from .watching import Batch, family_member, mask_of, measuring, predicted, run, sequences, several, summed_loss, watched

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True, eq=False, repr=False)
class Magnitudes(Measurement):
    """Root mean squares by depth, each `[L + 1]` in float64.

    Attributes:
        depth: names of readers and outputs.
        inputs: of `h_l`, what each sublayer and the output read, before a norm.
        outputs: of `v_l`, the embedding and what each sublayer puts out.
        stream: of the sum that each output has joined: the residual stream or, in blocks, the running sum of the block.
        gradients: of the derivative of a sequence's loss, summed over its tokens, by `v_l`; NaN where they were not
            measured.
        largest: the largest `|h_l|` over the median one ("massive activations"); of several batches, over the mean of
            their medians.
        tokens: how many were counted.
    """

    depth: Depth
    inputs: Tensor
    outputs: Tensor
    stream: Tensor
    gradients: Tensor
    largest: Tensor
    tokens: int

    def plot(self, path: str | os.PathLike | None = None) -> "Figure":
        """Draw them by depth; see [`attnres.analysis.figures.draw_magnitudes`]."""
        from .figures import draw_magnitudes, finish

        return finish(draw_magnitudes({"": self}), path)


def magnitudes(model: PreTrainedModel, batches: Batch | Iterable[Batch], gradients: bool = True) -> Magnitudes:
    """Measure magnitudes over all tokens of the batches, which may be streamed.

    No gradient of the model's own is touched, and frozen weights are no hindrance.

    Args:
        model: a causal language model of the family, or a standard one on a backbone that the family knows.
        batches: one or several, each token ids `[batch, seq]` or what a tokenizer returns; tokens that an attention
            mask leaves out do not count.
        gradients: measure these too, which takes the memory of a training step on one sequence.

    Raises:
        ValueError: there is no batch, or what the model computes is not finite.
    """
    model = family_member(model)
    sums: dict[str, Tensor] = {}
    num_sources: list[int] = []
    tokens = 0
    with measuring(model):
        for batch in several(batches):
            mask = mask_of(batch)
            tokens += int(mask.sum())
            num_sources.clear()
            found = [_forward(model, batch, mask, num_sources)]
            if gradients:
                found += [{"gradients": _gradients(model, sequence)} for sequence in sequences(batch)]
            for name, value in ((name, value) for part in found for name, value in part.items()):
                if name not in sums:
                    sums[name] = value
                else:
                    sums[name] = torch.maximum(sums[name], value) if name == "largest" else sums[name] + value
    if not tokens:
        raise ValueError("no batch of token ids was given.")
    # Sums of mean squares of tokens, weighed by their number; medians likewise.
    mean = {name: (sums[name] / tokens).sqrt() for name in ("inputs", "outputs", "stream")}
    largest = sums["largest"] / (sums["median"] / tokens)
    mean["gradients"] = (sums["gradients"] / tokens).sqrt() if gradients else torch.full_like(largest, math.nan)
    return Magnitudes(depth_of(model, num_sources or None), **mean, largest=largest, tokens=tokens)


@torch.no_grad()
def _forward(model: PreTrainedModel, batch: Batch, mask: Tensor, num_sources: list[int]) -> dict[str, Tensor]:
    """Of one pass, sums over tokens of the mean squares, and of the medians; and the largest values.

    `num_sources` is filled, if there is depth attention.
    """
    found: dict[str, list[Tensor]] = {name: [] for name in ("inputs", "outputs", "stream", "largest", "median")}
    newest = block = None

    def see(name: str, tensor: Tensor) -> Tensor:
        counted = tensor[mask.to(tensor.device)].double()
        found[name].append(counted.square().mean(-1).sum().cpu())
        return counted

    def read(connection: nn.Module, forward: Any, state: Any, *norm: Any) -> Any:
        nonlocal newest, block
        result = forward(state, *norm)
        inputs, weights = result[:2]
        if newest is None:
            newest = block = state  # the embedding
            see("outputs", newest)
        elif weights is None:
            block = inputs
        else:  # a new source begins with the newest output
            block = newest if len(weights) > num_sources[-1] else block.to(newest.device) + newest
        if weights is not None:
            num_sources.append(len(weights))
        see("stream", block)
        sizes = see("inputs", inputs).abs().flatten()
        found["largest"].append(sizes.max().cpu())
        found["median"].append(sizes.median().cpu() * mask.sum().cpu())
        return result

    def write(connection: nn.Module, own: Any, state: Any, output: Tensor) -> Any:
        nonlocal newest
        newest = output
        see("outputs", output)
        return own(state, output)

    with watched(model, read, write):
        run(model, batch)
    return {name: torch.stack(values) for name, values in found.items()}


@torch.inference_mode(False)
@torch.enable_grad()
def _gradients(model: PreTrainedModel, sequence: dict[str, Tensor]) -> Tensor:
    """Sums over tokens of the mean squares of `d loss / d v_l`, `[L + 1]`."""
    sequence = {name: value.clone() for name, value in sequence.items()}  # not made in inference mode
    mask = mask_of(sequence)
    if not predicted(sequence).any():
        return torch.zeros(depth_of(model).num_sublayers + 1, dtype=torch.float64)
    probes: list[Tensor] = []

    def probed(output: Tensor) -> Tensor:
        probes.append(torch.zeros_like(output, requires_grad=True))
        return output + probes[-1]

    def read(connection: nn.Module, forward: Any, state: Any, *norm: Any) -> Any:
        return forward(state if probes else probed(state), *norm)

    def write(connection: nn.Module, own: Any, state: Any, output: Tensor) -> Any:
        return own(state, probed(output))

    with watched(model, read, write):
        loss = summed_loss(model, sequence)
    found = torch.autograd.grad(loss, probes)
    counted = (gradient[mask.to(gradient.device)].double() for gradient in found)
    return torch.stack([gradient.square().mean(-1).sum().cpu() for gradient in counted])


__all__ = ["Magnitudes", "magnitudes"]
