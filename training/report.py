"""Describe a run before it begins. At its end collect the results, save the model, and describe the run on its card.

`results.json` is written last: a folder that has this file holds a finished run.
"""

import contextlib
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from huggingface_hub import hf_hub_download, snapshot_download
from safetensors import SafetensorError
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

import attnres
from attnres import AttnResKimiK3Config, ResidualConfig
from attnres.analysis.loss_figures import plot_loss_curves
from attnres.checkpoints.checkpoint import Checkpoint
from attnres.checkpoints.kimi_k3 import describe_left_out
from attnres.checkpoints.side_files import save_tokenizer
from attnres.checkpoints.source import ModelSource
from attnres.configuration.counting import count_stored
from attnres.family import describe_connection
from attnres.publishing.cards import CARD, CardSubject, write_card
from attnres.publishing.markdown import code, link, link_model
from attnres.utils.errors import is_lost_connection, is_timeout, why_not_written
from attnres.utils.files import atomic_directory, atomic_write
from attnres.utils.hub import is_hub_id
from attnres.utils.model_files import WRITTEN_ADAPTER, WRITTEN_MODEL, Written
from attnres.utils.wording import counted

from .data.sets import RunData
from .recipe import Recipe
from .run_folder import ADAPTER, MODEL, RESULTS
from .trainer import AttnResTrainer

CURVE = "loss.png"
MANY_EPOCHS = 10  # a run that reads its data more often gets a note
LARGEST_EXPONENT = 700.0  # `exp` of a larger loss would exceed the range of floats


def describe_run(
    recipe: Recipe,
    model: PreTrainedModel,
    data: RunData,
    device: torch.device,
    shares: str = "1 process",
    parameters: int | None = None,
) -> list[str]:
    """Describe a run before it begins: model, data, steps and processes, and notes on possible mistakes.

    Args:
        recipe: The recipe of the run.
        model: The model that is trained.
        data: The data of the run.
        device: The device of the first process.
        shares: How many processes train, and how they share the model, in words.
        parameters: The number of parameters of the whole model if `model` is a part of it.

    Returns:
        The lines. Notes come last and begin with `Note:`.
    """
    config = model.config.get_text_config()
    # The total is that of model cards, with the biases of routers, which are buffers. A rule trains them.
    total = count_stored(model) if parameters is None else parameters
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    trained = f"{trained:,}" if parameters is None else "adapters"  # those of this process, in a part of the model
    is_whole = all(parameter.requires_grad for parameter in model.parameters())
    kind = describe_connection(config) if isinstance(config, ResidualConfig) else "standard residual connections"
    if getattr(config, "packed_experts", False):
        kind += f", experts packed as {config.packing.title}"
    start = "from scratch" if recipe.source.is_named else "with its weights"
    sequences = f"sequences of {recipe.length:,} tokens"
    count = data.sequences
    steps = recipe.count_steps(count)
    if count is not None:
        train = f"{count:,} {sequences}"
        epochs = f", {steps * recipe.batch_size / count:.2g} epochs"
    else:
        train, epochs = f"a stream of {sequences}", ""
    documents = f"{data.train.info.description}: " if data.train.info.description else ""
    tokens = steps * recipe.batch_size * recipe.length
    return [
        f"Model: {recipe.model} ({config.model_type}), {start}, {kind}",
        f"Parameters: {total:,}, of which {'all' if is_whole else trained} are trained, on {device}",
        shares,
        f"Data: {documents}{train} to train on, {len(data.held_out):,} held out",
        f"Run: {counted(steps, 'step')} of {counted(recipe.batch_size, 'sequence')}, "
        f"{tokens:,} tokens{epochs}; into {recipe.out}",
        *(f"Note: {note}" for note in _notes(recipe, model, steps, count)),
    ]


