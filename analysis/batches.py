"""Batches of token ids, and masks of the tokens that measurements count.

A batch is a tensor of token ids `[batch, seq]`, or a mapping such as a tokenizer returns. Measurements do not count
tokens that the attention mask leaves out.
"""

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

Batch = Tensor | Mapping[str, Tensor]


def as_batches(batches: Batch | Iterable[Batch]) -> Iterable[Batch]:
    """Return a single batch in a list, and an iterable of batches as it is."""
    # A string is wrapped too: `inputs_of` then rejects the string itself and not its first letter.
    # pyrefly: ignore[bad-return]  # the checker takes a mapping for an iterable of its keys too
    return [batches] if isinstance(batches, (Tensor, Mapping, str)) else batches


def inputs_of(batch: Batch) -> dict[str, Tensor]:
    """Return the tensors of a batch by the names of a model's arguments.

    Args:
        batch: Token ids `[batch, seq]`, or a mapping with `input_ids` among others.

    Raises:
        ValueError: The token ids are not a tensor `[batch, seq]`.
    """
    inputs = batch if isinstance(batch, Mapping) else {"input_ids": batch}
    ids = inputs.get("input_ids")
    if not isinstance(ids, Tensor) or ids.ndim != 2:
        actual = f"a tensor of shape {list(ids.shape)}" if isinstance(ids, Tensor) else type(ids).__name__
        raise ValueError(
            f"token ids must be a tensor [batch, seq], got {actual}: call the tokenizer with return_tensors='pt'."
        )
    return {name: value for name, value in inputs.items() if isinstance(value, Tensor)}


def mask_of(batch: Batch) -> Tensor:
    """Return the mask of the tokens that count: all tokens, or those that the batch's attention mask keeps.

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
        raise ValueError(f"the attention mask must have shape [batch, seq], got {list(mask.shape)}.")
    if not mask.any():
        raise ValueError("the attention mask must keep at least one token.")
    return mask.bool()


def predicted_mask(batch: Batch) -> Tensor:
    """Return the mask of the tokens that are predicted: they count, and so does the token before them.

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
    """Split a batch into batches of one sequence. Sequences in which no token counts are left out.

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
