"""Held-out loss as the mean over tokens, whatever the batches and the number of processes.

`transformers.Trainer` averages the means of batches. Where batches have different numbers of labels, as with
conversations, with a shorter last batch, or with the rows that pad the last batch of several processes, its number
depends on `micro_batch_size` and on the number of processes. Here every row of the data counts once, by its tokens.
"""

import math
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from accelerate.utils import gather_object
from datasets import Dataset
from torch import Tensor

from .packing import IGNORED

ROW = "row"


class NumberedRows(torch.utils.data.Dataset):
    """A data set whose rows say their number in `row`, so that a row that two processes see is counted once."""

    def __init__(self, rows: Dataset):
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, number: int) -> dict[str, Any]:
        return self.rows[number] | {ROW: number}


class TokenMean:
    """Sums the loss of rows, and averages over the tokens that all processes have seen."""

    def __init__(self) -> None:
        self._rows: dict[int, tuple[float, int]] = {}

    def add(self, numbers: Tensor, logits: Tensor, labels: Tensor) -> None:
        """Add the rows of a batch.

        Args:
            numbers: The rows' numbers, `[batch]`.
            logits: What the model computed for them, `[batch, seq, vocab]`.
            labels: Token ids, `[batch, seq]`; `-100` is not learned. The logits at a position predict the next label.
        """
        # Row by row: the logits of a whole batch in float32 would take as much memory again as training does.
        for number, row, targets in zip(numbers.tolist(), logits, labels):
            targets = targets[1:].to(row.device)
            loss = F.cross_entropy(row[:-1].float(), targets, reduction="sum", ignore_index=IGNORED)
            self._rows[number] = loss.item(), int((targets != IGNORED).sum())

    def result(self) -> float:
        """Return the mean loss in nats/token over the rows of all processes, which call this together.

        Raises:
            ValueError: No row has a token to predict.
        """
        rows: Mapping[int, tuple[float, int]] = dict(gather_object(list(self._rows.items())))
        tokens = sum(count for _, count in rows.values())
        if not tokens:
            raise ValueError("the held-out data has no token to predict: give other data by `held_out`.")
        return math.fsum(loss for loss, _ in rows.values()) / tokens


__all__ = ["ROW", "NumberedRows", "TokenMean"]
