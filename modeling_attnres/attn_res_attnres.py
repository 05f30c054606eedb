"""Attention residuals (arXiv 2603.15031): each sublayer attends over the outputs of the sublayers before it.

    h_l = sum_i a_{i->l} s_i,    a_{i->l} = softmax_i(w_l . (g_l * RMSNorm(s_i)))

This file holds the paper's method: Full AttnRes (section 3) and Block AttnRes (section 4), with their configuration
fields. `attn_res_switches_attnres` derives the ablations from it.
"""

from collections.abc import Mapping, Sequence
from functools import reduce
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig
from transformers import initialization as init

from .functional_attnres import accelerated, attend, reference
from .residual_attnres import (
    DepthState,
    ResidualConnection,
    ResidualNorm,
    field_defaults,
    is_count,
    norm_eps,
    one_of,
    require,
)


class AttnResFields:
    """Configuration fields of the paper's method; `attn_res_switches_attnres` adds its switches."""

    attn_res_block_size: int = 6
    """Number S >= 1 of *sublayers* (attention or MLP) in a block; a block is summed into one source. 1 is Full AttnRes.
    S may be odd, and the last block may be shorter."""

    attn_res_scale: str = "mean"
    """`"mean"`: the softmax average of the sources, for training from scratch. `"sum"`: that average times the number
    of sources, for retrofits: at zero queries it is the residual stream."""


