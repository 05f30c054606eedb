"""Plan how a model is sharded among devices, before it runs: memory, communication and time of each layout.

Memory is counted by running the model on tensors without data. Times are estimates from the rates of a device.

From a configuration to a row of the table, file by file: `building` makes the model without data; `weights` counts its
parameters, and `tracing` the memory of a pass; `costs` keeps both; `training` and `serving` plan one layout; `search`
plans all, and `engines` tells which of them this package runs. `schedules` and `overhead` simulate pipelines.
"""

from .building import Batch
from .costs import Costs
from .engines import missing_engine
from .jobs import OPTIMIZERS, Device, Job, Layout, Plan
from .overhead import SimulatedPipeline, overhead, simulate_step
from .schedules import SCHEDULES, Simulation, rank_actions, sent_bytes, simulate
from .search import Search, devices_that_fit, plan_layout, search
from .traces import Trace
from .tracing import trace

__all__ = [
    "OPTIMIZERS",
    "SCHEDULES",
    "Batch",
    "Costs",
    "Device",
    "Job",
    "Layout",
    "SimulatedPipeline",
    "Plan",
    "Search",
    "Simulation",
    "Trace",
    "devices_that_fit",
    "missing_engine",
    "overhead",
    "plan_layout",
    "rank_actions",
    "search",
    "sent_bytes",
    "simulate",
    "simulate_step",
    "trace",
]
