"""Padding anywhere in a row, and masks of every form, for delta attention.

A recurrence cannot apply a mask over pairs of tokens: it can skip padding, and begin anew at each document.
`for_linear_attention` reads from the masks of a forward pass which tokens are padding and where documents begin, and
warns of masks that say more. It takes the arguments as `keep_documents_apart` of `documents_attnres` returns them.
"""

import warnings
from collections.abc import Mapping
from inspect import signature
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import DynamicCache, KimiLinearModel
from transformers.masking_utils import find_packed_sequence_indices
from transformers.utils import is_tracing

from .documents_attnres import (
    NO_CACHE,
    Arguments,
    cache_of,
    check_values,
    documents_under_mask,
    is_start,
    refuse_cache,
    separate_under_mask,
    shape_of,
)
from .residual_attnres import FamilyWarning

# The name of the cache among a model's arguments, which `transformers` 5.24 changed.
CACHE_NAME = "cache" if "cache" in signature(KimiLinearModel.forward).parameters else "past_key_values"
_HIDDEN = -100.0  # a number that is added to scores and is lower than this hides a token
# Name of an attribute that this file sets on a cache: `[batch, tokens]`, false for padding, which the cache itself does
# not mark. As an attribute, it stays with the cache when that is copied or saved.
_REAL = "attnres_real_tokens"


def find_order(is_real: Tensor, has_cache: bool, has_state: bool) -> Tensor | None:
    """Return `is_real` if a recurrence has to skip padding, and `None` if it is enough to set padding to zero.

    Zeros are enough before all real tokens of a row that has no state yet, and after them if no state is kept.

    Args:
        is_real: `[batch, seq]`, false for padding.
        has_cache: whether the state after this pass is kept.
        has_state: whether there is a state of earlier tokens.
    """
    if is_tracing(is_real):
        return is_real
    if bool(is_real.all()):
        return None
    if has_state or is_real.shape[1] == 1:  # `transformers` ignores the mask of a single token
        return is_real
    ends = is_real[:, :-1] & ~is_real[:, 1:]
    if has_cache:
        return is_real if bool(ends.any()) else None
    starts = is_real[:, 1:] & ~is_real[:, :-1]
    goes_on = starts & (ends.cumsum(-1) > 0)
    return is_real if bool(goes_on.any()) else None


@torch.compiler.disable
def read_square_mask(
    mask: Tensor, length: int, seen: int, was_real: Tensor | None = None
) -> tuple[Tensor | None, Tensor | None]:
    """Find padding and documents in a mask over pairs of tokens, because a recurrence cannot apply such a mask.

    Args:
        mask: `[batch, heads, length, tokens]`; boolean, true where a token is seen; or 0 there, and very negative
            elsewhere.
        length: number of tokens in this pass.
        seen: number of tokens in the cache, which come before them.
        was_real: `[batch, seen]`, false for padding in the cache; `None` if it has none.

    Returns:
        Which tokens are real `[batch, length]`, or `None` if all are; and the number of each token's document
        `[batch, length]`, or `None` if each row is one document. Both are `None`, with a warning, if the mask shows
        later tokens, hides more than these, padding and other documents, or adds biases to scores: then linear
        attention ignores it, as in `transformers`.

    Raises:
        ValueError: the mask is too short, or hides real tokens in the cache.
    """
    is_seen = mask if mask.dtype == torch.bool else mask == 0
    # Any other number is a bias that is added to scores, which linear attention does not have.
    is_plain = torch.ones_like(mask) if mask.dtype == torch.bool else is_seen | (mask < _HIDDEN)
    first = is_seen[:, 0]  # (batch, length, tokens)
    past, now = first[..., :seen], first[..., seen : seen + length]
    index = torch.arange(length, device=mask.device)
    later = index > index[:, None]
    # Padding does not see itself; or it sees all tokens, where `transformers` filled a row of the mask that saw none.
    sees_later = (now & later).any(-1)
    is_real = now.diagonal(dim1=1, dim2=2) & ~sees_later
    # A document begins at a real token that does not see the one before.
    last = F.pad(index.expand_as(is_real).masked_fill(~is_real, -1).cummax(-1).values[:, :-1], (1, 0), value=-1)
    sees_last = now.gather(2, last.clamp(min=0).unsqueeze(-1)).squeeze(-1) | (last < 0)
    documents = (is_real & ~sees_last).cumsum(-1)
    expected = is_real.unsqueeze(1) & ~later & (documents.unsqueeze(1) == documents.unsqueeze(2))
    is_honoured = (now == expected) | ~is_real.unsqueeze(-1)
    # A token of the first document continues from the state, and so sees all that is in it. Padding is not.
    expected_past = (documents == 0).unsqueeze(-1)
    if was_real is not None:
        expected_past = expected_past & was_real.unsqueeze(1)
    is_past_honoured = (past == expected_past) | ~is_real.unsqueeze(-1)
    beyond = first[..., seen + length :] & is_real.unsqueeze(-1)
    is_same = (is_seen == is_seen[:, :1]) | ~is_real[:, None, :, None]
    is_causal = ~sees_later | now.all(-1)
    is_readable = is_plain.all() and is_causal.all() and is_honoured.all() and is_same.all() and not beyond.any()
    if first.shape[-1] == seen + length and bool(is_readable) and not bool(is_past_honoured.all()):
        raise ValueError(
            f"linear attention cannot apply this mask of shape {list(mask.shape)}: it must show the {seen} tokens in "
            "the cache, except those that an earlier mask of this form hid as padding. Pass the same padding in each "
            "pass, or masks [batch, tokens] in all of them."
        )
    if first.shape[-1] < seen + length:
        raise ValueError(
            f"a mask of shape {list(mask.shape)} is too short for {seen} tokens in the cache and {length}."
        )
    if not bool(is_readable and is_past_honoured.all()):
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


