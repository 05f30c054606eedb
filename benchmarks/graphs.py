"""The workloads of models as CUDA graphs, which are replayed without Python: what is left is the GPU's own time."""

from collections.abc import Callable

import torch
from torch import Tensor
from transformers import PreTrainedModel, StaticCache

from .shapes import unique_parameters
from .timing import Ways
from .workloads import CACHE, ROOM

WARM_UP = 3  # calls before the one that is captured


def graphed(way: Callable[[], None]) -> Callable[[], None]:
    """Replays what a call launches, after some calls that are not captured."""
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
    @torch.no_grad()
    def way(model: PreTrainedModel) -> None:
        model.eval()(ids, use_cache=False, logits_to_keep=1)

    return {name: graphed(lambda model=model: way(model)) for name, model in models.items()}


def training_step(models: dict[str, PreTrainedModel], ids: Tensor) -> Ways:
    optimizer = torch.optim.AdamW(unique_parameters(models.values()), lr=1e-6, fused=True, capturable=True)

    def way(model: PreTrainedModel) -> None:
        model.train()(ids, labels=ids, use_cache=False).loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return {name: graphed(lambda model=model: way(model)) for name, model in models.items()}


def decoding(models: dict[str, PreTrainedModel], ids: Tensor) -> Ways:
    """A token at a time with a static cache, which counts its tokens on the GPU, as the position here is counted."""

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
