"""`attnres convert`: check the source, write into a temporary directory beside the target, verify, and rename.

The result gets its name only at the end, so a failed or interrupted conversion leaves nothing behind.
"""

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeRemainingColumn, TransferSpeedColumn
from transformers import PreTrainedConfig

from attnres import ResidualConfig
from attnres.attn_res_attnres import block_sublayers
from attnres.checkpoints.checkpoint import Checkpoint
from attnres.checkpoints.copies import copyable
from attnres.checkpoints.kimi_k3 import describe_layout
from attnres.conversion.convert import Conversion
from attnres.conversion.convert_kimi_k3 import prepare_kimi_k3
from attnres.conversion.kimi_k3_parts import prepare_rewriting
from attnres.conversion.verify import MAX_CHARACTERS, MEMORY_OF_LOGITS, PROMPTS, compare
from attnres.family import describe_connection
from attnres.publishing.cards import CardSubject, on_hub, write_card
from attnres.publishing.markdown import link_model
from attnres.utils.files import atomic_directory
from attnres.utils.memory import free_memory
from attnres.utils.model_files import WRITTEN_MODEL
from attnres.utils.progress import ProgressBar, status
from attnres.utils.wording import counted, printable, show_bytes

from .choices import describe_unread, shown


def run_convert(
    source: str,
    target: Path,
    prepare: Callable[[Checkpoint], Conversion],
    *,
    revision: str | None,
    verify: bool | None,
    text: Path | None,
    hard_link: bool,
    overwrite: bool,
    trust_remote_code: bool,
    num_blocks: int | None,
    flags: Sequence[str],
    back: str | None,
    pack_experts: bool,
    with_parts: str | None,
) -> None:
    """Convert the directory or Hub repository `source` into the directory `target`.

    Args:
        source: The directory or Hub id.
        target: The directory to write.
        prepare: One of the `prepare_*` functions of `attnres.conversion.convert`, with its other arguments bound. It
            is not called for Kimi K3, which is converted in another way.
        revision: The branch, tag or commit on the Hub.
        verify: Whether to compare the two models' logits. `None`: if one of them fits in memory in float32.
        text: A file to compare on instead of the built-in prompts.
        hard_link: Whether to link the weights instead of copying them.
        overwrite: Whether to replace `target` if it holds a model and nothing else.
        trust_remote_code: Whether to copy code that came with the source, such as the code of its tokenizer.
        num_blocks: The number of blocks that the user gave. A note is printed if the result has another number.
        flags: The options of a retrofit that the user gave, such as `--block-size`. Kimi K3 takes none.
        back: `standard` or `released` to undo a conversion.
        pack_experts: Whether to pack the routed experts of Kimi K3.
        with_parts: The directory or Hub id of the release of Kimi K3 whose other parts the result gets.

    Raises:
        OSError, RuntimeError, ValueError: The conversion failed and left nothing behind. The message names the file,
            tensor or value.
    """
    console = Console(soft_wrap=True, highlight=False)
    checkpoint = Checkpoint.open(source, revision)
    parts = None if with_parts is None else Checkpoint.open(with_parts)
    texts = PROMPTS if text is None else [_read_text(text)]
    with atomic_directory(target, WRITTEN_MODEL, overwrite=overwrite) as stage:
        with TemporaryDirectory(dir=stage) as scratch:
            with status(console, "Reading the checkpoint ..."):
                checkpoint = copyable(checkpoint, Path(scratch))
                rewriting = None
                if pack_experts or parts is not None:
                    rewriting = prepare_rewriting(checkpoint, parts, pack_experts)
            columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
            columns += (TextColumn("left:"), TimeRemainingColumn())
            if rewriting is not None:
                with ProgressBar(*columns, console=console) as progress:
                    task = progress.add_task("rewriting", total=rewriting.num_bytes)
                    rewritten = Path(scratch, "rewritten")
                    checkpoint = rewriting.write(rewritten, on_bytes=lambda n: progress.advance(task, n))
            conversion = prepare_kimi_k3(checkpoint, flags, back, rewriting) or prepare(checkpoint)
            config = conversion.config
            connections = _describe_connections(config)
            remark = _remark_on_blocks(config, num_blocks) if isinstance(config, ResidualConfig) else None
            console.print(_describe(conversion, connections))
            if remark and conversion.has_code:
                console.print(f"Note: {remark}")
            with ProgressBar(*columns, console=console) as progress:
                task = progress.add_task("linking" if hard_link else "copying", total=conversion.num_bytes)
                options = {"hard_link": hard_link, "trust_remote_code": trust_remote_code}
                notes = conversion.write(stage, **options, on_bytes=lambda n: progress.advance(task, n))
            if conversion.unread:
                warning = describe_unread(conversion.unread, "the source")
                console.print(f"{warning} Copied unchanged and not verified.")
            for note in notes:
                console.print(shown(note))
        result = Checkpoint(stage)
        measured = _verify(console, conversion, result, verify, texts)
        if conversion.has_code and isinstance(config, ResidualConfig):
            folder = (conversion.original or conversion.checkpoint).folder
            hub_id, commit = on_hub(folder, source)
            step = _describe_step(conversion, connections, measured, link_model(hub_id, str(folder), commit))
            has_tokenizer, layout = bool(result.tokenizer_files), describe_layout(config, result)
            subject = CardSubject(config, stage, target.name, has_tokenizer=has_tokenizer, layout=layout)
            write_card(subject, step, folder, hub_id)
    console.print(f"Written to [bold]{shown(str(target))}[/].")


