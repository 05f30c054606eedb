"""Prepare the timed workloads of several models: prefill, a training step, decoding.

Each function takes models by name and token ids `[batch, seq]`, and returns one way to time per model.
"""

import inspect
from collections.abc import Callable

import torch
from torch import Tensor
from transformers import CompileConfig, LlamaForCausalLM, PreTrainedModel, StaticCache

from .shapes import unique_parameters
from .timing import Ways

# Name of the cache among a model's arguments and outputs, which transformers 5.24 renamed.
CACHE = "cache" if "cache" in inspect.signature(LlamaForCausalLM.forward).parameters else "past_key_values"
ROOM = 512  # tokens that fit into a static cache after those of the prefill


def prefill(models: dict[str, PreTrainedModel], ids: Tensor) -> Ways:
    """Return a prefill with a new cache for each model."""

    @torch.no_grad()
    def way(model: PreTrainedModel) -> None:
        model.eval()(ids, use_cache=True, logits_to_keep=1)

    return _for_each(models, way)


def training_step(models: dict[str, PreTrainedModel], ids: Tensor, capturable: bool = False) -> Ways:
    """Return a training step for each model: forward, backward, fused AdamW.

    Args:
        models: models that share weights, by name.
        ids: token ids, `[batch, seq]`, which are the labels too.
        capturable: whether CUDA graphs must be able to capture the optimizer.

    Returns:
        One way per model.
    """
    # One optimizer serves all models, so that shared weights have their moments only once. It steps parameters with a
    # gradient, and only the model that has just run has gradients.
    parameters = unique_parameters(models.values())
    optimizer = torch.optim.AdamW(parameters, lr=1e-6, fused=True, capturable=capturable)

    def way(model: PreTrainedModel) -> None:
        model.train()(ids, labels=ids, use_cache=False).loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return _for_each(models, way)


def decoding(models: dict[str, PreTrainedModel], ids: Tensor) -> Ways:
    """Return a way per model that decodes one token. Within a repeat, the caches of all models have the same length."""

    def one(model: PreTrainedModel) -> Callable[[], None]:
        with torch.no_grad():
            cache = model.eval()(ids, use_cache=True, logits_to_keep=1)[CACHE]

        @torch.no_grad()
        def way() -> None:
            model(ids[:, :1], **{CACHE: cache}, use_cache=True)

        return way

    return {name: one(model) for name, model in models.items()}


def compiled_decoding(models: dict[str, PreTrainedModel], ids: Tensor) -> Ways:
    """Do the same as [`decoding`] by the compiled calls of `generate(cache_implementation="static")` on GPUs."""
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
                cache.reset()  # in a static cache, the cost of a token does not depend on its position
                position = 0
            # pyrefly: ignore[not-callable]  # every causal language model has it
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
