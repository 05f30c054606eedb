"""Configuration of the family: a backbone, and the residual connection through its depth.

[`ResidualConfig`] is the mixin of every family member's configuration. `BACKBONES` holds the backbones by name.
"""

import dataclasses
import difflib
import warnings
from collections.abc import Callable, Iterator, Mapping
from copy import deepcopy
from typing import Any, ClassVar

import torch
from transformers import PreTrainedConfig

from .connections_attnres import ATTENTION_CHANGES, CONNECTIONS, MTP
from .functional_attnres import DEPTH_ATTENTION
from .residual_attnres import FamilyWarning, ResidualConnection, is_number, one_of, require, require_value


@dataclasses.dataclass(frozen=True)
class Sublayer:
    """Declaration of one sublayer `v_l = f_l(h_l)` of a decoder layer, between its read and its write.

    Args:
        name: name of its residual connection, whose tensors are `{name}_proj.weight` and `{name}_norm.weight`.
        branches: one or more chains of module names, such as norm, attention, dropout; `v_l` sums the chains' outputs.
        multiplier: name of the layer's attribute by which `v_l` is multiplied; `None` for none.
    """

    name: str
    branches: tuple[tuple[str, ...], ...]
    multiplier: str | None = None
    first: str | None = dataclasses.field(init=False, repr=False, compare=False)
    """Name of the module, usually a norm, with which all branches begin; `None` if there is no such module."""

    def __post_init__(self) -> None:
        """Set `first` once, because each read of a pass takes it."""
        first = self.branches[0][0]
        is_shared = all(len(branch) > 1 and branch[0] == first for branch in self.branches)
        object.__setattr__(self, "first", first if is_shared else None)


Sublayers = tuple[Sublayer, ...]


def attention_and_mlp(attention: tuple[str, ...], mlp: tuple[str, ...], multiplier: str | None = None) -> Sublayers:
    """Declare a layer whose attention and MLP follow each other.

    Args:
        attention: names of the modules of the attention's chain.
        mlp: names of the modules of the MLP's chain.
        multiplier: name of the layer's attribute by which both outputs are multiplied.
    """
    return Sublayer("self_attention_res", (attention,), multiplier), Sublayer("mlp_res", (mlp,), multiplier)


_ATTENTION, _MLP = ("input_layernorm", "self_attn"), ("post_attention_layernorm", "mlp")
PRE_NORM = attention_and_mlp(_ATTENTION, _MLP)
NORM_AFTER = attention_and_mlp(("self_attn", "post_attention_layernorm"), ("mlp", "post_feedforward_layernorm"))
SANDWICH = attention_and_mlp(
    ("input_layernorm", "self_attn", "post_attention_layernorm"),
    ("pre_feedforward_layernorm", "mlp", "post_feedforward_layernorm"),
)


def gpt_neox_sublayers(config: PreTrainedConfig) -> Sublayers:
    """Declare a GPT-NeoX layer; with a parallel residual, attention and MLP are two branches of one sublayer."""
    attention = ("input_layernorm", "attention", "post_attention_dropout")
    mlp = ("post_attention_layernorm", "mlp", "post_mlp_dropout")
    is_parallel = config.use_parallel_residual
    return (Sublayer("parallel_res", (attention, mlp)),) if is_parallel else attention_and_mlp(attention, mlp)


# Model type of a backbone in `transformers` -> the sublayers of its layers, or a function that returns them for a
# configuration. Each makes a family member of model type `attnres_{model type}`.
BACKBONES: dict[str, Sublayers | Callable[[PreTrainedConfig], Sublayers]] = {
    "deepseek_v3": PRE_NORM,
    "gemma2": SANDWICH,
    "gemma3_text": SANDWICH,
    "gpt_neox": gpt_neox_sublayers,
    "granite": attention_and_mlp(_ATTENTION, _MLP, "residual_multiplier"),
    "kimi_linear": PRE_NORM,
    "llama": PRE_NORM,
    "mistral": PRE_NORM,
    "mixtral": PRE_NORM,
    "olmo2": NORM_AFTER,
    "phi3": attention_and_mlp((*_ATTENTION, "resid_attn_dropout"), (*_MLP, "resid_mlp_dropout")),
    "qwen2": PRE_NORM,
    "qwen3": PRE_NORM,
    "qwen3_moe": PRE_NORM,
    "smollm3": PRE_NORM,
}


