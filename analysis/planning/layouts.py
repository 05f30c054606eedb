"""The memory, communication and time of one step on many devices, for one layout.

A layout divides `devices = data x tensor x pipeline`. Experts and shards of weights (FSDP) lie along these devices:
`expert` divides `shard x tensor`, and `shard` divides `data`. This is the division of `DistributedConfig`.
"""

from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise

from torch import Tensor

from attnres import ResidualConfig

from .schedules import sent_bytes
from .tracing import Batch, Trace, build, divided_dimension, tensor_plan, trace, without_data

# Styles of a tensor-parallel plan that divide weights, with the divided dimension; `tracing` has the ones that divide
# activations too.
_STYLES = {
    "colwise": -2,
    "packed_colwise": -2,
    "colwise_gather_output": -2,
    "embedding_rowwise": -2,
    "rowwise": -1,
    "packed_rowwise": -1,
    "rowwise_split_input": -1,
}
# Bytes of optimizer states for each parameter. Muon keeps one number for a matrix, and AdamW two for any parameter.
OPTIMIZERS = {"adamw": (8, 8), "muon": (4, 8)}
_MASTER = 4  # bytes of a weight, and of its gradient, that the optimizer updates


@dataclass(frozen=True)
class Device:
    """A device, with the rates that its makers state. Rates are per second and device.

    Attributes:
        memory: Bytes.
        flops: Products and sums of dense matrices in bfloat16.
        efficiency: Share of `flops` that training reaches, an assumption.
        memory_bandwidth: Bytes to and from the device's memory.
        link: Bytes to other devices of the node, in one direction.
        network: Bytes to other nodes, in one direction.
        per_node: Devices of a node.
        reserved: Share of the memory for the allocator's gaps and the buffers of collectives, an assumption.
    """

    memory: float = 80e9
    flops: float = 989e12
    efficiency: float = 0.4
    memory_bandwidth: float = 3.35e12
    link: float = 450e9
    network: float = 50e9
    per_node: int = 8
    reserved: float = 0.08


@dataclass(frozen=True)
class Job:
    """The work to plan.

    Attributes:
        devices: Number of devices.
        context: Tokens of a sequence.
        batch_tokens: In training, tokens of an optimizer step. In serving, tokens in all caches together.
        training: Whether to train; if not, to serve.
        optimizer: A key of [`OPTIMIZERS`].
        chunk: Tokens of a prompt that are computed at once in serving.
    """

    devices: int
    context: int
    batch_tokens: int
    training: bool = True
    optimizer: str = "adamw"
    chunk: int = 16384

    def __post_init__(self):
        for name in ("devices", "context", "batch_tokens", "chunk"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}.")
        if self.batch_tokens % self.context:
            raise ValueError(
                f"The batch must hold whole sequences of {self.context:,} tokens, got {self.batch_tokens:,} tokens: "
                f"{max(1, self.batch_tokens // self.context) * self.context:,} would."
            )
        if self.optimizer not in OPTIMIZERS:
            raise ValueError(f"The optimizer must be one of {', '.join(OPTIMIZERS)}, got {self.optimizer!r}.")


@dataclass(frozen=True)
class Layout:
    """A division of devices. The module's docstring says how the numbers fit.

    Attributes:
        data: Number of groups with different sequences.
        tensor: Number of devices that share each matrix; states of the depth lie sharded along the sequence there.
        pipeline: Number of stages.
        expert: Number of devices that share the routed experts.
        shard: Number of devices that share weights, gradients and optimizer states.
        checkpointing: Whether layers run again in the backward pass.
    """

    data: int = 1
    tensor: int = 1
    pipeline: int = 1
    expert: int = 1
    shard: int = 1
    checkpointing: bool = False


@dataclass(frozen=True)
class Weights:
    """Parameters of one layer that are divided alike.

    Attributes:
        layer: Number of the layer; -1 for the embedding, and the number of layers for the head.
        is_matrix: Whether they are matrices, which Muon trains.
        is_expert: Whether they belong to routed experts.
        is_divided: Whether tensor parallelism divides them.
        count: Number of tensors.
        largest: Numbers in the largest tensor.
        number: Numbers in all of them.
        bytes: Bytes as the model stores them in 16 bits.
        sums: Number of tensors whose products are sums over devices in tensor parallelism.
    """

    layer: int
    is_matrix: bool
    is_expert: bool
    is_divided: bool
    count: int = 0
    largest: int = 0
    number: int = 0
    bytes: int = 0
    sums: int = 0

    def with_parameter(self, parameter: Tensor, is_summed: bool) -> "Weights":
        """Return these parameters and another one."""
        return replace(
            self,
            count=self.count + 1,
            largest=max(self.largest, parameter.numel()),
            number=self.number + parameter.numel(),
            bytes=self.bytes + parameter.numel() * parameter.dtype.itemsize,
            sums=self.sums + is_summed,
        )


