"""Training experiments, from the checkout: `python -m experiments claim --corpus DIR`. See `experiments/README.md`."""

import argparse
from functools import partial
from pathlib import Path

import torch
from transformers.utils import logging

from . import findings, healing, report
from .costs import WAYS, file_of, measure_costs
from .data import check_corpus, load, prepare, prepared_file
from .harness import Store, results_file, tables_file
from .options import PAGES, a_count, a_folder, a_page, a_rate, a_results_file, a_seed, add_work, chosen
from .scratch import Comparison, check_run
from .scratch_declared import BASELINE, DECLARED, declared
from .tables import report_table

FROM_SCRATCH = {
    "claim": "attention residuals against the residual stream, dense and deep",
    "moe": "a small MoE",
    "ablations": "the forms of the paper's Table 4, and block sizes",
    "depth": "whether the gain grows with depth, at equal parameters",
}


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m experiments", description=__doc__)
    commands = parser.add_subparsers(dest="experiment", required=True)
    for name, about in FROM_SCRATCH.items():
        command = commands.add_parser(name, help=about, description=about)
        sizes = sorted(path.stem.removeprefix(f"{name}-") for path in DECLARED.glob(f"{name}-*.yaml"))
        default = "cpu" if "cpu" in sizes else sizes[0]
        command.add_argument("--size", choices=sizes, default=default, help=f"which declaration; default {default}")
        command.add_argument("--corpus", type=Path, help="folder with train.txt and valid.txt, until it is prepared")
        command.add_argument("--prepare", action="store_true", help="only prepare the text, for a machine without it")
        command.add_argument(
            "--costs", nargs="*", choices=WAYS, help="only time a training step of each connection; default both ways"
        )
        command.add_argument(
            "--device",
            choices=["cpu", "cuda"],
            default="cpu",
            help="where runs are made; those stored are not repeated",
        )
        command.add_argument("--compile", action="store_true", help="make runs with torch.compile; slow to start")
        command.add_argument("--connections", nargs="+", metavar="NAME", help="some of the declared ones")
        command.add_argument("--seeds", nargs="+", type=a_seed, help="instead of the declared ones")
        command.add_argument(
            "--rate", type=a_rate, help="learning rate of all connections, instead of a sweep for each"
        )
        command.add_argument("--tokens", type=a_count, help="of a reported run, instead of the declared number")
        command.add_argument(
            "--results",
            type=a_results_file,
            help="JSON file, with a figure beside it; default in experiments/results, for a trial one of its own",
        )
        command.add_argument("--tables", type=a_page, help=PAGES)
        command.add_argument(
            "--keep", type=a_folder, help="folder for the models of reported runs; default: none are kept"
        )
        add_work(command)
    healing.add_arguments(commands.add_parser("healing", help=healing.__doc__.splitlines()[0]))
    commands.add_parser("findings", help=findings.__doc__.splitlines()[0])
    commands.add_parser("report", help=report.__doc__)
    return parser.parse_args(arguments)


def run_from_scratch(options: argparse.Namespace) -> None:
    experiment = declared(f"{options.experiment}-{options.size}")
    if options.device == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device cuda: PyTorch sees no GPU here. Leave it out to train on the CPU.")
    if options.prepare and not options.corpus:
        raise ValueError(f"--prepare needs --corpus, the folder of {experiment.text.corpus}.")
    if options.corpus and not options.corpus.is_dir():
        raise ValueError(f"--corpus: {options.corpus} is no folder. experiments/README.md says what it holds (Text).")
    if options.corpus:
        check_corpus(experiment.text, options.corpus)
    if options.corpus and (options.prepare or not prepared_file(experiment.text).exists()):
        path = prepare(experiment.text, options.corpus)
        print(f"{path}: {path.stat().st_size / 2**20:.1f} MiB")
    if options.prepare:
        return
    is_trial = bool(options.rate or options.tokens)
    name = f"{experiment.name}-trial" if is_trial else experiment.name
    store = Store(options.results or results_file(name), experiment.setting(), check_run)
    figure = store.path.with_suffix(".png")
    if options.costs is None and figure.exists() and not store.path.exists():
        raise ValueError(f"{figure} exists, and the figure of these runs would replace it. Move it away.")
    is_apart = is_trial or bool(options.results)
    page = tables_file(options.tables, options.experiment, options.size, store.path, is_apart)
    tokens, seeds = options.tokens or experiment.tokens, options.seeds or experiment.seeds
    labels = list(dict.fromkeys([BASELINE, *chosen("--connections", options.connections, experiment.connections)]))
    if options.costs is not None:
        measure_costs(experiment, labels, file_of(store.path), options.device, options.costs or WAYS)
        report.write(Comparison(experiment, store), tokens, page)
        return
    data = load(experiment.text, experiment.length, experiment.held_out)
    for length in (experiment.sweep_tokens, tokens):  # found before a sweep, not after it
        data.check(experiment.steps(length) * experiment.batch_size)
    comparison = Comparison(experiment, store, data, options.work, options.device, options.keep, options.compile)
    rates = dict.fromkeys(labels, options.rate) if options.rate else comparison.choose_rates(labels)
    wanted = [(label, rates[label], tokens, seed) for seed in seeds for label in labels]
    comparison.make(wanted, partial(report.write, comparison, tokens, page, rates if options.rate else None))
    print(report_table(comparison, rates, tokens))
    print(f"Runs: {store.path}. All tables: {page}." + (f" Figure: {figure}." if figure.exists() else ""))


def main(arguments: list[str] | None = None) -> None:
    options = parse(arguments)
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    torch.set_num_threads(1)  # for so small a model more gain little, and the numbers would depend on the machine
    others = {"healing": partial(healing.run, options), "findings": findings.write, "report": report.write_all}
    others.get(options.experiment, partial(run_from_scratch, options))()
