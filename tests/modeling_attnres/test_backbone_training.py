"""Training on every form of a backbone: checkpointing, `Trainer`, `torch.compile`, dropout."""

from collections.abc import Callable, Iterator

import pytest
import torch
from datasets import Dataset
from torch import Tensor, nn
from transformers import AutoModelForSequenceClassification, Trainer, TrainingArguments
from transformers.utils import find_labels

from attnres.residual_attnres import residual_tensors

from ..cases import each_once

# One of each form: pre-norm, norm after, sandwich, multipliers, parallel, experts.
FORMS = ["llama", "olmo2", "gemma3_text", "granite", "gpt_neox", "mixtral"]
every_form = pytest.mark.parametrize("case", FORMS)
NO_DROPOUT = {"gpt_neox": {"hidden_dropout": 0.0, "attention_dropout": 0.0}}


def loss_of(model: nn.Module, token_ids: Tensor) -> Tensor:
    return model(token_ids, labels=token_ids, use_cache=False).loss


def gradients(model: nn.Module, token_ids: Tensor, loss: Callable[..., Tensor] = loss_of) -> dict[str, Tensor]:
    model.zero_grad(set_to_none=True)
    loss(model, token_ids).backward()
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters() if parameter.grad is not None}


def assert_same_gradients(actual: dict[str, Tensor], expected: dict[str, Tensor], relative: float) -> None:
    assert actual.keys() == expected.keys()
    scale = max(gradient.abs().max().item() for gradient in expected.values())
    for name, gradient in actual.items():
        # A softmax cancels some key biases. Their gradients are rounding errors, much smaller than other gradients.
        tolerance = relative * max(expected[name].abs().max().item(), 1e-3 * scale)
        assert (gradient - expected[name]).abs().max() <= tolerance, name


@every_form
def test_every_parameter_but_the_first_query_gets_a_gradient(backbones, case):
    model = backbones.build_member(case, attn_res_block_size=3)
    found = gradients(model, backbones.token_ids())
    assert found.keys() == dict(model.named_parameters()).keys()
    for name in residual_tensors(model):
        # The first sublayer has one source, whose weight is one for any query.
        first = "layers.0.self_attention_res" in name or "layers.0.parallel_res" in name
        assert (found[name].abs().max() > 1e-6) != first, name


@pytest.mark.parametrize(("case", "use_reentrant"), each_once(FORMS, [True, False]))
def test_checkpointing_gives_the_same_gradients_and_records_the_same(backbones, case, use_reentrant):
    token_ids = backbones.token_ids()
    model = backbones.build_member(case, attn_res_block_size=3, **NO_DROPOUT.get(case, {})).train()
    expected = gradients(model, token_ids)
    recorded = model(token_ids, use_cache=False, output_depth_attentions=True, output_hidden_states=True)
    model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
    calls = []
    for layer in model.base_model.layers:
        layer.mlp.register_forward_pre_hook(lambda *_: calls.append(1))
    assert_same_gradients(gradients(model, token_ids), expected, 1e-5)
    assert len(calls) == 2 * len(model.base_model.layers)  # every layer ran twice
    again = model(token_ids, use_cache=False, output_depth_attentions=True, output_hidden_states=True)
    for name in ("hidden_states", "depth_attentions"):
        assert len(again[name]) == len(recorded[name])
        assert all(map(torch.equal, again[name], recorded[name]))


@pytest.mark.parametrize("case", ["gpt_neox", "phi3"])
def test_dropout_equals_that_of_the_backbone(backbones, case):
    """The standard connection drops the same elements with the same random numbers; in eval mode, none."""
    token_ids = backbones.token_ids()
    logits = []
    for model in (backbones.build(case), backbones.build_member(case, residual_connection="standard")):
        torch.manual_seed(0)
        logits.append(model.train()(token_ids).logits)
        torch.manual_seed(0)
        assert not torch.equal(model.eval()(token_ids).logits, logits[-1])
    assert torch.equal(*logits)


# ---- Trainer


@pytest.fixture
def trainer(tmp_path) -> Callable[[nn.Module, Dataset], Trainer]:
    """Return `trainer(model, dataset)`: a `Trainer` for two steps on the CPU that reports and saves nothing."""

    def make(model: nn.Module, dataset: Dataset) -> Trainer:
        arguments = TrainingArguments(
            output_dir=tmp_path,
            max_steps=2,
            per_device_train_batch_size=2,
            learning_rate=1e-2,
            report_to=[],
            save_strategy="no",
            use_cpu=True,
            disable_tqdm=True,
        )
        return Trainer(model, arguments, train_dataset=dataset)

    return make


@every_form
def test_trainer_drops_the_columns_that_the_model_does_not_take(backbones, case, trainer):
    rows = backbones.token_ids().tolist()
    columns = {"input_ids": rows, "labels": rows, "text": ["not", "a tensor"], "attention_maks": rows}
    run = trainer(backbones.build_member(case, **NO_DROPOUT.get(case, {})), Dataset.from_dict(columns))
    (batch,) = run.get_train_dataloader()
    assert set(batch) == {"input_ids", "labels"}
    assert find_labels(type(run.model)) == ["labels"]


@pytest.mark.parametrize("case", ["llama", "mixtral"])
def test_trainer_trains(backbones, case, trainer):
    rows = backbones.token_ids().tolist()
    model = backbones.build_member(case)
    before = {name: tensor.clone() for name, tensor in residual_tensors(model).items()}
    with torch.no_grad():
        first = loss_of(model, backbones.token_ids())
    trainer(model, Dataset.from_dict({"input_ids": rows, "labels": rows})).train()
    with torch.no_grad():
        assert loss_of(model.eval(), backbones.token_ids()) < first
    still = {name for name, tensor in residual_tensors(model).items() if torch.equal(tensor, before[name])}
    assert still == {f"model.layers.0.self_attention_res_{kind}.weight" for kind in ("proj", "norm")}


def test_trainer_trains_a_classifier(backbones, trainer):
    model = backbones.build_member("llama", AutoModelForSequenceClassification, num_labels=3)
    columns = {"input_ids": backbones.token_ids().tolist(), "labels": [0, 2], "text": ["not", "a tensor"]}
    before = model.score.weight.clone()
    trainer(model, Dataset.from_dict(columns)).train()
    assert not torch.equal(model.score.weight, before)


# ---- torch.compile


@pytest.fixture
def compiled() -> Iterator[Callable]:
    """Return `compiled(function, backend)`, which compiles to one graph; a graph break is an error."""
    torch._dynamo.reset()
    yield lambda function, backend: torch.compile(function, fullgraph=True, backend=backend)
    torch._dynamo.reset()


def two_layers(case: str) -> dict:
    fields = {"num_hidden_layers": 2, "attn_res_block_size": 3} | NO_DROPOUT.get(case, {})
    return fields | ({"layer_types": ["sliding_attention", "full_attention"]} if "gemma" in case else {})


# Llama is compiled with each connection, in `test_connections.py`.
@pytest.mark.slow
@pytest.mark.parametrize("case", ["gemma3_text", "gpt_neox", "mixtral"])
def test_a_training_step_compiles_to_one_graph(backbones, compiled, case):
    model, token_ids = backbones.build_member(case, **two_layers(case)).train(), backbones.token_ids()
    expected = gradients(model, token_ids)
    assert_same_gradients(gradients(model, token_ids, compiled(loss_of, "aot_eager")), expected, 1e-3)
