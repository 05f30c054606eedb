"""The plan of serving: memory, and traffic and time of a step that makes one token of each sequence.

Weights are in the model's dtype, and none are sharded: groups of data share only routed experts.
"""

from .costs import Costs
from .engines import missing_engine
from .jobs import Device, Layout, Plan
from .training import COPY


def plan_serving(costs: Costs, layout: Layout, device: Device) -> Plan:
    """Return the costs of a layout for serving.

    Args:
        costs: The costs of the model.
        layout: The layout.
        device: The devices.
    """
    job, stages = costs.job, costs.stages(layout.pipeline)
    step = costs.trace(layout.tensor, decode=True)
    sequences = -(-job.sequences // layout.data)  # of the group with most
    memory = max((_memory(costs, layout, stage, sequences) for stage in stages), key=lambda parts: sum(parts.values()))
    weights = [costs.stage_weights(layout, [stage]) for stage in stages]
    column = COPY * sequences  # bytes of a column of activations
    summed = sum(of_stage.sums for of_stage in weights) * costs.config.hidden_size
    routed = sum(of_stage.sparse_layers for of_stage in weights) * costs.expert_columns
    crossing = sum(sum(step.layers[stage.start].states.values()) for stage in stages[1:])
    sent = {
        "tensor": 2 * (1 - 1 / layout.tensor) * summed * column,
        "experts": 2 * (1 - 1 / layout.expert) * routed * column / layout.tensor,
        "pipeline": float(sequences * crossing),
    }
    flops = 2 * sum(of_stage.activated for of_stage in weights) * sequences
    flops += costs.attention_flops(1) * costs.attention_part(layout.tensor) * sequences
    # A pipeline of P stages splits the sequences into P groups, one per stage at any moment. Each stage reads its
    # weights once per group. All other work is divided by P.
    experts, used = costs.experts
    tokens = sequences / layout.pipeline * max(1, layout.expert / layout.tensor)  # that choose among the same experts
    chosen = 1 - (1 - used / experts) ** tokens  # share of the experts that are chosen by any, if all are as likely
    read = sum(of_stage.bytes - (1 - chosen) * of_stage.expert_bytes for of_stage in weights)
    seconds = {
        "weights": read / device.memory_bandwidth,
        "caches": sequences * step.cache / device.memory_bandwidth / layout.pipeline,
        "compute": flops / (device.flops * device.efficiency) / layout.pipeline,
        "tensor": sent["tensor"] / device.link / layout.pipeline,
        "experts": device.exchange_seconds(sent["experts"], layout.expert) / layout.pipeline,
        "pipeline": sent["pipeline"]
        / (device.link if layout.devices <= device.per_node else device.network)
        / layout.pipeline,
    }
    # Products run while weights and caches are read.
    reading = seconds["weights"] + seconds["caches"]
    total = max(reading, seconds["compute"]) + seconds["tensor"] + seconds["experts"] + seconds["pipeline"]
    engine = missing_engine(layout, False, costs.config)
    return Plan(layout, sequences, memory, sent, seconds, total, job.sequences / total, engine)


def _memory(costs: Costs, layout: Layout, stage: slice, sequences: int) -> dict[str, float]:
    """Return the bytes of one stage by purpose."""
    prompt, step = costs.trace(layout.tensor), costs.trace(layout.tensor, decode=True)
    states = max(sum(layer.states.values()) for layer in prompt.layers[stage])
    return {
        "weights": costs.stage_weights(layout, [stage]).bytes,
        "caches": sequences * sum(layer.cache for layer in step.layers[stage]),
        "activations": max(prompt.peak(layers=stage) - states, sequences * step.peak(layers=stage)),
        "block states": states,
    }


__all__ = ["plan_serving"]
