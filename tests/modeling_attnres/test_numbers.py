"""Numbers in configurations that would make every logit NaN are refused, on every backbone."""

import dataclasses
import math

import pytest
import torch
from huggingface_hub.errors import StrictDataclassFieldValidationError
from transformers import AutoModelForCausalLM

from attnres import BACKBONES, CONNECTIONS, AttnResConfig, AttnResKimiK3Config, ResidualConfig
from attnres.backbones_attnres import config_on

from ..conversion import backbones

BUILT_IN = dict(CONNECTIONS)  # tests add others
# Every configuration of the family, and every number in it that is declared as a float.
CONFIGS = [AttnResConfig, AttnResKimiK3Config, *(config_on(name) for name in BACKBONES if name != "kimi_linear")]
FLOATS = [
    (config, field.name) for config in CONFIGS for field in dataclasses.fields(config) if "float" in str(field.type)
]
NOT_FINITE = [math.nan, math.inf, -math.inf, 1e39]
ROTARY = {"rope_type": "longrope", "rope_theta": 1e4, "factor": 4.0, "short_factor": [1.0], "long_factor": [2.0]}


def refusal_of(config: type[ResidualConfig], **fields) -> str:
    """Return the message with which a configuration refuses fields; an empty string if it takes them."""
    try:
        config(**fields)
    except (ValueError, StrictDataclassFieldValidationError) as error:  # the latter by a bound of `transformers`
        return str(error)
    return ""


@pytest.mark.parametrize(("config", "field"), FLOATS, ids=lambda value: getattr(value, "model_type", value))
def test_a_number_that_no_logit_would_survive_is_refused(config, field):
    bound = config.number_bounds.get(field, "")
    beyond = {"": [], "> 0": [0.0, -1.0], ">= 0": [-1.0], "< 0": [0.0, 1.0]}[bound]
    for value in [*NOT_FINITE, *beyond]:
        expected = f"`{field}` is {value!r}, but must be a finite number {bound}".rstrip()
        message = refusal_of(config, **{field: value})
        assert message.startswith((expected, f"Validation error for field '{field}'")), value


def test_the_inventory_of_numbers_is_whole():
    """The fields by which a norm, an attention or the logits multiply or divide are among those that are checked."""
    names = {field for _, field in FLOATS}
    assert {"rms_norm_eps", "layer_norm_eps", "routed_scaling_factor", "residual_multiplier", "logits_scaling"} <= names
    assert {"attn_logit_softcapping", "final_logit_softcapping", "gate_lower_bound", "activation_situ_beta"} <= names
    rotary = {"rope_theta", "factor", "short_factor", "long_factor"}
    assert {name for config in CONFIGS for name in config.number_bounds} <= names | rotary
    assert [refusal_of(config) for config in CONFIGS] == [""] * len(CONFIGS)


@pytest.mark.parametrize("key", [key for key in ROTARY if key != "rope_type"])
@pytest.mark.parametrize("nested", [False, True])
def test_a_number_that_no_rotary_embedding_would_survive_is_refused(key, nested):
    config = config_on("gemma3_text" if nested else "llama")
    for value in [*NOT_FINITE, 0.0, -1.0]:
        rotary = ROTARY | {key: [1.0, value] if isinstance(ROTARY[key], list) else value}
        kinds = {"full_attention": rotary, "sliding_attention": {"rope_type": "default", "rope_theta": 1e4}}
        path = f"rope_parameters.full_attention.{key}" if nested else f"rope_parameters.{key}"
        expected = f"`{path}` is {value!r}, but must be a finite number > 0."
        assert refusal_of(config, rope_parameters=kinds if nested else rotary) == expected


@pytest.mark.parametrize("connection", BUILT_IN)
def test_a_number_of_a_connection_is_refused_if_it_is_not_finite(connection, tiny_config):
    for field, default in BUILT_IN[connection].fields.items():
        if isinstance(default, float):
            for value in NOT_FINITE:
                with pytest.raises(ValueError, match=f"`{field}` is "):
                    tiny_config(residual_connection=connection, **{field: value})


@pytest.mark.slow
@pytest.mark.parametrize("case", [case for case in backbones.CASES if "," not in case])
@torch.no_grad()
def test_every_number_that_is_taken_gives_finite_logits(case):
    config = backbones.member_config(case)
    state = AutoModelForCausalLM.from_config(config).state_dict()
    for field in (field for a_config, field in FLOATS if a_config is type(config) and "drop" not in field):
        for value in [*NOT_FINITE, 0.0, -1.0]:
            if refusal_of(type(config), **config.to_dict() | {field: value}):
                continue
            model = AutoModelForCausalLM.from_config(type(config)(**config.to_dict() | {field: value})).eval()
            model.load_state_dict(state)
            assert model(backbones.token_ids()).logits.isfinite().all(), (field, value)
