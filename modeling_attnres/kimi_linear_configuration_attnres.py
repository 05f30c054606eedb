"""Configuration of the family on Kimi Linear, which refuses the fields of Kimi K3."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from transformers import KimiLinearConfig

from .configuration_attnres import ResidualConfig
from .residual_attnres import require

# Fields of Kimi K3 that change what Kimi Linear computes.
_OF_KIMI_K3 = ("activation_situ_beta", "latent_moe_use_norm", "mla_use_output_gate", "routed_expert_hidden_size")
_OF_KIMI_K3_LINEAR = ("gate_lower_bound", "use_full_rank_gate")


def is_kimi_k3(fields: Mapping[str, Any]) -> bool:
    """Return whether fields of a `config.json` are those of Kimi K3, though it may name Kimi Linear's model type.

    The text model of a release names `kimi_linear`, and Kimi Linear would ignore what makes it Kimi K3.

    Args:
        fields: of the file, with `model_type` if it has one. A composite model has the text model's in `text_config`.
    """
    if fields.get("model_type") == "kimi_k3":
        return True
    text = fields.get("text_config")
    if isinstance(text, Mapping) and is_kimi_k3(text):
        return True
    linear = fields.get("linear_attn_config")
    linear = linear if isinstance(linear, Mapping) else {}
    is_counted_in_layers = fields.get("model_type") == "kimi_linear" and bool(fields.get("attn_res_block_size"))
    names = [name for name in _OF_KIMI_K3 if fields.get(name)]
    names += [name for name in _OF_KIMI_K3_LINEAR if linear.get(name)]
    return bool(names) or fields.get("hidden_act") == "situ" or is_counted_in_layers


class _CheckedFile(KimiLinearConfig):
    """Reads a `config.json` for `ResidualConfig`, which then replaces the model type that the file names."""

    @classmethod
    def get_config_dict(cls, *args, **kwargs):
        """Read a configuration as the base class does, and refuse that of a model that this class cannot describe."""
        fields, kwargs = super().get_config_dict(*args, **kwargs)
        cls.check_file(fields)
        return fields, kwargs

    @classmethod
    def check_file(cls, fields: Mapping[str, Any]) -> None:
        """Check that the fields are not those of Kimi K3, which this model would ignore.

        Raises:
            ValueError: they are.
        """
        if is_kimi_k3(fields):
            raise ValueError(
                "these are fields of Kimi K3, and a Kimi Linear model would ignore them. Load it by "
                "`AttnResKimiK3ForCausalLM.from_pretrained`, or by `AttnResKimiK3Config`."
            )


class AttnResConfig(ResidualConfig, _CheckedFile):
    """Configuration of AttnRes on Kimi Linear: all fields of [`KimiLinearConfig`] and of [`ResidualConfig`]."""

    model_type = "attnres"
    backbone = "kimi_linear"
    if TYPE_CHECKING:  # set in every configuration
        layer_types: list[str]
        mlp_layer_types: list[str]
        num_experts_per_tok: int
        topk_group: int
        num_labels: int
        num_nextn_predict_layers: int | None
        v_head_dim: int
    else:
        num_nextn_predict_layers = 0  # not declared, so that a config.json holds it only if it was given

    def __post_init__(self, **kwargs):
        self.check_file({"hidden_act": self.hidden_act} | kwargs)
        super().__post_init__(**kwargs)

    def check_fields(self) -> None:
        """Check all fields of the family, and those of Kimi Linear whose mistakes would show late or not at all.

        Raises:
            ValueError: a value is not allowed.
        """
        super().check_fields()
        layers, heads = self.num_hidden_layers, self.num_attention_heads
        kinds = {"layer_types": ("linear_attention", "full_attention"), "mlp_layer_types": ("dense", "sparse")}
        for field, (one, other) in kinds.items():
            value = getattr(self, field)
            allowed = f"a list of length {layers} (`num_hidden_layers`), not {len(value)}"
            require(self, field, len(value) == layers, allowed)
            require(self, field, set(value) <= {one, other}, f"a list of {one!r} and {other!r}")
        has_full_attention = "full_attention" in self.layer_types  # the cache counts tokens only in such layers
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
        allowed = f"a positive divisor of `num_local_experts` ({experts}) with two or more experts in each group"
        require(self, "n_group", groups >= 1 and experts % groups == 0 and experts // groups >= 2, allowed)
        require(self, "topk_group", 1 <= used <= groups, f"from 1 to `n_group` ({groups})")
        reachable = experts // groups * used
        allowed = f"from 1 to the {reachable} experts that `topk_group` of `n_group` groups hold"
        require(self, "num_experts_per_tok", 1 <= self.num_experts_per_tok <= reachable, allowed)
