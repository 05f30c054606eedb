"""What one layer of each backbone computes, declared: the sublayers that residual connections go between.

    v_l = f_l(h_l)        one attention or one MLP, with its norms

`BACKBONES` is all that the family knows of a backbone: a line there makes `attnres_{model type}` of it. Everything else
is `transformers`' own code.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

from transformers import PreTrainedConfig


@dataclass(frozen=True)
class Sublayer:
    """One sublayer: what a decoder layer computes between reading from the depth and writing to it.

    Args:
        name: of its residual connection: the tensors are `{name}_proj.weight` and `{name}_norm.weight`.
        branches: each a chain of modules of the layer, by name, that run one after the other: the norm before the
            attention or MLP, the module itself, a norm or dropout after it. All read `h_l`; `v_l` is their sum.
        multiplier: attribute of the layer that `v_l` is multiplied by.
    """

    name: str
    branches: tuple[tuple[str, ...], ...]
    multiplier: str | None = None

    @cached_property
    def first(self) -> str | None:
        """The module that all branches begin with and go on from: as a rule the norm."""
        first = self.branches[0][0]
        return first if all(len(branch) > 1 and branch[0] == first for branch in self.branches) else None


Sublayers = tuple[Sublayer, ...]


def attention_and_mlp(attention: tuple[str, ...], mlp: tuple[str, ...], multiplier: str | None = None) -> Sublayers:
    """The two sublayers of a layer whose attention and MLP follow each other; each is one chain of modules."""
    return (
        Sublayer("self_attention_res", (attention,), multiplier),
        Sublayer("mlp_res", (mlp,), multiplier),
    )


PRE_NORM = attention_and_mlp(("input_layernorm", "self_attn"), ("post_attention_layernorm", "mlp"))
NORM_AFTER = attention_and_mlp(("self_attn", "post_attention_layernorm"), ("mlp", "post_feedforward_layernorm"))
SANDWICH = attention_and_mlp(
    ("input_layernorm", "self_attn", "post_attention_layernorm"),
    ("pre_feedforward_layernorm", "mlp", "post_feedforward_layernorm"),
)


def gpt_neox_sublayers(config: PreTrainedConfig) -> Sublayers:
    """With a parallel residual, attention and MLP read the same input and together make one output."""
    attention = ("input_layernorm", "attention", "post_attention_dropout")
    mlp = ("post_attention_layernorm", "mlp", "post_mlp_dropout")
    if config.use_parallel_residual:
        return (Sublayer("parallel_res", (attention, mlp)),)
    return attention_and_mlp(attention, mlp)


# Model type in `transformers` -> the sublayers of a layer, or a function of the configuration that tells them.
BACKBONES: dict[str, Sublayers | Callable[[PreTrainedConfig], Sublayers]] = {
    "deepseek_v3": PRE_NORM,
    "gemma2": SANDWICH,
    "gemma3_text": SANDWICH,
    "gpt_neox": gpt_neox_sublayers,
    "granite": attention_and_mlp(*(s.branches[0] for s in PRE_NORM), multiplier="residual_multiplier"),
    "kimi_linear": PRE_NORM,
    "llama": PRE_NORM,
    "mistral": PRE_NORM,
    "mixtral": PRE_NORM,
    "olmo2": NORM_AFTER,
    "phi3": attention_and_mlp(
        ("input_layernorm", "self_attn", "resid_attn_dropout"),
        ("post_attention_layernorm", "mlp", "resid_mlp_dropout"),
    ),
    "qwen2": PRE_NORM,
    "qwen3": PRE_NORM,
    "qwen3_moe": PRE_NORM,
    "smollm3": PRE_NORM,
}

__all__ = ["BACKBONES", "NORM_AFTER", "PRE_NORM", "SANDWICH", "Sublayer", "Sublayers", "attention_and_mlp"]
