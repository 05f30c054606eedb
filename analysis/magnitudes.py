"""Magnitudes by depth, as in Figure 5 of the paper: inputs and outputs of sublayers, the stream, and gradients.

A magnitude is a root mean square over tokens t and channels c: `sqrt(mean_{t, c} x[t, c]^2)`.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map
from transformers import PreTrainedModel

from attnres.residual_attnres import ResidualConnection

from .axis import DepthAxis, depth_axis
from .batches import Batch, as_batches, mask_of, predicted_mask, split_sequences
from .measurement import DrawableMeasurement
from .watching import family_member, measuring, run, summed_loss, watched


@dataclass(frozen=True, eq=False, repr=False)
class Magnitudes(DrawableMeasurement):
    """Root mean squares by depth, each `[L + 1]` in float64.

    Attributes:
        depth: The names of consumers and outputs.
        inputs: The magnitude of `h_l`, the input of each sublayer and of the output, before a norm.
        outputs: The magnitude of `v_l`, the embedding and the output of each sublayer.
        stream: The magnitude of the sum to which each output is added: the residual stream, if the model has one. If it
            has none, the running sum of the block, which is the output itself in blocks of one.
        gradients: The magnitude of the derivative of the loss by `v_l`. The loss is that of a sequence, summed over its
            tokens. NaN if not measured.
        largest: The largest `|h_l|`, divided by the median `|h_l|` ("massive activations"). Over several batches, the
            median is the mean of the batches' medians.
        tokens: The number of counted tokens.
        has_stream: Whether the model has a residual stream; not if depth attention takes its place.
    """

    depth: DepthAxis
    inputs: Tensor
    outputs: Tensor
    stream: Tensor
    gradients: Tensor
    largest: Tensor
    tokens: int
    has_stream: bool


def magnitudes(model: PreTrainedModel, batches: Batch | Iterable[Batch], gradients: bool = True) -> Magnitudes:
    """Measure magnitudes over all tokens of the batches.

    The `grad` of parameters stays as it is. Parameters may be frozen.

    Args:
        model: A causal language model of the family, or a standard one on a backbone in `BACKBONES`.
        batches: One or several, each token ids `[batch, seq]` or the mapping that a tokenizer returns. Tokens that
            an attention mask leaves out do not count.
        gradients: Whether to measure gradients too. This takes the memory of a training step on one sequence.

    Returns:
        The magnitudes of all sublayers.

    Raises:
        ValueError: There is no batch, or the model's results are not finite.
    """
    model = family_member(model)
    totals: dict[str, Tensor] = {}
    num_sources: list[int] = []
    tokens, has_stream = 0, True
    with measuring(model):
        for batch in as_batches(batches):
            mask = mask_of(batch)
            tokens += int(mask.sum())
            num_sources.clear()  # every pass appends the same counts again
            forward, has_stream = _forward(model, batch, mask, num_sources)
            parts = [forward]
            if gradients:
                parts += [{"gradients": _gradients(model, sequence)} for sequence in split_sequences(batch)]
            for name, value in ((name, value) for part in parts for name, value in part.items()):
                if name not in totals:
                    totals[name] = value
                elif name == "largest":
                    totals[name] = torch.maximum(totals[name], value)
                else:
                    totals[name] = totals[name] + value
    if not tokens:
        raise ValueError("no batch of token ids was given.")
    mean = {name: (totals[name] / tokens).sqrt() for name in ("inputs", "outputs", "stream")}
    largest = totals["largest"] / (totals["median"] / tokens)
    mean["gradients"] = (totals["gradients"] / tokens).sqrt() if gradients else torch.full_like(largest, math.nan)
    depth = depth_axis(model, num_sources or None)
    return Magnitudes(depth, **mean, largest=largest, tokens=tokens, has_stream=has_stream)


@torch.no_grad()
def _forward(
    model: PreTrainedModel, batch: Batch, mask: Tensor, num_sources: list[int]
) -> tuple[dict[str, Tensor], bool]:
    """Run one pass and sum its values over tokens.

    Args:
        model: A model of the family.
        batch: Token ids `[batch, seq]`, or the mapping that a tokenizer returns.
        mask: Which tokens count, `[batch, seq]`.
        num_sources: An empty list. The number of sources of each read with depth attention is appended.

    Returns:
        `inputs`, `outputs` and `stream`: the mean square over channels, summed over tokens; `median`: the median of
        absolute inputs, times the number of tokens; `largest`: the largest absolute input. Each `[L + 1]` in float64.
        And whether the model has a residual stream.
    """
    has_stream = True
    values: dict[str, list[Tensor]] = {name: [] for name in ("inputs", "outputs", "stream", "largest", "median")}
    newest = stream = None  # the newest output, and the sum to which it was added: [batch, seq, hidden]

    def add(name: str, tensor: Tensor) -> Tensor:
        """Append the summed mean squares of a tensor to its values. Return the counted tokens `[tokens, hidden]`."""
        counted = tensor[mask.to(tensor.device)].double()
        values[name].append(counted.square().mean(-1).sum().cpu())
        return counted

    def read(connection: ResidualConnection, original: Any, state: Any, *norm: Any) -> Any:
        nonlocal newest, stream, has_stream
        result = original(state, *norm)
        inputs, weights = result[:2]
        if newest is None or stream is None:  # the first state is the embedding
            newest = stream = state
            add("outputs", newest)
        elif weights is None:  # without depth attention, the input is the stream
            stream = inputs
        elif (added_to := _without_depth_attention(connection, state, *norm)).any():
            stream = added_to
        elif len(weights) > num_sources[-1]:  # the newest output begins a new block
            stream, has_stream = newest, False
        else:  # the newest output joins the current block, which may have begun on another device
            stream, has_stream = stream.to(newest.device) + newest, False
        if weights is not None:
            num_sources.append(len(weights))
        add("stream", stream)
        absolute = add("inputs", inputs).abs().flatten()
        values["largest"].append(absolute.max().cpu())
        values["median"].append(absolute.median().cpu() * mask.sum().cpu())
        return result

    def write(connection: ResidualConnection, original: Any, state: Any, output: Tensor) -> Any:
        nonlocal newest
        newest = output
        add("outputs", output)
        return original(state, output)

    with watched(model, read, write):
        run(model, batch)
    return {name: torch.stack(parts) for name, parts in values.items()}, has_stream


def _without_depth_attention(connection: ResidualConnection, state: Any, *norm: Any) -> Tensor:
    """Compute what a connection reads if its depth attention gives nothing: its residual stream, or zeros.

    A read is linear in the state once its coefficients are known, and a stream has none.

    Args:
        connection: A connection with depth attention.
        state: The state before the read.
        norm: The weight of the key norm, if the connection takes one.

    Returns:
        `[batch, seq, hidden]`.
    """
    coefficients = connection.coefficients(state, *norm)
    nothing = tree_map(lambda value: torch.zeros_like(value) if isinstance(value, Tensor) else value, coefficients)
    return connection.mix(state, nothing)[0]


@torch.inference_mode(False)
@torch.enable_grad()
def _gradients(model: PreTrainedModel, sequence: dict[str, Tensor]) -> Tensor:
    """Return the mean square over channels of `d loss / d v_l`, summed over tokens, `[L + 1]` in float64."""
    # Autograd rejects tensors that were made in inference mode. Their copies are made outside of it.
    sequence = {name: value.clone() for name, value in sequence.items()}
    mask = mask_of(sequence)
    if not predicted_mask(sequence).any():
        return torch.zeros(depth_axis(model).num_sublayers + 1, dtype=torch.float64)
    # A zero is added to each output. The derivative by the zero equals the derivative by the output, and exists even if
    # all weights are frozen.
    probes: list[Tensor] = []

    def probed(output: Tensor) -> Tensor:
        """Return the output plus a new zero, which is appended to `probes`."""
        probes.append(torch.zeros_like(output, requires_grad=True))
        return output + probes[-1]

    def read(connection: ResidualConnection, original: Any, state: Any, *norm: Any) -> Any:
        return original(state if probes else probed(state), *norm)

    def write(connection: ResidualConnection, original: Any, state: Any, output: Tensor) -> Any:
        return original(state, probed(output))

    with watched(model, read, write):
        loss = summed_loss(model, sequence)
    gradients = torch.autograd.grad(loss, probes)  # each [1, seq, hidden]
    counted = (gradient[mask.to(gradient.device)].double() for gradient in gradients)
    return torch.stack([gradient.square().mean(-1).sum().cpu() for gradient in counted])


__all__ = ["Magnitudes", "magnitudes"]
