"""Configuration of Kimi K3, and how it is read from a released `config.json` and written again.

A file holds the fields of the composite model, with the text model's under `text_config`, or of the text model alone,
which names Kimi Linear's model type. In a file a feature without a field is off; the defaults of the class are those of
the released model.
"""

from collections.abc import Mapping
from typing import Any

from transformers import PreTrainedConfig
from transformers.activations import ACT2FN

from .attention_gate_attnres import GATE_FIELDS
from .connections_attnres import CONNECTIONS
from .kimi_k3_fields_attnres import (
    FIELDS,
    FLAGS,
    LAYER_LISTS,
    LINEAR,
    NAMES,
    OF_CODE,
    OF_FILE,
    OF_SITU,
    QUANTIZATION,
    WITHOUT_EFFECT,
    as_object,
    check_quantization,
    check_without_situ,
    fields_without_experts,
    gate_of_family,
    layer_types_of,
    quantization_of,
)
from .kimi_k3_packed_attnres import MXFP4, PACKINGS, Packing
from .kimi_k3_vision_configuration_attnres import AttnResKimiK3VisionConfig
from .kimi_linear_configuration_attnres import AttnResConfig
from .residual_attnres import explain_source, is_count, one_of, require

# The id of placeholders for image tokens, in a file of the composite model.
_PLACEHOLDER = "media_placeholder_token_id"
_THAT_SEES = "AttnResKimiK3ForConditionalGeneration"
COMPOSITE, TEXT = "composite", "text"


