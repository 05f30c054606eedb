"""The options of `attnres inspect`, and the checks of them that need no PyTorch."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from attnres.checkpoints.source import ModelSource
from attnres.utils.files import Written

from .choices import Debug, Imports, check_out, check_revision, given_options
from .connections import flag
from .guard import loading

LARGEST = 10**9  # the largest number that an option takes
# The same as in `attnres.analysis.report_files`, which imports PyTorch. It checks the names of files later.
WRITTEN_REPORT = Written("a report", "inspection.json", '"written_by": "attnres inspect"', lambda folder: ())


class Dtype(StrEnum):
    """The dtypes to compute in; `auto` is the dtype of the stored model."""

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
    image: Annotated[
        list[Path] | None,
        typer.Option(
            exists=True,
            dir_okay=False,
            help="Image whose tokens are shown one by one, in place of the text's, for a model that sees. Repeatable.",
        ),
    ] = None,
    out: Annotated[Path, typer.Option(help="Directory to write.")] = Path("inspection"),
    tokens: Annotated[int, typer.Option(min=2, max=LARGEST, help="Tokens of the text to read, at most.")] = 8192,
    length: Annotated[int, typer.Option(min=2, max=LARGEST, help="Tokens of a sequence, at most.")] = 256,
    intervention_tokens: Annotated[
        int,
        typer.Option(
            min=0,
            max=LARGEST,
            help="Tokens to read for each intervention (a source is hidden, or a row made uniform); 0 makes none.",
        ),
    ] = 2048,
    batch_size: Annotated[int, typer.Option(min=1, max=LARGEST, help="Sequences at a time.")] = 8,
    revision: Annotated[str | None, typer.Option(help="Branch, tag or commit of MODEL on the Hub.")] = None,
    compare_revision: Annotated[
        str | None, typer.Option(help="Branch, tag or commit of the model of --compare on the Hub.")
    ] = None,
    tokenizer: Annotated[
        str | None,
        typer.Option(metavar="MODEL", help="Directory or Hub id of the tokenizer, if not with the model."),
    ] = None,
    dtype: Annotated[Dtype, typer.Option(help="Dtype to compute in; `auto`: that of the stored model.")] = Dtype.auto,
    device: Annotated[str, typer.Option(help="`cpu`, `cuda:1`, ...; `auto`: all accelerators, else the CPU.")] = "auto",
    serve: Annotated[
        bool,
        typer.Option("--serve", help="Show the report in a browser; without MODEL, show the earlier report in --out."),
    ] = False,
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="Run Python code that comes with a model.")
    ] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an earlier report in --out.")] = False,
    imports: Imports = None,
    debug: Debug = False,
) -> None:
    """Show how a model uses its depth: what each sublayer reads, and how much the loss depends on it.

    This writes a page for a browser (report.html), its figures as PNG and SVG, and the numbers as JSON and CSV.

    attnres inspect my-attnres --serve
    attnres inspect MODEL --compare my-attnres --text FILE --out before-and-after
    """
    if model is None:
        if not serve:
            raise typer.BadParameter("MODEL is missing: give a directory or Hub id.")
        if others := [flag(name) for name in given_options(context) if name not in ("serve", "out")]:
            raise typer.BadParameter(f"{' and '.join(others)} {'needs' if len(others) == 1 else 'need'} MODEL.")
        with loading():
            from .report_server import serve as serve_report
        serve_report(out)
        return
    if compare is None and compare_revision is not None:
        raise typer.BadParameter("--compare-revision needs --compare.")
    sources = {"--revision": ModelSource(model, revision)}
    if compare is not None:
        sources["--compare-revision"] = ModelSource(compare, compare_revision)
    for option, source in sources.items():
        source.check(needs_weights=True)
        check_revision(source, option)
    if tokenizer is not None:
        ModelSource(tokenizer).check(is_tokenizer=True)
    check_out(out, WRITTEN_REPORT, overwrite)
    for path in filter(None, (model, compare, tokenizer, text, *(image or ()))):
        if Path(path).exists() and Path(path).resolve().is_relative_to(out.resolve()):
            raise typer.BadParameter(f"{path} lies in --out {out}, which would be replaced: choose another directory.")
    with loading():
        from .inspect import InspectedSource, run_inspect
        from .report_server import serve as serve_report
    shared: dict[str, Any] = {"tokenizer": tokenizer, "dtype": dtype.value, "device": device}
    shared |= {"trust_remote_code": trust_remote_code, "images": tuple(image or ())}
    models = [(model, revision), (compare, compare_revision)]
    run_inspect(
        [InspectedSource(name, commit, **shared) for name, commit in models if name is not None],
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
