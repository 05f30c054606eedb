"""The rows of one forward pass: which tokens are padding, and where documents begin.

Four *signs* mark the documents of a forward pass: `position_ids` that restart, borders (`cu_seq_lens_q`), numbers
(`seq_idx`) and a mask over pairs of tokens. `transformers` takes restarting positions for documents only without mask
and cache, but makes a cache by default; only some kernels read the other signs. Here all signs mean the same for every
layer, and a combination that cannot be honoured raises an error. Positions that only jump ahead begin documents where
no cache is made, as in `transformers`.

A decoder reads its rows once, before its first layer. For softmax attention, [`keep_apart`] makes the arguments from
which `transformers` makes its masks. For delta attention, `read_rows` of `padding_attnres` makes `Rows`.
"""

from collections.abc import Mapping
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.masking_utils import (
    create_masks_for_generate,
    find_packed_sequence_indices,
    packed_sequence_mask_function,
)
from transformers.utils import is_tracing
from transformers.utils.generic import is_flash_attention_requested

Arguments = dict[str, Any]
# Names for borders of documents: two keywords of flash attention in `transformers`, and one of flash-linear-attention.
_BORDERS = ("cu_seq_lens_q", "cu_seq_lens_k", "cu_seqlens")
_NUMBERS = (*_BORDERS, "seq_idx")
# The length of the longest document, which flash attention takes beside its borders.
_LENGTHS = ("max_length_q", "max_length_k")
NO_CACHE = (
    "rows of several documents cannot fill a cache, in which they would be one text: pass `use_cache=False` and no "
    "cache, or each document as a separate row."
)


def cache_of(arguments: Arguments) -> Any:
    """Return the cache among the arguments, or `None`. Its name differs before and after `transformers` 5.24."""
    cache = arguments.get("cache")
    return arguments.get("past_key_values") if cache is None else cache


def shape_of(arguments: Arguments) -> tuple[int, int] | None:
    """Return batch size and length of the tokens, or `None` if the arguments hold no tokens."""
    for name in ("input_ids", "inputs_embeds"):
        if isinstance(arguments.get(name), Tensor):
            return tuple(arguments[name].shape[:2])
    return None


def documents_by_signs(arguments: Arguments, shape: tuple[int, int], makes_cache: bool) -> Tensor | None:
    """Find the documents in each row by all signs but a mask.

    Without a mask and a cache, a document begins where `position_ids` do not grow by one. This is the rule of
    `transformers`. Where a cache would be made and there is no other sign, positions that only jump ahead are those of
    one text.

    Args:
        arguments: the arguments of a forward pass.
        shape: batch size and length of the tokens.
        makes_cache: whether the pass makes a cache unless it has several documents.

    Returns:
        The number of each token's document `[batch, seq]`, or `None` if each row is one document. A traced graph cannot
        branch on values; there, given `position_ids` always count as those of several documents.

    Raises:
        ValueError: two arguments contradict each other, one does not fit the tokens, or positions jump ahead where
            a jump is ambiguous.
    """
    signs = _documents_by_numbers(arguments, shape)
    positions = arguments.get("position_ids")
    if positions is None and not signs and arguments.get("attention_mask") is None:
        for name in _LENGTHS:
            longest = arguments.get(name)
            if longest is not None:
                check_values(
                    longest >= shape[1],
                    f"`{name}` is less than the {shape[1]} tokens of a row, so it must hold several documents, but no "
                    "argument marks where they begin: pass `cu_seq_lens_q`, `seq_idx` or `position_ids` too, or leave "
                    f"out `{name}`.",
                )
    if positions is not None and positions.ndim == 1:
        positions = positions.unsqueeze(0)
    # Several positions for each token, as for images, do not mark documents.
    is_plain = arguments.get("attention_mask") is None and cache_of(arguments) is None
    if positions is not None and positions.ndim == 2 and is_plain:
        may_jump = makes_cache and not signs
        signs = {"position_ids": _documents_by_positions(positions.expand(shape[0], -1), may_jump), **signs}
    for first, second in pairwise(signs):
        check_values(
            _begin_alike(signs[first], signs[second]),
            f"`{first}` and `{second}` begin documents at different tokens: pass only one of them, or make them agree.",
        )
    return next((documents for documents in reversed(signs.values()) if documents is not None), None)


