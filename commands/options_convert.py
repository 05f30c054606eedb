"""The options of `attnres convert`, and the checks of them that need no PyTorch."""

from collections.abc import Collection
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from attnres.checkpoints.source import ModelSource
from attnres.utils.declared import declared_connections
from attnres.utils.files import check_space
from attnres.utils.model_files import WRITTEN_ADAPTER, WRITTEN_MODEL, weight_bytes
from attnres.utils.wording import did_you_mean

from .choices import Debug, Imports, check_out
from .connections import connections, describe_connections, flag, help_of, owners
from .guard import loading

DEFAULT_RESIDUAL = next(iter(connections()))


def _check_residual(name: str | None) -> str | None:
    """Return the name of a connection or preset; raise `typer.BadParameter` for another name."""
    known = connections()  # with those that `--import` has added
    if name is not None and name not in known:
        raise typer.BadParameter(f"{name!r} is not one of {', '.join(map(repr, known))}.")
    return name


class Scale(StrEnum):
    """How attention residuals scale what they read."""

    sum = "sum"
    mean = "mean"


class Undone(StrEnum):
    """The results of undoing a retrofit."""

    standard = "standard"
    released = "released"


class AdapterForm(StrEnum):
    """The forms of an adapter of Kimi K3."""

    released = "released"
    attnres = "attnres"


def convert(
    source: Annotated[str, typer.Argument(metavar="SRC", help="Directory or Hub id of the model.")],
    target: Annotated[Path, typer.Argument(metavar="DST", help="Directory to write.")],
    residual: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            callback=_check_residual,
            autocompletion=lambda: list(connections()),
            help=f"Residual connection to put in: {describe_connections()}.  [default: {DEFAULT_RESIDUAL}]",
        ),
    ] = None,
    block_size: Annotated[
        int | None, typer.Option(min=1, help=help_of("block_size", "block size S in sublayers."))
    ] = None,
    num_blocks: Annotated[
        int | None, typer.Option(min=1, help=help_of("num_blocks", "number of blocks.  [default: about 8]"))
    ] = None,
    full: Annotated[
        bool, typer.Option("--full", help=help_of("full", "Full AttnRes: every sublayer is a block."))
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
            help="Set a field of the connection, or `attention_gate` or `value_residual`; may be repeated.",
        ),
    ] = None,
    to: Annotated[
        Undone | None,
        typer.Option(help="`standard`: undo an untrained retrofit. `released`: undo a conversion of Kimi K3."),
    ] = None,
    adapter: Annotated[
        AdapterForm | None,
        typer.Option(
            help="Convert an adapter of Kimi K3. `released`: to the names of the release, for other programs. "
            "`attnres`: from these names to those that are used here."
        ),
    ] = None,
    set_block_size: Annotated[
        int | None, typer.Option(min=1, help="Change the blocks of an AttnRes model, if its function stays the same.")
    ] = None,
    pack_experts: Annotated[
        bool, typer.Option("--pack-experts", help="Pack the routed experts of Kimi K3 as MXFP4, as a release has them.")
    ] = False,
    with_parts: Annotated[
        str | None,
        typer.Option(
            metavar="RELEASE",
            help="Directory or Hub id of the release of Kimi K3 that SRC was trained from. DST gets the other parts of "
            "the release, such as the vision part. Packed experts that training did not change keep their bytes, with "
            "--pack-experts or if none has changed.",
        ),
    ] = None,
    revision: Annotated[str | None, typer.Option(help="Branch, tag or commit on the Hub.")] = None,
    verify: Annotated[
        bool | None,
        typer.Option(
            "--verify/--no-verify", help="Compare the logits of SRC and DST.  [default: if the model fits in memory]"
        ),
    ] = None,
    text: Annotated[
        Path | None, typer.Option(exists=True, dir_okay=False, help="Compare on this file, not on built-in prompts.")
    ] = None,
    hard_link: Annotated[bool, typer.Option("--hard-link", help="Link the weights instead of copying them.")] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace DST if it holds only a model.")] = False,
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="Copy code that came with SRC, such as its tokenizer's.")
    ] = False,
    imports: Imports = None,
    debug: Debug = False,
) -> None:
    """Retrofit a pretrained decoder exactly, or undo a retrofit. Make a released Kimi K3 load by the Auto classes.

    The result computes the same function as the decoder with the same weights, and you can train it.
    A conversion of Kimi K3 keeps every byte of the weights, also packed experts and the vision part, unless
    you ask for other experts or parts (--pack-experts, --with-parts).

    attnres convert meta-llama/Llama-3.2-1B llama-attnres --num-blocks 8
    attnres convert my-model my-model-hc --residual identity_hc --streams 4
    attnres convert MODEL gated --set attn_res_gated=true --set attn_res_window=8
    attnres convert llama-attnres regrouped --set-block-size 2
    attnres convert llama-attnres llama-again --to standard
    attnres convert my-k3 my-k3-attnres
    attnres convert runs/k3/model my-k3-tuned --with-parts my-k3 --pack-experts
    attnres convert runs/lora/adapter for-others --adapter released
    """
    values = {
        "block_size": block_size,
        "num_blocks": num_blocks,
        "full": full or None,
        "scale": scale and scale.value,
        "streams": streams,
    }
    options = {name: value for name, value in values.items() if value is not None}
    connection = residual or DEFAULT_RESIDUAL
    fields = read_fields(settings or (), connection)
    # Of the options that the user has given, `flags` are for a retrofit, and `others` for other conversions.
    flags = [name for name, is_given in {"--residual": residual, "--set": fields}.items() if is_given]
    flags += map(flag, options)
    kinds = {"--set-block-size": set_block_size, "--to": to, "--adapter": adapter}
    others = [name for name, value in kinds.items() if value is not None]
    parts = [name for name, value in {"--pack-experts": pack_experts, "--with-parts": with_parts}.items() if value]
    if len(others) + bool(flags) + bool(parts) > 1:
        raise typer.BadParameter(f"{' and '.join([*others, *flags, *parts])} exclude each other.")
    check_options(connection, options)
    if adapter is not None:
        check_out(target, WRITTEN_ADAPTER, overwrite, "DST")
        with loading():
            from attnres.conversion.adapter_kimi_k3 import convert_adapter
        convert_adapter(Path(source), target, adapter.value, overwrite=overwrite)
        typer.echo(f"Written to {target}.")
        return
    for name in (source, *([] if with_parts is None else [with_parts])):
        ModelSource(name).check(needs_weights=True)
        if Path(name).is_dir():
            folder, result = Path(name).resolve(), target.resolve()
            if folder.is_relative_to(result) or result.is_relative_to(folder):
                raise ValueError(f"{target} and {name} lie in each other. Choose another directory for the result.")
    check_out(target, WRITTEN_MODEL, overwrite, "DST")
    if to is None and not hard_link and not parts and Path(source).is_dir():
        check_space(target.absolute().parent, weight_bytes(Path(source)))  # before the seconds that imports take
    with loading():
        from attnres.conversion.convert import prepare_change, prepare_retrofit, prepare_standard

        from .convert import run_convert

    if set_block_size is not None:
        prepare = partial(prepare_change, block_size=set_block_size)
    elif to is not None:
        prepare = prepare_standard
    else:
        prepare = partial(prepare_retrofit, residual=connection, **options, **fields)
    run_convert(
        source,
        target,
        prepare,
        revision=revision,
        verify=verify,
        text=text,
        hard_link=hard_link,
        overwrite=overwrite,
        trust_remote_code=trust_remote_code,
        num_blocks=num_blocks,
        flags=[*flags, *(name for name in others if name != "--to")],
        back=to and to.value,
        pack_experts=pack_experts,
        with_parts=with_parts,
    )


