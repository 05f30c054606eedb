"""The cache of one process of a pipeline: blocks by micro-batch, and the gradients that their later readers leave.

A block that a chunk takes from the cache needs no transfer. Its gradient stays on this process too, until the chunk
that received or made the block runs its backward pass, and adds it to the gradient that goes upstream.
"""

from torch import Tensor

Key = tuple[int, int]  # micro-batch, number of the tensor


class BlockCache:
    """Tensors of the depth state, and gradients deposited for them.

    Attributes:
        num_bytes: The bytes of the tensors that it holds.
        peak_bytes: The most bytes that it has held at one time.
    """

    def __init__(self) -> None:
        self._tensors: dict[Key, Tensor] = {}
        self._gradients: dict[Key, Tensor] = {}
        self.num_bytes = self.peak_bytes = 0

    def keep(self, micro_batch: int, number: int, tensor: Tensor) -> None:
        """Keep a tensor, which shares its memory with the caller's.

        Args:
            micro_batch: The number of the micro-batch.
            number: The number of the tensor.
            tensor: The tensor.
        """
        self._tensors[micro_batch, number] = tensor.detach()
        self.num_bytes += tensor.nbytes
        self.peak_bytes = max(self.peak_bytes, self.num_bytes)

    def take(self, micro_batch: int, number: int) -> Tensor:
        """Return a tensor as the start of a new graph, so that its gradient does not reach the chunk that kept it."""
        return self._tensors[micro_batch, number].detach().requires_grad_()

    def free(self, micro_batch: int, number: int) -> None:
        """Forget a tensor after its last use."""
        self.num_bytes -= self._tensors.pop((micro_batch, number)).nbytes

    def deposit(self, micro_batch: int, number: int, gradient: Tensor | None) -> None:
        """Add the gradient of a reader of the tensor; `None` from a reader that does not depend on it."""
        if gradient is None:
            return
        key = micro_batch, number
        self._gradients[key] = gradient if key not in self._gradients else self._gradients[key] + gradient

    def collect(self, micro_batch: int, number: int) -> Tensor | None:
        """Remove and return the sum of the deposited gradients; `None` if there are none."""
        return self._gradients.pop((micro_batch, number), None)

    def check_empty(self) -> None:
        """Check that a step has used all tensors and gradients.

        Raises:
            RuntimeError: Some are left, so that gradients are incomplete. They are removed.
        """
        tensors, gradients = sorted(self._tensors), sorted(self._gradients)
        self._tensors.clear()
        self._gradients.clear()
        self.num_bytes = 0
        if tensors or gradients:
            raise RuntimeError(
                f"the step of the pipeline has left {len(tensors)} blocks and {len(gradients)} gradients in the cache, "
                f"as (micro-batch, tensor): {[*tensors, *gradients][:4]}. Its gradients are incomplete."
            )


__all__ = ["BlockCache"]
