"""The depth axis of a model: the names that rows and columns of every measurement have.

A *consumer* is a sublayer or the model's output: each of them reads a mixture of *sources*. Sources are the embedding
and the outputs of sublayers or, in Block AttnRes, sums of a block of them. L is the number of sublayers throughout.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

_KINDS = {"self_attention_res": "attention", "mlp_res": "MLP", "parallel_res": "layer"}


@dataclass(frozen=True)
class DepthAxis:
    """The names along the depth of a model.

    Attributes:
        kinds: The kinds of sublayers in a decoder layer, in order: `("attention", "MLP")`, or `("layer",)` where the
            two are parallel.
        consumers: `attention 0`, `MLP 0`, ..., `output`; L + 1 names.
        outputs: `embedding`, then the names of the sublayers; L + 1 names. These are the columns of a depth-mixing
            matrix.
        sources: What depth attention chooses from: `embedding`, then blocks by number or, where blocks hold one
            sublayer, the sublayers. Without depth attention, the same as `outputs`.
        block_size: The number of sublayers in a block; 1 where there are no blocks.
    """

    kinds: tuple[str, ...]
    consumers: tuple[str, ...]
    outputs: tuple[str, ...]
    sources: tuple[str, ...]
    block_size: int

    @property
    def num_sublayers(self) -> int:
        """The number of sublayers, L."""
        return len(self.consumers) - 1

    def kind(self, consumer: int) -> str:
        """Return the kind of a consumer; `output` for the last one."""
        return self.kinds[consumer % len(self.kinds)] if consumer < self.num_sublayers else "output"

    def members(self, source: int) -> range:
        """Return the indices in `outputs` of the outputs that a source sums up."""
        first = (source - 1) * self.block_size + 1
        return range(first, min(first + self.block_size, len(self.outputs))) if source else range(1)


def depth_axis(model: PreTrainedModel, num_sources: Sequence[int] | None = None) -> DepthAxis:
    """Name the consumers and sources of a model of the family.

    Args:
        model: A model of the family.
        num_sources: The number of sources of each consumer, L + 1 counts; `None` for a model without depth attention.

    Returns:
        The depth axis. Its block size follows from the counts.
    """
    names = sublayer_names(model.config)[: _count_sublayers(model)]
    outputs, block_size = ("embedding", *names), 1 if num_sources is None else _block_size(num_sources)
    sources = outputs
    if block_size > 1:
        sources = ("embedding", *(f"block {block}" for block in range(1, max(num_sources))))
    kinds = tuple(name.rpartition(" ")[0] for name in names[: len(model.config.sublayers)])
    return DepthAxis(kinds, (*names, "output"), outputs, sources, block_size)


def decoder_of(model: PreTrainedModel) -> nn.Module:
    """Return the module that holds the decoder layers, also where an adapter wraps the model."""
    return next(module for module in model.modules() if hasattr(module, "output_attn_res_proj"))


def sublayer_names(config: PreTrainedConfig) -> list[str]:
    """Return the names of all sublayers: `attention 0`, `MLP 0`, ..., or `layer 0`, ... where the two are parallel."""
    layers, sublayers = range(config.num_hidden_layers), config.sublayers
    return [f"{_KINDS.get(sublayer.name, sublayer.name)} {layer}" for layer in layers for sublayer in sublayers]


def _count_sublayers(model: PreTrainedModel) -> int:
    """Count the sublayers that a pass runs, L."""
    # A model may have fewer layers than its configuration counts, if somebody took layers out of it, or more, of which
    # a pass runs only as many as the configuration counts.
    return min(len(decoder_of(model).layers), model.config.num_hidden_layers) * len(model.config.sublayers)


def _block_size(num_sources: Sequence[int]) -> int:
    """Return the number of sublayers in a block: the distance at which consumers gain a source."""
    # A block becomes a source when its first sublayer has written, and the next consumer is the first to read it. So
    # the first consumer with 2 sources marks the begin of block 1, the first with 3 that of block 2. If there is but
    # one block, it ends with the model.
    begins = [list(num_sources).index(count) for count in range(2, max(num_sources) + 1)] + [len(num_sources)]
    return begins[1] - begins[0] if len(begins) > 1 else 1


__all__ = ["DepthAxis", "decoder_of", "depth_axis", "sublayer_names"]
