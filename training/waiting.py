"""Let the processes of a run wait for the first one, no longer than a time limit."""

import threading
from collections.abc import Generator
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist
from accelerate import PartialState

_BEAT = 1.0  # seconds between two signs of life of the first process


@contextmanager
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


__all__ = ["first_process_first"]
