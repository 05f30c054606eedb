"""The memory of one pass of a model, layer by layer, and the peaks that follow from it.

A trace keeps the parts of a peak apart, so that they can be sharded among devices and stages:

    backward pass of layer l:  kept by the layers before l  +  states that any layer up to l keeps  +  peak of layer l
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from .building import Batch


@dataclass(frozen=True)
class LayerTrace:
    """The memory of one decoder layer, in bytes.

    Attributes:
        states: Identities and bytes of the tensors of its input state.
        kept: Kept for the backward pass, without states.
        connection_kept: The part of `kept` that its residual connections keep.
        kept_states: Identities of the states, of its input or output, that it keeps for the backward pass.
        forward: Peak of the forward pass, without the input state.
        backward: Peak of both passes, without the input state; it has the gradients of the input and output states, and
            new gradients of weights other than routed experts.
        cache: Bytes of its cache after the pass.
    """

    states: dict[int, int]
    kept: int = 0
    connection_kept: int = 0
    kept_states: frozenset[int] = frozenset()
    forward: int = 0
    backward: int = 0
    cache: int = 0

    def sharded(self, tensor: int) -> "LayerTrace":
        """Return this memory with states, and the tensors that connections keep, sharded along the sequence."""
        connection_kept = self.connection_kept // tensor
        saved = self.connection_kept - connection_kept
        return replace(
            self,
            states=_parts(self.states, tensor),
            kept=self.kept - saved,
            connection_kept=connection_kept,
            backward=self.backward - saved,
        )


@dataclass(frozen=True)
class Trace:
    """The memory of one pass of a model, without its weights, their gradients and the optimizer's states.

    Attributes:
        batch: The traced pass.
        layers: One entry a decoder layer.
        output: Identities and bytes of the state after the last layer.
        head: Peak bytes of everything outside the layers, such as logits and loss, in both passes.
        stream: Bytes of one tensor `[rows, length, hidden]`.
    """

    batch: Batch
    layers: tuple[LayerTrace, ...]
    output: dict[int, int]
    head: int
    stream: int

    @property
    def cache(self) -> int:
        """Bytes of the cache after the pass."""
        return sum(layer.cache for layer in self.layers)

    def sharded(self, tensor: int) -> "Trace":
        """Return this trace with states of the depth sharded along the sequence among `tensor` devices."""
        layers = tuple(layer.sharded(tensor) for layer in self.layers)
        return replace(self, layers=layers, output=_parts(self.output, tensor), stream=self.stream // tensor)

    def peak(self, checkpointing: bool = False, layers: slice = slice(None)) -> int:
        """Return the peak bytes of the pass, without the cache.

        Args:
            checkpointing: Whether each layer keeps only its input state, and runs again in the backward pass.
            layers: The layers that the device has. The last layer comes with the head.
        """
        chosen, after = self.layers[layers], range(len(self.layers))[layers].stop
        if not self.batch.training:
            return max(self._head(after, {}), *(sum(layer.states.values()) + layer.forward for layer in chosen))
        peak = kept = 0
        kept_states: dict[int, int] = {}
        for layer, following in zip(chosen, self._states_after(layers)):
            before = kept + sum((kept_states | layer.states).values())
            kept_states |= self.states_kept(layer, following, checkpointing)
            # In its backward pass, everything that the layers before it keep is still there.
            peak = max(peak, before + layer.forward, kept + sum(kept_states.values()) + layer.backward)
            kept += 0 if checkpointing else layer.kept
        return max(peak, kept + self._head(after, kept_states))

    def kept(self, checkpointing: bool, stages: Sequence[slice]) -> tuple[int, int]:
        """Return the bytes that stages of one device keep from their forward passes to their backward passes.

        Args:
            checkpointing: As for [`peak`].
            stages: The layers of each stage.

        Returns:
            The bytes of states, of which each counts once, and of all others.
        """
        states: dict[int, int] = {}
        for stage in stages:
            for layer, following in zip(self.layers[stage], self._states_after(stage)):
                states |= self.states_kept(layer, following, checkpointing)
        others = 0 if checkpointing else sum(layer.kept for stage in stages for layer in self.layers[stage])
        return sum(states.values()), others

    def states_kept(self, layer: LayerTrace, following: dict[int, int], checkpointing: bool) -> dict[int, int]:
        """Return the states that one layer keeps for its backward pass.

        Args:
            layer: The layer.
            following: Identities and bytes of the state after it.
            checkpointing: Whether the layer keeps only its input state.

        Returns:
            Identities and bytes of the kept states.
        """
        if checkpointing:
            return layer.states
        both = layer.states | following
        return {name: both[name] for name in layer.kept_states}

    def _states_after(self, layers: slice) -> list[dict[int, int]]:
        return [*(layer.states for layer in self.layers[1:]), self.output][layers]

    def _head(self, after: int, kept_states: dict[int, int]) -> int:
        is_last = after == len(self.layers)
        return sum((kept_states | self.output).values()) + self.head if is_last else 0


def _parts(states: Mapping[int, int], tensor: int) -> dict[int, int]:
    return {name: size // tensor for name, size in states.items()}


__all__ = ["LayerTrace", "Trace"]
