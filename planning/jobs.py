"""The values that describe a plan: the devices, the job, a layout of the devices, and the plan itself."""

from dataclasses import dataclass

# Bytes of optimizer states for each parameter, of matrices and of others. Muon keeps one number for each number of a
# matrix, and AdamW two for any parameter.
OPTIMIZERS = {"adamw": (8, 8), "muon": (4, 8)}


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
        latency: Seconds of one step of a ring through several devices.
        per_node: Devices of a node.
        reserved: Share of the memory for the allocator's gaps and the buffers of collectives, an assumption.
    """

    memory: float = 80e9
    flops: float = 989e12
    efficiency: float = 0.4
    memory_bandwidth: float = 3.35e12
    link: float = 450e9
    network: float = 50e9
    latency: float = 5e-6
    per_node: int = 8
    reserved: float = 0.08

    def collective_rate(self, members: int, stride: int = 1) -> float:
        """Return the bytes per second that a device sends in a gather or a sum among several devices.

        A ring through several nodes leaves a node through the network links of all its members there, so that each
        member has the rate of all these links.

        Args:
            members: Number of devices.
            stride: Number of devices from one member to the next.
        """
        inside = self._members_in_node(members, stride)
        return self.link if inside == members else min(self.link, self.network * inside)

    def exchange_seconds(self, sent: float, members: int, stride: int = 1) -> float:
        """Return the time in which a device sends different bytes to each of several devices.

        Args:
            sent: Bytes to all other members together, in equal parts.
            members: Number of devices.
            stride: Number of devices from one member to the next.
        """
        if members == 1:
            return 0.0
        inside = self._members_in_node(members, stride)
        each = sent / (members - 1)
        # The two kinds of links work at the same time.
        return max(each * (inside - 1) / self.link, each * (members - inside) / self.network)

    def _members_in_node(self, members: int, stride: int) -> int:
        return min(members, max(1, self.per_node // stride))


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
        lora: The rank of adapters, which alone are trained, with the residual connections; `None` to train all.
        packed: Whether routed experts are packed as MXFP4. They cannot be trained then.
    """

    devices: int
    context: int
    batch_tokens: int
    training: bool = True
    optimizer: str = "adamw"
    chunk: int = 16384
    lora: int | None = None
    packed: bool = False

    def __post_init__(self):
        for name in ("devices", "context", "batch_tokens", "chunk"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}.")
        if self.batch_tokens % self.context:
            raise ValueError(
                f"batch_tokens must be a multiple of the context ({self.context:,}), got {self.batch_tokens:,}: "
                f"{max(1, self.batch_tokens // self.context) * self.context:,} is one."
            )
        if self.packed and self.training and self.lora is None:
            raise ValueError("Packed experts cannot be trained: give a rank of adapters by `lora`.")
        if self.optimizer not in OPTIMIZERS:
            raise ValueError(f"The optimizer must be one of {', '.join(OPTIMIZERS)}, got {self.optimizer!r}.")

    @property
    def sequences(self) -> int:
        """Number of sequences of a step."""
        return self.batch_tokens // self.context


@dataclass(frozen=True)
class Layout:
    """A sharding over `data x tensor x pipeline` devices.

    Devices are numbered along `tensor` first, then `data`, then `pipeline`. Shards of weights lie along `data`, and
    routed experts along `shard x tensor`, so `shard` divides `data`, and `expert` divides `shard x tensor`. This is the
    sharding of `DistributedConfig` in `transformers`, with pipeline stages around it.

    Attributes:
        data: Number of groups with different sequences.
        tensor: Number of devices that share each matrix; states of the depth lie sharded along the sequence there.
        pipeline: Number of ranks of a pipeline.
        expert: Number of devices that share the routed experts.
        shard: Number of devices that share weights, gradients and optimizer states.
        reshard: Whether a device frees the weights of a layer after each pass, and gathers them again (FSDP). If not,
            weights are gathered and gradients are summed once a step (ZeRO-1), or nothing is sharded.
        checkpointing: Whether layers run again in the backward pass.
        virtual: Number of stages of each rank of a pipeline. With several, the schedule is Interleaved 1F1B.
    """

    data: int = 1
    tensor: int = 1
    pipeline: int = 1
    expert: int = 1
    shard: int = 1
    reshard: bool = False
    checkpointing: bool = False
    virtual: int = 1

    @property
    def stages(self) -> int:
        """Number of stages of a pipeline."""
        return self.pipeline * self.virtual

    @property
    def devices(self) -> int:
        """Number of devices."""
        return self.data * self.tensor * self.pipeline

    @property
    def expert_shard(self) -> int:
        """Number of devices that share the same routed experts' weights, gradients and optimizer states.

        In serving nothing is sharded, and experts lie along `data x tensor`.
        """
        return max(1, self.shard * self.tensor // self.expert) if self.expert > 1 else self.shard


@dataclass(frozen=True)
class Plan:
    """A layout with its costs on the device that needs most.

    Attributes:
        layout: The layout.
        microbatches: Micro-batches of one sequence, for each group of a step; in serving, sequences of a group.
        memory: Bytes by purpose.
        sent: Bytes that a device sends in a step, by purpose. A step of serving makes one token of each sequence.
        seconds: Estimated time of a step by purpose. Some pass at the same time, so `total_seconds` is not their sum.
        total_seconds: Estimated time of a step.
        tokens_per_second: Estimated for all devices together.
        missing_engine: Why this package does not run the layout, in a few words; `None` if it does.
    """

    layout: Layout
    microbatches: int
    memory: dict[str, float]
    sent: dict[str, float]
    seconds: dict[str, float]
    total_seconds: float
    tokens_per_second: float
    missing_engine: str | None

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


__all__ = ["OPTIMIZERS", "Device", "Job", "Layout", "Plan"]