def _padding_in(cache: Any, batch: int, seen: int, device: torch.device) -> Tensor | None:
    """Return which tokens in the cache are real `[batch, seen]`, or `None` if no mask over pairs hid any of them."""
    was_real = getattr(cache, _REAL, None)
    if was_real is None or not seen or was_real.shape[0] != batch:
        return None
    # Tokens after the noted ones were read with other masks, and count as real.
    was_real = was_real.to(device)
    return F.pad(was_real, (0, seen - was_real.shape[1]), value=True)


def _cut_note(cache: Any) -> None:
    """Drop what is noted of tokens that are no longer in the cache, because it was reset or cropped."""
    note = getattr(cache, _REAL, None)
    if note is not None and not is_tracing(note):
        setattr(cache, _REAL, note[:, : int(cache.get_seq_length())])


def _note_padding(
    arguments: Arguments, config: Any, is_real: Tensor | None, was_real: Tensor | None, seen: int
) -> Arguments:
    """Note on the cache which tokens of this pass are padding, so that later masks over pairs can be checked.

    Args:
        arguments: the arguments of the forward pass.
        config: the model's configuration.
        is_real: `[batch, seq]`, or `None` if all tokens are real.
        was_real: `[batch, seen]`, the same for the tokens in the cache.
        seen: number of tokens in the cache.

    Returns:
        The arguments, with a cache if `transformers` would make one.
    """
    cache, use_cache = cache_of(arguments), arguments.get("use_cache")
    if is_real is None:
        return arguments
    if cache is None:
        if not (config.use_cache if use_cache is None else use_cache):
            return arguments
        # This is the cache that `transformers` would make.
        cache = DynamicCache(config=config)
        arguments = arguments | {CACHE_NAME: cache}
    before = is_real.new_ones(is_real.shape[0], seen) if was_real is None else was_real
    setattr(cache, _REAL, torch.cat((before, is_real), 1))
    return arguments


