"""Pre-training, healing and fine-tuning by a recipe, in one process or under `accelerate launch`.

attnres train RECIPE [key=value ...]
accelerate launch [--config_file FILE] -m attnres train RECIPE [key=value ...]
"""

import contextlib
import json
import math
import shutil
import sys
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from accelerate import PartialState
from accelerate.utils import parse_flag_from_env
from datasets import Dataset, IterableDataset
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PrinterCallback,
    ProgressCallback,
    TrainingArguments,
    set_seed,
)
from transformers.distributed import DistributedConfig
from transformers.integrations import get_reporting_integration_callbacks
from transformers.trainer_utils import get_last_checkpoint

import attnres
from attnres import ResidualConfig
from attnres.analysis.loss_figures import plot_loss_curves
from attnres.configuration import load, names
from attnres.conversion import retrofit
from attnres.conversion.family import retrofit_config
from attnres.conversion.whole import check_source_sizes, load_whole
from attnres.utils.disks import why_not_written
from attnres.utils.files import atomic_write
from attnres.utils.hub import meant
from attnres.utils.processes import is_lost_connection
from attnres.utils.quiet import quiet_transformers
from attnres.utils.wording import counted, install_command

from .card import write_training_card
from .chat import encode_chat
from .checkpoints import check_checkpoint
from .data import DataSpec, digest_of, load_blocks
from .display import Display
from .documents import file_identities
from .header import describe_run
from .loading import check_division, check_engines, check_fsdp2, describe_division, load_divided, read_division
from .place import RESULTS, check_data, held
from .recipe import Recipe
from .text import open_tokenizer
from .trainer import AttnResTrainer

MODEL, ADAPTER, CURVE = "model", "adapter", "loss.png"
HEAL = "heal"
HELD_OUT = 64  # sequences, where the data is large
SHORTEST_CURVE = 10  # points, where `epochs` makes the run shorter
START = ".start"


def run_train(recipe: Recipe, name: str = "") -> dict[str, Any]:
    """Train by the recipe into its folder `out`. Resume from the last checkpoint there, if the run was stopped.

    Args:
        recipe: Everything that decides the run.
        name: The recipe's name, where it is one of those that come with `attnres`.

    Returns:
        What is written to `results.json`.

    Raises:
        FileExistsError: `out` holds something else, the run of another recipe or on other data, or is in use.
        FloatingPointError: The loss is not finite.
        OSError, ValueError: A model, data set or value cannot be used, or a checkpoint cannot be written.
        RuntimeError: A division of the model was asked for, and is not made here.
        SystemExit: The run was terminated; its checkpoint is written.
    """
    # Without being told, accelerate does not join processes on CPUs.
    cpu = not torch.accelerator.is_available() or parse_flag_from_env("ACCELERATE_USE_CPU")
    state, out = PartialState(cpu=cpu), Path(recipe.out)
    if recipe.lora is not None:
        _lora()
    check_engines(state)
    division = read_division(recipe.distributed, state.num_processes)
    with quiet_transformers():
        arguments = _arguments(recipe, state, division)
    with contextlib.ExitStack() as place:
        with state.main_process_first():
            if state.is_main_process:
                place.enter_context(held(out, recipe))
        return _train(recipe, name, state, division, arguments)


def _train(
    recipe: Recipe, name: str, state: PartialState, division: DistributedConfig | None, arguments: TrainingArguments
) -> dict[str, Any]:
    """Train in the folder of the run, which is held."""
    out = Path(recipe.out)
    last = get_last_checkpoint(str(out))
    if last is not None:
        check_checkpoint(Path(last))
        arguments.eval_on_start = False
    set_seed(recipe.seed)
    with quiet_transformers(), state.main_process_first():
        if recipe.model not in names():
            check_source_sizes(recipe.model)
        tokenizer = _tokenizer(recipe)
        _check_config(recipe, name, tokenizer)
        train, held_out, digests = _data(recipe, tokenizer)
        if state.is_main_process:
            check_data(out, digests | _model_identity(recipe), is_resumed=last is not None)
    _set_length(arguments, recipe, train)
    with quiet_transformers():
        model = _model(recipe, tokenizer) if division is None else _divided(recipe, tokenizer, division, last)
        display = Display()
        trainer = AttnResTrainer(
            model, recipe, arguments, train_dataset=train, eval_dataset=held_out, processing_class=tokenizer
        )
        check_division(trainer, division)
        trainer.remove_callback(PrinterCallback)
        trainer.remove_callback(ProgressCallback)
        trainer.add_callback(display)
        if state.is_main_process:
            work = describe_division(trainer, division)
            print("\n".join(describe_run(recipe, model, train, held_out, arguments.device, work)), flush=True)
            if last:
                print(f"Going on from {last}.", flush=True)
        try:
            with contextlib.closing(display):
                trainer.train(resume_from_checkpoint=last)
        except KeyboardInterrupt:
            if state.is_main_process:
                print(_what_is_saved(out, trainer.state.global_step))
            raise
        if trainer.stopping.received:
            if state.is_main_process:
                print(f"Stopped after step {trainer.state.global_step}. The same command goes on from there.")
            sys.exit(143)
        results = _results(trainer, recipe)
        try:
            _write(trainer, tokenizer, recipe, name, results)
        except (OSError, RuntimeError, SafetensorError) as error:
            if is_lost_connection(error):
                raise  # another process has failed, and says why
            raise OSError(
                f"what the run has made could not be written to {out}: {why_not_written(error)}. Its checkpoints are "
                "there: the same command goes on from the last one."
            ) from error
    if state.is_main_process:
        before = next((f" (before training {loss:.4f})" for step, loss in results["held_out_losses"] if step == 0), "")
        print(
            f"Held-out loss {results['held_out_loss']:.4f}{before}, perplexity {results['perplexity']:.2f}. "
            f"Written to {out}."
        )
    return results


