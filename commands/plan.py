"""`attnres plan`: print the layouts of a model on many devices that fit, the best first."""

import json
from collections.abc import Callable, Iterable
from dataclasses import asdict

from rich.console import Console
from rich.table import Table

from attnres import ResidualConfig
from attnres.checkpoints.source import ModelSource
from attnres.conversion.family import member_config
from attnres.planning import (
    Costs,
    Device,
    Job,
    Layout,
    Plan,
    Search,
    devices_that_fit,
    search,
)
from attnres.utils.errors import about
from attnres.utils.progress import status
from attnres.utils.quiet import quiet_transformers
from attnres.utils.wording import counted


def run_plan(
    source: ModelSource,
    make_job: Callable[[int | None], Job],
    device: Device,
    *,
    shown: int,
    runnable: bool,
    as_json: bool,
) -> None:
    """Print the layouts of a job that fit.

    Args:
        source: The model.
        make_job: A function of the longest context of the model, `None` if it has no limit, that returns the job.
        device: The devices.
        shown: The largest number of layouts in the table.
        runnable: Whether to plan only layouts that this package runs.
        as_json: Whether to print JSON, with all layouts.

    Raises:
        ValueError: The model cannot be planned; no layout is possible, or none fits.
    """
    config = read_config(source)
    job = make_job(getattr(config, "max_position_embeddings", None))
    costs = Costs(config, job)
    with status(Console(stderr=True), f"Tracing {source.name}"):
        with about(source.name):
            # Numbers that no model can have show here, and the traces are kept.
            costs.trace(1)
        result = search(costs, device, runnable=runnable)
        if not result.fitting:
            raise ValueError(explain_miss(result, costs, device, runnable=runnable))
    if as_json:
        plans = records(result)
        print(json.dumps({"source": source.name, "job": asdict(job), "device": asdict(device), "plans": plans}))
        return
    # A row is one line, also where the terminal is narrow or there is none.
    console = Console(width=max(180, Console().width))
    printed = result.fitting[:shown]
    console.print(plan_table(printed))
    missing = dict.fromkeys(plan.missing_engine for plan in printed)  # in the order of the table
    for reason in filter(None, missing):
        console.print(f"Does not run here: {reason}.", highlight=False)
    if getattr(config, "vision_config", None) is not None:
        console.print("The plan is of the text model alone, as it is trained by default: no vision part is counted.")
    console.print(
        f"{counted(len(result.fitting), 'layout')} {'fits' if len(result.fitting) == 1 else 'fit'} into "
        f"{gigabytes(result.limit)} GB of {gigabytes(device.memory)} GB. "
        "Memory is counted; times are estimates.",
        highlight=False,
    )


def read_config(source: ModelSource) -> ResidualConfig:
    """Return the family's configuration of a model.

    Raises:
        ValueError: There is no such model, or the family does not have its backbone.
    """
    with quiet_transformers(), about(source.name):
        try:
            config = source.config()
        except ValueError as error:
            if "trust_remote_code" not in str(error):
                raise
            raise ValueError(f"{source.name} needs code that comes with the model, which is not run here.") from error
    return config if isinstance(config, ResidualConfig) else member_config(config)


def plan_table(plans: Iterable[Plan]) -> Table:
    """Return a table of plans, one a row."""
    table = Table(box=None, pad_edge=False)
    for name in COLUMNS:
        table.add_column(name, justify="left" if name in ("memory is mostly", "time is mostly") else "right")
    for plan in plans:
        table.add_row(*table_row(plan))
    return table


COLUMNS = (
    *("data x tensor x pipeline", "virtual", "expert", "shards", "gathered", "recompute", "GB", "memory is mostly"),
    *("GB sent", "seconds", "tokens/s", "time is mostly", "runs here"),
)


def table_row(plan: Plan) -> list[str]:
    """Return the cells of a plan's row under [`COLUMNS`]."""
    layout = plan.layout
    part, slowest = plan.dominant_memory, plan.dominant_time
    return [
        f"{layout.data} x {layout.tensor} x {layout.pipeline}",
        *map(str, (layout.virtual, layout.expert, layout.shard)),
        gathered(layout),
        "yes" if layout.checkpointing else "no",
        gigabytes(plan.total_memory),
        f"{part} ({plan.memory[part] / plan.total_memory:.0%})",
        gigabytes(sum(plan.sent.values())),
        f"{plan.total_seconds:.3g}",
        f"{plan.tokens_per_second:,.0f}",
        slowest,
        "yes" if plan.missing_engine is None else "no",
    ]


def gathered(layout: Layout) -> str:
    """Return how often the shards of weights are gathered, in words."""
    return "per layer" if layout.reshard else "per step" if layout.shard > 1 else "-"


def records(result: Search) -> list[dict]:
    """Return all plans that fit as values of JSON."""
    return [asdict(plan) | {"total_memory": plan.total_memory} for plan in result.fitting]


def explain_miss(result: Search, costs: Costs, device: Device, *, runnable: bool = False) -> str:
    """Explain in one line why no layout fits, and name remedies."""
    nearest, job = result.nearest, costs.job
    layout, part = nearest.layout, nearest.dominant_memory
    names = ("data", "tensor", "pipeline", "expert", "shard")
    sizes = ", ".join(f"{name} {getattr(layout, name)}" for name in names)
    text = (
        f"No layout of {job.devices} devices fits: the nearest ({sizes}) needs {gigabytes(nearest.total_memory)} GB "
        f"of {gigabytes(result.limit)} GB, mostly {part} ({gigabytes(nearest.memory[part])} GB)."
    )
    enough = devices_that_fit(costs, device, runnable=runnable)
    helps = [f"{enough} devices would do"] if enough else []
    if part in ("activations", "block states", "caches"):
        helps.append("a shorter --context would help")
    elif job.training and job.optimizer != "muon":
        helps.append("--optimizer muon needs less")
    remedy = ", and ".join(helps) or "give devices with more --memory"
    return f"{text} {remedy[0].upper()}{remedy[1:]}."


def gigabytes(number: float) -> str:
    """Return bytes in GB with three digits."""
    value = number / 1e9
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


__all__ = ["COLUMNS", "explain_miss", "plan_table", "read_config", "records", "run_plan", "table_row"]
