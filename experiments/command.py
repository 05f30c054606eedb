"""The command line of the experiments, from the checkout: `python -m experiments claim --corpus DIR`.

`experiments/README.md` describes the commands.
"""

import argparse
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
from transformers.utils import logging

from . import findings, healing, report
from .costs import WAYS, costs_of, measure_costs, memory_of
from .data import load, prepare
from .declared import BASELINE, FROM_SCRATCH, SELECTION_SEED, HealingExperiment, ScratchExperiment, names
from .scratch import DeclaredComparison
from .store import RunStore, results_file
from .tables import healing_tables, result_table, scratch_tables

WORK = Path(tempfile.gettempdir()) / "attnres-experiments"


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line. `run` of the result is the function that runs the command."""
    parser = argparse.ArgumentParser(prog="python -m experiments", description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(required=True)

    def add(name: str, about: str, run: Callable[[argparse.Namespace], None]) -> argparse.ArgumentParser:
        command = commands.add_parser(name, help=about, description=about)
        command.set_defaults(experiment=name, run=run, rate=None, tokens=None)
        if sizes := [declared.removeprefix(f"{name}-") for declared in names(name)]:
            default = next((size for size in ("cpu", "stories") if size in sizes), sizes[0])
            text = "JSON file for runs, with their tables beside it; default in experiments/results"
            command.add_argument("--size", choices=sizes, default=default, help=f"which declaration; default {default}")
            command.add_argument("--results", type=Path, help=text)
            command.add_argument("--work", type=Path, default=WORK, help=f"folder for checkpoints; default {WORK}")
        return command

    for name, about in FROM_SCRATCH.items():
        option = add(name, about, run_from_scratch).add_argument
        option("--corpus", type=Path, help="folder with train.txt and valid.txt, until it is prepared")
        option("--prepare", action="store_true", help="only prepare the text, for a machine without it")
        option("--costs", nargs="*", choices=WAYS, help="only time a step of each connection; default both ways")
        option("--device", choices=["cpu", "cuda"], default="cpu", help="where missing runs are made")
        option("--compile", action="store_true", help="make runs with torch.compile; slow to start")
        option("--connections", nargs="+", metavar="NAME", help="run only these of the declared connections")
        option("--seeds", nargs="+", type=int, help="seeds of reported runs, instead of the declared ones")
        option("--rate", type=float, help="learning rate of all connections, instead of a sweep for each")
        option("--tokens", type=int, help="tokens of a reported run, instead of the declared number")
        option("--keep", type=Path, help="folder for the models of reported runs; default: none are kept")
    option = add("healing", "train a pretrained model on, as it is and as a retrofit", run_healing).add_argument
    option("--checkpoint", type=Path, required=True, help="directory of the pretrained model")
    option("--corpus", type=Path, required=True, help="directory with train.txt and valid.txt")
    option("--groups", nargs="+", metavar="GROUP", help="titles of sweeps, or `report`; default all")
    add(
        "findings",
        "write the table of analysis/RESULTS.md from the stored inspections",
        lambda options: findings.write(),
    )
    add("report", "write pages and figures from the stored runs", lambda options: report.write_all())
    return parser.parse_args(arguments)


def _store(options: argparse.Namespace, experiment: ScratchExperiment | HealingExperiment) -> RunStore:
    # The pages of the repository do not show trials.
    is_trial = options.rate or options.tokens or options.size == "tiny"
    return RunStore(experiment, options.results or results_file(experiment.name + ("-trial" if is_trial else "")))


def _select(option: str, chosen: list[str] | None, declared: list[str]) -> list[str]:
    if unknown := set(chosen or ()) - set(declared):
        raise ValueError(f"{option} must be among {', '.join(map(repr, declared))}; got {min(unknown)!r}.")
    return chosen or declared


def run_from_scratch(options: argparse.Namespace) -> None:
    """Make the runs of an experiment from scratch, or prepare its text, or time its steps, as the options say.

    Raises:
        OSError: A file cannot be read or written.
        ValueError: An option does not fit the experiment, or stored runs do not.
    """
    experiment = ScratchExperiment.load(f"{options.experiment}-{options.size}")
    if options.prepare:
        return prepare(experiment.text, options.corpus)
    store = _store(options, experiment)
    tokens, seeds = options.tokens or experiment.tokens, options.seeds or experiment.seeds
    if SELECTION_SEED in seeds:
        raise ValueError(f"--seeds must not have {SELECTION_SEED}, the seed of the runs that choose settings.")
    labels = _select("--connections", options.connections, list(experiment.connections))
    labels = [BASELINE, *(label for label in labels if label != BASELINE)]
    one_rate = dict.fromkeys(labels, options.rate) if options.rate else None
    if options.costs is not None:
        comparison = DeclaredComparison(experiment, store, device=options.device)
        measure_costs(comparison, labels, options.costs or WAYS)
    else:
        data = load(experiment.text, experiment.length, experiment.held_out, options.corpus)
        comparison = DeclaredComparison(
            experiment, store, data, options.work, options.device, options.keep, options.compile
        )
        rates = one_rate or comparison.choose_rates(labels)
        comparison.make([(label, rates[label], tokens, seed) for seed in seeds for label in labels])
    shown = comparison.shown(tokens, one_rate)
    costs, memory = costs_of(comparison), memory_of(comparison)
    report.write(experiment, store.path, scratch_tables(shown, costs, memory))
    print(result_table(shown, costs, memory))


def run_healing(options: argparse.Namespace) -> None:
    """Make the runs of an experiment of healing.

    Raises:
        OSError: A file cannot be read or written.
        ValueError: An option does not fit the experiment, or stored runs do not.
    """
    experiment = HealingExperiment.load(f"healing-{options.size}")
    groups = _select("--groups", options.groups, [healing.REPORT, *experiment.sweeps])
    store = _store(options, experiment)
    start, tokenizer = healing.load_start(options.checkpoint)
    data = healing.load_data(experiment, options.corpus, tokenizer)
    healing.Healing(experiment, start, data, store, options.work).make(groups)
    report.write(experiment, store.path, healing_tables(experiment, store))


def main(arguments: list[str] | None = None) -> None:
    """Run the command.

    Raises:
        OSError: A file cannot be read or written.
        ValueError: An option, a declaration or a text cannot be used, or stored runs do not fit.
    """
    options = parse(arguments)
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    # More threads gain little for models so small, and the numbers would depend on the machine.
    torch.set_num_threads(1)
    options.run(options)