def _what_is_saved(out: Path, steps: int) -> str:
    """What to say of a run that Ctrl-C stopped."""
    last = get_last_checkpoint(str(out))
    if last is None:
        return f"Stopped after {counted(steps, 'step')}, before the first checkpoint: the same command begins anew."
    return f"Stopped after {counted(steps, 'step')}. Saved is {last}: the same command goes on from there."


def _tokenizer(recipe: Recipe) -> PreTrainedTokenizerBase:
    if recipe.tokenizer is None and recipe.model in names():
        raise ValueError(f"{recipe.model} starts from scratch: the recipe needs a `tokenizer`, a directory or Hub id.")
    source = recipe.tokenizer or recipe.model
    with _named("tokenizer" if recipe.tokenizer else "model", source):
        return open_tokenizer(source, "" if recipe.tokenizer else "name one by tokenizer=DIR")


@contextlib.contextmanager
def _named(what: str, source: str) -> Iterator[None]:
    """Raises FileNotFoundError, which names the source, where `transformers` does not find or cannot read it."""
    try:
        yield
    except OSError as error:
        reason = " ".join(str(error).split()).rstrip(".")
        named = f"no directory, nor a named configuration ({', '.join(names())})" if what == "model" else "no directory"
        raise FileNotFoundError(
            f"the {what} {source} cannot be read; it is {named}, and as a name on the Hub it fails: {reason}."
            f"{meant(source, names() if what == 'model' else ())}"
            if not Path(source).is_dir()
            else f"the {what} in {source} cannot be read: {reason}."
        ) from error


