"""Count the bytes of live tensors while a model runs, on any device and on tensors without data."""

import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode  # the public way to see every operation has this name
from torch.utils._pytree import tree_iter


class LiveBytes(TorchDispatchMode):
    """Context that counts the bytes of all tensors that operations make and that are still in use.

    Each storage counts once, with its full size, until its last tensor is gone. Memory that an operation uses only
    inside a kernel does not show.

    Args:
        ignored_shapes: Shapes of tensors that do not count.

    Attributes:
        now: Bytes that are in use.
        peak: The largest `now` so far.
    """

    def __init__(self, ignored_shapes: Iterable[torch.Size] = ()):
        super().__init__()
        self.now = self.peak = 0
        self._ignored_shapes = {*ignored_shapes}
        # By the address of the storage's object. The weak reference calls back when the storage is freed.
        self._storages: dict[int, weakref.ref] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        """Run an operation, and count the tensors that it returns."""
        result = func(*args, **(kwargs or {}))
        for value in tree_iter(result):
            if isinstance(value, Tensor):
                self._add(value, counts=value.shape not in self._ignored_shapes)
        return result

    def count(self, tensors: Iterable[Tensor]) -> None:
        """Count tensors that were made before, such as weights."""
        for tensor in tensors:
            self._add(tensor, counts=True)

    def ignore(self, tensors: Iterable[Tensor]) -> None:
        """Leave out tensors that were made before. Otherwise the first view of each would count."""
        for tensor in tensors:
            self._add(tensor, counts=False)

    def _add(self, tensor: Tensor, counts: bool) -> None:
        storage = tensor.untyped_storage()
        key, size = id(storage), storage.nbytes() if counts else 0
        if key in self._storages:
            return

        def forget(_: weakref.ref) -> None:
            del self._storages[key]
            self.now -= size

        self._storages[key] = weakref.ref(storage, forget)
        self.now += size
        self.peak = max(self.peak, self.now)


def storage_bytes(tensors: Iterable[Tensor]) -> int:
    """Return the bytes of the storages of tensors; tensors of one storage count once."""
    return sum({id(storage): storage.nbytes() for storage in map(Tensor.untyped_storage, tensors)}.values())


def tensors_in(value: Any) -> list[Tensor]:
    """Return the tensors in nested tuples, lists and dictionaries."""
    return [leaf for leaf in tree_iter(value) if isinstance(leaf, torch.Tensor)]


__all__ = ["LiveBytes", "storage_bytes", "tensors_in"]
