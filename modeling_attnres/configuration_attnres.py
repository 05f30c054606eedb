"""Configuration of the family: a backbone and the residual connection through its depth."""

import difflib
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from transformers import KimiLinearConfig, PreTrainedConfig

from .attention_gate_attnres import GatedConfig, check_attention_gate
from .attn_res_attnres import AttnRes
from .denseformer_attnres import DenseFormer
from .functional_attnres import DEPTH_ATTENTION
from .highway_attnres import Highway
from .hyper_connections_attnres import HyperConnections
from .identity_hc_attnres import IdentityHyperConnections
from .mhc_attnres import MHC
from .mhc_lite_attnres import MHCLite
from .post_norm_attnres import PostNorm
from .residual_attnres import FamilyWarning, ResidualConnection, one_of, require
from .standard_attnres import StandardResidual

CONNECTIONS: dict[str, type[ResidualConnection]] = {}  # by name; the first is the default


@dataclass(frozen=True)
class Sublayer:
    """What a decoder layer computes between reading from the depth and writing to it, `v_l = f_l(h_l)`."""

    name: str  # its residual connection has the tensors `{name}_proj.weight` and `{name}_norm.weight`
    branches: tuple[tuple[str, ...], ...]  # chains of modules, by name: norm, attention, dropout; `v_l` is their sum
    multiplier: str | None = None  # attribute of the layer that `v_l` is multiplied by

    @property
    def first(self) -> str | None:
        """The module, as a rule the norm, that all branches begin with and go on from."""
        first = self.branches[0][0]
        return first if all(len(branch) > 1 and branch[0] == first for branch in self.branches) else None


Sublayers = tuple[Sublayer, ...]


def attention_and_mlp(attention: tuple[str, ...], mlp: tuple[str, ...], multiplier: str | None = None) -> Sublayers:
    """Of a layer whose attention and MLP, each one chain of modules, follow each other."""
    return Sublayer("self_attention_res", (attention,), multiplier), Sublayer("mlp_res", (mlp,), multiplier)


_ATTENTION, _MLP = ("input_layernorm", "self_attn"), ("post_attention_layernorm", "mlp")
PRE_NORM = attention_and_mlp(_ATTENTION, _MLP)
NORM_AFTER = attention_and_mlp(("self_attn", "post_attention_layernorm"), ("mlp", "post_feedforward_layernorm"))
SANDWICH = attention_and_mlp(
    ("input_layernorm", "self_attn", "post_attention_layernorm"),
    ("pre_feedforward_layernorm", "mlp", "post_feedforward_layernorm"),
)


def gpt_neox_sublayers(config: PreTrainedConfig) -> Sublayers:
    """With a parallel residual, both read the same input and make one output."""
    attention = ("input_layernorm", "attention", "post_attention_dropout")
    mlp = ("post_attention_layernorm", "mlp", "post_mlp_dropout")
    is_parallel = config.use_parallel_residual
    return (Sublayer("parallel_res", (attention, mlp)),) if is_parallel else attention_and_mlp(attention, mlp)


# Model type in `transformers` -> the sublayers of a layer, or a function of the configuration; makes
# `attnres_{model type}`.
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


# With those of the connections, `{name}_`: what the family's fields begin with.
_PREFIXES = ("residual_", "depth_attention_", "attention_gate")


_SIZES = (
    *("vocab_size", "hidden_size", "intermediate_size", "head_dim"),
    *("num_attention_heads", "num_key_value_heads"),
)
_MAX_LAYERS, _MAX_DEPTH = 10_000, 100


