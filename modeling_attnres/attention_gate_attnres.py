"""Gated attention (arXiv 2505.06708): a learned gate on one of the tensors of every softmax attention.

    Y' = Y * s(X W)   or   Y + s(X W)

`X` `[batch, seq, hidden]` is the attention's input, usually normed. `W` is the weight of `self_attn.g_proj`, an
`nn.Linear` without bias, named as in Kimi K3's weights. The gate works with any residual connection.
"""

from collections.abc import Callable, Mapping
from functools import cache, partial
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedConfig

from .attention_change_attnres import AttentionChange
from .residual_attnres import field_defaults, one_of, require


class GateFields:
    """Configuration fields of the attention gate. They are saved if there is a gate."""

    attention_gate: str | None = None
    """Place of the gate, the tensor `Y`. `"sdpa"`: the weighted sum of the values, before the output projection.
    `"value"`, `"key"`, `"query"`: the output of that projection, before norm, rotary embedding and cache. `"output"`:
    the output of the output projection. `None`: no gate."""

    attention_gate_granularity: str = "elementwise"
    """`"elementwise"`: one gate for each channel of each head. `"headwise"`: one for each head. `"head_shared"`: one
    for each channel, shared by all heads."""

    attention_gate_form: str = "multiply"
    """`"multiply"` or `"add"`."""

    attention_gate_activation: str = "sigmoid"
    """The function `s`: `"sigmoid"` or `"silu"`."""

    attention_gate_scale: str = "unit"
    """`"unit"`, or `"double"` for `2 sigmoid`, which is 1 at `W = 0`."""


GATE_FIELDS: dict[str, str | None] = field_defaults(GateFields)
_VALUES = {
    "attention_gate": (None, "sdpa", "value", "key", "query", "output"),
    "attention_gate_granularity": ("elementwise", "headwise", "head_shared"),
    "attention_gate_form": ("multiply", "add"),
    "attention_gate_activation": ("sigmoid", "silu"),
    "attention_gate_scale": ("unit", "double"),
}
_OUTPUT = ("o_proj", "dense")
# Place -> the names that its projection has in backbones, and the name of a norm that may follow it.
_PLACES = {"sdpa": (_OUTPUT, ""), "output": (_OUTPUT, ""), "value": (("v_proj",), "")}
_PLACES |= {"key": (("k_proj",), "k_norm"), "query": (("q_proj", "q_b_proj"), "q_norm")}


class GatedAttention:
    """Mixin of a backbone's attention that gates the input or output of one of its projections.

    The backbone's `forward` calls its projections as, for example, `self.v_proj(x)`. Here it runs with a stand-in for
    `self`, where that name is a function that projects and gates. This needs no hook and no copied code, and works with
    every attention implementation.
    """

    ungated: type[nn.Module]  # the backbone's class
    g_proj: nn.Linear  # `W`
    gate: Callable[[Tensor, Tensor], Tensor]
    gated: str  # name of the projection that is gated
    is_before: bool  # whether `Y` is the projection's input, and not its output

    def forward(self, hidden_states: Tensor, *args, **kwargs) -> tuple[Tensor, Tensor | None]:
        """Compute the backbone's attention with the gate, for an input `[batch, seq, hidden]`."""
        projection, logits = getattr(self, self.gated), self.g_proj(hidden_states)

        def gated(x: Tensor) -> Tensor:
            return projection(self.gate(x, logits)) if self.is_before else self.gate(projection(x), logits)

        return self.ungated.forward(StandIn(self, self.gated, gated), hidden_states, *args, **kwargs)

    def __reduce__(self) -> tuple[Any, ...]:
        # Pickle looks up classes by name in a module, but this class is made at run time.
        return _empty, (self.ungated,), vars(self)


class StandIn:
    """A view of a module with a function in the place of its child `name`."""

    def __init__(self, module: object, name: str, function: Callable[[Tensor], Tensor]):
        vars(self).update({"_module": module, name: function})

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


@cache
def gated_class(ungated: type[nn.Module]) -> type[nn.Module]:
    """Return the gated class of a backbone's attention."""
    return type(f"Gated{ungated.__name__}", (GatedAttention, ungated), {"ungated": ungated, "__module__": __name__})


def _empty(ungated: type[nn.Module]) -> nn.Module:
    """Return an instance of the gated class, to be filled by pickle or `copy.deepcopy`."""
    return object.__new__(gated_class(ungated))


def _apply(head_dim: int, granularity: str, form: str, activation: str, scale: str, y: Tensor, xw: Tensor) -> Tensor:
    """Compute `Y'` `[batch, seq, heads * head_dim]` from `Y` of the same shape and `X W` `[batch, seq, gates]`."""
    gate = F.silu(xw) if activation == "silu" else xw.sigmoid()
    gate = 2 * gate if scale == "double" else gate
    combine = Tensor.mul if form == "multiply" else Tensor.add
    if granularity == "elementwise":
        return combine(y, gate)
    gate = gate.unsqueeze(-1 if granularity == "headwise" else -2)
    return combine(y.unflatten(-1, (-1, head_dim)), gate).flatten(-2)


