"""The demo, in two acts: a small Llama with attention residuals against one without, and an exact retrofit.

It needs no network and no account: the text is the sources of the Python installation. It prints its measurements,
whichever model wins. With a checkpoint, the retrofit comes first, and then both models are trained further.
"""

import contextlib
import copy
import hashlib
import json
import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from attnres.analysis import DepthAttention, depth_attention
from attnres.analysis.loss_figures import plot_paired_runs
from attnres.configuration import count_parameters
from attnres.conversion import retrofit
from attnres.conversion.retrofit import load_source
from attnres.utils.files import atomic_directory, atomic_write
from attnres.utils.model_files import DEMO_ATTENTION, DEMO_LOSSES, DEMO_MODEL, DEMO_RESULTS, WRITTEN_DEMO
from attnres.utils.progress import ProgressBar, status
from attnres.utils.quiet import quiet_transformers
from attnres.utils.wording import counted

from .comparison import ComparisonData, Difference, compare, comparison_data, difference, split
from .runs import Run, sequence_losses
from .text import open_tokenizer, python_sources, read_documents, train_tokenizer

STANDARD, ATTN_RES = "standard", "Block AttnRes"
# A dense Llama, the shape that most tools know. A mixture of experts of this size gains nothing clear in longer runs.
LLAMA = {
    "vocab_size": 2048,
    "hidden_size": 128,
    "intermediate_size": 352,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 2048,
}
NUM_BLOCKS = 4  # of both models with attention residuals
SEEDS = 3
LENGTH, BATCH_SIZE = 128, 6
# Rough speeds of one CPU core, for the Llama and for a checkpoint. They are fixed, not measured, so that the same seed
# gives the same results.
STEPS_PER_MINUTE, CHECKPOINT_STEPS_PER_MINUTE = 300, 150
LEARNING_RATE, CHECKPOINT_LEARNING_RATE = 3e-3, 3e-4
RESIDUAL_LR_FACTOR = 0.3  # of a retrofit; from scratch the factor is 1
MAX_TEXT_CHARACTERS = 4_000_000
PROMPT, PROMPT_CHARACTERS = "def ", 60  # for Python sources; the length of a prompt from another text
NEW_TOKENS = 40  # of each text that is generated

THE_MODEL = "Both are Llamas with {layers} layers of width {width}: {parameters:,} parameters beside the embeddings."
AT_THIS_LENGTH = (
    "This is not the difference at the end of a training. {tokens:,} tokens are {share:.2f} for each parameter, and a "
    "difference changes with the length: that of the largest model measured so far was 0.53 nats after 300 steps, and "
    "0.34 after 1,024. Longer runs of small dense models mostly ended 0.01 to 0.07 apart, and the paper reports 0.02 "
    "after 200 tokens for each parameter (docs/results.md in the repository)."
)

_GENERATE = """
import sys
sys.modules["attnres"] = None  # `import attnres` fails: only the code that travels with the weights is used
from transformers import AutoModelForCausalLM, AutoTokenizer, set_seed
path, prompt, seed = sys.argv[1], sys.argv[2], int(sys.argv[3])
tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=False)
model = AutoModelForCausalLM.from_pretrained(path, trust_remote_code=True)
set_seed(seed)
ids = model.generate(**tokenizer(prompt, return_tensors="pt"), max_new_tokens=60, do_sample=True, top_k=20)
print(tokenizer.decode(ids[0], skip_special_tokens=True))
"""


@dataclass(frozen=True)
class DemoText:
    """The text of a demo.

    Attributes:
        source: Where it comes from, in words.
        train: The documents to train on.
        held_out: The held-out documents.
        prompt: The beginning that samples continue.
        note: A remark for the screen.
    """

    source: str
    train: list[str]
    held_out: list[str]
    prompt: str
    note: str = ""

    @property
    def sha256(self) -> str:
        """Return a digest of all documents."""
        digest = hashlib.sha256()
        for document in (*self.held_out, *self.train):
            digest.update(document.encode("utf-8") + b"\0")
        return digest.hexdigest()


