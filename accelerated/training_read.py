"""Decide in training whether one kernel may compute a read and the norm that the sublayer begins with.

Modules may get hooks, adapters and patches at any time, so the checks run before each read. They take a few
microseconds.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from .inference_plan import plain_norm
from .interface import Implementation
from .plain import modules_are_called_plainly, runs_forward_alone


def read_with_norm(
    connection: nn.Module,
    key_norm: nn.Module,
    norm: nn.Module,
    sources: Sequence[Tensor],
    implementations: Mapping[str, Implementation],
) -> tuple[Tensor, tuple[Tensor, ...]] | None:
    """Compute a read and its norm by the first implementation that can; see [`attnres.accelerated.read_with_norm`].

    Args:
        connection: the connection.
        key_norm: its key norm.
        norm: the norm after the read.
        sources: the sources, each `[batch, seq, hidden]`.
        implementations: name -> implementation, in order of preference.
    """
    if not sources[0].is_cpu:  # the loops for CPUs alone have such a read, and a GPU waits for its host
        return None
    name = connection.config.depth_attention_implementation
    for candidate_name, candidate in implementations.items():
        if candidate.read_with_norm is None or name not in ("auto", candidate_name):
            continue
        query, weight = connection._parameters.get("weight"), key_norm._parameters.get("weight")
        # In the order of their cost: a small model pays for the first one only.
        if query is None or weight is None or (name == "auto" and not candidate.pays(query, sources)):
            continue
        if not (modules_are_called_plainly() and runs_forward_alone(connection) and runs_forward_alone(key_norm)):
            continue
        following = plain_norm(norm)
        if following is None or candidate.supports(query.detach().to(torch.float32), sources) is not None:
            continue
        is_sum = connection.scale == "sum"
        attended = candidate.read_with_norm(query, weight, following[0], sources, connection.eps, following[1], is_sum)
        if attended is not None:
            return attended
    return None


__all__ = ["read_with_norm"]
