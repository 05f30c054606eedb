"""Measurements of models of any depth, made from random numbers."""

import math

import torch
from torch import Tensor

from attnres.analysis import AttentionSinks, DepthAttention, DepthAxis, DepthMixing, Interventions, Magnitudes


def depth(layers: int, block_size: int = 1, kinds: tuple[str, ...] = ("attention", "MLP")) -> DepthAxis:
    """Return the depth axis of a model with this number of layers."""
    names = [f"{kind} {layer}" for layer in range(layers) for kind in kinds]
    outputs = sources = ("embedding", *names)
    if block_size > 1:
        sources = ("embedding", *(f"block {block}" for block in range(1, math.ceil(len(names) / block_size) + 1)))
    return DepthAxis(kinds, (*names, "output"), outputs, sources, block_size)


def attention(of: DepthAxis, seed: int = 0) -> DepthAttention:
    """Return depth attention with random weights, most of them on the nearest source."""
    generator = torch.Generator().manual_seed(seed)
    mean = torch.full((len(of.consumers), len(of.sources)), math.nan, dtype=torch.float64)
    entropy, distance = mean.new_full((len(mean),), math.nan), mean.new_zeros(len(mean))
    for reader, row in enumerate(mean):
        count = 1 + math.ceil(reader / of.block_size)
        logits = torch.randn(count, generator=generator, dtype=torch.float64)
        logits[-1] += 1 + reader % 2
        row[:count] = weights = logits.softmax(0)
        distance[reader] = (weights - 1 / count).abs().sum() / 2
        if count > 1:
            entropy[reader] = torch.special.entr(weights).sum() / math.log(count)
    return DepthAttention(of, mean, mean * (1 - mean), entropy, distance, 100)


def mixing(of: DepthAxis, negative: bool = False) -> DepthMixing:
    """Return the mixing matrix of a residual stream or, if `negative`, a matrix with negative columns."""
    mean = torch.ones(len(of.consumers), len(of.outputs), dtype=torch.float64).tril()
    if negative:
        mean = mean * torch.linspace(-0.5, 2, len(mean), dtype=torch.float64)
    return DepthMixing(of, mean, torch.zeros_like(mean), 100)


def magnitudes(of: DepthAxis, growth: float = 100.0, has_gradients: bool = True, seed: int = 0) -> Magnitudes:
    """Return magnitudes that grow with depth by a factor of `growth`."""
    stream = torch.logspace(0, math.log10(growth), len(of.consumers), dtype=torch.float64)
    around = _positive(len(stream), seed, 0.1)
    gradients = 1e-3 / stream if has_gradients else torch.full_like(stream, math.nan)
    return Magnitudes(of, stream * around, stream / 2 * around, stream, gradients, 30 * around, 100, has_stream=True)


def sinks(layers: int, every: int = 1, uniform: float = 0.03) -> AttentionSinks:
    """Return the attention sinks of a model in which every `every`-th layer has attention weights."""
    mean = torch.linspace(0.1, 0.4, layers, dtype=torch.float64)
    mean[[layer for layer in range(layers) if (layer + 1) % every]] = math.nan
    return AttentionSinks(mean, 2 * mean, uniform)


def interventions(of: DepthAxis, has_uniform: bool = True, seed: int = 0) -> Interventions:
    """Return interventions with random rises, of which one is much larger and one is negative."""
    hidden, uniform = (_positive(count, seed, 2.0) / 100 for count in (len(of.sources), len(of.consumers)))
    hidden[0], hidden[-1], uniform[0] = 5.0, -0.002, math.nan
    return Interventions(of, 2.3, hidden, uniform if has_uniform else uniform * math.nan, 100)


def _positive(count: int, seed: int, width: float) -> Tensor:
    """Return positive random numbers around 1, `[count]` in float64; `width` is the spread of their logarithm."""
    noise = torch.randn(count, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return (width * noise).exp()
