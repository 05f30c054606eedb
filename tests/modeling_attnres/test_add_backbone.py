"""A decoder that is not in `BACKBONES` joins the family by a declaration, or is refused with the reason."""

from collections.abc import Callable, Iterator

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

import attnres
from attnres import BACKBONES, Sublayer, Sublayers, add_backbone, backbones_attnres
from attnres.configuration_attnres import PRE_NORM, SANDWICH, attention_and_mlp
from attnres.conversion import retrofit
from attnres.residual_attnres import residual_tensors

from .own_decoder import OwnConfig, OwnLM, OwnModel

COHERE = (Sublayer("parallel_res", (("input_layernorm", "self_attn"), ("input_layernorm", "mlp"))),)


@pytest.fixture
def declare() -> Iterator[Callable[[str, Sublayers], None]]:
    """Return `add_backbone`, and undo its calls after the test."""
    before = dict(BACKBONES)
    yield add_backbone
    BACKBONES.clear()
    BACKBONES.update(before)


@pytest.fixture
def build(backbones) -> Callable[..., PreTrainedModel]:
    """Return `build(model_type, **fields)`, which builds a small model of any decoder of `transformers`."""

    def make(model_type: str, **fields) -> PreTrainedModel:
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **backbones.COMMON, **fields)).eval()
        backbones.make_vivid(model)
        return model

    return make


@pytest.mark.parametrize(
    ("model_type", "sublayers", "prefix", "per_layer"),
    [("cohere", COHERE, "Cohere", 1), ("starcoder2", PRE_NORM, "Starcoder2", 2), ("glm", PRE_NORM, "Glm", 2)],
)
@torch.no_grad()
def test_a_declared_decoder_works_like_the_built_in_backbones(
    declare, build, backbones, tmp_path, model_type, sublayers, prefix, per_layer
):
    declare(model_type, sublayers)
    standard, token_ids = build(model_type), backbones.token_ids()
    expected = standard(token_ids).logits
    model = retrofit(standard, block_size=3)
    assert type(model) is getattr(attnres, f"AttnRes{prefix}ForCausalLM")
    assert model.config.model_type == f"attnres_{model_type}"
    outputs = model(token_ids, output_hidden_states=True, output_depth_attentions=True)
    assert (outputs.logits - expected).abs().max() <= 1e-4 * expected.abs().max()
    assert len(outputs.hidden_states) == 5 + 1
    assert len(outputs.depth_attentions) == 5 * per_layer + 1

    for tensor in residual_tensors(model).values():
        tensor.add_(torch.randn_like(tensor), alpha=0.5)
    logits = model(token_ids).logits
    assert (logits - expected).abs().max() > 0.05 * expected.abs().max()
    model.save_pretrained(tmp_path)
    assert torch.equal(AutoModelForCausalLM.from_pretrained(tmp_path)(token_ids).logits, logits)


def test_an_undeclared_decoder_is_refused_with_the_list_of_backbones(build):
    with pytest.raises(ValueError, match=r"model type 'starcoder2'. Supported are .*'gemma3_text', .*add_backbone"):
        retrofit(build("starcoder2"))


@pytest.mark.parametrize(
    ("model_type", "sublayers", "message"),
    [
        ("gpt2", PRE_NORM, "the decoder of 'gpt2' does not keep its layers in `layers`."),
        (
            "stablelm",
            SANDWICH,
            "'mlp_res', declared for 'stablelm', uses `pre_feedforward_layernorm`; its layers have `self_attn`, `mlp`, "
            "`input_layernorm`, `post_attention_layernorm`, `dropout`.",
        ),
        (
            "starcoder2",
            attention_and_mlp(*(sublayer.branches[0] for sublayer in PRE_NORM), multiplier="residual_multiplier"),
            "'self_attention_res', declared for 'starcoder2', uses `residual_multiplier`; its layers have `self_attn`, "
            "`mlp`, `input_layernorm`, `post_attention_layernorm`.",
        ),
        (
            "starcoder2",
            (Sublayer("mixer_res", PRE_NORM[0].branches), PRE_NORM[1]),
            "the sublayers of 'starcoder2' are named ['mixer_res', 'mlp_res']: names must differ, and the first "
            "must be 'self_attention_res' or 'parallel_res'.",
        ),
        (
            "starcoder2",
            (PRE_NORM[0], Sublayer("self_attention_res", PRE_NORM[1].branches)),
            "the sublayers of 'starcoder2' are named ['self_attention_res', 'self_attention_res']: names must differ, "
            "and the first must be 'self_attention_res' or 'parallel_res'.",
        ),
    ],
    ids=["layers elsewhere", "missing module", "missing multiplier", "name of the first", "the same name twice"],
)
def test_a_declaration_that_does_not_fit_is_refused(declare, build, model_type, sublayers, message):
    declare(model_type, sublayers)
    with pytest.raises(ValueError) as error:
        retrofit(build(model_type))
    assert str(error.value) == message


def test_an_unknown_model_type_is_refused_and_not_added():
    with pytest.raises(ValueError, match="'no_such_decoder' is not a model type"):
        attnres.add_backbone("no_such_decoder", attnres.BACKBONES["llama"])
    assert "no_such_decoder" not in attnres.BACKBONES


@torch.no_grad()
def test_a_decoder_of_another_package_works_like_those_of_transformers(declare, backbones, tmp_path):
    declare("own", PRE_NORM)
    standard, token_ids = OwnLM(OwnConfig(**backbones.COMMON)).eval(), backbones.token_ids()
    model = retrofit(standard, block_size=3)
    assert type(model) is attnres.AttnResOwnLM
    assert type(model.model) is attnres.AttnResOwnModel
    torch.testing.assert_close(model(token_ids).logits, standard(token_ids).logits, rtol=0, atol=1e-5)
    model.save_pretrained(tmp_path)
    assert torch.equal(AutoModelForCausalLM.from_pretrained(tmp_path)(token_ids).logits, model(token_ids).logits)


@pytest.mark.parametrize(
    ("model_type", "message"),
    [
        ("albert", "'albert' must have a decoder and a language model: register their classes with `AutoModel` and"),
        ("own", "the decoder of 'own' must name the class .* first in `_no_split_modules`, which is None"),
    ],
)
def test_a_model_type_without_a_class_that_is_needed_is_refused(declare, monkeypatch, model_type, message):
    monkeypatch.setattr(OwnModel, "_no_split_modules", None)
    declare(model_type, PRE_NORM)
    models_on = backbones_attnres.models_on.__wrapped__  # an earlier test has made the models of 'own'
    with pytest.raises(ValueError, match=message):
        models_on(model_type)
