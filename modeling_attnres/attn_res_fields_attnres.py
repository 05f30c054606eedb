"""Switches of attention residuals: the ablations of the paper's Table 4 and their successors, as fields.

With k_i = g_l * RMSNorm(s_i), the default is h_l = sum_i a_i s_i, a = softmax_i(w_l . k_i). Any of these changes it:

- `attn_res_query`: `"learned"`, the pseudo-query `w_l`; `"input_dependent"`, `q = W_l x` in its place, where `x` is
  what the sublayer before has read (for the first one the embedding); `"none"`, `a = softmax(b_l)`, a logit per source.
- `attn_res_activation`: `"softmax"`; `"sigmoid"`, `a_i = sigmoid(logit_i)` with the scale "mean", and with "sum"
  `a_i = 2 sigmoid(logit_i)`, which at zero queries is the standard sum. Neither is multiplied by the number of sources.
- `attn_res_key_norm`, true by default: if false, `k_i = s_i`.
- `attn_res_heads`, 1 by default: H groups of channels, each with a softmax of its own; the key norm is over all.
- `attn_res_window`, `None` by default: k >= 1 leaves the embedding and the last k sources.
- `attn_res_values`: `"raw"`; `"normed"`, `h = sum_i a_i s_i / rms(s_i)`.
- `attn_res_blocks`: `"sum"`; `"rms"`, a finished block is `sum_i v_i / rms(v_i)`. The embedding is raw, and so is the
  partial sum of an unfinished block, which the last one may be.
- `attn_res_count_prior`, false by default: if true, `log(outputs that the source sums up)` is added to each logit.
- `attn_res_gated`, false by default: if true, `h = v_0 + .. + v_{l-1} + gamma_l sum_i a_i s_i` with a scalar `gamma_l`,
  at zero the standard residual whatever else is set; with the scale "sum" the second sum is times their number.

Everything trained starts at zero, `g` at one. `rms` has the epsilon of the backbone's norms.
"""

from typing import Any

from transformers import PreTrainedConfig

from .residual_attnres import one_of, require

SWITCHES: dict[str, Any] = {
    "attn_res_query": "learned",
    "attn_res_activation": "softmax",
    "attn_res_key_norm": True,
    "attn_res_heads": 1,
    "attn_res_window": None,
    "attn_res_values": "raw",
    "attn_res_blocks": "sum",
    "attn_res_count_prior": False,
    "attn_res_gated": False,
}
_NAMED = {
    "attn_res_query": ("learned", "input_dependent", "none"),
    "attn_res_activation": ("softmax", "sigmoid"),
    "attn_res_values": ("raw", "normed"),
    "attn_res_blocks": ("sum", "rms"),
}
# A field, its value, another field, what that must be then, and why.
_EXCLUDED = (
    ("attn_res_query", "none", "attn_res_key_norm", True, "static weights have no keys"),
    ("attn_res_query", "none", "attn_res_heads", 1, "static weights have one logit per source"),
    ("attn_res_activation", "sigmoid", "attn_res_count_prior", False, "only a softmax shares weight among sources"),
)
# Why a form does not start as the standard sum.
_NEVER = {
    "attn_res_window": "sources are dropped, without which the sum cannot be formed",
    "attn_res_values": "values are divided by their rms",
    "attn_res_blocks": "the outputs in a block are divided by their rms",
    "attn_res_count_prior": "sources of more outputs weigh more",
}


def switches(config: PreTrainedConfig) -> dict[str, Any]:
    """The switches that are not at their default, with their values."""
    own = vars(config)  # a configuration has its fields there, and finds them faster
    return {field: value for field, default in SWITCHES.items() if (value := own.get(field, default)) != default}


def check_switches(config: PreTrainedConfig) -> None:
    """Raises ValueError: a switch has a value that is not allowed, or not beside another one."""
    for field, allowed in _NAMED.items():
        require(config, field, getattr(config, field) in allowed, one_of(allowed))
    for field in ("attn_res_key_norm", "attn_res_count_prior", "attn_res_gated"):
        require(config, field, isinstance(getattr(config, field), bool), "true or false")
    heads, window, size = config.attn_res_heads, config.attn_res_window, config.hidden_size
    is_divisor = is_count(heads) and size % heads == 0
    require(config, "attn_res_heads", is_divisor, f"an integer >= 1 that divides `hidden_size` ({size})")
    require(config, "attn_res_window", window is None or is_count(window), "None or an integer >= 1")
    for field, value, other, must, reason in _EXCLUDED:
        is_allowed = getattr(config, field) != value or getattr(config, other) == must
        require(config, other, is_allowed, f"{must!r} where `{field}` is {value!r}: {reason}")


def never_standard(config: PreTrainedConfig) -> str | None:
    """Why a model with these switches starts as another function than the standard one, or `None`."""
    if config.attn_res_gated:
        return None
    named = {field: value for field, value in switches(config).items() if field in _NEVER}
    return next((f"`{field}` is {value!r}: {_NEVER[field]}" for field, value in named.items()), None)


def is_count(value: Any) -> bool:
    """Whether it is an integer >= 1."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


__all__ = ["SWITCHES", "check_switches", "is_count", "never_standard", "switches"]
