"""Records of a forward pass beside the hidden states: depth weights, and sums of the sublayers' outputs.

`transformers` records what modules return. A read returns its input, the depth weights and the state; the sums are
computed from the recorded states after the pass.
"""

from typing import Any

from torch import Tensor

from .residual_attnres import ResidualConnection

# All are named like the argument that asks for them, `output_{name}`.
SUMS = "prefix_sums", "running_sums"
RECORDS = ("depth_attentions", *SUMS)


class Receiver:
    """Receives from the decoder what a forward pass computes and the backbone's head does not pass on.

    It is no list or dictionary, because engines that shard or offload a model pass on copies of these.
    """

    outputs: Any  # of the decoder, with the records
    unnormed: Tensor  # [batch, seq, hidden], the input of the final norm
    arguments: dict[str, Any]  # of the pass, by name, as the decoder has prepared them


def sums_of(connection: ResidualConnection, name: str, states: tuple[Any, ...], selection: Any) -> tuple[Any, ...]:
    """Compute the sums `[batch, seq, hidden]` of recorded states, and `None` in place of those that are not selected.

    Args:
        connection: any connection of the model.
        name: one of `SUMS`.
        states: the state of each layer's first read, and of the output's.
        selection: `True` for all sums; or an index, or several, as `output_hidden_states` takes them.

    Raises:
        ValueError: the connection does not keep the sum.
    """
    compute = connection.partial_sum if name == "prefix_sums" else connection.running_sum
    if compute(states[0]) is None:
        raise ValueError(f"`output_{name}`: this residual connection keeps no such sum. Read `hidden_states`.")
    if isinstance(selection, bool):
        return tuple(map(compute, states))
    count = len(states)
    chosen = {i % count for i in ([selection] if isinstance(selection, int) else selection) if -count <= i < count}
    return tuple(compute(state) if i in chosen else None for i, state in enumerate(states))


__all__ = ["RECORDS", "SUMS", "Receiver", "sums_of"]
