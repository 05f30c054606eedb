"""The losses that `attnres demo` measured, in a table.

`demo.json` has fields of the `results.json` that it wrote. `analysis/images/loss_curves.png` is the figure of that run.
"""

import json
from pathlib import Path
from typing import Any

from attnres.utils.intervals import Interval

from .tables import markdown

STORED = Path(__file__).with_name("demo.json")


def results() -> dict[str, Any]:
    """Return the stored results of the demo."""
    return json.loads(STORED.read_text(encoding="utf-8"))


def table() -> str:
    """Tabulate the held-out losses of both models by seed, and their difference with its interval."""
    stored = results()
    losses, by_seed = stored["held_out_loss"], stored["difference"]["by_seed"]
    rows = [["seed", *losses, "difference [95% interval]"]]
    for seed, *both, difference in zip(stored["seeds"], *losses.values(), by_seed):
        rows.append([str(seed), *(f"{loss:.2f}" for loss in both), f"{difference:+.2f}"])
    means = (f"{sum(of) / len(of):.2f}" for of in losses.values())
    return markdown([*rows, ["mean", *means, Interval.of(by_seed).describe(2)]])
