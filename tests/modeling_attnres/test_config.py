"""A wrong configuration is refused with a `ValueError` that names the field, its value and the allowed values."""

import json
import sys

import pytest

from attnres import (
    CONNECTIONS,
    AttnResConfig,
    AttnResForCausalLM,
    AttnResLlamaConfig,
    AttnResLlamaForCausalLM,
    ResidualConfig,
)
from attnres.connections_attnres import ATTENTION_CHANGES
from attnres.residual_attnres import norm_eps

BUILT_IN = dict(CONNECTIONS)  # tests add others

# Tests match the whole messages: field, value and allowed values.
BLOCK_SIZE = "`attn_res_block_size` is {!r}, but must be an integer >= 1 (block size in sublayers)."
SCALE = "`attn_res_scale` is {!r}, but must be one of 'mean', 'sum'."
CONNECTION = f"`residual_connection` is {{!r}}, but must be one of {', '.join(map(repr, CONNECTIONS))}."
LENGTH = "`{}` is {!r}, but must be a list of length 4 (`num_hidden_layers`), not {}."
HEADS = (
    "`num_key_value_heads` is {!r}, but must be `num_attention_heads` (4): "
    "MLA expands a key and a value for every head."
)
GROUPS = (
    "`n_group` is {!r}, but must be a positive divisor of `num_local_experts` (8) with two or more "
    "experts in each group."
)

