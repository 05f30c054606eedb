"""Turn errors of `transformers` on models that cannot be loaded into errors of one line, for several commands."""

from collections.abc import Generator
from contextlib import contextmanager
from pickle import UnpicklingError

from huggingface_hub.errors import StrictDataclassError

# The errors that `from_pretrained` raises on files that are missing or damaged.
_LOADING_ERRORS = (
    *(ArithmeticError, AttributeError, KeyError, OSError, RuntimeError, TypeError, ValueError),
    *(StrictDataclassError, UnpicklingError),
)


@contextmanager
def in_one_line(name: str, part: str) -> Generator[None]:
    """Turn loading errors within the block into a `ValueError` of one line.

    Args:
        name: The directory or Hub id of the model.
        part: The part that the block loads, such as "configuration".

    Raises:
        ValueError: The block raised an error. The message names the model and the part.
    """
    try:
        yield
    except _LOADING_ERRORS as error:
        raise ValueError(explanation(name, part, error)) from error


def explanation(name: str, part: str, error: BaseException) -> str:
    """Return the message that a part of a model, such as its tokenizer, cannot be loaded."""
    return f"the {part} of {name} cannot be loaded. ({type(error).__name__}: {' '.join(str(error).split())})"


__all__ = ["explanation", "in_one_line"]