def _data(
    recipe: Recipe, tokenizer: PreTrainedTokenizerBase
) -> tuple[Dataset | IterableDataset, Dataset, dict[str, str]]:
    """Return the blocks to train on, those held out, and a digest of each data set by its key in the recipe."""
    spec = DataSpec(tuple(recipe.train), recipe.split, recipe.column, recipe.streaming, recipe.bad_rows)
    encode = encode_chat(tokenizer, recipe.column) if recipe.chat else None
    load = partial(load_blocks, encode=encode, separate=recipe.separate_documents)
    train = load(spec, tokenizer, recipe.length, seed=recipe.seed)
    # The tokens of a stream are not known before it is read.
    digests = {"train": repr(file_identities(spec)) if recipe.streaming else digest_of(train)}
    if recipe.held_out:
        split = recipe.held_out_split or recipe.split
        spec = replace(spec, paths=tuple(recipe.held_out), split=split, streaming=False)
        held_out = load(spec, tokenizer, recipe.length, seed=None)
        return train, held_out, digests | {"held_out": digest_of(held_out)}
    if recipe.streaming:
        raise ValueError("A stream has no end to take `held_out_sequences` from: give `held_out`.")
    # Of small data a tenth, so that most of it is left to train on.
    count = recipe.held_out_sequences or min(HELD_OUT, max(1, len(train) // 10))
    size = len(train) - count
    if size <= 0:
        raise ValueError(
            f"`held_out_sequences` of the recipe is {count}, but the data has only "
            f"{counted(len(train), 'sequence')} of {recipe.length} tokens: hold out fewer, name other data by "
            "`held_out`, or give more data, or a smaller `length`."
        )
    if size < recipe.batch_size:
        raise ValueError(
            f"the data has {len(train)} sequences of {recipe.length} tokens, {count} of them held "
            f"out: less than one batch of {recipe.batch_size}. Give more data, or smaller `length` or `batch_size`."
        )
    return train.select(range(size)), train.select(range(size, len(train))), digests


def _set_length(arguments: TrainingArguments, recipe: Recipe, train: Dataset | IterableDataset) -> None:
    """Set the number of steps, which `epochs` may limit now that the data is known."""
    arguments.max_steps = recipe.count_steps(None if recipe.streaming else len(train))
    if arguments.max_steps != recipe.most_steps:
        # The recipe's interval is meant for its own length: without this the curve of a small run has one point.
        arguments.logging_steps = min(recipe.log_every, max(1, arguments.max_steps // SHORTEST_CURVE))


def _check_config(recipe: Recipe, name: str, tokenizer: PreTrainedTokenizerBase) -> None:
    """Raise ValueError, before anything is tokenised, if the recipe of this name asks for a model that cannot be."""
    try:
        if recipe.model in names():
            _named_config(recipe, tokenizer)
            return
        with _named("model", recipe.model):
            config = AutoConfig.from_pretrained(recipe.model, trust_remote_code=False, **recipe.config)
    except (StrictDataclassError, TypeError, ValueError) as error:
        raise ValueError(f"`config` of the recipe does not fit {recipe.model}: {error}") from error
    if recipe.retrofit is not None:
        try:
            retrofit_config(config, **recipe.retrofit)
        except (TypeError, ValueError) as error:
            raise ValueError(f"`retrofit` of the recipe is {recipe.retrofit}: {error}") from error
    elif name == HEAL and not _is_retrofitted(config):
        raise ValueError(
            f"{recipe.model} has standard residual connections, so there is nothing to heal. Put attention residuals "
            f"in first, by `attnres convert {recipe.model} DIR`, and give model=DIR; or add 'retrofit={{}}' to this "
            "command. To train it as it is, use the recipe `finetune`."
        )


def _is_retrofitted(config: PreTrainedConfig) -> bool:
    config = config.get_text_config()
    if not isinstance(config, ResidualConfig):
        return False
    # A gate may be all that a conversion has added.
    return config.residual_connection != "standard" or config.attention_gate is not None


def _model_identity(recipe: Recipe) -> dict[str, str]:
    """Return name, size and time of change of the files of a local model, by the recipe's key for it.

    A checkpoint of an adapter does not hold its base, nor any checkpoint the configuration that the model began with.
    """
    folder = Path(recipe.model)
    if recipe.model in names() or not folder.is_dir():
        return {}
    paths = sorted(path for path in folder.iterdir() if path.suffix in (".json", ".safetensors", ".bin"))
    return {"model": repr([(path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in paths])}


def _named_config(recipe: Recipe, tokenizer: PreTrainedTokenizerBase) -> PreTrainedConfig:
    if recipe.lora is not None:
        raise ValueError(f"{recipe.model} starts from scratch: an adapter would have no base. Leave out `lora`.")
    special = {name: getattr(tokenizer, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    return load(recipe.model, **{"vocab_size": len(tokenizer), **special, **recipe.config})


def _model(recipe: Recipe, tokenizer: PreTrainedTokenizerBase) -> PreTrainedModel:
    if recipe.model in names():
        model = AutoModelForCausalLM.from_config(_named_config(recipe, tokenizer))
    else:
        # An adapter names its base by this path.
        source = str(Path(recipe.model).absolute()) if Path(recipe.model).is_dir() else recipe.model
        try:
            options = {"starts_anew": True, "trust_remote_code": False}
            model = load_whole(AutoModelForCausalLM, source, **options, **recipe.config)
        except TypeError as error:  # of the model's constructor, which gets what is no field of the configuration
            raise ValueError(f"`config` of the recipe does not fit {recipe.model}: {error}") from error
        vars(model.config).pop("auto_map", None)
    if recipe.retrofit is not None:
        model = retrofit(model, **recipe.retrofit)
    if recipe.lora is not None:
        model = _lora().add_adapters(model, **recipe.lora)
    check_fsdp2(model)
    return model


def _lora() -> ModuleType:
    try:
        from . import lora
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] != "peft":
            raise
        raise ModuleNotFoundError(f"`lora` of a recipe needs the package peft: {install_command('train')}") from error
    return lora


def _divided(
    recipe: Recipe, tokenizer: PreTrainedTokenizerBase, division: DistributedConfig, last: str | None
) -> PreTrainedModel:
    """The model of the recipe, or of the `last` checkpoint, divided among the processes."""
    start, build = Path(recipe.out) / START, partial(_model, recipe, tokenizer)
    if last is not None:
        return load_divided(last, division, start, build)
    in_memory = recipe.model in names() or recipe.retrofit is not None
    return load_divided(None if in_memory else recipe.model, division, start, build, **recipe.config)


def _arguments(recipe: Recipe, state: PartialState, division: DistributedConfig | None) -> TrainingArguments:
    # The processes of a tensor-parallel group share their batches.
    readers = state.num_processes // (division.tp_size if division is not None else 1)
    micro = min(recipe.micro_batch_size, max(1, recipe.batch_size // readers))
    accumulated, rest = divmod(recipe.batch_size, micro * readers)
    if rest:
        raise ValueError(
            f"`batch_size` {recipe.batch_size} is not a multiple of `micro_batch_size` {micro} times "
            f"{readers} processes."
        )
    own = {
        "output_dir": recipe.out,
        "max_steps": recipe.most_steps or 1,  # see `_set_length`
        "per_device_train_batch_size": micro,
        "per_device_eval_batch_size": micro,
        "gradient_accumulation_steps": accumulated,
        "max_grad_norm": recipe.max_grad_norm,
        "logging_steps": recipe.log_every,
        "logging_nan_inf_filter": False,
        "save_steps": recipe.save_every,
        "save_total_limit": recipe.keep,
        "seed": recipe.seed,
        "remove_unused_columns": False,
        "label_names": ["labels"],
        "use_cpu": state.device.type == "cpu",
    }
    defaults = {
        "eval_strategy": "steps",
        "eval_steps": recipe.save_every,
        "eval_on_start": True,
        "report_to": "none",
        "dataloader_pin_memory": torch.cuda.is_available(),
    }
    try:
        made = TrainingArguments(**defaults | recipe.trainer, **own)
        for callback in get_reporting_integration_callbacks(made.report_to):
            callback()  # says what it lacks
    except (ImportError, RuntimeError, TypeError, ValueError) as error:
        raise ValueError(f"`trainer` of the recipe: {error}") from error
    return made


def _results(trainer: AttnResTrainer, recipe: Recipe) -> dict[str, Any]:
    history = trainer.state.log_history
    if not any(entry.get("step") == trainer.state.global_step for entry in history if "eval_loss" in entry):
        trainer.evaluate()
    loss = next(entry["eval_loss"] for entry in reversed(history) if "eval_loss" in entry)
    return {
        "held_out_loss": loss,
        "perplexity": math.exp(min(loss, 700.0)),
        "steps": trainer.state.global_step,
        "tokens": trainer.state.global_step * recipe.batch_size * recipe.length,
        "training_loss": [[entry["step"], entry["loss"]] for entry in history if "loss" in entry],
        "held_out_losses": [[entry["step"], entry["eval_loss"]] for entry in history if "eval_loss" in entry],
        "software": {"attnres": attnres.__version__, "torch": torch.__version__},
    }


def _write(
    trainer: AttnResTrainer, tokenizer: PreTrainedTokenizerBase, recipe: Recipe, name: str, results: dict[str, Any]
) -> None:
    """The model, or the adapter; the loss curve; last the results, which say that the run is finished."""
    out, main = Path(recipe.out), trainer.is_world_process_zero()
    kind = ADAPTER if recipe.lora is not None else MODEL
    stage = out / f".{kind}.partial"
    if main:
        shutil.rmtree(stage, ignore_errors=True)
    trainer.accelerator.wait_for_everyone()
    trainer.save_model(str(stage))
    trainer.accelerator.wait_for_everyone()
    if main:
        (stage / "training_args.bin").unlink(missing_ok=True)
        tokenizer.save_pretrained(stage)
        write_card = partial(
            write_training_card, recipe=recipe, name=name, results=results, processes=trainer.args.world_size
        )
        if kind == MODEL:
            write_card(stage, trainer.accelerator.unwrap_model(trainer.model))
        shutil.rmtree(out / kind, ignore_errors=True)
        stage.rename(out / kind)
        if recipe.lora is not None and recipe.merge:
            merged = trainer.model.merge_and_unload()
            merged.save_pretrained(out / MODEL)
            tokenizer.save_pretrained(out / MODEL)
            write_card(out / MODEL, merged)
        curves = {"training": results["training_loss"], "held out": results["held_out_losses"]}
        plot_loss_curves({label: points for label, points in curves.items() if points}, out / CURVE)
        atomic_write(out / RESULTS, json.dumps(results, indent=2) + "\n")
    trainer.accelerator.wait_for_everyone()
