"""Expert balancing: the update, the forward passes that count, and the load over a run."""

import copy
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

from attnres.training.callbacks import ExpertBalance, balance_step, load_balance, routers
from attnres.training.optimizer import build_optimizer

from .running import BLOCKS

EXPERTS, TOP_K = 8, 2
loads = st.lists(st.integers(0, 10**9), min_size=2, max_size=12).filter(any).map(torch.tensor)


def train(model, folder, *callbacks, steps=1, learning_rate=0.0, blocks=BLOCKS, checkpoint=None, **options):
    """Train on all `blocks` in every step, by default in four micro-batches of two."""
    # `Trainer` resumes by the model's own names of tensors.
    model.save_pretrained = partial(model.save_pretrained, save_original_format=False)
    arguments = TrainingArguments(
        folder,
        max_steps=steps,
        **{"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4, "save_strategy": "no"} | options,
        learning_rate=learning_rate,
        logging_steps=1,
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
    )
    rows = [{"input_ids": block, "labels": block} for block in blocks]
    optimizer = build_optimizer(model, learning_rate=learning_rate)
    trainer = Trainer(
        model, arguments, train_dataset=rows, eval_dataset=rows, callbacks=list(callbacks), optimizers=(optimizer, None)
    )
    trainer.train(resume_from_checkpoint=checkpoint)
    return trainer


@torch.no_grad()
def loads_by_hand(model, blocks=BLOCKS) -> torch.Tensor:
    """Count from the router's logits how often each expert is among the `TOP_K` best, `[layers, EXPERTS]`."""
    logits = model(blocks, output_router_logits=True, use_cache=False).router_logits
    scores = [each.sigmoid() + router.e_score_correction_bias for each, router in zip(logits, routers(model))]
    chosen = [torch.argsort(each, dim=-1, descending=True)[:, :TOP_K] for each in scores]
    return torch.stack([torch.stack([(each == i).sum() for i in range(EXPERTS)]) for each in chosen])


def biases(model) -> torch.Tensor:
    return torch.stack([router.e_score_correction_bias.clone() for router in routers(model)])


def expected_biases(model, rate, blocks=BLOCKS) -> torch.Tensor:
    load = loads_by_hand(model, blocks).double()
    return (rate * torch.sign(load.mean(1, keepdim=True) - load)).float()


# --- the update


@given(loads, st.sampled_from([0.001, 0.5]))
def test_the_update_raises_experts_below_the_mean_and_lowers_those_above(load, rate):
    before = torch.linspace(-1, 1, len(load))
    after = before.clone()
    balance_step(after, load, rate)
    mean = load.double().mean()
    assert torch.all(after[load < mean] > before[load < mean])
    assert torch.all(after[load > mean] < before[load > mean])
    assert torch.equal(after[load == mean], before[load == mean])
    assert torch.allclose((after - before).abs()[load != mean], torch.tensor(rate), atol=1e-6)


@given(loads)
def test_the_measures_are_extreme_for_even_and_for_collapsed_loads(load):
    violation, entropy = load_balance(load)
    assert -1e-6 <= violation <= len(load) - 1 + 1e-5
    assert -1e-6 <= entropy <= 1 + 1e-6
    even, collapsed = torch.full_like(load, 7), torch.zeros_like(load).scatter(0, load.argmax(), 7)
    assert torch.allclose(torch.stack(load_balance(even)), torch.tensor([0.0, 1.0]), atol=1e-6)
    assert torch.allclose(torch.stack(load_balance(collapsed)), torch.tensor([len(load) - 1.0, 0.0]), atol=1e-6)


def test_the_violation_is_the_worst_experts_excess_over_the_mean():
    violation, entropy = load_balance(torch.tensor([6, 2, 2, 2]))
    assert violation == pytest.approx(6 / 3 - 1)
    assert entropy == pytest.approx((0.5 * torch.tensor(2.0).log() + 0.5 * torch.tensor(6.0).log()) / 4**0.5 / 0.693147)


def test_a_negative_rate_is_refused():
    with pytest.raises(ValueError, match=r"is -0\.1, but must not be negative"):
        ExpertBalance(-0.1)


# --- counting


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"activation_checkpointing": True},
        {"activation_checkpointing": True, "activation_checkpointing_kwargs": {"use_reentrant": True}},
        {"eval_strategy": "steps", "eval_steps": 1, "eval_on_start": True},
        {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 1},
    ],
    ids=["accumulation", "checkpointing", "reentrant-checkpointing", "evaluation", "one-batch"],
)
def test_every_token_of_the_step_counts_once(tiny_model, tmp_path, options):
    model = tiny_model()
    load, expected = loads_by_hand(model), expected_biases(model, 0.25)
    counted = []

    class Spy(ExpertBalance):
        def on_optimizer_step(self, *args, **kwargs):
            counted.append(torch.stack(self._loads).clone())
            super().on_optimizer_step(*args, **kwargs)

    balance = Spy(0.25)
    trainer = train(model, tmp_path, balance, **options)
    assert torch.equal(counted[0], load)
    assert load.sum(1).tolist() == [BLOCKS.numel() * TOP_K] * 3
    assert torch.equal(biases(model), expected)
    metrics = next(line for line in trainer.state.log_history if "loss" in line)
    measured = torch.stack([torch.stack(load_balance(each)) for each in load])
    assert metrics["expert_max_violation"] == pytest.approx(measured[:, 0].mean().item())
    assert metrics["expert_max_violation_worst_layer"] == pytest.approx(measured[:, 0].max().item())
    assert metrics["expert_load_entropy"] == pytest.approx(measured[:, 1].mean().item())
    assert balance.metrics() == {}


