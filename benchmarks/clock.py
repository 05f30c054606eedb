"""A budget of time for a benchmark run.

Parts get shares of the budget, rows get shares of what is left of their part, and at the end everything stops.
"""

import signal
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager


class OutOfTime(BaseException):
    """The budget is spent.

    A `BaseException`, so that no `except Exception` around a measurement takes it for a failure of that measurement.
    """


class Clock:
    """A budget of seconds that starts when the instance is made.

    Args:
        seconds: the whole budget.
        now: returns the current time in seconds.
    """

    def __init__(self, seconds: float, now: Callable[[], float] = time.monotonic):
        self._now, self._end = now, now() + seconds
        self._until = self._end

    def left(self) -> float:
        """Return the seconds that are left of the whole budget."""
        return max(0.0, self._end - self._now())

    def begin_part(self, share: float) -> None:
        """Begin a part that may take this share, from 0 to 1, of the time left."""
        self._until = self._now() + share * self.left()

    def row(self, rows_left: float) -> float | None:
        """Return the seconds for the next row if `rows_left` rows share the part, or `None` if the part is over."""
        left = self._until - self._now()
        return left / rows_left if left > 0 else None

    @contextmanager
    def stops(self) -> Generator[None]:
        """Interrupt the code inside the `with` block when the budget is spent.

        It works in the main thread only, because Python handles signals there.

        Raises:
            OutOfTime: the budget is spent.
        """

        def stop(number: int, frame: object) -> None:
            raise OutOfTime

        # The signal repeats every second, because Python drops an exception that is raised while it deletes an object.
        before = signal.signal(signal.SIGALRM, stop)
        signal.setitimer(signal.ITIMER_REAL, max(0.001, self.left()), 1.0)
        try:
            yield
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)
