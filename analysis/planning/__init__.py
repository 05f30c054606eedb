"""Plan how a model is divided among devices, before it runs: memory, communication and time of each layout.

Memory is counted by running the model on tensors without data. Times are estimates from the rates of a device.
"""

from .layouts import OPTIMIZERS, Costs, Device, Job, Layout, Plan
from .overhead import Pipeline, overhead, simulate_step
from .schedules import SCHEDULES, Simulation, paper_sends, rank_actions, sent_bytes, simulate
from .search import Search, devices_that_fit, search
from .tracing import Batch, Trace, trace

__all__ = [
    "OPTIMIZERS",
    "SCHEDULES",
    "Batch",
    "Costs",
    "Device",
    "Job",
    "Layout",
    "Pipeline",
    "Plan",
    "Search",
    "Simulation",
    "Trace",
    "devices_that_fit",
    "overhead",
    "paper_sends",
    "rank_actions",
    "search",
    "sent_bytes",
    "simulate",
    "simulate_step",
    "trace",
]
