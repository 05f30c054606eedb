"""Measure the parts, print their tables and store their results, for `python -m benchmarks`."""

import json
import tempfile
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from importlib import import_module
from pathlib import Path
from types import ModuleType

import torch

from attnres.analysis.tables import update_tables
from attnres.utils.progress import show_duration
from attnres.utils.quiet import quiet_transformers

from .command import RESULTS
from .machine import Others, describe
from .stored import store
from .timing import Setting, keep_freed_memory

BUSY = 0.05  # share of the machine that other processes may take before a run is reported as disturbed


def run_bench(parts: Sequence[str], setting: Setting, out: Path | None) -> None:
    """Measure each part, print its rows as they are measured and its tables, and store it before the next one begins.

    A run that is stopped or fails stores the rows that it has, as `{part}.json`, or `{part}.stopped.json` beside whole
    results. One of several parts that needs a package which is not installed is left out with a message.

    Args:
        parts: names of `command.PARTS`.
        setting: how to measure.
        out: folder for `{part}.json` and a README with the tables. The tables of `RESULTS` go into the README beside
            it. With `None` nothing is written.

    Raises:
        ModuleNotFoundError: the only part needs a package that is not installed.
        OSError: `out` cannot be written to.
    """
    if out is not None:  # before minutes are spent on rows that could not be stored
        out.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=out).close()
    torch.set_num_threads(setting.threads)
    keep_freed_memory()
    about = describe(setting.device)
    note = f"{about['machine'].get('gpu') or about['machine']['processor']}, {setting.threads} threads"
    print(f"{note}, torch {about['versions']['torch']}; times by the clock: median [quartiles]", flush=True)
    for name in parts:
        print(_announce(name, setting), flush=True)
        others, rows = Others(), []
        try:
            for row in measure(name, setting):
                rows.append(row)
                print(_line(row), flush=True)
        except BaseException as error:  # signals too, as KeyboardInterrupt and SystemExit
            if isinstance(error, ModuleNotFoundError) and not rows and len(parts) > 1:
                print(f"{name} is left out: {error}", flush=True)
                continue
            if rows and out is not None:
                path = out / f"{name}.json"
                # The results of a whole run stay.
                path = path.with_suffix(".stopped.json") if path.exists() else path
                store(path, _content(about, setting, others.share(), rows))
                print(f"Stopped. Rows measured so far: {len(rows)}, stored in {path}", flush=True)
            raise
        busy = others.share()
        if out is not None:
            store(out / f"{name}.json", _content(about, setting, busy, rows))
        tables = _part(name).tables(rows)
        for table in tables.values():
            print(table, end="\n\n", flush=True)
        if busy > BUSY:
            print(f"Other processes took {busy:.0%} of the processors. Measure again on an idle machine.", flush=True)
        if out is None:
            continue
        readme = RESULTS.with_name("README.md") if out.resolve() == RESULTS else out / "README.md"
        update_tables(readme, tables)


def _part(name: str) -> ModuleType:
    """Import a part, which has `measure` and `tables`."""
    return import_module(f"{__package__}.{name}")


def measure(name: str, setting: Setting) -> Iterator[dict]:
    """Yield the rows of a part as they are measured, without warnings."""
    with quiet_transformers(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield from _part(name).measure(setting)


def expected(name: str, setting: Setting) -> tuple[int, float] | None:
    """Estimate a part by its stored results.

    Args:
        name: name of the part.
        setting: how to measure.

    Returns:
        The number of rows, and the seconds that the timed calls take on the machine of the stored results; `None`
        without stored results.
    """
    path = RESULTS / f"{name}.json"
    if setting.quick or not path.exists():
        return None
    stored = json.loads(path.read_text())
    times = [times for row in stored["rows"] for times in row.get("seconds", {}).values()]
    # Rows that were measured together have the same times of a way that they share.
    seconds = sum({(*way["wall"],): sum(way["wall"]) * way.get("calls", 1) for way in times}.values())
    return len(stored["rows"]), seconds * setting.repeats / stored["setting"]["repeats"]


def _announce(name: str, setting: Setting) -> str:
    """Return the line to print before a part."""
    if setting.quick:
        return f"{name}: tiny sizes"
    estimate = expected(name, setting)
    if estimate is None:
        return f"{name}: no results are stored that tell how long it takes"
    rows, seconds = estimate
    time = f", at least {show_duration(seconds)} on a machine like that of the stored results" if seconds else ""
    return f"{name}: {rows} rows{time}"


def _line(row: Mapping) -> str:
    """Return a row in one line: what was measured, and the ratios."""
    names = [
        value if isinstance(value, str) else f"{key} {value:g}"
        for key, value in row.items()
        if isinstance(value, str | int | float)
    ]
    ratios = {key: value["median"] if isinstance(value, Mapping) else value for key, value in row["ratios"].items()}
    return f"{', '.join(names)}: {', '.join(f'{key} {value:.3f}' for key, value in ratios.items())}".removeprefix(": ")


def _content(about: Mapping, setting: Setting, others_share: float, rows: Sequence[Mapping]) -> dict:
    """Return the content of a part's file."""
    return {**about, "setting": asdict(setting), "others_share": round(others_share, 3), "rows": rows}
