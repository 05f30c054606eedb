"""Padding anywhere in a row, and masks of every form, for delta attention.

A recurrence cannot apply a mask over pairs of tokens: it can skip padding, and begin anew at each document.
[`read_rows`] reads from the arguments of a forward pass which tokens are padding and where documents begin, and warns
of masks that say more.
"""

import warnings
from collections.abc import Mapping
from inspect import signature
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import DynamicCache, KimiLinearModel
from transformers.masking_utils import find_packed_sequence_indices
from transformers.utils import is_tracing

from .residual_attnres import FamilyWarning
from .rows_attnres import (
    Arguments,
    cache_of,
    find_documents,
    is_start,
    keep_apart,
    one_if_traced_with_cache,
    shape_of,
)

# The name of the cache among a model's arguments, which `transformers` 5.24 changed.
CACHE_NAME = "cache" if "cache" in signature(KimiLinearModel.forward).parameters else "past_key_values"
_HIDDEN = -100.0  # a number that is added to scores and is lower than this hides a token
# Name of an attribute that this file sets on a cache: `[batch, tokens]`, false for padding, which the cache itself does
# not mark. As an attribute, it stays with the cache when that is copied or saved.
_REAL = "attnres_real_tokens"


class Rows(NamedTuple):
    """The rows of one forward pass, as delta attention reads them; without values, each row is one text.

    It is a named tuple because engines that move arguments to other devices, and tracers, look for tensors in those.
    """

    documents: Tensor | None = None
    """`[batch, seq]`, the number of each token's document; neighbouring documents differ. `None`: one in each row."""
    borders: Tensor | None = None
    """The documents' borders in all rows together, for GPU kernels; `None` where they are not known."""
    is_real: Tensor | None = None
    """`[batch, seq]`, false for padding, which is set to zero; `None`: no token is padding."""
    order: Tensor | None = None
    """`[batch, seq]`, the indices of the tokens with real ones first, where a recurrence has to skip padding.

    `documents` and `is_real` are in this order. `None`: it is enough to set padding to zero."""


def read_rows(
    arguments: Arguments, config: Any, dtype: torch.dtype, makes_cache: bool, layer_idx: int
) -> tuple[Arguments, Rows]:
    """Read the rows of a forward pass for delta attention, and prepare the arguments for full attention.

    Args:
        arguments: the arguments by name; they are not changed in place.
        config: the model's configuration.
        dtype: dtype of the activations.
        makes_cache: whether the pass makes a cache unless it has several documents.
        layer_idx: index of any layer with linear attention; its entry in the cache shows whether there is a state.

    Returns:
        The arguments, which keep documents apart in full attention; and the rows.

    Raises:
        ValueError: the documents cannot be kept apart; a mask hides real tokens in the cache; positions have more than
            two dimensions; or the cache has keys and values alone.
    """
    shape = shape_of(arguments)
    if shape is None:
        return arguments, Rows()
    cache, positions = cache_of(arguments), arguments.get("position_ids")
    if layer_idx < len(getattr(cache, "layers", ())) and not hasattr(cache.layers[layer_idx], "update_conv_state"):
        raise ValueError(
            f"the cache has keys and values for layer {layer_idx}, which has linear attention and keeps a state. Pass "
            "`DynamicCache(config=model.config)`. PEFT's prefix tuning makes such a cache: use another adapter."
        )
    if positions is not None and positions.ndim > 2:
        raise ValueError(f"`position_ids` must be [batch, seq], but have the shape {list(positions.shape)}.")
    # In every pass, because another one may fill the cache again without a mask over pairs.
    _cut_note(cache)
    arguments, documents = find_documents(arguments, shape, makes_cache)
    mask = arguments.get("attention_mask")
    # A mask for each kind of layer, or one for all.
    linear_mask = mask.get("linear_attention") if isinstance(mask, Mapping) else mask
    square_mask = linear_mask if isinstance(linear_mask, Tensor) and linear_mask.ndim == 4 else None
    if square_mask is not None:
        is_real, by_mask = read_square_mask(square_mask, shape[1], _padding_in(cache, square_mask))
        arguments, documents = _apply_square_mask(arguments, config, dtype, documents, by_mask), by_mask
    else:
        arguments, is_real = _apply_padding_mask(arguments, linear_mask, shape[1])
        if documents is None and mask is not None and positions is not None and shape[1] > 1:
            by_jumps = isinstance(mask, Mapping) and linear_mask is None and cache is None
            documents = _documents_beside_mask(arguments, positions.expand(shape), is_real, by_jumps)
    if documents is not None:
        arguments, makes_cache = keep_apart(arguments, documents, config, dtype, is_real), False
        documents = documents.int()  # as kernels take it
    if is_real is None:
        return arguments, Rows(documents, _borders(documents))
    if square_mask is not None:
        arguments = _note_padding(arguments, config, is_real, makes_cache)
    has_state = cache is not None and cache.has_previous_state(layer_idx)
    if not _must_skip(is_real, cache is not None or makes_cache, has_state):
        return arguments, Rows(documents, _borders(documents), is_real)
    # Move real tokens to the front, in their order. The state runs through them; padding after them does not change it.
    order = (~is_real).int().argsort(dim=1, stable=True)
    documents = None if documents is None else documents.gather(1, order)
    return arguments, Rows(documents, is_real=is_real.gather(1, order), order=order)