def _documents_by_positions(positions: Tensor, may_jump: bool) -> Tensor | None:
    """Find the documents that `position_ids` `[batch, seq]` mark; with `may_jump`, one text may jump ahead."""
    documents = find_packed_sequence_indices(positions)
    if documents is None or not may_jump:
        return documents
    steps = positions.diff(dim=-1)
    grows = (steps > 0).all(-1)  # [batch]
    if not is_tracing(documents) and bool(grows.all()):
        return None
    check_values(
        ~(grows & (steps > 1).any(-1)).any(),
        "`position_ids` of a row jump ahead. In a compiled graph, or beside rows whose positions restart, a jump is "
        "ambiguous: pass `use_cache=False` to begin a document at each jump, or an `attention_mask` for rows that are "
        "one text.",
    )
    return documents


def _begin_alike(first: Tensor | None, second: Tensor | None) -> Tensor | bool:
    """Return whether two numberings `[batch, seq]` begin documents at the same tokens; `None` is one document."""
    if first is None or second is None:
        numbers = second if first is None else first
        return numbers is None or (numbers == numbers[:, :1]).all()
    return ((first.diff(dim=-1) != 0) == (second.diff(dim=-1) != 0).to(first.device)).all()


def _documents_by_numbers(arguments: Arguments, shape: tuple[int, int]) -> dict[str, Tensor | None]:
    """Find the documents by each argument that holds borders or numbers.

    Returns:
        Name of the argument -> number of each token's document `[batch, seq]`, or `None` if each row is one document.
    """
    signs: dict[str, Tensor | None] = {}
    batch, length = shape
    for name in _BORDERS:
        borders = arguments.get(name)
        if borders is None:
            continue
        if name == "cu_seq_lens_k" and cache_of(arguments) is not None and borders.shape == (2,):
            continue  # the keys of one text, the cached ones included
        is_whole = batch == 1 and borders.ndim == 1 and len(borders) >= 2
        if is_whole:
            is_whole = (borders[0] == 0) & (borders[-1] == length) & (borders.diff() >= 0).all()
        check_values(
            is_whole, f"`{name}` must hold the borders of the documents in a single row, from 0 to its length."
        )
        signs[name] = None
        if len(borders) > 2:
            tokens = torch.arange(length, device=borders.device)
            signs[name] = torch.searchsorted(borders[1:].contiguous(), tokens, right=True).unsqueeze(0)
    numbers = arguments.get("seq_idx")
    if numbers is not None:
        if tuple(numbers.shape) != shape:
            raise ValueError(f"`seq_idx` must have the tokens' shape {list(shape)}, but has {list(numbers.shape)}.")
        documents = F.pad((numbers.diff(dim=-1) != 0).cumsum(-1), (1, 0))
        is_one = not is_tracing(documents) and not documents[:, -1].any()
        signs["seq_idx"] = None if is_one else documents
    return signs


def check_values(condition: Tensor | bool, message: str) -> None:
    """Raise an error with this message if a condition on the values of tensors does not hold.

    A traced graph cannot branch on values. So the check becomes an operation of the graph, which raises RuntimeError
    when it runs.

    Raises:
        ValueError: the condition does not hold, outside of a traced graph.
    """
    if isinstance(condition, Tensor) and is_tracing(condition):
        # `_assert_async` is private, but no other check of `torch` avoids both a graph break and a copy to the host.
        torch._assert_async(condition, message)
    elif not condition:
        raise ValueError(message)


def is_start(documents: Tensor) -> Tensor:
    """Return where documents begin, `[batch, seq]`, from their numbers `[batch, seq]`; each row begins with one."""
    return F.pad(documents[:, 1:] != documents[:, :-1], (1, 0), value=True)


def positions_in(documents: Tensor) -> Tensor:
    """Return the position of each token in its document, `[batch, seq]`, from the documents' numbers `[batch, seq]`."""
    tokens = torch.arange(documents.shape[1], device=documents.device).expand_as(documents)
    return tokens - tokens.masked_fill(~is_start(documents), 0).cummax(-1).values


