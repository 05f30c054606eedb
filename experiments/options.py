"""Options of the command line: values that make no sense are refused before anything is trained."""

import argparse
import os
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import TypeVar

from attnres.utils.files import parents

from .harness import SELECTION_SEED, is_rate, is_seed

PAGES = "Markdown file to update; default the page of the experiment, for a trial one beside --results"
Number = TypeVar("Number", int, float)


def _number(kind: type[Number], text: str, example: str) -> Number:
    try:
        return kind(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no number such as {example}") from None


def a_rate(text: str) -> float:
    """A learning rate of the command line."""
    if not is_rate(rate := _number(float, text, "0.004")):
        raise argparse.ArgumentTypeError(f"{text} is no learning rate: it is above 0, such as 0.004")
    return rate


def a_count(text: str) -> int:
    """A number of tokens of the command line."""
    if (count := _number(int, text, "2097152")) < 1:
        raise argparse.ArgumentTypeError(f"{text} is too few: at least 1")
    return count


def a_seed(text: str) -> int:
    """A seed of reported runs."""
    if not is_seed(seed := _number(int, text, "0")):
        raise argparse.ArgumentTypeError(
            f"a seed is a number from 0 to 2**32 - 1, and {SELECTION_SEED} is the one that settings are chosen by; "
            f"{text} is none"
        )
    return seed


def a_results_file(text: str) -> Path:
    """A file for stored runs."""
    return _a_file(text, ".json", "runs are stored in")


def a_page(text: str) -> Path:
    """A file for tables."""
    return _a_file(text, ".md", "tables are written into")


def _a_file(text: str, suffix: str, use: str) -> Path:
    path = Path(text)
    if path.suffix != suffix or path.is_dir():
        raise argparse.ArgumentTypeError(f"{text} is no {suffix} file, which {use}")
    if path.is_symlink():  # what goes beside it goes beside the file
        path = Path(os.path.realpath(path))
    a_folder(str(path.parent))
    return path


def a_folder(text: str) -> Path:
    """A folder that is there, or can be made."""
    if not text:
        raise argparse.ArgumentTypeError("a folder has a name; for this one, write .")
    path = Path(text)
    nearest = next(place for place in (path, *path.absolute().parents) if os.path.lexists(place))
    if not nearest.is_dir():
        raise argparse.ArgumentTypeError(f"{text} is no place for a folder: {nearest} is no folder")
    try:
        with parents(path / "file"):
            tempfile.TemporaryFile(dir=path).close()
    except OSError as error:
        raise argparse.ArgumentTypeError(f"{text} is no place for a folder: {error.strerror}") from error
    return path


def add_work(parser: argparse.ArgumentParser) -> None:
    work = Path(tempfile.gettempdir()) / "attnres-experiments"
    parser.add_argument("--work", type=a_folder, default=work, help=f"folder for checkpoints; default {work}")


def chosen(option: str, names: Iterable[str] | None, among: Iterable[str]) -> list[str]:
    """The names that an option gives, or else all. Raises ValueError: there is no such name."""
    among = list(among)
    if unknown := set(names or ()) - set(among):
        raise ValueError(f"{option}: {', '.join(map(repr, sorted(unknown)))} is none of {', '.join(map(repr, among))}.")
    return list(names or among)