def _must_skip(is_real: Tensor, keeps_state: bool, has_state: bool) -> bool:
    """Return whether a recurrence has to skip padding, so that it is not enough to set padding to zero.

    Zeros are enough before all real tokens of a row that has no state yet, and after them if no state is kept.

    Args:
        is_real: `[batch, seq]`, false for padding.
        keeps_state: whether the state after this pass is kept.
        has_state: whether there is a state of earlier tokens.
    """
    if is_tracing(is_real) or has_state or is_real.shape[1] == 1:
        return True
    ends = is_real[:, :-1] & ~is_real[:, 1:]
    if keeps_state:
        return bool(ends.any())
    starts = is_real[:, 1:] & ~is_real[:, :-1]
    return bool((starts & (ends.cumsum(-1) > 0)).any())


def _borders(documents: Tensor | None) -> Tensor | None:
    """Return the documents' borders in all rows together, for GPU kernels; `None` on a CPU and in a traced graph.

    They are computed once for all layers, because the CPU waits for the device here.
    """
    if documents is None or documents.device.type == "cpu" or is_tracing(documents):
        return None
    ends = documents.new_full((1,), documents.numel(), dtype=torch.long)
    return torch.cat((is_start(documents).flatten().nonzero().flatten(), ends))


def _apply_padding_mask(arguments: Arguments, linear_mask: Any, length: int) -> tuple[Arguments, Tensor | None]:
    """Read padding from the mask of linear attention `[batch, tokens]`, or `None`.

    Args:
        arguments: the arguments of the forward pass.
        linear_mask: the mask of linear attention, which may be that of all layers.
        length: number of tokens in this pass.

    Returns:
        The arguments, and which tokens are real `[batch, seq]`, or `None` if all are.
    """
    if linear_mask is None:
        return arguments, None
    if not (isinstance(linear_mask, Tensor) and linear_mask.ndim == 2):
        raise ValueError(
            f"linear attention takes a mask [batch, tokens], not {type(linear_mask).__name__}: pass a dictionary with "
            "a mask for each kind of layer, 'full_attention' and 'linear_attention'."
        )
    cache, is_only_mask = cache_of(arguments), arguments["attention_mask"] is linear_mask
    if is_only_mask and is_tracing(linear_mask):
        if length == 1 and cache is not None and cache.is_compileable:
            # The mask may be as long as the static cache, and a graph does not know which of its tokens this one is. So
            # a single token counts as real, as in `transformers`. `generate` passes a mask for each kind of layer.
            return arguments, None
    elif is_only_mask and linear_mask.shape[1] > length:
        # The mask is as long as a static cache: its last tokens do not exist yet.
        linear_mask = linear_mask[:, : (0 if cache is None else int(cache.get_seq_length())) + length]
        arguments = arguments | {"attention_mask": linear_mask}
    # The first tokens of a longer mask are in the cache.
    is_real = linear_mask[:, -length:] != 0
    return arguments, is_real if is_tracing(is_real) or not bool(is_real.all()) else None


