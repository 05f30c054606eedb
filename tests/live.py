"""Count the memory of all tensors that are alive, on any device, and the bytes that processes exchange."""

import weakref
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveTensors(TorchDispatchMode):
    """Within this context, `bytes` is the memory of the tensors that were made in it and are still alive.

    Views count once, by their storage. Each DTensor counts with the part that this process has.
    """

    def __init__(self):
        super().__init__()
        self.bytes = 0
        self._storages: weakref.WeakSet = weakref.WeakSet()

    def __torch_dispatch__(self, function: Callable, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(one, DTensor) for one in types):
            return NotImplemented  # DTensor calls the operations on its parts, which come here again
        result = function(*args, **(kwargs or {}))
        given = {id(leaf.untyped_storage()) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                storage = leaf.untyped_storage()
                if id(storage) not in given and storage not in self._storages:
                    self._storages.add(storage)
                    self.bytes += storage.nbytes()
                    weakref.finalize(storage, self._free, storage.nbytes())
        return result

    def _free(self, size: int) -> None:
        self.bytes -= size


def growth_over_layers(decoder: nn.Module, run: Callable[[], Any]) -> list[int]:
    """Run passes of a decoder; return by how many bytes the live tensors of each grow from its first to its last layer.

    Masks and position embeddings are made before the first layer.
    """
    before, growth = [], []
    with LiveTensors() as live:
        handles = [
            decoder.layers[0].register_forward_pre_hook(lambda *_: before.append(live.bytes)),
            decoder.layers[-1].register_forward_pre_hook(lambda *_: growth.append(live.bytes - before[-1])),
        ]
        run()
    for handle in handles:
        handle.remove()
    return growth


class SentBytes(TorchDispatchMode):
    """Within this context, `sent` holds for each kind of collective the bytes that one of `size` processes sends.

    They are those of a ring: `2 (n - 1) / n` times the tensor for an all-reduce, which is a reduce-scatter and an
    all-gather, each of which sends `(n - 1) / n` times the tensor that is whole.
    """

    def __init__(self, size: int):
        super().__init__()
        self.size, self.sent = size, {}

    @property
    def total(self) -> float:
        """The bytes of all kinds."""
        return sum(self.sent.values())

    def __torch_dispatch__(self, function: Callable, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(one, DTensor) for one in types):
            return NotImplemented
        result = function(*args, **(kwargs or {}))
        if function.namespace not in ("c10d", "_c10d_functional"):
            return result
        name = function._schema.name.split("::")[1]
        largest = max((leaf.nbytes for leaf in tree_leaves((args, result)) if isinstance(leaf, Tensor)), default=0)
        for kind, factor in {"reduce_scatter": 1, "gather": 1, "all_reduce": 2, "allreduce": 2}.items():
            if kind in name:
                kind = kind.replace("allreduce", "all_reduce")
                bytes_sent = factor * largest * (self.size - 1) / self.size
                self.sent[kind] = self.sent.get(kind, 0) + bytes_sent
                return result
        if any(word in name for word in ("all_to_all", "alltoall", "broadcast", "recv", "scatter", "send")):
            raise NotImplementedError(f"SentBytes does not count {name}")
        return result
