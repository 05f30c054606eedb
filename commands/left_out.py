"""Messages of `attnres eval` about benchmarks that have no result."""

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.markup import escape

from attnres.eval.benchmarks import Benchmark
from attnres.eval.failures import Failures, failure_lines
from attnres.eval.start import find_missing
from attnres.utils.wording import counted


def tell(console: Console, failures: Failures, data: Path | None) -> None:
    """Print why benchmarks were left out, one line for each reason.

    Args:
        console: the console to print to.
        failures: the benchmarks without a result, with their reasons.
        data: the folder given by `--data`, for the remedies.
    """
    for line in failure_lines(failures, data):
        console.print(f"[red]Left out:[/] {escape(line)}", soft_wrap=True, highlight=False)


def no_result(number: int, total: int) -> RuntimeError:
    """Return the error that ends a command after [`tell`]: `number` of `total` benchmarks have no result."""
    verb = "has" if total == 1 else "have"
    return RuntimeError(f"{number} of {counted(total, 'benchmark')} {verb} no result (see above).")


def stop_without_data(benchmarks: Sequence[Benchmark], data: Path | None, allow_code_execution: bool) -> None:
    """Print the reasons and raise if none of the benchmarks can run.

    Args:
        benchmarks: the benchmarks that were asked for.
        data: the folder given by `--data`.
        allow_code_execution: whether benchmarks may run code that a model has written.

    Raises:
        RuntimeError: no benchmark can run.
    """
    failures = find_missing(benchmarks, data, allow_code_execution)
    if len(failures) == len(benchmarks):
        tell(Console(), failures, data)
        raise no_result(len(failures), len(benchmarks))
