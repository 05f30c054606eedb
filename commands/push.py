"""`attnres push`: list the files to publish, show the card, and upload them."""

import contextlib
import sys
from collections.abc import Callable, Generator
from pathlib import Path

from huggingface_hub import EvalResultEntry
from huggingface_hub.utils import disable_progress_bars, enable_progress_bars, logging
from rich.console import Console
from rich.filesize import decimal
from rich.table import Table

from attnres.analysis.record import WRITTEN_BY
from attnres.analysis.report_files import NUMBERS, report_files, report_names
from attnres.checkpoints.source_files import check_file
from attnres.eval.hub_results import FOLDER, is_written_here, read_results
from attnres.publishing.card_text import read_model_card
from attnres.publishing.cards import CARD, no_hub_ids
from attnres.publishing.publication import INSPECTION, Publication, make_publication
from attnres.publishing.push import UploadOptions, publish
from attnres.utils.progress import status
from attnres.utils.quiet import quiet_transformers
from attnres.utils.wording import counted

from .choices import describe_unread, shown

_MAX_NAMED = 20  # the largest number of files that a message names
_ACCOUNT = "YOUR-NAME"  # in place of the user's account, which only the Hub knows


def run_push(
    folder: Path,
    repo: str,
    options: UploadOptions,
    *,
    results: Path | None,
    inspection: Path | None,
    dry_run: bool,
    hashes: bool,
) -> None:
    """Publish the model in `folder` as the repository `repo` on the Hub.

    Args:
        folder: The model's directory.
        repo: The id of the repository, as `ORG/NAME` or `NAME`.
        options: How to upload.
        results: The `--out` of an `attnres eval` whose results to publish; `None` for the results in `folder`.
        inspection: The `--out` of an `attnres inspect` whose report to publish; `None` for the report in `folder`.
        dry_run: Whether only to list the files and show the card, without contacting the Hub.
        hashes: Whether the card lists the SHA-256 of each file of code.

    Raises:
        OSError, RuntimeError, ValueError: The model is not published. The message is one line with the remedy.
    """
    console = Console(soft_wrap=True, highlight=False)
    evaluated = _results(folder) if results is None else _results(results, is_required=True)
    report = _report(folder, inspection)
    with quiet_transformers(), status(console, "Checking the model ..."):
        publication = make_publication(folder, evaluated, report, has_hashes=hashes)
    # The card names the model by ORG/NAME. Only the Hub knows the account of a bare name, and a dry run does not
    # contact the Hub.
    full_id = repo if "/" in repo else f"{_ACCOUNT}/{repo}"
    card = publication.card_for(full_id, "COMMIT" if dry_run else None)
    console.print(_table(publication, len(card.encode())))
    if left_out := publication.left_out:
        others = f" and {counted(len(left_out) - _MAX_NAMED, 'other file')}" if len(left_out) > _MAX_NAMED else ""
        console.print(f"Stays here: {', '.join(map(shown, left_out[:_MAX_NAMED]))}{others}.")
        console.print(f"(Only files with known names are uploaded. `hf upload {shown(repo)} FILE` adds another file.)")
    if publication.unread:
        console.print(f"{describe_unread(publication.unread, shown(str(folder)))} Published unchanged.")
    place = shown(str(folder / CARD))
    metadata = read_model_card(card).data
    if lacking := [name for name in ("license", "base_model") if not metadata.get(name)]:
        fields = " and no ".join(f"`{name}`" for name in lacking)
        console.print(f"Note: the card names no {fields}; you can add it to the metadata in {place}.")
    for name in ("base_model", "datasets"):
        if wrong := no_hub_ids(metadata[name]) if metadata.get(name) else []:
            console.print(
                f"Note: the Hub will refuse the card: its `{name}` must name Hub ids, not "
                f"{', '.join(shown(str(value)) for value in wrong)}. Correct it in {place}."
            )
    if full_id != repo:
        console.print(
            f"Note: {shown(repo)} names no account or organization, so it goes to the account of your token, as "
            f"{shown(full_id)}. Give ORG/NAME to choose."
        )
    if dry_run:
        console.print(
            f"\nThe card of a new repository, where COMMIT stands for the commit of the upload:\n\n{card}", markup=False
        )
        return
    logging.set_verbosity_error()  # the notes printed here take the place of its warnings
    with contextlib.nullcontext() if sys.stderr.isatty() else _without_bars():
        published = publish(publication, repo, options, _measurements)
    if published.removed:
        removed = ", ".join(map(shown, published.removed))
        console.print(f"Removed from the repository, as older weights that would be loaded instead: {removed}.")
    if published.outdated:
        outdated = ", ".join(map(shown, published.outdated))
        console.print(f"Removed from the repository, as they belong to other weights: {outdated}.")
    for note in published.notes:
        console.print(f"Note: {note}", markup=False)
    console.print(f"{'Published' if published.is_new else 'Nothing has changed'}: {published.address}", markup=False)


def _results(folder: Path, is_required: bool = False) -> dict[Path, list[EvalResultEntry]]:
    """Return the results of evaluations in a folder by their files. Raise an error if required results are missing."""
    paths = sorted((folder / FOLDER).glob("*.yaml"))
    for path in paths:
        check_file(folder, path)
    return read_results(folder) if paths or is_required else {}


def _report(folder: Path, inspection: Path | None) -> dict[str, Path]:
    """Return the files of a report by name. Raise FileNotFoundError if `inspection` is given but has no report."""
    files = report_files(inspection or folder / INSPECTION)
    if inspection and not files:
        raise FileNotFoundError(
            f"{inspection} is no report of `attnres inspect`: its inspection.json is missing, or of another program."
        )
    return files


def _measurements(names: list[str], read: Callable[[str], bytes]) -> list[str]:
    """Return which files of a repository `attnres eval` and `attnres inspect` have written."""
    results = [name for name in names if name.startswith(f"{FOLDER}/") and name.endswith(".yaml")]
    written = [name for name in results if is_written_here(name.removeprefix(f"{FOLDER}/"), read(name))]
    numbers = f"{INSPECTION}/{NUMBERS}"
    if numbers not in names or WRITTEN_BY.encode() not in read(numbers):
        return written
    report = {f"{INSPECTION}/{name}" for name in report_names()}
    return written + [name for name in names if name in report]


@contextlib.contextmanager
def _without_bars() -> Generator[None]:
    """Turn off the progress bars of `huggingface_hub`, which fill a log file with lines."""
    disable_progress_bars()
    try:
        yield
    finally:
        enable_progress_bars()


def _table(publication: Publication, card_size: int) -> Table:
    """Return the table of the files to publish, with their sizes in bytes and the total."""
    sizes = {name: path.stat().st_size for name, path in publication.files.items()} | {CARD: card_size}
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(overflow="fold")
    table.add_column(justify="right")
    for name, size in sorted(sizes.items()):
        table.add_row(shown(name), decimal(size))
    table.add_row(f"{len(sizes)} files", decimal(sum(sizes.values())))
    return table


__all__ = ["run_push"]