class AttnRes(ResidualConnection):
    """Block or Full AttnRes: read by depth attention, write by adding to the current block.

    State: the sources `s_i`, each `[batch, seq, hidden]`. They are the embedding; the finished blocks, each the sum of
    its S sublayer outputs; and, once the current block has begun, its partial sum.

    Tensors: `weight` `[1, hidden]`, the pseudo-query `w_l`, starts at zero: uniform depth weights. It is not in an
    `nn.Linear`, so that quantisers and LoRA's `all-linear` leave it alone. The key norm's weight `g_l` is the
    [`ResidualNorm`] beside the connection, and starts at one.
    """

    name = "attn_res"
    fields = field_defaults(AttnResFields)
    options = {"block_size": "attn_res_block_size", "scale": "attn_res_scale"}
    retrofit = {"attn_res_scale": "sum"}  # at zero queries the aggregate is the plain sum of all outputs
    has_norm = True

    def __init__(self, config: PreTrainedConfig, sublayer: int):
        super().__init__(config, sublayer)
        self.config = config
        self.block_size, self.scale = block_sublayers(config), config.attn_res_scale
        self.eps = norm_eps(config)
        self.weight = nn.Parameter(torch.zeros(1, config.hidden_size))

    @classmethod
    def check(cls, config: PreTrainedConfig) -> None:
        """Check block size and scale, and that no switch is set, which this class would ignore; see the base class."""
        cls.check_blocks(config)
        for field in vars(config):
            is_known = field in cls.fields or not field.startswith("attn_res_")
            allowed = "left out: it is no field of the code beside these weights. Install `attnres`"
            require(config, field, is_known, allowed)

    @classmethod
    def check_blocks(cls, config: PreTrainedConfig) -> None:
        """Check block size and scale.

        Raises:
            ValueError: a value is not allowed.
        """
        allowed = f"an integer >= 1 (block size in {'sublayers' if block_unit(config) == 1 else 'layers'})"
        require(config, "attn_res_block_size", is_count(config.attn_res_block_size), allowed)
        require(config, "attn_res_scale", config.attn_res_scale in ("mean", "sum"), one_of(("mean", "sum")))

    @classmethod
    def differs_from_standard(cls, config: PreTrainedConfig, tensors: Mapping[str, Tensor]) -> str | None:
        """Return a reason if a query is not zero or the scale is "mean"; see the base class."""
        for name, tensor in tensors.items():
            if tensor.ndim == 2 and tensor.count_nonzero():  # a query; key norms have one dimension
                return f"`{name}` is a trained pseudo-query, with entries up to {tensor.abs().max():.3g}"
        is_sum = config.attn_res_scale == "sum"
        return None if is_sum else "with the scale 'mean' it differs from the sum by the norms' epsilons"

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Set the query to zero: uniform depth weights."""
        init.zeros_(self.weight)

    def forward(self, state: DepthState, norm_weight: Tensor) -> tuple[Tensor, Tensor, Sequence[Tensor]]:
        """Read in one step, without `coefficients` and `mix`, by the implementation that the configuration names.

        Args:
            state: the sources, each `[batch, seq, hidden]`.
            norm_weight: `g_l` `[hidden]`.

        Returns:
            The input `[batch, seq, hidden]`, the depth weights `[sources, batch, seq]`, and the sources.
        """
        options = self.eps, self.scale == "sum", self.config.depth_attention_implementation
        return attend(self.weight, as_sources(state), norm_weight, *options, fuse_later_grads=True)

    def coefficients(self, state: DepthState, norm_weight: Tensor) -> Tensor:
        """Compute the factor of each source `[sources, batch, seq]`: the depth weights, times n for the scale "sum"."""
        _, weights = reference(self.weight[0], as_sources(state), norm_weight, self.eps, self.scale == "sum")
        return weights * len(weights) if self.scale == "sum" else weights

    def mix(self, state: DepthState, coefficients: Tensor) -> tuple[Tensor, DepthState]:
        """Compute `sum_i a_i s_i` `[batch, seq, hidden]`; see the base class."""
        sources = as_sources(state)
        # pyrefly: ignore[bad-return]  # the embedding is always a source
        return sum(weight.unsqueeze(-1) * source for weight, source in zip(coefficients, sources)), sources

    def write(self, state: DepthState, output: Tensor) -> tuple[Tensor, ...]:
        """Add an output `[batch, seq, hidden]` to the current block, or begin a block with it."""
        sources = as_sources(state)
        if self.sublayer % self.block_size == 0:
            # Under autocast the embedding is wider than an output; a block is summed in the wider of the two dtypes.
            return *sources, output.to(sources[0].dtype)
        return *sources[:-1], sources[-1] + output

    def partial_sum(self, state: DepthState) -> Tensor:
        """Return the last source `[batch, seq, hidden]`; see the base class."""
        return as_sources(state)[-1]

    def running_sum(self, state: DepthState) -> Tensor:
        """Return the sum of the sources `[batch, seq, hidden]`; see the base class."""
        return reduce(torch.add, as_sources(state))

    @classmethod
    def inference_plan(cls, model: nn.Module) -> Any:
        """Return a plan of `attnres.accelerated` that reads for all connections; see the base class."""
        return None if accelerated is None else accelerated.inference_plan(model, AttnRes, ResidualNorm)

    @classmethod
    def training_plan(cls, model: nn.Module) -> Any:
        """Return a plan of `attnres.accelerated` that reads for all connections; see the base class."""
        return None if accelerated is None else accelerated.training_plan(model, AttnRes, ResidualNorm)

    def extra_repr(self) -> str:
        """Return the sizes that `print(model)` shows."""
        return f"{self.config.hidden_size}, sublayer={self.sublayer}, block_size={self.block_size}, scale={self.scale}"


def block_unit(config: PreTrainedConfig) -> int:
    """Return the number of sublayers that `attn_res_block_size` counts as one; Kimi K3 counts decoder layers."""
    return getattr(config, "attn_res_block_unit", 1)


def block_sublayers(config: PreTrainedConfig) -> int:
    """Return the size of a block in sublayers, whatever `attn_res_block_size` counts."""
    return config.attn_res_block_size * block_unit(config)


def as_sources(state: DepthState) -> tuple[Tensor, ...]:
    """Return the state as a tuple of sources; before the first write it is the embedding alone."""
    return state if isinstance(state, tuple) else (state,)
