"""Attention residuals (arXiv 2603.15031): each sublayer attends over earlier outputs. With all switches.

The switches are the ablations of the paper's Table 4 and later variants; [`SwitchedAttnResFields`] documents them.
[`SwitchedAttnRes`] is the class that is registered as `"attn_res"`; where no switch is set, its `form` is the plain
[`AttnRes`], which has the fast implementations and is saved without this file.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedConfig
from transformers import initialization as init
from transformers.utils.generic import maybe_autocast

from .attn_res_attnres import AttnRes, AttnResFields, block_sublayers, block_unit
from .functional_attnres import attend, dtypes_of, inverse_rms
from .residual_attnres import DepthState, field_defaults, is_count, is_number, one_of, require


class SwitchedAttnResFields(AttnResFields):
    """Configuration fields of attention residuals, with the switches.

    The switches are off by default. With `k_i = g_l * RMSNorm(s_i)` the default is `h_l = sum_i a_i s_i`,
    `a = softmax_i(w_l . k_i)`.
    """

    attn_res_query: str = "learned"
    """`"learned"`: the pseudo-query `w_l`. `"input_dependent"`: `W_l x` in its place, where `x` is the input that the
    previous sublayer read (for the first sublayer the embedding). `"none"`: `a = softmax(b_l)`, one learned logit per
    source."""

    attn_res_activation: str = "softmax"
    """`"softmax"`, or `"sigmoid"`: `a_i = sigmoid(logit_i)` with the scale `"mean"`, and `2 sigmoid(logit_i)` with
    `"sum"`, which at zero queries is the residual stream. Neither is multiplied by the number of sources."""

    attn_res_key_norm: bool = True
    """`True` norms the keys; with `False`, `k_i = s_i`."""

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
    """`True` adds `log(number of outputs summed in the source)` to each logit."""

    attn_res_gated: bool = False
    """`True` adds depth attention to the residual stream: `h = v_0 + .. + v_{l-1} + gamma_l sum_i a_i s_i`. The scalar
    `gamma_l` starts at zero, so the model starts as the residual stream with any other settings. The scale `"sum"`
    multiplies the second sum by the number of sources."""


# Switch -> its value in the plain form.
SWITCHES: dict[str, Any] = {
    name: getattr(SwitchedAttnResFields, name) for name in SwitchedAttnResFields.__annotations__
}

# Switches whose values are names -> the allowed names.
_NAMES = {
    "attn_res_query": ("learned", "input_dependent", "none"),
    "attn_res_activation": ("softmax", "sigmoid"),
    "attn_res_values": ("raw", "normed"),
    "attn_res_blocks": ("sum", "rms"),
}
# Rows of (switch, its value, other switch, the value that the other must have then, reason).
_EXCLUDED = (
    ("attn_res_query", "none", "attn_res_key_norm", True, "static weights have no keys"),
    ("attn_res_query", "none", "attn_res_heads", 1, "static weights have one logit per source"),
    ("attn_res_activation", "sigmoid", "attn_res_count_prior", False, "only a softmax shares weight among sources"),
)
# Switches with which a model never starts as the residual stream, and why.
_NEVER_STANDARD = {
    "attn_res_window": "sources are dropped, so that the sum of all cannot be formed",
    "attn_res_values": "values are divided by their rms",
    "attn_res_blocks": "the outputs in a block are divided by their rms",
    "attn_res_count_prior": "sources of more outputs weigh more",
}


# Switches that leave the aggregation itself plain; a temperature divides the query.
_AROUND_READS = {"attn_res_window", "attn_res_blocks", "attn_res_gated", "attn_res_temperature"}


class SwitchedState(NamedTuple):
    """The tensors that a read uses, each `[batch, seq, hidden]`; except for the sources, `None` if not needed."""

    sources: tuple[Tensor, ...]
    normed: Tensor | None  # sum_i v_i / rms(v_i) over the unfinished block, whose raw sum is the last source
    stream: Tensor | None  # v_0 + .. + v_{l-1}, of gated connections
    previous: Tensor | None  # the input that the previous sublayer read, of input-dependent queries


class SwitchedAttnRes(AttnRes):
    """AttnRes with any combination of switches.

    State: the tensors of a [`SwitchedState`] in a tuple, without the sources that a window drops. Where blocks sum
    normed outputs, `write` appends the newest output raw after `normed`, and the next read norms it. So `write` stays
    linear, and `1 / rms(v)` is a coefficient of that read.

    Tensors, all of which start at zero: `weight` is `w_l` `[1, hidden]`, or `W_l` `[hidden, hidden]` for
    input-dependent queries. Static weights have the logits `bias` `[sources]` in its place. Gated connections have the
    scalar `gamma` `[1]`. There is a key norm if there are keys to norm.
    """

    name = "attn_res"  # it is registered in place of its base
    summary = "attention over depth"
    reference = "arXiv 2603.15031"
    used_by = "Kimi K3"
    state_size = "blocks + 1"
    measured = {"step": "1.03"}
    fields = field_defaults(SwitchedAttnResFields)

    def __init__(self, config: PreTrainedConfig, sublayer: int):
        super().__init__(config, sublayer)
        self.heads, self.window = config.attn_res_heads, config.attn_res_window
        self.temperature = float(config.attn_res_temperature)
        self.has_prior, self.is_gated = config.attn_res_count_prior, config.attn_res_gated
        self.is_static, self.is_dynamic = (config.attn_res_query == name for name in ("none", "input_dependent"))
        self.is_sigmoid = config.attn_res_activation == "sigmoid"
        self.has_norm = config.attn_res_key_norm and not self.is_static
        self.norms_values, self.norms_blocks = config.attn_res_values == "normed", config.attn_res_blocks == "rms"
        # These switches need the number of sources, which follows from the sublayer's index; `_open` checks the state.
        self.is_indexed = self.is_static or self.has_prior or self.norms_blocks or self.window is not None
        # Then the fast implementations apply.
        self.is_plain = _set_switches(config).keys() <= _AROUND_READS
        if self.is_dynamic:
            self.weight = nn.Parameter(torch.zeros(config.hidden_size, config.hidden_size))
        if self.is_static:
            self.register_parameter("weight", None)
            self.bias = nn.Parameter(torch.zeros(len(self.counts())))
        if self.is_gated:
            self.gamma = nn.Parameter(torch.zeros(1))

    @classmethod
    def form(cls, config: PreTrainedConfig) -> type[AttnRes]:
        """Return this class if a switch is set, otherwise the plain [`AttnRes`]."""
        return SwitchedAttnRes if _set_switches(config) else AttnRes

    @classmethod
    def check(cls, config: PreTrainedConfig) -> None:
        """Check all fields, also those that exclude each other; see [`ResidualConnection.check`]."""
        cls.check_blocks(config)
        for field, allowed in _NAMES.items():
            require(config, field, getattr(config, field) in allowed, one_of(allowed))
        for field in ("attn_res_key_norm", "attn_res_count_prior", "attn_res_gated"):
            require(config, field, isinstance(getattr(config, field), bool), "true or false")
        heads, window, size = config.attn_res_heads, config.attn_res_window, config.hidden_size
        temperature = config.attn_res_temperature
        is_allowed = is_number(temperature) and 1e-30 <= temperature <= 1e30  # usual logits divided by it are finite
        require(config, "attn_res_temperature", is_allowed, "a number from 1e-30 to 1e30")
        is_divisor = is_count(heads) and size % heads == 0
        require(config, "attn_res_heads", is_divisor, f"an integer >= 1 that divides `hidden_size` ({size})")
        require(config, "attn_res_window", window is None or is_count(window), "None or an integer >= 1")
        for field, value, other, must, reason in _EXCLUDED:
            is_allowed = getattr(config, field) != value or getattr(config, other) == must
            require(config, other, is_allowed, f"{must!r} where `{field}` is {value!r}: {reason}")

    @classmethod
    def describe(cls, config: PreTrainedConfig) -> str:
        """Return, for example, "Block AttnRes, 4 blocks of 6 sublayers (24 sublayers), scale mean"; switches follow."""
        size, sublayers = block_sublayers(config), config.num_sublayers
        count = math.ceil(sublayers / size)
        unit = block_unit(config)
        length = f"{size} sublayers" if unit == 1 else f"{config.attn_res_block_size} layers"
        blocks = f"Block AttnRes, {count} blocks of {length}" if count > 1 else "Block AttnRes, one block"
        total = f"{sublayers} sublayers" if unit == 1 else f"{sublayers // unit} layers"
        form = f"{'Full AttnRes' if size == 1 else blocks} ({total}), scale {config.attn_res_scale}"
        switches = (f"{field.removeprefix('attn_res_')} {value}" for field, value in _set_switches(config).items())
        return ", ".join([form, *switches])

    @classmethod
    def plan_retrofit(
        cls, config: PreTrainedConfig, num_blocks: int | None = None, full: bool = False, **options: Any
    ) -> None:
        """Set the fields for a retrofit; by default about 8 blocks (AttnRes, section 3).

        Args:
            config: the configuration to change.
            num_blocks: number of blocks; the block size is rounded up to hold all sublayers.
            full: whether each sublayer is a separate block.
            options: other options of the connection, such as `block_size`.

        Raises:
            ValueError: more than one of `block_size`, `num_blocks` and `full` is given; a value is not allowed; or with
                a switch that is set, the model never starts as the residual stream.
        """
        block_size = options.get("block_size", options.get("attn_res_block_size"))
        values = {"block_size": block_size, "num_blocks": num_blocks, "full": full or None}
        given = [name for name, value in values.items() if value is not None]
        if len(given) > 1:
            raise ValueError(f"give one of block_size, num_blocks and full, not {' and '.join(given)}.")
        if num_blocks is not None and not is_count(num_blocks):
            raise ValueError(f"`num_blocks` is {num_blocks!r}, but must be an integer >= 1.")
        units = config.num_sublayers / block_unit(config)
        config.attn_res_block_size = 1 if full else math.ceil(units / (num_blocks or 8))
        super().plan_retrofit(config, **options)
        if reason := _never_standard(config):
            raise ValueError(f"no model can be retrofitted so: {reason}. With `attn_res_gated` any can.")

    @classmethod
    def differs_from_standard(cls, config: PreTrainedConfig, tensors: Mapping[str, Tensor]) -> str | None:
        """Return a reason if a tensor is trained or a switch excludes the standard function; see the base class."""
        # With a gate, only the gate counts: behind a zero gate, queries have no effect.
        decisive = "_proj.gamma" if config.attn_res_gated else "_proj."
        for name, tensor in tensors.items():
            if decisive in name and tensor.count_nonzero():
                return f"`{name}` is trained, with entries up to {tensor.abs().max():.3g}"
        return None if config.attn_res_gated else _never_standard(config) or super().differs_from_standard(config, {})

    @classmethod
    def plan_change(cls, config: PreTrainedConfig, connections: Mapping[str, AttnRes], block_size: int) -> None:
        """Regroup the sublayers into blocks of another size, where that keeps the function.

        Up to sublayer `min(S, S')` the sources are the same. A later one must read the sum of all earlier outputs,
        however they are grouped: with a zero query, the scale "sum" and no switch. With switches, the whole model must
        compute the function of the standard decoder.

        Args:
            config: the configuration to change.
            connections: the model's connections by module name.
            block_size: the new value of `attn_res_block_size`.

        Raises:
            ValueError: the function would change.
        """
        if block_size != config.attn_res_block_size:
            same_until = min(config.attn_res_block_size, block_size) * block_unit(config)
            tensors = {
                f"{name}.{key}": value
                for name, connection in connections.items()
                if connection.sublayer > same_until or _set_switches(config)
                for key, value in connection.named_parameters()
            }
            reason = cls.form(config).differs_from_standard(config, tensors) if tensors else None
            if config.attn_res_query == "none":
                reason = "`attn_res_query` is 'none': a block of another size has other logits"
            if reason:
                raise ValueError(f"blocks of {block_size} sublayers would change the function: {reason}.")
        config.attn_res_block_size = block_size
        cls.check(config)

    @classmethod
    def inference_plan(cls, model: nn.Module) -> None:
        """Return `None`: no fast plan reads for these connections."""
        return None

    training_plan = inference_plan

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Set all tensors to zero."""
        for tensor in self.parameters(recurse=False):
            init.zeros_(tensor)

    def forward(self, state: DepthState, norm_weight: Tensor | None = None) -> tuple[Tensor, Tensor, DepthState]:
        """Read the input of a sublayer.

        Args:
            state: the tensors of a [`SwitchedState`] in a tuple.
            norm_weight: `g_l` `[hidden]`, or `None` without key norm.

        Returns:
            The input `[batch, seq, hidden]`; the depth weights `[sources, batch, seq]`, the mean over several heads and
            zero for sources that a window drops; the state.
        """
        inverse = self._newest_inverse_rms(state)
        opened = self._open(state, inverse)
        if self.is_plain:
            implementation, is_sum = self.config.depth_attention_implementation, self.scale == "sum"
            query = self.weight if self.temperature == 1 else self.weight / self.temperature
            attended, weights, sources = attend(
                query, opened.sources, norm_weight, self.eps, is_sum, implementation, fuse_later_grads=True
            )
            opened = opened._replace(sources=tuple(sources))
            inputs, state = self._close(opened, self.gamma * attended if self.is_gated else attended)
        else:
            weights, factors = self.weigh(opened.sources, opened.previous, norm_weight)
            inputs, state = self.mix(state, (factors, inverse))
        if self.window is not None and (dropped := len(self.counts(is_windowed=False)) - len(weights)):
            # The embedding stays first; the dropped sources come after it.
            weights = torch.cat([weights[:1], weights.new_zeros(dropped, *weights.shape[1:]), weights[1:]])
        return inputs, weights, state

    def coefficients(self, state: DepthState, norm_weight: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """Compute the coefficients of a read.

        Returns:
            The factor of each source, as [`weigh`] returns it; and `1 / rms(v)` `[batch, seq, 1]` of the newest output,
            or `None` if blocks sum raw outputs.
        """
        inverse = self._newest_inverse_rms(state)
        opened = self._open(state, inverse)
        return self.weigh(opened.sources, opened.previous, norm_weight)[1], inverse

    def mix(self, state: DepthState, coefficients: tuple[Tensor, Tensor | None]) -> tuple[Tensor, DepthState]:
        """Compute the weighted sum of the sources `[batch, seq, hidden]`; see the base class."""
        factors, inverse = coefficients
        opened = self._open(state, inverse)
        # pyrefly: ignore[bad-argument-type]  # the embedding is always a source
        return self._close(opened, sum(factor * source for factor, source in zip(factors, opened.sources)))

    def write(self, state: tuple[Tensor, ...], output: Tensor) -> tuple[Tensor, ...]:
        """Add an output `[batch, seq, hidden]` to block and stream, and keep it raw where the next read norms it."""
        # The state ends with the optional tensors `normed`, `stream` and `previous`, in this order.
        sources = list(state)
        carried = [sources.pop()] if self.is_dynamic else []
        if self.is_gated:
            carried = [sources.pop() + output, *carried]
        if self.norms_blocks and self.sublayer % self.block_size:
            carried = [sources.pop(), output, *carried]
        return *super().write(tuple(sources), output), *carried

    def partial_sum(self, state: DepthState) -> Tensor | None:
        """Return the last source; `None` if blocks sum normed outputs. See the base class."""
        return None if self.norms_blocks else super().partial_sum(self._sources_in(state))

    def running_sum(self, state: DepthState) -> Tensor | None:
        """Return the stream or the sum of the sources; `None` without either. See the base class."""
        if self.is_gated:
            return state[-1 - self.is_dynamic] if isinstance(state, tuple) else state
        if self.norms_blocks or self.window is not None:
            return None
        return super().running_sum(self._sources_in(state))

    def _sources_in(self, state: DepthState) -> DepthState:
        """Return a state without the stream and the input of the previous sublayer."""
        return state[: len(state) - self.is_gated - self.is_dynamic] if isinstance(state, tuple) else state

    def counts(self, is_windowed: bool = True) -> list[int]:
        """Return how many outputs each source sums up; the embedding counts as one."""
        sizes = (min(self.block_size, self.sublayer - i) for i in range(0, self.sublayer, self.block_size))
        return self.within_window([1, *sizes]) if is_windowed else [1, *sizes]

    def within_window(self, sources: list) -> list:
        """Return the first source, and the last `window` of the others; all sources without a window."""
        return sources if self.window is None else [sources[0], *sources[1:][-self.window :]]

    def weigh(
        self, sources: Sequence[Tensor], previous: Tensor | None, norm_weight: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Compute the depth weights and the factor of each source, in float32 or wider.

        Args:
            sources: each `[batch, seq, hidden]`.
            previous: `x` `[batch, seq, hidden]` of an input-dependent query.
            norm_weight: `g_l` `[hidden]`, or `None` without key norm.

        Returns:
            The depth weights `a` `[sources, batch, seq]`, the mean over several heads; and the factors
            `[sources, batch, seq, 1]`, or `[sources, batch, seq, hidden]` with several heads.
        """
        sources = torch.broadcast_tensors(*sources)
        dtype, width = dtypes_of(sources)[1], sources[0].shape[-1]
        # Under autocast the products would fall to half precision.
        with maybe_autocast(sources[0].device.type, enabled=False):
            inverse = None  # (sources, batch, seq, 1)
            if self.has_norm or self.norms_values:
                inverse = torch.stack([inverse_rms(source, self.eps, dtype).unsqueeze(-1) for source in sources])
            logits = self._logits(
                sources, inverse if self.has_norm else None, previous, norm_weight, dtype
            )  # (sources, batch, seq, heads)
            if self.is_sigmoid:
                weights = factors = logits.sigmoid() * (2 if self.scale == "sum" else 1)
            else:
                exp = (logits - logits.detach().amax(0)).exp()
                weights = exp / exp.sum(0)
                # Not `weights * n`: this is exactly one where all logits are equal.
                factors = exp * (len(sources) / exp.sum(0)) if self.scale == "sum" else weights
            if self.heads > 1:
                factors = factors.repeat_interleave(width // self.heads, dim=-1)
            if self.norms_values and inverse is not None:
                factors = factors * inverse
            return weights.mean(-1), self.gamma.to(dtype) * factors if self.is_gated else factors

    def _logits(
        self,
        sources: Sequence[Tensor],
        inverse: Tensor | None,
        previous: Tensor | None,
        norm_weight: Tensor | None,
        dtype: torch.dtype,
    ) -> Tensor:
        """Compute the logits `[sources, batch, seq, heads]`; the arguments are those of [`weigh`]."""
        if self.is_static:
            shape = sources[0].shape
            if len(self.bias) != len(sources):
                raise ValueError(
                    f"sublayer {self.sublayer} has static logits for {len(self.bias)} sources, but reads "
                    f"{len(sources)}: layers of this model cannot be moved, removed or added."
                )
            logits = self.bias.to(dtype).view(-1, *(1 for _ in shape)).expand(-1, *shape[:-1], 1)
        else:
            weight = self.weight.to(dtype)
            query = weight[0] if previous is None else F.linear(previous.to(dtype), weight)
            if norm_weight is not None:
                query = query * norm_weight.to(dtype)
            logits = torch.stack([(query * source).unflatten(-1, (self.heads, -1)).sum(-1) for source in sources])
            logits = logits if inverse is None else logits * inverse
        if self.temperature != 1:
            logits = logits / self.temperature
        if self.has_prior:
            logits = torch.stack([logit + math.log(count) for logit, count in zip(logits, self.counts())])
        return logits

    def _newest_inverse_rms(self, state: DepthState) -> Tensor | None:
        """Compute `1 / rms(v)` `[batch, seq, 1]` of the newest output; return `None` if blocks sum raw outputs."""
        if not (self.norms_blocks and isinstance(state, tuple)):
            return None
        newest = state[-1 - self.is_gated - self.is_dynamic]
        return inverse_rms(newest, self.eps, dtypes_of(state)[1]).unsqueeze(-1)

    def _open(self, state: DepthState, inverse: Tensor | None) -> SwitchedState:
        """Unpack the tensors of a state, add the newest output to its normed block, and apply the window."""
        if not isinstance(state, tuple):  # the embedding
            return SwitchedState((state,), None, state if self.is_gated else None, state if self.is_dynamic else None)
        sources, normed = list(state), None
        previous = sources.pop() if self.is_dynamic else None
        stream = sources.pop() if self.is_gated else None
        if inverse is not None:
            position = (self.sublayer - 1) % self.block_size  # of the newest output in its block
            # The first output of a block is its partial sum; a later one stands raw behind it.
            normed = (inverse * (sources.pop() if position else sources[-1])).to(sources[0].dtype)
            normed = sources.pop() + normed if position else normed
            if position == self.block_size - 1:  # the block is finished
                sources[-1], normed = normed, None
        sources = self.within_window(sources)
        if self.is_indexed and len(sources) != (count := len(self.counts())):
            raise ValueError(
                f"sublayer {self.sublayer} must read {count} sources, got a state with {len(sources)}: pass the state "
                "after all sublayers before it."
            )
        return SwitchedState(tuple(sources), normed, stream, previous)

    def _close(self, opened: SwitchedState, attended: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Return the input `[batch, seq, hidden]` made of the attended sum, and the state as a tuple of tensors."""
        inputs = attended if opened.stream is None else opened.stream + attended
        inputs = inputs.to(dtypes_of(opened.sources)[0])
        optional = opened.normed, opened.stream, inputs if self.is_dynamic else None
        return inputs, (*opened.sources, *(tensor for tensor in optional if tensor is not None))


def _set_switches(config: PreTrainedConfig) -> dict[str, Any]:
    """Return the switches that are not at their default, with their values."""
    # The fields of a configuration are in `vars`, which is faster than its `getattr`.
    fields = vars(config)
    return {field: value for field, default in SWITCHES.items() if (value := fields.get(field, default)) != default}


def _never_standard(config: PreTrainedConfig) -> str | None:
    """Return why a model with these switches starts as another function than the residual stream, or `None`."""
    if config.attn_res_gated:
        return None
    reasons = {field: value for field, value in _set_switches(config).items() if field in _NEVER_STANDARD}
    return next((f"`{field}` is {value!r}: {_NEVER_STANDARD[field]}" for field, value in reasons.items()), None)


__all__ = ["SWITCHES", "SwitchedAttnRes"]
