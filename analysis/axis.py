"""The depth axis of a model: the names of the rows and columns of every measurement.

A *consumer* is a sublayer or the model's output. Each consumer reads a mixture of *sources*: the embedding and the
outputs of sublayers or, in Block AttnRes, the sum of the outputs of each block. Reports and figures call a consumer a
*reader*. In all files of this folder, L is the number of sublayers.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeGuard

from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from attnres.decoder_attnres import ResidualModel
from attnres.utils.wording import counted

# Names of sublayers in the model -> names for people.
_KINDS = {"self_attention_res": "attention", "mlp_res": "MLP", "parallel_res": "layer"}


@dataclass(frozen=True)
class DepthAxis:
    """The names along the depth of a model.

    Attributes:
        kinds: The kinds of sublayers in a decoder layer, in order: `("attention", "MLP")`, or `("layer",)` where
            attention and MLP are parallel.
        consumers: `attention 0`, `MLP 0`, ..., `output`; L + 1 names.
        outputs: `embedding`, then the names of the sublayers; L + 1 names. These are the columns of a depth-mixing
            matrix.
        sources: The sources of depth attention: `embedding`, then `block 1`, `block 2`, ... or, where blocks hold one
            sublayer, the names of the sublayers. Without depth attention, the same as `outputs`.
        block_size: The number of sublayers in a block; 1 where there are no blocks.
        counts_layers: Whether the model's configuration gives the size of a block in decoder layers.
    """

    kinds: tuple[str, ...]
    consumers: tuple[str, ...]
    outputs: tuple[str, ...]
    sources: tuple[str, ...]
    block_size: int
    counts_layers: bool = False

    @property
    def block(self) -> str:
        """The size of a block in the unit of the configuration: "block of 6 sublayers", or "block of 3 layers"."""
        if self.counts_layers:
            return f"block of {counted(self.block_size // len(self.kinds), 'layer')}"
        return f"block of {counted(self.block_size, 'sublayer')}"

    @property
    def num_sublayers(self) -> int:
        """The number of sublayers, L."""
        return len(self.consumers) - 1

    def kind(self, consumer: int) -> str:
        """Return the kind of the consumer with this index: one of `kinds`, or `output` for index L."""
        return self.kinds[consumer % len(self.kinds)] if consumer < self.num_sublayers else "output"

    def members(self, source: int) -> range:
        """Return the indices in `outputs` of the outputs that the source with this index sums up."""
        # Source 0 is the embedding alone. The last block may be shorter than the others.
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
    if num_sources is not None and block_size > 1:
        sources = ("embedding", *(f"block {block}" for block in range(1, max(num_sources))))
    kinds = tuple(name.rpartition(" ")[0] for name in names[: len(model.config.sublayers)])
    counts_layers = getattr(model.config, "attn_res_block_unit", 1) > 1
    return DepthAxis(kinds, (*names, "output"), outputs, sources, block_size, counts_layers)


def _is_decoder(module: nn.Module) -> TypeGuard[ResidualModel]:
    """Return whether a module holds the decoder layers of a model of the family."""
    # Only this module has the connection through which the output reads. Not `isinstance`: a checkpoint loaded with
    # `trust_remote_code=True` has its own copy of the class.
    return hasattr(module, "output_attn_res_proj")


def decoder_of(model: PreTrainedModel) -> ResidualModel:
    """Return the module that holds the decoder layers of a model of the family, also inside an adapter."""
    return next(filter(_is_decoder, model.modules()))


def sublayer_names(config: PreTrainedConfig) -> list[str]:
    """Return the names of all sublayers: `attention 0`, `MLP 0`, ..., or `layer 0`, ... for parallel sublayers."""
    layers, sublayers = range(config.num_hidden_layers), config.sublayers
    return [f"{_KINDS.get(sublayer.name, sublayer.name)} {layer}" for layer in layers for sublayer in sublayers]


def _count_sublayers(model: PreTrainedModel) -> int:
    """Count the sublayers that a pass runs, L."""
    # A user may have removed layers without changing the configuration. If there are more layers than the
    # configuration counts, a pass runs only the counted ones.
    return min(len(decoder_of(model).depth_layers), model.config.num_hidden_layers) * len(model.config.sublayers)


def _block_size(num_sources: Sequence[int]) -> int:
    """Return the number of sublayers in a block, from the number of sources of each consumer."""
    # A block becomes a source when its first sublayer has written. The next consumer is the first to read it. So block
    # 1 begins before the first consumer with 2 sources, and block 2 before the first with 3. The difference of the two
    # is the block size. A single block ends with the model.
    begins = [list(num_sources).index(count) for count in range(2, max(num_sources) + 1)] + [len(num_sources)]
    return begins[1] - begins[0] if len(begins) > 1 else 1


__all__ = ["DepthAxis", "decoder_of", "depth_axis", "sublayer_names"]
