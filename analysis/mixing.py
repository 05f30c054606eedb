"""Depth-mixing matrices: how much of every earlier output a consumer's input holds, for any residual connection.

    h_l = sum_i M[l, i] v_i + c_l        v_0 the embedding, v_i the output of sublayer i - 1; l = L the output

Once its coefficients are known, a connection reads and writes linearly (`coefficients`, `mix` and `write` of
[`ResidualConnection`]). So a pass of the model provides the coefficients, and the same reads and writes with unit
vectors in place of `v_0, v_1, ...` give the rows of `M`. `c_l` is a constant that a connection adds, usually zero.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map
from transformers import PreTrainedModel

from attnres.residual_attnres import ResidualConnection

from .axis import DepthAxis, depth_axis
from .batches import Batch, as_batches, mask_of, split_sequences
from .measurement import DrawableMeasurement, Measurement, standard_deviation
from .watching import connections_of, family_member, measuring, run, watched


@dataclass(frozen=True, eq=False, repr=False)
class DepthMixing(DrawableMeasurement):
    """The depth-mixing matrix of a model, over the tokens of a text.

    Attributes:
        depth: The names of its rows (`consumers`) and columns (`outputs`).
        mean: The mean of `M` over tokens, and over channels where these differ, `[L + 1, L + 1]` in float64. Row `l`
            is the input of sublayer `l`, counted from 0; the last row is the input of the output. Column 0 is the
            embedding, column `i` the output of sublayer `i - 1`. Zero above the diagonal.
        spread: The standard deviation of `M` over tokens, `[L + 1, L + 1]` in float64.
        tokens: The number of counted tokens.
    """

    depth: DepthAxis
    mean: Tensor
    spread: Tensor
    tokens: int


@dataclass(frozen=True, eq=False, repr=False)
class TokenMixing(Measurement):
    """The depth mixing of every token of a batch, with the inputs and outputs that the pass of the model recorded.

    Attributes:
        matrices: `M`, `[L + 1, L + 1, batch, seq, channels]` in float64. `channels` is 1 if all channels are mixed
            alike, else the hidden size. Zero above the diagonal.
        constants: `c`, `[L + 1, batch, seq, channels]` in float64.
        inputs: `h_0 .. h_L` as the model computed them, `[L + 1, batch, seq, hidden]` in float64.
        outputs: `v_0 .. v_L` as the model computed them, `[L + 1, batch, seq, hidden]` in float64.
    """

    matrices: Tensor
    constants: Tensor
    inputs: Tensor
    outputs: Tensor

    def rebuilt(self) -> Tensor:
        """Compute the inputs `[L + 1, batch, seq, hidden]` from `matrices`, `outputs` and `constants` alone."""
        return torch.stack([(row * self.outputs).sum(0) for row in self.matrices]) + self.constants


def depth_mixing(model: PreTrainedModel, batches: Batch | Iterable[Batch]) -> DepthMixing:
    """Measure `M` over all tokens of the batches.

    Args:
        model: A causal language model of the family, or a standard one on a backbone in `BACKBONES`.
        batches: One or several, each token ids `[batch, seq]` or the mapping that a tokenizer returns. Tokens that
            an attention mask leaves out do not count.

    Returns:
        The mean and the standard deviation of `M` over tokens.

    Raises:
        ValueError: The model is not of the family and cannot become a member, there is no batch, a mask is not
            `[batch, seq]`, or the model's results are not finite.
    """
    model, total, tokens = family_member(model), None, 0
    for batch in as_batches(batches):
        # One sequence at a time, since `M` has (L + 1)^2 numbers for each token.
        for sequence in split_sequences(batch):
            mask = mask_of(sequence)[0]
            rows = rows_by_token(model, sequence)[:, :, mask.cpu()]  # [L + 1, L + 1, tokens]
            sums = torch.stack([rows.sum(-1), rows.square().sum(-1)])
            total = sums if total is None else total + sums
            tokens += int(mask.sum())
    if total is None:
        raise ValueError("no batch of token ids was given.")
    mean, square = total / tokens
    return DepthMixing(depth_axis(model), mean, standard_deviation(mean, square), tokens)


def rows_by_token(model: PreTrainedModel, sequence: Batch) -> Tensor:
    """Measure `M` of each token of one sequence.

    Args:
        model: A causal language model of the family, or a standard one on a backbone in `BACKBONES`.
        sequence: Token ids `[1, seq]`, or a mapping with them.

    Returns:
        `[L + 1, L + 1, seq]` in float64, a mean over channels where these differ.

    Raises:
        ValueError: The model is not of the family and cannot become a member, or its results are not finite.
    """
    rows: list[Tensor] = []
    _trace(model, sequence, lambda row, constant: rows.append(row[:, 0].mean(-1).cpu()))
    return torch.stack(rows)[:, : len(rows)]


def token_mixing(model: PreTrainedModel, batch: Batch) -> TokenMixing:
    """Measure `M` of every token of a small batch.

    This takes (L + 1)^2 numbers for each token, and for each of its channels where channels differ.

    Args:
        model: A causal language model of the family, or a standard one on a backbone in `BACKBONES`.
        batch: Token ids `[batch, seq]`, or the mapping that a tokenizer returns.

    Returns:
        The matrices, inputs and outputs of all tokens, including tokens that an attention mask leaves out.

    Raises:
        ValueError: The model is not of the family and cannot become a member, or its results are not finite.
    """
    rows, constants, inputs, outputs = [], [], [], []
    _trace(model, batch, lambda row, constant: (rows.append(row), constants.append(constant)), inputs, outputs)
    # Layers may be on several devices. Some connections mix all channels alike, and give rows with one channel.
    device, channels = rows[0].device, max(row.shape[-1] for row in rows)
    rows, constants = (
        torch.stack([part.to(device).expand(*part.shape[:-1], channels) for part in parts])
        for parts in (rows, constants)
    )
    inputs, outputs = (torch.stack([tensor.to(device) for tensor in tensors]) for tensors in (inputs, outputs))
    return TokenMixing(rows[:, : len(rows)], constants, inputs, outputs)


def semiseparable_rank(matrix: Tensor, tolerance: float = 1e-9) -> int:
    """Return the largest rank of all blocks `M[k:, :k + 1]` of a matrix.

    This is the width of the state that the depth needs: 1 for a residual stream, n for n streams, about the number of
    blocks for Block AttnRes.

    Args:
        matrix: `M` of one token and one channel, `[L + 1, L + 1]`. A mean over tokens may have a higher rank.
        tolerance: Singular values below this share of a block's largest one count as zero.
    """
    blocks = (matrix[k:, : k + 1] for k in range(len(matrix)))
    return max(int(torch.linalg.matrix_rank(block.double(), rtol=tolerance)) for block in blocks)


@torch.no_grad()
def _trace(
    model: PreTrainedModel,
    batch: Batch,
    add_row: Callable[[Tensor, Tensor], Any],
    inputs: list[Tensor] | None = None,
    outputs: list[Tensor] | None = None,
) -> None:
    """Run one pass, and repeat each read and write with unit vectors in place of outputs.

    Args:
        model: A model of the family, or one that can become a member.
        batch: Token ids `[batch, seq]`, or the mapping that a tokenizer returns.
        add_row: Called for each read in turn with `M[l]` `[columns, batch, seq, channels]` and `c_l`
            `[batch, seq, channels]` on the device of the layer. The first L + 1 columns are the outputs; zero columns
            may follow.
        inputs: A list to append the input of each read to, `[batch, seq, hidden]` in float64.
        outputs: A list to append the embedding and the output of each write to, `[batch, seq, hidden]` in float64.
    """
    model = family_member(model)
    if model.config.connection.mixes_channels:
        name = model.config.residual_connection
        raise ValueError(f"{name!r} mixes the channels of the stream, so it has no depth-mixing matrix.")
    # An adapter keeps copies of connections, which no pass calls. They only add columns of zeros.
    width, num_reads = len(connections_of(model)), 0
    # Row i is the unit vector of output i. The last column belongs to no output: it collects the constants.
    unit = torch.eye(width, width + 1, dtype=torch.float64)[:, :, None, None, None]
    mixing: Any = None  # the state of the second pass, with unit vectors `[width + 1, batch, seq, 1]` for outputs

    def unit_vector(index: int, tensor: Tensor) -> Tensor:
        """Return the unit vector of an output at every token of `tensor`, `[width + 1, batch, seq, 1]`."""
        return unit[index].to(tensor.device).expand(-1, *tensor.shape[:2], 1)

    def read(connection: ResidualConnection, original: Any, state: Any, *norm: Any) -> Any:
        nonlocal mixing, num_reads
        coefficients = connection.coefficients(state, *norm)
        result = original(state, *norm)
        if num_reads == 0:  # the state is the embedding
            mixing = unit_vector(0, state)
            if outputs is not None:
                outputs.append(state.double())
        if inputs is not None:
            inputs.append(result[0].double())
        # The next layer may be on another device than the last one.
        mixing = tree_map(lambda tensor: tensor.to(result[0].device), mixing)
        row, mixing = connection.mix(mixing, tree_map(_to_double, coefficients))
        row = row.expand(width + 1, *result[0].shape[:2], row.shape[-1])
        # Every column of a read contains the constant. The last column contains only the constant.
        add_row(row[:-1] - row[-1], row[-1])
        num_reads += 1
        return result

    def write(connection: ResidualConnection, original: Any, state: Any, output: Tensor) -> Any:
        nonlocal mixing
        mixing = original(mixing, unit_vector(num_reads, output))
        if outputs is not None:
            outputs.append(output.double())
        return original(state, output)

    with measuring(model), watched(model, read, write):
        run(model, batch)


def _to_double(value: Any) -> Any:
    return value.double() if isinstance(value, Tensor) and value.is_floating_point() else value


__all__ = [
    "DepthMixing",
    "TokenMixing",
    "depth_mixing",
    "rows_by_token",
    "semiseparable_rank",
    "token_mixing",
]
