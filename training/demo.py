"""The demo, in two acts: a small Llama with attention residuals against one without, and an exact retrofit.

It needs no network and no account: the text is the sources of the Python installation. Both models are trained by one
recipe, as `attnres train` would train them. The demo prints its measurements, whichever model wins. With a checkpoint,
the retrofit comes first, and then both models are trained further.
"""

import contextlib
import io
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Generator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import datasets.config
import torch
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    set_seed,
)

from attnres.analysis import DepthAttention, depth_attention
from attnres.analysis.loss_figures import plot_paired_runs
from attnres.checkpoints.checkpoint import Checkpoint
from attnres.configuration import count_parameters
from attnres.conversion import retrofit
from attnres.conversion.family import retrofit_config
from attnres.conversion.retrofit import load_source
from attnres.conversion.verify import compare
from attnres.family import describe_connection
from attnres.utils.files import atomic_directory, atomic_write
from attnres.utils.intervals import Interval
from attnres.utils.model_files import DEMO_ATTENTION, DEMO_LOSSES, DEMO_MODEL, DEMO_RESULTS, WRITTEN_DEMO
from attnres.utils.progress import ProgressBar, status
from attnres.utils.quiet import quiet_transformers
from attnres.utils.wording import counted

from .prepare import open_tokenizer
from .recipe import read_recipe
from .run_folder import MODEL
from .text import DemoText, read_demo_text, train_tokenizer
from .train import run_train

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
# The recipe of all runs, beside the model, the data and the length.
RECIPE = {
    "length": LENGTH,
    "batch_size": BATCH_SIZE,
    "micro_batch_size": BATCH_SIZE,
    "schedule": "wsd",
    "warmup": 0.1,
    "decay": 0.5,
    "keep": 1,
    "trainer.eval_on_start": False,
}
LEARNING_RATE, CHECKPOINT_LEARNING_RATE = 3e-3, 3e-4
RESIDUAL_LR_FACTOR = 0.3  # of a retrofit; from scratch the factor is 1
CURVE_POINTS = 50  # of a training loss
COMPARED_CHARACTERS = 400  # of each held-out document, on which a retrofit is compared with its source
NEW_TOKENS = 40  # of each text that is generated

