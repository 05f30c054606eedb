"""Held-out loss as the mean over tokens, whatever the size of batches and the number of processes.

`transformers.Trainer` averages the means of batches. That number depends on `micro_batch_size` and on the number of
processes if batches have different numbers of labels: with conversations, with a shorter last batch, or with the rows
that pad the last batch of several processes. Here each row of the data counts once, weighted by its tokens.
"""

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from accelerate.utils import gather_object
from torch import Tensor

from .data.packing import IGNORED

if TYPE_CHECKING:
    from datasets import Dataset

ROW = "row"  # the key of a row's number in the data set


class NumberedRows(torch.utils.data.Dataset):
    """A data set that adds to each row its number, so that a row that two processes evaluate counts once.

    Args:
        rows: The data set.
    """

    def __init__(self, rows: "Dataset"):
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, number: int) -> dict[str, Any]:
        return self.rows[number] | {ROW: number}


class TokenMean:
    """The sums from which the mean loss over the tokens of all processes is computed."""

    def __init__(self) -> None:
        self._rows: dict[int, tuple[float, int]] = {}  # number -> sum of the loss, count of tokens

    def add(self, numbers: Tensor, logits: Tensor, labels: Tensor) -> float:
        """Add the rows of a batch, and return the sum of their losses.

        Args:
            numbers: The rows' numbers, `[batch]`.
            logits: The model's logits, `[batch, seq, vocab]`. The logits at a position predict the next label.
            labels: Token ids, `[batch, seq]`. `-100` is ignored.

        Returns:
            The sum over the tokens of the batch.
        """
        total = 0.0
        # Row by row, since the logits of a whole batch in float32 would take as much memory again as training does.
        for number, row, targets in zip(numbers.tolist(), logits, labels):
            targets = targets[1:].to(row.device)
            loss = F.cross_entropy(row[:-1].float(), targets, reduction="sum", ignore_index=IGNORED)
            self._rows[number] = loss.item(), int((targets != IGNORED).sum())
            total += self._rows[number][0]
        return total

    def result(self) -> float:
        """Return the mean loss in nats/token over the rows of all processes. All processes call it together.

        Raises:
            ValueError: No row has a token to predict.
        """
        rows: Mapping[int, tuple[float, int]] = dict(gather_object(list(self._rows.items())))
        tokens = sum(count for _, count in rows.values())
        if not tokens:
            raise ValueError("the held-out data has no token to predict: give other data by `held_out`.")
        return math.fsum(loss for loss, _ in rows.values()) / tokens


__all__ = ["ROW", "NumberedRows", "TokenMean"]
