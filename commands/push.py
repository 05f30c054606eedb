"""`attnres push`: list what is published, show the card, upload."""

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path

from huggingface_hub.utils import disable_progress_bars, enable_progress_bars, logging
from rich.console import Console
from rich.filesize import decimal
from rich.table import Table

from attnres.conversion.cards import CARD
from attnres.conversion.publishing import Publication, plan_publication, publish
from attnres.eval.hub_results import FOLDER, read_results
from attnres.quiet import quiet_transformers


def run_push(
    folder: Path,
    repo: str,
    *,
    results: Path | None = None,
    inspection: Path | None = None,
    dry_run: bool = False,
    private: bool = False,
    revision: str | None = None,
    create_pr: bool = False,
    message: str | None = None,
    overwrite_card: bool = False,
) -> None:
    """Publish the model in `folder` as `repo`; the arguments as in [`attnres.conversion.publishing.publish`].

    Args:
        dry_run: only list the files and show the card; the Hub is not asked for anything.

    Raises:
        OSError, RuntimeError, ValueError: in one line, with what to do.
    """
    console = Console(soft_wrap=True, highlight=False)
    if results is None and (folder / FOLDER).is_dir():
        results = folder
    evaluated = read_results(results) if results is not None else None
    with quiet_transformers(), console.status("Checking the model ..."):
        publication = plan_publication(folder, evaluated, inspection)
    card = publication.card_for(repo, "COMMIT" if dry_run else None)
    console.print(_table(publication, len(card.encode())))
    if publication.left_out:
        console.print(f"Stays here: {', '.join(publication.left_out)}.", markup=False)
    if dry_run:
        console.print(
            f"\nThe card of a new repository, where COMMIT will be that of the upload:\n\n{card}", markup=False
        )
        return
    logging.set_verbosity_error()  # what it warns of is said here
    with contextlib.nullcontext() if sys.stderr.isatty() else _without_bars():
        address, is_new, removed = publish(
            publication,
            repo,
            private=private,
            revision=revision,
            create_pr=create_pr,
            message=message,
            overwrite_card=overwrite_card,
        )
    if removed:
        console.print(f"Removed from the repository, of older weights: {', '.join(removed)}.", markup=False)
    console.print(f"{'Published' if is_new else 'Nothing has changed'}: {address}", markup=False)


@contextlib.contextmanager
def _without_bars() -> Iterator[None]:
    disable_progress_bars()
    try:
        yield
    finally:
        enable_progress_bars()


def _table(publication: Publication, card_size: int) -> Table:
    sizes = {name: path.stat().st_size for name, path in publication.files.items()} | {CARD: card_size}
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column()
    table.add_column(justify="right")
    for name, size in sorted(sizes.items()):
        table.add_row(name, decimal(size))
    table.add_row(f"{len(sizes)} files", decimal(sum(sizes.values())))
    return table


__all__ = ["run_push"]
