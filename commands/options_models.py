"""The options of `attnres convert`, `inspect` and `push`: what is done to a model, with it, and where it goes."""

from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from attnres.commands.connections import describe_connections, flag
from attnres.utils.files import check_replaceable
from attnres.utils.hub import check_source

from .choices import (
    DEFAULT_RESIDUAL,
    WRITTEN_MODEL,
    WRITTEN_REPORT,
    Debug,
    Residual,
    Scale,
    given,
    help_of,
    read_fields,
    refuse_options,
)
from .guard import loading


class Undone(StrEnum):
    """What a conversion may lead back to."""

    standard = "standard"


def convert(
    context: typer.Context,
    source: Annotated[str, typer.Argument(metavar="SRC", help="Directory or Hub id of the model.")],
    target: Annotated[Path, typer.Argument(metavar="DST", help="Directory to write.")],
    residual: Annotated[
        Residual,
        typer.Option(help=f"Residual connection to put in: {describe_connections()}."),
    ] = DEFAULT_RESIDUAL,
    block_size: Annotated[
        int | None, typer.Option(min=1, help=help_of("block_size", "block size S in sublayers."))
    ] = None,
    num_blocks: Annotated[
        int | None, typer.Option(min=1, help=help_of("num_blocks", "number of blocks.  [default: about 8]"))
    ] = None,
    full: Annotated[
        bool, typer.Option("--full", help=help_of("full", "Full AttnRes, every sublayer a block."))
    ] = False,
    scale: Annotated[
        Scale | None,
        typer.Option(help=help_of("scale", "`sum` is exact; `mean` only up to the norms' epsilons.  [default: sum]")),
    ] = None,
    streams: Annotated[
        int | None, typer.Option(min=2, help=help_of("streams", "number of residual streams.  [default: 4]"))
    ] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="FIELD=VALUE",
            help="Set a field of the connection or of gated attention, as attention_gate=sdpa; repeatable.",
        ),
    ] = None,
    to: Annotated[Undone | None, typer.Option(help="`standard` undoes a retrofit that is not trained yet.")] = None,
    set_block_size: Annotated[
        int | None, typer.Option(min=1, help="Regroup an AttnRes model, where its function stays the same.")
    ] = None,
    revision: Annotated[str | None, typer.Option(help="Branch, tag or commit on the Hub.")] = None,
    verify: Annotated[
        bool | None,
        typer.Option(
            "--verify/--no-verify", help="Compare the logits of both.  [default: if the model fits in memory]"
        ),
    ] = None,
    text: Annotated[
        Path | None, typer.Option(exists=True, dir_okay=False, help="Compare on this file, not on built-in prompts.")
    ] = None,
    hard_link: Annotated[bool, typer.Option("--hard-link", help="Link the weights instead of copying them.")] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace a model at DST.")] = False,
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="Take code along that came with SRC, as for its tokenizer.")
    ] = False,
    debug: Debug = False,
) -> None:
    """Retrofit a pretrained decoder exactly, or the way back.

    The result computes the same function as the decoder, from the same weights, and is ready to be trained.

    \b
    attnres convert meta-llama/Llama-3.2-1B llama-attnres --num-blocks 8
    attnres convert my-model my-model-hc --residual identity_hc --streams 4
    attnres convert my-model my-model-gated --set attn_res_gated=true --set attn_res_query=input_dependent
    attnres convert llama-attnres regrouped --set-block-size 2
    attnres convert llama-attnres llama-again --to standard
    """
    values = {
        "block_size": block_size,
        "num_blocks": num_blocks,
        "full": full or None,
        "scale": scale and scale.value,
        "streams": streams,
    }
    options = {name: value for name, value in values.items() if value is not None}
    is_named = "residual" in given(context)
    fields = read_fields(settings or ())
    refuse_options(residual, options, {"--set-block-size": set_block_size, "--to": to}, is_named, bool(fields))
    check_source(source)
    check_replaceable(target, overwrite, **WRITTEN_MODEL)
    with loading():
        from attnres.conversion.convert import plan_change, plan_retrofit, plan_standard
        from attnres.conversion.family import retrofit_fields

        from .convert import run_convert

    if unknown := [name for name in fields if name not in retrofit_fields(residual)]:
        has = ", ".join(retrofit_fields(residual))
        raise typer.BadParameter(f"--set {unknown[0]}: --residual {residual} has no such field. It has {has}.")
    if set_block_size is not None:
        plan = partial(plan_change, block_size=set_block_size)
    elif to is not None:
        plan = plan_standard
    else:
        plan = partial(plan_retrofit, residual=residual.value, **options, **fields)
    run_convert(
        source,
        target,
        plan,
        revision=revision,
        verify=verify,
        text=text,
        hard_link=hard_link,
        overwrite=overwrite,
        trust_remote_code=trust_remote_code,
        num_blocks=num_blocks,
    )


MANY = 10**9


class Dtype(StrEnum):
    """In which numbers a model is computed; `auto` is what it is stored in."""

    auto = "auto"
    float32 = "float32"
    bfloat16 = "bfloat16"
    float16 = "float16"


