"""Operations of other libraries as implementations of depth attention, which users choose by name.

No library has the scale `sum`, a gradient through the weights, the addition of gradients from later reads, or second
derivatives. [`LibraryOperation`] adds these by PyTorch's operations, and refuses tensors that a library would misread.
Each library has a file with a class that derives from it.
"""

import functools
from collections.abc import Mapping, Sequence
from inspect import signature
from types import ModuleType

import torch
from torch import Tensor

from ..autograd import BackwardRequest, Gradients, add_later_grad, depth_attention_in_operations, differentiable
from ..compat import why_operations_are_observed
from ..interface import Implementation
from ..tensors import PLAIN, packed
from .choices import chosen
from .launch import DTYPES


class LibraryOperation:
    """One library's operation: how it is loaded and called, and which tensors it takes."""

    name: str
    """Name of the implementation."""
    package: str
    """Name of the package that holds the operation."""
    install: str
    """Command that installs the package."""
    release: str
    """Release of the package whose functions have `arguments`."""
    arguments: Mapping[str, set[str]]
    """The functions of the operation by name, with the names of their arguments."""
    dtypes: tuple[torch.dtype, ...] = DTYPES
    """The dtypes of sources that the kernels take."""

    def load(self) -> ModuleType:
        """Import the module with the functions, which takes seconds."""
        raise NotImplementedError

    def why_unfit(self, sources: Sequence[Tensor]) -> str | None:
        """Return why the kernels do not take sources of one dtype, shape and device, or `None` if they do."""
        return None

    def compute(
        self, query: Tensor, sources: Sequence[Tensor], eps: float
    ) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
        """Compute the softmax average of the sources.

        Args:
            query: `w * g`, `[D]` in float32, contiguous.
            sources: n sources `[..., D]`, contiguous.
            eps: epsilon of the key norm.

        Returns:
            The average `[..., D]` in a tensor that nothing else uses, the weights `[n, ...]` in float32, and tensors
            for [`compute_grads`].
        """
        raise NotImplementedError

    def compute_grads(
        self, grad: Tensor, query: Tensor, sources: Sequence[Tensor], saved: Sequence[Tensor], eps: float
    ) -> tuple[Tensor, Sequence[Tensor]]:
        """Return the gradients of the query `[D]` and of each source `[..., D]`, from that of the average."""
        raise NotImplementedError

    @functools.cached_property
    def operation(self) -> ModuleType | str:
        """The module with the functions, or why they cannot be used."""
        try:
            module = self.load()
            functions = {name: getattr(module, name) for name in self.arguments}
        except ModuleNotFoundError as error:
            return f"{self.package} is not installed, or lacks {error.name} ({self.install})"
        except Exception as error:  # another version lacks the functions, or Triton does not load
            return f"{self.package} does not load: {error}"
        if any(signature(function).parameters.keys() != self.arguments[name] for name, function in functions.items()):
            return f"the operation of this {self.package} takes other arguments than that of {self.release}"
        return module

    def supports(self, query: Tensor, sources: Sequence[Tensor]) -> str | None:
        """Return why the operation cannot run on these tensors, or `None` if it can; see [`Implementation`]."""
        if not query.is_cuda:
            return f"the sources are on {query.device}, not on a GPU"
        reason = "the function is compiled" if torch.compiler.is_compiling() else why_operations_are_observed()
        if reason is not None:
            return reason
        first = sources[0]
        for source in sources:
            if type(source) not in PLAIN or source.device != query.device:
                return f"{self.package} takes plain tensors on one GPU"
            if source.dtype != first.dtype or first.dtype not in self.dtypes:
                names = ", ".join(str(dtype).removeprefix("torch.") for dtype in self.dtypes)
                return f"{self.package} takes sources of one dtype, of {names}"
        if not first.numel():
            return f"{self.package} takes at least one token"
        if not all(source.data_ptr() for source in sources):
            return "the memory of a source was freed"
        reason = self.why_unfit(sources)
        if reason is not None:
            return reason
        return self.operation if isinstance(self.operation, str) else None

    def pays(self, query: Tensor, sources: Sequence[Tensor]) -> bool:
        """Return whether `auto` chooses this library for so many sources; see [`Implementation`]."""
        return chosen(len(sources), torch.is_grad_enabled()) == self.name

    def implementation(self) -> Implementation:
        """Return the operation behind the interface of all implementations."""
        return Implementation(differentiable(self._forward, self._backward), self.supports, self.pays)

    def _forward(
        self, query: Tensor, sources: Sequence[Tensor], eps: float, is_sum: bool
    ) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
        with torch.cuda.device_of(query):
            result, weights, saved = self.compute(packed(query), [packed(source) for source in sources], eps)
        return result.mul_(len(sources)) if is_sum else result, weights, saved

    def _backward(self, request: BackwardRequest) -> Gradients:
        query, sources = packed(request.query), [packed(source) for source in request.sources]
        grad = packed(request.grad * len(sources) if request.is_sum else request.grad)
        with torch.cuda.device_of(query):
            grad_query, grads = self.compute_grads(grad, query, sources, request.saved, request.eps)
        all_grads = [grad_query, *grads]
        if request.grad_weights is not None:  # the operation has no gradient through the weights
            with torch.enable_grad():
                leaves = [tensor.detach().requires_grad_() for tensor in (query, *sources)]
                weights = depth_attention_in_operations(leaves[0], leaves[1:], request.eps, request.is_sum)[1]
                through_weights = torch.autograd.grad(weights, leaves, request.grad_weights)
            all_grads = [grad + through for grad, through in zip(all_grads, through_weights)]
        all_grads[1:] = [add_later_grad(*both) for both in zip(all_grads[1:], request.later_grads)]
        needed = (request.needs_query, *request.needs_sources)
        grad_query, *grad_sources = [grad if is_needed else None for grad, is_needed in zip(all_grads, needed)]
        return grad_query, grad_sources


__all__ = ["LibraryOperation"]
