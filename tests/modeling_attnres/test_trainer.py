"""`transformers.Trainer` shifts labels only for language models, and scales the losses of all heads correctly."""

import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel, Trainer, TrainerCallback, TrainingArguments
from transformers.models.auto import modeling_auto

import attnres

EPSILON = 0.1


def make_trainer(model: PreTrainedModel, folder: Path, **options) -> Trainer:
    quiet = {"report_to": "none", "save_strategy": "no", "disable_tqdm": True, "use_cpu": True}
    return Trainer(model, TrainingArguments(str(folder), **quiet | options))


def smoothed_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Compute the label-smoothed loss of each next token by its definition."""
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
def test_label_smoothing_trains_the_next_token_and_not_the_current_one(causal_lm, token_ids, tmp_path):
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
def test_each_class_is_in_the_table_where_transformers_looks_for_its_kind(backbones, backbone):
    config = backbones.member_config(backbone)
    with torch.device("meta"):
        model = modeling_auto.AutoModelForCausalLM.from_config(config)
    assert model.auto_classes.keys() <= KINDS.keys()
    for auto_class, name in model.auto_classes.items():
        assert KINDS[auto_class][config.model_type] == name


SCORES = torch.randn(6, 3, generator=torch.Generator().manual_seed(2))
# Kind of head -> (class, fields of the configuration, labels of a row). Rows of tokens have unequal numbers of labels.
HEADS: dict[str, tuple[str, dict, Callable[[int], dict]]] = {
    "classes": (
        "AttnResForSequenceClassification",
        {"num_labels": 3},
        lambda i: {"labels": i % 3},
    ),
    "classes, declared": (
        "AttnResForSequenceClassification",
        {"num_labels": 3, "problem_type": "single_label_classification"},
        lambda i: {"labels": i % 3},
    ),
    "regression": (
        "AttnResLlamaForSequenceClassification",
        {"num_labels": 1},
        lambda i: {"labels": SCORES[i, 0].item()},
    ),
    "several labels": (
        "AttnResForSequenceClassification",
        {"num_labels": 3, "problem_type": "multi_label_classification"},
        lambda i: {"labels": (SCORES[i] > 0).float()},
    ),
    "tokens": (
        "AttnResLlamaForTokenClassification",
        {"num_labels": 3},
        lambda i: {"labels": torch.where(torch.arange(9) > i, torch.arange(9) % 3, -100)},
    ),
    "answers": (
        "AttnResLlamaForQuestionAnswering",
        {},
        lambda i: {"start_positions": i, "end_positions": i + 2},
    ),
}


class OnStep(TrainerCallback):
    """Calls a function with the model before each step of the optimizer."""

    def __init__(self, function: Callable[[PreTrainedModel], None]):
        self.function = function

    def on_pre_optimizer_step(self, args, state, control, model, **kwargs):
        self.function(model)


def loss_and_gradients(model: PreTrainedModel, rows: list[dict], size: int, folder: Path) -> tuple[float, dict]:
    """Return the loss that `Trainer` logs and the gradients that it accumulates over all rows in batches of `size`."""
    options = {"max_steps": 1, "learning_rate": 0.0, "max_grad_norm": 0.0, "logging_steps": 1}
    options |= {"per_device_train_batch_size": size, "gradient_accumulation_steps": math.ceil(len(rows) / size)}
    trainer = make_trainer(model, folder, train_sampling_strategy="sequential", **options)
    trainer.train_dataset, gradients = rows, {}
    keep = OnStep(lambda model: gradients.update((name, p.grad.clone()) for name, p in model.named_parameters()))
    trainer.add_callback(keep)
    trainer.train()
    return next(entry["loss"] for entry in trainer.state.log_history if "loss" in entry), gradients


@pytest.mark.parametrize("kind", HEADS)
def test_accumulated_gradients_of_a_head_equal_those_of_one_batch(tiny_config, backbones, tmp_path, kind):
    name, fields, label = HEADS[kind]
    config = backbones.member_config("llama", **fields) if "Llama" in name else tiny_config(**fields)
    ids = torch.randint(3, 99, (5, 9), generator=torch.Generator().manual_seed(1))
    # Of five rows in batches of two, the last batch is smaller. `Trainer` counts no labels of answers, so their batches
    # must have one size.
    rows = [{"input_ids": ids[i], **label(i)} for i in range(4 if kind == "answers" else 5)]
    torch.manual_seed(0)
    model = getattr(attnres, name)(config)
    (loss, gradients), (expected_loss, expected) = (
        loss_and_gradients(model, rows, size, tmp_path) for size in (2, len(rows))
    )
    assert loss == pytest.approx(expected_loss, rel=1e-3)
    assert gradients.keys() == expected.keys() == dict(model.named_parameters()).keys()
    for parameter, gradient in expected.items():
        torch.testing.assert_close(gradients[parameter], gradient, rtol=1e-3, atol=1e-5)


def test_a_micro_batch_without_labels_adds_nothing_to_a_heads_loss(backbones):
    config = backbones.member_config("llama", num_labels=3)
    model = modeling_auto.AutoModelForTokenClassification.from_config(config)
    ids = torch.tensor([[5, 6, 7]])
    loss = model(ids, labels=torch.full_like(ids, -100), num_items_in_batch=torch.tensor(7)).loss
    loss.backward()
    assert loss == 0
    assert all(p.grad is None or not p.grad.any() for p in model.parameters())
