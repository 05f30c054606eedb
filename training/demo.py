"""The demo: a standard model becomes a Block AttnRes model that computes the same function, and both train on.

It needs no network and no account: the text is the Python installation's own sources. It prints what it measures,
whichever model wins.
"""

import contextlib
import copy
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    set_seed,
)

from attnres import AttnResForCausalLM
from attnres.analysis.depth_attention import depth_attention_map
from attnres.analysis.figures import Points, plot_depth_attention, plot_loss_curves
from attnres.configuration import load
from attnres.conversion import retrofit
from attnres.files import atomic_directory
from attnres.quiet import quiet_transformers

from .packing import in_blocks
from .runs import Run, sequence_losses, train
from .text import python_sources, read_documents, token_stream, train_tokenizer

CONFIGURATION = "attnres-tiny"
LENGTH, BATCH_SIZE = 128, 8
HELD_OUT_BLOCKS = 128
# Fixed, not measured, so that the same seed gives the same numbers: about what a CPU core does.
STEPS_PER_MINUTE = 130
LEARNING_RATE, CHECKPOINT_LEARNING_RATE = 3e-3, 3e-4
RESIDUAL_LR_FACTOR = 0.3
MAX_TEXT_CHARACTERS = 4_000_000
SAMPLE_PROMPT = "def "
RESULTS = "results.json"

_GENERATE = """
import sys
sys.modules["attnres"] = None  # `import attnres` fails here: the code that travels with the weights must do
from transformers import AutoModelForCausalLM, AutoTokenizer, set_seed
path, prompt, seed = sys.argv[1], sys.argv[2], int(sys.argv[3])
tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=False)
model = AutoModelForCausalLM.from_pretrained(path, trust_remote_code=True)
set_seed(seed)
ids = model.generate(**tokenizer(prompt, return_tensors="pt"), max_new_tokens=60, do_sample=True, top_k=20)
print(tokenizer.decode(ids[0], skip_special_tokens=True))
"""


@dataclass(frozen=True)
class Data:
    """Packed token blocks `[n, length]`: for training the start model, for continuing both, and held out."""

    base: Tensor
    continued: Tensor
    held_out: Tensor


def run_demo(
    out: Path,
    minutes: float = 4.0,
    checkpoint: str | None = None,
    text: Path | None = None,
    seed: int = 0,
    overwrite: bool = False,
) -> dict[str, Any]:
    """Run the demo and write the model, figures, sample and `results.json` to the directory `out`.

    Raises:
        FileExistsError: `out` exists and `overwrite` is not set, or it was not written by the demo.
        ValueError: there is too little text, or the checkpoint cannot be retrofitted.
    """
    # For so small a model a second thread saves a fifth where cores are idle, and costs a lot where they are busy; and
    # with one the numbers do not depend on the number of cores.
    threads = torch.get_num_threads() if checkpoint else 1
    with (
        quiet_transformers(),
        _torch_threads(threads),
        atomic_directory(out, overwrite=overwrite, marker=RESULTS) as target,
    ):
        results = _run(Console(), target, minutes, checkpoint, text, seed)
    Console().print(f"Written to [bold]{out}[/]: the model, its figures, {RESULTS}.", soft_wrap=True)
    return results


