"""`transformers.Trainer` trains the family as the kind of model that it is: by class name, and by the loss's own scale."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel, Trainer, TrainingArguments
from transformers.models.auto import modeling_auto

import attnres

EPSILON = 0.1


def make_trainer(model: PreTrainedModel, folder: Path, **options) -> Trainer:
    quiet = {"report_to": "none", "save_strategy": "no", "disable_tqdm": True, "use_cpu": True}
    return Trainer(model, TrainingArguments(str(folder), **quiet | options))


def smoothed_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """The label-smoothed loss of predicting each next token, from its definition."""
    log_p, labels = logits[:, :-1].log_softmax(-1), labels[:, 1:]
    log_p, labels = log_p[labels != -100], labels[labels != -100]
    return (1 - EPSILON) * F.nll_loss(log_p, labels) - EPSILON * log_p.mean()


class OwnLlama(attnres.AttnResLlamaForCausalLM):
    """A user's subclass; FSDP2 derives a class in the same way."""


@pytest.fixture(params=["hybrid", "retrofit", "subclass"])
def causal_lm(request, vivid_model, backbones) -> PreTrainedModel:
    if request.param == "hybrid":
        return vivid_model()
    model = backbones.build_member("llama", attn_res_block_size=3)
    if request.param == "subclass":
        model.__class__ = OwnLlama
    return model


@torch.no_grad()
def test_label_smoothing_trains_the_next_token_and_not_the_same(causal_lm, token_ids, tmp_path):
    labels = token_ids.clone()
    labels[0, :4] = -100
    trainer = make_trainer(causal_lm, tmp_path, label_smoothing_factor=EPSILON)
    loss = trainer.compute_loss(causal_lm, {"input_ids": token_ids, "labels": labels})
    torch.testing.assert_close(loss, smoothed_loss(causal_lm(token_ids).logits, labels), rtol=1e-5, atol=1e-5)


KINDS = {
    "AutoModel": modeling_auto.MODEL_MAPPING_NAMES,
    "AutoModelForCausalLM": modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    "AutoModelForQuestionAnswering": modeling_auto.MODEL_FOR_QUESTION_ANSWERING_MAPPING_NAMES,
    "AutoModelForSequenceClassification": modeling_auto.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES,
    "AutoModelForTokenClassification": modeling_auto.MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES,
}


@pytest.mark.parametrize("backbone", sorted(attnres.BACKBONES))
def test_each_class_is_named_where_transformers_looks_for_its_kind(backbones, backbone):
    config = backbones.member_config(backbone)
    with torch.device("meta"):
        model = modeling_auto.AutoModelForCausalLM.from_config(config)
    assert model.auto_classes.keys() <= KINDS.keys()
    for auto_class, name in model.auto_classes.items():
        assert KINDS[auto_class][config.model_type] == name
