"""Scaled residuals: one stream, where stream and outputs are multiplied by learned or fixed factors.

    h_{l+1} = alpha_l * (h_l + c_l) + beta_l * v_l

    form          alpha               beta               c     learned
    layer_scale   1                   b `[d]`            0     b, from `scaled_start` (LayerScale)
    rezero        1                   b                  0     b, from `scaled_start` (ReZero, SkipInit)
    stream        a `[d]`             1                  0     a, from 1 (Doge)
    shifted       a `[d]`             1                  `[d]` a from 1, c from 0 (ZAYA)
    layer         s after a layer     s after a layer    0     s, from 1 (Gemma 4)
    depth         sqrt((k - 1) / k)   sqrt(1 / k)        0     nothing; k = l + 2 (Beam)
    mixed         sqrt(1 - beta^2)    sigmoid(w / 0.3)   0     w `[d]`, from beta = sqrt(1 / k) (Muse Spark)

A learned factor is stored as its difference from 1 or, in `mixed`, w as its difference from the start; there `alpha^2`
is at least 1e-3. The first five forms start as the standard model, the first two with `scaled_start=1`. With `depth`,
the stream is the standard one times `(1 + l)^(-1/2)`, so a norm's epsilon acts `1 + l` times as strongly; so it is with
`mixed` at its start.
"""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig
from transformers import initialization as init

from .residual_attnres import DepthState, ResidualConnection, field_defaults, is_number, one_of, require
from .streams_attnres import wide

# Form -> whether an untrained model computes what the standard model computes, if `scaled_start` is 1.
_FORMS = {
    "layer_scale": True,
    "rezero": True,
    "stream": True,
    "shifted": True,
    "layer": True,
    "depth": False,
    "mixed": False,
}
_TEMPERATURE, _LEAST = 0.3, 1e-3  # of `mixed`; the second bounds `alpha^2`


class ScaledFields:
    """Configuration fields of `residual_connection="scaled"`."""

    scaled_form: str = "layer_scale"
    """Form of the factors: `"layer_scale"`, `"rezero"`, `"stream"`, `"shifted"`, `"layer"`, `"depth"` or `"mixed"`."""

    scaled_start: float = 1.0
    """Start of the outputs' factors with `"layer_scale"` and `"rezero"`, from -100 to 100."""


