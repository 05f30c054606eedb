"""Token classification on every backbone, and question answering on those that have it; both heads of Kimi K3."""

import json

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import (
    CONFIG_MAPPING,
    AutoModelForCausalLM,
    AutoModelForQuestionAnswering,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    PreTrainedTokenizerFast,
    pipeline,
)

from attnres import BACKBONES, AttnResKimiK3Config
from attnres.configuration import load

from .connections import close

HEADS = {
    AutoModelForTokenClassification: {"labels": torch.arange(9).repeat(2, 1) % 2},
    AutoModelForQuestionAnswering: {"start_positions": torch.tensor([1, 0]), "end_positions": torch.tensor([3, 8])},
}
CASES = [
    (backbone, auto_class)
    for backbone in sorted(BACKBONES)
    for auto_class in HEADS
    if CONFIG_MAPPING[backbone] in auto_class._model_mapping
]


def name_of(value: object) -> str:
    return value if isinstance(value, str) else value.__name__


@pytest.fixture(scope="module")
def ids() -> torch.Tensor:
    return torch.randint(3, 99, (2, 9), generator=torch.Generator().manual_seed(1))


def test_a_head_exists_where_the_backbone_has_it(backbones):
    assert {("llama", auto_class) for auto_class in HEADS} <= set(CASES) and len(CASES) >= 18
    for backbone in BACKBONES:
        config_class = type(backbones.member_config(backbone))
        for auto_class in HEADS:
            exists = auto_class is AutoModelForTokenClassification or (backbone, auto_class) in CASES
            assert (config_class in auto_class._model_mapping) == exists


@torch.no_grad()
@pytest.mark.parametrize(("backbone", "auto_class"), CASES, ids=name_of)
def test_a_head_with_the_standard_residual_equals_the_backbones(backbones, ids, backbone, auto_class):
    model = auto_class.from_config(backbones.member_config(backbone, num_labels=3, residual_connection="standard"))
    fields = {**backbones.COMMON, **backbones.CASES[backbone][1], "num_labels": 3}
    standard = auto_class.from_config(CONFIG_MAPPING[backbone](**fields))
    decoders = model.base_model.state_dict(), standard.base_model.state_dict()
    assert set(decoders[0]) == set(decoders[1])
    standard.base_model.load_state_dict(decoders[0])
    heads = [
        {name: module for name, module in m.named_children() if module is not m.base_model} for m in (model, standard)
    ]
    for name, module in heads[1].items():
        module.load_state_dict(heads[0][name].state_dict())
    outputs, expected = model.eval()(ids, **HEADS[auto_class]), standard.eval()(ids, **HEADS[auto_class])
    assert torch.equal(outputs.loss, expected.loss)
    assert all(map(close, outputs[1:3], expected[1:3]))


@pytest.mark.parametrize("auto_class", HEADS, ids=name_of)
def test_a_head_on_a_retrofits_checkpoint_is_new_and_the_whole_model_trains(backbones, ids, tmp_path, auto_class):
    causal_lm = backbones.build_member("llama", attn_res_block_size=3)
    causal_lm.save_pretrained(tmp_path / "causal")
    model, report = auto_class.from_pretrained(tmp_path / "causal", output_loading_info=True)
    assert {name.split(".")[0] for name in report["missing_keys"]} in ({"score"}, {"qa_outputs"})
    hidden = model.base_model(ids).last_hidden_state
    assert close(hidden, causal_lm.model(ids).last_hidden_state)

    outputs = model(ids, output_depth_attentions=True, output_hidden_states=True, **HEADS[auto_class])
    assert len(outputs.depth_attentions) == model.config.num_sublayers + 1
    assert close(outputs.hidden_states[-1], hidden)
    outputs.loss.backward()
    assert all(tensor.grad is not None for tensor in model.parameters())

    model.eval().save_pretrained(tmp_path / "saved")
    again = auto_class.from_pretrained(tmp_path / "saved")
    assert type(again) is type(model) and again.config.auto_map[auto_class.__name__].startswith("backbones_attnres.")
    assert all(map(close, again(ids)[:1], model(ids)[:1]))
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "causal").config.auto_map == again.config.auto_map


@torch.no_grad()
@pytest.mark.parametrize("layout", ["composite", "text"])
@pytest.mark.parametrize("auto_class", [AutoModelForSequenceClassification, AutoModelForTokenClassification])
def test_a_classifier_of_kimi_k3_begins_from_the_language_model_and_is_saved_whole(tmp_path, ids, auto_class, layout):
    language_model = AutoModelForCausalLM.from_config(load("attnres-k3-tiny", checkpoint_layout=layout, pad_token_id=0))
    language_model.eval().save_pretrained(tmp_path / "lm")
    of_layout = auto_class._model_mapping[AttnResKimiK3Config]  # a text model alone names Kimi Linear's model type
    model, info = of_layout.from_pretrained(tmp_path / "lm", num_labels=3, output_loading_info=True)
    assert {name.partition(".")[0] for name in info["missing_keys"]} == {"score"}
    expected = language_model.base_model(ids).last_hidden_state
    assert torch.equal(model.base_model(ids).last_hidden_state, expected)
    model.score.weight.normal_()
    model.save_pretrained(tmp_path / "classifier")
    again = of_layout.from_pretrained(tmp_path / "classifier")
    assert type(again) is of_layout and again.config.num_labels == 3
    assert torch.equal(again(ids).logits, model(ids).logits)
    config = json.loads((tmp_path / "classifier" / "config.json").read_text())
    assert config["architectures"] == [of_layout.__name__]


@pytest.mark.parametrize(
    ("name", "task"), [("attnres-tiny", "text-classification"), ("attnres-k3-tiny", "token-classification")]
)
def test_a_pipeline_for_a_classifier_gives_labels_of_the_classifier(tmp_path, name, task):
    words = WordLevel({"[UNK]": 0, "a": 1, "b": 2}, unk_token="[UNK]")
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(words), pad_token="[UNK]")
    model = AutoModelForCausalLM.from_config(load(name, vocab_size=8, pad_token_id=0, bos_token_id=1, eos_token_id=2))
    model.save_pretrained(tmp_path)
    (result,) = pipeline(task, model=str(tmp_path), tokenizer=tokenizer)("a")
    assert {result.get("label"), result.get("entity")} & {"LABEL_0", "LABEL_1"}
