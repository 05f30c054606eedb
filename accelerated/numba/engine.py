"""Start `numba`, and run its loops on as many threads as PyTorch uses.

Nothing here ends a forward pass or a process. Where `numba` does not start, `failure` says so once, and PyTorch's
operations compute. Where its threads do not start, one thread computes. So it does in a forked process, where OpenMP
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

# Lock that is held while threads run, if their library serves only one caller at a time.
_turn: AbstractContextManager | None = None
_start = threading.Lock()
_may_start = True


def _after_fork() -> None:
    global _turn, _start, _may_start
    _turn, _start, _may_start = None, threading.Lock(), False


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


@cache
def failure(trial: Callable[[torch.dtype], None], dtype: torch.dtype) -> str | None:
    """Return why the loops do not run here, or `None` if they do; found out once, by a trial.

    Args:
        trial: function that compiles and runs the loops.
        dtype: dtype of the sources, its argument.
    """
    reason = _missing()
    if reason is None:
        try:
            trial(dtype)
        except Exception as error:
            reason = _warn("numba does not run here", error)
    return reason


@cache
def _missing() -> str | None:
    if find_spec("numba") is None:
        return "numba is not installed"
    try:
        import numba

        if numba.config.DISABLE_JIT:
            return _warn("numba does not compile", ValueError("NUMBA_DISABLE_JIT is set"))
        _loops()
    except Exception as error:
        return _warn("numba does not start", error)
    return None


def _warn(what: str, error: Exception) -> str:
    reason = f"{what} ({type(error).__name__}: {str(error).strip().partition(chr(10))[0]})"
    warnings.warn(f"{reason}: depth attention does without it", RuntimeWarning, stacklevel=2)
    return reason


@cache
def _loops() -> tuple[dict, dict]:
    from .loops import LIKE, LOOPS  # importing `numba` takes a while: at first use

    return LOOPS, LIKE


def run(name: str, chunks: int, arguments: int, eps: float, norm_eps: float, item: int) -> None:
    """Run a loop over all chunks. The result does not depend on the number of threads.

    Args:
        name: name of the loop in `loops.LOOPS`.
        chunks: number of chunks.
        arguments: address of the arguments, see `layout`.
        eps: epsilon of the key norm.
        norm_eps: epsilon of the norm after the read.
        item: bytes of a source's number.

    Raises:
        ValueError: the arguments are not laid out as the loops were compiled for.
    """
    loops, like = _loops()
    of_chunk, of_chunks = loops[name]
    threads = torch.get_num_threads() if chunks > 1 else 1
    turn = (_turn or _start_threads()) if threads > 1 else None
    if turn is None:
        for chunk in range(chunks):
            of_chunk(chunk, chunks, arguments, eps, norm_eps, like[item])
        return
    import numba

    with turn:
        before = numba.get_num_threads()
        numba.set_num_threads(min(threads, numba.config.NUMBA_NUM_THREADS))
        try:
            of_chunks(chunks, arguments, eps, norm_eps, like[item])
        finally:
            numba.set_num_threads(before)


def _start_threads() -> AbstractContextManager | None:
    """Start the threads, and return the lock to hold while they run; `None` where they do not start."""
    global _turn, _may_start
    with _start:
        if _turn is None and _may_start:
            import numba

            threads = torch.get_num_threads()
            try:
                numba.get_num_threads()  # starts them, and tells OpenMP, which PyTorch shares, to use them all
                is_for_one = numba.threading_layer() == "workqueue"
                _turn = threading.Lock() if is_for_one else nullcontext()
            except Exception as error:
                _may_start = False
                _warn("numba's threads do not start", error)
            finally:
                torch.set_num_threads(threads)
        return _turn


__all__ = ["failure", "run"]