def _run(
    console: Console, target: Path, minutes: float, checkpoint: str | None, text: Path | None, seed: int
) -> dict[str, Any]:
    set_seed(seed)
    documents = read_documents(text, MAX_TEXT_CHARACTERS) if text else python_sources(MAX_TEXT_CHARACTERS)
    steps = max(8, round(minutes * STEPS_PER_MINUTE))
    continue_steps = steps // 4
    base_steps = 0 if checkpoint else steps - 2 * continue_steps
    rate = CHECKPOINT_LEARNING_RATE if checkpoint else LEARNING_RATE
    run = Run(continue_steps, BATCH_SIZE, rate, residual_lr_factor=RESIDUAL_LR_FACTOR, seed=seed)

    with _progress(console) as progress:
        bar = progress.add_task("tokenizing", total=base_steps + 2 * continue_steps)

        def train_with_bar(description: str, model: PreTrainedModel, blocks: Tensor, run: Run) -> Points:
            progress.update(bar, description=description)
            return train(model, blocks, run, on_step=lambda: progress.advance(bar))

        standard, tokenizer = _load_checkpoint(checkpoint) if checkpoint else _new_model(documents)
        data = _data(documents, tokenizer, base_steps, continue_steps)
        source = str(text) if text else "the Python standard library"
        console.print(f"Text: {source}, {len(documents)} documents; tokens: {_tokens(data)}.")

        curves = {}
        if base_steps:
            base_run = replace(run, steps=base_steps, warmup_steps=base_steps // 10)
            points = train_with_bar("training a standard model", standard, data.base, base_run)
            curves["standard, from scratch"] = points
        attn_res = retrofit(copy.deepcopy(standard))
        same = _compare_functions(standard, attn_res, data.held_out)
        console.print(_retrofit_line(attn_res.config, same))

        models = {"standard": standard, "Block AttnRes": attn_res}
        before = {name: sequence_losses(model, data.held_out) for name, model in models.items()}
        for name, model in models.items():
            decaying = replace(run, decay_steps=continue_steps // 2)
            points = train_with_bar(f"continuing {name}", model, data.continued, decaying)
            curves[f"{name}, continued"] = [(base_steps + step, loss) for step, loss in points]
        after = {name: sequence_losses(model, data.held_out) for name, model in models.items()}
        progress.update(bar, description="done")

    results = {
        "seed": seed,
        "steps": {"base": base_steps, "continued": continue_steps},
        "tokens_per_step": BATCH_SIZE * LENGTH,
        "retrofit": same,
        "held_out_loss": {name: {"before": _mean(before[name]), "after": _mean(after[name])} for name in models},
        "difference_after": _paired(after["Block AttnRes"] - after["standard"]),
    }
    console.print(_table(results))
    _write_figures(target, attn_res, data.held_out, curves)
    attn_res.save_pretrained(target / "model")
    tokenizer.save_pretrained(target / "model")
    results["sample"] = _generate_without_attnres(target / "model", seed)
    console.print("Sample, from a fresh process that has no attnres:", style="bold")
    console.print(results["sample"], markup=False, highlight=False)
    (target / RESULTS).write_text(json.dumps(results, indent=2) + "\n")
    return results


def _new_model(documents: list[str]) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    config = load(CONFIGURATION, residual_connection="standard")
    tokenizer = train_tokenizer(documents, config.vocab_size)
    for field in ("bos_token_id", "eos_token_id", "pad_token_id"):
        setattr(config, field, getattr(tokenizer, field))
    return AttnResForCausalLM(config), tokenizer


def _load_checkpoint(checkpoint: str) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    # Code that comes with a checkpoint is neither run nor asked about, nor referred to by what the demo writes.
    model = AutoModelForCausalLM.from_pretrained(checkpoint, trust_remote_code=False)
    retrofit(model)  # an unsupported backbone is refused before any work
    tokenizer = AutoTokenizer.from_pretrained(checkpoint, trust_remote_code=False)
    tokenizer.init_kwargs.pop("auto_map", None)
    if tokenizer.eos_token_id is None:
        raise ValueError(f"the tokenizer of {checkpoint} has no end-of-text token; set its `eos_token`.")
    return model, tokenizer


def _data(documents: list[str], tokenizer: PreTrainedTokenizerBase, base_steps: int, continue_steps: int) -> Data:
    """Every tenth document is held out; the blocks of the others are shuffled, and each stage takes what it needs."""
    shuffled = []
    for part in ([d for i, d in enumerate(documents) if i % 10], documents[::10]):
        blocks = torch.from_numpy(in_blocks(token_stream(part, tokenizer), LENGTH))
        shuffled.append(blocks[torch.randperm(len(blocks))])
    blocks, held_out = shuffled[0], shuffled[1][:HELD_OUT_BLOCKS]
    if len(blocks) < 2 * BATCH_SIZE or len(held_out) < 2:
        raise ValueError(
            f"the text gives {len(blocks)} training and {len(held_out)} held-out blocks of {LENGTH} tokens, "
            f"but the demo needs at least {2 * BATCH_SIZE} and 2. Give a longer --text."
        )
    # A text shorter than that is divided in the same proportion, and each stage repeats its part.
    wanted = base_steps * BATCH_SIZE, continue_steps * BATCH_SIZE
    share = min(1.0, len(blocks) / sum(wanted))
    split, end = round(share * wanted[0]), round(share * sum(wanted))
    return Data(blocks[:split], blocks[split:end], held_out)


@torch.no_grad()
def _compare_functions(a: PreTrainedModel, b: PreTrainedModel, blocks: Tensor) -> dict[str, float]:
    """Compare two models' logits on `blocks` `[n, length]`."""
    difference, largest, agreement = 0.0, 0.0, []
    a.eval(), b.eval()
    for batch in blocks.split(16):
        logits_a, logits_b = (model(batch.to(model.device), use_cache=False).logits.float() for model in (a, b))
        difference = max(difference, (logits_a - logits_b).abs().max().item())
        largest = max(largest, logits_a.abs().max().item())
        agreement.append((logits_a.argmax(-1) == logits_b.argmax(-1)).double().mean(1).cpu())
    return {
        "max_abs_logit_difference": difference,
        "max_abs_logit": largest,
        "top1_agreement": torch.cat(agreement).mean().item(),
    }


def _generate_without_attnres(path: Path, seed: int) -> str:
    with tempfile.TemporaryDirectory() as modules:
        environment = os.environ | {"HF_MODULES_CACHE": modules, "TRANSFORMERS_VERBOSITY": "error"}
        command = [sys.executable, "-c", _GENERATE, str(path), SAMPLE_PROMPT, str(seed)]
        process = subprocess.run(command, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    if process.returncode != 0:
        raise RuntimeError(f"the saved model does not load without attnres: {process.stderr.strip().splitlines()[-1]}")
    return process.stdout.strip()


def _write_figures(target: Path, model: PreTrainedModel, blocks: Tensor, curves: dict[str, Points]) -> None:
    depth_map = depth_attention_map(model, blocks.split(16))
    plot_depth_attention(depth_map, target / "depth_attention.png", model.config)
    compare = "Block AttnRes, continued", "standard, continued"
    plot_loss_curves(curves, target / "loss_curves.png", compare)


def _retrofit_line(config: PreTrainedConfig, same: dict[str, float]) -> str:
    return (
        f"Retrofit, {config.connection.describe(config)}: "
        f"max |logit difference| [bold]{same['max_abs_logit_difference']:.1e}[/] "
        f"at logits up to {same['max_abs_logit']:.1f}, "
        f"top-1 agreement [bold]{same['top1_agreement']:.2%}[/]."
    )


def _table(results: dict[str, Any]) -> Table:
    table = Table(title="Held-out loss (nats/token)")
    for column in ("model", "before", "after", "change"):
        table.add_column(column, justify="left" if column == "model" else "right")
    for name, loss in results["held_out_loss"].items():
        change = loss["after"] - loss["before"]
        table.add_row(name, f"{loss['before']:.4f}", f"{loss['after']:.4f}", f"{change:+.4f}")
    difference = results["difference_after"]
    table.add_section()
    margin = f"{difference['mean']:+.4f} ± {difference['standard_error']:.4f}"
    table.add_row("AttnRes - standard", "", margin, "")
    return table


def _mean(losses: Tensor) -> float:
    return losses.mean().item()


def _paired(differences: Tensor) -> dict[str, float]:
    """Mean of paired per-sequence differences and its standard error over the sequences (one seed)."""
    error = differences.std().item() / len(differences) ** 0.5
    return {"mean": differences.mean().item(), "standard_error": error}


def _tokens(data: Data) -> str:
    parts = {"from scratch": data.base, "continued": data.continued, "held out": data.held_out}
    return ", ".join(f"{blocks.numel():,} {name}" for name, blocks in parts.items() if blocks.numel())


def _progress(console: Console) -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("steps"))
    times = (TimeElapsedColumn(), TextColumn("elapsed, left:"), TimeRemainingColumn())
    return Progress(*columns, *times, console=console)


@contextlib.contextmanager
def _torch_threads(threads: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)