@dataclass(frozen=True)
class Plan:
    """A layout with its costs on the device that needs most.

    Attributes:
        layout: The layout.
        microbatches: Micro-batches of one sequence, for each group of a step; in serving, sequences of a group.
        memory: Bytes by purpose.
        sent: Bytes that a device sends in a step, by purpose. A step of serving makes one token of each
            sequence.
        seconds: Estimated time of a step by purpose. Some pass at the same time, so `total_seconds` is not
            their sum.
        total_seconds: Estimated time of a step.
        tokens_per_second: Estimated for all devices together.
    """

    layout: Layout
    microbatches: int
    memory: dict[str, float]
    sent: dict[str, float]
    seconds: dict[str, float]
    total_seconds: float
    tokens_per_second: float

    @property
    def total_memory(self) -> float:
        """Bytes on the device that needs most."""
        return sum(self.memory.values())

    @property
    def dominant_memory(self) -> str:
        """The largest part of the memory."""
        return max(self.memory, key=self.memory.__getitem__)

    @property
    def dominant_time(self) -> str:
        """The largest part of the time."""
        return max(self.seconds, key=self.seconds.__getitem__)


class Costs:
    """The costs of a configuration's model for one job, from which layouts are planned.

    Args:
        config: A configuration of the family.
        job: The job.
    """

    def __init__(self, config: ResidualConfig, job: Job):
        self.config, self.job = config, job
        self._traces: dict[tuple, Trace] = {}
        self._stages: dict[tuple, dict[str, float]] = {}
        self._kept: dict[tuple, tuple[int, int, int]] = {}

    @cached_property
    def weights(self) -> list[Weights]:
        """The parameters of the model, grouped by layer and kind. Tied ones count once."""
        batch = Batch(1, 1)
        with without_data(batch):
            model = build(self.config, batch)
        plan, layers = tensor_plan(model), len(model.base_model.layers)
        embeddings = {id(parameter) for parameter in model.get_input_embeddings().parameters()}
        experts = {
            id(parameter)
            for module in model.modules()
            # `transformers` has a class for each model, without a common parent.
            if type(module).__name__.endswith("Experts")
            for parameter in module.parameters()
        }
        groups: dict[tuple, Weights] = {}
        for name, parameter in model.named_parameters():
            number = next((int(part) for part in name.split(".") if part.isdigit()), None)
            layer = number if number is not None else -1 if id(parameter) in embeddings else layers
            dimension = divided_dimension(name, plan, _STYLES)
            is_matrix = parameter.ndim >= 2 and id(parameter) not in embeddings
            kind = layer, is_matrix, id(parameter) in experts, dimension is not None
            is_summed = dimension == -1 and number is not None
            groups[kind] = groups.get(kind, Weights(*kind)).with_parameter(parameter, is_summed)
        return [*groups.values()]

    @property
    def num_layers(self) -> int:
        """Number of decoder layers."""
        return self.config.num_hidden_layers

    @cached_property
    def experts(self) -> tuple[int, int]:
        """Number of routed experts of a layer, and number that a token uses; 1 and 1 without experts."""
        if not any(weight.is_expert for weight in self.weights):
            return 1, 1
        names = ("num_local_experts", "num_experts", "n_routed_experts")
        number = next(value for name in names if (value := getattr(self.config, name, None)))
        return number, self.config.num_experts_per_tok

    def trace(self, tensor: int, decode: bool = False) -> Trace:
        """Return the trace of one sequence on one of `tensor` devices, with states sharded along the sequence.

        Args:
            tensor: Number of devices that share each matrix.
            decode: In serving, trace the step after the whole context in place of the last chunk of the prompt.
        """
        if (tensor, decode) not in self._traces:
            job = self.job
            length = job.context if job.training else 1 if decode else min(job.chunk, job.context)
            past = 0 if job.training else job.context - length
            traced = trace(self.config, Batch(1, length, past, job.training, tensor=tensor))
            self._traces[tensor, decode] = _shard_states(traced, tensor)
        return self._traces[tensor, decode]

    def stages(self, pipeline: int) -> list[slice]:
        """Return the layers of each stage, as equal as can be.

        The last stages get the remainder, since fewer micro-batches wait there.
        """
        bounds = [self.num_layers * stage // pipeline for stage in range(pipeline + 1)]
        return [slice(*pair) for pair in pairwise(bounds)]

    def forward_flops(self, pipeline: int) -> list[float]:
        """Return the products and sums of the forward pass of one sequence, for each stage."""
        layout, attention = Layout(pipeline=pipeline), self._attention_flops(self.job.context, self.job.context)
        return [
            2 * self._weight_costs(layout, stage)["active"] * self.job.context + attention / pipeline
            for stage in self.stages(pipeline)
        ]

    def plan(self, layout: Layout, device: Device) -> Plan:
        """Return the costs of a layout.

        Args:
            layout: The layout.
            device: The devices.
        """
        return (self._plan_training if self.job.training else self._plan_serving)(layout, device)

    def _local(self, weight: Weights, layout: Layout) -> tuple[float, int]:
        """Return a weight's numbers on one device before FSDP, and the number of devices among which FSDP shards it."""
        if weight.is_expert and layout.expert > 1:
            # In serving nothing is sharded.
            return weight.number / layout.expert, max(1, layout.shard * layout.tensor // layout.expert)
        return weight.number / (layout.tensor if weight.is_divided else 1), layout.shard

    def _of_stage(self, layout: Layout, stage: slice) -> list[Weights]:
        """Return the weights of a stage; the first has the embedding, the last the head."""
        first = -1 if stage.start == 0 else stage.start
        last = self.num_layers if stage.stop == self.num_layers else stage.stop - 1
        # A tied embedding is also the head's matrix, of which the last stage has a copy.
        has_copy = self.config.tie_word_embeddings and first >= 0 and last == self.num_layers
        return [w for w in self.weights if first <= w.layer <= last or (has_copy and w.layer == -1)]

    def _weight_costs(self, layout: Layout, stage: slice) -> dict[str, float]:
        """Return sums over a stage's weights; layouts with the same division share them."""
        key = (layout.tensor, layout.pipeline, layout.expert, layout.shard, stage.start)
        if key not in self._stages:
            experts, used = self.experts
            sums = dict.fromkeys(("stored", "optimizer", "local", "bytes", "active", "gathered", "sums", "sparse"), 0.0)
            matrix, other = OPTIMIZERS[self.job.optimizer]
            by_layer: dict[int, float] = {}
            new_gradient = 0.0
            for weight in self._of_stage(layout, stage):
                local, shard = self._local(weight, layout)
                sums["stored"] += local / shard
                sums["optimizer"] += local / shard * (matrix if weight.is_matrix else other)
                sums["local"] += local
                sums["bytes"] += local * weight.bytes / weight.number
                sums["gathered"] += local * (shard - 1) / shard
                by_layer[weight.layer] = by_layer.get(weight.layer, 0.0) + local
                if weight.is_expert or weight.layer == -1:
                    new_gradient = max(new_gradient, local * weight.largest / weight.number)
                if not (weight.is_expert and layout.expert > 1):
                    sums["sums"] += weight.sums
                if weight.is_expert:
                    sums["sparse"] += 1
                    # Whatever device an expert is on, each device computes as many tokens of experts as it has.
                    sums["active"] += weight.number * used / experts / (1 if layout.expert > 1 else layout.tensor)
                elif weight.layer >= 0:
                    sums["active"] += local
            sums["largest_layer"] = max(by_layer.values())
            sums["new_gradient"] = new_gradient
            self._stages[key] = sums
        return self._stages[key]

    def _activations(self, layout: Layout, stage: slice) -> tuple[int, int, int]:
        """Return the bytes that a stage keeps for its backward pass, of states and others, and its peak."""
        key = layout.tensor, layout.checkpointing, stage.start, stage.stop
        if key not in self._kept:
            traced = self.trace(layout.tensor)
            kept = traced.kept(layout.checkpointing, stage)
            self._kept[key] = *kept, traced.peak(layout.checkpointing, stage)
        return self._kept[key]

    def _plan_training(self, layout: Layout, device: Device) -> Plan:
        job, traced = self.job, self.trace(layout.tensor)
        microbatches = job.batch_tokens // (job.context * layout.data)
        stages = self.stages(layout.pipeline)
        heaviest: dict[str, float] = {}
        for number, stage in enumerate(stages):
            sums = self._weight_costs(layout, stage)
            # Computing copies in 16 bits: with FSDP, of the layer that runs and of the next one.
            copies = 2 * sums["largest_layer"] if layout.shard > 1 else sums["local"]
            new = sums["largest_layer"] if layout.shard > 1 else sums["new_gradient"]
            states, others, peak = self._activations(layout, stage)
            # 1F1B: so many micro-batches wait for their backward pass at this stage.
            waiting = min(microbatches, layout.pipeline - number)
            memory = {
                "weights": sums["stored"] * _MASTER + copies * 2,
                "gradients": sums["stored"] * _MASTER + new * 2,
                "optimizer": sums["optimizer"],
                "activations": waiting * others + peak - states - others,
                "block states": waiting * states,
            }
            if sum(memory.values()) > sum(heaviest.values()):
                heaviest = memory
        sent = self._sent_in_training(layout, microbatches, traced)
        return self._timed(layout, device, microbatches, heaviest, sent)

    def _sent_in_training(self, layout: Layout, microbatches: int, traced: Trace) -> dict[str, float]:
        """Return the bytes that a device sends in a step, by purpose, at the stage that sends most."""
        passes = 6 if layout.checkpointing else 4  # of dispatch and combination, or of two sums
        width = self.job.context * 2 * microbatches  # bytes of a column of a tensor in 16 bits
        most = dict.fromkeys(("weights", "gradients", "tensor", "experts", "pipeline"), 0.0)
        replicas = layout.data // layout.shard
        for stage in self.stages(layout.pipeline):
            sums = self._weight_costs(layout, stage)
            # FSDP gathers weights in both passes of each micro-batch, and sums its gradients.
            sent = {
                "weights": 2 * microbatches * sums["gathered"] * 2,
                "gradients": microbatches * sums["gathered"] * _MASTER
                + 2 * (replicas - 1) / replicas * sums["stored"] * _MASTER,
                # A sum in each pass, and where layers run again, in that pass too.
                "tensor": passes / 2 * sums["sums"] * 2 * (1 - 1 / layout.tensor) * width * self.config.hidden_size,
                "experts": passes
                * sums["sparse"]
                * self._expert_columns
                * (1 - 1 / layout.expert)
                * width
                / layout.tensor,
                "pipeline": 0.0,
            }
            most = {name: max(most[name], sent[name]) for name in most}
        if layout.pipeline > 1:
            states = [traced.layers[stage.start].states for stage in self.stages(layout.pipeline)[1:]]
            most["pipeline"] = 2.0 * microbatches * max(sent_bytes(states, layout.pipeline, cached=True))
        return most

    @property
    def _expert_columns(self) -> int:
        """The columns that a token sends to its experts in a layer."""
        return self.experts[1] * (getattr(self.config, "routed_expert_hidden_size", None) or self.config.hidden_size)

    def _attention_flops(self, tokens: int, context: int) -> float:
        """Return the products and sums of attention between tokens, of one pass and sequence in all layers."""
        config = self.config
        kinds = getattr(config, "layer_types", None) or ["full_attention"] * self.num_layers
        heads = config.num_attention_heads
        head = getattr(config, "head_dim", None) or config.hidden_size // heads
        if getattr(config, "kv_lora_rank", None):
            head = (config.qk_nope_head_dim + config.qk_rope_head_dim + config.v_head_dim) / 2
        return kinds.count("full_attention") * 2 * 2 * heads * head * tokens * (context - tokens / 2)

    def _attention_part(self, tensor: int) -> float:
        """Return the part of attention's products that one of `tensor` devices computes."""
        plan = self.config.base_model_tp_plan or {}
        is_divided = any(style in ("rowwise", "rowwise_rep") and ".mlp." not in name for name, style in plan.items())
        return 1 / tensor if is_divided else 1.0

    def _rate(self, device: Device, members: int) -> float:
        """Return the bytes per second of a collective among `members` devices."""
        return device.link if members <= device.per_node else device.network

    def _timed(
        self, layout: Layout, device: Device, microbatches: int, memory: dict[str, float], sent: dict[str, float]
    ) -> Plan:
        job, stages = self.job, self.stages(layout.pipeline)
        passes = 4 if layout.checkpointing else 3  # in units of the forward pass
        active = max(self._weight_costs(layout, stage)["active"] for stage in stages)
        attention = self._attention_flops(job.context, job.context) * self._attention_part(layout.tensor)
        flops = 2 * active * job.context + attention / layout.pipeline
        seconds = {
            "compute": passes * flops * microbatches / (device.flops * device.efficiency),
            "tensor": sent["tensor"] / self._rate(device, layout.tensor),
            "experts": sent["experts"] / self._rate(device, layout.expert),
            "pipeline": sent["pipeline"] / self._rate(device, layout.data * layout.tensor * layout.pipeline),
        }
        # Stages wait while the pipeline fills and empties.
        seconds["bubble"] = sum(seconds.values()) * (layout.pipeline - 1) / microbatches
        waiting = sum(seconds.values())
        shards, group = self._rate(device, layout.shard * layout.tensor), layout.data * layout.tensor
        seconds["weights"] = sent["weights"] / shards
        seconds["gradients"] = sent["gradients"] / (
            shards if layout.shard == layout.data else self._rate(device, group)
        )
        total = max(waiting, seconds["weights"] + seconds["gradients"])
        return Plan(layout, microbatches, memory, sent, seconds, total, job.batch_tokens / total)

    def _plan_serving(self, layout: Layout, device: Device) -> Plan:
        job, devices = self.job, layout.data * layout.tensor * layout.pipeline
        prompt, step = self.trace(layout.tensor), self.trace(layout.tensor, decode=True)
        sequences = -(-job.batch_tokens // (job.context * layout.data))
        stages = self.stages(layout.pipeline)
        heaviest: dict[str, float] = {}
        for stage in stages:
            sums = self._weight_costs(layout, stage)
            states = max(sum(layer.states.values()) for layer in prompt.layers[stage])
            memory = {
                "weights": sums["bytes"],
                "caches": sequences * sum(layer.cache for layer in step.layers[stage]),
                "activations": max(prompt.peak(layers=stage) - states, sequences * step.peak(layers=stage)),
                "block states": states,
            }
            if sum(memory.values()) > sum(heaviest.values()):
                heaviest = memory
        sums = [self._weight_costs(layout, stage) for stage in stages]
        columns = 2 * sequences  # bytes of a column in 16 bits
        summed = sum(s["sums"] for s in sums) * self.config.hidden_size
        routed = sum(s["sparse"] for s in sums) * self._expert_columns
        crossing = sum(sum(step.layers[stage.start].states.values()) for stage in stages[1:])
        sent = {
            "tensor": 2 * (1 - 1 / layout.tensor) * summed * columns,
            "experts": 2 * (1 - 1 / layout.expert) * routed * columns,
            "pipeline": float(sequences * crossing),
        }
        compute = 2 * sum(s["active"] for s in sums) * sequences
        compute += self._attention_flops(1, job.context) * self._attention_part(layout.tensor) * sequences
        seconds = {
            # With stages, each reads its weights once for each of as many groups of sequences as there are stages.
            "weights": sum(s["bytes"] for s in sums) / device.memory_bandwidth,
            "caches": sequences * step.cache / device.memory_bandwidth / layout.pipeline,
            "compute": compute / (device.flops * device.efficiency) / layout.pipeline,
            "tensor": sent["tensor"] / self._rate(device, layout.tensor) / layout.pipeline,
            "experts": sent["experts"] / self._rate(device, layout.expert) / layout.pipeline,
            "pipeline": sent["pipeline"] / self._rate(device, devices) / layout.pipeline,
        }
        # Products run while weights and caches are read.
        reading = seconds["weights"] + seconds["caches"]
        total = max(reading, seconds["compute"]) + seconds["tensor"] + seconds["experts"] + seconds["pipeline"]
        return Plan(layout, sequences, heaviest, sent, seconds, total, sequences * layout.data / total)


def _shard_states(traced: Trace, tensor: int) -> Trace:
    """Divide states, and the tensors that connections keep, along the sequence."""

    def part(states: dict[int, int]) -> dict[int, int]:
        return {name: size // tensor for name, size in states.items()}

    def saved(layer) -> int:
        return layer.connection_kept - layer.connection_kept // tensor

    layers = (
        replace(
            layer,
            states=part(layer.states),
            kept=layer.kept - saved(layer),
            connection_kept=layer.connection_kept // tensor,
            backward=layer.backward - saved(layer),
        )
        for layer in traced.layers
    )
    return replace(traced, layers=tuple(layers), output=part(traced.output), stream=traced.stream // tensor)


__all__ = ["OPTIMIZERS", "Costs", "Device", "Job", "Layout", "Plan", "Weights"]
