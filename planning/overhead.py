"""Predict how much time a residual connection adds to a step of pipeline-parallel training (AttnRes, section 4.1).

Two steps are simulated on the same devices: with the connection, and with the standard residual stream. They differ in
the bytes that cross stages, and in the bytes that reads move through a device's memory. For each sublayer with n
sources, a fused kernel moves n + 1 tensors `[tokens, hidden]` in the forward pass, and 3 n + 1 in the backward pass: it
reads the sources and the gradient of its output, and adds to the gradients of the sources.
"""

from dataclasses import dataclass

from .costs import Costs
from .jobs import Device, Layout
from .schedules import Simulation, rank_actions, sent_bytes, simulate


@dataclass(frozen=True)
class SimulatedPipeline:
    """A pipeline of P ranks with V stages each.

    Attributes:
        ranks: P.
        virtual: V; with more than 1 the schedule is Interleaved 1F1B.
        microbatches: Micro-batches of a step, each one sequence.
        bandwidth: Bytes per second between two ranks.
        latency: Seconds until the first byte arrives.
        cached: Whether ranks keep the blocks that they receive or make.
        devices_per_stage: Devices that share the products and reads of each stage.
    """

    ranks: int
    virtual: int = 1
    microbatches: int = 32
    bandwidth: float = 50e9
    latency: float = 1e-5
    cached: bool = True
    devices_per_stage: int = 1

    @property
    def stages(self) -> int:
        """C = P V."""
        return self.ranks * self.virtual


def simulate_step(
    costs: Costs, device: Device, pipeline: SimulatedPipeline, with_connection: bool = True
) -> Simulation:
    """Simulate a training step.

    Args:
        costs: The costs of a configuration.
        device: The devices.
        pipeline: The pipeline.
        with_connection: Whether with the configuration's connection; if not, with the standard residual stream.

    Returns:
        The simulated times, in seconds.

    Raises:
        ValueError: There are more stages than layers, or the schedule cannot run.
    """
    if pipeline.stages > costs.num_layers:
        raise ValueError(f"{pipeline.stages} stages need as many layers, got {costs.num_layers}: use fewer stages.")
    traced, stages = costs.trace(1), costs.stages(pipeline.stages)
    rate = device.flops * device.efficiency * pipeline.devices_per_stage
    memory_rate = device.memory_bandwidth * pipeline.devices_per_stage
    compute = [flops / rate for flops in costs.forward_flops(Layout(pipeline=pipeline.stages))]
    forward, backward = compute, [2 * time for time in compute]
    states = [{0: traced.stream}] * (pipeline.stages - 1)
    if with_connection:
        sources = [[len(layer.states) for layer in traced.layers[stage]] for stage in stages]
        per_layer = len(costs.config.sublayers)
        reads = [
            (sum(per_layer * (n + 1) for n in of_stage), sum(per_layer * (3 * n + 1) for n in of_stage))
            for of_stage in sources
        ]
        forward = [time + read * traced.stream / memory_rate for time, (read, _) in zip(forward, reads)]
        backward = [time + read * traced.stream / memory_rate for time, (_, read) in zip(backward, reads)]
        states = [traced.layers[stage.start].states for stage in stages[1:]]
    sent = sent_bytes(states, pipeline.ranks, pipeline.cached)
    transfer = [pipeline.latency + size / pipeline.bandwidth for size in sent]
    schedule = "Interleaved1F1B" if pipeline.virtual > 1 else "1F1B"
    actions = [
        rank_actions(schedule, rank, pipeline.ranks, pipeline.microbatches, pipeline.virtual)
        for rank in range(pipeline.ranks)
    ]
    return simulate(actions, forward, backward, transfer)


def overhead(costs: Costs, device: Device, pipeline: SimulatedPipeline) -> float:
    """Return the time that a residual connection adds to a training step, as a share of a step without it.

    Args:
        costs: The costs of the model with its connection.
        device: The devices.
        pipeline: The pipeline, as for [`simulate_step`].
    """
    with_connection = simulate_step(costs, device, pipeline).total
    return with_connection / simulate_step(costs, device, pipeline, with_connection=False).total - 1


__all__ = ["SimulatedPipeline", "overhead", "simulate_step"]