# The names of the family's fields begin with one of these, or with `{name}_` of a connection.
_PREFIXES = ("residual_", "depth_attention_", "attention_gate", "value_residual", "mtp_")
# Fields of backbones that hold a size, where a backbone has them.
_SIZES = (
    "vocab_size", "hidden_size", "intermediate_size", "head_dim",
    "num_attention_heads", "num_key_value_heads", "q_lora_rank", "kv_lora_rank", "v_head_dim",
    "linear_num_heads", "linear_head_dim", "linear_conv_kernel_dim", "moe_intermediate_size",
)  # fmt: skip
_MAX_LAYERS = 10_000
_LARGEST = 3e38  # about the largest number of float32


class ResidualConfig(PreTrainedConfig):
    """Mixin that adds the family's fields to a backbone's configuration.

    Each connection and each change of attention declares its fields in its own file, and they are added to this class.
    `config.json` holds only the fields of the chosen connection and, if they are used, of gate and value residuals.
    """

    backbone = ""  # model type of the backbone, a key of `BACKBONES`
    # `transformers`' plan for pipeline stages lists tensors by name; the depth state is a tuple, so there is no plan.
    base_model_pp_plan = None
    # Bounds of numbers, by the name of a field or of a key in `rope_parameters`. Beyond them every logit would be NaN,
    # or no weight could be drawn. Any other number that is declared as a float must be finite.
    number_bounds: ClassVar[dict[str, str]] = {
        "attention_multiplier": "> 0",
        "attn_logit_softcapping": "> 0",
        "factor": "> 0",
        "final_logit_softcapping": "> 0",
        "initializer_range": ">= 0",
        "layer_norm_eps": ">= 0",
        "logits_scaling": "> 0",
        "long_factor": "> 0",
        "rms_norm_eps": ">= 0",
        "rope_theta": "> 0",
        "short_factor": "> 0",
    }

    residual_connection: str = next(iter(CONNECTIONS))
    """Name of the residual connection, a key of `CONNECTIONS`; `"attn_res"` by default. With `"standard"` the model is
    the backbone."""

    depth_attention_implementation: str = "auto"
    """Name of an implementation in `DEPTH_ATTENTION`; `"auto"` is the fastest that runs. It is not saved."""

    def __post_init__(self, **kwargs):
        kwargs.pop("model_type", None)  # a backbone's checkpoint holds the backbone's model type
        # This comes first, because the backbone's class divides by these numbers and makes lists of that length.
        self.check_sizes()
        super().__post_init__(**kwargs)
        self.check_fields()
        self.validate()
        self._warn_of_unknown_fields()

    def _warn_of_unknown_fields(self) -> None:
        """Warn of fields that begin or nearly read like the family's, but that this version does not have."""
        prefixes = (*_PREFIXES, *(f"{name}_" for name in CONNECTIONS))
        fields = [name for name in dir(type(self)) if name.startswith(prefixes)]
        for name in sorted(vars(self).keys() - dir(type(self))):
            known = difflib.get_close_matches(name, fields, n=1, cutoff=0.6 if name.startswith(prefixes) else 0.88)
            if not known and not name.startswith(prefixes):
                continue
            hint = f"Did you mean `{known[0]}`?" if known else "Update the code that loads it."
            message = f"`{name}` ({getattr(self, name)!r}) is not a field of this version, and has no effect. {hint}"
            warnings.warn(message, FamilyWarning, stacklevel=3)

    def check_sizes(self) -> None:
        """Check the sizes that every decoder has.

        Raises:
            ValueError: a size is below 1, or there are more than 10,000 layers, which can only be a mistake.
        """
        layers = self.num_hidden_layers
        require(self, "num_hidden_layers", 1 <= layers <= _MAX_LAYERS, f"an integer from 1 to {_MAX_LAYERS:,}")
        for field in _SIZES:
            value = getattr(self, field, None)
            require(self, field, not isinstance(value, int) or value >= 1, "an integer >= 1")

    def check_numbers(self) -> None:
        """Check the numbers of the backbone that are not sizes: fields that are declared as floats, and rotary ones.

        Raises:
            ValueError: a number is not finite or beyond its bound, so that no logit would be a number.
        """
        for field in dataclasses.fields(self):
            value, declared = getattr(self, field.name, None), str(field.type)
            if value is not None and "float" in declared:
                self._check_number(field.name, field.name, value, ", or null" if "None" in declared else "")
        rotary = getattr(self, "rope_parameters", None)
        for path, name, value in _leaves("rope_parameters", "", rotary):
            if is_number(value):
                self._check_number(path, name, value)

    def _check_number(self, path: str, name: str, value: Any, otherwise: str = "") -> None:
        """Raise `ValueError` unless a value is a number of float32 within the bound of its name."""
        bound = self.number_bounds.get(name, "")
        is_allowed = is_number(value) and abs(value) <= _LARGEST and _BOUNDS[bound](value)
        require_value(path, value, is_allowed, f"a finite number {bound}".rstrip() + otherwise)

    def check_fields(self) -> None:
        """Check all fields of the family. Models call it again, since a field may be set at any time.

        Raises:
            ValueError: a value is not allowed; the message names field, value and allowed values.
        """
        self.check_sizes()
        self.check_numbers()
        allowed = f"{type(self).backbone!r}, that of {type(self).__name__}"
        require(self, "backbone", self.backbone == type(self).backbone, allowed)
        require(self, "residual_connection", self.residual_connection in [*CONNECTIONS], one_of(CONNECTIONS))
        connection = CONNECTIONS[self.residual_connection]
        for field, default in connection.fields.items():
            # On the instance, so that `config.json` holds it; copied, because a list may be changed in place.
            if field not in vars(self):
                setattr(self, field, deepcopy(getattr(self, field, default)))
        connection.check(self)
        for change in ATTENTION_CHANGES:
            change.check(self)
        if MTP is not None:
            MTP.check(self)
        # `transformers` turns the name in a file into a dtype, but a name may also be set later.
        dtype = getattr(torch, self.dtype, None) if isinstance(self.dtype, str) else self.dtype
        is_dtype = self.dtype is None or isinstance(dtype, torch.dtype)
        require(self, "dtype", is_dtype, "the name of a dtype, or null")
        chosen = self.depth_attention_implementation
        require(self, "depth_attention_implementation", chosen in [*DEPTH_ATTENTION], one_of(DEPTH_ATTENTION))

    @property
    def connection(self) -> type[ResidualConnection]:
        """Class that implements the residual connection for these fields."""
        return CONNECTIONS[self.residual_connection].form(self)

    @property
    def sublayers(self) -> Sublayers:
        """Declarations of the sublayers of one decoder layer."""
        declared = BACKBONES[self.backbone]
        return declared if isinstance(declared, tuple) else declared(self)

    @property
    def num_sublayers(self) -> int:
        """Number of sublayers of the decoder."""
        return self.num_hidden_layers * len(self.sublayers)

    @classmethod
    def get_config_dict(cls, *args, **kwargs):
        """Read a configuration as `transformers` does; a backbone's checkpoint gets the family's model type."""
        # Otherwise `transformers` would warn that the two model types differ.
        fields, kwargs = super().get_config_dict(*args, **kwargs)
        if fields.get("model_type") == cls.backbone:
            fields["model_type"] = cls.model_type
        return fields, kwargs

    @classmethod
    def fields_of_file(cls, fields: dict[str, Any]) -> dict[str, Any]:
        """Return the fields of a `config.json` as arguments of this class; here they are the same."""
        return fields

    def to_dict(self):
        """Return the fields that `config.json` holds."""
        fields, used = super().to_dict(), CONNECTIONS.get(self.residual_connection)
        # Beside weights lies the code of the connection's form alone, which may have fewer fields.
        unused = used.fields.keys() - used.form(self).fields.keys() if used else ()
        for name in ("depth_attention_implementation", *unused):  # the first depends on the machine, not on the model
            fields.pop(name, None)
        return fields


# Bound of a number, in words that follow "a finite number" -> whether a number is within it.
_BOUNDS: dict[str, Callable[[float], bool]] = {
    "": lambda value: True,
    "> 0": lambda value: value > 0,
    ">= 0": lambda value: value >= 0,
    "< 0": lambda value: value < 0,
}


def _leaves(path: str, name: str, value: Any) -> Iterator[tuple[str, str, Any]]:
    """Yield the values in nested dictionaries and lists, each with its path and the key of its dictionary."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from _leaves(f"{path}.{key}", key, item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _leaves(path, name, item)
    else:
        yield path, name, value


for _declaring in (*CONNECTIONS.values(), *ATTENTION_CHANGES, *([MTP] if MTP else [])):
    for _field, _default in _declaring.fields.items():
        setattr(ResidualConfig, _field, _default)