def read_fields(settings: Collection[str], residual: str) -> dict[str, object]:
    """Parse the values of `--set`.

    Args:
        settings: Texts of the form `name=value`, with the value in YAML.
        residual: The residual connection.

    Returns:
        The values by the names of the configuration fields.

    Raises:
        typer.BadParameter: A text does not have this form, a field is given twice, or the connection has no such field.
    """
    from attnres.utils.yaml_files import parse_yaml

    fields = {}
    for setting in settings:
        name, equals, value = setting.partition("=")
        if not (name and equals and value.strip()) or name in fields:
            raise typer.BadParameter(f"--set {setting}: give FIELD=VALUE, each field once.")
        try:
            fields[name] = parse_yaml(value, setting)
        except ValueError:
            raise typer.BadParameter(f"--set {setting[:100]}: the value is no YAML.") from None
    known = declared_connections()[residual].fields if fields else ()
    if unknown := next((name for name in fields if name not in known), None):
        meant = did_you_mean(unknown, known, otherwise_all=False)
        raise typer.BadParameter(
            f"--set {unknown}: --residual {residual} has no such field. It has {', '.join(known)}.{meant}"
        )
    return fields


def check_options(residual: str, options: Collection[str]) -> None:
    """Raise an error if given options of a retrofit exclude each other, or belong to another connection.

    Args:
        residual: The residual connection.
        options: The names of the options that the user has given.

    Raises:
        typer.BadParameter: Options exclude each other, or belong to another connection.
    """
    for option in options:
        if option not in connections()[residual].options:
            raise typer.BadParameter(f"{flag(option)} belongs to --residual {owners(option)}, not to {residual}.")
    sizes = [flag(option) for option in ("block_size", "num_blocks", "full") if option in options]
    if len(sizes) > 1:
        raise typer.BadParameter(f"{' and '.join(sizes)} exclude each other.")
