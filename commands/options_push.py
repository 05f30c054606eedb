"""The options of `attnres push`, and the checks of them that need no PyTorch."""

from pathlib import Path
from typing import Annotated

import typer

from attnres.utils.hub import check_repo

from .choices import Debug, Imports
from .guard import loading


def push(
    folder: Annotated[
        Path, typer.Argument(metavar="DIR", help="Directory of the model.", exists=True, file_okay=False)
    ],
    repo: Annotated[
        str,
        typer.Argument(
            metavar="REPO",
            help="Repository to push to, as ORG/NAME; a bare NAME is in your account. A missing repository is created.",
        ),
    ],
    private: Annotated[
        bool,
        typer.Option(
            "--private",
            help="Create a private repository.  [default: public, unless the organization makes new ones private]",
        ),
    ] = False,
    revision: Annotated[str | None, typer.Option(help="Branch to push to; a missing branch is created.")] = None,
    create_pr: Annotated[
        bool, typer.Option("--create-pr", help="Open a pull request instead of changing the branch.")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="List the files and show the card, but upload nothing.")
    ] = False,
    message: Annotated[str | None, typer.Option(help="Message of the commit.  [default: Upload model]")] = None,
    results: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR", exists=True, file_okay=False, help="Publish the results of an attnres eval --out DIR."
        ),
    ] = None,
    inspection: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR", exists=True, file_okay=False, help="Publish the report of an attnres inspect --out DIR."
        ),
    ] = None,
    overwrite_card: Annotated[
        bool,
        typer.Option("--overwrite-card", help="If the card was edited here and on the Hub, use the one here."),
    ] = False,
    hashes: Annotated[
        bool, typer.Option("--hashes", help="List the SHA-256 of each file of code in the card.")
    ] = False,
    imports: Imports = None,
    debug: Debug = False,
) -> None:
    """Publish a model on the Hub, with a card that says how it was made and how to use it.

    This uploads weights, configuration, the code that loads them, tokenizer and licence. It also uploads the evaluation
    results in DIR/.eval_results and the report in DIR/inspection, or those that --results and --inspection name. Log in
    first: hf auth login.

    attnres push my-attnres me/my-attnres --dry-run
    attnres push my-attnres me/my-attnres --results scores --inspection report
    """
    try:
        check_repo(repo, revision)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    with loading():
        from attnres.publishing.push import UploadOptions

        from .push import run_push

    options = UploadOptions(private, revision, create_pr, message, overwrite_card)
    run_push(folder, repo, options, results=results, inspection=inspection, dry_run=dry_run, hashes=hashes)
