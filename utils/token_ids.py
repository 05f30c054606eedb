"""Check token ids against the model that is to read them, before PyTorch fails without naming either."""

from collections.abc import Iterable

from torch import Tensor
from transformers import PreTrainedModel


def check_token_ids(ids: Tensor | Iterable[int], model: PreTrainedModel, source: str) -> None:
    """Raise if a model has no embedding for a token id.

    Args:
        ids: Of any shape; a tensor should be on the CPU.
        model: The model that is to read them.
        source: What the ids come from, for the message.

    Raises:
        ValueError: Naming the id, the vocabulary's size and `source`.
    """
    size = model.get_input_embeddings().num_embeddings
    largest = int(ids.max()) if isinstance(ids, Tensor) else max(ids, default=0)
    if largest >= size:
        raise ValueError(
            f"{source} has the token id {largest}, but the model's `vocab_size` is {size}: ids are below it. "
            "Name the model's own tokenizer, or resize the model's embedding."
        )


__all__ = ["check_token_ids"]
