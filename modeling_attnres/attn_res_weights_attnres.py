"""The depth weights of attention residuals with switches set: query, keys, activation, heads, count prior, values."""

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedConfig
from transformers import initialization as init
from transformers.utils.generic import maybe_autocast

from .attn_res_attnres import AttnRes
from .functional_attnres import dtypes_of, one_over_rms


class DepthWeights(AttnRes):
    """`weight` is `w_l` `[1, hidden]`, `W_l` `[hidden, hidden]`, or absent beside the logits `bias` `b_l` `[sources]`.
    The scalar `gamma` `[1]` is there if the connection is gated, the key norm if there are keys to norm.
    """

    def __init__(self, config: PreTrainedConfig, sublayer: int):
        super().__init__(config, sublayer)
        self.heads, self.window, self.has_prior = (
            config.attn_res_heads,
            config.attn_res_window,
            config.attn_res_count_prior,
        )
        self.is_static, self.is_dynamic = (config.attn_res_query == name for name in ("none", "input_dependent"))
        self.is_sigmoid, self.is_gated = config.attn_res_activation == "sigmoid", config.attn_res_gated
        self.has_norm, self.norms_values = (
            config.attn_res_key_norm and not self.is_static,
            config.attn_res_values == "normed",
        )
        if self.is_dynamic:
            self.weight = nn.Parameter(torch.zeros(config.hidden_size, config.hidden_size))
        if self.is_static:
            self.weight, self.bias = None, nn.Parameter(torch.zeros(len(self.counts())))
        if self.is_gated:
            self.gamma = nn.Parameter(torch.zeros(1))

    @torch.no_grad()
    def reset_parameters(self) -> None:
        for tensor in self.parameters(recurse=False):
            init.zeros_(tensor)

    def counts(self, is_windowed: bool = True) -> list[int]:
        """How many outputs each source sums up."""
        sizes = (min(self.block_size, self.sublayer - i) for i in range(0, self.sublayer, self.block_size))
        return self.within_window([1, *sizes]) if is_windowed else [1, *sizes]

    def within_window(self, sources: list) -> list:
        """The first of them, and of the others those that the window leaves."""
        return sources if self.window is None else [sources[0], *sources[1:][-self.window :]]

    def weigh(
        self, sources: Sequence[Tensor], previous: Tensor | None, norm_weight: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """The `a` `[sources, batch, seq]`, of several heads their mean; and by what each source is multiplied,
        `[sources, batch, seq, 1]` or, with several heads, `hidden` in the place of 1. In float32 or wider.

        `previous` is the `x` of an input-dependent query.
        """
        sources = torch.broadcast_tensors(*sources)
        dtype, width = dtypes_of(sources)[1], sources[0].shape[-1]
        # Under autocast the products would fall to half precision.
        with maybe_autocast(sources[0].device.type, enabled=False):
            inverse = None
            if self.has_norm or self.norms_values:
                inverse = torch.stack([one_over_rms(source, self.eps, dtype).unsqueeze(-1) for source in sources])
            logits = self._logits(sources, inverse, previous, norm_weight, dtype)  # (sources, batch, seq, heads)
            if self.is_sigmoid:
                weights = mixing = logits.sigmoid() * (2 if self.scale == "sum" else 1)
            else:
                exp = (logits - logits.detach().amax(0)).exp()
                weights = exp / exp.sum(0)
                # Not `weights * n`: this is exactly one where all logits are equal.
                mixing = exp * (len(sources) / exp.sum(0)) if self.scale == "sum" else weights
            if self.heads > 1:
                mixing = mixing.repeat_interleave(width // self.heads, dim=-1)
            if self.norms_values:
                mixing = mixing * inverse
            return weights.mean(-1), self.gamma.to(dtype) * mixing if self.is_gated else mixing

    def _logits(
        self,
        sources: Sequence[Tensor],
        inverse: Tensor | None,
        previous: Tensor | None,
        norm_weight: Tensor | None,
        dtype: torch.dtype,
    ) -> Tensor:
        if self.is_static:
            shape = sources[0].shape
            if len(self.bias) != len(sources):
                raise ValueError(
                    f"sublayer {self.sublayer} has static logits for {len(self.bias)} sources, and reads "
                    f"{len(sources)}: layers cannot be moved in this model, removed or added."
                )
            logits = self.bias.to(dtype).view(-1, *(1 for _ in shape)).expand(-1, *shape[:-1], 1)
        else:
            query = F.linear(previous.to(dtype), self.weight.to(dtype)) if self.is_dynamic else self.weight[0].to(dtype)
            if self.has_norm:
                query = query * norm_weight.to(dtype)
            logits = torch.stack([(query * source).unflatten(-1, (self.heads, -1)).sum(-1) for source in sources])
            logits = logits * inverse if self.has_norm else logits
        if self.has_prior:
            logits = torch.stack([logit + math.log(count) for logit, count in zip(logits, self.counts())])
        return logits


__all__ = ["DepthWeights"]