def _documents_of_masks(
    arguments: Arguments, config: Any, dtype: torch.dtype, documents: Tensor | None, shape: tuple[int, int]
) -> tuple[Arguments, Tensor | None]:
    """Make both kinds of layers keep the same documents apart where there is a mask for each kind.

    Returns:
        The arguments, and the number of each token's document `[batch, seq]`, or `None` if each row is one document.
    """
    mask, positions = arguments["attention_mask"], arguments.get("position_ids")
    linear_mask = mask.get("linear_attention")
    is_real = linear_mask[:, -shape[1] :] != 0 if isinstance(linear_mask, Tensor) else None
    # `generate` makes such masks for a static cache. For a single token they have no padding, and its position cannot
    # restart.
    if documents is None and positions is not None and shape[1] > 1:
        positions = positions.expand(shape)
        has_cache = cache_of(arguments) is not None
        if is_real is None and not has_cache:
            documents = find_packed_sequence_indices(positions)
        else:
            is_token = torch.ones_like(positions, dtype=torch.bool) if is_real is None else is_real
            documents = documents_under_mask(positions, is_token)
        if documents is not None and is_tracing(documents) and (has_cache or arguments.get("use_cache")):
            check_values((documents[:, -1] == 0).all(), NO_CACHE)
            documents = None
    if documents is None:
        return arguments, None
    refuse_cache(arguments)
    full = mask.get("full_attention")
    if full is None:
        real = torch.ones(shape, dtype=torch.bool, device=documents.device) if is_real is None else is_real
        full = separate_under_mask(real, documents, config, dtype)
    return arguments | {"attention_mask": {**mask, "full_attention": full}, "use_cache": False}, documents


def for_linear_attention(
    arguments: Arguments, config: Any, dtype: torch.dtype, documents: Tensor | None, layer_idx: int
) -> Arguments:
    """Change the arguments of a forward pass so that linear attention honours padding and documents.

    Args:
        arguments: the arguments as [`keep_documents_apart`] returns them.
        config: the model's configuration.
        dtype: dtype of the activations.
        documents: the number of each token's document `[batch, seq]`, or `None` if each row is one document.
        layer_idx: index of any layer with linear attention; its entry in the cache shows whether there is a state.

    Returns:
        The arguments, with `real_tokens`, `seq_idx` and `cu_seqlens` for the layers where they need them.

    Raises:
        ValueError: they have a mask that hides real tokens in the cache, positions of more than two dimensions, or a
            cache of keys and values alone.
    """
    shape = shape_of(arguments)
    if shape is None:
        return arguments
    length, cache, mask = shape[1], cache_of(arguments), arguments.get("attention_mask")
    if layer_idx < len(getattr(cache, "layers", ())) and not hasattr(cache.layers[layer_idx], "update_conv_state"):
        raise ValueError(
            f"the cache has keys and values for layer {layer_idx}, which has linear attention and keeps a state. Pass "
            "`DynamicCache(config=model.config)`. PEFT's prefix tuning makes such a cache: use another adapter."
        )
    # In every pass, because another one may fill the cache again without a mask over pairs.
    _cut_note(cache)
    positions = arguments.get("position_ids")
    if positions is not None and positions.ndim > 2:
        raise ValueError(f"`position_ids` must be [batch, seq], but have the shape {list(positions.shape)}.")
    if isinstance(mask, Tensor) and mask.ndim == 2 and mask.shape[1] > length and not is_tracing(mask):
        # The mask is as long as a static cache: its last tokens do not exist yet.
        mask = mask[:, : (0 if cache is None else int(cache.get_seq_length())) + length]
        arguments = arguments | {"attention_mask": mask}
    # A mask for each kind of layer, or one for all.
    linear_mask = mask.get("linear_attention") if isinstance(mask, Mapping) else mask
    has_square_mask = isinstance(linear_mask, Tensor) and linear_mask.ndim == 4
    if isinstance(mask, Mapping) and not has_square_mask:
        arguments, documents = _documents_of_masks(arguments, config, dtype, documents, shape)
    is_real = None  # (batch, seq), or `None` if no token is padding
    if has_square_mask:
        arguments, documents, is_real = _apply_square_mask(arguments, config, dtype, documents, linear_mask)
    elif isinstance(linear_mask, Tensor) and linear_mask.ndim == 2:
        # The first tokens of a longer mask are in the cache.
        is_real = linear_mask[:, -length:] != 0
        if mask is linear_mask and length == 1 and is_tracing(mask) and cache is not None and cache.is_compileable:
            # The mask may be as long as the static cache, and a graph does not know which of its tokens this one is. So
            # a single token counts as real, as in `transformers`. `generate` passes a mask for each kind of layer.
            is_real = None
        elif not isinstance(mask, Mapping):
            arguments, documents = _find_documents_under(arguments, config, dtype, documents, is_real)
    elif linear_mask is not None:
        raise ValueError(
            f"linear attention takes a mask [batch, tokens], not {type(linear_mask).__name__}: pass a dictionary with "
            "a mask for each kind of layer, 'full_attention' and 'linear_attention'."
        )
    arguments = {name: value for name, value in arguments.items() if name not in ("seq_idx", "cu_seqlens")}
    if is_real is not None:
        cache, use_cache = cache_of(arguments), arguments.get("use_cache")
        # This includes a cache that `transformers` makes later, as it does by default.
        keeps_state = cache is not None or (config.use_cache if use_cache is None else use_cache)
        order = find_order(is_real, keeps_state, cache is not None and cache.has_previous_state(layer_idx))
        if order is not None:
            arguments["real_tokens"] = order
        elif has_square_mask:
            arguments["attention_mask"]["linear_attention"] = is_real
    if documents is not None:
        arguments["seq_idx"] = documents.int()
        if documents.device.type != "cpu" and not is_tracing(documents):
            # Computed once for all layers, because the CPU waits for the device here.
            ends = documents.new_full((1,), documents.numel())
            arguments["cu_seqlens"] = torch.cat((is_start(documents).flatten().nonzero().flatten(), ends))
    return arguments