class AttnResKimiK3Config(AttnResConfig):
    """Configuration of Kimi K3: of its text model, and of its vision part if it has one.

    Defaults are those of the released text model.

    `from_pretrained` and `from_dict` take the fields of a released `config.json`: of the composite model, with the text
    model's under `text_config`, or of the text model alone. `config.json` is written in the layout that was read. A
    field that releases name differently may have either name as an argument. Fields that are documented here are those
    that [`KimiLinearConfig`] and [`ResidualConfig`] do not have, or have with another meaning.
    """

    model_type = "kimi_k3"
    sub_configs = {"vision_config": AttnResKimiK3VisionConfig}
    attn_res_block_unit = 2  # a decoder layer has two sublayers
    number_bounds = AttnResConfig.number_bounds | dict.fromkeys(OF_SITU, "> 0") | {"gate_lower_bound": "< 0"}
    # `transformers` checks the types of Kimi Linear's fields when they are set. There these two cannot be null.
    __validators__ = {
        name: checks
        for name, checks in getattr(AttnResConfig, "__validators__", {}).items()
        if name not in ("num_local_experts", "n_shared_experts")
    }

    vocab_size: int = 163840
    hidden_size: int = 7168
    intermediate_size: int = 33792
    moe_intermediate_size: int = 3072
    num_hidden_layers: int = 93
    num_attention_heads: int = 96
    q_lora_rank: int | None = 1536
    n_shared_experts: int | None = 2
    routed_scaling_factor: float = 1.0
    num_experts_per_tok: int = 16
    linear_num_heads: int = 96

    num_key_value_heads: int | None = None
    """Must be `num_attention_heads`, as it is by default: MLA expands a key and a value for every head."""

    num_local_experts: int | None = 896
    """Number of routed experts (`num_experts` in a file); `None`: the MLPs of all layers are dense."""

    attn_res_block_size: int | None = 12
    """Number of decoder *layers* in a block; `None`: no attention residuals, but the standard residual stream."""

    hidden_act: str = "situ"
    """Activation of all MLPs: `"situ"`, or a name of `ACT2FN` for the gate alone. Delta attention always has SiLU."""

    activation_situ_beta: float | None = 4.0
    """Bound `b` of the gate in SiTU: `b tanh(gate / b) sigmoid(gate)`."""

    activation_situ_linear_beta: float | None = 25.0
    """Bound `l` of the up projection in SiTU, `l tanh(up / l)`; `None` leaves it unchanged."""

    gate_lower_bound: float | None = -5.0
    """Lower bound of the logarithm of a decay in delta attention, below 0; `None`: Kimi Linear's unbounded form."""

    use_full_rank_gate: bool = True
    """`True`: one projection computes the gate of delta attention's output. `False`: two of rank `linear_head_dim`."""

    mla_use_output_gate: bool = True
    """`True` gates the output of full attention before its output projection."""

    mla_use_nope: bool = True
    """Must be true: full attention has no position encoding."""

    routed_expert_hidden_size: int | None = 3584
    """Width of the latent space of the routed experts; `None`: they work in the model's own."""

    latent_moe_use_norm: bool = True
    """`True` norms the experts' sum in the latent space, before the projection back."""

    first_k_dense_replace: int = 1
    """Number of layers at the start whose MLP is dense."""

    moe_layer_freq: int = 1
    """After the first dense layers, a layer has routed experts if its index is a multiple of this number."""

    moe_router_activation_func: str = "sigmoid"
    """Must be `"sigmoid"`."""

    topk_method: str | None = "noaux_tc"
    """Must be `"noaux_tc"`: a bias that is not trained decides which experts are chosen."""

    use_grouped_topk: bool | None = None
    """`True` or `None`: the router chooses experts by groups. Must not be `False` with several groups."""

    num_nextn_predict_layers: int | None = 0
    """Number of layers for multi-token prediction, 0 or 1. Loading sets it to 0 if the checkpoint holds none."""

    vision_config: dict | AttnResKimiK3VisionConfig | None = None
    """Configuration of the vision part; `None`: the text model alone. Models that do not see have no use for it, and
    are saved without it."""

    image_token_id: int | None = 163605
    """Token that holds the place of a token of an image (`media_placeholder_token_id` in a file)."""

    checkpoint_layout: str = COMPOSITE
    """Layout that `save_pretrained` writes: `"composite"` or `"text"`. It is not saved: a file shows its layout."""

    packed_experts: bool = False
    """`True` keeps routed experts packed as the checkpoint has them. They are decoded where they are used, and frozen.
    It is not saved: a checkpoint with packed experts loads unpacked by default."""

    stored_quantization: dict | None = None
    """Values of `quantization_config` in the file, by the object that has them: `"text_config"`, or `""` for the file
    itself. They are written again where experts stay packed."""

    stored_A_log_shape: list[int] | None = None
    """Shape in which `save_pretrained` stores each `A_log`, padded with zeros. It is not saved: a checkpoint has it."""

    def __post_init__(self, **kwargs):
        if kwargs.get("model_type") == self.backbone:
            # By now, given values cannot be told from defaults.
            raise ValueError(
                "these fields come from a config.json, where a missing field means off. This class turns it on. Call "
                "`AttnResKimiK3Config.from_dict`."
            )
        # `transformers` has set the fields that it knows, and passes on the others, of which some are second names from
        # releases. Types are checked under the names here.
        for name, value in decode(kwargs, fill="text_config" in kwargs).items():
            field = NAMES.get(name, name)
            if field in type(self).__dataclass_fields__:
                setattr(self, field, value)
                kwargs.pop(name, None)
            else:
                kwargs[name] = value
        for name in ("text_config", LINEAR, QUANTIZATION):
            kwargs.pop(name, None)
        for field in FIELDS:
            if field.null not in (None, ...) and getattr(self, field.name) is None:
                setattr(self, field.name, field.null)
        if self.attn_res_block_size is None and self.residual_connection == "attn_res":
            self.residual_connection = "standard"
        self.check_sizes()  # before lists of such a length are made
        self._check_dense_layers()
        if self.layer_types is None:
            last = self.num_hidden_layers - 1
            self.layer_types = [  # pyrefly: ignore[attribute-assign-on-never]  # not set yet
                "full_attention" if i % 4 == 3 or i == last else "linear_attention" for i in range(last + 1)
            ]
        if self.mlp_layer_types is None:
            # pyrefly: ignore[attribute-assign-on-never]  # not set yet
            self.mlp_layer_types = self._released_mlp_types()
        for name in OF_SITU:
            # The default bounds belong to SiTU. `check_fields` refuses any other bound beside another activation.
            if self.hidden_act != "situ" and getattr(self, name) == getattr(type(self), name):
                setattr(self, name, None)
        # The gate of the family is that of the released weights, with the same name of its tensor. If the arguments
        # contradict each other, `check_fields` says so.
        self.attention_gate = kwargs.pop("attention_gate", gate_of_family(self.mla_use_output_gate))
        for name in ("bos_token_id", "eos_token_id", "pad_token_id", "image_token_id"):
            # The ids of the released tokenizer mean nothing in a smaller vocabulary.
            value = getattr(self, name)
            if value == getattr(type(self), name) and isinstance(value, int) and value >= self.vocab_size:
                setattr(self, name, None)
        if isinstance(self.vision_config, Mapping):
            self.vision_config = AttnResKimiK3VisionConfig.from_release(self.vision_config)
        super().__post_init__(**kwargs)

    @property
    def packing(self) -> Packing:
        """The format of packed experts: that of the checkpoint, or MXFP4 as in the release."""
        stored = next(iter((self.stored_quantization or {}).values()), {})
        return PACKINGS[stored.get("format", MXFP4.name)]

    @property
    def base_model_ep_plan(self) -> dict[str, Any]:
        """The plan of expert parallelism: Kimi Linear's, with the parts of packed experts in place of their weights."""
        plan: dict[str, Any] = dict(super().base_model_ep_plan or {})
        for name in [name for name in plan if self.packed_experts and name.endswith("_proj")]:
            style = plan.pop(name)
            plan |= {f"{name}_{part}": style for part in self.packing.parts}
        return plan

    def _check_dense_layers(self) -> None:
        """Raise `ValueError` if a field that decides which MLPs are dense is not allowed."""
        first, every = self.first_k_dense_replace, self.moe_layer_freq
        require(self, "first_k_dense_replace", first == 0 or is_count(first), "an integer >= 0")
        require(self, "moe_layer_freq", is_count(every), "an integer >= 1")

    def _released_mlp_types(self) -> list[str]:
        """Return the kinds of MLP that the released fields stand for."""
        first, every = self.first_k_dense_replace, self.moe_layer_freq
        has_experts = self.num_local_experts is not None
        return [
            "sparse" if has_experts and i >= first and i % every == 0 else "dense"
            for i in range(self.num_hidden_layers)
        ]

    @classmethod
    def check_file(cls, fields: Mapping[str, Any]) -> None:
        """Accept the fields of Kimi K3."""

    @classmethod
    def fields_of_file(cls, fields: Mapping[str, Any]) -> dict[str, Any]:
        """Return the fields of a released `config.json` as arguments of this class; see [`decode`]."""
        return decode(fields)

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs):
        """Make a configuration of the fields of a `config.json`, in any of the released layouts.

        Args:
            config_dict: the fields.
            kwargs: fields with other values, also under their released names; and arguments of `transformers`.
        """
        # `transformers` would set the changed fields last, when other fields already follow from the old values.
        names = cls.known_fields() - {*WITHOUT_EFFECT, *OF_FILE, "dtype"} | {LINEAR}
        changes = {name: kwargs.pop(name) for name in [*kwargs] if name in names}
        with explain_source(kwargs.get("name_or_path")):  # an Auto class gives the directory or Hub id
            return super().from_dict(cls._changed(decode(config_dict), changes), **kwargs)

    @classmethod
    def _changed(cls, fields: dict[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
        """Return arguments of this class with some changed. Of a field's two names, that of the change remains."""
        if LINEAR in changes:
            changes = decode(changes, fill=False)
        changed = {cls.attribute_map.get(name, name) for name in changes}
        # These follow from other fields.
        if "mla_use_output_gate" in changed:
            changed.add("attention_gate")
        if "attn_res_block_size" in changed and fields.get("residual_connection") == "standard":
            changed.add("residual_connection")
        if changes.get("hidden_act", fields.get("hidden_act")) != fields.get("hidden_act"):
            changed |= {*OF_SITU}
        per_token = fields.get("num_experts_per_token", fields.get("num_experts_per_tok"))
        if "num_experts" in changed and per_token == 0:
            # `to_dict` writes these two without experts. With experts, the defaults hold.
            changed |= {"num_experts_per_token", "first_k_dense_replace"}
        kept = {name: value for name, value in fields.items() if cls.attribute_map.get(name, name) not in changed}
        return kept | dict(changes)

    @classmethod
    def get_config_dict(cls, *args, **kwargs):
        """Read a `config.json` as `transformers` does; that of the text model alone names Kimi Linear's model type."""
        # Not the method of the family: it would hide which layout the file has.
        fields, kwargs = PreTrainedConfig.get_config_dict.__func__(cls, *args, **kwargs)
        with explain_source(args[0] if args else None):
            return decode(fields), kwargs

    def check_sizes(self) -> None:
        """Check the sizes that tensors are made of; see the base class."""
        if self.qk_rope_head_dim == 0:
            # It is the size that rotary embeddings would have.
            self.head_dim = None  # pyrefly: ignore[bad-assignment]  # Kimi Linear always has some
        super().check_sizes()

    def check_fields(self) -> None:
        """Check all fields, also those of Kimi K3.

        Raises:
            ValueError: a value is not allowed; the message names field, value and allowed values.
        """
        experts, shared = self.num_local_experts, self.n_shared_experts
        # The router ranks groups of experts by the best two of each.
        is_allowed = experts is None or (is_count(experts) and experts >= 2)
        require(self, "num_experts", is_allowed, "an integer >= 2, or null where the MLPs of all layers are dense")
        is_allowed = shared is None or shared == 0 or is_count(shared)
        require(self, "num_shared_experts", is_allowed, "an integer >= 0")
        for name in (*FLAGS, "packed_experts"):
            require(self, name, isinstance(getattr(self, name), bool), "true or false")
        self._check_dense_layers()
        super().check_fields()
        require(self, "mla_use_nope", self.mla_use_nope is True, "true: there is no position encoding")
        function = self.moe_router_activation_func
        require(self, "moe_router_activation_func", function == "sigmoid", "'sigmoid'")
        require(self, "topk_method", self.topk_method in (None, "noaux_tc"), "'noaux_tc'")
        is_grouped = self.use_grouped_topk is not False or self.n_group == 1
        require(self, "use_grouped_topk", is_grouped, f"true where `num_expert_group` is {self.n_group}")
        require(self, "hidden_act", self.hidden_act in ("situ", *ACT2FN), f"'situ' or {one_of(ACT2FN)}")
        if self.hidden_act == "situ":
            is_given = self.activation_situ_beta is not None
            require(self, "activation_situ_beta", is_given, "a finite number > 0 where `hidden_act` is 'situ'")
        else:
            check_without_situ(vars(self))
        width = self.routed_expert_hidden_size
        require(self, "routed_expert_hidden_size", width is None or is_count(width), "an integer >= 1, or null")
        require(self, "checkpoint_layout", self.checkpoint_layout in (COMPOSITE, TEXT), one_of((COMPOSITE, TEXT)))
        is_text = self.checkpoint_layout == TEXT
        require(self, "vision_config", not (is_text and self.vision_config), f"null in the layout {TEXT!r}")
        gate = gate_of_family(self.mla_use_output_gate)
        allowed = f"{gate!r} where `mla_use_output_gate` is {self.mla_use_output_gate}. Set `mla_use_output_gate` alone"
        require(self, "attention_gate", self.attention_gate == gate, allowed)
        has_none = getattr(self, "value_residual", None) is None  # saved code has the field only if it is used
        require(self, "value_residual", has_none, "null: Kimi K3 has no value residuals")
        allowed = "those of `num_experts`, `first_k_dense_replace` and `moe_layer_freq`"
        require(self, "mlp_layer_types", self.mlp_layer_types == self._released_mlp_types(), allowed)
        known = self.known_fields()
        for name, value in vars(self).items():
            if name not in known and name[0] != "_" and value not in (None, False, "", [], {}):
                raise ValueError(
                    f"`{name}` ({value!r}) may change what the model computes, and this version does not know it. "
                    "Update the code, or remove the field from config.json if it has no effect."
                )

    @classmethod
    def known_fields(cls) -> set[str]:
        """Return the names of all fields that are not of another version."""
        connections = (name for connection in CONNECTIONS.values() for name in connection.fields)
        names = {*cls.attribute_map, *cls.attribute_map.values(), *connections, *GATE_FIELDS}
        return {*cls.__dataclass_fields__, *WITHOUT_EFFECT, *OF_FILE, *names, "mtp_loss_weight"}

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as a released `config.json` has them; see [`encode`]."""
        return encode(self, super().to_dict())


def decode(fields: Mapping[str, Any], fill: bool = True) -> dict[str, Any]:
    """Return the fields of a released `config.json` as arguments of [`AttnResKimiK3Config`].

    Args:
        fields: those of the composite model, of the text model, or arguments of the class.
        fill: whether a feature of which the file says nothing is off.

    Raises:
        ValueError: the lists of layers contradict each other; a field of linear attention is unknown; the
            quantisation is not the released one.
    """
    fields = {name: value for name, value in fields.items() if name not in OF_CODE[1:]}
    if "text_config" not in fields and LINEAR not in fields and fields.get("model_type") is None:
        return fields  # arguments of the class
    flat, layout = _flatten(fields)
    flat.pop(QUANTIZATION, None)
    check_quantization(layout.get("stored_quantization"))
    linear = as_object(LINEAR, flat.pop(LINEAR, None))
    lists = {name: linear.pop(name) for name in LAYER_LISTS if linear.get(name) is not None}
    for name, value in linear.items():
        if (path := f"{LINEAR}.{name}") in NAMES:
            flat[NAMES[path]] = value
        elif value not in (None, False):
            raise ValueError(
                f"`{LINEAR}` has the field `{name}` ({value!r}), which may change what the model computes, and which "
                "this version does not know. Update the code, or remove the field if it has no effect."
            )
    if lists:
        layers = flat.get("num_hidden_layers", AttnResKimiK3Config.num_hidden_layers)
        flat["layer_types"] = layer_types_of(lists, layers)
    if fill:
        for field in FIELDS:
            if field.absent is not ... and flat.keys().isdisjoint(field[:2]):
                flat[field.name] = field.absent
        if flat["hidden_act"] != "situ":
            check_without_situ(flat)
        # For the checks of a loaded checkpoint, which compare the fields of the family.
        flat["attention_gate"] = gate_of_family(flat["mla_use_output_gate"])
        if flat["attn_res_block_size"] is None:
            flat.setdefault("residual_connection", "standard")
        flat["model_type"] = AttnResKimiK3Config.model_type
    else:
        flat.pop("model_type", None)
    # The released names are no classes here. `encode` writes them.
    sees = flat.get("vision_config") is not None
    return flat | layout | {"architectures": [_THAT_SEES if sees else "AttnResKimiK3ForCausalLM"]}


def _flatten(fields: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the fields of the text model, and the fields that say in which layout a file has them."""
    if "text_config" not in fields:
        is_text = fields.get("model_type") == AttnResKimiK3Config.backbone
        return fields, ({"checkpoint_layout": TEXT} if is_text else {}) | quantization_of({"": fields})
    if not fields["text_config"]:
        raise ValueError(
            "`text_config` is empty, but must hold the fields of the text model. Use the checkpoint's own config.json."
        )
    text = as_object("text_config", fields.pop("text_config"))
    if _PLACEHOLDER in fields:
        fields["image_token_id"] = fields.pop(_PLACEHOLDER)
    # The composite model has more fields, which are for a processor.
    fields = {name: value for name, value in fields.items() if name in AttnResKimiK3Config.known_fields()}
    # Of two values of a field that describes the file, that of the composite model holds.
    kept = [name for name in text if name not in OF_CODE and not (name in OF_FILE and name in fields)]
    layout = {"checkpoint_layout": COMPOSITE} | quantization_of({"": fields, "text_config": text})
    return fields | {name: text[name] for name in kept}, layout


def encode(config: AttnResKimiK3Config, fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return a configuration as a released `config.json` has it, in the layout of `checkpoint_layout`.

    Args:
        config: the configuration.
        fields: its fields as those of any model of `transformers`.
    """
    # No release has a classifier, so it keeps its own name.
    classifiers = [name for name in fields.get("architectures") or () if name.endswith("Classification")]
    text: dict[str, Any] = {"model_type": config.backbone, "architectures": classifiers or ["KimiLinearForCausalLM"]}
    linear: dict[str, Any] = {
        name: [i + 1 for i, of_layer in enumerate(config.layer_types) if of_layer == kind]
        for name, kind in LAYER_LISTS.items()
    }
    text[LINEAR] = linear
    for field in FIELDS:
        value = getattr(config, field.name)
        if value is not None or field.null is None:
            *path, name = field.released.split(".")
            (linear if path else text)[name] = value
    if getattr(config, "mtp_loss_weight", 0):
        text["mtp_loss_weight"] = config.mtp_loss_weight
    if config.num_local_experts is None:
        text |= fields_without_experts(config.num_hidden_layers)
    if config.residual_connection != "attn_res":
        text.pop("attn_res_block_size", None)
        if config.residual_connection != "standard":
            text["residual_connection"] = config.residual_connection
    for name, default in CONNECTIONS[config.residual_connection].fields.items():
        if name != "attn_res_block_size" and fields.get(name, default) != default:
            text[name] = fields[name]
    # Of the common fields of `transformers`, those that were changed; and fields that no one here knows, which are off.
    common, known = PreTrainedConfig().to_dict(), config.known_fields() | NAMES.keys()
    for name, value in fields.items():
        is_changed = name in common and name not in OF_FILE and value != common[name]
        is_unknown = name not in common and name not in known
        if name not in text and not name.startswith("_") and (is_changed or is_unknown):
            text[name] = value
    outer = {name: fields[name] for name in ("auto_map", "transformers_version") if name in fields}
    stored = (config.stored_quantization or {}) if config.packed_experts else {}
    outer |= {QUANTIZATION: stored[""]} if "" in stored else {}
    if config.checkpoint_layout == TEXT:
        return text | outer
    text |= {QUANTIZATION: stored["text_config"]} if "text_config" in stored else {}
    outer |= {"model_type": config.model_type, "architectures": classifiers or ["KimiK3ForConditionalGeneration"]}
    names = ("dtype", "bos_token_id", "eos_token_id", "pad_token_id", "tie_word_embeddings")
    outer |= {name: text[name] for name in names if name in text}
    vision = config.vision_config
    # A model that does not see is saved without the vision part, so its file names none.
    if isinstance(vision, AttnResKimiK3VisionConfig) and fields.get("architectures") in (None, [_THAT_SEES]):
        outer |= {_PLACEHOLDER: config.image_token_id, "vision_config": vision.to_release(config.hidden_size)}
    return outer | {"text_config": text}


AttnResKimiK3Config.register_for_auto_class()
