"""Configuration of the AttnRes family: a backbone and the residual connection that runs through its depth.

`ResidualConfig` is what every member has, `AttnResConfig` the flagship on a Kimi Linear backbone. A wrong value is
refused when a configuration is made and again when a model is.
"""

import math

from transformers import KimiLinearConfig, PreTrainedConfig

from .sublayers_attnres import BACKBONES, Sublayers

RESIDUAL_CONNECTIONS = ("attn_res", "standard")
ATTN_RES_SCALES = ("mean", "sum")


class ResidualConfig(PreTrainedConfig):
    r"""
    What the configuration of every family member has beside the fields of its backbone:

    Args:
        residual_connection (`str`, defaults to `"attn_res"`):
            What a sublayer reads and where its output goes. `"attn_res"`: softmax attention over the outputs of earlier
            blocks. `"standard"`: the residual stream, which makes the model the backbone itself.
        attn_res_block_size (`int`, defaults to 6):
            Block size S >= 1 in *sublayers* (a decoder layer holds two, attention and MLP). Each block is summed into
            one source. `1` is Full AttnRes. S may be odd, and the last block may be shorter.
        attn_res_scale (`str`, defaults to `"mean"`):
            `"mean"`: the aggregate is the softmax average of the sources (the paper; for training from scratch).
            `"sum"`: that average times the number of sources, which at zero pseudo-queries is the standard residual
            stream (for retrofits).

    Raises:
        ValueError: a field has a value that is not allowed; the message names field, value and what is allowed.
    """

    backbone = ""  # model type of the backbone, a key of `BACKBONES`
    # A pipeline stage receives the finished blocks beside the partial sum, which a plan of named tensors cannot say.
    base_model_pp_plan = None

    residual_connection: str = "attn_res"
    attn_res_block_size: int = 6
    attn_res_scale: str = "mean"

    def __post_init__(self, **kwargs):
        kwargs.pop("model_type", None)  # that of a backbone's checkpoint, which becomes a configuration of this family
        super().__post_init__(**kwargs)
        self.check_fields()
        self.validate()

    def check_fields(self) -> None:
        """Check the fields together; models do so again, since a field may have changed since.

        Raises:
            ValueError: naming the field, its value and what is allowed.
        """
        block_size = self.attn_res_block_size
        is_int = isinstance(block_size, int) and not isinstance(block_size, bool)
        _require(is_int and block_size >= 1, self, "attn_res_block_size", "an integer >= 1 (block size in sublayers)")
        for field, allowed in (("residual_connection", RESIDUAL_CONNECTIONS), ("attn_res_scale", ATTN_RES_SCALES)):
            _require(getattr(self, field) in allowed, self, field, "one of " + ", ".join(map(repr, allowed)))

    @property
    def sublayers(self) -> Sublayers:
        """The sublayers of one decoder layer."""
        declared = BACKBONES[self.backbone]
        return declared if isinstance(declared, tuple) else declared(self)

    @property
    def num_sublayers(self) -> int:
        """How many sublayers the decoder has: two for each layer, or one where attention and MLP are parallel."""
        return self.num_hidden_layers * len(self.sublayers)

    @property
    def num_attn_res_blocks(self) -> int:
        """How many blocks the sublayers are grouped into; the last may be shorter."""
        return math.ceil(self.num_sublayers / self.attn_res_block_size)

    @classmethod
    def get_config_dict(cls, *args, **kwargs):
        # The checkpoint of a backbone loads as this family, so its model type is not worth a warning.
        config_dict, kwargs = super().get_config_dict(*args, **kwargs)
        if config_dict.get("model_type") == cls.backbone:
            config_dict["model_type"] = cls.model_type
        return config_dict, kwargs


class AttnResConfig(ResidualConfig, KimiLinearConfig):
    r"""
    Configuration of [`AttnResModel`] and its heads: all fields of [`KimiLinearConfig`] and of [`ResidualConfig`].

    ```python
    >>> from attnres import AttnResConfig, AttnResForCausalLM

    >>> config = AttnResConfig(num_hidden_layers=4, attn_res_block_size=2)
    >>> model = AttnResForCausalLM(config)
    ```
    """

    model_type = "attnres"
    backbone = "kimi_linear"

    def check_fields(self) -> None:
        super().check_fields()
        _check_kimi_linear_fields(self)


def _require(condition: bool, config: PreTrainedConfig, field: str, allowed: str) -> None:
    if not condition:
        raise ValueError(f"`{field}` is {getattr(config, field)!r}, but must be {allowed}.")


def _check_kimi_linear_fields(config: AttnResConfig) -> None:
    """Check the Kimi Linear fields whose wrong values otherwise fail late, inside a layer and without a name."""
    num_layers = config.num_hidden_layers
    for field, kinds in (
        ("layer_types", ("linear_attention", "full_attention")),
        ("mlp_layer_types", ("dense", "sparse")),
    ):
        length = len(getattr(config, field))
        allowed = f"a list of length {num_layers} (`num_hidden_layers`), not {length}"
        _require(length == num_layers, config, field, allowed)
        allowed = "a list of " + " and ".join(map(repr, kinds))
        _require(set(getattr(config, field)) <= set(kinds), config, field, allowed)
    # The cache counts its tokens in a full-attention layer; with none, `use_cache=True` fails in `get_seq_length`.
    has_full_attention = "full_attention" in config.layer_types
    _require(has_full_attention, config, "layer_types", "a list with at least one 'full_attention' layer")

    for field in ("num_attention_heads", "linear_num_heads"):
        _require(getattr(config, field) >= 1, config, field, "an integer >= 1")
    heads, experts, groups = config.num_attention_heads, config.num_local_experts, config.n_group
    allowed = f"`num_attention_heads` ({heads}): MLA expands a key and a value for every head"
    _require(config.num_key_value_heads == heads, config, "num_key_value_heads", allowed)
    if "sparse" not in config.mlp_layer_types:
        return
    for field in ("n_group", "topk_group", "num_experts_per_tok"):
        _require(isinstance(getattr(config, field), int), config, field, "an integer >= 1")
    # The router ranks groups by their two best experts.
    allowed = f"a positive divisor of `num_local_experts` ({experts}) that leaves two or more to a group"
    _require(groups >= 1 and experts % groups == 0 and experts // groups >= 2, config, "n_group", allowed)
    _require(1 <= config.topk_group <= groups, config, "topk_group", f"from 1 to `n_group` ({groups})")
    reachable = experts // groups * config.topk_group
    allowed = f"from 1 to the {reachable} experts that `topk_group` of `n_group` groups hold"
    _require(1 <= config.num_experts_per_tok <= reachable, config, "num_experts_per_tok", allowed)


__all__ = ["AttnResConfig", "ResidualConfig"]
