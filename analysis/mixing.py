"""Depth-mixing matrices: how much of every earlier output a sublayer's input holds, whatever the residual connection.

    h_l = sum_i M[l, i] v_i + c_l         v_0 the embedding, v_i the output of sublayer i, l = L the input of the output

A connection reads and writes linearly once its coefficients are known (`coefficients`, `mix` and `write` of
[`ResidualConnection`]). So a pass of the model records the coefficients, and the same reads and writes with unit
vectors in place of `v_0, v_1, ...` give the rows of `M`. `c_l` is what a connection adds of its own, as a rule nothing.
"""

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map
from transformers import PreTrainedModel

from .names import Depth, Measurement, depth_of, deviation
from .watching import Batch, connections_of, family_member, mask_of, measuring, run, sequences, several, watched

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True, eq=False, repr=False)
class DepthMixing(Measurement):
    """The depth-mixing matrix of a model, over the tokens of a text.

    Attributes:
        depth: the names of its rows (`readers`) and columns (`outputs`).
        mean: the mean of `M` over tokens, and over channels where these differ, `[L + 1, L + 1]` in float64.
        spread: the standard deviation over tokens, likewise.
        tokens: how many were counted.
    """

    depth: Depth
    mean: Tensor
    spread: Tensor
    tokens: int

    def plot(self, path: str | os.PathLike | None = None) -> "Figure":
        """Draw the matrix; see [`attnres.analysis.figures.draw_mixing`]."""
        from .figures import draw_mixing, finish

        return finish(draw_mixing(self), path)


@dataclass(frozen=True, eq=False, repr=False)
class TokenMixing(Measurement):
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


def depth_mixing(model: PreTrainedModel, batches: Batch | Iterable[Batch]) -> DepthMixing:
    """Measure `M` over all tokens of the batches, which may be streamed.

    Args:
        model: a causal language model of the family, or a standard one on a backbone that the family knows.
        batches: one or several, each token ids `[batch, seq]` or what a tokenizer returns; tokens that an attention
            mask leaves out do not count.

    Returns:
        `M`, with L sublayers: row `l` is the input of sublayer `l` and the last one that of the output; column 0 is the
        embedding and column `i` the output of the i-th sublayer.

    Raises:
        ValueError: the model is not of the family and cannot be seen as a member, there is no batch, a mask is not
            `[batch, seq]`, or what the model computes is not finite.
    """
    model, total, tokens = family_member(model), None, 0
    for batch in several(batches):
        for sequence in sequences(batch):  # one at a time: (L + 1)^2 numbers for each token
            counts = mask_of(sequence)[0]
            rows = rows_by_token(model, sequence)[:, :, counts.cpu()]
            sums = torch.stack([rows.sum(-1), rows.square().sum(-1)])
            total = sums if total is None else total + sums
            tokens += int(counts.sum())
    if total is None:
        raise ValueError("no batch of token ids was given.")
    mean, square = total / tokens
    return DepthMixing(depth_of(model), mean, deviation(mean, square), tokens)


def mixing_matrix(model: PreTrainedModel, batches: Batch | Iterable[Batch]) -> Tensor:
    """The mean of [`depth_mixing`] alone, `[L + 1, L + 1]` in float64."""
    return depth_mixing(model, batches).mean


def rows_by_token(model: PreTrainedModel, sequence: Batch) -> Tensor:
    """`M` of each token of one sequence `[1, seq]`, `[L + 1, L + 1, seq]`, a mean over channels where these differ.

    Raises:
        ValueError: the model is not of the family and cannot be seen as a member, or what it computes is not finite.
    """
    rows: list[Tensor] = []
    _trace(model, sequence, lambda row, constant: rows.append(row[:, 0].mean(-1).cpu()))
    return torch.stack(rows)[:, : len(rows)]


def token_mixing(model: PreTrainedModel, batch: Batch) -> TokenMixing:
    """`M` of every token, for small batches: `(L + 1)^2` numbers for each, and for each channel where they differ.

    Raises:
        ValueError: the model is not of the family and cannot be seen as a member.
    """
    rows, constants, passed = [], [], ([], [])
    _trace(model, batch, lambda row, constant: (rows.append(row), constants.append(constant)), passed)
    device, channels = rows[0].device, max(row.shape[-1] for row in rows)
    rows, constants = (
        torch.stack([part.to(device).expand(*part.shape[:-1], channels) for part in parts])
        for parts in (rows, constants)
    )
    inputs, outputs = (torch.stack([tensor.to(device) for tensor in tensors]) for tensors in passed)
    return TokenMixing(rows[:, : len(rows)], constants, inputs, outputs)


def semiseparable_rank(matrix: Tensor, tolerance: float = 1e-9) -> int:
    """The largest rank of a block `M[k:, :k + 1]` below the diagonal: how wide the state is that the depth needs.

    1 for a residual stream, n for n streams, about the number of blocks for Block AttnRes.

    Args:
        matrix: `[L + 1, L + 1]`, of one token and one channel: a mean of several may have a higher rank.
        tolerance: singular values below this part of a block's largest one count as zero.
    """
    blocks = (matrix[k:, : k + 1] for k in range(len(matrix)))
    return max(int(torch.linalg.matrix_rank(block.double(), rtol=tolerance)) for block in blocks)


@torch.no_grad()
def _trace(
    model: PreTrainedModel,
    batch: Batch,
    see: Callable[[Tensor, Tensor], Any],
    passed: tuple[list[Tensor], list[Tensor]] | None = None,
) -> None:
    """One pass, in which the reads and writes are done once more, with unit vectors for outputs.

    `see` gets `M[l]` `[columns, batch, seq, channels]` and `c_l` `[batch, seq, channels]` of each read in turn, on its
    device; there is a column for each output, and there may be more. The lists of `passed` get all inputs and outputs.
    """
    model = family_member(model)
    inputs, outputs = passed or ([], [])
    count, reads = len(connections_of(model)), 0  # an adapter keeps copies that are not read by
    unit = torch.eye(count, count + 1, dtype=torch.float64)[:, :, None, None, None]  # the last column has no output
    mixing: Any = None  # the state, with those vectors in it

    def expanded(place: int, tensor: Tensor) -> Tensor:
        return unit[place].to(tensor.device).expand(-1, *tensor.shape[:2], 1)

    def read(connection: nn.Module, forward: Any, state: Any, *norm: Any) -> Any:
        nonlocal mixing, reads
        coefficients = connection.coefficients(state, *norm)
        result = forward(state, *norm)
        if reads == 0:  # the embedding is the first state
            mixing = expanded(0, state)
            outputs.append(state.double())
        inputs.append(result[0].double())
        mixing = tree_map(lambda tensor: tensor.to(result[0].device), mixing)
        row, mixing = connection.mix(mixing, tree_map(_wide, coefficients))
        row = row.expand(count + 1, *result[0].shape[:2], row.shape[-1])
        see(row[:-1] - row[-1], row[-1])
        reads += 1
        return result

    def write(connection: nn.Module, own: Any, state: Any, output: Tensor) -> Any:
        nonlocal mixing
        mixing = own(mixing, expanded(reads, output))
        outputs.append(output.double())
        return own(state, output)

    with measuring(model), watched(model, read, write):
        run(model, batch)


def _wide(value: Any) -> Any:
    return value.double() if isinstance(value, Tensor) and value.is_floating_point() else value


__all__ = [
    "DepthMixing",
    "TokenMixing",
    "depth_mixing",
    "mixing_matrix",
    "rows_by_token",
    "semiseparable_rank",
    "token_mixing",
]
