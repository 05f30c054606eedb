"""Show the progress of long work: a bar on a terminal, and plain lines in a file or pipe.

`rich` writes nothing to a file until the work has ended, so a log would stay empty for minutes.
"""

import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from threading import Event, Thread
from typing import Any

from rich.console import Console
from rich.progress import Progress, ProgressColumn, TaskID
from rich.text import Text

# A line is due once both this many seconds have passed and this share of the work is done since the last line.
LEAST_SECONDS, LEAST_SHARE = 30.0, 0.1
# A tenth of long work may take an hour: a line is due after this many seconds in any case.
MOST_SECONDS = 300.0


def show_duration(seconds: float) -> str:
    """Return a duration in words, rounded like an estimate: `40 s`, `3 min`, `2 h 10 min`, `3 days`."""
    if seconds < 90:
        return f"{max(1, round(seconds))} s"
    minutes = round(seconds / 60)
    if minutes < 90:
        return f"{minutes} min"
    if minutes < 48 * 60:
        hours, rest = divmod(round(minutes, -1), 60)
        return f"{hours} h" + (f" {rest} min" if rest else "")
    return f"{round(minutes / 60 / 24)} days"


class Pace:
    """Decides when a plain line of progress is due, and formats it.

    Args:
        total: The amount of work; `None` where it is not known.
        done: How much was done earlier, as by a run that is resumed. It does not count for the time left.
        unit: The counted things, such as "steps". Without a unit, lines show only the share.
        clock: Returns seconds.
    """

    def __init__(
        self, total: float | None, done: float = 0.0, unit: str = "", clock: Callable[[], float] = time.monotonic
    ):
        self.total, self.unit, self.clock = total, unit, clock
        self._started = self._last = clock()
        self._first = self._last_done = done

    def line(self, done: float) -> str | None:
        """Return the line to print now, such as `60 of 600 steps (10%), about 4 min left`; `None` if none is due.

        Args:
            done: How much of the work is done by now.
        """
        waited = self.clock() - self._last
        if waited < LEAST_SECONDS:
            return None
        if self.total and done - self._last_done < LEAST_SHARE * self.total and waited < MOST_SECONDS:
            return None
        self._last, self._last_done = self.clock(), done
        if not self.total:
            return f"{done:,.0f} {self.unit}".strip()
        share = f"{done / self.total:.0%}"
        parts = [f"{done:,.0f} of {self.total:,.0f} {self.unit} ({share})" if self.unit else share]
        if self._first < done < self.total:
            left = (self.clock() - self._started) * (self.total - done) / (done - self._first)
            parts.append(f"about {show_duration(left)} left")
        return ", ".join(parts)


class ProgressBar(Progress):
    """A `rich.progress.Progress` that, without a terminal to draw on, prints a plain line now and then.

    Lines are printed by the calls that report progress, so that no thread disturbs the timed work.

    Args:
        columns: As for `rich.progress.Progress`; drawn on a terminal only.
        console: Where the bar or the lines go.
        unit: The counted things, for the lines; see [`Pace`].
        options: Other arguments of `rich.progress.Progress`.
    """

    def __init__(self, *columns: str | ProgressColumn, console: Console, unit: str = "", **options: Any):
        self._unit = unit
        self._paces: dict[TaskID, Pace] = {}
        super().__init__(*columns, console=console, disable=not _draws(console), **options)

    def add_task(self, description: str, start: bool = True, total: float | None = 100.0, **fields: Any) -> TaskID:
        """Add a task as `rich.progress.Progress.add_task` does."""
        task = super().add_task(description, start, total, **fields)
        self._paces[task] = Pace(total, unit=self._unit, clock=self.get_time)
        return task

    def update(self, task_id: TaskID, **fields: Any) -> None:
        """Update a task as `rich.progress.Progress.update` does, and print a line if one is due."""
        super().update(task_id, **fields)
        if fields.get("total") is not None:
            self._paces[task_id].total = fields["total"]
        self._print_due_line(task_id)

    def advance(self, task_id: TaskID, advance: float = 1) -> None:
        """Advance a task as `rich.progress.Progress.advance` does, and print a line if one is due."""
        super().advance(task_id, advance)
        self._print_due_line(task_id)

    def _print_due_line(self, task_id: TaskID) -> None:
        if not self.disable:
            return
        task = next(task for task in self.tasks if task.id == task_id)
        if line := self._paces[task_id].line(task.completed):
            print_line(self.console, f"{task.description}: {line}")


def print_line(console: Console, line: str) -> None:
    """Print a line literally, after the time of day if it goes to a file.

    Args:
        console: Where the line goes.
        line: The line.
    """
    clock = "" if _draws(console) else f"{time.strftime('%H:%M:%S')} "
    console.print(Text(f"{clock}{line}"), soft_wrap=True)


@contextmanager
def status(console: Console, message: str) -> Generator[Callable[[str], None]]:
    """Show a message while the block works: beside a spinner on a terminal, as a line every 30 seconds elsewhere.

    Work that ends within [`LEAST_SECONDS`] prints no line, except on a terminal that cannot draw a spinner.

    Args:
        console: Where the message goes.
        message: The message at first.

    Yields:
        A function that changes the message.
    """
    if _draws(console):
        with console.status(Text(message)) as shown:
            yield lambda text: shown.update(Text(text))
        return
    if console.is_terminal:
        print_line(console, message)
    current, ended, began = [message], Event(), time.monotonic()

    def print_lines() -> None:
        while not ended.wait(LEAST_SECONDS):
            print_line(console, f"{current[0]} {show_duration(time.monotonic() - began)} so far")

    # The block may be one long call, so a thread has to print the lines.
    printer = Thread(target=print_lines, daemon=True)
    printer.start()
    try:
        yield lambda text: current.__setitem__(0, text)
    finally:
        ended.set()
        printer.join()


def _draws(console: Console) -> bool:
    """Return whether `rich` can draw a bar on the console."""
    return console.is_interactive or console.is_jupyter  # a dumb terminal is not interactive


__all__ = ["Pace", "ProgressBar", "print_line", "show_duration", "status"]
