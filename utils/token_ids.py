"""Check token ids against the vocabulary of a model: PyTorch's own error names neither the id nor the model."""

from collections.abc import Iterable

from torch import Tensor
from transformers import PreTrainedModel


def check_token_ids(ids: Tensor | Iterable[int], model: PreTrainedModel, source: str) -> None:
    """Raise if a model has no embedding for a token id.

    Args:
        ids: The token ids, in any shape. A tensor should be on the CPU.
        model: The model that will read them.
        source: The text or tokenizer that the ids come from, for the message.

    Raises:
        ValueError: An id is too large. The message names it, the vocabulary's size and `source`.
    """
    # An `nn.Embedding`, or the wrapper of an adapter, which passes its attributes on.
    size: int = model.get_input_embeddings().num_embeddings  # pyrefly: ignore[bad-assignment]
    largest = int(ids.max()) if isinstance(ids, Tensor) else max(ids, default=0)
    if largest >= size:
        raise ValueError(
            f"{source} has the token id {largest}, but the model's `vocab_size` is {size}: ids must be below "
            "it. Give the model's own tokenizer, or resize the model's embedding."
        )


__all__ = ["check_token_ids"]