class Scaled(ResidualConnection):
    """A residual stream with factors. State: the stream `[batch, seq, hidden]` and, from a read to its write, factors.

    Tensors, where the form has them: `weight` `[hidden]` or `[1]`, and `shift` `[hidden]`. The output has neither.
    """

    name = "scaled"
    summary = "scaled outputs or stream"
    used_by = "ZAYA, Gemma 4"
    own_start = "outputs times 1; LayerScale's and ReZero's near 0 by `scaled_start`"
    exact = "5 of 7"
    measured = {"step": "1.01"}
    fields = field_defaults(ScaledFields)
    start_fields = ("scaled_start",)
    retrofit = {"scaled_start": 1.0}
    float32 = True

    def __init__(self, config: PreTrainedConfig, sublayer: int):
        super().__init__(config, sublayer)
        self.form_name, self.start = config.scaled_form, float(config.scaled_start)
        self.index = sublayer  # `sublayer` changes if a layer is moved
        per_layer = len(config.sublayers)
        is_output, ends_layer = sublayer >= config.num_sublayers, (sublayer + 1) % per_layer == 0
        sizes = {"rezero": 1, "depth": 0, "layer": 1 if ends_layer else 0}
        size = 0 if is_output else sizes.get(self.form_name, config.hidden_size)
        self.weight = nn.Parameter(torch.zeros(size)) if size else None
        self.shift = nn.Parameter(torch.zeros(size)) if size and self.form_name == "shifted" else None
        self.reset_parameters()

    @classmethod
    def check(cls, config: PreTrainedConfig) -> None:
        """Check both fields; see [`ResidualConnection.check`]."""
        require(config, "scaled_form", config.scaled_form in [*_FORMS], one_of(_FORMS))
        start = config.scaled_start
        is_valid = is_number(start) and -100 <= start <= 100
        require(config, "scaled_start", is_valid, "a number from -100 to 100")

    @classmethod
    def describe(cls, config: PreTrainedConfig) -> str:
        """Return, for example, "scaled residual (layer_scale)"."""
        return f"scaled residual ({config.scaled_form})"

    @classmethod
    def plan_retrofit(cls, config: PreTrainedConfig, **options) -> None:
        """Set the fields; see the base class.

        Raises:
            ValueError: also if the form changes how strongly the norms' epsilon acts.
        """
        super().plan_retrofit(config, **options)
        exact = [name for name, is_exact in _FORMS.items() if is_exact]
        allowed = f"{one_of(exact)} in a retrofit: the others shrink the stream, and the norms' epsilon acts more"
        require(config, "scaled_form", config.scaled_form in exact, allowed)
        require(config, "scaled_start", config.scaled_start == 1, "1 in a retrofit")

    @classmethod
    def differs_from_standard(cls, config: PreTrainedConfig, tensors: Mapping[str, Tensor]) -> str | None:
        """Return a reason if a factor is not 1, a shift not 0, or the form is never standard; see the base class."""
        if not _FORMS[config.scaled_form]:
            return f"`scaled_form` is {config.scaled_form!r}, which shrinks the stream"
        for name, tensor in tensors.items():
            if tensor.count_nonzero():
                return f"`{name}` is not zero: its factor is not 1, or it shifts the stream"
        return None

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Set the tensors to their start."""
        for tensor in (self.weight, self.shift):
            if tensor is not None:
                init.zeros_(tensor)
        if self.weight is not None and self.form_name in ("layer_scale", "rezero"):
            init.constant_(self.weight, self.start - 1)

    def factors(self, dtype: torch.dtype) -> tuple[Tensor | float, Tensor | float]:
        """Return `alpha` and `beta`, scalars or `[hidden]`.

        Args:
            dtype: dtype of learned factors.

        Raises:
            ValueError: the form is `mixed`, and layers were moved, removed or added.
        """
        k = self.sublayer + 2
        if self.form_name == "depth":
            return math.sqrt((k - 1) / k), math.sqrt(1 / k)
        if self.weight is None:
            return 1.0, 1.0
        weight = self.weight.to(dtype)
        if self.form_name == "mixed":
            if self.sublayer != self.index:
                raise ValueError(
                    f"the gate of sublayer {self.sublayer} is stored as a difference from the start of sublayer "
                    f"{self.index}: layers of this model cannot be moved, removed or added."
                )
            start = _TEMPERATURE * torch.logit(torch.tensor(k**-0.5, dtype=torch.float64)).item()
            logits = (start + weight) / _TEMPERATURE
            beta, rest = logits.sigmoid(), (-logits).sigmoid()  # `1 - beta` would round to 0
            return (rest * (1 + beta)).clamp(min=_LEAST).sqrt(), beta
        scaled = 1 + weight
        if self.form_name == "layer":
            return scaled, scaled
        return (1.0, scaled) if self.form_name in ("layer_scale", "rezero") else (scaled, 1.0)

    def coefficients(self, state: Tensor, norm: None = None) -> tuple[Tensor | float, ...] | None:
        """Compute `alpha`, `beta` and, if there is one, `alpha c`; `None` if the factors are 1."""
        dtype = wide(state)
        alpha, beta = self.factors(dtype)
        if not isinstance(alpha, Tensor) and not isinstance(beta, Tensor) and alpha == 1:
            return None
        return (alpha, beta) if self.shift is None else (alpha, beta, alpha * self.shift.to(dtype))

    def mix(self, state: Tensor, coefficients: tuple[Tensor | float, ...] | None) -> tuple[Tensor, Any]:
        """Return the stream as input, and with the factors of the write as state.

        The read computes these factors, because engines that shard or offload a module hold its tensors only while it
        is called.
        """
        return state, state if coefficients is None else (state, *coefficients)

    def write(self, state: DepthState, output: Tensor) -> Tensor:
        """Combine stream and output `[batch, seq, hidden]`, in float32 or wider, rounded once."""
        if isinstance(state, Tensor):
            return state + output
        stream, alpha, beta, *shift = state
        dtype = wide(stream)
        return sum(shift, alpha * stream.to(dtype) + beta * output.to(dtype)).to(stream.dtype)


__all__ = ["Scaled", "ScaledFields"]