def test_the_hooks_are_gone_after_training(tiny_model, tmp_path):
    model = tiny_model()
    before = {name: len(m._forward_hooks) + len(m._forward_pre_hooks) for name, m in model.named_modules()}
    train(model, tmp_path, ExpertBalance())
    assert {name: len(m._forward_hooks) + len(m._forward_pre_hooks) for name, m in model.named_modules()} == before


def test_a_dense_model_is_left_alone(tiny_model, tmp_path):
    model = tiny_model(mlp_layer_types=["dense"] * 4)
    line = train(model, tmp_path, ExpertBalance()).state.log_history[0]
    assert "loss" in line and not any(name.startswith("expert") for name in line)


def test_adapters_are_refused_as_their_file_holds_no_biases(tiny_model, tmp_path):
    peft = pytest.importorskip("peft")
    model = peft.get_peft_model(tiny_model(), peft.LoraConfig(target_modules=["o_proj"]))
    with pytest.raises(ValueError, match="set the balancing rate to 0"):
        train(model, tmp_path, ExpertBalance())
    trainer = train(model, tmp_path, ExpertBalance(0.0))
    assert trainer.state.log_history[0]["expert_max_violation"] > 0


def test_a_module_that_does_not_return_the_experts_it_chose_is_named(tiny_model, tmp_path):
    model = tiny_model()
    model.model.norm.e_score_correction_bias = torch.nn.Buffer(torch.zeros(EXPERTS))
    with pytest.raises(ValueError, match=r"KimiLinearRMSNorm .* does not return which experts it chose"):
        train(model, tmp_path, ExpertBalance())


def test_a_model_in_which_no_router_runs_is_an_error(tiny_model, tmp_path):
    model = tiny_model()
    model.unused = copy.deepcopy(model.model.layers[1].mlp.gate)
    for layer in model.model.layers[1:]:
        layer.mlp = copy.deepcopy(model.model.layers[0].mlp)
    with pytest.raises(RuntimeError, match="no router ran"):
        train(model, tmp_path, ExpertBalance())


def test_a_rate_of_zero_only_measures(tiny_model, tmp_path):
    model = tiny_model()
    line = train(model, tmp_path, ExpertBalance(0.0)).state.log_history[0]
    assert not biases(model).any()
    assert line["expert_max_violation"] > 0


def test_the_bias_has_no_gradient_and_is_float32_in_a_bfloat16_model(tiny_model, tmp_path):
    model = tiny_model().to(torch.bfloat16)
    assert model.dtype == torch.bfloat16
    for router in routers(model):
        router.e_score_correction_bias.fill_(1.0)  # where bfloat16 has steps of 1/128
    train(model, tmp_path, ExpertBalance(0.001), steps=2)
    assert biases(model).dtype == torch.float32
    assert not any(parameter.shape == (EXPERTS,) for parameter in model.parameters())
    moved = (biases(model) - 1.0).abs()
    assert moved.max() == pytest.approx(0.002, rel=1e-3)


@pytest.mark.slow
def test_the_load_of_a_compiled_model_is_counted(tiny_model, tmp_path):
    model = tiny_model(num_hidden_layers=2, layer_types=["full_attention"] * 2)
    expected = expected_biases(model, 0.25)
    torch._dynamo.reset()
    train(model, tmp_path, ExpertBalance(0.25), torch_compile=True, torch_compile_backend="eager")
    assert torch.equal(biases(model), expected)


# --- over a run


@pytest.mark.slow
def test_a_lopsided_router_evens_out(tiny_model, tmp_path):
    model = tiny_model()
    for router in routers(model):
        torch.nn.init.normal_(router.weight, std=0.5)
        router.e_score_correction_bias[:TOP_K] = 1.0  # the first experts get everything
    assert load_balance(loads_by_hand(model)[0])[0] == EXPERTS / TOP_K - 1
    violations = []

    class Spy(ExpertBalance):
        def on_step_end(self, *args, **kwargs):
            violations.append(self.metrics()["expert_max_violation"])

    one_batch = {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 1}
    train(model, tmp_path, Spy(0.05), steps=40, **one_batch)
    assert violations[0] == EXPERTS / TOP_K - 1
    assert max(violations[-5:]) < 0.5


@pytest.mark.slow
def test_a_resumed_run_has_the_same_biases_bit_for_bit(tiny_model, tmp_path):
    options = {"steps": 6, "learning_rate": 0.01, "save_strategy": "steps", "save_steps": 3}
    whole, resumed = tiny_model().to(torch.bfloat16), tiny_model().to(torch.bfloat16)
    first = train(whole, tmp_path, ExpertBalance(0.0101), **options)
    again = train(resumed, tmp_path, ExpertBalance(0.0101), checkpoint=str(tmp_path / "checkpoint-3"), **options)
    assert torch.equal(biases(whole), biases(resumed))
    assert biases(whole).any()
    losses = [[line["loss"] for line in t.state.log_history if "loss" in line] for t in (first, again)]
    assert losses[0] == losses[1]


def test_the_bias_is_saved_with_the_model_and_loads(tiny_model, tmp_path):
    model = tiny_model()
    train(model, tmp_path / "run", ExpertBalance(0.25))
    model.save_pretrained(tmp_path / "model")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert biases(model).any()
    assert torch.equal(biases(loaded), biases(model))
