"""Count the parameters of a model on the meta device, and shard them among the devices of a layout."""

from collections.abc import Iterable
from dataclasses import dataclass, replace

from torch import Tensor

from attnres import ResidualConfig
from attnres.configuration.adapted import count_adapters
from attnres.parameter_kinds import parameters_by_kind
from attnres.residual_attnres import residual_tensors

from .building import WEIGHT_STYLES, Batch, build, layers_of, sharded_dimension, tensor_rules, without_data
from .jobs import OPTIMIZERS, Layout

PACKED = (4 + 8 / 32) / 8  # bytes of a number in MXFP4: a code of four bits, and a scale of eight for each 32


@dataclass(frozen=True)
class Weights:
    """Parameters of one layer that layouts shard alike.

    Attributes:
        layer: Number of the layer; -1 for the embedding, and the number of layers for the head.
        is_matrix: Whether Muon trains them, if it is the optimizer.
        is_expert: Whether they belong to routed experts.
        is_sharded: Whether tensor parallelism shards them.
        largest: Numbers in the largest tensor.
        number: Numbers in all of them.
        bytes: Bytes as the model stores them in 16 bits.
        sums: Number of tensors whose products are sums over devices in tensor parallelism.
    """

    layer: int
    is_matrix: bool
    is_expert: bool
    is_sharded: bool
    largest: int = 0
    number: int = 0
    bytes: int = 0
    sums: int = 0

    def with_parameter(self, parameter: Tensor, is_summed: bool) -> "Weights":
        """Return the counts of these parameters and of one more.

        Args:
            parameter: The parameter to add.
            is_summed: Whether its product is a sum over devices in tensor parallelism.
        """
        return replace(
            self,
            largest=max(self.largest, parameter.numel()),
            number=self.number + parameter.numel(),
            bytes=self.bytes + parameter.numel() * parameter.dtype.itemsize,
            sums=self.sums + is_summed,
        )

    def on_one_device(self, layout: Layout) -> float:
        """Return the numbers that a device computes with: its part by tensor and expert parallelism, before shards."""
        if self.is_expert and layout.expert > 1:
            return self.number / layout.expert
        return self.number / (layout.tensor if self.is_sharded else 1)


def model_weights(config: ResidualConfig, packed: bool = False) -> list[Weights]:
    """Return the parameters of a configuration's causal language model, grouped by layer and kind.

    Tied parameters count once.

    Args:
        config: The configuration.
        packed: Whether routed experts are packed as MXFP4.
    """
    batch = Batch(1, 1)
    with without_data(batch):
        model = build(config, batch)
    rules, layers = tensor_rules(model), len(layers_of(model))
    embeddings = {id(parameter) for parameter in model.get_input_embeddings().parameters()}
    experts = {
        id(parameter)
        for module in model.modules()
        # `transformers` has a class for each model, without a common parent.
        if type(module).__name__.endswith("Experts")
        for parameter in module.parameters()
    }
    matrices = {id(parameter) for parameter in parameters_by_kind(model)["matrices"]}
    groups: dict[tuple, Weights] = {}
    for name, parameter in model.named_parameters():
        number = next((int(part) for part in name.split(".") if part.isdigit()), None)
        layer = number if number is not None else -1 if id(parameter) in embeddings else layers
        dimension = sharded_dimension(name, rules, WEIGHT_STYLES)
        kind = layer, id(parameter) in matrices, id(parameter) in experts, dimension is not None
        is_summed = dimension == -1 and number is not None
        groups[kind] = groups.get(kind, Weights(*kind)).with_parameter(parameter, is_summed)
    if packed:
        return [replace(w, bytes=round(w.number * PACKED)) if w.is_expert else w for w in groups.values()]
    return [*groups.values()]


