"""The command line of the experiments, from the checkout: `python -m experiments claim --corpus DIR`.

`experiments/README.md` describes what it does. Options that make no sense are refused before anything is trained.
"""

import argparse
import os
import tempfile
from collections.abc import Iterable
from functools import partial
from pathlib import Path

import torch
from transformers.utils import logging

from attnres.utils.files import parents

from . import findings, healing, report
from .costs import WAYS, measure_costs
from .data import check_corpus, load, prepare, prepared_file
from .declared import (
    BASELINE,
    SELECTION_SEED,
    HealingExperiment,
    ScratchExperiment,
    is_rate,
    is_seed,
    names,
    sizes_of_healing,
)
from .scratch import DeclaredComparison
from .store import RunStore, results_file
from .tables import result_table

FROM_SCRATCH = {
    "claim": "attention residuals against the residual stream, dense and deep",
    "moe": "a small MoE",
    "ablations": "the forms of the paper's Table 4, and block sizes",
    "depth": "whether the gain grows with depth, at equal parameters",
}
WORK = Path(tempfile.gettempdir()) / "attnres-experiments"


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line. Exits with status 2 on an option that makes no sense."""
    parser = argparse.ArgumentParser(prog="python -m experiments", description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="experiment", required=True)
    for name, about in FROM_SCRATCH.items():
        sizes = [size.removeprefix(f"{name}-") for size in names(name)]
        default = "cpu" if "cpu" in sizes else sizes[0]
        command = commands.add_parser(name, help=about, description=about)
        option = command.add_argument
        option("--size", choices=sizes, default=default, help=f"which declaration; default {default}")
        option("--corpus", type=Path, help="folder with train.txt and valid.txt, until it is prepared")
        option("--prepare", action="store_true", help="only prepare the text, for a machine without it")
        option("--costs", nargs="*", choices=WAYS, help="only time a step of each connection; default both ways")
        option("--device", choices=["cpu", "cuda"], default="cpu", help="where missing runs are made")
        option("--compile", action="store_true", help="make runs with torch.compile; slow to start")
        option("--connections", nargs="+", metavar="NAME", help="some of the declared ones")
        option("--seeds", nargs="+", type=_seed, help="instead of the declared ones")
        option("--rate", type=_rate, help="learning rate of all connections, instead of a sweep for each")
        option("--tokens", type=_count, help="of a reported run, instead of the declared number")
        option("--keep", type=Path, help="folder for the models of reported runs; default: none are kept")
        _add_places(command)
    about = healing.__doc__.splitlines()[0]
    command = commands.add_parser("healing", help=about, description=about)
    option = command.add_argument
    option("--size", choices=sizes_of_healing(), default="stories", help="which declaration; default stories")
    option("--checkpoint", type=Path, required=True, help="directory of the pretrained model")
    option("--corpus", type=Path, required=True, help="directory with train.txt and valid.txt")
    option("--groups", nargs="+", metavar="GROUP", help="sweeps, or `report`; default all")
    option("--recipes", nargs="+", metavar="NAME", help="of the group `report`; default all")
    option("--seeds", nargs="+", type=_seed, default=healing.SEEDS, help="of the group `report`")
    _add_places(command)
    commands.add_parser("findings", help=findings.__doc__.splitlines()[0])
    commands.add_parser("report", help=report.__doc__.splitlines()[0])
    return parser.parse_args(arguments)


def _add_places(parser: argparse.ArgumentParser) -> None:
    text = "JSON file for runs, with tables and figure beside it; default in experiments/results"
    parser.add_argument("--results", type=_results_file, help=text)
    parser.add_argument("--work", type=Path, default=WORK, help=f"folder for checkpoints; default {WORK}")


def _rate(text: str) -> float:
    if not is_rate(rate := float(text)):
        raise argparse.ArgumentTypeError(f"must be a number above 0 such as 0.004; got {text}")
    return rate


def _count(text: str) -> int:
    if (count := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number above 0 such as 2097152; got {text}")
    return count


def _seed(text: str) -> int:
    if not is_seed(seed := int(text)):
        raise argparse.ArgumentTypeError(
            f"must be from 0 to 2**32 - 1, and not {SELECTION_SEED}, which chooses settings; got {text}"
        )
    return seed


def _results_file(text: str) -> Path:
    path = Path(os.path.realpath(text))  # what lies beside a link lies beside the file that it names
    if path.suffix != ".json":
        raise argparse.ArgumentTypeError(f"must be a .json file; got {text}")
    return path


def _select(option: str, chosen: Iterable[str] | None, declared: Iterable[str]) -> list[str]:
    declared = list(declared)
    if unknown := set(chosen or ()) - set(declared):
        values = ", ".join(map(repr, sorted(unknown)))
        raise ValueError(f"{option} must be among {', '.join(map(repr, declared))}; got {values}.")
    return list(dict.fromkeys(chosen or declared))


def _check_places(results: Path, options: argparse.Namespace) -> None:
    """Make the folders that an experiment writes to, so that one that cannot be written is found before training."""
    report.check_page(results)
    for folder in (results.parent, options.work):
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
    if (keep := getattr(options, "keep", None)) is not None:
        # Only tried: where all runs are stored already, no model is kept, and no folder is left.
        with parents(keep / "model"):
            pass


def run_from_scratch(options: argparse.Namespace) -> None:
    """Make the runs of an experiment from scratch, or prepare its text, or time its steps, as the options say.

    Raises:
        OSError: a file cannot be read or written.
        ValueError: an option does not fit the experiment, or stored runs do not.
    """
    experiment = ScratchExperiment.load(f"{options.experiment}-{options.size}")
    if options.device == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device cuda: PyTorch sees no GPU here. Leave it out to train on the CPU.")
    if options.prepare and not options.corpus:
        raise ValueError(f"--prepare needs --corpus, the folder of {experiment.text.corpus}.")
    if options.corpus and not options.corpus.is_dir():
        raise ValueError(f"--corpus must be a folder; got {options.corpus}. experiments/README.md describes it (Text).")
    if options.corpus:
        check_corpus(experiment.text, options.corpus)
    if options.corpus and (options.prepare or not prepared_file(experiment.text).exists()):
        path = prepare(experiment.text, options.corpus)
        print(f"{path}: {path.stat().st_size / 2**20:.1f} MiB")
    if options.prepare:
        return
    is_trial = bool(options.rate or options.tokens)
    path = options.results or results_file(f"{experiment.name}-trial" if is_trial else experiment.name)
    store = RunStore(experiment, path)
    if path.with_suffix(".png").exists() and not path.exists():
        raise ValueError(
            f"{path.with_suffix('.png')} exists, and the figure of these runs would replace it. Move it away."
        )
    _check_places(path, options)
    tokens, seeds = options.tokens or experiment.tokens, options.seeds or experiment.seeds
    labels = list(dict.fromkeys([BASELINE, *_select("--connections", options.connections, experiment.connections)]))
    if options.costs is not None:
        measured = DeclaredComparison(experiment, store, device=options.device)
        measure_costs(measured, labels, options.costs or WAYS)
        report.write(measured, tokens)
        return
    data = load(experiment.text, experiment.length, experiment.held_out)
    for length in (experiment.sweep_tokens, tokens):  # before the sweep, which takes hours
        data.check(experiment.steps(length) * experiment.batch_size)
    comparison = DeclaredComparison(
        experiment, store, data, options.work, options.device, options.keep, options.compile
    )
    rates = dict.fromkeys(labels, options.rate) if options.rate else comparison.choose_rates(labels)
    wanted = [(label, rates[label], tokens, seed) for seed in seeds for label in labels]
    comparison.make(wanted, partial(report.write, comparison, tokens, rates if options.rate else None))
    print(result_table(comparison.shown(tokens, rates), costs={}))
    print(_places(experiment.name, path))


def run_healing(options: argparse.Namespace) -> None:
    """Make the runs of an experiment of healing.

    Raises:
        OSError: a file cannot be read or written.
        ValueError: an option does not fit the experiment, or stored runs do not.
    """
    experiment = HealingExperiment.load(options.size)
    groups = _select("--groups", options.groups, ["report", *experiment.sweeps])
    recipes = _select("--recipes", options.recipes, experiment.report)
    seeds = list(dict.fromkeys(options.seeds))
    store = RunStore(experiment, options.results or results_file(experiment.name))
    _check_places(store.path, options)
    for option, path in (("--checkpoint", options.checkpoint / "config.json"), ("--corpus", options.corpus)):
        if not path.exists():
            raise ValueError(f"{option}: there is no {path}.")
    start, tokenizer = healing.load_start(options.checkpoint)
    if experiment.text is not None and start.config.vocab_size != experiment.text.vocab_size:
        raise ValueError(
            f"--checkpoint: {options.checkpoint} has a vocabulary of {start.config.vocab_size} tokens, and "
            f"{options.size} is declared for one of {experiment.text.vocab_size}."
        )
    data = healing.load_data(experiment, options.corpus, tokenizer)
    wanted = []
    for group in groups:
        if group == "report":
            wanted += [(name, experiment.report[name], seed) for seed in seeds for name in recipes]
        else:
            sweep = experiment.sweeps[group].items()
            wanted += [(f"{group}: {label}", recipe, SELECTION_SEED) for label, recipe in sweep]
    healing.Healing(experiment, start, data, store, options.work).make(wanted)
    report.write_healed(experiment, store, seeds)
    print(_places(experiment.name, store.path))


def _places(name: str, path: Path) -> str:
    if report.is_reported(name, path):
        return f"Runs: {path}. Tables: {report.tables_page()}."
    return f"Runs: {path}. Tables: {path.with_suffix('.md')}."


def main(arguments: list[str] | None = None) -> None:
    """Run the command.

    Raises:
        OSError: a file cannot be read or written.
        ValueError: an option, a declaration, a text or a file of runs cannot be used.
    """
    options = parse(arguments)
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    # More threads gain little for models so small, and the numbers would depend on the machine.
    torch.set_num_threads(1)
    if options.experiment in FROM_SCRATCH:
        run_from_scratch(options)
    elif options.experiment == "healing":
        run_healing(options)
    elif options.experiment == "findings":
        findings.write()
    else:
        report.write_all()
        print(f"Written from the stored runs: {report.results_page()}, {report.tables_page()} and their figures.")
