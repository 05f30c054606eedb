"""Measure the parts, print their tables and store their results, for `python -m benchmarks` and `attnres bench`."""

import warnings
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import MofNCompleteColumn, SpinnerColumn, TextColumn, TimeElapsedColumn

from attnres.analysis.tables import update_tables
from attnres.utils.progress import ProgressBar
from attnres.utils.quiet import quiet_transformers

from . import connections, imports, kda, layers, memory, models, ops, phases, scaling
from .machine import Others, describe
from .report import markdown, open_console, store
from .timing import Setting, keep_freed_memory

PARTS = {
    "ops": ops,
    "phases": phases,
    "models": models,
    "connections": connections,
    "layers": layers,
    "kda": kda,
    "memory": memory,
    "imports": imports,
    "scaling": scaling,
}
HERE = Path(__file__).parent
BUSY = 0.05  # share of the machine that other processes may take before a run is reported as disturbed


def run_bench(parts: Sequence[str], setting: Setting, out: Path | None) -> None:
    """Measure each part, print it, and store it before the next one begins.

    Args:
        parts: names of `PARTS`.
        setting: how to measure.
        out: folder for `{part}.json`, `scaling.png` and a README with the tables. For this folder's `results`, the
            tables go into this folder's README. With `None` nothing is written.
    """
    console = open_console()
    torch.set_num_threads(setting.threads)
    keep_freed_memory()
    about = describe(setting.device)
    note = f"{about['machine'].get('gpu') or about['machine']['processor']}, {setting.threads} threads"
    console.print(f"{note}, torch {about['versions']['torch']}; times by the clock: median [quartiles]")
    for name in parts:
        others = Others()
        rows = collect(name, setting)
        busy = others.share()
        tables = PARTS[name].tables(rows)
        for table in tables.values():
            console.print(table)
        if busy > BUSY:
            console.print(f"Other processes took {busy:.0%} of the processors. Measure again on an idle machine.")
        if out is None:
            continue
        content = about | {"setting": asdict(setting), "others_share": round(busy, 3), "rows": rows}
        store(out / f"{name}.json", content)
        readme = HERE / "README.md" if out.resolve() == HERE / "results" else out / "README.md"
        shown = {key: markdown(table) for key, table in tables.items()}
        if name == "scaling":
            figure = out / "scaling.png"
            scaling.plot(rows, figure)
            link = figure.resolve().relative_to(readme.parent.resolve()).as_posix()
            shown |= {"figure": f"![Time that attention residuals add to prefill, measured and predicted]({link})"}
        update_tables(readme, shown)


def collect(name: str, setting: Setting) -> list[dict]:
    """Measure all rows of a part, with a progress bar on standard error."""
    rows = []
    columns = SpinnerColumn(), TextColumn("{task.description}"), MofNCompleteColumn(), TimeElapsedColumn()
    # The bar is drawn between rows only, because a thread that draws would be measured too.
    console = Console(stderr=True)
    progress = ProgressBar(*columns, console=console, unit="rows", auto_refresh=False, transient=True)
    with progress, quiet_transformers(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        task = progress.add_task(f"{name}: rows", total=None)
        progress.refresh()
        for row in PARTS[name].measure(setting):
            rows.append(row)
            progress.update(task, advance=1, refresh=True)
    return rows
