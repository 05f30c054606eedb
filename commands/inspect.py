"""`attnres inspect`: measure one model or two on a text, and write the report."""

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from transformers import AutoModelForImageTextToText, AutoProcessor, PreTrainedModel, PreTrainedTokenizerBase

from attnres.analysis.images import ImagePrompt, image_prompt
from attnres.analysis.inspection import inspect_model
from attnres.analysis.report import PAGE, fill, report_directory
from attnres.analysis.text import language_reference, read_text
from attnres.checkpoints.source import ModelSource
from attnres.checkpoints.whole import load_whole
from attnres.utils.errors import about
from attnres.utils.progress import ProgressBar, print_line
from attnres.utils.quiet import quiet_transformers


@dataclass(frozen=True)
class InspectedSource:
    """A model to inspect, and how to load it.

    Attributes:
        name: The directory or Hub id of the model.
        revision: The branch, tag or commit of the model on the Hub.
        tokenizer: The directory or Hub id of the tokenizer; `None` if it is with the model.
        dtype: The dtype to load the model in, as `from_pretrained` takes it; `auto` is the stored one.
        device: The device to load the model to, such as `cpu` or `cuda:1`; `auto` uses all accelerators, else the CPU.
        trust_remote_code: Whether to run Python code that comes with the model.
        images: Files of images, which the model must be able to see.
    """

    name: str
    revision: str | None = None
    tokenizer: str | None = None
    dtype: str = "auto"
    device: str = "auto"
    trust_remote_code: bool = False
    images: tuple[Path, ...] = ()

    def load(self) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
        """Load the model and its tokenizer.

        Raises:
            OSError: A file cannot be read.
            ValueError: The model or its tokenizer is missing, incomplete or damaged, or the device does not exist.
        """
        source, code = ModelSource(self.name, self.revision), self.trust_remote_code
        source.config(code)
        # The tokenizer is loaded before the model, since it takes less time to fail.
        if self.tokenizer is None:
            tokenizer = source.tokenizer("name one by --tokenizer", code)
        else:
            tokenizer = ModelSource(self.tokenizer).tokenizer(trust_remote_code=code)
        with about(self.name):
            options = source.as_packed | {"dtype": self.dtype, "device_map": self._device()}
            load = partial(load_whole, AutoModelForImageTextToText) if self.images else None
            model = source.build(load, trust_remote_code=code, **options)
        return model, tokenizer

    def prompt(self) -> ImagePrompt | None:
        """Return the prompt with the images, as the model's processor prepares it; `None` without images.

        Raises:
            OSError, ValueError: The model has no processor, or an image cannot be read.
        """
        if not self.images:
            return None
        with about(self.name):
            options: dict[str, Any] = {} if self.revision is None else {"revision": self.revision}
            processor = AutoProcessor.from_pretrained(self.name, trust_remote_code=self.trust_remote_code, **options)
            if not hasattr(processor, "image_processor"):
                raise ValueError("there is no processor for images beside the model. Leave out --image.")
        return image_prompt(processor, self.images)

    def _device(self) -> str:
        """Return the device as `from_pretrained` takes it."""
        accelerator = torch.accelerator.current_accelerator(check_available=True)
        if self.device == "auto":
            return "auto" if accelerator else "cpu"
        names = ["cpu"]
        if accelerator:
            names += [str(torch.device(accelerator.type, i)) for i in range(torch.accelerator.device_count())]
        if self.device not in (*names, accelerator.type if accelerator else "cpu"):
            raise ValueError(f"the device must be one of auto, {', '.join(names)}, got {self.device!r}.")
        return self.device


def run_inspect(
    sources: list[InspectedSource], out: Path, *, text: Path | None, overwrite: bool, **settings: Any
) -> None:
    """Inspect the models one after the other, with one at a time in memory, and write the report.

    Args:
        sources: One model, or two to compare.
        out: The directory to write.
        text: The text to read; `None` for Python's language reference.
        overwrite: Whether to replace `out` if it holds a report and nothing else.
        settings: `tokens`, `length`, `intervention_tokens` and `batch_size`, as [`inspect_model`] takes them.

    Raises:
        OSError: `out` exists and must not be replaced, or a file cannot be read or written.
        ValueError: A model, its tokenizer or the text cannot be used.
    """
    console = Console(soft_wrap=True, highlight=False)
    content = read_text(text, settings["tokens"]) if text else language_reference(settings["tokens"])
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), TimeElapsedColumn(), TextColumn("left:"))
    inspections, begun = [], set()
    with (
        report_directory(out, overwrite) as folder,
        quiet_transformers(),
        ProgressBar(*columns, TimeRemainingColumn(), console=console) as progress,
    ):
        for source in sources:
            bar = progress.add_task(f"{source.name}: loading", total=1.0)

            def advance(what: str, share: float, bar: Any = bar, name: str = source.name) -> None:
                description = f"{name}: {what}"
                if progress.disable and description not in begun:
                    print_line(console, description)  # without a bar, each measurement has a line when it begins
                    begun.add(description)
                progress.update(bar, description=description, completed=share)

            prompt = source.prompt()  # before the model is loaded, since it takes less time to fail
            model, tokenizer = source.load()
            named: dict[str, Any] = {"name": source.name, "prompt": prompt, "advance": advance}
            inspections.append(inspect_model(model, tokenizer, content, **named, **settings))
            # Free the memory before the next model is loaded.
            del model
            progress.update(bar, description=source.name, completed=1.0)
        bar = progress.add_task("report", total=None)
        fill(folder, inspections)
        progress.remove_task(bar)
    console.print(f"Written to {out}: {PAGE}, its figures as PNG and SVG, the numbers as JSON and CSV.", markup=False)


__all__ = ["InspectedSource", "run_inspect"]