THE_MODEL = "Both are Llamas with {layers} layers of width {width}: {parameters:,} parameters beside the embeddings."
AT_THIS_LENGTH = (
    "This is not the difference at the end of a training. {tokens:,} tokens are {share:.2f} for each parameter, and a "
    "difference changes with the length. Most longer runs of small models ended in ties. The paper reports 0.02 nats "
    "after about 200 tokens for each parameter (docs/results.md in the repository)."
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


def run_demo(
    out: Path,
    *,
    minutes: float,
    checkpoint: str | None,
    text: Path | None,
    seed: int,
    overwrite: bool,
) -> dict[str, Any]:
    """Run the demo and write the model, figures, sample and `results.json` to a directory.

    Args:
        out: The directory.
        minutes: The time to aim at, on two idle CPU cores.
        checkpoint: A directory or Hub id of a standard model to retrofit and train further; `None` for models
            from scratch.
        text: A file of text; `None` for the sources of the Python installation.
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
        # The runs lie beside the results, where there is space for a model. `datasets` keeps their tokens there too.
        tempfile.TemporaryDirectory(dir=target) as work,
        mock.patch.object(datasets.config, "HF_DATASETS_CACHE", work),
    ):
        steps = max(4, round(minutes * (CHECKPOINT_STEPS_PER_MINUTE if checkpoint else STEPS_PER_MINUTE) / (2 * SEEDS)))
        console = Console(file=sys.stdout)  # this file, since the lines of runs are sent to another
        with status(console, "Reading the text ..."):
            content = read_demo_text(text)
        demo = _Demo(console, target, Path(work), steps, content, seed)
        results = demo.from_checkpoint(checkpoint) if checkpoint else demo.from_scratch()
    console.print(f"Written to [bold]{out}[/]: the model, its figures, {DEMO_RESULTS}.", soft_wrap=True)
    return results


class _Demo:
    """A running demo: the acts, in either order, and what they share.

    Args:
        console: The screen.
        target: The directory of the results.
        work: A directory for the runs.
        steps: The optimizer steps of a run.
        text: The text.
        seed: The first seed.
    """

    def __init__(self, console: Console, target: Path, work: Path, steps: int, text: DemoText, seed: int):
        self.console, self.target, self.work, self.text, self.seed = console, target, work, text, seed
        self.seeds, self.steps = range(seed, seed + SEEDS), steps
        self.results: dict[str, Any] = {}

    def from_scratch(self) -> dict[str, Any]:
        """Train both models from scratch, then retrofit the standard one."""
        with status(self.console, "Training a tokenizer ..."):
            tokenizer = train_tokenizer(self.text.train, LLAMA["vocab_size"])
        special = {name: getattr(tokenizer, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
        config = AutoConfig.for_model("llama", **LLAMA, **special)
        starts = {}
        for seed in self.seeds:
            set_seed(seed)
            starts[seed] = str(self.work / f"start-{seed}")
            AutoModelForCausalLM.from_config(config).save_pretrained(starts[seed])
            tokenizer.save_pretrained(starts[seed])
        held_out = self.write_text(tokenizer)
        self.heading(f"Act one: the same start and the same batches, two connections ({SEEDS} seeds)")
        parameters = count_parameters(config).non_embedding
        shape = {"layers": LLAMA["num_hidden_layers"], "width": LLAMA["hidden_size"], "parameters": parameters}
        self.console.print(THE_MODEL.format(**shape))
        self.results["model"] = shape
        # The retrofit of an untrained model is a new model: both have the same weights, and its queries are zero.
        self.compare(starts, {"num_blocks": NUM_BLOCKS, "scale": "mean"}, held_out, learning_rate=LEARNING_RATE)
        tokens = self.steps * BATCH_SIZE * LENGTH
        self.console.print(AT_THIS_LENGTH.format(tokens=tokens, share=tokens / parameters))
        self.heading("Act two: the standard model just trained, retrofitted to attention residuals")
        self.show_retrofit(self.run_folder(STANDARD, self.seed) / MODEL, tokenizer, num_blocks=NUM_BLOCKS)
        return self.finish(tokenizer, held_out)

    def from_checkpoint(self, checkpoint: str) -> dict[str, Any]:
        """Retrofit a standard model, then train both models further."""
        # Code that comes with a checkpoint does not run, and the files of the demo do not refer to it.
        folder = Checkpoint.open(checkpoint).folder
        retrofit_config(AutoConfig.from_pretrained(folder, trust_remote_code=False))  # refuses an unsupported backbone
        tokenizer = open_tokenizer(checkpoint)
        held_out = self.write_text(tokenizer)
        self.heading(f"Act one: {checkpoint}, retrofitted to attention residuals")
        with status(self.console, f"Loading {checkpoint} ..."):
            self.show_retrofit(folder, tokenizer)
        self.heading(f"Act two: both are trained further on the same batches ({SEEDS} seeds)")
        self.results["held_out_loss_before"] = document_losses(_load(folder), held_out).mean().item()
        settings = {"learning_rate": CHECKPOINT_LEARNING_RATE, "residual_lr_factor": RESIDUAL_LR_FACTOR}
        self.compare(dict.fromkeys(self.seeds, checkpoint), {}, held_out, **settings)
        return self.finish(tokenizer, held_out)

    def heading(self, title: str) -> None:
        """Print the title of an act."""
        self.console.print(f"\n{title}", style="bold", soft_wrap=True, highlight=False)

    def write_text(self, tokenizer: PreTrainedTokenizerBase) -> list[Tensor]:
        """Write the text for the runs, print its size, and return the token ids of each held-out document."""
        text = self.text
        for name, documents in (("train", text.train), ("held_out", text.held_out)):
            rows = (json.dumps({"text": document}) + "\n" for document in documents)
            (self.work / f"{name}.jsonl").write_text("".join(rows), encoding="utf-8")
        held_out = tokenizer(text.held_out, add_special_tokens=False, verbose=False)["input_ids"]
        sizes = {
            "training_documents": len(text.train),
            "held_out_documents": len(held_out),
            "held_out_tokens": sum(map(len, held_out)),
        }
        self.results["text"] = {"source": text.source, "sha256": text.sha256, **sizes}
        self.console.print(
            f"Text: {text.source}, sha256 {text.sha256[:12]}: {len(text.train)} documents to train on, "
            f"{sizes['held_out_tokens']:,} tokens of {len(held_out)} others held out.{text.note}"
        )
        sequences = (torch.tensor(ids).split(LENGTH) for ids in held_out if len(ids) > 1)
        # The last sequence of a document is shorter than the others, and is left out unless it is the only one.
        return [torch.stack(parts[:-1] or parts) for parts in sequences]

    def compare(
        self, starts: dict[int, str], retrofit_options: dict[str, Any], held_out: list[Tensor], **settings: float
    ) -> None:
        """Train a standard model and its retrofit from each start, by one recipe, and print and draw their losses.

        Args:
            starts: Seed -> the standard model that both runs of this seed start from.
            retrofit_options: The arguments of the retrofit.
            held_out: The token ids of each held-out document.
            settings: Values of the recipe.
        """
        losses: dict[str, list[Tensor]] = {STANDARD: [], ATTN_RES: []}
        curves: dict[str, list[list[tuple[int, float]]]] = {ATTN_RES: [], STANDARD: []}
        with _progress(self.console) as progress:
            bar = progress.add_task("", total=len(losses) * SEEDS)
            for seed, start in starts.items():
                for label, options in ((STANDARD, None), (ATTN_RES, retrofit_options)):
                    progress.update(bar, description=f"training {label}, seed {seed}")
                    began = time.monotonic()
                    points = self.train(label, seed, {"model": start, "retrofit": options, **settings})
                    curves[label].append(points)
                    losses[label].append(document_losses(_load(self.run_folder(label, seed) / MODEL), held_out))
                    self.console.print(
                        f"{label}, seed {seed}: training loss {points[0][1]:.2f} in step {points[0][0]}, "
                        f"{points[-1][1]:.2f} in step {points[-1][0]} ({time.monotonic() - began:.0f} s)",
                        highlight=False,
                    )
                    progress.advance(bar)
            progress.update(bar, description="trained")
        lead = difference(torch.stack(losses[ATTN_RES]), torch.stack(losses[STANDARD]))
        means = {label: [by_document.mean().item() for by_document in by_seed] for label, by_seed in losses.items()}
        self.results |= {
            "seeds": list(self.seeds),
            "steps": self.steps,
            "tokens_per_step": BATCH_SIZE * LENGTH,
            "learning_rate": settings["learning_rate"],
            "held_out_loss": means,
            "difference": lead,
            "training_loss": curves,
        }
        self.console.print(_loss_table(self.seeds, means, lead, self.results.get("held_out_loss_before")))
        self.console.print(_describe_errors(lead, len(held_out)))
        plot_paired_runs(curves, self.target / DEMO_LOSSES)

    def train(self, label: str, seed: int, settings: dict[str, Any]) -> list[tuple[int, float]]:
        """Run the recipe, and return its training loss as points (step, nats/token)."""
        values = RECIPE | settings
        values |= {
            "train": str(self.work / "train.jsonl"),
            "held_out": str(self.work / "held_out.jsonl"),
            "out": str(self.run_folder(label, seed)),
            "seed": seed,
            "steps": self.steps,
            "save_every": self.steps,
            "log_every": max(1, self.steps // CURVE_POINTS),
        }
        # JSON is YAML, and a quoted path is one whatever its name.
        changes = [f"{key}={json.dumps(value)}" for key, value in values.items()]
        # The demo has its own lines and its own bar.
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            return run_train(read_recipe("finetune", changes))["training_loss"]

    def run_folder(self, label: str, seed: int) -> Path:
        """Return the folder of a run."""
        return self.work / f"{label.lower().replace(' ', '-')}-{seed}"

    def show_retrofit(self, source: Path, tokenizer: PreTrainedTokenizerBase, **options: Any) -> None:
        """Retrofit a model, and compare the two by logits and by the text that they write.

        Args:
            source: The directory of the standard model.
            tokenizer: Its tokenizer.
            options: The arguments of the retrofit.
        """
        standard, result = _load(source), self.work / "retrofit"
        texts = [_continue_greedily(standard, tokenizer, self.text.prompt)]
        attn_res = retrofit(standard, **options)
        texts.append(_continue_greedily(attn_res, tokenizer, self.text.prompt))
        attn_res.save_pretrained(result)
        tokenizer.save_pretrained(result)
        comparison = compare(source, result, [text[:COMPARED_CHARACTERS] for text in self.text.held_out])
        self.results["retrofit"] = {
            "max_abs_logit_difference": comparison.max_difference,
            "max_abs_logit": comparison.max_logit,
            "top1_agreement": comparison.agreement,
            "same_text": texts[0] == texts[1],
        }
        self.console.print(f"{describe_connection(attn_res.config)}: {comparison}.", soft_wrap=True)
        if texts[0] == texts[1]:
            self.console.print("Without sampling, both write the same text:")
            texts.pop()
        else:
            self.console.print("Without sampling, they write different texts, the standard model first:")
        for text in texts:
            self.console.print(repr(text), markup=False, highlight=False, soft_wrap=True)

    def finish(self, tokenizer: PreTrainedTokenizerBase, held_out: list[Tensor]) -> dict[str, Any]:
        """Print the depth attention and a sample of the trained model, write the model, and return the results."""
        model = _load(self.run_folder(ATTN_RES, self.seed) / MODEL)
        attention = depth_attention(model, held_out)
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


@torch.no_grad()
def document_losses(model: PreTrainedModel, documents: Sequence[Tensor]) -> Tensor:
    """Compute the mean next-token loss of each document.

    Args:
        model: The model.
        documents: The token ids of each document, `[sequences, seq]`.

    Returns:
        The losses in nats/token, float64 `[documents]`.
    """
    model.eval()
    return torch.tensor([model(ids, labels=ids, use_cache=False).loss.item() for ids in documents], dtype=torch.float64)


def difference(first: Tensor, second: Tensor) -> dict[str, Any]:
    """Compare two models by their held-out losses, within seeds and documents.

    Args:
        first: The losses of a model in nats/token, `[seeds, documents]`.
        second: Those of the model that it is compared with.

    Returns:
        First minus second: `by_seed`; their `mean`; its 95% `interval` over the seeds, `None` for a single seed; and
        `over_documents`, the standard error of the mean from the choice of documents.
    """
    by_seed, by_document = (first - second).mean(1), (first - second).mean(0)
    error = by_document.std() / len(by_document) ** 0.5
    return {
        "by_seed": by_seed.tolist(),
        "mean": by_seed.mean().item(),
        "interval": Interval.of(by_seed.tolist()).bounds,
        "over_documents": error.item(),
    }


def _load(folder: Path) -> PreTrainedModel:
    return load_source(str(folder), trust_remote_code=False)


def _continue_greedily(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, prompt: str) -> str:
    inputs = tokenizer(prompt, return_tensors="pt").to(model.device)
    # pyrefly: ignore[not-callable]  # all causal language models have it
    ids = model.generate(**inputs, max_new_tokens=NEW_TOKENS, do_sample=False)
    return str(tokenizer.decode(ids[0], skip_special_tokens=True))


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


def _loss_table(seeds: range, losses: dict[str, list[float]], lead: dict[str, Any], before: float | None) -> Table:
    table = Table(title="Held-out loss (nats/token)")
    for column in ("seed", STANDARD, ATTN_RES, "difference"):
        table.add_column(column, justify="left" if column == "seed" else "right")
    if before is not None:
        table.add_row("before", f"{before:.4f}", f"{before:.4f}", "")
        table.add_section()
    for row in zip(seeds, losses[STANDARD], losses[ATTN_RES], lead["by_seed"]):
        table.add_row(str(row[0]), f"{row[1]:.4f}", f"{row[2]:.4f}", f"{row[3]:+.4f}")
    table.add_section()
    means = (f"{sum(losses[label]) / SEEDS:.4f}" for label in (STANDARD, ATTN_RES))
    table.add_row("mean", *means, f"[bold]{escape(Interval.of(lead['by_seed']).describe())}[/]")
    return table


def _describe_errors(lead: dict[str, Any], documents: int) -> str:
    lower = sum(gain < 0 for gain in lead["by_seed"])
    return (
        f"{ATTN_RES} has the lower loss with {lower} of {counted(len(lead['by_seed']), 'seed')}. "
        f"In brackets: the 95% interval over the seeds. For the choice of the {documents} held-out documents the mean "
        f"has a standard error of {lead['over_documents']:.4f}."
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
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("runs"))
    times = (TimeElapsedColumn(), TextColumn("elapsed, left:"), TimeRemainingColumn())
    return ProgressBar(*columns, *times, console=console, unit="runs")


@contextlib.contextmanager
def _torch_threads(threads: int) -> Generator[None]:
    """Set the number of PyTorch's threads inside the block."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)