class ResidualConfig(GatedConfig, PreTrainedConfig):
    """Of every family member, beside the fields of its backbone and the `fields` of its connection:

    - `residual_connection`, `"attn_res"` by default: a key of `CONNECTIONS`; with `"standard"` it is the backbone.
    - `attention_gate`, `None` by default: see its file.
    - `depth_attention_implementation`, `"auto"` by default: the name of one, or the fastest that runs. Not saved.
    """

    backbone = ""  # model type of the backbone, a key of `BACKBONES`
    # The state between stages is a tuple, which a plan of named tensors cannot say.
    base_model_pp_plan = None

    residual_connection: str = "attn_res"
    depth_attention_implementation: str = "auto"

    def __post_init__(self, **kwargs):
        kwargs.pop("model_type", None)  # that of a backbone's checkpoint
        # Before the backbone's class divides by these numbers, or makes lists of that length.
        self.check_sizes()
        for name, value in (vars(self) | kwargs).items():
            if _depth(value) > _MAX_DEPTH:
                raise ValueError(f"`{name}` contains itself, or is nested deeper than {_MAX_DEPTH} levels.")
        super().__post_init__(**kwargs)
        self.check_fields()
        self.validate()
        self._warn_of_unknown_fields()

    def _warn_of_unknown_fields(self) -> None:
        """Warn of fields that belong to the family by their names, but not to this version of it."""
        prefixes = (*_PREFIXES, *(f"{name}_" for name in CONNECTIONS))
        unknown = [name for name in vars(self) if name.startswith(prefixes) and not hasattr(type(self), name)]
        for name in sorted(unknown):
            known = difflib.get_close_matches(name, [f for f in dir(type(self)) if f.startswith(prefixes)], n=1)
            hint = f"Did you mean `{known[0]}`?" if known else "Update the code that loads it."
            message = f"`{name}` ({getattr(self, name)!r}) is no field of this version, and has no effect. {hint}"
            warnings.warn(message, FamilyWarning, stacklevel=3)

    def check_sizes(self) -> None:
        """Check the numbers that every decoder has.

        Raises:
            ValueError: one is below 1, or there are more than 10,000 layers, which is no model but a mistake.
        """
        layers = self.num_hidden_layers
        require(self, "num_hidden_layers", 1 <= layers <= _MAX_LAYERS, f"an integer from 1 to {_MAX_LAYERS:,}")
        for field in _SIZES:
            value = getattr(self, field, None)
            require(self, field, not isinstance(value, int) or value >= 1, "an integer >= 1")

    def check_fields(self) -> None:
        """Raises ValueError: a value is not allowed. Models check again."""
        self.check_sizes()
        allowed = f"{type(self).backbone!r}, that of {type(self).__name__}"
        require(self, "backbone", self.backbone == type(self).backbone, allowed)
        require(self, "residual_connection", self.residual_connection in [*CONNECTIONS], one_of(CONNECTIONS))
        for field, default in CONNECTIONS[self.residual_connection].fields.items():
            setattr(self, field, getattr(self, field, default))  # of its own, so that it is saved
        self.connection.check(self)
        check_attention_gate(self)
        chosen = self.depth_attention_implementation
        require(self, "depth_attention_implementation", chosen in [*DEPTH_ATTENTION], one_of(DEPTH_ATTENTION))

    @property
    def connection(self) -> type[ResidualConnection]:
        return CONNECTIONS[self.residual_connection].form(self)

    @property
    def sublayers(self) -> Sublayers:
        """Of one decoder layer."""
        declared = BACKBONES[self.backbone]
        return declared if isinstance(declared, tuple) else declared(self)

    @property
    def num_sublayers(self) -> int:
        """Of the decoder."""
        return self.num_hidden_layers * len(self.sublayers)

    @classmethod
    def get_config_dict(cls, *args, **kwargs):
        # No warning about the model type.
        fields, kwargs = super().get_config_dict(*args, **kwargs)
        if fields.get("model_type") == cls.backbone:
            fields["model_type"] = cls.model_type
        return fields, kwargs

    def to_dict(self):
        fields = super().to_dict()
        fields.pop("depth_attention_implementation", None)  # of the machine
        return fields


def _depth(value: Any) -> int:
    """Return how deep dictionaries and lists are nested in a value, at most `_MAX_DEPTH + 1`."""
    depth, level = 0, [value]
    while depth <= _MAX_DEPTH:
        # Each object once: by aliases, one may stand in more places than can be counted.
        nested = {id(item): item for item in level if isinstance(item, dict | list | tuple)}
        if not nested:
            return depth
        level = [v for item in nested.values() for v in (item.values() if isinstance(item, dict) else item)]
        depth += 1
    return depth


def register(connection: type[ResidualConnection]) -> None:
    """Make it a `residual_connection`, with its fields."""
    CONNECTIONS[connection.name] = connection
    for field, default in connection.fields.items():
        setattr(ResidualConfig, field, default)


_STREAMS = HyperConnections, IdentityHyperConnections, MHC, MHCLite
for _connection in (AttnRes, StandardResidual, DenseFormer, Highway, *_STREAMS, PostNorm):
    register(_connection)


class AttnResConfig(ResidualConfig, KimiLinearConfig):
    """All fields of [`KimiLinearConfig`] and of [`ResidualConfig`]."""

    model_type = "attnres"
    backbone = "kimi_linear"

    def check_fields(self) -> None:
        """Also those of Kimi Linear that otherwise fail late."""
        super().check_fields()
        layers, heads = self.num_hidden_layers, self.num_attention_heads
        kinds = {"layer_types": ("linear_attention", "full_attention"), "mlp_layer_types": ("dense", "sparse")}
        for field, (one, other) in kinds.items():
            value = getattr(self, field)
            allowed = f"a list of length {layers} (`num_hidden_layers`), not {len(value)}"
            require(self, field, len(value) == layers, allowed)
            require(self, field, set(value) <= {one, other}, f"a list of {one!r} and {other!r}")
        has_full_attention = "full_attention" in self.layer_types  # the cache counts its tokens there
        require(self, "layer_types", has_full_attention, "a list with at least one 'full_attention' layer")
        for field in ("num_attention_heads", "linear_num_heads"):
            require(self, field, getattr(self, field) >= 1, "an integer >= 1")
        allowed = f"`num_attention_heads` ({heads}): MLA expands a key and a value for every head"
        require(self, "num_key_value_heads", self.num_key_value_heads == heads, allowed)
        if "sparse" not in self.mlp_layer_types:
            return
        for field in ("n_group", "topk_group", "num_experts_per_tok"):
            require(self, field, isinstance(getattr(self, field), int), "an integer >= 1")
        experts, groups, used = self.num_local_experts, self.n_group, self.topk_group
        allowed = f"a positive divisor of `num_local_experts` ({experts}) that leaves two or more to a group"
        require(self, "n_group", groups >= 1 and experts % groups == 0 and experts // groups >= 2, allowed)
        require(self, "topk_group", 1 <= used <= groups, f"from 1 to `n_group` ({groups})")
        reachable = experts // groups * used
        allowed = f"from 1 to the {reachable} experts that `topk_group` of `n_group` groups hold"
        require(self, "num_experts_per_tok", 1 <= self.num_experts_per_tok <= reachable, allowed)