RESIDUAL_FIELDS = [
    *[("attn_res_block_size", value, BLOCK_SIZE.format(value)) for value in (0, -1, 2.0, 2.5, "6", True, None, [2])],
    *[("attn_res_scale", value, SCALE.format(value)) for value in ("max", "Mean", "", 1, None, ["sum"])],
    *[("residual_connection", value, CONNECTION.format(value)) for value in ("hyper", "", None, 0, False, ["mhc"])],
]
BACKBONE_FIELDS = [
    *[("num_key_value_heads", value, HEADS.format(value)) for value in (2, 3, 8)],
    *[
        (field, value, f"`{field}` is {value}, but must be an integer >= 1.")
        for field in ("vocab_size", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads")
        for value in (0, -2)
    ],
    *[
        ("num_hidden_layers", value, f"`num_hidden_layers` is {value}, but must be an integer from 1 to 10,000.")
        for value in (10**6, 0, -1)
    ],
    ("backbone", "llama", "`backbone` is 'llama', but must be 'kimi_linear', that of AttnResConfig."),
    *[("n_group", value, GROUPS.format(value)) for value in (3, 0, 8)],
    ("topk_group", None, "`topk_group` is None, but must be an integer >= 1."),
    ("topk_group", 2, "`topk_group` is 2, but must be from 1 to `n_group` (1)."),
    ("num_experts_per_tok", 9, "`num_experts_per_tok` is 9, but must be from 1 to the 8 experts"),
    ("num_experts_per_tok", 0, "`num_experts_per_tok` is 0, but must be from 1 to the 8 experts"),
    *[
        (field, [kind] * length, LENGTH.format(field, [kind] * length, length))
        for field, kind in (("layer_types", "full_attention"), ("mlp_layer_types", "dense"))
        for length in (0, 3, 5)
    ],
    (
        "layer_types",
        ["full_attention"] * 3 + ["sliding_attention"],
        "but must be a list of 'linear_attention' and 'full_attention'.",
    ),
    ("mlp_layer_types", ["dense"] * 3 + ["moe"], "but must be a list of 'dense' and 'sparse'."),
    (
        "layer_types",
        ["linear_attention"] * 4,
        f"`layer_types` is {['linear_attention'] * 4}, but must be a list with at least one 'full_attention' layer.",
    ),
]


def wrong(*cases: tuple[str, object, str]) -> pytest.MarkDecorator:
    """Parametrize a test with `field`, `value` and the `message` of the error."""
    return pytest.mark.parametrize(
        ("field", "value", "message"), cases, ids=[f"{field}={value!r}" for field, value, _ in cases]
    )


@wrong(*RESIDUAL_FIELDS, *BACKBONE_FIELDS)
def test_a_wrong_field_is_refused_when_the_configuration_is_made(tiny_config, field, value, message):
    with pytest.raises(ValueError) as error:
        tiny_config(**{field: value})
    assert message in str(error.value)


@wrong(*RESIDUAL_FIELDS, *BACKBONE_FIELDS)
def test_a_wrong_field_of_a_config_json_is_refused_when_it_is_read(tiny_config, tmp_path, field, value, message):
    tiny_config().save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    fields = json.loads(path.read_text())
    fields[AttnResConfig.attribute_map.get(field, field)] = value
    path.write_text(json.dumps(fields))
    with pytest.raises(ValueError) as error:
        AttnResConfig.from_pretrained(tmp_path)
    assert message in str(error.value)


@wrong(*RESIDUAL_FIELDS, *BACKBONE_FIELDS)
def test_a_field_set_wrong_after_creation_is_refused_when_a_model_is_made(tiny_config, field, value, message):
    config = tiny_config()
    setattr(config, field, value)
    with pytest.raises(ValueError) as error:
        AttnResForCausalLM(config)
    assert message in str(error.value)


def test_a_wrong_override_is_refused_when_a_model_is_loaded(tiny_model, tmp_path):
    tiny_model().save_pretrained(tmp_path)
    with pytest.raises(ValueError) as error:
        AttnResForCausalLM.from_pretrained(tmp_path, attn_res_block_size=0)
    assert BLOCK_SIZE.format(0) in str(error.value)


def test_the_defaults_are_block_attention_residuals_of_six_sublayers_averaged():
    config = AttnResConfig()
    fields = config.residual_connection, config.attn_res_block_size, config.attn_res_scale
    assert fields == ("attn_res", 6, "mean")


@pytest.mark.parametrize("block_size", [1, 2, 3, 7, 8, 9, 1000])
def test_any_block_size_from_one_up_is_allowed(tiny_config, block_size):
    assert tiny_config(attn_res_block_size=block_size).attn_res_block_size == block_size


def test_a_saved_configuration_reads_back_equal(tiny_config, tmp_path):
    config = tiny_config(residual_connection="standard", attn_res_block_size=3, attn_res_scale="sum")
    config.save_pretrained(tmp_path)
    read = AttnResConfig.from_pretrained(tmp_path)
    saved = json.loads((tmp_path / "config.json").read_text())
    assert saved["model_type"] == "attnres"
    assert (saved["residual_connection"], saved["attn_res_block_size"], saved["attn_res_scale"]) == (
        "standard",
        3,
        "sum",
    )
    assert read.to_diff_dict() == config.to_diff_dict()


@pytest.mark.parametrize(("field", "value"), [("num_attention_heads", 0), ("num_hidden_layers", 10**6)])
def test_wrong_sizes_of_another_backbone_are_refused(field, value):
    with pytest.raises(ValueError, match=f"`{field}` is {value}, but must be an integer"):
        AttnResLlamaConfig(**{field: value})


def test_the_default_of_every_field_has_the_declared_type():
    """The API reference shows declared fields, and not attributes that are set at run time."""
    fields, types = {}, {}
    for owner in (*BUILT_IN.values(), *ATTENTION_CHANGES):
        fields |= owner.fields
        for base in owner.__mro__:
            for declaration in vars(sys.modules[base.__module__]).values():
                if isinstance(declaration, type) and declaration.__name__.endswith("Fields"):
                    types |= vars(declaration).get("__annotations__", {})
    assert len(fields) > 15
    for name, default in fields.items():
        assert isinstance(default, types[name]) and getattr(ResidualConfig, name) == default, name


def test_a_subclass_with_fields_of_its_own_can_be_made_saved_and_read(backbones, tmp_path):
    class MyConfig(AttnResLlamaConfig):
        extra: int = 3

    MyConfig(**backbones.COMMON, extra=4).save_pretrained(tmp_path)
    config = MyConfig.from_pretrained(tmp_path)
    assert config.extra == 4
    assert AttnResLlamaForCausalLM(config).config is config


def test_the_norms_of_connections_have_the_epsilon_of_the_backbones_norms(backbones):
    config = backbones.member_config("gpt_neox", layer_norm_eps=1e-4, rms_norm_eps=0.5)  # it has no such field
    assert norm_eps(config) == 1e-4
    assert norm_eps(backbones.member_config("llama", rms_norm_eps=1e-3)) == 1e-3
