"""What the rows and columns of a measurement are called: the readers of a model, and the sources they read."""

from collections.abc import Sequence
from dataclasses import dataclass, fields

from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from attnres.utils.wording import counted

_KINDS = {"self_attention_res": "attention", "mlp_res": "MLP", "parallel_res": "layer"}


def deviation(mean: Tensor, mean_of_squares: Tensor) -> Tensor:
    """The standard deviation over tokens; the difference of both may fall below zero by rounding."""
    return (mean_of_squares - mean.square()).clamp_min(0).sqrt()


class Measurement:
    """A data class of measurements, which shows itself by its shapes and not by its numbers."""

    def __repr__(self) -> str:
        shown = (f"{field.name}={_shown(getattr(self, field.name))}" for field in fields(self))
        return f"{type(self).__name__}({', '.join(shown)})"


def _shown(value: object) -> str:
    if isinstance(value, Tensor):
        return f"<{' x '.join(map(str, value.shape))}>"
    if isinstance(value, Depth):
        return f"<{counted(value.num_sublayers, 'sublayer')}>"
    return f"<{len(value)}>" if isinstance(value, list) else repr(value)


@dataclass(frozen=True)
class Depth:
    """The depth of a model.

    Attributes:
        kinds: of the sublayers of a decoder layer, in turn: `("attention", "MLP")`, or `("layer",)` where the two are
            parallel.
        readers: `attention 0`, `MLP 0`, ..., `output`, `[L + 1]`.
        outputs: `embedding`, then the sublayers by name, `[L + 1]`: those of which a mixing matrix tells.
        sources: `embedding`, then blocks by number or, where they are single, sublayers; those of the depth attention,
            and the same as `outputs` where there is none.
        block_size: sublayers in a block; 1 where there are no blocks.
    """

    kinds: tuple[str, ...]
    readers: tuple[str, ...]
    outputs: tuple[str, ...]
    sources: tuple[str, ...]
    block_size: int

    @property
    def num_sublayers(self) -> int:
        return len(self.readers) - 1

    def kind(self, reader: int) -> str:
        """That of a reader; `output` for the last one."""
        return self.kinds[reader % len(self.kinds)] if reader < self.num_sublayers else "output"

    def members(self, source: int) -> range:
        """The places in `outputs` of what a source sums up."""
        first = (source - 1) * self.block_size + 1
        return range(first, min(first + self.block_size, len(self.outputs))) if source else range(1)


def depth_of(model: PreTrainedModel, num_sources: Sequence[int] | None = None) -> Depth:
    """The depth of a model of the family, with how many sources each of its readers has, if it has depth attention."""
    names = sublayer_names(model.config)[: _count_sublayers(model)]
    outputs, block_size = ("embedding", *names), 1 if num_sources is None else _block_size(num_sources)
    sources = outputs
    if block_size > 1:
        sources = ("embedding", *(f"block {block}" for block in range(1, max(num_sources))))
    kinds = tuple(name.rpartition(" ")[0] for name in names[: len(model.config.sublayers)])
    return Depth(kinds, (*names, "output"), outputs, sources, block_size)


def _count_sublayers(model: PreTrainedModel) -> int:
    """How many a pass has: of layers that are there, and that the configuration counts."""
    return min(len(decoder_of(model).layers), model.config.num_hidden_layers) * len(model.config.sublayers)


def decoder_of(model: PreTrainedModel) -> nn.Module:
    """The module of a model of the family that has the layers, wherever adapters have put it."""
    return next(module for module in model.modules() if hasattr(module, "output_attn_res_proj"))


def sublayer_names(config: PreTrainedConfig) -> list[str]:
    """A name for each sublayer in turn: `attention 0`, `MLP 0`, ..., or `layer 0`, ... where the two are parallel."""
    layers, sublayers = range(config.num_hidden_layers), config.sublayers
    return [f"{_KINDS.get(sublayer.name, sublayer.name)} {layer}" for layer in layers for sublayer in sublayers]


def _block_size(num_sources: Sequence[int]) -> int:
    """Sublayers in a block, or all where there is one block: as many rows as gain no source after the first block's."""
    # A source begins with the output of one sublayer, and is read from the next one on; the first is the embedding.
    begins = [list(num_sources).index(count) for count in range(2, max(num_sources) + 1)] + [len(num_sources)]
    return begins[1] - begins[0] if len(begins) > 1 else 1


__all__ = ["Depth", "Measurement", "decoder_of", "depth_of", "deviation", "sublayer_names"]