def adapter_weights(config: ResidualConfig, rank: int) -> dict[int, int]:
    """Count the values that are trained beside frozen weights: adapters, and the tensors of residual connections.

    Args:
        config: The configuration.
        rank: The rank of the adapters.

    Returns:
        The count of each layer; the number of layers stands for the output.
    """
    batch = Batch(1, 1)
    with without_data(batch):
        model = build(config, batch)
        counts = dict(enumerate(count_adapters(model, rank)))
    for name, tensor in residual_tensors(model).items():
        layer = next((int(part) for part in name.split(".") if part.isdigit()), len(layers_of(model)))
        counts[layer] = counts.get(layer, 0) + tensor.numel()
    return counts


@dataclass
class StageWeights:
    """Sums over the weights of one pipeline stage on one device.

    Attributes:
        computed: Numbers that the device computes with.
        stored: Numbers that it stores between steps, its shard of `computed`.
        optimizer: Bytes of the optimizer's states.
        bytes: Bytes of `computed` in the model's dtype.
        expert_bytes: The bytes of routed experts, included in `bytes`.
        activated: Numbers that one token is multiplied with, on average over the devices of an expert group.
        gathered: Numbers that a gather of all weights brings to the device, without those of routed experts.
        gathered_experts: The same for routed experts.
        stored_bytes: Bytes of `stored` in the model's dtype.
        largest_layer: `computed` of the largest layer.
        largest_layer_bytes: The bytes of that layer in the model's dtype.
        largest_gradient: Numbers in the largest gradient that exists beside the accumulated one.
        sums: Number of products that are sums over the devices of tensor parallelism.
        sparse_layers: Number of layers with routed experts.
        adapters: Numbers that are trained beside frozen weights, whole on each device.
    """

    computed: float = 0.0
    stored: float = 0.0
    optimizer: float = 0.0
    bytes: float = 0.0
    expert_bytes: float = 0.0
    activated: float = 0.0
    gathered: float = 0.0
    gathered_experts: float = 0.0
    stored_bytes: float = 0.0
    largest_layer: float = 0.0
    largest_layer_bytes: float = 0.0
    largest_gradient: float = 0.0
    sums: int = 0
    sparse_layers: int = 0
    adapters: int = 0


def stage_weights(weights: Iterable[Weights], layout: Layout, optimizer: str, used: float) -> StageWeights:
    """Return the sums over the weights of a stage.

    Args:
        weights: The weights of the stage.
        layout: The layout.
        optimizer: A key of [`OPTIMIZERS`].
        used: Share of the routed experts that a token uses.
    """
    total = StageWeights()
    for_matrix, for_other = OPTIMIZERS[optimizer]
    by_layer: dict[int, float] = {}
    bytes_by_layer: dict[int, float] = {}
    sparse: set[int] = set()
    for weight in weights:
        computed = weight.on_one_device(layout)
        shard = layout.expert_shard if weight.is_expert else layout.shard
        stored = computed / shard
        total.computed += computed
        total.stored += stored
        total.optimizer += stored * (for_matrix if weight.is_matrix else for_other)
        size = weight.bytes / weight.number
        total.bytes += computed * size
        total.stored_bytes += stored * size
        bytes_by_layer[weight.layer] = bytes_by_layer.get(weight.layer, 0.0) + computed * size
        by_layer[weight.layer] = by_layer.get(weight.layer, 0.0) + computed
        if weight.is_expert or weight.layer == -1:
            total.largest_gradient = max(total.largest_gradient, computed * weight.largest / weight.number)
        if weight.is_expert:
            total.gathered_experts += computed - stored
            total.expert_bytes += computed * size
            sparse.add(weight.layer)
            # Each device of an expert group computes as many tokens as it has, whatever devices their experts are on.
            total.activated += weight.number * used / (1 if layout.expert > 1 else layout.tensor)
        else:
            total.gathered += computed - stored
            # The embedding is a look-up.
            total.activated += computed if weight.layer >= 0 else 0
        if not (weight.is_expert and layout.expert > 1):
            total.sums += weight.sums
    total.largest_layer, total.sparse_layers = max(by_layer.values()), len(sparse)
    total.largest_layer_bytes = max(bytes_by_layer.values())
    return total


__all__ = ["PACKED", "StageWeights", "Weights", "adapter_weights", "model_weights", "stage_weights"]
