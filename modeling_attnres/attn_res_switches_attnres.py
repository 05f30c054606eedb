"""Attention residuals with switches set, in plain PyTorch; `attn_res_fields_attnres` says what each of them means."""

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig

from .attn_res_attnres import AttnRes
from .attn_res_fields_attnres import never_standard, switches
from .attn_res_weights_attnres import DepthWeights
from .functional_attnres import attend, dtypes_of, one_over_rms
from .residual_attnres import DepthState


class Depth(NamedTuple):
    """What a read sees: tensors `[batch, seq, hidden]`, of which those after `sources` are there if they are needed."""

    sources: tuple[Tensor, ...]
    normed: Tensor | None  # sum_i v_i / rms(v_i) of the unfinished block whose raw sum is the last source
    stream: Tensor | None  # v_0 + .. + v_{l-1}
    previous: Tensor | None  # what the sublayer before has read; for the first one the embedding


class SwitchedAttnRes(DepthWeights):
    """State: the tensors of a [`Depth`] in a row, without those that a window drops.

    Where blocks sum normed outputs, `write` leaves the newest output raw behind `normed`, and the next read takes its
    norm: so that `write` is linear, and `1 / rms(v)` a coefficient of that read.
    """

    def __init__(self, config: PreTrainedConfig, sublayer: int):
        super().__init__(config, sublayer)
        self.norms_blocks = config.attn_res_blocks == "rms"
        self.is_indexed = self.is_static or self.has_prior or self.norms_blocks or self.window is not None
        # These leave the aggregation of what they take for sources as it is.
        self.is_plain = {"attn_res_window", "attn_res_blocks", "attn_res_gated"} >= switches(config).keys()

    @classmethod
    def describe(cls, config: PreTrainedConfig) -> str:
        named = (f"{field.removeprefix('attn_res_')} {value}" for field, value in switches(config).items())
        return ", ".join([super().describe(config), *named])

    @classmethod
    def differs_from_standard(cls, config: PreTrainedConfig, tensors: Mapping[str, Tensor]) -> str | None:
        read = "_proj.gamma" if config.attn_res_gated else "_proj."
        for name, tensor in tensors.items():
            if read in name and tensor.count_nonzero():
                return f"`{name}` is trained, with entries up to {tensor.abs().max():.3g}"
        return None if config.attn_res_gated else never_standard(config) or super().differs_from_standard(config, {})

    @classmethod
    def plan_change(cls, config: PreTrainedConfig, connections: Mapping[str, AttnRes], block_size: int) -> None:
        """Regroup the sublayers into blocks of another size, if the function is that of the standard residual."""
        tensors = {f"{name}.{key}": value for name, of in connections.items() for key, value in of.named_parameters()}
        reason = cls.differs_from_standard(config, tensors)
        if config.attn_res_query == "none":
            reason = "`attn_res_query` is 'none': a block of another size has other logits"
        if reason and block_size != config.attn_res_block_size:
            raise ValueError(f"blocks of {block_size} sublayers would change the function: {reason}.")
        config.attn_res_block_size = block_size
        cls.check(config)

    @classmethod
    def reader(cls, model: nn.Module) -> None:
        return None

    def forward(self, state: DepthState, norm_weight: Tensor | None = None) -> tuple[Tensor, Tensor, DepthState]:
        """Read; the depth weights are the `a`, of several heads their mean, and zero for sources that are dropped."""
        inverse = self._inverse(state)
        depth = self._open(state, inverse)
        if self.is_plain:
            implementation, is_sum = self.config.depth_attention_implementation, self.scale == "sum"
            read = attend(self.weight, depth.sources, norm_weight, self.eps, is_sum, implementation, True)
            attended, weights, sources = read
            depth = depth._replace(sources=tuple(sources))
            inputs, state = self._close(depth, self.gamma * attended if self.is_gated else attended)
        else:
            weights, mixing = self.weigh(depth.sources, depth.previous, norm_weight)
            inputs, state = self.mix(state, (mixing, inverse))
        if self.window is not None and (dropped := len(self.counts(is_windowed=False)) - len(weights)):
            weights = torch.cat([weights[:1], weights.new_zeros(dropped, *weights.shape[1:]), weights[1:]])
        return inputs, weights, state

    def coefficients(self, state: DepthState, norm_weight: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """By what each source is multiplied, as [`weigh`] returns it; and `1 / rms(v)` `[batch, seq, 1]` of the newest
        output, if a block sums it up normed."""
        inverse = self._inverse(state)
        depth = self._open(state, inverse)
        return self.weigh(depth.sources, depth.previous, norm_weight)[1], inverse

    def mix(self, state: DepthState, coefficients: tuple[Tensor, Tensor | None]) -> tuple[Tensor, DepthState]:
        mixing, inverse = coefficients
        depth = self._open(state, inverse)
        return self._close(depth, sum(share * source for share, source in zip(mixing, depth.sources)))

    def write(self, state: tuple[Tensor, ...], output: Tensor) -> tuple[Tensor, ...]:
        sources = list(state)
        carried = [sources.pop()] if self.is_dynamic else []
        if self.is_gated:
            carried = [sources.pop() + output, *carried]
        if self.norms_blocks and self.sublayer % self.block_size:
            carried = [sources.pop(), output, *carried]
        return *super().write(tuple(sources), output), *carried

    def _inverse(self, state: DepthState) -> Tensor | None:
        """`1 / rms(v)` `[batch, seq, 1]` of the newest output, if there is one and a block sums it up normed."""
        if not (self.norms_blocks and isinstance(state, tuple)):
            return None
        newest = state[-1 - self.is_gated - self.is_dynamic]
        return one_over_rms(newest, self.eps, dtypes_of(state)[1]).unsqueeze(-1)

    def _open(self, state: DepthState, inverse: Tensor | None) -> Depth:
        if not isinstance(state, tuple):
            return Depth((state,), None, state, state)
        sources, normed = list(state), None
        previous = sources.pop() if self.is_dynamic else None
        stream = sources.pop() if self.is_gated else None
        if self.norms_blocks:
            place = (self.sublayer - 1) % self.block_size  # of the newest output in its block
            normed = (inverse * (sources.pop() if place else sources[-1])).to(sources[0].dtype)
            normed = sources.pop() + normed if place else normed
            if place == self.block_size - 1:
                sources[-1], normed = normed, None
        sources = self.within_window(sources)
        if self.is_indexed and len(sources) != (count := len(self.counts())):
            raise ValueError(
                f"sublayer {self.sublayer} reads {count} sources, and there are {len(sources)}: with these switches "
                "layers cannot be removed from a model."
            )
        return Depth(tuple(sources), normed, stream, previous)

    def _close(self, depth: Depth, attended: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        inputs = depth.stream + attended if self.is_gated else attended
        inputs = inputs.to(dtypes_of(depth.sources)[0])
        kept = (depth.normed is not None, depth.normed), (self.is_gated, depth.stream), (self.is_dynamic, inputs)
        return inputs, (*depth.sources, *(tensor for is_kept, tensor in kept if is_kept))


__all__ = ["SwitchedAttnRes"]