def run_demo(
    out: Path,
    minutes: float = 4.0,
    checkpoint: str | None = None,
    text: Path | None = None,
    seed: int = 0,
    overwrite: bool = False,
) -> dict[str, Any]:
    """Run the demo and write the model, figures, sample and `results.json` to a directory.

    Args:
        out: The directory.
        minutes: The time to aim at, on two idle CPU cores.
        checkpoint: A directory or Hub id of a standard model to retrofit and train further. By default, models are
            trained from scratch.
        text: A file of text. By default the sources of the Python installation.
        seed: The first of [`SEEDS`] seeds.
        overwrite: Whether to replace `out` if it holds an earlier demo and nothing else.

    Returns:
        The content of `results.json`.

    Raises:
        FileExistsError: `out` exists, and `overwrite` is not set or it holds something else than a demo.
        ValueError: There is too little text, or the checkpoint cannot be retrofitted.
    """
    # For such a small model, a second thread saves a fifth of the time on idle cores, and costs much time on busy ones.
    # With one thread the results do not depend on the number of cores.
    threads = torch.get_num_threads() if checkpoint else 1
    with (
        quiet_transformers(),
        _torch_threads(threads),
        atomic_directory(out, WRITTEN_DEMO, overwrite=overwrite) as target,
    ):
        steps = max(4, round(minutes * (CHECKPOINT_STEPS_PER_MINUTE if checkpoint else STEPS_PER_MINUTE) / (2 * SEEDS)))
        console = Console()
        with status(console, "Reading the text ..."):
            content = _read_text(text)
        demo = _Demo(console, target, steps, content, seed)
        results = demo.from_checkpoint(checkpoint) if checkpoint else demo.from_scratch()
    console.print(f"Written to [bold]{out}[/]: the model, its figures, {DEMO_RESULTS}.", soft_wrap=True)
    return results


