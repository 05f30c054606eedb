"""`transformers` without its notes and bars, for those who have their own."""

import contextlib
from collections.abc import Iterator

from transformers.utils import logging


@contextlib.contextmanager
def quiet_transformers() -> Iterator[None]:
    """Without the notes on missing GPU kernels and the bars of loading and saving."""
    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()
