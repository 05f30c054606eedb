"""`attnres inspect`: measure one model or two on a text, and write the report."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from rich.console import Console
from rich.progress import BarColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerBase

from attnres.analysis.inspection import inspect_model
from attnres.analysis.report import PAGE, fill, report_directory
from attnres.analysis.text import language_reference, read_text
from attnres.conversion.tokenizers import load_tokenizer
from attnres.conversion.whole import check_before_loading, check_source_sizes, check_whole
from attnres.loading_attnres import check_shapes, explain_broken_shard
from attnres.utils.progress import ProgressBar
from attnres.utils.quiet import quiet_transformers


@dataclass(frozen=True)
class Source:
    """How to load a model and its tokenizer: each a directory or Hub id, with what `from_pretrained` takes."""

    name: str
    revision: str | None = None
    tokenizer: str | None = None
    dtype: str = "auto"
    device: str = "auto"
    trust_remote_code: bool = False

    def load(self) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
        """Raises OSError or ValueError: one of them is not there or cannot be used."""
        shared = {"trust_remote_code": self.trust_remote_code}
        check_source_sizes(self.name, self.revision)
        with _explained(self.name, "configuration"):
            AutoConfig.from_pretrained(self.name, revision=self.revision, **shared)
        name = self.tokenizer or self.name
        remedy = "" if self.tokenizer else "name one by --tokenizer"
        try:
            revision = None if self.tokenizer else self.revision
            tokenizer = load_tokenizer(name, remedy=remedy, revision=revision, **shared)
        except OSError as error:
            raise ValueError(_explanation(name, "tokenizer", error)) from error
        check_before_loading(AutoModelForCausalLM, self.name, revision=self.revision, **shared)
        with _explained(self.name, "model"), explain_broken_shard(self.name):
            model, found = AutoModelForCausalLM.from_pretrained(
                self.name,
                revision=self.revision,
                dtype=self.dtype,
                device_map=self._device(),
                output_loading_info=True,
                ignore_mismatched_sizes=True,  # they are named here
                **shared,
            )
            check_shapes(found["mismatched_keys"], self.name)
        check_whole(model, found["missing_keys"], self.name)
        return model, tokenizer

    def _device(self) -> str:
        found = torch.accelerator.current_accelerator(check_available=True)
        if self.device == "auto":
            return "auto" if found else "cpu"
        names = ["cpu", *(str(torch.device(found.type, i)) for i in range(torch.accelerator.device_count()) if found)]
        if self.device not in (*names, found.type if found else "cpu"):
            raise ValueError(f"there is no device {self.device!r} here, but {', '.join(names)}.")
        return self.device


_OF_LOADING = (
    *(ArithmeticError, AttributeError, KeyError, OSError, RuntimeError, TypeError, ValueError),
    *(StrictDataclassError, UnpicklingError),
)


@contextmanager
def _explained(name: str, part: str) -> Iterator[None]:
    """Raise errors of loading as a `ValueError` of one line, which names what was loaded."""
    try:
        yield
    except _OF_LOADING as error:
        raise ValueError(_explanation(name, part, error)) from error


def _explanation(name: str, part: str, error: BaseException) -> str:
    return f"{name} has no {part} that loads. ({type(error).__name__}: {' '.join(str(error).split())})"


def run_inspect(sources: list[Source], out: Path, *, text: Path | None, overwrite: bool, **settings: Any) -> None:
    """Inspect the models one after the other, so that one at a time is in memory.

    Args:
        settings: numbers, as [`inspect_model`] takes them.

    Raises:
        OSError, ValueError: a model, its tokenizer or the text is not there or cannot be used; or `out` is there.
    """
    console = Console(soft_wrap=True, highlight=False)
    amount = max(settings["tokens"], settings["length"])
    content = read_text(text, amount) if text else language_reference(amount)
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), TimeElapsedColumn(), TextColumn("left:"))
    inspections = []
    with (
        report_directory(out, overwrite) as folder,
        quiet_transformers(),
        ProgressBar(*columns, TimeRemainingColumn(), console=console) as progress,
    ):
        for source in sources:
            bar = progress.add_task(f"{source.name}: loading", total=1.0)

            def advance(what: str, share: float, bar: Any = bar, name: str = source.name) -> None:
                progress.update(bar, description=f"{name}: {what}", completed=share)

            model, tokenizer = source.load()
            inspections.append(inspect_model(model, tokenizer, content, name=source.name, advance=advance, **settings))
            del model
            progress.update(bar, description=source.name, completed=1.0)
        bar = progress.add_task("report", total=None)
        fill(folder, inspections)
        progress.remove_task(bar)
    console.print(f"Written to {out}: {PAGE}, its figures as PNG and SVG, the numbers as JSON and CSV.", markup=False)


__all__ = ["Source", "run_inspect"]
