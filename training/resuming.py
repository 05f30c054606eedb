"""A `transformers.Trainer` that takes no step beyond its last one when it is resumed there."""

from collections.abc import Iterator

import torch
from transformers import Trainer


class ResumableTrainer(Trainer):
    """A `Trainer` whose `train(resume_from_checkpoint=...)` ends at once where all steps are made.

    `Trainer` checks whether training is over only after a step. Resumed from its last checkpoint it makes one more,
    with other weights, and the checkpoint of that step takes the place of an older one.
    """

    def get_batch_samples(
        self, epoch_iterator: Iterator, num_batches: int, device: torch.device
    ) -> tuple[list, torch.Tensor | int | None]:
        if self.state.global_step >= self.state.max_steps:
            self.control.should_training_stop = True
            return [], None
        return super().get_batch_samples(epoch_iterator, num_batches, device)


__all__ = ["ResumableTrainer"]