def inspect(
    context: typer.Context,
    model: Annotated[
        str | None, typer.Argument(metavar="MODEL", help="Directory or Hub id of the model.", show_default=False)
    ] = None,
    compare: Annotated[
        str | None, typer.Option(metavar="MODEL", help="A second model, shown beside the first on the same text.")
    ] = None,
    text: Annotated[
        Path | None,
        typer.Option(exists=True, dir_okay=False, help="Text to read.  [default: Python's language reference]"),
    ] = None,
    out: Annotated[Path, typer.Option(help="Directory to write.")] = Path("inspection"),
    tokens: Annotated[int, typer.Option(min=1, max=MANY, help="How much of the text to read.")] = 8192,
    length: Annotated[int, typer.Option(min=2, max=MANY, help="Tokens of a sequence.")] = 256,
    intervention_tokens: Annotated[
        int,
        typer.Option(
            min=0, max=MANY, help="Tokens for each source that is hidden and each row made uniform; 0 leaves both out."
        ),
    ] = 2048,
    batch_size: Annotated[int, typer.Option(min=1, max=MANY, help="Sequences at a time.")] = 8,
    revision: Annotated[str | None, typer.Option(help="Branch, tag or commit of MODEL on the Hub.")] = None,
    compare_revision: Annotated[str | None, typer.Option(help="The same of the model of --compare.")] = None,
    tokenizer: Annotated[
        str | None, typer.Option(metavar="MODEL", help="Where the tokenizer is, if not with the model.")
    ] = None,
    dtype: Annotated[Dtype, typer.Option(help="Numbers to compute in; `auto`: as stored.")] = Dtype.auto,
    device: Annotated[str, typer.Option(help="`cpu`, `cuda:1`, ...; `auto`: what accelerators there are.")] = "auto",
    serve: Annotated[
        bool, typer.Option("--serve", help="Open the report in a browser; without MODEL, an earlier one.")
    ] = False,
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="Run Python code that comes with a model.")
    ] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an earlier report in --out.")] = False,
    debug: Debug = False,
) -> None:
    """Show what a model does with its depth: what each sublayer reads, and what of that is used.

    Writes a page for a browser, report.html, its figures as PNG and SVG, and the numbers as JSON and CSV.

    \b
    attnres inspect my-attnres --serve
    attnres inspect MODEL --compare my-attnres --text FILE --out before-and-after
    """
    if model is None:
        if not serve:
            raise typer.BadParameter("MODEL is missing: a directory or Hub id.")
        if others := [flag(name) for name in given(context) if name not in ("serve", "out")]:
            raise typer.BadParameter(f"{' and '.join(others)} needs MODEL.")
        with loading():
            from .serving import serve as serve_report
        serve_report(out)
        return
    if compare is None and compare_revision is not None:
        raise typer.BadParameter("--compare-revision needs --compare.")
    for source in filter(None, (model, compare, tokenizer)):
        check_source(source)
    check_replaceable(out, overwrite, **WRITTEN_REPORT)
    for path in filter(None, (model, compare, tokenizer, text)):
        if Path(path).exists() and Path(path).resolve().is_relative_to(out.resolve()):
            raise typer.BadParameter(f"{path} lies in --out {out}, which would be replaced: choose another directory.")
    with loading():
        from .inspect import InspectedSource, run_inspect
        from .serving import serve as serve_report
    shared = {"tokenizer": tokenizer, "dtype": dtype.value, "device": device, "trust_remote_code": trust_remote_code}
    named = [(model, revision), (compare, compare_revision)]
    run_inspect(
        [InspectedSource(name, of, **shared) for name, of in named if name is not None],
        out,
        text=text,
        overwrite=overwrite,
        tokens=tokens,
        length=length,
        intervention_tokens=intervention_tokens,
        batch_size=batch_size,
    )
    if serve:
        serve_report(out)


def push(
    folder: Annotated[
        Path, typer.Argument(metavar="DIR", help="Directory of the model.", exists=True, file_okay=False)
    ],
    repo: Annotated[
        str,
        typer.Argument(
            metavar="REPO",
            help="Repository to push to, as ORG/NAME; a bare NAME is in your account. Made if it is not there.",
        ),
    ],
    private: Annotated[bool, typer.Option("--private", help="Make a private repository.")] = False,
    revision: Annotated[str | None, typer.Option(help="Branch to push to; made if it is not there.")] = None,
    create_pr: Annotated[
        bool, typer.Option("--create-pr", help="Open a pull request instead of changing the branch.")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="List the files and show the card, and upload nothing.")
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
        typer.Option("--overwrite-card", help="Where the card was edited here and on the Hub, take the one here."),
    ] = False,
    debug: Debug = False,
) -> None:
    """Publish a model on the Hub, with a card that says how it was made and how to use it.

    Weights, configuration, the code that loads them, tokenizer and licence; with them what DIR/.eval_results and
    DIR/inspection hold, or --results and --inspection name. Log in first: hf auth login.

    \b
    attnres push my-attnres me/my-attnres --dry-run
    attnres push my-attnres me/my-attnres --private --results scores --inspection inspection
    """
    with loading():
        from attnres.conversion.publishing import check_repo

        from .push import run_push

    try:
        check_repo(repo, revision)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    run_push(
        folder,
        repo,
        results=results,
        inspection=inspection,
        dry_run=dry_run,
        private=private,
        revision=revision,
        create_pr=create_pr,
        message=message,
        overwrite_card=overwrite_card,
    )