class _Demo:
    """A running demo: the acts, in either order, and the text, seeds, screen and directory that they share."""

    def __init__(self, console: Console, target: Path, steps: int, text: DemoText, seed: int):
        self.console, self.target, self.text, self.seed = console, target, text, seed
        self.seeds, self.steps = range(seed, seed + SEEDS), steps
        self.results: dict[str, Any] = {}

    def from_scratch(self) -> dict[str, Any]:
        """Train both models from scratch, then retrofit the standard one."""
        with status(self.console, "Training a tokenizer ..."):
            tokenizer = train_tokenizer(self.text.train, LLAMA["vocab_size"])
        special = {name: getattr(tokenizer, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
        config = AutoConfig.for_model("llama", **LLAMA, **special)
        start = partial(AutoModelForCausalLM.from_config, config)
        # The retrofit of an untrained model is a new model: both have the same weights, and its queries are zero.
        starts = {STANDARD: start, ATTN_RES: lambda: retrofit(start(), num_blocks=NUM_BLOCKS, scale="mean")}
        data = self.tokenize(tokenizer)
        self.heading(f"Act one: the same start and the same batches, two connections ({SEEDS} seeds)")
        parameters = count_parameters(config).non_embedding
        shape = {"layers": LLAMA["num_hidden_layers"], "width": LLAMA["hidden_size"], "parameters": parameters}
        self.console.print(THE_MODEL.format(**shape))
        self.results["model"] = shape
        models = self.compare(starts, data, LEARNING_RATE)
        tokens = self.steps * BATCH_SIZE * LENGTH
        self.console.print(AT_THIS_LENGTH.format(tokens=tokens, share=tokens / parameters))
        self.heading("Act two: the standard model just trained, retrofitted to attention residuals")
        retrofitted = retrofit(models[STANDARD], num_blocks=NUM_BLOCKS)
        self.show_retrofit(models[STANDARD], retrofitted, tokenizer, data)
        return self.finish(models[ATTN_RES], tokenizer, data)

    def from_checkpoint(self, checkpoint: str) -> dict[str, Any]:
        """Retrofit a standard model, then train both models further."""
        with status(self.console, f"Loading {checkpoint} ..."):
            standard, tokenizer = _load_checkpoint(checkpoint)
        data = self.tokenize(tokenizer)
        self.heading(f"Act one: {checkpoint}, retrofitted to attention residuals")
        self.show_retrofit(standard, retrofit(standard), tokenizer, data)
        self.heading(f"Act two: both are trained further on the same batches ({SEEDS} seeds)")
        self.results["held_out_loss_before"] = sequence_losses(standard, data.held_out).mean().item()
        starts = {
            STANDARD: lambda: copy.deepcopy(standard),
            ATTN_RES: lambda: retrofit(copy.deepcopy(standard)),
        }
        models = self.compare(starts, data, CHECKPOINT_LEARNING_RATE, RESIDUAL_LR_FACTOR)
        return self.finish(models[ATTN_RES], tokenizer, data)

    def heading(self, title: str) -> None:
        """Print the title of an act."""
        self.console.print(f"\n{title}", style="bold", soft_wrap=True, highlight=False)

    def tokenize(self, tokenizer: PreTrainedTokenizerBase) -> ComparisonData:
        """Cut the text into blocks, and print its size."""
        text = self.text
        with status(self.console, "Tokenising the text ..."):
            data = comparison_data(text.train, text.held_out, tokenizer, LENGTH, least=2 * BATCH_SIZE)
        sizes = {
            "training_documents": len(text.train),
            "held_out_documents": len(data.documents.unique()),
            "held_out_tokens": data.held_out.numel(),
        }
        self.results["text"] = {"source": text.source, "sha256": text.sha256, **sizes}
        self.console.print(
            f"Text: {text.source}, sha256 {text.sha256[:12]}: {len(text.train)} documents to train on, "
            f"{data.held_out.numel():,} tokens of {sizes['held_out_documents']} others held out.{text.note}"
        )
        return data

    def compare(
        self,
        starts: dict[str, Callable[[], PreTrainedModel]],
        data: ComparisonData,
        rate: float,
        residual_lr_factor: float = 1.0,
    ) -> dict[str, PreTrainedModel]:
        """Train the models, print and draw their losses, and return the models of the first seed."""
        run = Run(
            self.steps,
            BATCH_SIZE,
            rate,
            warmup_steps=self.steps // 10,
            decay_steps=self.steps // 2,
            residual_lr_factor=residual_lr_factor,
        )
        models, trials = {}, []
        with _progress(self.console) as progress:
            bar = progress.add_task("", total=len(starts) * SEEDS * self.steps)
            for trial, model in compare(
                starts,
                data,
                run,
                self.seeds,
                on_run=lambda name: progress.update(bar, description=f"training {name}"),
                on_step=lambda: progress.advance(bar),
            ):
                models.setdefault(trial.label, model)
                trials.append(trial)
            progress.update(bar, description="trained")
        lead = difference(trials, ATTN_RES, STANDARD, data.documents)
        losses = {label: [t.losses.mean().item() for t in trials if t.label == label] for label in starts}
        self.results |= {
            "seeds": list(self.seeds),
            "steps": self.steps,
            "tokens_per_step": BATCH_SIZE * LENGTH,
            "learning_rate": rate,
            "held_out_loss": losses,
            "difference": asdict(lead),
        }
        self.console.print(_loss_table(self.seeds, losses, lead, self.results.get("held_out_loss_before")))
        self.console.print(_describe_errors(lead, self.results["text"]["held_out_documents"]))
        curves = {label: [t.curve for t in trials if t.label == label] for label in (ATTN_RES, STANDARD)}
        self.results["training_loss"] = curves
        plot_paired_runs(curves, self.target / DEMO_LOSSES)
        return models

    def show_retrofit(
        self,
        standard: PreTrainedModel,
        attn_res: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        data: ComparisonData,
    ) -> None:
        """Compare a model with its retrofit, by logits and by the text that they write."""
        comparison = _compare_functions(standard, attn_res, data.held_out)
        texts = [_continue_greedily(model, tokenizer, self.text.prompt) for model in (standard, attn_res)]
        comparison["same_text"] = texts[0] == texts[1]
        self.results["retrofit"] = comparison
        self.console.print(_describe_retrofit(attn_res.config, comparison))
        if comparison["same_text"]:
            self.console.print("Without sampling, both write the same text:")
        else:
            self.console.print("Without sampling, they write different texts, the standard model first:")
        for text in texts[: 1 if comparison["same_text"] else 2]:
            self.console.print(repr(text), markup=False, highlight=False, soft_wrap=True)

    def finish(
        self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, data: ComparisonData
    ) -> dict[str, Any]:
        """Print the depth attention and a sample of a trained model, write the model, and return the results."""
        attention = depth_attention(model, data.held_out[:64].split(16))
        self.results["depth_attention"] = [[round(w, 4) for w in row[~row.isnan()].tolist()] for row in attention.mean]
        self.console.print(_describe_depth_attention(attention))
        attention.plot(self.target / DEMO_ATTENTION, values="relative")
        model.save_pretrained(self.target / DEMO_MODEL)
        tokenizer.save_pretrained(self.target / DEMO_MODEL)
        self.results["sample"] = _generate_without_attnres(self.target / DEMO_MODEL, self.text.prompt, self.seed)
        self.heading("A sample of the saved model, from a new process without attnres")
        self.console.print(self.results["sample"], markup=False, highlight=False)
        atomic_write(self.target / DEMO_RESULTS, json.dumps(self.results, indent=2) + "\n")
        return self.results


def _read_text(path: Path | None) -> DemoText:
    """Read a file of text, or the sources of the Python installation."""
    if path is None:
        train, held_out = split(python_sources(MAX_TEXT_CHARACTERS))
        source = f"the standard library of Python {platform.python_version()}"
        return DemoText(source, train, held_out, PROMPT, " Another Python has another text.")
    train, held_out = split(read_documents(path, MAX_TEXT_CHARACTERS))
    # The first words of a document, without the last one, which may be cut.
    prompt = held_out[0][: PROMPT_CHARACTERS + 1]
    if len(prompt) > PROMPT_CHARACTERS:
        prompt = prompt.rpartition(" ")[0] or prompt[:-1]
    return DemoText(str(path), train, held_out, prompt)


def _load_checkpoint(checkpoint: str) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    # Code that comes with a checkpoint does not run, and the files of the demo do not refer to it.
    model = load_source(checkpoint, trust_remote_code=False)
    retrofit(model)  # an unsupported backbone is refused before any work
    return model, open_tokenizer(checkpoint)


@torch.no_grad()
def _compare_functions(a: PreTrainedModel, b: PreTrainedModel, blocks: Tensor) -> dict[str, Any]:
    """Compare two models' logits on `blocks` `[blocks, seq]`: largest difference, largest logit, top-1 agreement."""
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


def _continue_greedily(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, prompt: str) -> str:
    inputs = tokenizer(prompt, return_tensors="pt").to(model.device)
    ids = model.generate(**inputs, max_new_tokens=NEW_TOKENS, do_sample=False)
    return tokenizer.decode(ids[0], skip_special_tokens=True)


def _generate_without_attnres(path: Path, prompt: str, seed: int) -> str:
    """Return a sample of a saved model from a process that cannot import `attnres`."""
    with tempfile.TemporaryDirectory() as modules:
        # A new cache of modules, so that the code beside the weights is used, not the code of an earlier demo.
        environment = os.environ | {"HF_MODULES_CACHE": modules, "TRANSFORMERS_VERBOSITY": "error"}
        command = [sys.executable, "-c", _GENERATE, str(path), prompt, str(seed)]
        process = subprocess.run(command, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    if process.returncode != 0:
        raise RuntimeError(f"the saved model does not load without attnres: {process.stderr.strip().splitlines()[-1]}")
    return process.stdout.strip()


def _describe_retrofit(config: PreTrainedConfig, comparison: dict[str, Any]) -> str:
    return (
        f"{config.connection.describe(config)}: "
        f"max |logit difference| [bold]{comparison['max_abs_logit_difference']:.1e}[/] "
        f"at logits up to {comparison['max_abs_logit']:.1f}, "
        f"top-1 agreement [bold]{comparison['top1_agreement']:.2%}[/]."
    )


def _loss_table(seeds: range, losses: dict[str, list[float]], lead: Difference, before: float | None) -> Table:
    table = Table(title="Held-out loss (nats/token)")
    for column in ("seed", STANDARD, ATTN_RES, "difference"):
        table.add_column(column, justify="left" if column == "seed" else "right")
    if before is not None:
        table.add_row("before", f"{before:.4f}", f"{before:.4f}", "")
        table.add_section()
    for row in zip(seeds, losses[STANDARD], losses[ATTN_RES], lead.by_seed):
        table.add_row(str(row[0]), f"{row[1]:.4f}", f"{row[2]:.4f}", f"{row[3]:+.4f}")
    table.add_section()
    means = (f"{sum(losses[label]) / SEEDS:.4f}" for label in (STANDARD, ATTN_RES))
    table.add_row("mean", *means, f"[bold]{lead.mean:+.4f} ± {lead.over_seeds:.4f}[/]")
    return table


def _describe_errors(lead: Difference, documents: int) -> str:
    lower = sum(gain < 0 for gain in lead.by_seed)
    return (
        f"{ATTN_RES} has the lower loss with {lower} of {counted(len(lead.by_seed), 'seed')}. "
        f"± is the standard deviation over seeds. For the choice of the {documents} held-out documents the mean has a "
        f"standard error of {lead.over_documents:.4f}."
    )


def _describe_depth_attention(attention: DepthAttention) -> str:
    """Return the mean weights of the sublayer that is furthest from uniform weights, and of the output."""
    depth, counts = attention.depth, attention.num_sources
    furthest = int((attention.mean - 1 / torch.tensor(counts)[:, None]).abs().nansum(1).argmax())
    lines = ["What the trained AttnRes model reads, mean over tokens (all sublayers: depth_attention.png):"]
    for consumer in dict.fromkeys((furthest, len(counts) - 1)):
        weights = attention.mean[consumer, : counts[consumer]].tolist()
        shares = ", ".join(f"{name} {weight:.2f}" for name, weight in zip(depth.sources, weights))
        lines.append(f"  {depth.consumers[consumer]}: {shares} (uniform: {1 / counts[consumer]:.2f} each)")
    return "\n".join(lines)


def _progress(console: Console) -> ProgressBar:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("steps"))
    times = (TimeElapsedColumn(), TextColumn("elapsed, left:"), TimeRemainingColumn())
    return ProgressBar(*columns, *times, console=console, unit="steps")


@contextlib.contextmanager
def _torch_threads(threads: int) -> Iterator[None]:
    """Set the number of PyTorch's threads inside the block."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)
