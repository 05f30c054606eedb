"""Depth-mixing matrices: how much of every earlier output a sublayer's input holds, whatever the residual connection.

    h_l = sum_i M[l, i] v_i + c_l         v_0 the embedding, v_i the output of sublayer i, l = L the input of the output

A connection reads and writes linearly once its coefficients are known (`coefficients`, `mix` and `write` of
[`ResidualConnection`]). So a pass of the model records the coefficients, and the same reads and writes with unit
vectors in place of `v_0, v_1, ...` give the rows of `M`. `c_l` is what a connection adds of its own, as a rule nothing.
"""

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map
from transformers import PreTrainedModel

from attnres import ResidualConnection


@dataclass(frozen=True)
class TokenMixing:
    """The depth mixing of every token of a batch, with what the pass of the model recorded.

    Attributes:
        matrices: `M`, `[L + 1, L + 1, batch, seq, channels]` in float64, with one channel where all of them are mixed
            alike, else `hidden`. Zero above the diagonal.
        constants: `c`, `[L + 1, batch, seq, channels]`.
        inputs: `h_0 .. h_L` `[L + 1, batch, seq, hidden]`, as the model computed them.
        outputs: `v_0 .. v_L`, likewise.
    """

    matrices: Tensor
    constants: Tensor
    inputs: Tensor
    outputs: Tensor

    def rebuilt(self) -> Tensor:
        """`inputs` once more, from `matrices` and `outputs` alone."""
        return torch.stack([(row * self.outputs).sum(0) for row in self.matrices]) + self.constants


def mixing_matrix(model: PreTrainedModel, batch: Tensor | Mapping[str, Tensor]) -> Tensor:
    """The mean of `M` over the tokens of a batch, and over the channels where these differ.

    Args:
        model: a model of the family, with any residual connection.
        batch: token ids `[batch, seq]`, or what a tokenizer returns; tokens that its attention mask leaves out do not
            count.

    Returns:
        `M`, `[L + 1, L + 1]` in float64, L being the number of sublayers: row `l` is the input of sublayer `l` and the
        last one that of the output; column 0 is the embedding and column `i` the output of the i-th sublayer.

    Raises:
        ValueError: the model has no residual connections of the family, or the mask is not `[batch, seq]`.
    """
    inputs = _inputs(batch)
    mask = inputs.get("attention_mask", torch.ones(1, 1))
    if mask.ndim != 2:
        raise ValueError(f"the attention mask has shape {list(mask.shape)}, but must be [batch, seq].")
    trace = _record(model, inputs)
    mask = mask.to(trace.outputs[0].device, torch.float64).unsqueeze(-1).expand(*trace.outputs[0].shape[:2], 1)
    return torch.stack([(row * mask).sum((1, 2)).mean(-1) / mask.sum() for row, _ in trace.rows()])


def token_mixing(model: PreTrainedModel, batch: Tensor | Mapping[str, Tensor]) -> TokenMixing:
    """`M` of every token, for small batches: `(L + 1)^2` numbers for each, and for each channel where they differ.

    Raises:
        ValueError: the model has no residual connections of the family.
    """
    trace = _record(model, _inputs(batch))
    rows, constants = zip(*trace.rows())
    channels = max(row.shape[-1] for row in rows)
    rows, constants = (
        torch.stack([part.expand(*part.shape[:-1], channels) for part in parts]) for parts in (rows, constants)
    )
    return TokenMixing(rows, constants, torch.stack(trace.inputs), torch.stack(trace.outputs))


def semiseparable_rank(matrix: Tensor, tolerance: float = 1e-9) -> int:
    """The largest rank of a block `M[k:, :k + 1]` below the diagonal: how wide the state is that the depth needs.

    1 for a residual stream, n for n streams, about the number of blocks for Block AttnRes.

    Args:
        matrix: `[L + 1, L + 1]`, of one token and one channel: a mean of several may have a higher rank.
        tolerance: singular values below this part of a block's largest one count as zero.
    """
    blocks = (matrix[k:, : k + 1] for k in range(len(matrix)))
    return max(int(torch.linalg.matrix_rank(block.double(), rtol=tolerance)) for block in blocks)


@dataclass(frozen=True)
class _Trace:
    """What a pass recorded: the reads in their order, and the outputs `v_0 .. v_L`."""

    reads: list[tuple[ResidualConnection, Any]]
    inputs: list[Tensor]
    outputs: list[Tensor]

    def rows(self) -> Iterator[tuple[Tensor, Tensor]]:
        """`M[l]` `[L + 1, batch, seq, channels]` and `c_l` `[batch, seq, channels]`, for each read in turn."""
        count = len(self.outputs)
        # A column for each output, and one without any, which leaves the constants.
        unit = torch.eye(count, count + 1, dtype=torch.float64, device=self.outputs[0].device)
        unit = unit[:, :, None, None, None].expand(-1, -1, *self.outputs[0].shape[:2], 1)
        state = unit[0]
        for place, (connection, coefficients) in enumerate(self.reads):
            mixed, state = connection.mix(state, tree_map(_wide, coefficients))
            mixed = mixed.expand(*unit[0].shape[:-1], mixed.shape[-1])
            yield mixed[:-1] - mixed[-1], mixed[-1]
            if place + 1 < count:
                state = connection.write(state, unit[place + 1])


def _inputs(batch: Tensor | Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors among what a model is called with."""
    given = batch if isinstance(batch, Mapping) else {"input_ids": batch}
    return {name: value for name, value in given.items() if isinstance(value, Tensor)}


def _wide(value: Any) -> Any:
    return value.double() if isinstance(value, Tensor) and value.is_floating_point() else value


@torch.no_grad()
def _record(model: PreTrainedModel, inputs: dict[str, Tensor]) -> _Trace:
    """One pass of the model, in which its connections are looked at."""
    connections = [module for module in model.modules() if isinstance(module, ResidualConnection)]
    if not connections:
        raise ValueError(f"{type(model).__name__} has no residual connections of the family: retrofit it first.")
    trace, thread = _Trace([], [], []), threading.get_ident()

    def is_ours() -> bool:  # another thread may run the model meanwhile
        return threading.get_ident() == thread

    def before(connection: ResidualConnection, arguments: tuple) -> None:
        if not is_ours():
            return
        if not trace.reads:  # the embedding is the first state
            trace.outputs.append(arguments[0].double())
        trace.reads.append((connection, connection.coefficients(*arguments)))

    def after(connection: ResidualConnection, arguments: tuple, result: tuple) -> None:
        if is_ours():
            trace.inputs.append(result[0].double())

    def wrote(output: Tensor) -> None:
        if is_ours():
            trace.outputs.append(output.double())

    with ExitStack() as stack:
        for connection in connections:
            for handle in (connection.register_forward_pre_hook(before), connection.register_forward_hook(after)):
                stack.callback(handle.remove)
            stack.enter_context(_watched(connection, wrote))
        model(**{name: value.to(model.device) for name, value in inputs.items()}, use_cache=False)
    return trace


@contextmanager
def _watched(connection: ResidualConnection, see: Callable[[Tensor], None]) -> Iterator[None]:
    """While this lasts, `see` gets what is written by the connection."""
    write = connection.write

    def watched(state: Any, output: Tensor) -> Any:
        see(output)
        return write(state, output)

    connection.write = watched
    try:
        yield
    finally:
        del connection.write


__all__ = ["TokenMixing", "mixing_matrix", "semiseparable_rank", "token_mixing"]