def find_documents(arguments: Arguments, shape: tuple[int, int], makes_cache: bool) -> tuple[Arguments, Tensor | None]:
    """Find the documents in each row by all signs but a mask over pairs of tokens.

    Args:
        arguments: the arguments of a forward pass by name; they are not changed in place.
        shape: batch size and length of the tokens.
        makes_cache: whether the pass makes a cache unless it has several documents.

    Returns:
        The arguments, without a mask that hides nothing beside other signs; and the number of each token's document
        `[batch, seq]`, or `None` if each row is one document.

    Raises:
        ValueError: two signs contradict each other, one does not fit the tokens, or positions restart where a cache
            continues.
    """
    mask, is_numbered = arguments.get("attention_mask"), any(arguments.get(name) is not None for name in _NUMBERS)
    if is_numbered and isinstance(mask, Tensor) and mask.ndim == 2 and not is_tracing(mask) and bool(mask.all()):
        # This mask hides nothing, but `transformers` looks for documents only where there is no mask.
        mask, arguments = None, arguments | {"attention_mask": None}
    documents = documents_by_signs(arguments, shape, makes_cache)
    cache, positions = cache_of(arguments), arguments.get("position_ids")
    if documents is not None:
        documents = one_if_traced_with_cache(documents, arguments)
    # The position of a single token cannot restart, so the graph of a decoding step has no check.
    elif cache is not None and mask is None and positions is not None and positions.shape[-1] > 1:
        check_values(positions.ndim > 2 or (positions.diff(dim=-1) > 0).all(), NO_CACHE)
    return arguments, documents


def one_if_traced_with_cache(documents: Tensor, arguments: Arguments) -> Tensor | None:
    """Return `None`, for rows of one document each, in a graph whose pass fills a cache; else the documents.

    With a cache, rows usually are one document. The graph is made for that, and checks it when it runs.
    """
    if is_tracing(documents) and fills_cache(arguments):
        check_values((documents[:, -1] == 0).all(), NO_CACHE)
        return None
    return documents


def fills_cache(arguments: Arguments) -> bool:
    """Return whether the caller passes a cache or asks for one."""
    return cache_of(arguments) is not None or bool(arguments.get("use_cache"))


def keep_apart(
    arguments: Arguments, documents: Tensor, config: Any, dtype: torch.dtype, is_real: Tensor | None = None
) -> Arguments:
    """Change the arguments of a forward pass so that `transformers`' attention keeps documents of one row apart.

    Args:
        arguments: the arguments by name; they are not changed in place.
        documents: `[batch, seq]`, the number of each token's document.
        config: the model's configuration.
        dtype: dtype of the activations.
        is_real: `[batch, seq]`, false for padding, where the mask does not say it for all kinds of layers.

    Raises:
        ValueError: the rows would fill a cache, or flash attention cannot keep these documents apart.
    """
    if fills_cache(arguments):
        raise ValueError(NO_CACHE)
    mask = arguments.get("attention_mask")
    # By default `transformers` would make a cache, and would not look for documents then.
    arguments = arguments | {"use_cache": False}
    if arguments.get("position_ids") is None:
        arguments["position_ids"] = positions_in(documents)
    if mask is None:  # `transformers` keeps documents apart by their positions
        if documents.shape[0] > 1 and is_flash_attention_requested(config):
            raise ValueError(
                f"flash attention keeps documents apart in a single row only, but the batch has {documents.shape[0]}: "
                "join the rows into one (`DataCollatorWithFlattening`), or load the model with "
                "`attn_implementation='sdpa'`."
            )
    elif isinstance(mask, Mapping):
        if mask.get("full_attention") is None:
            padding = torch.ones_like(documents, dtype=torch.bool) if is_real is None else is_real
            # pyrefly: ignore[invalid-argument]  # such a backbone has layers of several kinds
            arguments["attention_mask"] = {**mask, **_masks_of_documents(padding, documents, config, dtype)}
    elif isinstance(mask, Tensor) and mask.ndim == 2:
        arguments["attention_mask"] = _masks_of_documents(mask, documents, config, dtype)
    return arguments


def _masks_of_documents(mask: Tensor, documents: Tensor, config: Any, dtype: torch.dtype) -> Tensor | dict[str, Tensor]:
    """Make the masks with which softmax attention keeps documents apart in rows with padding.

    Args:
        mask: `[batch, seq]`, 0 for padding.
        documents: `[batch, seq]`, the number of each token's document.
        config: the model's configuration.
        dtype: dtype of the activations.

    Returns:
        The mask `[batch, 1, seq, seq]`; for layers of several kinds, such as sliding windows, a dictionary of masks.

    Raises:
        ValueError: flash attention is used, which takes no such mask.
    """
    if is_flash_attention_requested(config):
        raise ValueError(
            "flash attention cannot keep the documents of a padded row apart: leave `attention_mask` out and the "
            "padding too (`DataCollatorWithFlattening`), or load the model with `attn_implementation='sdpa'`."
        )
    # `transformers` reads only shape, dtype and device of the embeddings. The documents are known, so it needs no
    # position ids (`None`).
    embeddings = torch.empty(*mask.shape, 0, dtype=dtype, device=mask.device)
    apart = packed_sequence_mask_function(documents)
    return create_masks_for_generate(config, embeddings, mask, None, and_mask_function=apart)
