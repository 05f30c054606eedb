"""Batches of token ids as measurements take them: which tokens count, and which are predicted.

A batch is a tensor of token ids `[batch, seq]`, or a mapping such as a tokenizer returns. Tokens that its attention
mask leaves out do not count in any measurement.
"""

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

Batch = Tensor | Mapping[str, Tensor]


def as_batches(batches: Batch | Iterable[Batch]) -> Iterable[Batch]:
    """Return one batch as a list of one, and several batches as they are."""
    # A string is wrapped too, so that it is refused as one batch and not letter by letter.
    return [batches] if isinstance(batches, (Tensor, Mapping, str)) else batches


def inputs_of(batch: Batch) -> dict[str, Tensor]:
    """Return the tensors of a batch by the names of a model's arguments.

    Args:
        batch: Token ids `[batch, seq]`, or a mapping with `input_ids` among others.

    Raises:
        ValueError: The token ids are not a tensor `[batch, seq]`.
    """
    given = batch if isinstance(batch, Mapping) else {"input_ids": batch}
    ids = given.get("input_ids")
    if not isinstance(ids, Tensor) or ids.ndim != 2:
        what = f"a tensor of shape {list(ids.shape)}" if isinstance(ids, Tensor) else type(ids).__name__
        raise ValueError(
            f"token ids must be a tensor [batch, seq], as of a tokenizer with return_tensors='pt', not {what}."
        )
    return {name: value for name, value in given.items() if isinstance(value, Tensor)}


def mask_of(batch: Batch) -> Tensor:
    """Return which tokens of a batch count: all but those that its attention mask leaves out.

    Args:
        batch: Token ids `[batch, seq]`, or a mapping with `input_ids` among others.

    Returns:
        A boolean tensor `[batch, seq]`.

    Raises:
        ValueError: The mask is not `[batch, seq]`, or leaves out every token.
    """
    inputs = inputs_of(batch)
    ids = inputs["input_ids"]
    mask = inputs.get("attention_mask", torch.ones_like(ids))
    if mask.shape != ids.shape:
        raise ValueError(f"the attention mask has shape {list(mask.shape)}, but must be [batch, seq].")
    if not mask.any():
        raise ValueError("the attention mask leaves out every token.")
    return mask.bool()


def predicted_mask(batch: Batch) -> Tensor:
    """Return which tokens of a batch are predicted: those that count and follow one that counts.

    Args:
        batch: Token ids `[batch, seq]`, or a mapping with `input_ids` among others.

    Returns:
        A boolean tensor `[batch, seq]`, False in the first column.

    Raises:
        ValueError: The mask is not `[batch, seq]`, or leaves out every token.
    """
    mask = mask_of(batch)
    return torch.cat([torch.zeros_like(mask[:, :1]), mask[:, 1:] & mask[:, :-1]], 1)


def split_sequences(batch: Batch) -> list[dict[str, Tensor]]:
    """Split a batch into batches of one sequence, without the sequences in which no token counts.

    Args:
        batch: Token ids `[batch, seq]`, or a mapping with `input_ids` among others.

    Returns:
        One mapping for each sequence, with `input_ids` `[1, seq]`.

    Raises:
        ValueError: The mask is not `[batch, seq]`, or leaves out every token.
    """
    inputs, mask = inputs_of(batch), mask_of(batch)
    return [
        {
            # A tensor with a single row, such as position ids, belongs to all sequences.
            name: value[i : i + 1] if value.ndim > 1 and len(value) == len(mask) else value
            for name, value in inputs.items()
        }
        for i in range(len(mask))
        if mask[i].any()
    ]


__all__ = ["Batch", "as_batches", "inputs_of", "mask_of", "predicted_mask", "split_sequences"]
