"""Callbacks whose measurements stand in the lines that `transformers.Trainer` logs and reports."""

import inspect

from transformers import TrainerCallback
from transformers.trainer_callback import CallbackHandler


class LoggedCallback(TrainerCallback):
    """Adds its [`metrics`] to each line of the log that has the training loss.

    The line is on the screen, in `state.log_history`, and in what `report_to` of the `TrainingArguments` names:
    TensorBoard, Trackio and others. No subclass of `Trainer` is needed.
    """

    def metrics(self) -> dict[str, float]:
        """What is measured since the last call; the same names in all processes, all of which call it."""
        raise NotImplementedError

    def on_train_begin(self, args, state, control, **kwargs):
        _go_first(self)

    def on_log(self, args, state, control, logs=None, **kwargs):
        if "loss" in logs:
            metrics = self.metrics()
            logs |= metrics
            state.log_history[-1] |= metrics  # a copy of the line, made before


def _go_first(callback: TrainerCallback) -> None:
    """Move a callback before the others of the `Trainer` that calls it.

    A `Trainer` puts the callbacks that report before those that it is given, so they would read the line too early; and
    it shows a callback nothing of the others. But the list of all is held by what calls it.
    """
    frame = inspect.currentframe()
    while frame is not None and not isinstance(caller := frame.f_locals.get("self"), CallbackHandler):
        frame = frame.f_back
    if frame is not None and callback in caller.callbacks:
        caller.callbacks.remove(callback)
        caller.callbacks.insert(0, callback)


__all__ = ["LoggedCallback"]