def add_attention_gate(layer: nn.Module, config: PreTrainedConfig) -> None:
    """Gate the softmax attention of a decoder layer, if `attention_gate` is set.

    Args:
        layer: a layer of the backbone; linear attention is not changed.
        config: the configuration with the fields of [`GateFields`].

    Raises:
        ValueError: the backbone's attention has no such place, or a norm after it would undo the gate.
    """
    attention: Any = getattr(layer, "self_attn", None) or getattr(layer, "attention", None)
    kinds = getattr(config, "layer_types", None)
    is_linear = bool(kinds) and kinds[layer.layer_idx] == "linear_attention"
    if not AttentionGate.is_on(config) or is_linear or isinstance(attention, GatedAttention):
        return
    place, granularity, form, *function = (getattr(config, field) for field in GATE_FIELDS)
    names, norm = _PLACES[place]
    name = next((name for name in names if isinstance(getattr(attention, name, None), nn.Linear)), "")
    allowed = f"another place: the attention of {config.backbone!r} has no {' or '.join(names)}"
    require(config, "attention_gate", bool(name), allowed)
    projection = getattr(attention, name)
    width = projection.in_features if place == "sdpa" else projection.out_features
    heads = config.num_key_value_heads if place in ("key", "value") else config.num_attention_heads
    if (granularity, form) == ("headwise", "multiply") and hasattr(attention, norm):
        is_kept = getattr(attention, norm).weight.numel() > width // heads  # a norm of more than one head
        require(config, "attention_gate_granularity", is_kept, f"another one: {norm} undoes a factor of a whole head")
    size = {"elementwise": width, "headwise": heads, "head_shared": width // heads}[granularity]
    # The backbone's layer chooses and makes its attention. To make it again would initialise its weights twice, so only
    # the class changes; the gated class adds `g_proj`.
    attention.__class__ = gated_class(type(attention))
    attention.g_proj = nn.Linear(config.hidden_size, size, bias=False)
    attention.gated, attention.is_before = name, place == "sdpa"
    attention.gate = partial(_apply, width // heads, granularity, form, *function)


def gate_tensors(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the tensors that gates add to a backbone, by their names in the model."""
    modules = dict(model.named_modules())
    # The gate of a layer for multi-token prediction is a part of this layer, which may be new beside older gates.
    ahead = tuple(f"{name}." for name, module in modules.items() if getattr(module, "predicts_ahead", False))
    gates = {name: module.g_proj for name, module in modules.items() if isinstance(module, GatedAttention)}
    owners = (name for name in gates if not name.startswith(ahead))
    return {f"{name}.g_proj.{key}": tensor for name in owners for key, tensor in gates[name].named_parameters()}


def check_attention_gate(config: PreTrainedConfig) -> None:
    """Check the gate's fields, and add the gate to the plan of tensor parallelism.

    Args:
        config: the configuration; its `base_model_tp_plan` is changed.

    Raises:
        ValueError: a field has a value that is not allowed, alone or together with another field's.
    """
    if config.attention_gate is None:
        return
    for field, values in _VALUES.items():
        # Set on the instance, and not only on the class: then `config.json` holds the field.
        setattr(config, field, getattr(config, field))
        require(config, field, getattr(config, field) in values, one_of(values))
    place, granularity, *function, scale = (getattr(config, field) for field in GATE_FIELDS)
    has_heads = place != "output" or granularity == "elementwise"
    require(config, "attention_gate_granularity", has_heads, "'elementwise' where `attention_gate` is 'output'")
    allowed = "'unit' where `attention_gate_form` and `attention_gate_activation` are not 'multiply' and 'sigmoid'"
    require(config, "attention_gate_scale", scale == "unit" or function == ["multiply", "sigmoid"], allowed)
    # Tensor parallelism shards a gate as it shards the gate's projection. A gate that heads share cannot be sharded,
    # so its attention stays whole.
    plan, style = type(config).base_model_tp_plan or {}, "rowwise" if place == "sdpa" else "colwise"
    paths = [path.rsplit(".", 1) for path, rule in plan.items() if rule == style and place != "output"]
    owners = [owner for owner, name in paths if name in _PLACES[place][0]]
    if granularity == "head_shared":
        plan = {path: rule for path, rule in plan.items() if path.rsplit(".", 1)[0] not in owners}
    else:
        plan = plan | {f"{owner}.g_proj": "colwise" for owner in owners}
    config.base_model_tp_plan = plan  # pyrefly: ignore[read-only]  # the plan of the class stays as it is


class AttentionGate(AttentionChange):
    """The gate as a change of attention."""

    field = "attention_gate"
    fields = GATE_FIELDS
    check = staticmethod(check_attention_gate)
    add_to = staticmethod(add_attention_gate)
    tensors = staticmethod(gate_tensors)

    @staticmethod
    def differing_fields(config: PreTrainedConfig, stored: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
        """Return the fields that differ; see the base class."""
        # An added gate starts at random weights. Without a gate in the checkpoint, its other fields have no meaning.
        fields = GATE_FIELDS if stored.get("attention_gate") is not None else {"attention_gate": None}
        values = {field: (stored.get(field, default), getattr(config, field)) for field, default in fields.items()}
        return {field: (before, now) for field, (before, now) in values.items() if before != now}

    @staticmethod
    def start(config: PreTrainedConfig) -> str:
        """Return "at random"; see the base class."""
        return "at random"
