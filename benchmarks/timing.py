"""Measure times that can be compared: all ways take turns in one process, and ratios are taken within a turn.

A way is a function without arguments that does one of the things to compare.

    A B C A B C ...        ratio of A to B = median over repeats r of A_r / B_r

A disturbance of the machine that lasts for a while slows neighbours alike, and cancels in the ratio.
"""

import ctypes
import gc
import math
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from statistics import median, quantiles

import torch

Ways = Mapping[str, Callable[[], object]]
MOST_CALLS = 1000
LEAST_REPEATS = 3


@dataclass(frozen=True)
class Setting:
    """Settings that all parts of the benchmark share."""

    threads: int = 2  # of PyTorch, on a CPU
    repeats: int = 5  # times that all ways take their turn
    quick: bool = False  # tiny sizes, which show only that everything runs
    device: str = "cpu"


@dataclass
class Times:
    """Seconds per call of one way, one value per repeat: by the clock, and of the processor over all threads."""

    calls: int  # calls per repeat
    wall: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)


@dataclass(frozen=True)
class Ratio:
    """Median and quartiles of ratios."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, numerators: Sequence[float], denominators: Sequence[float]) -> "Ratio":
        """Return the median and quartiles of the ratios of two ways.

        Args:
            numerators: one value per repeat.
            denominators: one value per repeat, in the same order.

        Raises:
            ValueError: the numbers of values differ, or there are no values.
        """
        ratios = [a / b for a, b in zip(numerators, denominators, strict=True)]
        if len(ratios) == 1:
            return cls(*ratios * 3)
        low, _, high = quantiles(ratios, n=4, method="inclusive")
        return cls(median(ratios), low, high)

    def __str__(self) -> str:
        return f"{self.median:.3f} [{self.low:.3f}, {self.high:.3f}]"


def interleave(
    ways: Ways,
    setting: Setting,
    *,
    calls: int | None = None,
    least_seconds: float = 0.01,
    most_seconds: float = math.inf,
) -> dict[str, Times]:
    """Run each way in turn, `setting.repeats` times, after a warm-up of each. Each repeat starts with another way.

    Args:
        ways: functions to measure, by name.
        setting: number of repeats and the device.
        calls: calls of a way per repeat; by default as many as take `least_seconds`, and at least one.
        least_seconds: the time that the calls of a way in a repeat should take.
        most_seconds: the time after which no repeat begins, except the first three.

    Returns:
        The times of each way, in the order of the repeats.
    """
    times, begin = {}, time.monotonic()
    for name, way in ways.items():
        seconds, _ = _sample(way, 1, setting.device)
        if not calls:  # time it again, because the first call may compile
            seconds, _ = _sample(way, 1, setting.device)
        times[name] = Times(calls or min(MOST_CALLS, math.ceil(least_seconds / seconds)))
    with _collected_between() as collect:
        for repeat in range(setting.repeats):
            if repeat >= LEAST_REPEATS and time.monotonic() - begin > most_seconds:
                break
            collect()
            first = repeat % len(ways)
            for name in [*ways][first:] + [*ways][:first]:
                wall, cpu = _sample(ways[name], times[name].calls, setting.device)
                times[name].wall.append(wall)
                times[name].cpu.append(cpu)
    return times


def compare(times: Mapping[str, Times], pairs: Mapping[str, tuple[str, str]]) -> dict[str, dict]:
    """Return the times and ratios to store in a row.

    Args:
        times: the times of each way.
        pairs: name of a ratio -> its two ways, numerator first. A pair is left out if one of its ways has no times.

    Returns:
        All times, and the ratios by the clock and of the processor.
    """
    pairs = {name: pair for name, pair in pairs.items() if times.keys() >= set(pair)}
    return {
        "ratios": {name: asdict(Ratio.of(times[a].wall, times[b].wall)) for name, (a, b) in pairs.items()},
        "processor_ratios": {name: asdict(Ratio.of(times[a].cpu, times[b].cpu)) for name, (a, b) in pairs.items()},
        "seconds": {name: asdict(value) | {"median": median(value.wall)} for name, value in times.items()},
    }


def keep_freed_memory() -> None:
    """Make glibc keep freed memory, like the allocators that PyTorch recommends (jemalloc, tcmalloc).

    By default glibc gives memory back to the system at the end of one way, and the next way pays for its pages again.
    That takes up to a tenth of a pass, depending by chance on the last block of the heap.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # only glibc has it
    if mallopt is not None:
        trim_threshold, mmap_max = -1, -4  # M_TRIM_THRESHOLD and M_MMAP_MAX of <malloc.h>
        mallopt(trim_threshold, 2**31 - 1)
        mallopt(mmap_max, 0)


def _sample(way: Callable[[], object], calls: int, device: str) -> tuple[float, float]:
    """Return the seconds per call, by the clock (on a GPU, between events) and of the processor."""
    events = [torch.cuda.Event(enable_timing=True) for _ in range(0 if device == "cpu" else 2)]
    if events:
        torch.cuda.synchronize()
        events[0].record()
    cpu, wall = time.process_time(), time.perf_counter()
    for _ in range(calls):
        way()
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    if events:
        events[1].record()
        torch.cuda.synchronize()
        wall = events[0].elapsed_time(events[1]) / 1000
    return wall / calls, cpu / calls


@contextmanager
def _collected_between() -> Generator[Callable[[], object]]:
    """Yield a function that collects garbage. Inside the `with` block Python does not do so by itself.

    Objects from before are frozen, so that a collection is quick.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    gc.collect()
    gc.freeze()
    try:
        yield gc.collect
    finally:
        gc.unfreeze()
        if was_enabled:
            gc.enable()
