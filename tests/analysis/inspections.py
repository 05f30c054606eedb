"""Inspections with numbers that were chosen, not measured, so that tests can expect each of them."""

import math
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from attnres.analysis import (
    AttentionSinks,
    DepthAttention,
    DepthAxis,
    DepthMixing,
    Inspection,
    Interventions,
    Magnitudes,
    Passage,
)

from .measured import depth as depth_of

NAN = math.nan
WORDS = ["<s>", "The", " cat's", "\n\n", "  ", "<b>hat</b>", " sat.\n", "→"]  # one for each token of the passage


def _doubles(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def _counts(depth: DepthAxis) -> list[int]:
    """Return the number of sources of each reader."""
    return [1 + -(-place // depth.block_size) for place in range(len(depth.consumers))]


def _table(rows: list[list[float]]) -> Tensor:
    """Stack rows of different lengths, and fill the ends of short ones with NaN."""
    width = max(map(len, rows))
    return _doubles(*(value for row in rows for value in [*row, *[NAN] * (width - len(row))])).view(len(rows), width)


def _inspection(
    depth: DepthAxis, attention: DepthAttention | None, words: list[str], weights: list[Tensor], **more: Any
):
    """Return an inspection with fixed numbers except for the given ones; `more` replaces fields."""
    length = len(depth.consumers)
    triangle = torch.ones(length, length, dtype=torch.float64).tril()
    inspection = Inspection(
        model={
            "name": "model",
            "revision": None,
            "class": "AttnResForCausalLM",
            "connection": "Block AttnRes",
            "parameters": 1_998_316,
            "dtype": "float32",
            "layers": depth.num_sublayers // 2,
            "sublayers": depth.num_sublayers,
            "hidden_size": 128,
        },
        text={"name": "text.txt", "sha256": "ab" * 32, "sequences": 4, "length": 16, "tokens": 64},
        depth=depth,
        depth_attention=attention,
        mixing=DepthMixing(depth, triangle, torch.zeros_like(triangle), 64),
        magnitudes=Magnitudes(
            depth,
            inputs=torch.ones(length).double(),
            outputs=torch.ones(length).double(),
            stream=torch.linspace(0.5, 3.25, length).double(),
            gradients=torch.linspace(8.0, 2.0, length).double(),
            largest=torch.linspace(41.0, 12.0, length).double(),
            tokens=64,
            has_stream=attention is None,
        ),
        sinks=AttentionSinks(
            _doubles(0.125, *[0.5] * (depth.num_sublayers // 2 - 1)), _doubles(0.25, *[0.75] * 27), 0.04
        ),
        interventions=None,
        passage=Passage(words, weights),
    )
    return replace(inspection, **more)


def block_attn_res(**more: Any) -> Inspection:
    """Return an inspection of Block AttnRes with two layers in two blocks; `more` replaces fields."""
    depth = depth_of(2, 2)
    mean = _table([[1.0], [0.75, 0.25], [0.5, 0.5], [0.25, 0.25, 0.5], [0.375, 0.5, 0.125]])
    spread = _table([[0.0], [0.125, 0.125], [0.0, 0.0], [0.0, 0.25, 0.25], [0.0, 0.0, 0.0]])
    attention = DepthAttention(
        depth, mean, spread, _doubles(NAN, 0.8, 1.0, 0.9, 0.9), _doubles(0.0, 0.25, 0.0, 0.17, 0.21), 64
    )
    interventions = Interventions(depth, 1.8325, _doubles(0.69, 0.25, -0.01), _doubles(NAN, 0.01, 0.0, 0.12, 0.03), 60)
    noise = torch.Generator().manual_seed(0)
    weights = [
        torch.softmax(
            mean[row, :row_count].float().log()[:, None] + torch.randn(row_count, len(WORDS), generator=noise), 0
        )
        for row, row_count in enumerate(_counts(depth))
    ]
    return _inspection(depth, attention, WORDS, weights, **{"interventions": interventions, **more})


def standard(**more: Any) -> Inspection:
    """Return an inspection of two layers with the standard residual connection, on the same words."""
    depth = depth_of(2)
    weights = [torch.ones(place + 1, len(WORDS)) for place in range(5)]
    interventions = Interventions(depth, 1.75, _doubles(2.5, 0.5, 0.25, 0.125, 0.0), _doubles(*[NAN] * 5), 60)
    inspection = _inspection(depth, None, WORDS, weights, interventions=interventions)
    return replace(inspection, model={**inspection.model, "name": "plain", "connection": "standard"}, **more)


def full_attn_res(layers: int, tokens: int, seed: int = 0) -> Inspection:
    """Return an inspection of Full AttnRes with random weights."""
    depth, generator = depth_of(layers), torch.Generator().manual_seed(seed)
    weights = [torch.softmax(torch.randn(count, tokens, generator=generator), 0) for count in _counts(depth)]
    mean, spread = (_table([part.tolist() for part in parts]) for parts in zip(*map(_moments, weights)))
    measure = torch.rand(len(depth.consumers), generator=generator).double()
    attention = DepthAttention(depth, mean, spread, measure, measure, tokens)
    return _inspection(depth, attention, [f"word{token} " for token in range(tokens)], weights)


def _moments(weights: Tensor) -> tuple[Tensor, Tensor]:
    """Return the mean and the standard deviation of weights `[sources, tokens]` over tokens."""
    return weights.double().mean(1), weights.double().std(1, unbiased=False)


__all__ = ["WORDS", "block_attn_res", "full_attn_res", "standard"]
