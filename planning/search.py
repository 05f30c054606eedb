"""Find the layouts of a job that fit, the best first."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from .costs import Costs
from .engines import missing_engine
from .jobs import Device, Job, Layout, Plan
from .serving import plan_serving
from .training import plan_training

VIRTUAL = (1, 2, 4)  # numbers of stages on each rank of a pipeline
ALIKE = 1.05  # ratio of speeds that estimates do not tell apart


@dataclass(frozen=True)
class Search:
    """The result of a search.

    Attributes:
        fitting: Plans that fit, the best first; see [`search`].
        nearest: The plan that needs the least memory, whether it fits or not.
        limit: Bytes that a plan may need.
    """

    fitting: tuple[Plan, ...]
    nearest: Plan
    limit: float


def plan_layout(costs: Costs, layout: Layout, device: Device) -> Plan:
    """Return the costs of one layout for the job of `costs`.

    Args:
        costs: The costs of the model.
        layout: The layout.
        device: The devices.
    """
    return (plan_training if costs.job.training else plan_serving)(costs, layout, device)


def layouts(costs: Costs, job: Job, device: Device) -> Iterator[Layout]:
    """Yield the layouts that the numbers of devices, layers, experts and sequences allow.

    Tensor parallelism stays within a node. Weights are whole on every device, or sharded within a node or among all
    groups of data. Numbers of stages on a rank are those of `VIRTUAL`.

    Args:
        costs: The costs of the model.
        job: The job, with its number of devices and of sequences.
        device: The devices, of which `per_node` share a node.
    """
    experts, _ = costs.experts
    # Adapters are not cut as matrices are.
    has_tensor = job.lora is None and any(weight.is_sharded for weight in costs.weights)
    for tensor in _divisors(job.devices):
        if tensor > 1 and (not has_tensor or tensor > device.per_node or not _can_shard(costs, tensor)):
            continue
        for pipeline in _divisors(job.devices // tensor):
            data = job.devices // tensor // pipeline
            if pipeline > costs.num_layers or data > job.sequences or (job.training and job.sequences % data):
                continue
            # 1F1B needs a micro-batch for each stage.
            if job.training and job.sequences // data < pipeline:
                continue
            node = device.per_node // tensor
            shards = {1, data, node if data % node == 0 else 1} if job.training else {data}
            for shard in sorted(shards):
                for expert in _divisors(shard * tensor):
                    if expert > 1 and (expert % tensor or experts % expert):
                        continue
                    if job.training:
                        layout = Layout(data, tensor, pipeline, expert, shard)
                        yield from _choices(layout, job.sequences // data, costs.num_layers)
                    else:
                        # Groups of data share only experts.
                        yield Layout(data, tensor, pipeline, expert)


def _choices(layout: Layout, microbatches: int, layers: int) -> Iterator[Layout]:
    """Yield the ways to train with a layout."""
    for virtual in VIRTUAL:
        # Interleaved stages need whole rounds of micro-batches.
        if virtual > 1 and (layout.pipeline == 1 or microbatches % layout.pipeline):
            continue
        if layout.pipeline * virtual > layers:
            continue
        for reshard in (False, True) if layout.shard > 1 else (False,):
            for checkpointing in (False, True):
                yield replace(layout, virtual=virtual, reshard=reshard, checkpointing=checkpointing)


def search(costs: Costs, device: Device, job: Job | None = None, *, runnable: bool = False) -> Search:
    """Plan all layouts of a job.

    The fastest come first. Speeds within 5% count as equal: then layouts with fewer stages come first, next those with
    less tensor parallelism, less expert parallelism, more speed and less memory.

    Args:
        costs: The costs of the model.
        device: The devices.
        job: The job; by default that of `costs`. It may have another number of devices.
        runnable: Whether to plan only layouts that this package runs; see [`missing_engine`].

    Raises:
        ValueError: No layout is possible, whatever the memory.
    """
    job = job or costs.job
    possible = layouts(costs, job, device)
    if runnable:
        possible = (layout for layout in possible if missing_engine(layout, job.training, costs.config) is None)
    plans = [plan_layout(costs, layout, device) for layout in possible]
    if not plans:
        raise ValueError(
            f"No layout of {job.devices:,} devices divides a batch of {job.sequences:,} sequences: take another number "
            f"of devices, or as many sequences, which are {job.devices * job.context:,} batch tokens."
        )
    limit = device.memory * (1 - device.reserved)
    fitting = [plan for plan in plans if plan.total_memory <= limit]
    fastest = max((plan.tokens_per_second for plan in fitting), default=0.0)

    def rank(plan: Plan) -> tuple:
        layout, speed = plan.layout, plan.tokens_per_second
        slower = int(math.log(fastest / speed) / math.log(ALIKE))
        return slower, layout.stages, layout.tensor, layout.expert, -speed, plan.total_memory

    return Search(tuple(sorted(fitting, key=rank)), min(plans, key=lambda plan: plan.total_memory), limit)


def devices_that_fit(costs: Costs, device: Device, most: int = 64, *, runnable: bool = False) -> int | None:
    """Return the smallest number of devices that fits, among doublings of the job's up to `most` times as many.

    Args:
        costs: The costs of the model.
        device: The devices.
        most: The largest multiple of the job's devices.
        runnable: As in [`search`].
    """
    factor = 2
    while factor <= most:
        job = replace(costs.job, devices=costs.job.devices * factor)
        try:
            if search(costs, device, job, runnable=runnable).fitting:
                return job.devices
        except ValueError:
            return None
        factor *= 2
    return None


def _can_shard(costs: Costs, tensor: int) -> bool:
    """Return whether `tensor` devices can share the matrices."""
    try:
        costs.trace(tensor)
    except ValueError:
        return False
    return True


def _divisors(number: int) -> list[int]:
    return [divisor for divisor in range(1, number + 1) if number % divisor == 0]


__all__ = ["Search", "devices_that_fit", "layouts", "plan_layout", "search"]