def _documents_beside_mask(
    arguments: Arguments, positions: Tensor, is_real: Tensor | None, by_jumps: bool
) -> Tensor | None:
    """Find the documents that `position_ids` `[batch, seq]` mark beside a mask; `None` if each row is one document."""
    if by_jumps:
        documents = find_packed_sequence_indices(positions)
    else:
        is_token = torch.ones_like(positions, dtype=torch.bool) if is_real is None else is_real
        documents = documents_under_mask(positions, is_token)
    return None if documents is None else one_if_traced_with_cache(documents, arguments)


@torch.compiler.disable
def read_square_mask(mask: Tensor, length: int, was_real: Tensor) -> tuple[Tensor | None, Tensor | None]:
    """Find padding and documents in a mask over pairs of tokens, because a recurrence cannot apply such a mask.

    Args:
        mask: `[batch, heads, length, tokens]`; boolean, true where a token is seen; or 0 there, and very negative
            elsewhere.
        length: number of tokens in this pass.
        was_real: `[batch, seen]`, false for padding, for the tokens in the cache, which come before these.

    Returns:
        Which tokens are real `[batch, length]`, or `None` if all are; and the number of each token's document
        `[batch, length]`, or `None` if each row is one document. Both are `None`, with a warning, if the mask shows
        later tokens, hides more than these, padding and other documents, or adds biases to scores: then linear
        attention ignores it, as in `transformers`.

    Raises:
        ValueError: the mask is too short, or hides real tokens in the cache.
    """
    seen, tokens = was_real.shape[1], mask.shape[-1]
    if tokens < seen + length:
        raise ValueError(
            f"a mask of shape {list(mask.shape)} is too short for {seen} tokens in the cache and {length}."
        )
    is_seen = mask if mask.dtype == torch.bool else mask == 0
    # Any other number is a bias that is added to scores, which linear attention does not have.
    is_plain = mask.dtype == torch.bool or bool((is_seen | (mask < _HIDDEN)).all())
    now = is_seen[:, 0, :, seen : seen + length]  # (batch, length, length)
    index = torch.arange(length, device=mask.device)
    later = index > index[:, None]
    # Padding does not see itself; or it sees all tokens, where `transformers` filled a row of the mask that saw none.
    sees_later = (now & later).any(-1)
    is_causal = ~sees_later | now.all(-1)
    is_real = now.diagonal(dim1=1, dim2=2) & ~sees_later
    # A document begins at a real token that does not see the one before.
    last = F.pad(index.expand_as(is_real).masked_fill(~is_real, -1).cummax(-1).values[:, :-1], (1, 0), value=-1)
    sees_last = now.gather(2, last.clamp(min=0).unsqueeze(-1)).squeeze(-1) | (last < 0)
    documents = (is_real & ~sees_last).cumsum(-1)
    # The mask that these mean. A token of the first document continues from the state, and so sees all that is in it.
    past = (documents == 0).unsqueeze(-1) & was_real.unsqueeze(1)
    expected = is_real.unsqueeze(1) & ~later & (documents.unsqueeze(1) == documents.unsqueeze(2))
    expected = F.pad(torch.cat((past, expected), -1), (0, tokens - seen - length))  # (batch, length, tokens)
    differs = (is_seen != expected.unsqueeze(1)) & is_real[:, None, :, None]
    is_readable = is_plain and bool(is_causal.all()) and not bool(differs[..., seen:].any())
    if is_readable and bool(differs[..., :seen].any()):
        raise ValueError(
            f"linear attention cannot apply this mask of shape {list(mask.shape)}: it must show the {seen} tokens in "
            "the cache, except those that an earlier mask of this form hid as padding. Pass the same padding in each "
            "pass, or masks [batch, tokens] in all of them."
        )
    if not is_readable:
        warnings.warn(
            f"this mask of shape {list(mask.shape)} holds for full attention alone. Linear attention sees all earlier "
            "tokens, since it can hide only later tokens, padding and other documents, and add nothing to scores. To "
            "choose what it sees, pass a dictionary with a mask for each kind of layer, 'full_attention' and "
            "'linear_attention' (None or [batch, tokens]).",
            FamilyWarning,
            stacklevel=2,
        )
        return None, None
    return (None if bool(is_real.all()) else is_real), (documents if bool(documents.any()) else None)


