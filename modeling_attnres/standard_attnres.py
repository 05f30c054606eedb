"""The backbone's own residual stream: `h_l = v_0 + v_1 + ... + v_{l-1}`. A model with it is the backbone."""

from collections.abc import Mapping

from torch import Tensor
from transformers import PreTrainedConfig

from .residual_attnres import ResidualConnection


class StandardResidual(ResidualConnection):
    """The standard residual. State: the running sum `[batch, seq, hidden]`. It has no tensors."""

    name = "standard"
    summary = "the residual stream"
    used_by = "most models"
    measured = {"step": "1"}
    retrofit = {}

    @classmethod
    def differs_from_standard(cls, config: PreTrainedConfig, tensors: Mapping[str, Tensor]) -> None:
        """Return `None`: it is the standard residual, whatever tensors the connections of a model have now."""
        return None

    def mix(self, state: Tensor, coefficients: None) -> tuple[Tensor, Tensor]:
        """Return the running sum as input and as state."""
        return state, state

    def write(self, state: Tensor, output: Tensor) -> Tensor:
        """Add an output `[batch, seq, hidden]` to the running sum."""
        return state + output

    def partial_sum(self, state: Tensor) -> Tensor:
        """Return the running sum: a standard model is one block that never ends."""
        return state

    running_sum = partial_sum


__all__ = ["StandardResidual"]
