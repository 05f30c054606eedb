"""Run a recipe: prepare, train, report.

One process runs it by `attnres train RECIPE [key=value ...]`, and several processes by
`accelerate launch [--config_file FILE] -m attnres train RECIPE [key=value ...]`.
"""

import contextlib
import sys
import threading
from collections.abc import Generator
from datetime import timedelta
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate import PartialState
from accelerate.utils import parse_flag_from_env
from rich.console import Console
from transformers import PrinterCallback, ProgressCallback, TrainingArguments, set_seed
from transformers.distributed import DistributedConfig
from transformers.trainer_utils import get_last_checkpoint

from attnres.utils.progress import status
from attnres.utils.quiet import quiet_transformers
from attnres.utils.wording import counted

from .data.sets import prepare_data
from .display import Display
from .launch import check_launch, read_launch
from .parallel.pipeline import TrainingPipeline
from .parallel.pipeline_trainer import PipelineTrainer, describe_pipeline
from .parallel.sharding import (
    allow_tensor_parallel_on_cpus,
    check_engine,
    describe_sharding,
    make_sharding,
    shard_by_deepspeed_later,
)
from .prepare import open_processor, prepare_arguments, prepare_model, prepare_source, set_steps
from .recipe import Recipe
from .report import collect_results, describe_results, describe_run, write_run
from .resuming import check_best, check_checkpoint
from .run_folder import check_data, check_length, hold_folder, record_run
from .saving import check_disk
from .trainer import AttnResTrainer

_BEAT = 1.0  # seconds between two signs of life of the first process
TERMINATED = 128 + 15  # the exit status of a process that SIGTERM ends


def run_train(recipe: Recipe, name: str = "") -> dict[str, Any]:
    """Train by the recipe into its folder `out`. Resume from the last checkpoint there, if the run was stopped.

    Args:
        recipe: The recipe of the run.
        name: The recipe's name if it comes with `attnres`, else empty.

    Returns:
        The content of `results.json`.

    Raises:
        FileExistsError: `out` is in use, or holds a finished run of this length, a run with another recipe or other
            data, or other files.
        FloatingPointError: The loss is not finite.
        OSError, ValueError: A model, data set or value cannot be used, or a checkpoint cannot be written.
        RuntimeError: The model cannot be sharded on this machine as the settings require, or another process does not
            answer within the time limit.
        SystemExit: SIGTERM stopped the run, after it had saved a checkpoint.
    """
    launch = read_launch()
    check_launch(recipe, launch)
    # accelerate joins processes on CPUs only if `cpu` is set.
    cpu = not torch.accelerator.is_available() or parse_flag_from_env("ACCELERATE_USE_CPU")
    state = PartialState(cpu=cpu, timeout=timedelta(seconds=recipe.timeout))
    if recipe.lora is not None:
        import_module("attnres.training.lora")  # a missing `peft` shows before any work
    check_engine(state, launch)
    sharding = make_sharding(recipe.distributed)
    with quiet_transformers():
        arguments = prepare_arguments(recipe, state)
    allow_tensor_parallel_on_cpus(state, sharding)  # after `TrainingArguments`, which find the type of the run anew
    shard_by_deepspeed_later()
    with contextlib.ExitStack() as stack:
        # Only the first process holds the folder, and it does so before the others look for a checkpoint there.
        with state.main_process_first():
            if state.is_main_process:
                stack.enter_context(hold_folder(Path(recipe.out), recipe))
        return _train_in_folder(recipe, name, state, sharding, arguments)


