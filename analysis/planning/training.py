"""The plan of a training step: memory, traffic and time of one layout.

A stage runs its micro-batches in the order of 1F1B. Weights, gradients and optimizer states are in float32, and layers
compute with copies in 16 bits.
"""

from .costs import Costs
from .jobs import Device, Layout, Plan
from .schedules import sent_bytes

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
    memory = max((_memory(costs, layout, s, microbatches) for s in range(layout.pipeline)), key=_total)
    by_stage = [_sent(costs, layout, stage, microbatches) for stage in costs.stages(layout.pipeline)]
    sent = {purpose: max(stage[purpose] for stage in by_stage) for purpose in by_stage[0]}
    crossing = _crossing(costs, layout)
    sent["pipeline"] = 2.0 * microbatches * max(crossing, default=0)  # gradients are as many bytes as states
    # On average over the ranks, each micro-batch waits for one transfer in each direction.
    waits = 2 * microbatches * sum(crossing) / max(1, len(crossing))
    seconds, total = _seconds(costs, layout, device, microbatches, sent, waits)
    sent["weights"] += sent.pop("experts' weights")
    return Plan(layout, microbatches, memory, sent, seconds, total, job.batch_tokens / total)


def _total(parts: dict[str, float]) -> float:
    return sum(parts.values())


def _memory(costs: Costs, layout: Layout, number: int, microbatches: int) -> dict[str, float]:
    """Return the bytes of one stage by purpose."""
    stage = costs.stages(layout.pipeline)[number]
    weights = costs.stage_weights(layout, stage)
    if layout.reshard:
        # The copies of the layer that runs and of the next one. New gradients leave the device after each layer.
        copies, new = 2 * weights.largest_layer, weights.largest_layer
        accumulated = weights.stored
    else:
        copies, new = weights.computed, weights.largest_gradient
        accumulated = weights.computed
    states, others, peak = costs.kept(layout.tensor, layout.checkpointing, stage)
    # 1F1B: so many micro-batches wait for their backward pass at this stage.
    waiting = min(microbatches, layout.pipeline - number)
    return {
        "weights": weights.stored * MASTER + copies * COPY,
        "gradients": accumulated * MASTER + new * COPY,
        "optimizer": weights.optimizer,
        "activations": waiting * others + peak - states - others,
        "block states": waiting * states,
    }


def _sent(costs: Costs, layout: Layout, stage: slice, microbatches: int) -> dict[str, float]:
    """Return the bytes that a device of one stage sends in a step, by purpose."""
    weights, hidden = costs.stage_weights(layout, stage), costs.config.hidden_size
    column = costs.job.context * COPY * microbatches  # bytes of a column of activations
    # Layers run forward and backward, and before that forward again with checkpointing.
    passes = 3 if layout.checkpointing else 2
    # FSDP gathers weights in both passes of each micro-batch, and sums gradients after each.
    gathers, sums = (2 * microbatches, microbatches) if layout.reshard else (1, 1)
    replicas = layout.data // layout.shard
    gathered = weights.gathered + weights.gathered_experts
    return {
        "weights": gathers * weights.gathered * COPY,
        "experts' weights": gathers * weights.gathered_experts * COPY,
        "gradients": sums * gathered * MASTER + 2 * (replicas - 1) / replicas * weights.stored * MASTER,
        # A sum is a scatter and a gather along the sequence.
        "tensor": passes * weights.sums * 2 * (1 - 1 / layout.tensor) * column * hidden,
        # Tokens go to their experts and come back. Devices of a tensor group send different tokens.
        "experts": passes * 2 * weights.sparse_layers * costs.expert_columns * (1 - 1 / layout.expert)
        * column / layout.tensor,
    }  # fmt: skip


def _crossing(costs: Costs, layout: Layout) -> list[int]:
    """Return the bytes that cross from each stage to the next for one micro-batch; ranks keep blocks."""
    traced, stages = costs.trace(layout.tensor), costs.stages(layout.pipeline)
    states = [traced.layers[stage.start].states for stage in stages[1:]]
    return sent_bytes(states, layout.pipeline, cached=True)


def _seconds(
    costs: Costs, layout: Layout, device: Device, microbatches: int, sent: dict[str, float], waits: float
) -> tuple[dict[str, float], float]:
    """Return the estimated time of a step by purpose, and in total."""
    passes = 4 if layout.checkpointing else 3  # in units of the forward pass; a backward pass takes two
    flops = max(costs.forward_flops(layout)) * passes * microbatches
    # Neighbours in the network: devices of a tensor group, then of a shard group, then replicas, then stages.
    group, shards = layout.tensor * layout.data, layout.tensor * layout.shard
    gather = device.collective_rate(layout.shard, stride=layout.tensor)
    gather_experts = device.collective_rate(layout.expert_shard, stride=max(layout.tensor, layout.expert))
    replicate = device.collective_rate(layout.data // layout.shard, stride=shards)
    of_stages = [costs.stage_weights(layout, stage) for stage in costs.stages(layout.pipeline)]
    stored = max(weights.stored for weights in of_stages)
    optimizer = max(weights.optimizer for weights in of_stages)
    sums = microbatches if layout.reshard else 1
    reduced = max(sums * (w.gathered / gather + w.gathered_experts / gather_experts) for w in of_stages) * MASTER
    replicas = layout.data // layout.shard
    seconds = {
        "compute": flops / (device.flops * device.efficiency),
        "tensor": sent["tensor"] / device.link if layout.tensor > 1 else 0.0,
        "experts": device.exchange_seconds(sent["experts"], layout.expert),
        "pipeline": waits / (device.link if group * layout.pipeline <= device.per_node else device.network),
        # It reads and writes weights and states, and reads gradients.
        "optimizer": (3 * MASTER * stored + 2 * optimizer) / device.memory_bandwidth,
        "weights": sent["weights"] / gather + sent["experts' weights"] / gather_experts,
        "gradients": reduced + 2 * (replicas - 1) / replicas * stored * MASTER / replicate,
    }
    step = sum(seconds[purpose] for purpose in ("compute", "tensor", "experts", "pipeline"))
    # Stages wait while the pipeline fills and empties.
    seconds["bubble"] = step * (layout.pipeline - 1) / microbatches
    # Weights and gradients travel while the device computes; without FSDP, in the first and last micro-batch alone.
    hides = seconds["compute"] / (1 if layout.reshard else microbatches)
    exposed = max(0.0, seconds["weights"] + seconds["gradients"] - hides)
    return seconds, step + seconds["bubble"] + exposed + seconds["optimizer"]


__all__ = ["COPY", "MASTER", "plan_training"]
