"""What models are made to do while they are timed, for several models in turn: prefill, a training step, decoding."""

import inspect
from collections.abc import Callable

import torch
from torch import Tensor
from transformers import CompileConfig, LlamaForCausalLM, PreTrainedModel, StaticCache

from .shapes import unique_parameters
from .timing import Ways

# The name of the cache among a model's arguments and outputs: transformers 5.24 changed it.
CACHE = "cache" if "cache" in inspect.signature(LlamaForCausalLM.forward).parameters else "past_key_values"
ROOM = 512  # tokens that a static cache has room for beside those of the prefill


def prefill(models: dict[str, PreTrainedModel], ids: Tensor) -> Ways:
    @torch.no_grad()
    def way(model: PreTrainedModel) -> None:
        model.eval()(ids, use_cache=True, logits_to_keep=1)

    return _for_each(models, way)


def training_step(models: dict[str, PreTrainedModel], ids: Tensor) -> Ways:
    """One optimizer for all: it steps what has a gradient, so the weights' moments are there once."""
    optimizer = torch.optim.AdamW(unique_parameters(models.values()), lr=1e-6, fused=True)

    def way(model: PreTrainedModel) -> None:
        model.train()(ids, labels=ids, use_cache=False).loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return _for_each(models, way)


def decoding(models: dict[str, PreTrainedModel], ids: Tensor) -> Ways:
    """Each call adds a token to the model's own cache; all caches are of one length in each repeat."""

    def one(model: PreTrainedModel) -> Callable[[], None]:
        with torch.no_grad():
            cache = model.eval()(ids, use_cache=True, logits_to_keep=1)[CACHE]

        @torch.no_grad()
        def way() -> None:
            model(ids[:, :1], **{CACHE: cache}, use_cache=True)

        return way

    return {name: one(model) for name, model in models.items()}


def compiled_decoding(models: dict[str, PreTrainedModel], ids: Tensor) -> Ways:
    """As [`decoding`], by the calls that `generate` makes with `cache_implementation="static"` on a GPU."""
    torch.compiler.reset()
    options = CompileConfig() if ids.is_cuda else CompileConfig(mode="default")

    def one(model: PreTrainedModel) -> Callable[[], None]:
        room = ids.shape[1] + ROOM
        cache = StaticCache(config=model.config, max_cache_len=room)
        with torch.no_grad():
            model.eval()(ids, **{CACHE: cache}, use_cache=True, logits_to_keep=1)
        call = model.get_compiled_call(options)

        position = ids.shape[1]

        @torch.no_grad()
        def way() -> None:
            nonlocal position
            if position == room:
                cache.reset()  # what a token costs does not depend on the number of those before it
                position = 0
            inputs = model.prepare_inputs_for_generation(
                ids[:, :1],
                **{CACHE: cache},
                position_ids=torch.full((1, 1), position, device=ids.device),
                use_cache=True,
            )
            position += 1
            call(**inputs, return_dict=True)

        return way

    return {name: one(model) for name, model in models.items()}


def _for_each(models: dict[str, PreTrainedModel], way: Callable[[PreTrainedModel], None]) -> Ways:
    return {name: (lambda model=model: way(model)) for name, model in models.items()}
