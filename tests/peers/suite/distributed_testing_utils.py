"""Stand-in for the suite's helper of this name, which its sdist lacks: runs functions as ranks, on CPU with gloo.

The tensor-parallel, expert-parallel and FSDP mixins import these names; `transformers_suite.py` places this file beside
them. Ranks fork from a server process that has imported the suite: to import it in every rank took most of the time.
"""

import os
from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing

multiprocessing.get_context("forkserver").set_forkserver_preload([f"{__package__}.test_variants"])


def _get_distributed_device_type() -> str:
    return "cpu"


def _get_distributed_backend() -> str:
    return "gloo"


def _get_rank_device(rank: int) -> torch.device:
    return torch.device("cpu")


def _set_rank_device(rank: int) -> None:
    """Nothing to choose: every rank has the one CPU."""


def _start_rank_processes(func: Callable, args: tuple, nprocs: int) -> None:
    """Run `func(rank, *args)` in `nprocs` new processes and wait; an exception of any rank is raised here."""
    multiprocessing.start_processes(func, args=args, nprocs=nprocs, start_method="forkserver")


def run_distributed(world_size: int) -> Callable[[Callable], Callable]:
    """`run_distributed(n)(func)(*args)` runs `func(rank, *args)` on n ranks that share a process group."""

    def decorate(func: Callable) -> Callable:
        def run(*args) -> None:
            # This process holds the port from here on, so that no other run can take it before the ranks connect.
            store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
            _start_rank_processes(_run_rank, (world_size, store.port, func, args), nprocs=world_size)

        return run

    return decorate


def _run_rank(rank: int, world_size: int, port: int, func: Callable, args: tuple) -> None:
    # The environment that torchrun gives, which `transformers` reads.
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world_size)}
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
    dist.init_process_group("gloo", store=dist.TCPStore("localhost", port), rank=rank, world_size=world_size)
    try:
        func(rank, *args)
    finally:
        dist.destroy_process_group()
