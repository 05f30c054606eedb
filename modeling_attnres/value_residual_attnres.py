"""Value residuals (ResFormer, arXiv 2410.17897): attention sees its values mixed with those of the first layer.

    V_l' = c_1 V_1 + c_2 V_l,    learned c_1, c_2 in each layer but the first

The values are mixed before the cache, which keeps `V_l'`: it holds as much as without them. The coefficients start at
1/2 (the paper) or at 0 and 1, which is exactly the model without value residuals. Latent attention (DeepSeek-V3) caches
no values, but a normed latent, from which keys and values are made. There the latents are mixed, and so both are.
(The paper has no such form.)
"""

from collections.abc import Mapping
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig
from transformers import initialization as init

from .attention_change_attnres import AttentionChange
from .attention_gate_attnres import GatedAttention, StandIn, gated_class
from .residual_attnres import AddedModule, field_defaults, one_of, require
from .streams_attnres import wide

_STARTS = None, "half", "standard"
# The module whose output is mixed: a projection to values, or the norm of a latent.
_PLACES = "v_proj", "kv_a_layernorm"

# A class of the family follows the mixin.
_AnyLayer = nn.Module if TYPE_CHECKING else object


class ValueResidualFields:
    """Configuration field of value residuals. It is saved if there are any."""

    value_residual: str | None = None
    """Start of the learned coefficients of `c_1 V_1 + c_2 V_l`. `"half"`: 1/2 and 1/2, as in the paper. `"standard"`: 0
    and 1, as in a retrofit. `None`: no value residuals."""


VALUE_RESIDUAL_FIELDS: dict[str, str | None] = field_defaults(ValueResidualFields)


class ValueResidual(AddedModule):
    """The mixing of one layer's values with those of the first layer.

    Tensor: `weight` `[2]` holds `c_1` and `c_2 - 1`, in float32 or wider.

    Args:
        start: `"half"` or `"standard"`.
    """

    def __init__(self, start: str):
        super().__init__()
        self.start = start
        self.weight = nn.Parameter(torch.zeros(2))
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Set the coefficients to their start."""
        start = torch.tensor([0.5, -0.5] if self.start == "half" else [0.0, 0.0])
        init.copy_(self.weight, start.to(self.weight))

    def forward(self, first: Tensor, values: Tensor) -> Tensor:
        """Return `c_1 V_1 + c_2 V_l` for two tensors `[..., width]`, rounded once."""
        c_1, c_2 = self.weight.to(wide(values)).split(1)
        return (c_1 * first + (1 + c_2) * values).to(values.dtype)


class MixedValues:
    """Mixin of a backbone's attention that mixes its values with those of the first layer.

    It works as [`GatedAttention`] does. A gate on the values acts on the mixed ones.
    """

    unmixed: type[nn.Module]  # the backbone's class, perhaps gated
    mixed: str  # name of the module whose output is mixed
    value_residual: ValueResidual  # the first layer has none

    def forward(self, hidden_states: Tensor, *args, first_values: Tensor | None = None, **kwargs) -> tuple[Any, ...]:
        """Compute the attention of an input `[batch, seq, hidden]`.

        Args:
            hidden_states: the input.
            args: the attention's other arguments.
            first_values: `V_1` `[batch, seq, width]`; `None` in the first layer.
            kwargs: the attention's other arguments.

        Returns:
            The attention's result, and `V_1` after it.
        """
        project, values = getattr(self, self.mixed), []

        def mix(x: Tensor) -> Tensor:
            projected = project(x)
            mixes = first_values is not None and hasattr(self, "value_residual")
            values.append(projected if first_values is None else first_values)
            return self.value_residual(first_values, projected) if mixes else projected

        result = self.unmixed.forward(StandIn(self, self.mixed, mix), hidden_states, *args, **kwargs)
        return *result, values[0]

    def __reduce__(self) -> tuple[Any, ...]:
        # Pickle looks up classes by name in a module, but this class is made at run time.
        backbone = self.unmixed.ungated if issubclass(self.unmixed, GatedAttention) else self.unmixed
        return _empty, (backbone, backbone is not self.unmixed), vars(self)


class CarriesValues(_AnyLayer):
    """Mixin of a decoder layer of the family that passes on the first layer's values beside the depth state.

    What goes from layer to layer is flat, because checkpointing of activations passes gradients only to tensors that
    are arguments and results: `V_1`, whether the depth state is a tuple, and its tensors.
    """

    layer_idx: int
    family_layer: type[nn.Module]  # the layer's class without this mixin

    def forward(self, *hidden_states: Any, is_tuple: bool = False, reader: Any = None, **kwargs) -> Any:
        """Run the layer on the depth state and `V_1`; see the family's layer."""
        state: Any = hidden_states if is_tuple else hidden_states[0]
        first_values: list[Tensor | None] = [None]  # `attend` puts `V_1` here
        if is_tuple and len(state) > 2 and isinstance(state[1], bool):
            first_values, state = [state[0]], state[2:] if state[1] else state[2]
        # pyrefly: ignore[not-callable]  # of the family's layer
        state = super().forward(state, reader=reader, first_values=first_values, **kwargs)
        if reader is not None and reader.last is not None and self.layer_idx >= reader.last:
            return state  # the input of the final norm
        is_tuple = isinstance(state, tuple)
        return first_values[0], is_tuple, *(state if is_tuple else (state,))

    def attend(
        self, attention: nn.Module, hidden_states: Tensor, first_values: list[Tensor | None], **kwargs
    ) -> tuple[Any, ...]:
        """Call the attention with `V_1`, and keep the one that it returns; see the family's layer."""
        # pyrefly: ignore[not-callable]  # of the family's layer
        *results, first_values[0] = super().attend(attention, hidden_states, first_values=first_values[0], **kwargs)
        return tuple(results)

    def __reduce__(self) -> tuple[Any, ...]:
        # As for the attention: this class is made at run time.
        return _empty_layer, (self.family_layer,), vars(self)


