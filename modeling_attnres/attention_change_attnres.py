"""The interface of changes of a backbone's attention, such as a gate, which work with any residual connection."""

from collections.abc import Mapping
from typing import Any, ClassVar

from torch import nn
from transformers import PreTrainedConfig


class AttentionChange:
    """A change of the attention in every layer, which one configuration field turns on.

    The class is never instantiated. Models call its methods, whether the change is on or off.
    """

    field: ClassVar[str]  # the configuration field that turns it on; `None` is off
    fields: ClassVar[dict[str, Any]]  # its configuration fields with their defaults
    float32_modules: ClassVar[tuple[str, ...]] = ()  # names of modules that stay in float32 in a 16-bit model

    @classmethod
    def is_on(cls, config: PreTrainedConfig) -> bool:
        """Return whether a configuration has the change."""
        return getattr(config, cls.field, None) is not None

    @staticmethod
    def check(config: PreTrainedConfig) -> None:
        """Check the fields, and add the tensors to the plan of tensor parallelism.

        Args:
            config: the configuration; its `base_model_tp_plan` is changed.

        Raises:
            ValueError: a field has a value that is not allowed.
        """
        raise NotImplementedError

    @staticmethod
    def add_to(layer: nn.Module, config: PreTrainedConfig) -> None:
        """Change the attention of a decoder layer that the backbone has made, if the change is on.

        Raises:
            ValueError: the change does not fit the backbone's attention.
        """
        raise NotImplementedError

    @staticmethod
    def tensors(model: nn.Module) -> dict[str, nn.Parameter]:
        """Return the tensors that the change adds to a backbone, by their names in the model."""
        raise NotImplementedError

    @staticmethod
    def differing_fields(config: PreTrainedConfig, stored: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
        """Return the fields with which a model computes another function than its checkpoint.

        Args:
            config: the model's configuration.
            stored: the fields in the checkpoint's `config.json`.

        Returns:
            Field -> its value in the checkpoint, its value in the model.
        """
        raise NotImplementedError

    @staticmethod
    def start(config: PreTrainedConfig) -> str:
        """Return at which values new tensors start, in words such as "at random"; empty if the start has no effect."""
        raise NotImplementedError


__all__ = ["AttentionChange"]
