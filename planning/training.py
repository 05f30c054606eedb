"""The plan of a training step: memory, traffic and time of one layout.

A pipeline runs 1F1B, or Interleaved 1F1B if its ranks have several stages. Weights, gradients and optimizer states are
in float32, and layers compute with copies in 16 bits. Beside adapters, weights are frozen, in 16 bits or packed. The
adapters are in float32, whole on each device that computes with them.
"""

from collections.abc import Iterable

from .costs import Costs
from .engines import missing_engine
from .jobs import OPTIMIZERS, Device, Layout, Plan
from .schedules import sent_bytes
from .weights import PACKED, StageWeights

MASTER = 4  # bytes of a weight that the optimizer updates, and of its gradient
COPY = 2  # bytes of the copy that layers compute with, of new gradients, and of activations


def plan_training(costs: Costs, layout: Layout, device: Device) -> Plan:
    """Return the costs of a layout for training.

    Args:
        costs: The costs of the model.
        layout: The layout.
        device: The devices.
    """
    job = costs.job
    microbatches = job.sequences // layout.data
    ranks = range(layout.pipeline)
    weights = [costs.stage_weights(layout, costs.of_rank(layout, rank)) for rank in ranks]
    memory = max((_memory(costs, layout, rank, microbatches, weights[rank]) for rank in ranks), key=_total)
    sent = _largest(_sent(costs, layout, microbatches, of_rank) for of_rank in weights)
    crossing = _crossing(costs, layout)
    # A rank sends its states forward and the gradients of its inputs back, which are as many bytes.
    period = layout.pipeline
    both = [sum(crossing[rank::period]) + sum(crossing[(rank - 1) % period :: period]) for rank in ranks]
    sent["pipeline"] = float(microbatches * max(both)) if crossing else 0.0
    seconds, total = _seconds(costs, layout, device, microbatches, weights, sent, crossing)
    sent["weights"] += sent.pop("experts' weights")
    engine = missing_engine(layout, True, costs.config)
    return Plan(layout, microbatches, memory, sent, seconds, total, job.batch_tokens / total, engine)


def _largest(parts: Iterable[dict[str, float]]) -> dict[str, float]:
    """Return the largest number of each purpose."""
    parts = [*parts]
    return {purpose: max(part[purpose] for part in parts) for purpose in parts[0]}


def _total(parts: dict[str, float]) -> float:
    return sum(parts.values())


def _memory(costs: Costs, layout: Layout, rank: int, microbatches: int, weights: StageWeights) -> dict[str, float]:
    """Return the bytes of one rank of a pipeline by purpose."""
    if costs.job.lora is not None:
        states, others, working = costs.kept(layout, rank, microbatches)
        frozen = weights.stored_bytes + 2 * weights.largest_layer_bytes if layout.reshard else weights.bytes
        return {
            "weights": frozen,
            "adapters": weights.adapters * (2 * MASTER + OPTIMIZERS[costs.job.optimizer][0]),  # with gradients, states
            "activations": others + working,
            "block states": states,
        }
    if layout.reshard:
        # The copies of the layer that runs and of the next one. New gradients leave the device after each layer.
        copies, new = 2 * weights.largest_layer, weights.largest_layer
        accumulated = weights.stored
    else:
        copies, new = weights.computed, weights.largest_gradient
        accumulated = weights.computed
    states, others, working = costs.kept(layout, rank, microbatches)
    return {
        "weights": weights.stored * MASTER + copies * COPY,
        "gradients": accumulated * MASTER + new * COPY,
        "optimizer": weights.optimizer,
        "activations": others + working,
        "block states": states,
    }


def _sent(costs: Costs, layout: Layout, microbatches: int, weights: StageWeights) -> dict[str, float]:
    """Return the bytes that a device of one rank sends in a step, by purpose."""
    column = costs.job.context * COPY * microbatches  # bytes of a column of activations
    # Layers run forward and backward, and before that forward again with checkpointing.
    passes = 3 if layout.checkpointing else 2
    # FSDP gathers weights in both passes of each micro-batch, and sums gradients after each.
    gathers, sums = (2 * microbatches, microbatches) if layout.reshard else (1, 1)
    replicas = layout.data // layout.shard
    gathered = weights.gathered + weights.gathered_experts
    # A sum is a scatter and a gather along the sequence. Tokens go to their experts and come back.
    summed = 2 * weights.sums * costs.config.hidden_size * (1 - 1 / layout.tensor)
    routed = 2 * weights.sparse_layers * costs.expert_columns * (1 - 1 / layout.expert)
    traffic = {
        "weights": gathers * weights.gathered * COPY,
        "experts' weights": gathers * weights.gathered_experts * COPY,
        "gradients": sums * gathered * MASTER + 2 * (replicas - 1) / replicas * weights.stored * MASTER,
        "tensor": passes * summed * column,
        # Devices of a tensor group send different tokens.
        "experts": passes * routed * column / layout.tensor,
    }
    if costs.job.lora is not None:
        # Frozen weights that are not sharded stay where they are, and only adapters have gradients.
        for purpose in ("weights", "experts' weights"):
            traffic[purpose] *= layout.reshard
        traffic["experts' weights"] *= PACKED / COPY if costs.job.packed else 1
        traffic["gradients"] = 2 * (layout.data - 1) / layout.data * weights.adapters * MASTER
    return traffic