def _notes(recipe: Recipe, model: PreTrainedModel, steps: int, sequences: int | None) -> Iterator[str]:
    """Yield notes on a run that is shorter than asked for, repeats its data often, or exceeds the model's context."""
    if sequences is not None:
        epochs, asked = (count * recipe.batch_size / sequences for count in (steps, recipe.most_steps or steps))
        if asked > epochs:
            yield (
                f"{recipe.most_steps:,} steps would read this data {asked:,.{0 if asked >= 10 else 2}f} times: the run "
                f"ends after epochs={recipe.epochs:g}. Give more data for a longer run; steps=N sets another length."
            )
        elif epochs > MANY_EPOCHS:
            fewer = max(1, MANY_EPOCHS * sequences // recipe.batch_size)
            yield (
                f"the run reads its data {epochs:.0f} times, which a model learns by heart: give more data, or at most "
                f"steps={fewer} for {MANY_EPOCHS} epochs."
            )
    positions = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if positions is not None and recipe.length > positions:
        yield (
            f"length={recipe.length} is beyond the {positions:,} positions that the model is made for: give at most "
            f"length={positions}."
        )


def collect_results(trainer: AttnResTrainer) -> dict[str, Any]:
    """Collect the numbers of a run from its log. Measure the held-out loss if the log has none for the last step.

    Args:
        trainer: The trainer, whose training has ended.

    Returns:
        The content of `results.json`; losses in nats/token, curves as pairs of step and loss. `held_out_loss` is that
        of the saved model: the last one or, with `best_step`, the one of that step.
    """
    history, step = trainer.state.log_history, trainer.best_step or trainer.state.global_step
    if not any(entry.get("step") == step for entry in history if "eval_loss" in entry):
        trainer.evaluate()
    loss = next(entry["eval_loss"] for entry in reversed(history) if "eval_loss" in entry and entry["step"] == step)
    return {
        "held_out_loss": loss,
        "perplexity": math.exp(min(loss, LARGEST_EXPONENT)),
        "steps": trainer.state.global_step,
        **({} if trainer.best_step is None else {"best_step": trainer.best_step}),
        "tokens": trainer.state.global_step * trainer.recipe.batch_size * trainer.recipe.length,
        "training_loss": [[entry["step"], entry["loss"]] for entry in history if "loss" in entry],
        "held_out_losses": [[entry["step"], entry["eval_loss"]] for entry in history if "eval_loss" in entry],
        "software": {"attnres": attnres.__version__, "torch": torch.__version__},
        **trainer.results(),
    }


def describe_results(results: Mapping[str, Any], out: Path) -> str:
    """Return the last line of a finished run.

    Args:
        results: The results of [`collect_results`].
        out: The folder of the run.
    """
    at_start = _loss_at_start(results)
    before = "" if at_start is None else f" (before training {at_start:.4f})"
    best = f" of step {results['best_step']}, the best:" if "best_step" in results else ""
    return (
        f"Held-out loss{best} {results['held_out_loss']:.4f}{before}, perplexity {results['perplexity']:.2f}. "
        f"Written to {out}."
    )


def _loss_at_start(results: Mapping[str, Any]) -> float | None:
    """Return the held-out loss before the first step; `None` if the log has none."""
    return next((loss for step, loss in results["held_out_losses"] if step == 0), None)


def write_run(trainer: AttnResTrainer, tokenizer: PreTrainedTokenizerBase, name: str, results: dict[str, Any]) -> None:
    """Write the model or adapter, the loss curve and the results into the folder of the run.

    All processes call it together; the first one writes.

    Args:
        trainer: The trainer, whose training has ended.
        tokenizer: The tokenizer of the run.
        name: The recipe's name if it comes with `attnres`, else empty.
        results: The results of [`collect_results`].

    Raises:
        OSError: The files cannot be written. The checkpoints of the run stay.
    """
    try:
        _write_files(trainer, tokenizer, name, results)
    except (OSError, RuntimeError, SafetensorError) as error:
        if is_lost_connection(error) or is_timeout(error):
            raise  # another process has failed, and reports why; or it hangs
        raise OSError(
            f"the results of the run could not be written to {Path(trainer.recipe.out)}: {why_not_written(error)}. Its "
            "checkpoints are there: the same command resumes from the last one."
        ) from error


def _write_files(
    trainer: AttnResTrainer, tokenizer: PreTrainedTokenizerBase, name: str, results: dict[str, Any]
) -> None:
    """Write the files of [`write_run`], which explains the errors."""
    recipe, is_main = trainer.recipe, trainer.is_world_process_zero()
    out = Path(recipe.out)
    kind, written = (MODEL, WRITTEN_MODEL) if recipe.lora is None else (ADAPTER, WRITTEN_ADAPTER)
    _write_model(trainer, tokenizer, kind, written, name, results)
    if recipe.merge:
        trainer.merge_adapter()
        _write_model(trainer, tokenizer, MODEL, WRITTEN_MODEL, name, results)
    if is_main:
        curves = {"training": results["training_loss"], "held out": results["held_out_losses"]}
        plot_loss_curves({label: points for label, points in curves.items() if points}, out / CURVE)
        atomic_write(out / RESULTS, json.dumps(results, indent=2) + "\n")
    trainer.accelerator.wait_for_everyone()


def _write_model(
    trainer: AttnResTrainer,
    tokenizer: PreTrainedTokenizerBase,
    kind: str,
    written: Written,
    name: str,
    results: Mapping[str, Any],
) -> None:
    """Write the model or adapter into its folder, with the tokenizer and, for a model, the card."""
    out, is_main = Path(trainer.recipe.out), trainer.is_world_process_zero()
    with contextlib.ExitStack() as stack:
        partial_dir = out / f".{kind}.partial"  # the temporary directory that `atomic_directory` makes
        if is_main:
            # A run that was killed before it wrote `results.json` may have left a model, which this one replaces.
            stack.enter_context(atomic_directory(out / kind, written, overwrite=True))
        trainer.accelerator.wait_for_everyone()
        trainer.save_model(str(partial_dir))  # all processes: a sharded model is gathered from them
        trainer.accelerator.wait_for_everyone()
        if is_main:
            (partial_dir / "training_args.bin").unlink(missing_ok=True)
            save_tokenizer(tokenizer, partial_dir)
            if kind == MODEL and trainer.processor is not None:
                trainer.processor.save_pretrained(partial_dir)
            if kind == MODEL:
                model = trainer.accelerator.unwrap_model(trainer.model)
                _write_card(partial_dir, model, trainer, name, results)


def _write_card(folder: Path, model: nn.Module, trainer: AttnResTrainer, name: str, results: Mapping[str, Any]) -> None:
    """Write the card of the trained model that lies in `folder`, if the model is of this family."""
    recipe = trainer.recipe
    config = model.config
    if not isinstance(config, ResidualConfig):
        return
    hub_id = recipe.source.hub_id
    commit = getattr(config, "_commit_hash", None)
    source = Path(recipe.model) if recipe.source.is_folder else None
    if hub_id is not None:
        source = _card_on_hub(hub_id, commit)
    base = link_model(hub_id, recipe.model, commit)
    if recipe.source.is_named:
        step = f"**Trained from scratch**, the configuration {base}"
    elif recipe.retrofit is not None:
        step = f"**Retrofit** of {base}, {describe_connection(config)}, then **trained**"
    else:
        step = f"**Trained**, from {base},"
    data, training = _describe_data(recipe.train), _describe_training(recipe, results, trainer.args.world_size)
    step += f" by `attnres train{f' {name}' if name else ''}`{data}: {training}"
    if left_out := _describe_left_out(config, recipe.source, commit):
        step += f" {left_out}"
    run = Path(recipe.out).absolute().name
    subject = CardSubject(
        config,
        folder,
        f"{run}/model",
        title=run,
        parameters=trainer.total_parameters or count_stored(model),
        datasets=_hub_ids(recipe.train),
    )
    write_card(subject, step, source, hub_id)


def _describe_left_out(config: ResidualConfig, source: ModelSource, commit: str | None) -> str | None:
    """Return a sentence on the parts of a released Kimi K3 that a run from it left out; `None` if there are none."""
    if not isinstance(config, AttnResKimiK3Config) or source.is_named:
        return None
    try:
        folder = (
            Path(source.name)
            if source.is_folder
            else Path(snapshot_download(source.name, revision=commit, local_files_only=True))
        )
        return describe_left_out(Checkpoint(folder), config)
    except (OSError, ValueError):  # it was changed or removed since the run began
        return None


def _describe_training(recipe: Recipe, results: Mapping[str, Any], processes: int) -> str:
    """Return the length of the run, its optimizer, its held-out loss and the software, in two sentences."""
    at_start = _loss_at_start(results)
    before = "" if at_start is None else f", {at_start:.4f} before"
    adapters = ", low-rank adapters merged into the weights" if recipe.lora is not None else ""
    tokens, steps = counted(results["tokens"], "token"), counted(results["steps"], "step")
    batch = f"{counted(recipe.batch_size, 'sequence')} of {counted(recipe.length, 'token')}"
    workers = "1 process" if processes == 1 else f"{processes} processes"
    if "best_step" in results:
        workers += f". The weights are those of step {results['best_step']}, which had the lowest held-out loss"
    return (
        f"{tokens} in {steps} of {batch}, {recipe.optimizer} at a rate of {recipe.learning_rate:g}, {recipe.schedule}, "
        f"seed {recipe.seed}{adapters}, on {workers}. Held-out loss {results['held_out_loss']:.4f} nats/token{before}. "
        f"attnres {attnres.__version__}, transformers {transformers.__version__}, torch {torch.__version__}."
    )


def _describe_data(train: Sequence[str]) -> str:
    """Return the training data as links to the Hub, or as the names of files."""
    hub_ids = _hub_ids(train)
    shown = [link(name, "datasets/") if name in hub_ids else code(Path(name).name) for name in train]
    return f" on {', '.join(shown)}" if shown else ""


def _hub_ids(train: Sequence[str]) -> list[str]:
    return [path for path in train if path.count("/") == 1 and not Path(path).exists() and is_hub_id(path)]


def _card_on_hub(hub_id: str, commit: str | None) -> Path | None:
    """Return the folder with the card of a model on the Hub; `None` if there is no card, or the Hub is out of reach."""
    try:
        return Path(hf_hub_download(hub_id, CARD, revision=commit)).parent
    except (OSError, ValueError):
        return None


__all__ = ["collect_results", "describe_results", "describe_run", "write_run"]