def _apply_square_mask(
    arguments: Arguments, config: Any, dtype: torch.dtype, documents: Tensor | None, square_mask: Tensor
) -> tuple[Arguments, Tensor | None, Tensor | None]:
    """Read padding and documents from a mask over pairs of tokens `[batch, heads, seq, tokens]`.

    Returns:
        The arguments, in which full attention keeps the mask; the number of each token's document; and which tokens are
        real. The last two are `[batch, seq]` or `None`, as in [`read_square_mask`].
    """
    cache, mask, length = cache_of(arguments), arguments["attention_mask"], shape_of(arguments)[1]
    seen = 0 if cache is None else int(cache.get_seq_length())
    was_real = _padding_in(cache, square_mask.shape[0], seen, square_mask.device)
    is_real, by_mask = read_square_mask(square_mask, length, seen, was_real)
    if by_mask is not None:
        refuse_cache(arguments)
        # Documents found by other arguments must agree with the mask, which full attention applies as it is.
        if documents is not None and not torch.equal(documents, by_mask):
            raise ValueError(
                "a mask over pairs of tokens and `seq_idx` or `cu_seq_lens_q` begin documents at different tokens: "
                "pass one of them."
            )
    elif documents is not None:
        raise ValueError(
            "`seq_idx` or `cu_seq_lens_q` mark several documents in a row, but the mask over pairs of tokens lets them "
            "see each other: pass one of them."
        )
    full = mask["full_attention"] if isinstance(mask, Mapping) else mask
    if isinstance(full, Tensor) and full.dtype == torch.bool and config._attn_implementation == "eager":
        # The eager attention of `transformers` adds the mask to the scores.
        full = torch.zeros_like(full, dtype=dtype).masked_fill(~full, torch.finfo(dtype).min)
    arguments = arguments | {"attention_mask": {"full_attention": full, "linear_attention": None}}
    if by_mask is not None:
        arguments["use_cache"] = False
    return _note_padding(arguments, config, is_real, was_real, seen), by_mask, is_real


def _find_documents_under(
    arguments: Arguments, config: Any, dtype: torch.dtype, documents: Tensor | None, is_real: Tensor
) -> tuple[Arguments, Tensor | None]:
    """Find documents in rows with a mask `[batch, tokens]`, and make a mask for each kind of layer.

    Returns:
        The arguments, and the number of each token's document `[batch, seq]`, or `None` if each row is one document.
    """
    mask, positions, shape = arguments["attention_mask"], arguments.get("position_ids"), shape_of(arguments)
    has_cache = cache_of(arguments) is not None or arguments.get("use_cache")
    if positions is not None and documents is None and shape[1] > 1:
        documents = documents_under_mask(positions.expand(shape), is_real)
        if documents is not None and has_cache and is_tracing(documents):
            # As without a mask: the graph is made for one document, and checks it when it runs.
            check_values((documents[:, -1] == 0).all(), NO_CACHE)
            documents = None
    if documents is None:
        return arguments, None
    refuse_cache(arguments)
    full = separate_under_mask(mask, documents, config, dtype)
    masks = {"full_attention": full, "linear_attention": is_real}
    return arguments | {"attention_mask": masks, "use_cache": False}, documents
