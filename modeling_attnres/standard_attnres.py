"""The residual stream of the backbone itself: `h_l = v_0 + v_1 + ... + v_{l-1}`."""

from collections.abc import Mapping

from torch import Tensor
from transformers import PreTrainedConfig

from .residual_attnres import ResidualConnection


class StandardResidual(ResidualConnection):
    """State: the running sum."""

    name = "standard"
    retrofit = {}

    @classmethod
    def differs_from_standard(cls, config: PreTrainedConfig, tensors: Mapping[str, Tensor]) -> None:
        return None

    def mix(self, state: Tensor, coefficients: None) -> tuple[Tensor, Tensor]:
        return state, state

    def write(self, state: Tensor, output: Tensor) -> Tensor:
        return state + output


__all__ = ["StandardResidual"]
