"""Attention residuals (arXiv 2603.15031): each sublayer attends over the outputs of the sublayers before it.

    h_l = sum_i a_{i->l} s_i,    a_{i->l} = softmax_i(w_l . (g_l * RMSNorm(s_i)))

This file holds the paper's method: Full AttnRes (section 3) and Block AttnRes (section 4), with their configuration
fields. `attn_res_switches_attnres` derives the ablations from it.
"""

import math
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
    """Configuration fields of attention residuals.

    The first two choose the form. The others are *switches*, off by default: ablations of the paper's Table 4 and later
    variants. With `k_i = g_l * RMSNorm(s_i)` the default is `h_l = sum_i a_i s_i`, `a = softmax_i(w_l . k_i)`.
    """

    attn_res_block_size: int = 6
    """Number S >= 1 of *sublayers* (attention or MLP) in a block; a block is summed into one source. 1 is Full AttnRes.
    S may be odd, and the last block may be shorter."""

    attn_res_scale: str = "mean"
    """`"mean"`: the softmax average of the sources, for training from scratch. `"sum"`: that average times the number
    of sources, for retrofits: at zero queries it is the residual stream."""

    attn_res_query: str = "learned"
    """`"learned"`: the pseudo-query `w_l`. `"input_dependent"`: `W_l x` in its place, where `x` is the input that the
    previous sublayer read (for the first sublayer the embedding). `"none"`: `a = softmax(b_l)`, one learned logit per
    source."""

    attn_res_activation: str = "softmax"
    """`"softmax"`, or `"sigmoid"`: `a_i = sigmoid(logit_i)` with the scale `"mean"`, and `2 sigmoid(logit_i)` with
    `"sum"`, which at zero queries is the residual stream. Neither is multiplied by the number of sources."""

    attn_res_key_norm: bool = True
    """Whether keys are normed; if not, `k_i = s_i`."""

    attn_res_heads: int = 1
    """Number H of heads, a divisor of `hidden_size`: each group of channels has its own softmax. The key norm is over
    all channels."""

    attn_res_temperature: float = 1.0
    """Number T > 0 by which logits are divided: above 1 the weights are flatter, as several heads make them."""

    attn_res_window: int | None = None
    """With an integer k >= 1, a sublayer reads only the embedding and the last k of the other sources."""

    attn_res_values: str = "raw"
    """`"raw"`, or `"normed"`: `h = sum_i a_i s_i / rms(s_i)`."""

    attn_res_blocks: str = "sum"
    """`"sum"`, or `"rms"`: a finished block is `sum_i v_i / rms(v_i)`. The embedding stays raw, and so does the partial
    sum of an unfinished block."""

    attn_res_count_prior: bool = False
    """Whether `log(number of outputs summed in the source)` is added to each logit."""

    attn_res_gated: bool = False
    """`True` adds depth attention to the residual stream: `h = v_0 + .. + v_{l-1} + gamma_l sum_i a_i s_i`. The scalar
    `gamma_l` starts at zero, so the model starts as the residual stream with any other settings. The scale `"sum"`
    multiplies the second sum by the number of sources."""


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
        """Check block size and scale, and that no switch is set; see [`ResidualConnection.check`]."""
        cls.check_blocks(config)
        # Code beside weights may have this class alone, which would ignore a switch.
        for field, default in SWITCHES.items():
            allowed = f"{default!r} in the code beside these weights. Load the model by an installed `attnres`"
            require(config, field, getattr(config, field) == default, allowed)

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
    def describe(cls, config: PreTrainedConfig) -> str:
        """Return, for example, "Block AttnRes, 4 blocks of 6 sublayers (24 sublayers), scale mean"."""
        size, sublayers = block_sublayers(config), config.num_sublayers
        count = math.ceil(sublayers / size)
        unit = block_unit(config)
        length = f"{size} sublayers" if unit == 1 else f"{config.attn_res_block_size} layers"
        blocks = f"Block AttnRes, {count} blocks of {length}" if count > 1 else "Block AttnRes, one block"
        total = f"{sublayers} sublayers" if unit == 1 else f"{sublayers // unit} layers"
        return f"{'Full AttnRes' if size == 1 else blocks} ({total}), scale {config.attn_res_scale}"

    @classmethod
    def differs_from_standard(cls, config: PreTrainedConfig, tensors: Mapping[str, Tensor]) -> str | None:
        """Return a reason if a query is not zero or the scale is "mean"; see the base class."""
        for name, tensor in tensors.items():
            if tensor.ndim == 2 and tensor.count_nonzero():  # a query; key norms have one dimension
                return f"`{name}` is a trained pseudo-query, with entries up to {tensor.abs().max():.3g}"
        is_sum = config.attn_res_scale == "sum"
        return None if is_sum else "with the scale 'mean' it differs from the sum by the norms' epsilons"

    @classmethod
    def plan_change(cls, config: PreTrainedConfig, connections: Mapping[str, "AttnRes"], block_size: int) -> None:
        """Regroup the sublayers into blocks of another size, where that keeps the function.

        Up to sublayer `min(S, S')` the sources are the same. A later one must have a zero query and the scale "sum":
        then it reads the sum of all earlier outputs, however they are grouped.

        Args:
            config: the configuration to change.
            connections: the model's connections by module name.
            block_size: the new value of `attn_res_block_size`.

        Raises:
            ValueError: the function would change.
        """
        same_until = min(config.attn_res_block_size, block_size) * block_unit(config)
        if block_size == config.attn_res_block_size:
            same_until = config.num_sublayers
        for name, connection in connections.items():
            largest = connection.weight.abs().max().item()
            if connection.sublayer > same_until and (largest > 0 or config.attn_res_scale != "sum"):
                reason = f"its largest entry is {largest:.3g}" if largest > 0 else "the scale is 'mean'"
                raise ValueError(
                    f"blocks of {block_size} sublayers would change the function: `{name}.weight` reads other sources "
                    f"then, and {reason}. Only zero queries with the scale 'sum' keep the function."
                )
        config.attn_res_block_size = block_size
        cls.check(config)

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


# Fields of the forms in `attn_res_switches_attnres`, with the values that the plain form has.
SWITCHES: dict[str, Any] = {
    field: default for field, default in AttnRes.fields.items() if field not in AttnRes.options.values()
}


def block_unit(config: PreTrainedConfig) -> int:
    """Return the number of sublayers that `attn_res_block_size` counts as one; Kimi K3 counts decoder layers."""
    return getattr(config, "attn_res_block_unit", 1)


def block_sublayers(config: PreTrainedConfig) -> int:
    """Return the size of a block in sublayers, whatever `attn_res_block_size` counts."""
    return config.attn_res_block_size * block_unit(config)


def as_sources(state: DepthState) -> tuple[Tensor, ...]:
    """Return the state as a tuple of sources; before the first write it is the embedding alone."""
    return state if isinstance(state, tuple) else (state,)
