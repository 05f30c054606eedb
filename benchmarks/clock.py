"""A budget of time: parts get shares of it, rows shares of what is left of a part, and at its end everything stops."""

import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class OutOfTime(BaseException):
    """The budget is spent. Nobody on the way takes it for a failure of what was measured."""


class Clock:
    """Counts from when it is made.

    Args:
        seconds: of everything.
        now: what tells the time.
    """

    def __init__(self, seconds: float, now: Callable[[], float] = time.monotonic):
        self._now, self._end = now, now() + seconds
        self._until = self._end

    def left(self) -> float:
        """Seconds left of all."""
        return max(0.0, self._end - self._now())

    def begin_part(self, share: float) -> None:
        """The part that begins may take this share of what is left."""
        self._until = self._now() + share * self.left()

    def row(self, rows_left: int) -> float | None:
        """Seconds for the next of so many rows; `None` if the part is over."""
        left = self._until - self._now()
        return left / rows_left if left > 0 else None

    @contextmanager
    def stops(self) -> Iterator[None]:
        """Raise [`OutOfTime`] in the main thread when nothing is left, whatever it is doing.

        Again every second until somebody takes it: raised while an object is deleted, it goes nowhere.

        Raises:
            OutOfTime: that.
        """

        def stop(number: int, frame: object) -> None:
            raise OutOfTime

        before = signal.signal(signal.SIGALRM, stop)
        signal.setitimer(signal.ITIMER_REAL, max(0.001, self.left()), 1.0)
        try:
            yield
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)
