"""The learned depth attention of a model: how much each sublayer takes from each source, averaged over tokens."""

from collections.abc import Iterable

import torch
from torch import Tensor
from transformers import PreTrainedModel


@torch.no_grad()
def depth_attention_map(model: PreTrainedModel, batches: Iterable[Tensor]) -> Tensor:
    """Average the weights `a_{i->l}` of every aggregation over all tokens of the batches.

    Args:
        model: a model of the family whose residual connections attend over the depth.
        batches: token ids, each `[batch, seq]`.

    Returns:
        `[sublayers + 1, sources]` in float32: a row for each sublayer in turn and one for the output. Rows sum to one,
        unless they are sigmoids; sources that a sublayer does not have are NaN, those that a window drops zero.

    Raises:
        ValueError: the model has no depth attention, or there is no batch.
    """
    total, tokens = None, 0
    for input_ids in batches:
        outputs = model(input_ids.to(model.device), use_cache=False, output_depth_attentions=True)
        recorded = getattr(outputs, "depth_attentions", None)
        if not recorded or any(weights is None for weights in recorded):
            raise ValueError(f"{type(model).__name__} recorded no depth attention: it has no attention residuals.")
        rows = [weights.float().sum((1, 2)) for weights in recorded]
        total = rows if total is None else [a + b for a, b in zip(total, rows)]
        tokens += input_ids.numel()
    if total is None:
        raise ValueError("no batch of token ids was given.")
    result = torch.full((len(total), len(total[-1])), float("nan"))
    for sublayer, row in enumerate(total):
        result[sublayer, : len(row)] = row.cpu() / tokens
    return result
