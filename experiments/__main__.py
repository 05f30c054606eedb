"""Training experiments, from the checkout: `python -m experiments claim --corpus DIR`. See `experiments/README.md`."""

import argparse
import sys
from functools import partial
from pathlib import Path

import torch
from transformers.utils import logging

from attnres.analysis.tables import update_tables

from . import findings, healing
from .data import load, prepare, prepared_file
from .harness import SELECTION_SEED, Store, add_work, chosen
from .scratch import BASELINE, Comparison, declared
from .tables import plot, plot_beside_paper, report_table, sweep_table

HERE = Path(__file__).parent
FROM_SCRATCH = {
    "claim": "attention residuals against the residual stream, dense and deep",
    "moe": "a small MoE",
    "ablations": "the forms of the paper's Table 4, and block sizes",
}


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m experiments", description=__doc__)
    commands = parser.add_subparsers(dest="experiment", required=True)
    for name, about in FROM_SCRATCH.items():
        command = commands.add_parser(name, help=about, description=about)
        sizes = sorted(path.stem.removeprefix(f"{name}-") for path in HERE.glob(f"declared/{name}-*.yaml"))
        command.add_argument("--size", choices=sizes, default="cpu", help="which declaration; default cpu")
        command.add_argument("--corpus", type=Path, help="folder with train.txt and valid.txt, until it is prepared")
        command.add_argument("--prepare", action="store_true", help="only prepare the text, for a machine without it")
        command.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
        command.add_argument("--connections", nargs="+", metavar="NAME", help="some of the declared ones")
        command.add_argument("--seeds", nargs="+", type=int, help="instead of the declared ones")
        command.add_argument("--rate", type=float, help="learning rate of all connections, instead of a sweep for each")
        command.add_argument("--tokens", type=int, help="of a reported run, instead of the declared number")
        command.add_argument("--results", type=Path, help="JSON file; default in experiments/results")
        command.add_argument("--tables", type=Path, help=f"Markdown file to update; default experiments/{name}.md")
        command.add_argument("--keep", type=Path, help="folder for the models of reported runs; default: none are kept")
        add_work(command)
    healing.add_arguments(commands.add_parser("healing", help=healing.__doc__.splitlines()[0]))
    commands.add_parser("findings", help=findings.__doc__.splitlines()[0])
    options = parser.parse_args(arguments)
    if SELECTION_SEED in (getattr(options, "seeds", None) or ()):
        parser.error(f"--seeds: seed {SELECTION_SEED} is the one that settings are chosen by")
    return options


def run_from_scratch(options: argparse.Namespace) -> None:
    experiment = declared(f"{options.experiment}-{options.size}")
    if options.device == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device cuda: PyTorch sees no GPU here. Leave it out to train on the CPU.")
    if options.corpus and (options.prepare or not prepared_file(experiment.text).exists()):
        path = prepare(experiment.text, options.corpus)
        print(f"{path}: {path.stat().st_size / 2**20:.1f} MiB")
    if options.prepare:
        return
    connections = chosen("--connections", options.connections, experiment.connections)
    labels = list(dict.fromkeys([BASELINE, *connections]))
    tokens, seeds = options.tokens or experiment.tokens, options.seeds or experiment.seeds
    store = Store(options.results or HERE / "results" / f"{experiment.name}.json", experiment.setting())
    data = load(experiment.text, experiment.length, experiment.held_out)
    comparison = Comparison(experiment, store, data, options.work, options.device, options.keep)
    rates = dict.fromkeys(labels, options.rate) if options.rate else comparison.sweep(labels)
    for seed in seeds:
        for label in labels:
            comparison.make([(label, rates[label], tokens, seed)])
            write(comparison, rates, tokens, seeds, options.tables or HERE / f"{options.experiment}.md", options.size)


def write(
    comparison: Comparison, rates: dict[str, float], tokens: int, seeds: list[int], page: Path, size: str
) -> None:
    tables = {"result": report_table(comparison, rates, tokens, seeds), "rates": sweep_table(comparison, list(rates))}
    update_tables(page, {f"{size}: {name}": table for name, table in tables.items()})
    draw = plot_beside_paper if comparison.experiment.published else plot
    draw(comparison, rates, tokens, seeds, comparison.store.path.with_suffix(".png"))


def main(arguments: list[str] | None = None) -> None:
    options = parse(arguments)
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    torch.set_num_threads(1)  # for so small a model more gain little, and the numbers would depend on the machine
    others = {"healing": partial(healing.run, options), "findings": findings.write}
    others.get(options.experiment, partial(run_from_scratch, options))()


if __name__ == "__main__":
    try:
        main()
    except (OSError, ValueError) as error:
        sys.exit(f"error: {error}")
