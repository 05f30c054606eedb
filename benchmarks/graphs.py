"""Capture the workloads of models as CUDA graphs.

A graph is replayed without Python, so only the GPU's time is measured.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from transformers import PreTrainedModel, StaticCache

from . import workloads
from .timing import Ways
from .workloads import CACHE, ROOM

WARM_UP = 3  # calls before the one that is captured


def graphed(way: Callable[[], object]) -> Callable[[], None]:
    """Capture the kernels that a call launches, after some warm-up calls. Return a function that replays them."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(WARM_UP):
            way()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        way()
    return graph.replay


def prefill(models: dict[str, PreTrainedModel], ids: Tensor) -> Ways:
    """Return a prefill of token ids `[batch, seq]` for each model, without a cache."""

    @torch.no_grad()
    def way(model: PreTrainedModel) -> None:
        model.eval()(ids, use_cache=False, logits_to_keep=1)

    return {name: graphed(lambda model=model: way(model)) for name, model in models.items()}


def training_step(models: dict[str, PreTrainedModel], ids: Tensor) -> Ways:
    """Return a training step on token ids `[batch, seq]` for each model, by an optimizer that graphs can capture."""
    steps = workloads.training_step(models, ids, capturable=True)
    return {name: graphed(step) for name, step in steps.items()}


def decoding(models: dict[str, PreTrainedModel], ids: Tensor) -> Ways:
    """Return a way per model that decodes one token with a static cache. The GPU advances cache and position."""

    def one(model: PreTrainedModel) -> Callable[[], None]:
        cache = StaticCache(config=model.config, max_cache_len=ids.shape[1] + ROOM)
        position = torch.full((1, 1), ids.shape[1], device=ids.device)

        @torch.no_grad()
        def step() -> None:
            model(ids[:, :1], **{CACHE: cache}, position_ids=position, use_cache=True)
            position.add_(1)

        with torch.no_grad():
            model.eval()(ids, **{CACHE: cache}, use_cache=True, logits_to_keep=1)
        replay, left = graphed(step), ROOM - WARM_UP - 1

        def way() -> None:
            nonlocal left
            if not left:
                cache.reset()
                position.zero_()
                left = ROOM
            replay()
            left -= 1

        return way

    return {name: one(model) for name, model in models.items()}
