"""The lines and the bar that show the progress of a run on the screen."""

import sys
import time

from tqdm import tqdm
from transformers import TrainerCallback, TrainerState, TrainingArguments

from attnres.utils.progress import Pace, show_duration
from attnres.utils.wording import counted

# A backward pass takes about twice as long as a forward pass.
STEP_PER_EVALUATION = 3
# The number of steps that are timed if the held-out loss is not measured at the start.
TIMED_STEPS = 2


def show_share(share: float) -> str:
    """Format a share. Close to 1, format its distance from 1, which is the part that changes: `1 - 3.4e-05`."""
    return f"{share:.4f}" if share < 0.99 else f"1 - {max(0.0, 1 - share):.1e}"


class Display(TrainerCallback):
    """A callback that shows a line for each log, and the time left: a bar on a terminal, else a line now and then.

    Only the first process shows anything.
    """

    # Key of the log -> its name on the screen, and its format.
    SHOWN = {
        "loss": ("loss", ".4f"),
        "mtp_loss": ("of two tokens ahead", ".4f"),
        "eval_loss": ("held-out loss", ".4f"),
        "learning_rate": ("rate", ".2e"),
        "grad_norm": ("gradient norm", ".2f"),
        "tokens_per_second": ("tokens/s", ",.0f"),
        "model_flop_use": ("FLOP use", ".1%"),
        "expert_max_violation": ("expert overload", ".2f"),
    }

    def __init__(self) -> None:
        self.bar: tqdm | None = None
        self._pace = self._evaluation_pace = Pace(None)
        self._batches: list[float] = []  # when each batch of the evaluation was done
        self._steps: list[float] = []  # when each of the first steps was done
        self._has_estimate = False

    def on_train_begin(self, args, state, control, **kwargs):
        """Open the bar."""
        if state.is_world_process_zero:
            # `disable=None` draws no bar if the error output is not a terminal.
            settings = {"unit": " steps", "dynamic_ncols": True, "disable": None}
            self.bar = tqdm(total=state.max_steps, initial=state.global_step, **settings)
            self._pace = Pace(state.max_steps, state.global_step, "steps")
            self._steps = [time.monotonic()]

    def on_step_end(self, args, state, control, **kwargs):
        """Advance the bar. After the first steps, estimate the time of the run."""
        if self.bar is None:
            return
        self.bar.update(state.global_step - self.bar.n)
        self._steps.append(time.monotonic())
        if not self._has_estimate and len(self._steps) > TIMED_STEPS:
            # Not from the first step, which compiles and fills caches.
            self._estimate(self._steps[-1] - self._steps[-2], 0.0, args, state)
        self._write_pace(self._pace.line(state.global_step))

    def on_prediction_step(self, args, state, control, eval_dataloader, **kwargs):
        """Note the time of a batch of an evaluation."""
        if self.bar is None:
            return
        if not self._batches:
            self._evaluation_pace = Pace(len(eval_dataloader), unit="batches of held-out text")
        self._batches.append(time.monotonic())
        self._write_pace(self._evaluation_pace.line(len(self._batches)))

    def on_evaluate(self, args, state, control, eval_dataloader, **kwargs):
        """Estimate the time of the run from an evaluation, if there is no estimate yet."""
        times, self._batches = self._batches, []
        if self.bar is None or self._has_estimate or len(times) < 2 or state.global_step == state.max_steps:
            return
        # The first batch is left out, as it compiles. The last one is shorter on one process; several processes pad it.
        batch = args.per_device_eval_batch_size
        rows = len(eval_dataloader.dataset) if args.world_size == 1 else batch * len(times)
        row = (times[-1] - times[0]) / (rows - batch)  # seconds of a row
        step = STEP_PER_EVALUATION * args.gradient_accumulation_steps * args.per_device_train_batch_size * row
        self._estimate(step, rows * row, args, state)

    def _estimate(self, step: float, evaluation: float, args: TrainingArguments, state: TrainerState) -> None:
        """Show the time of the steps that are left, from the seconds of a step and of an evaluation."""
        self._has_estimate = True
        steps = state.max_steps - state.global_step
        if not steps:
            return
        # The state counts steps. `args.eval_steps` may be a fraction of the run.
        evaluations = 1 + (0 if args.eval_strategy == "no" else steps // state.eval_steps)
        seconds = steps * step + evaluations * evaluation
        self._write(f"Time: about {show_duration(seconds)} for {counted(steps, 'step')}.")

    def on_log(self, args, state, control, logs, **kwargs):
        """Write a line of the log."""
        if self.bar is None or not {"loss", "eval_loss"} & logs.keys():
            return
        parts = [f"{self.SHOWN[name][0]} {logs[name]:{self.SHOWN[name][1]}}" for name in self.SHOWN if name in logs]
        if "depth_entropy" in logs:
            parts.append(f"depth entropy {show_share(logs['depth_entropy'])}")
        self._write(f"step {state.global_step}: {', '.join(parts)}")

    def _write_pace(self, line: str | None) -> None:
        """Write a line about progress, unless there is a bar."""
        if line and self.bar is not None and self.bar.disable:
            self._write(f"{time.strftime('%H:%M:%S')} {line}")

    def _write(self, line: str) -> None:
        tqdm.write(line, file=sys.stdout)
        sys.stdout.flush()

    def close(self) -> None:
        """Close the bar."""
        if self.bar is not None:
            self.bar.close()


__all__ = ["Display", "show_share"]
