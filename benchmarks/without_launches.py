"""Run code for a GPU on a machine without one: everything that the host does for a Triton kernel, except its launch.

Triton's driver is replaced by one that describes a GPU, and compiled kernels by ones that do nothing when they are
launched. Tensors lie in memory, and their numbers are never written. All other code of Triton and of its callers runs
as on a GPU: checks, allocations, autograd, and the binding of arguments.
"""

from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from unittest.mock import patch

import torch
from triton.backends.compiler import GPUTarget
from triton.compiler import CompiledKernel
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from attnres.accelerated.triton import direct, implementation

HOPPER = GPUTarget("cuda", 90, 32)


class Driver:
    """A driver of one GPU, whose kernels take no time."""

    def get_current_target(self) -> GPUTarget:
        """Return the kind of the GPU."""
        return HOPPER

    def get_current_device(self) -> int:
        """Return the index of the GPU."""
        return 0

    def get_current_stream(self, device: int) -> int:
        """Return the handle of the GPU's stream."""
        return 0

    def get_benchmarker(self) -> Callable:
        """Return a function by which kernels tune themselves: it runs each candidate once, and finds all equal."""

        def benchmark(kernel: Callable, quantiles: list[float]) -> list[float]:
            kernel()
            return [1.0] * len(quantiles)

        return benchmark


def _compile(function: JITFunction, key: str, signature: dict, device: int, *_) -> CompiledKernel:
    """Make a kernel that does nothing, and store it as `JITFunction` stores one that it has compiled."""
    kernel = object.__new__(CompiledKernel)
    kernel.src, kernel.name, kernel.metadata = None, function.__name__, SimpleNamespace()
    kernel.module, kernel.function, kernel.packed_metadata = "loaded", 0, ()
    kernel._module_pid = None  # Triton 3.9 unloads modules of this process
    kernel._run = _do_nothing
    kernels, *_ = function.device_caches[device]
    kernels[key] = kernel
    return kernel


def _do_nothing(*arguments: object) -> None:
    pass


@contextmanager
def without_launches() -> Generator[None]:
    """Inside the `with` block, take tensors in memory for tensors on a GPU, and launch no kernel.

    Import libraries before. Some ask for the GPU's properties when they are imported, which this driver cannot tell.
    """
    patches = [
        patch.object(driver, "_active", Driver()),
        patch.object(JITFunction, "_do_compile", _compile),
        # As an attribute of the class, it hides that of `torch._C.TensorBase`, which says false.
        patch.object(torch.Tensor, "is_cuda", True),
        patch.object(implementation, "why_not_on", lambda device, width: None),
        # It compares numbers, which no kernel writes here.
        patch.object(direct, "is_right_on", lambda device: True),
    ]
    with ExitStack() as stack:
        for change in patches:
            stack.enter_context(change)
        yield
