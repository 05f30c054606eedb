"""The reasons why benchmarks have no result, for `attnres eval`."""

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.markup import escape

from attnres.eval.benchmarks import Benchmark
from attnres.eval.failures import Failures, failure_lines
from attnres.eval.start import find_missing
from attnres.utils.wording import counted


def print_failures(console: Console, failures: Failures, data: Path | None) -> None:
    """Print why benchmarks have no result, one line for each reason.

    Args:
        console: The console to print on.
        failures: The reasons by benchmark.
        data: The folder of the data sets; `None` for the Hub.
    """
    for line in failure_lines(failures, data):
        console.print(f"[red]Left out:[/] {escape(line)}", soft_wrap=True, highlight=False)


def failure_count_error(number: int, total: int) -> RuntimeError:
    """Return the error that ends a command after [`print_failures`] has printed the reasons.

    Args:
        number: The number of benchmarks without a result.
        total: The number of all benchmarks.
    """
    verb = "has" if total == 1 else "have"
    return RuntimeError(f"{number} of {counted(total, 'benchmark')} {verb} no result (see above).")


def stop_without_data(benchmarks: Sequence[Benchmark], data: Path | None, allow_code_execution: bool) -> None:
    """If no benchmark can run, print the reasons and raise RuntimeError.

    Args:
        benchmarks: The benchmarks.
        data: The folder of the data sets; `None` for the Hub.
        allow_code_execution: Whether benchmarks that run generated code may run.
    """
    failures = find_missing(benchmarks, data, allow_code_execution)
    if len(failures) == len(benchmarks):
        print_failures(Console(), failures, data)
        raise failure_count_error(len(failures), len(benchmarks))
