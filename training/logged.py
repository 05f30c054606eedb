"""The base of callbacks that add measurements to the lines that `transformers.Trainer` logs and reports."""

import inspect

from transformers import TrainerCallback
from transformers.trainer_callback import CallbackHandler


class LoggedCallback(TrainerCallback):
    """A callback that adds its [`metrics`] to each line of the log with the training loss.

    The line appears on the screen, in `state.log_history`, and in each reporter that `report_to` of the
    `TrainingArguments` names: TensorBoard, Trackio and others. It works with any `Trainer`, without a subclass.
    """

    def metrics(self) -> dict[str, float]:
        """Return the measurements since the last call, by name.

        All processes call it together, and return the same names.
        """
        raise NotImplementedError

    def on_train_begin(self, args, state, control, **kwargs):
        """Take the place before the reporters, so that they see the line with the measurements."""
        _move_first(self)

    def on_log(self, args, state, control, logs: dict[str, float], **kwargs):
        """Add the measurements to a line with the training loss."""
        if "loss" in logs:
            metrics = self.metrics()
            logs |= metrics
            state.log_history[-1] |= metrics  # `Trainer` has put a copy of the line there


def _move_first(callback: TrainerCallback) -> None:
    """Move a callback before the others of the `Trainer` that calls it.

    A `Trainer` calls its reporters before the callbacks that its user gives it, and all of them read the same line. So
    the measurements have to be in the line before the first reporter is called.
    """
    # Neither the constructor of `Trainer` nor `add_callback` takes a position, and no event passes the trainer or its
    # list of callbacks to a callback. The list can be reached only through the `CallbackHandler` that is calling now.
    # The alternative is a subclass of `Trainer`, which users of other trainers (such as TRL's) could not use.
    frame = inspect.currentframe()
    while frame is not None:
        caller = frame.f_locals.get("self")
        if isinstance(caller, CallbackHandler):
            # It is iterating over this list. Moving the current item to the front skips and repeats no other.
            if callback in caller.callbacks:
                caller.callbacks.remove(callback)
                caller.callbacks.insert(0, callback)
            return
        frame = frame.f_back


__all__ = ["LoggedCallback"]
