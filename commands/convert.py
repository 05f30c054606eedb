"""`attnres convert`: plan, write into a temporary directory beside the target, verify, and rename.

The result gets its name only at the end, so a failed or interrupted conversion leaves nothing behind.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from attnres import ResidualConfig
from attnres.checkpoints.checkpoint import Checkpoint
from attnres.checkpoints.copies import copyable
from attnres.checkpoints.source import ModelSource
from attnres.commands.connections import remark_on_blocks
from attnres.conversion.convert_kimi_k3 import plan_kimi_k3
from attnres.conversion.plan import Plan, write
from attnres.conversion.verify import MAX_CHARACTERS, PROMPTS, FunctionComparison, compare, missing_memory
from attnres.publishing.cards import CardSubject, on_hub, write_card
from attnres.publishing.markdown import link_model
from attnres.utils.files import atomic_directory, show_bytes
from attnres.utils.model_files import WRITTEN_MODEL
from attnres.utils.progress import ProgressBar, status
from attnres.utils.wording import counted, printable

from .choices import check_apart, describe_unread, shown


def run_convert(
    source: str,
    target: Path,
    make_plan: Callable[[Checkpoint], Plan],
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
) -> None:
    """Convert the directory or Hub repository `source` into the directory `target`.

    Args:
        source: The directory or Hub id.
        target: The directory to write.
        make_plan: One of the `plan_*` functions of `attnres.conversion.convert`, with its other arguments bound. It is
            not called for Kimi K3, which has plans of its own.
        revision: The branch, tag or commit on the Hub.
        verify: Whether to compare the two models' logits. `None`: if one of them fits in memory in float32.
        text: A file to compare on instead of the built-in prompts.
        hard_link: Whether to link the weights instead of copying them.
        overwrite: Whether to replace `target` if it holds a model and nothing else.
        trust_remote_code: Whether to copy code that came with the source, such as the code of its tokenizer.
        num_blocks: The number of blocks that the user gave. A note is printed if the result has another number.
        flags: The options of a retrofit that the user gave, such as `--block-size`. Kimi K3 takes none.
        back: `standard` or `released` to undo a conversion.

    Raises:
        OSError, RuntimeError, ValueError: The conversion failed and left nothing behind. The message names the file,
            tensor or value.
    """
    console = Console(soft_wrap=True, highlight=False)
    checkpoint = ModelSource(source, revision).checkpoint
    check_apart(checkpoint.folder, target, source)
    texts = PROMPTS if text is None else [_read_text(text)]
    with atomic_directory(target, WRITTEN_MODEL, overwrite=overwrite) as stage:
        with TemporaryDirectory(dir=stage) as scratch:
            with status(console, "Reading the checkpoint ..."):
                opened = copyable(checkpoint, Path(scratch))
                _ = opened.generation_config  # the result gets these settings, so they must be valid
            plan = plan_kimi_k3(opened, flags, back) or make_plan(opened)
            console.print(_describe(plan))
            if plan.has_code and (remark := remark_on_blocks(plan.config, num_blocks)):
                console.print(f"Note: {remark}")
            with _progress(console) as progress:
                task = progress.add_task("linking" if hard_link else "copying", total=plan.num_bytes)
                options = {"hard_link": hard_link, "trust_remote_code": trust_remote_code}
                notes = write(plan, stage, **options, on_bytes=lambda n: progress.advance(task, n))
            if plan.unread:
                console.print(f"{describe_unread(plan.unread, 'the source')} Copied unchanged and not verified.")
            for note in notes:
                console.print(shown(note))
        result = Checkpoint(stage)
        comparison = _verify(console, plan, result, verify, texts)
        if plan.has_code and isinstance(plan.config, ResidualConfig):
            _write_card(plan, plan.config, result, source, target.name, comparison)
    console.print(f"Written to [bold]{shown(str(target))}[/].")


def _progress(console: Console) -> ProgressBar:
    """Return a progress bar in bytes, with the speed and the time that is left."""
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    return ProgressBar(*columns, TextColumn("left:"), TimeRemainingColumn(), console=console)


def _describe(plan: Plan) -> str:
    """Return lines about the source's size, the result's connections, and the tensors added or left out."""
    checkpoint, config = plan.checkpoint, plan.config
    tensors, files = counted(len(checkpoint.entries), "tensor"), counted(len(checkpoint.shards), "file")
    parts = [f"{tensors} in {files}, {show_bytes(checkpoint.num_bytes)}"]
    if isinstance(config, ResidualConfig):
        parts.append(f"{config.model_type}: {config.connection.describe(config)}{_attention(config)}")
    else:
        parts.append(f"{config.model_type}: standard residual connections")
    if plan.added:
        size = show_bytes(sum(tensor.nbytes for tensor in plan.added.values()))
        parts.append(f"{counted(len(plan.added), 'tensor')} added, {size}")
    if plan.dropped:
        parts.append(f"{counted(len(plan.dropped), 'tensor')} left out")
    return "\n".join(parts)


def _without_unread(plan: Plan) -> str:
    """Return the end of a sentence on a comparison: it did not take the tensors that the model does not read."""
    unread = counted(len(plan.unread), "tensor")
    return f", without the {unread} that this model does not read" if plan.unread else ""


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


def _attention(config: ResidualConfig) -> str:
    """Return what is added to the attention, such as ", attention gated (sdpa)"."""
    gate = f", attention gated ({config.attention_gate})" if config.attention_gate else ""
    return f"{gate}{', value residuals' if config.value_residual else ''}"


def _write_card(
    plan: Plan,
    config: ResidualConfig,
    result: Checkpoint,
    source: str,
    name: str,
    comparison: FunctionComparison | None,
) -> None:
    """Write the model card. If the source has a card of this package, add this conversion to it."""
    folder = plan.checkpoint.folder
    hub_id, commit = on_hub(folder, source)
    parts = [
        f"**{plan.title}** of {link_model(hub_id, str(folder), commit)} by `attnres convert`: "
        f"{config.connection.describe(config)}{_attention(config)}."
    ]
    if plan.added:
        parts.append(f"{counted(len(plan.added), 'tensor')} added, all others as they were.")
    if plan.difference is not None:
        parts.append(f"Not the same function: {plan.difference}.")
    elif comparison is None:
        parts.append("It was not verified that the result computes the same function.")
    else:
        parts.append(f"The result computed the same function as its source: {comparison}{_without_unread(plan)}.")
    step = " ".join(map(printable, parts))
    layout = plan.describe_layout(result)
    subject = CardSubject(config, result.folder, name, has_tokenizer=bool(result.tokenizer_files), layout=layout)
    write_card(subject, step, folder, hub_id)


def _verify(
    console: Console, plan: Plan, result: Checkpoint, verify: bool | None, texts: Sequence[str]
) -> FunctionComparison | None:
    """Compare source and result. Print and return the comparison; return `None` if they are not compared.

    Raises:
        RuntimeError: Source and result compute different functions, although the plan promises the same function.
    """
    if verify is False:
        return None
    if verify is None and getattr(plan.config, "quantization_config", None) is not None:
        console.print("Not verified: quantised weights need further packages. --verify compares nevertheless.")
        return None
    lacking = missing_memory(plan.num_values)
    if verify is None and lacking:
        console.print(f"Not verified: {show_bytes(lacking)} more memory is needed. --verify compares nevertheless.")
        return None
    index = plan.checkpoint.weights_path
    if plan.checkpoint.lacks_metadata and index is not None:
        reason = (
            f"transformers cannot load the source, whose {index.name} has no object `metadata`. The result's has one"
        )
        if verify:
            raise ValueError(f"{index}: {reason}. Leave out --verify.")
        console.print(f"Not verified: {reason}.")
        return None
    with status(console, "Comparing the two models on text ..."):
        comparison = compare(plan.checkpoint, result, texts, plan.model_class)
    label = "Verified" if comparison.is_same else "Not the same"
    console.print(f"{label}: {comparison}{_without_unread(plan)}")
    if plan.difference is not None:
        console.print(f"Not the same function: {shown(plan.difference)}.")
    elif not comparison.is_same:
        raise RuntimeError(f"the result computes another function: {comparison}.")
    return comparison
