"""Attention residuals (arXiv 2603.15031): each sublayer attends over the outputs of those before it.

    h_l = sum_i softmax_i(w_l . (g_l * RMSNorm(s_i))) s_i

Full, or in blocks of S sublayers. Fields of the configuration, beside the switches of `attn_res_fields_attnres`:

- `attn_res_block_size`, 6 by default: S >= 1 in *sublayers* (attention or MLP). Each block is summed into one source.
  1 is Full AttnRes; S may be odd, and the last block may be shorter.
- `attn_res_scale`: `"mean"`, the default, is the softmax average of the sources (for training from scratch); `"sum"`
  that times their number (for retrofits: at zero queries it is the residual stream).
"""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig
from transformers import initialization as init

from .attn_res_fields_attnres import SWITCHES, check_switches, is_count, never_standard, switches
from .functional_attnres import accelerated, attend, reference
from .residual_attnres import DepthState, ResidualConnection, ResidualNorm, norm_eps, one_of, require


class AttnRes(ResidualConnection):
    """State: the sources `s_i`, which are the embedding, the finished blocks, each the sum of its S sublayer outputs,
    and the partial sum of the current block, if it has begun.

    `weight` is the pseudo-query `w_l` `[1, hidden]`: no `nn.Linear`, so that quantisers and LoRA's `all-linear` leave
    it alone. `g_l` is that of its [`ResidualNorm`].
    """

    name = "attn_res"
    fields = {"attn_res_block_size": 6, "attn_res_scale": "mean"} | SWITCHES
    options = {"block_size": "attn_res_block_size", "scale": "attn_res_scale"}
    retrofit = {"attn_res_scale": "sum"}  # at zero queries the aggregate is the plain sum of all outputs
    has_norm = True

    def __init__(self, config: PreTrainedConfig, sublayer: int):
        super().__init__(config, sublayer)
        self.config = config
        self.block_size, self.scale = config.attn_res_block_size, config.attn_res_scale
        self.eps = norm_eps(config)
        self.weight = nn.Parameter(torch.zeros(1, config.hidden_size))

    @classmethod
    def form(cls, config: PreTrainedConfig) -> "type[AttnRes]":
        if not switches(config):
            return AttnRes
        from .attn_res_switches_attnres import SwitchedAttnRes  # which derives from this class

        return SwitchedAttnRes

    @classmethod
    def check(cls, config: PreTrainedConfig) -> None:
        allowed = "an integer >= 1 (block size in sublayers)"
        require(config, "attn_res_block_size", is_count(config.attn_res_block_size), allowed)
        require(config, "attn_res_scale", config.attn_res_scale in ("mean", "sum"), one_of(("mean", "sum")))
        check_switches(config)

    @classmethod
    def describe(cls, config: PreTrainedConfig) -> str:
        size, sublayers = config.attn_res_block_size, config.num_sublayers
        count = math.ceil(sublayers / size)
        blocks = f"Block AttnRes, {count} blocks of {size} sublayers" if count > 1 else "Block AttnRes, one block"
        return f"{'Full AttnRes' if size == 1 else blocks} ({sublayers} sublayers), scale {config.attn_res_scale}"

    @classmethod
    def plan_retrofit(
        cls, config: PreTrainedConfig, num_blocks: int | None = None, full: bool = False, **options: Any
    ) -> None:
        """`block_size`, the number of blocks, or `full`; by default about 8 blocks (AttnRes, section 3)."""
        block_size = options.get("block_size", options.get("attn_res_block_size"))
        values = {"block_size": block_size, "num_blocks": num_blocks, "full": full or None}
        given = [name for name, value in values.items() if value is not None]
        if len(given) > 1:
            raise ValueError(f"give one of block_size, num_blocks and full, not {' and '.join(given)}.")
        if num_blocks is not None and num_blocks < 1:
            raise ValueError(f"`num_blocks` is {num_blocks}, but must be an integer >= 1.")
        config.attn_res_block_size = 1 if full else math.ceil(config.num_sublayers / (num_blocks or 8))
        super().plan_retrofit(config, **options)
        if reason := never_standard(config):
            raise ValueError(f"no model can be retrofitted so: {reason}. With `attn_res_gated` any can.")

    @classmethod
    def differs_from_standard(cls, config: PreTrainedConfig, tensors: Mapping[str, Tensor]) -> str | None:
        for name, tensor in tensors.items():
            if tensor.ndim == 2 and tensor.count_nonzero():
                return f"`{name}` is a trained pseudo-query, with entries up to {tensor.abs().max():.3g}"
        return None if config.attn_res_scale == "sum" else "the scale 'mean' is the sum only up to the norms' epsilons"

    @classmethod
    def plan_change(cls, config: PreTrainedConfig, connections: Mapping[str, "AttnRes"], block_size: int) -> None:
        """Regroup the sublayers into blocks of another size.

        Up to sublayer `min(S, S')` the sources are the same. A later one must have a zero query and the scale "sum":
        then it reads the sum of all that came before, in whatever groups.
        """
        same_until = min(config.attn_res_block_size, block_size)
        if block_size == config.attn_res_block_size:
            same_until = config.num_sublayers
        for name, connection in connections.items():
            largest = connection.weight.abs().max().item()
            if connection.sublayer > same_until and (largest > 0 or config.attn_res_scale != "sum"):
                reason = f"its largest entry is {largest:.3g}" if largest > 0 else "the scale is 'mean'"
                raise ValueError(
                    f"blocks of {block_size} sublayers would change the function: `{name}.weight` reads other sources "
                    f"then, and {reason}. The function stays for zero queries with the scale 'sum'."
                )
        config.attn_res_block_size = block_size
        cls.check(config)

    @torch.no_grad()
    def reset_parameters(self) -> None:
        init.zeros_(self.weight)  # uniform depth weights

    def forward(self, state: DepthState, norm_weight: Tensor) -> tuple[Tensor, Tensor, DepthState]:
        """`coefficients` and `mix` in one, by the fastest implementation."""
        options = self.eps, self.scale == "sum", self.config.depth_attention_implementation
        return attend(self.weight, _sources(state), norm_weight, *options, fuse_later_grads=True)

    def coefficients(self, state: DepthState, norm_weight: Tensor) -> Tensor:
        """The depth weights `[sources, batch, seq]`, with the scale "sum" times their number."""
        _, weights = reference(self.weight[0], _sources(state), norm_weight, self.eps, self.scale == "sum")
        return weights * len(weights) if self.scale == "sum" else weights

    def mix(self, state: DepthState, coefficients: Tensor) -> tuple[Tensor, DepthState]:
        sources = _sources(state)
        return sum(weight.unsqueeze(-1) * source for weight, source in zip(coefficients, sources)), sources

    def write(self, state: DepthState, output: Tensor) -> tuple[Tensor, ...]:
        sources = _sources(state)
        if self.sublayer % self.block_size == 0:
            # Under autocast the embedding is wider than an output; a block is summed in the wider of the two dtypes.
            return *sources, output.to(sources[0].dtype)
        return *sources[:-1], sources[-1] + output

    @classmethod
    def reader(cls, model: nn.Module) -> Any:
        return None if accelerated is None else accelerated.reader(model, AttnRes, ResidualNorm)

    def extra_repr(self) -> str:
        return f"{self.config.hidden_size}, sublayer={self.sublayer}, block_size={self.block_size}, scale={self.scale}"


def _sources(state: DepthState) -> tuple[Tensor, ...]:
    return state if isinstance(state, tuple) else (state,)