def _padding_in(cache: Any, like: Tensor) -> Tensor:
    """Return which tokens in the cache are real `[batch, seen]`, for a batch and device as those of a tensor."""
    seen = 0 if cache is None else int(cache.get_seq_length())
    was_real = getattr(cache, _REAL, None)
    if was_real is None or was_real.shape[0] != like.shape[0]:
        was_real = torch.ones(like.shape[0], 0, dtype=torch.bool)
    # Tokens after the noted ones were read with other masks, and count as real.
    return F.pad(was_real.to(like.device)[:, :seen], (0, seen - was_real[:, :seen].shape[1]), value=True)


def _cut_note(cache: Any) -> None:
    """Drop what is noted of tokens that are no longer in the cache, because it was reset or cropped."""
    note = getattr(cache, _REAL, None)
    if note is not None and not is_tracing(note):
        setattr(cache, _REAL, note[:, : int(cache.get_seq_length())])


def _note_padding(arguments: Arguments, config: Any, is_real: Tensor, makes_cache: bool) -> Arguments:
    """Note on the cache which tokens of this pass are padding, so that later masks over pairs can be checked.

    Args:
        arguments: the arguments of the forward pass.
        config: the model's configuration.
        is_real: `[batch, seq]`.
        makes_cache: whether `transformers` would make a cache.

    Returns:
        The arguments, with a cache if `transformers` would make one.
    """
    cache = cache_of(arguments)
    if cache is None:
        if not makes_cache:
            return arguments
        # This is the cache that `transformers` would make.
        cache = DynamicCache(config=config)
        arguments = arguments | {CACHE_NAME: cache}
    before = _padding_in(cache, is_real)
    setattr(cache, _REAL, torch.cat((before, is_real), 1))
    return arguments


def _apply_square_mask(
    arguments: Arguments, config: Any, dtype: torch.dtype, documents: Tensor | None, by_mask: Tensor | None
) -> Arguments:
    """Return the arguments with a mask over pairs of tokens for full attention alone.

    Raises:
        ValueError: the documents by other arguments and those by the mask, `[batch, seq]` or `None`, differ.
    """
    mask = arguments["attention_mask"]
    # Documents found by other arguments must agree with the mask, which full attention applies as it is.
    if documents is not None and (by_mask is None or not torch.equal(documents, by_mask)):
        raise ValueError(
            "a mask over pairs of tokens and `seq_idx` or `cu_seq_lens_q` begin documents at different tokens: pass "
            "one of them."
        )
    full = mask["full_attention"] if isinstance(mask, Mapping) else mask
    if isinstance(full, Tensor) and full.dtype == torch.bool and config._attn_implementation == "eager":
        # The eager attention of `transformers` adds the mask to the scores.
        full = torch.zeros_like(full, dtype=dtype).masked_fill(~full, torch.finfo(dtype).min)
    masks = {"full_attention": full, "linear_attention": None}
    return arguments | {"attention_mask": masks}


def documents_under_mask(positions: Tensor, is_real: Tensor) -> Tensor | None:
    """Find the documents in rows with padding.

    A document begins at a real token whose position is not above that of the last real token before it. Positions of
    padding before the first real token, which `generate` sets to a constant, begin no document.

    Args:
        positions: `[batch, seq]`.
        is_real: `[batch, seq]`, false for padding.

    Returns:
        The number of each token's document `[batch, seq]`, or `None` if each row is one document.
    """
    lowest = torch.iinfo(positions.dtype).min
    index = torch.arange(positions.shape[1], device=positions.device).expand_as(positions)
    # Index of the last real token before each token, -1 where there is none.
    last = F.pad(index.masked_fill(~is_real, -1).cummax(-1).values[:, :-1], (1, 0), value=-1)
    before = positions.gather(1, last.clamp(min=0)).masked_fill(last < 0, lowest)
    documents = (is_real & (positions <= before)).cumsum(-1)
    if not is_tracing(documents) and not documents[:, -1].any():
        return None
    return documents