def _train_in_folder(
    recipe: Recipe, name: str, state: PartialState, sharding: DistributedConfig | None, arguments: TrainingArguments
) -> dict[str, Any]:
    """Prepare, train and report, while the first process holds the folder of the run."""
    out = Path(recipe.out)
    checkpoint = get_last_checkpoint(str(out))
    if checkpoint is not None:
        arguments.eval_on_start = False  # the run measured this loss when it began
    set_seed(recipe.seed)

    # The first process checks the checkpoint and tokenises; the others then find its tokens in the cache.
    with quiet_transformers(), first_process_first(state, recipe.timeout):
        if checkpoint is not None and state.is_main_process:
            check_checkpoint(Path(checkpoint))
            if arguments.load_best_model_at_end:
                check_best(Path(checkpoint))
        tokenizer, config = prepare_source(recipe, name)
        processor = open_processor(recipe, tokenizer) if recipe.images else None
        data = prepare_data(recipe, tokenizer, processor)
        set_steps(arguments, recipe, recipe.count_steps(data.sequences))
        digests, resuming = data.digests, []
        if state.is_main_process:
            if (identity := recipe.source.identity()) is not None:
                digests |= {"model": identity}
            if checkpoint is not None:
                check_data(out, digests)
                resuming = [check_length(out, Path(checkpoint), arguments.max_steps)]

    with quiet_transformers():
        with status(Console(), f"Loading {recipe.model} ...") if state.is_main_process else contextlib.nullcontext():
            model = prepare_model(recipe, config, sharding, checkpoint)
        display = Display()
        # Without the tokenizer, whose special tokens `Trainer` would write over the model's: the token that ends a turn
        # of a chat model is often not the tokenizer's end-of-text token.
        options = {"train_dataset": data.train, "eval_dataset": data.held_out}
        if recipe.pipeline is not None:
            pipeline = TrainingPipeline(model, recipe.pipeline, arguments.device)
            trainer = PipelineTrainer(pipeline, recipe, arguments, **options)
            shares = describe_pipeline(pipeline)
        else:
            trainer = AttnResTrainer(model, recipe, arguments, processor=processor, **options)
            shares = describe_sharding(trainer, sharding)
        shard_by_deepspeed_later()
        trainer.remove_callback(PrinterCallback)
        trainer.remove_callback(ProgressCallback)
        trainer.add_callback(display)
        if state.is_main_process:
            check_disk(trainer, recipe, 0 if checkpoint is None else int(checkpoint.rpartition("-")[2]))
            record_run(out, recipe, digests, is_resumed=checkpoint is not None)
            described = describe_run(recipe, model, data, arguments.device, shares, trainer.total_parameters)
            print("\n".join([*described, *resuming]), flush=True)
        try:
            with contextlib.closing(display):
                trainer.train(resume_from_checkpoint=checkpoint)
        except KeyboardInterrupt:
            if state.is_main_process:
                print(_describe_interruption(out, trainer.state.global_step))
            raise
        if trainer.stopping.received:
            if state.is_main_process:
                print(f"Stopped after step {trainer.state.global_step}. The same command resumes from there.")
            sys.exit(TERMINATED)
        results = collect_results(trainer)
        write_run(trainer, tokenizer, name, results)
    if state.is_main_process:
        print(describe_results(results, out))
    return results


@contextlib.contextmanager
def first_process_first(state: PartialState, seconds: int) -> Generator[None]:
    """Run the block in the first process, and afterwards in the others, however long the first one takes.

    The first process may tokenise for hours, so that a limit of its time would be wrong. In another thread it gives a
    sign of life every second. The other processes wait for each sign no longer than the limit.

    Args:
        state: The processes of the run.
        seconds: The longest time between two signs of life.

    Raises:
        RuntimeError: The first process has given no sign of life for too long, or has ended.
    """
    if state.num_processes == 1:
        yield
        return
    # gloo, so that tensors on CPUs travel between processes with GPUs too.
    group: Any = dist.new_group(timeout=timedelta(seconds=seconds), backend="gloo")
    if not state.is_main_process:
        has_ended = torch.zeros(())
        while not has_ended:
            dist.broadcast(has_ended, src=0, group=group)
        yield
        return
    ended, failed = threading.Event(), threading.Event()
    errors: list[RuntimeError] = []

    def give_signs() -> None:
        has_ended = False
        try:
            while not has_ended and not failed.is_set():
                has_ended = ended.wait(_BEAT)
                if not failed.is_set():
                    dist.broadcast(torch.tensor(float(has_ended)), src=0, group=group)
        except RuntimeError as error:  # another process hangs or has ended
            errors.append(error)

    signs = threading.Thread(target=give_signs, daemon=True)
    signs.start()
    try:
        yield
    except BaseException:
        failed.set()  # the others must not go on; they notice that this process ends
        raise
    finally:
        ended.set()
        signs.join()
    if errors:
        raise errors[0]


def _describe_interruption(out: Path, steps: int) -> str:
    """Return the last line of a run that Ctrl-C stopped after `steps` steps."""
    stopped, checkpoint = f"Stopped after {counted(steps, 'step')}", get_last_checkpoint(str(out))
    if checkpoint is None:
        return f"{stopped}, before the first checkpoint: the same command begins anew."
    return f"{stopped}. The last checkpoint is {checkpoint}: the same command resumes from there."


__all__ = ["first_process_first", "run_train"]
