"""The table on the first screen of the README: what attention residuals gain and cost, and with what certainty."""

import json
from collections.abc import Sequence
from typing import Any

from . import store
from .costs import WAYS
from .summary import Lead, short
from .tables import markdown

# The experiments of the table: the largest model, the deepest one with three seeds that train alike, the longest run
# for its size, and the mixture of experts. `RESULTS.md` has all.
SHOWN = ("claim-gpu", "claim-cpu", "claim-children-long", "moe-cpu")
# Of `transformers`' backbones without further training; the paper's is its claim for training in a pipeline.
WIDE, PAPER_STEP = ("Llama", "Kimi Linear"), "under 1.04"
NOT_MEASURED, NOT_REPORTED = "not measured", "not reported"
HEAD = (
    *("model", "tokens per parameter", "loss at equal tokens", "loss at equal time", "step, eager", "step, compiled"),
    *("memory", "measured on", "limits"),
)


def table(here: Sequence[Lead], others: Sequence[Lead]) -> str:
    """Tabulate the paper's results, some of the experiments here, and what wide models cost.

    Args:
        here: The leads of the stored runs.
        others: What others report, the paper among them.
    """
    paper = [lead for lead in others if lead.is_paper]
    by_name = {lead.source[1:].partition("]")[0]: lead for lead in here}
    rows = [[*HEAD], _paper_row(paper)]
    rows += [_row(by_name[name]) for name in SHOWN if name in by_name]
    rows += [_wide_row()]
    rows += [["any size, with the present code", "", *[NOT_MEASURED] * (len(HEAD) - 4), "GPUs", ""]]
    return markdown(rows)


def _paper_row(leads: Sequence[Lead]) -> list[str]:
    sizes, losses = sorted(lead.parameters for lead in leads), sorted(lead.difference.mean for lead in leads)
    tokens = sorted(float(lead.per_parameter) for lead in leads)
    model = f"**paper**: {len(leads)} mixtures of experts, {short(sizes[0])} to {short(sizes[-1])} activated"
    shares = f"{tokens[0]:g} to {tokens[-1]:g}"
    difference = f"{losses[-1]:+.3f} to {losses[0]:+.3f}, no interval"
    costs = [f"{PAPER_STEP}, in a pipeline", NOT_REPORTED, NOT_REPORTED]
    return [model, shares, difference, NOT_REPORTED, *costs, "GPUs", "no seeds reported"]


def _row(lead: Lead) -> list[str]:
    way = next((way for way in reversed(WAYS) if way in lead.equal_time), None)
    time = f"{lead.equal_time[way].describe(2)} ({way})" if way else NOT_MEASURED
    steps = [f"{lead.costs[way]:.2f}" if way in lead.costs else NOT_MEASURED for way in WAYS]
    memory = NOT_MEASURED if lead.memory is None else f"{lead.memory:.2f}"
    model = f"{short(lead.parameters)}, {lead.sublayers // 2} layers of d = {lead.width}"
    model += ", a mixture of experts" * lead.is_moe
    loss = f"{lead.difference.describe(3)}, n = {lead.seeds}"
    return [model, lead.per_parameter, loss, time, *steps, memory, lead.device or "a CPU", lead.limits]


def _wide_row() -> list[str]:
    """Return the costs of Block at d = 1024, whose training steps `benchmarks` measured without training the models.

    The last cell has the same ratio of two equal standard models, which is what the measurement cannot tell from 1.
    """
    steps = [row["ratios"] for row in _blocks("models") if row["workload"] == "training step"]
    ours, again = ([of[f"{name} / standard"]["median"] for of in steps] for name in ("ours", "standard again"))
    memory = [row["ratios"]["ours / standard, step"] for row in _blocks("memory")]
    model = f"{' and '.join(WIDE)} of d = 1024, not trained"
    costs = [_range(ours), NOT_MEASURED, _range(memory)]
    limits = f"two equal standard models: {_range(again)}"
    return [model, "", NOT_MEASURED, NOT_MEASURED, *costs, "2 cores of a CPU", limits]


def _blocks(name: str) -> list[dict[str, Any]]:
    """Return the rows of a benchmark that have Block AttnRes in a wide model."""
    return [row for row in _benchmark(name)["rows"] if row["model"] in WIDE and row["connection"].startswith("Block")]


def _range(values: Sequence[float]) -> str:
    return " to ".join(dict.fromkeys(f"{value:.2f}" for value in (min(values), max(values))))


def _benchmark(name: str) -> dict[str, Any]:
    path = store.ROOT / "benchmarks" / "results" / f"{name}.json"
    return json.loads(path.read_text(encoding="utf-8"))
