"""Start `numba`, and run its loops on as many threads as PyTorch uses.

No failure of `numba` ends a forward pass. If `numba` does not start, there is one warning, and PyTorch's operations
compute. If its threads do not start, one thread computes. In a forked process one thread computes too, because OpenMP
would wait for threads that the fork has lost.
"""

import os
import threading
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from importlib.util import find_spec

import torch

# Held while numba's threads run: a lock if their library serves only one caller at a time. `None` before they start.
_run_lock: AbstractContextManager | None = None
_start_lock = threading.Lock()
_threads_may_start = True


def _after_fork() -> None:
    global _run_lock, _start_lock, _threads_may_start
    _run_lock, _start_lock, _threads_may_start = None, threading.Lock(), False


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


@cache
def why_loops_do_not_run(trial: Callable[[torch.dtype], None], dtype: torch.dtype) -> str | None:
    """Return why the loops do not run here, or `None` if they do. Only the first call for a dtype tries them.

    Args:
        trial: `(dtype) -> None`, which compiles and runs the loops, and raises if they fail.
        dtype: dtype of the sources.
    """
    reason = _why_numba_does_not_start()
    if reason is None:
        try:
            trial(dtype)
        except Exception as error:
            reason = _warn("numba does not run here", error)
    return reason


@cache
def _why_numba_does_not_start() -> str | None:
    if find_spec("numba") is None:
        return "numba is not installed"
    try:
        import numba

        if numba.config.DISABLE_JIT:  # pyrefly: ignore[missing-attribute]  # set at run time
            return _warn("numba does not compile", ValueError("NUMBA_DISABLE_JIT is set"))
        _loops()
    except Exception as error:
        return _warn("numba does not start", error)
    return None


def _warn(problem: str, error: Exception) -> str:
    """Warn of a problem. Return the problem with the first line of its error."""
    reason = f"{problem} ({type(error).__name__}: {str(error).strip().partition(chr(10))[0]})"
    warnings.warn(f"{reason}: depth attention and SiTU are computed without it", RuntimeWarning, stacklevel=2)
    return reason


@cache
def _loops() -> tuple[dict, dict]:
    from .loops import LIKE, LOOPS  # at first use, because importing `numba` takes a while

    return LOOPS, LIKE


def run(name: str, chunks: int, arguments: int, first: float, second: float, item: int) -> None:
    """Run a loop over all chunks. The result does not depend on the number of threads.

    Args:
        name: name of the loop in `loops.LOOPS`.
        chunks: number of chunks.
        arguments: address of the arguments, see `layout`.
        first: the loop's first number: epsilon of the key norm, or `beta` of SiTU.
        second: its second number: epsilon of the norm after the read, or `linear_beta` of SiTU.
        item: bytes of a number in the rows, 4 or 2.

    Raises:
        ValueError: the arguments are not laid out as the loops were compiled for.
    """
    loops, like = _loops()
    run_in_turn, run_in_threads = loops[name]
    threads = torch.get_num_threads() if chunks > 1 else 1
    run_lock = (_run_lock or _start_threads()) if threads > 1 else None
    if run_lock is None:
        run_in_turn(chunks, arguments, first, second, like[item])
        return
    import numba

    with run_lock:
        before = numba.get_num_threads()
        # pyrefly: ignore[missing-attribute]  # set at run time
        numba.set_num_threads(min(threads, numba.config.NUMBA_NUM_THREADS))
        try:
            run_in_threads(chunks, arguments, first, second, like[item])
        finally:
            numba.set_num_threads(before)


def _start_threads() -> AbstractContextManager | None:
    """Start numba's threads, and return the lock to hold while they run, or `None` if they do not start."""
    global _run_lock, _threads_may_start
    with _start_lock:
        if _run_lock is None and _threads_may_start:
            import numba

            threads = torch.get_num_threads()
            try:
                numba.get_num_threads()  # starts them, and sets OpenMP, which PyTorch shares, to use them all
                serves_one_caller = numba.threading_layer() == "workqueue"
                _run_lock = threading.Lock() if serves_one_caller else nullcontext()
            except Exception as error:
                _threads_may_start = False
                _warn("numba's threads do not start", error)
            finally:
                torch.set_num_threads(threads)  # undoes what numba has set
        return _run_lock


__all__ = ["run", "why_loops_do_not_run"]
