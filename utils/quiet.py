"""Silence `transformers`, for commands that print their own messages and progress bars."""

import contextlib
from collections.abc import Generator

from transformers.utils import logging


@contextlib.contextmanager
def quiet_transformers() -> Generator[None]:
    """Silence the warnings of `transformers` and its progress bars of loading and saving while the block runs."""
    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()
