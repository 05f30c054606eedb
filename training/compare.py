"""The paper's claim, tested small: standard, Block and Full AttnRes from scratch, on the same tokens in the same order.

    python -m attnres.training.compare --corpus DIR

Each run is stored as it ends, and runs already stored are not repeated. Every variant's learning rate is chosen by
shorter runs (`--sweep-tokens`) with a seed of their own, on text that is not reported. One seed gives all variants the
same initial backbone and the same batches, so that differences are paired. What came out: `training/RESULTS.md`.
"""

import argparse
import math
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel, set_seed
from transformers.utils import logging

from attnres import AttnResConfig
from attnres.analysis.depth_attention import depth_attention_map
from attnres.analysis.figures import plot_loss_curves
from attnres.configuration import count_parameters, load

from .balance import ExpertBalance
from .runs import Run, sequence_losses, train
from .stored_runs import Store, spread, update_tables
from .text import pack, read_documents, train_tokenizer

LENGTH, BATCH_SIZE = 256, 8
HELD_OUT = 256  # sequences
CHARACTERS = 16_000_000  # of the training text: about five million tokens, of which each run sees a part
SELECTION_SEED = 10
WARMUP, DECAY = 0.05, 0.5  # shares of the steps
BALANCING = 0.001
# Twice the experts of `attnres-tiny`, for more than two million parameters beside the embeddings; 16 sublayers.
CONFIGURATION, CHANGES = "attnres-tiny", {"num_local_experts": 16}


@dataclass(frozen=True)
class Variant:
    """A residual connection and the rate it is trained with; `block_size` None is the standard one, 1 is Full."""

    block_size: int | None
    rate: float
    tokens: int

    def config(self) -> AttnResConfig:
        if self.block_size is None:
            return load(CONFIGURATION, residual_connection="standard", **CHANGES)
        return load(CONFIGURATION, attn_res_block_size=self.block_size, **CHANGES)


VARIANTS = {"standard": None, "Block, S=4": 4, "Block, S=2": 2, "Full": 1}
RATES = (1e-3, 2e-3, 4e-3)  # the first ones


@dataclass(frozen=True)
class Data:
    """Packed tokens `[n, LENGTH]`: to train on, to choose rates by, and to report."""

    train: Tensor
    selection: Tensor
    valid: Tensor


def load_data(corpus: Path) -> Data:
    """The beginning of `train.txt`, and `valid.txt`, of a folder, by a tokenizer trained on the former."""
    documents, valid = read_documents(corpus / "train.txt", CHARACTERS), read_documents(corpus / "valid.txt", 10**9)
    tokenizer = train_tokenizer(documents, load(CONFIGURATION).vocab_size)
    blocks, valid = pack(documents, tokenizer, LENGTH), pack(valid, tokenizer, LENGTH)
    if len(valid) < 2 * HELD_OUT:
        raise ValueError(f"{corpus / 'valid.txt'} gives {len(valid)} sequences of {LENGTH} tokens, not {2 * HELD_OUT}.")
    order = torch.randperm(len(valid), generator=torch.Generator().manual_seed(0))
    return Data(blocks, valid[order[:HELD_OUT]], valid[order[HELD_OUT : 2 * HELD_OUT]])


def build(variant: Variant, seed: int) -> PreTrainedModel:
    """The model at its start; the backbone's weights depend on the seed alone."""
    set_seed(seed)
    return AutoModelForCausalLM.from_config(variant.config())


def measure(variant: Variant, data: Data, seed: int, on_step: Callable[[], None]) -> dict[str, Any]:
    """One run: held-out loss (nats/token), training loss over the steps, and what the depth attention became."""
    began = time.monotonic()
    steps = math.ceil(variant.tokens / (BATCH_SIZE * LENGTH))
    if steps * BATCH_SIZE > len(data.train):
        raise ValueError(
            f"the corpus has {len(data.train) * LENGTH:,} tokens; {variant.tokens:,} are wanted, each once."
        )
    model = build(variant, seed)
    order = torch.randperm(len(data.train), generator=torch.Generator().manual_seed(seed))
    run = Run(
        steps,
        BATCH_SIZE,
        variant.rate,
        warmup_steps=round(WARMUP * steps),
        decay_steps=round(DECAY * steps),
        seed=seed,
    )
    balance = ExpertBalance(BALANCING)
    curve = train(model, data.train[order[: steps * BATCH_SIZE]], run, on_step, [balance])
    held_out = data.selection if seed == SELECTION_SEED else data.valid
    result = {
        "recipe": asdict(variant),
        "seed": seed,
        "after": round(sequence_losses(model, held_out).mean().item(), 6),
        "expert_load_entropy": round(balance.metrics()["expert_load_entropy"], 4),
        "curve": [[step, round(loss, 4)] for step, loss in curve],
        "seconds": round(time.monotonic() - began, 1),
    }
    if variant.block_size is not None:
        weights = depth_attention_map(model.eval(), held_out[:32].split(16))
        result["depth_attention"] = [[round(w, 4) for w in row[~row.isnan()].tolist()] for row in weights]
    return result


def run_all(data: Data, store: Store, wanted: list[tuple[str, Variant, int]]) -> None:
    """Run what the store lacks of (label, variant, seed)."""
    missing = [run for run in wanted if not store.find(run[1], run[2])]
    if not missing:
        return
    console = Console()
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(), TextColumn("left:"))
    with Progress(*columns, TimeRemainingColumn(), console=console) as progress:
        bar = progress.add_task("", total=sum(variant.tokens for _, variant, _ in missing))
        for label, variant, seed in missing:
            progress.update(bar, description=f"{label}, rate {variant.rate:g}, seed {seed}")
            run = measure(variant, data, seed, lambda: progress.advance(bar, BATCH_SIZE * LENGTH))
            store.add(run)
            console.print(
                f"{label}, rate {variant.rate:g}, seed {seed}: {run['after']:.4f}, {run['seconds']:.0f} s",
                highlight=False,
            )


