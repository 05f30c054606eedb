"""Rows of several documents and with padding: how tests compute and compare their logits."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from attnres import AttnResForCausalLM

# Alone, a document sums its products in another order than within a chunk.
TOLERANCE = 2e-5


def alone(model: Callable, documents: list[Tensor]) -> Tensor:
    """Compute the logits of each document as a separate row, and join them."""
    return torch.cat([model(document).logits for document in documents], 1)


def error(found: Tensor, expected: Tensor) -> float:
    assert found.shape == expected.shape
    return ((found - expected).abs().max() / expected.abs().max()).item()


def of_travelled_code(model: AttnResForCausalLM) -> AttnResForCausalLM:
    """Copy a model to one with the delta attention that runs without an installed `attnres`."""
    copy = AttnResForCausalLM(model.config).eval()
    copy.load_state_dict(model.state_dict())
    for layer in copy.model.layers:
        for name in ("chunk", "step", "convolve", "convolve_step"):
            vars(layer.self_attn).pop(name, None)
    return copy


def refused(model, **arguments) -> str:
    with pytest.raises(ValueError) as refusal:
        model(**arguments)
    return str(refusal.value)
