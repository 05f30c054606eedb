"""Limit the time that processes of a run wait for each other, and say in one line when the limit is reached."""

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist
from accelerate import PartialState
from torch.distributed.checkpoint.api import CheckpointException

from attnres.utils.errors import is_timeout

from .parallel.pipeline_settings import PipelineSettings
from .recipe import Recipe

_BEAT = 1.0  # seconds between two signs of life of the first process


@contextmanager
def explained_timeouts(recipe: Recipe) -> Iterator[None]:
    """Turn the error of a transfer or a collective that takes too long inside the block into one that says so.

    Args:
        recipe: The recipe of the run.

    Raises:
        RuntimeError: A transfer or a collective has not ended within the time limit.
    """
    try:
        yield
    except (RuntimeError, CheckpointException) as error:
        if not is_timeout(error):
            raise
        settings, rank = recipe.pipeline, int(os.environ.get("RANK", "0"))
        if settings is None:
            remedy = "`trainer.ddp_timeout` of the recipe"
        else:
            neighbours = _neighbours(settings, rank)
            remedy = f"Its neighbours in the pipeline: {neighbours}. `pipeline.timeout` of the recipe"
        raise RuntimeError(
            f"process {rank} has waited {recipe.timeout} seconds for the other processes: one of them hangs, or a "
            f"step takes longer. {remedy} sets the limit."
        ) from error


def _neighbours(settings: PipelineSettings, rank: int) -> str:
    """Return the ranks of the processes before and after a process in its pipeline, in words."""
    replica, stage = divmod(rank, settings.stages)
    steps = (-1, 1) if settings.stages > 2 else (1,)
    return " and ".join(str(replica * settings.stages + (stage + step) % settings.stages) for step in steps)


@contextmanager
def first_process_first(state: PartialState, seconds: int) -> Iterator[None]:
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
    group = dist.new_group(timeout=timedelta(seconds=seconds), backend="gloo")
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


__all__ = ["explained_timeouts", "first_process_first"]