def _read_text(path: Path) -> str:
    """Return the beginning of a text file without a byte order mark, long enough for a comparison."""
    try:
        with path.open(encoding="utf-8-sig") as file:
            text = file.read(MAX_CHARACTERS)
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not a text in UTF-8 ({error}).") from error
    if not text.strip():
        raise ValueError(f"{path} holds no text to compare the models on.")
    return text


def _describe_connections(config: PreTrainedConfig) -> str:
    """Return the residual connections of a model in words, with gates and value residuals of the attention."""
    if not isinstance(config, ResidualConfig):
        return "standard residual connections"
    gate = f", attention gated ({config.attention_gate})" if config.attention_gate else ""
    return f"{describe_connection(config)}{gate}{', value residuals' if config.value_residual else ''}"


def _remark_on_blocks(config: ResidualConfig, num_blocks: int | None) -> str | None:
    """Return a remark if a result has another number of blocks than the user may expect; else None.

    Args:
        config: The configuration of the result.
        num_blocks: The number of blocks that the user gave; None if not given.
    """
    if "block_size" not in config.connection.options:
        return None
    size, sublayers = block_sublayers(config), config.num_sublayers
    count = math.ceil(sublayers / size)
    if num_blocks is not None and count != num_blocks:
        if size == 1:
            return f"--num-blocks {num_blocks} becomes Full AttnRes: there are {sublayers} sublayers, each a block."
        return f"--num-blocks {num_blocks} becomes {count}: {sublayers} sublayers, {size} to a block."
    if num_blocks is None and count == 1 and size > 1:
        return (
            f"a block size of {size} puts all {sublayers} sublayers into one block, so that each attends only to the "
            f"embedding and one sum. --block-size {math.ceil(sublayers / 8)} would make about 8 blocks."
        )
    return None


def _describe(conversion: Conversion, connections: str) -> str:
    """Return lines about the source's size, the result's connections, and the tensors added or left out."""
    checkpoint = conversion.checkpoint
    tensors, files = counted(len(checkpoint.entries), "tensor"), counted(len(checkpoint.shards), "file")
    parts = [
        f"{tensors} in {files}, {show_bytes(checkpoint.num_bytes)}",
        f"{conversion.config.model_type}: {connections}",
    ]
    if conversion.added:
        size = show_bytes(sum(tensor.nbytes for tensor in conversion.added.values()))
        parts.append(f"{counted(len(conversion.added), 'tensor')} added, {size}")
    if conversion.dropped:
        parts.append(f"{counted(len(conversion.dropped), 'tensor')} left out")
    return "\n".join(parts)


def _verify(
    console: Console, conversion: Conversion, result: Checkpoint, verify: bool | None, texts: Sequence[str]
) -> str | None:
    """Compare source and result. Print and return what the comparison gave; return `None` if they are not compared.

    Raises:
        RuntimeError: Source and result compute different functions, although the conversion promises the same one.
    """
    if verify is False:
        return None
    if verify is None and getattr(conversion.config, "quantization_config", None) is not None:
        console.print("Not verified: quantised weights need further packages. --verify compares nevertheless.")
        return None
    source = conversion.original or conversion.checkpoint
    index = source.weights_path
    if source.lacks_metadata and index is not None:
        reason = (
            f"transformers cannot load the source, whose {index.name} has no object `metadata`. The result's has one"
        )
        if verify:
            raise ValueError(f"{index}: {reason}. Leave out --verify.")
        console.print(f"Not verified: {reason}.")
        return None
    lacking = 4 * conversion.model.num_parameters() + MEMORY_OF_LOGITS - free_memory()
    if verify is None and lacking > 0:
        console.print(f"Not verified: {show_bytes(lacking)} more memory is needed. --verify compares nevertheless.")
        return None
    with status(console, "Comparing the two models on text ..."):
        comparison = compare(source, result, texts, conversion.model_class)
    unread = counted(len(conversion.unread), "tensor")
    without = f", without the {unread} that this model does not read" if conversion.unread else ""
    measured = f"{comparison}{without}"
    console.print(f"{'Verified' if comparison.is_same else 'Not the same'}: {measured}")
    if conversion.difference is not None:
        console.print(f"Not the same function: {shown(conversion.difference)}.")
    elif not comparison.is_same:
        raise RuntimeError(f"the result computes another function: {comparison}.")
    return measured


def _describe_step(conversion: Conversion, connections: str, measured: str | None, source: str) -> str:
    """Return this conversion as a step of the model card; `source` is a link to the source."""
    parts = [f"**{conversion.title}** of {source} by `attnres convert`: {connections}."]
    if conversion.added:
        parts.append(f"{counted(len(conversion.added), 'tensor')} added, all others as they were.")
    if conversion.difference is not None:
        parts.append(f"Not the same function: {conversion.difference}.")
    elif measured is None:
        parts.append("It was not verified that the result computes the same function.")
    else:
        parts.append(f"The result computed the same function as its source: {measured}.")
    return " ".join(map(printable, parts))