@cache
def _carrying(family_layer: type[nn.Module]) -> type[nn.Module]:
    """Return the class of a layer that passes on `V_1`, with the same name, by which engines choose what to shard."""
    members = {"family_layer": family_layer, "__module__": family_layer.__module__}
    return type(family_layer.__name__, (CarriesValues, family_layer), members)


def _empty_layer(family_layer: type[nn.Module]) -> nn.Module:
    """Return an instance of the class that passes on `V_1`, to be filled by pickle or `copy.deepcopy`."""
    return object.__new__(_carrying(family_layer))


@cache
def _mixed(unmixed: type[nn.Module]) -> type[nn.Module]:
    """Return the class of an attention with mixed values."""
    return type(f"MixedValues{unmixed.__name__}", (MixedValues, unmixed), {"unmixed": unmixed, "__module__": __name__})


def _empty(backbone: type[nn.Module], is_gated: bool) -> nn.Module:
    """Return an instance of the class with mixed values, to be filled by pickle or `copy.deepcopy`."""
    return object.__new__(_mixed(gated_class(backbone) if is_gated else backbone))


def add_value_residual(layer: Any, config: PreTrainedConfig) -> None:
    """Mix the values of a decoder layer's attention, if `value_residual` is set.

    Args:
        layer: a layer of the backbone, after its gate was added.
        config: the configuration with the field of [`ValueResidualFields`].

    Raises:
        ValueError: the backbone's attention has no separate projection to values, and no latent.
    """
    if not ValueResiduals.is_on(config):
        return
    # As with a gate, only the classes change.
    layer.__class__ = _carrying(type(layer))
    attention: Any = getattr(layer, "self_attn", None) or getattr(layer, "attention", None)
    if isinstance(attention, MixedValues):
        return  # `AutoModel` made the decoder of this model, which is connected a second time
    name = next((name for name in _PLACES if isinstance(getattr(attention, name, None), nn.Module)), "")
    allowed = f"null: the attention of {config.backbone!r} has no {' or '.join(_PLACES)}"
    require(config, "value_residual", bool(name), allowed)
    attention.__class__ = _mixed(type(attention))
    attention.mixed = name
    if layer.layer_idx > 0:
        attention.value_residual = ValueResidual(config.value_residual)


def value_residual_tensors(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the coefficients of value residuals, by their names in the model."""
    modules = ((name, module) for name, module in model.named_modules() if isinstance(module, ValueResidual))
    return {f"{name}.weight": module.weight for name, module in modules}


def check_value_residual(config: PreTrainedConfig) -> None:
    """Check the field of value residuals, and add the coefficients to the plan of tensor parallelism.

    Args:
        config: the configuration; its `base_model_tp_plan` is changed.

    Raises:
        ValueError: the value is not allowed, or a layer has linear attention.
    """
    if config.value_residual is None:
        return
    # Set on the instance, and not only on the class: then `config.json` holds the field.
    config.value_residual = config.value_residual
    require(config, "value_residual", config.value_residual in _STARTS, one_of(_STARTS))
    is_linear = "linear_attention" in (getattr(config, "layer_types", None) or ())
    require(config, "value_residual", not is_linear, "null where a layer has linear attention, which keeps no values")
    plan = config.base_model_tp_plan or {}
    owners = [path.rsplit(".", 1)[0] for path in plan if path.endswith(".v_proj")]
    # Each process has some heads, so its gradient of a coefficient is a part of the sum.
    added = dict.fromkeys((f"{owner}.value_residual" for owner in owners), "replicated_with_grad_allreduce")
    if plan:
        config.base_model_tp_plan = plan | added  # pyrefly: ignore[read-only]  # the plan of the class stays as it is


class ValueResiduals(AttentionChange):
    """Value residuals as a change of attention."""

    field = "value_residual"
    fields = VALUE_RESIDUAL_FIELDS
    float32_modules = ("value_residual",)
    check = staticmethod(check_value_residual)
    add_to = staticmethod(add_value_residual)
    tensors = staticmethod(value_residual_tensors)

    @staticmethod
    def differing_fields(config: PreTrainedConfig, stored: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
        """Return the field if only one of both has value residuals, which do not start as the model without them."""
        before, now = stored.get("value_residual"), config.value_residual
        differs = (before is None) != (now is None) and now != "standard"
        return {"value_residual": (before, now)} if differs else {}

    @staticmethod
    def start(config: PreTrainedConfig) -> str:
        """Return "at 1/2"; empty for coefficients that start as the standard model. See the base class."""
        return "at 1/2" if config.value_residual == "half" else ""