def _crossing(costs: Costs, layout: Layout) -> list[int]:
    """Return the bytes that cross from each stage to the next for one micro-batch; ranks keep blocks."""
    traced, stages = costs.trace(layout.tensor), costs.stages(layout.stages)
    states = [traced.layers[stage.start].states for stage in stages[1:]]
    return sent_bytes(states, layout.pipeline, cached=True)


def _seconds(
    costs: Costs,
    layout: Layout,
    device: Device,
    microbatches: int,
    weights: list[StageWeights],
    sent: dict[str, float],
    crossing: list[int],
) -> tuple[dict[str, float], float]:
    """Return the estimated time of a step by purpose, and in total."""
    flops = costs.forward_flops(layout)
    # In units of the forward pass. A backward pass takes two, or one if the weights are frozen.
    passes = (4 if layout.checkpointing else 3) - (costs.job.lora is not None)
    rate = device.flops * device.efficiency / passes
    computing = [sum(flops[rank :: layout.pipeline]) / rate for rank in range(layout.pipeline)]
    seconds = {
        "compute": max(computing) * microbatches,
        "tensor": sent["tensor"] / device.link,
        "experts": device.exchange_seconds(sent["experts"], layout.expert),
    }
    step = sum(seconds.values())
    others = (seconds["tensor"] + seconds["experts"]) / microbatches
    busy = [time + others for time in computing]
    seconds["pipeline"] = _pipeline_seconds(layout, device, microbatches, busy, sent["pipeline"], crossing)
    # Stages wait while the pipeline fills and empties.
    seconds["bubble"] = step * (layout.pipeline - 1) / (microbatches * layout.virtual)
    # Weights and gradients travel while the device computes; without FSDP, in the first and last micro-batch alone.
    seconds |= _weight_seconds(costs, layout, device, microbatches, weights, sent)
    hides = seconds["compute"] / (1 if layout.reshard else microbatches)
    exposed = max(0.0, seconds["weights"] + seconds["gradients"] - hides)
    # The optimizer reads and writes weights and states, and reads gradients.
    moved = max(3 * MASTER * of_rank.stored + 2 * of_rank.optimizer for of_rank in weights)
    if costs.job.lora is not None:
        moved = max(of_rank.adapters for of_rank in weights) * (3 * MASTER + 2 * OPTIMIZERS[costs.job.optimizer][0])
    seconds["optimizer"] = moved / device.memory_bandwidth
    return seconds, step + seconds["pipeline"] + seconds["bubble"] + exposed + seconds["optimizer"]


def _pipeline_seconds(
    layout: Layout, device: Device, microbatches: int, busy: list[float], sent: float, crossing: list[int]
) -> float:
    """Return the time in which devices wait for transfers between stages, beyond the bubble.

    Args:
        layout: The layout.
        device: The devices.
        microbatches: Number of micro-batches of a step.
        busy: For each rank, the seconds in which it works for a micro-batch.
        sent: Bytes that a device sends to other ranks in a step.
        crossing: Bytes that cross between stages, for one micro-batch.
    """
    if not crossing:
        return 0.0
    rate = device.link if layout.devices <= device.per_node else device.network
    transfers = [size / rate for size in crossing]
    if layout.virtual > 1:
        # Interleaved 1F1B takes so many micro-batches in advance that transfers have time, except the first and last.
        fill = 2 * (layout.pipeline - 1) * sum(transfers) / len(transfers)
        return fill + max(0.0, sent / rate - max(busy) * microbatches)
    # In 1F1B as many micro-batches as ranks follow are under way from a rank to the last and back.
    periods = [
        (sum(busy[rank:]) + 2 * sum(transfers[rank:])) / (layout.pipeline - rank) for rank in range(layout.pipeline)
    ]
    return 2 * sum(transfers) + microbatches * max(0.0, max(periods) - max(busy))


def _weight_seconds(
    costs: Costs,
    layout: Layout,
    device: Device,
    microbatches: int,
    weights: list[StageWeights],
    sent: dict[str, float],
) -> dict[str, float]:
    """Return the time in which weights are gathered, and gradients summed."""
    # Neighbours in the network: devices of a tensor group, then of a shard group, then replicas, then ranks.
    gather = device.collective_rate(layout.shard, stride=layout.tensor)
    gather_experts = device.collective_rate(layout.expert_shard, stride=max(layout.tensor, layout.expert))
    replicas = layout.data // layout.shard
    replicate = device.collective_rate(replicas, stride=layout.tensor * layout.shard)
    sums = microbatches if layout.reshard else 1
    reduced = max(of_rank.gathered / gather + of_rank.gathered_experts / gather_experts for of_rank in weights)
    stored = max(of_rank.stored for of_rank in weights)
    # Each layer's ring has a step for each other device.
    ring = (layout.shard - 1) * device.latency * costs.num_layers / layout.pipeline
    gathers = 2 * microbatches if layout.reshard else 1
    if costs.job.lora is not None:
        rate = device.collective_rate(layout.data, stride=layout.tensor)
        return {
            "weights": sent["weights"] / gather + sent["experts' weights"] / gather_experts + gathers * ring,
            "gradients": sent["gradients"] / rate,
        }
    return {
        "weights": sent["weights"] / gather + sent["experts' weights"] / gather_experts + gathers * ring,
        "gradients": sums * (reduced * MASTER + ring) + 2 * (replicas - 1) / replicas * stored * MASTER / replicate,
    }


__all__ = ["COPY", "MASTER", "plan_training"]
