"""Callbacks that stop a run after SIGTERM, and that let a resumed run log, evaluate and save at other intervals."""

import signal
from types import FrameType
from typing import Any

import torch
from transformers import Trainer, TrainerCallback


class StopOnSignal(TrainerCallback):
    """A callback that, on SIGTERM to any of the processes, saves a checkpoint after the step and ends training.

    Args:
        trainer: The trainer that it is a callback of.

    Attributes:
        received: Whether a process has received SIGTERM and, since all processes know of it, the run stops. A signal
            after the last step changes nothing, as the run ends anyway.
    """

    def __init__(self, trainer: Trainer):
        self.trainer = trainer
        self.received = self._is_signalled = False
        self._previous_handler: Any = None

    def on_train_begin(self, args, state, control, **kwargs):
        """Begin to listen for SIGTERM."""
        self._previous_handler = signal.signal(signal.SIGTERM, self._receive)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        self._is_signalled = True

    def on_step_end(self, args, state, control, **kwargs):
        """Save and stop if a process has received SIGTERM."""
        # All processes have to stop after the same step, whichever of them has received the signal.
        flag = torch.tensor(int(self._is_signalled), device=args.device)
        self.received = bool(self.trainer.accelerator.reduce(flag, "sum"))
        if self.received:
            control.should_save = control.should_training_stop = True

    def on_epoch_end(self, args, state, control, **kwargs):
        """Keep the checkpoint that a stopped run resumes from."""
        if self.received:
            # With `save_total_limit` 1 and `load_best_model_at_end`, `Trainer` ends by removing all but the best.
            args.save_total_limit = None

    def restore_handler(self) -> None:
        """Restore the handler of SIGTERM that was there before training, if training has begun."""
        if self._previous_handler is not None:
            signal.signal(signal.SIGTERM, self._previous_handler)
            self._previous_handler = None


class Intervals(TrainerCallback):
    """A callback that logs, evaluates and saves by the settings of this run, also where an earlier run had others.

    `Trainer` goes on by the intervals that a checkpoint has stored.
    """

    def on_train_begin(self, args, state, control, **kwargs):
        """Set the intervals."""
        state.compute_steps(args, state.max_steps)


__all__ = ["Intervals", "StopOnSignal"]