def swept(store: Store, block_size: int | None, tokens: int) -> dict[float, float]:
    """The loss on the selection text by rate, of the rates tried so far."""
    runs = [run for run in store.content["runs"] if run["seed"] == SELECTION_SEED]
    recipes = [(run["recipe"], run["after"]) for run in runs]
    return {r["rate"]: loss for r, loss in recipes if (r["block_size"], r["tokens"]) == (block_size, tokens)}


def best_rate(store: Store, block_size: int | None, tokens: int) -> float:
    """The rate of the sweep with the lowest loss on the selection text."""
    losses = swept(store, block_size, tokens)
    return min(losses, key=losses.__getitem__)


def sweep(data: Data, store: Store, tokens: int) -> dict[int | None, float]:
    """Every variant's best rate by its block size: among `RATES`, and beyond while the best is the last one tried."""
    rates = {size: list(RATES) for size in VARIANTS.values()}
    while True:
        labelled = [(label, size, rate) for label, size in VARIANTS.items() for rate in rates[size]]
        run_all(data, store, [(label, Variant(size, rate, tokens), SELECTION_SEED) for label, size, rate in labelled])
        best = {size: best_rate(store, size, tokens) for size in rates}
        open_ended = [size for size in rates if best[size] in (min(rates[size]), max(rates[size]))]
        if not open_ended:
            return best
        for size in open_ended:
            rates[size].append(best[size] * (2 if best[size] == max(rates[size]) else 0.5))


def report_table(store: Store, variants: dict[str, Variant], seeds: list[int]) -> str:
    """Held-out loss, mean and standard deviation over the seeds, and the difference from `standard` within seeds."""
    rows = ["| model | rate | seeds | held-out loss | minus standard |", "|---|---:|---:|---:|---:|"]
    for label, variant in variants.items():
        runs = [(store.find(variant, seed), store.find(variants["standard"], seed)) for seed in seeds]
        runs = [(run, standard) for run, standard in runs if run and standard]
        if not runs:
            continue
        differences = [run["after"] - standard["after"] for run, standard in runs]
        losses = spread([run["after"] for run, _ in runs])
        difference = "" if label == "standard" else spread(differences, sign="+")
        rows.append(f"| {label} | {variant.rate:g} | {len(runs)} | {losses} | {difference} |")
    return "\n".join(rows)


def sweep_table(store: Store, tokens: int) -> str:
    """The loss on the selection text by rate."""
    losses = {label: swept(store, size, tokens) for label, size in VARIANTS.items()}
    rates = sorted({rate for of_variant in losses.values() for rate in of_variant})
    rows = [f"| model | {' | '.join(f'{rate:g}' for rate in rates)} |", "|---|" + "---:|" * len(rates)]
    for label, found in losses.items():
        rows.append(f"| {label} | {' | '.join(f'{found[rate]:.4f}' if rate in found else '' for rate in rates)} |")
    return "\n".join(rows)


def plot(store: Store, variants: dict[str, Variant], seeds: list[int], path: Path) -> None:
    """Training loss, mean over the seeds that all variants have."""
    runs = {label: [store.find(variant, seed) for seed in seeds] for label, variant in variants.items()}
    done = [i for i in range(len(seeds)) if all(found[i] for found in runs.values())]
    if not done:
        return
    curves = {
        label: [(points[0][0], mean(loss for _, loss in points)) for points in zip(*(found[i]["curve"] for i in done))]
        for label, found in runs.items()
    }
    plot_loss_curves(curves, path, compare=("Full", "standard"))


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m attnres.training.compare", description=__doc__.split("\n")[0])
    parser.add_argument("--corpus", type=Path, required=True, help="directory with train.txt and valid.txt")
    parser.add_argument("--tokens", type=int, default=2**21, help="of each reported run")
    parser.add_argument("--sweep-tokens", type=int, default=2**20, help="of each run that chooses a rate")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--results", type=Path, default=Path("training/results/compare.json"))
    parser.add_argument("--tables", type=Path, default=Path("training/RESULTS.md"), help="Markdown file to update")
    options = parser.parse_args(arguments)
    if SELECTION_SEED in options.seeds:
        parser.error(f"--seeds: seed {SELECTION_SEED} is the one that rates are chosen by")
    return options


def main(arguments: list[str] | None = None) -> None:
    options = parse(arguments)
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    torch.set_num_threads(1)  # for so small a model more gain little, and the numbers would depend on the machine
    count = count_parameters(Variant(4, 0.0, 0).config())
    setting = {
        "configuration": CONFIGURATION,
        **CHANGES,
        "non_embedding": count.non_embedding,
        "length": LENGTH,
        "expert_balancing": BALANCING,
        "characters": CHARACTERS,
    }
    store = Store(options.results, setting | {"batch_size": BATCH_SIZE, "corpus": options.corpus.name})
    data = load_data(options.corpus)
    rates = sweep(data, store, options.sweep_tokens)
    variants = {label: Variant(size, rates[size], options.tokens) for label, size in VARIANTS.items()}
    for seed in options.seeds:
        run_all(data, store, [(label, variant, seed) for label, variant in variants.items()])
        report = report_table(store, variants, options.seeds)
        update_tables(options.tables, {"report": report, "rates": sweep_table(store, options.sweep_tokens)})
        plot(store, variants, options.seeds, options.results.with_suffix(".png"))


if __name__ == "__main__":
    try:
        main()
    except (OSError, ValueError) as error:
        sys.exit(f"error: {error}")
