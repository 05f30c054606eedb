"""Optimizers: which tensors get Muon, AdamW and weight decay; the steps against equations; resuming; schedules."""

import copy
import math
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import MixtralConfig, MixtralForCausalLM, Trainer, TrainingArguments

from attnres import AttnResKimiK3ForCausalLM
from attnres.configuration import load
from attnres.residual_attnres import residual_tensors
from attnres.training.optimizer import MuonAdamW, build_optimizer, build_schedule, parameter_groups


def rules_of(optimizer: torch.optim.Optimizer) -> dict[int, dict]:
    """Return the group of each parameter by identity, and assert that each is in one group only."""
    rules = {id(p): group for group in optimizer.param_groups for p in group["params"]}
    assert len(rules) == sum(len(group["params"]) for group in optimizer.param_groups)
    return rules


def is_vector(tensor: torch.Tensor) -> bool:
    return tensor.numel() == max(tensor.shape)


def fill_gradients(model: torch.nn.Module, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=generator, dtype=torch.float32).to(parameter.dtype)


def muon_by_hand(weight, gradient, average, lr, weight_decay, mu=0.95, steps=5):
    """Compute a step of Muon on one matrix in float64, by the equations of the paper, without code of the optimizer."""
    average = mu * average + (1 - mu) * gradient
    x = (1 - mu) * gradient + mu * average
    x = x / np.sqrt((x**2).sum())
    wide = x if x.shape[0] <= x.shape[1] else x.T
    for _ in range(steps):
        gram = wide @ wide.T
        wide = 3.4445 * wide + (-4.7750 * gram + 2.0315 * gram @ gram) @ wide
    x = wide if x.shape[0] <= x.shape[1] else wide.T
    return weight * (1 - lr * weight_decay) - lr * 0.2 * math.sqrt(max(weight.shape)) * x, average


# --- groups


def test_every_trainable_parameter_is_in_the_group_of_its_kind(tiny_model):
    model = tiny_model()
    model.lm_head.weight.requires_grad_(False)
    groups = parameter_groups(model, learning_rate=0.1, weight_decay=0.2, residual_lr_factor=3.0)
    rules = {i: (group["lr"], group["weight_decay"]) for i, group in rules_of(torch.optim.AdamW(groups)).items()}
    residual = residual_tensors(model)
    for name, parameter in model.named_parameters():
        if name == "lm_head.weight":
            assert id(parameter) not in rules
        elif name in residual:
            assert rules[id(parameter)] == (0.1 * 3.0, 0.0), name
        else:
            assert rules[id(parameter)] == (0.1, 0.0 if is_vector(parameter) else 0.2), name


def test_a_model_without_attention_residuals_has_no_empty_group(tiny_model):
    groups = parameter_groups(tiny_model(residual_connection="standard"), 0.1, 0.2)
    assert len(groups) == 2
    assert all(group["params"] for group in groups)


def test_muon_takes_the_decoders_matrices_and_adamw_everything_else(tiny_model):
    model = tiny_model()
    optimizer = build_optimizer(model, name="muon", learning_rate=0.1, weight_decay=0.2, residual_lr_factor=3.0)
    rules, residual = rules_of(optimizer), residual_tensors(model)
    assert len(rules) == len(list(model.parameters()))
    for name, parameter in model.named_parameters():
        group = rules[id(parameter)]
        last = name.split(".")[-2]
        muon = "_proj" in last or last == "gate" or ".experts." in name
        if name in residual:
            expected = "adamw", 0.1 * 3.0, 0.0
        elif is_vector(parameter):
            expected = "adamw", 0.1, 0.0
        else:
            expected = "muon" if muon else "adamw", 0.1, 0.2
        assert (group["method"], group["lr"], group["weight_decay"]) == expected, name
    by_method = {rules[id(p)]["method"] for p in (model.lm_head.weight, model.model.embed_tokens.weight)}
    assert by_method == {"adamw"}
    assert rules[id(model.model.layers[0].self_attn.conv1d.weight)]["method"] == "adamw"
    assert rules[id(model.model.layers[1].mlp.experts.down_proj)]["method"] == "muon"
    assert rules[id(model.model.layers[1].mlp.gate.weight)]["method"] == "muon"


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_the_factor_of_the_stream_in_residual_scalars_learns_at_a_hundredth_of_the_rate(tiny_model, name):
    model = tiny_model(residual_connection="residual_scalars")
    optimizer = build_optimizer(model, name=name, learning_rate=0.1, residual_lr_factor=3.0)
    rules, before = rules_of(optimizer), {n: tensor.detach().clone() for n, tensor in residual_tensors(model).items()}
    fill_gradients(model, 0)
    optimizer.step()
    assert {n.rpartition(".")[2] for n in before} == {"stream", "embedding"}
    for n, tensor in residual_tensors(model).items():
        expected = 0.1 * 3.0 * (0.01 if n.endswith(".stream") else 1.0)
        assert rules[id(tensor)]["lr"] == pytest.approx(expected)
        assert rules[id(tensor)]["weight_decay"] == 0.0
        # The first step of AdamW is as large as the rate.
        assert (tensor - before[n]).abs().item() == pytest.approx(expected, rel=1e-3), n
    build_schedule(optimizer, "wsd", steps=4, warmup_steps=2)
    assert {group["lr"] for group in optimizer.param_groups} == {0.0}  # the schedule holds for all groups


def test_tied_embeddings_are_taken_once_and_by_adamw(tiny_model):
    model = tiny_model(tie_word_embeddings=True)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    rules = rules_of(build_optimizer(model, name="muon", learning_rate=0.1))
    assert rules[id(model.lm_head.weight)]["method"] == "adamw"


def test_only_trainable_parameters_are_taken_and_a_model_without_any_is_an_error(tiny_model):
    model = tiny_model().requires_grad_(False)
    residual = residual_tensors(model)
    for tensor in residual.values():
        tensor.requires_grad_(True)
    for name in ("adamw", "muon"):
        rules = rules_of(build_optimizer(model, name=name, learning_rate=0.1))
        assert set(rules) == {id(tensor) for tensor in residual.values()}
        with pytest.raises(ValueError, match="nothing to train"):
            build_optimizer(copy.deepcopy(model).requires_grad_(False), name=name, learning_rate=0.1)


def test_an_unknown_name_is_refused(tiny_model):
    with pytest.raises(ValueError, match="'sgd', but must be 'adamw' or 'muon'"):
        build_optimizer(tiny_model(), name="sgd", learning_rate=0.1)


# --- the steps


@pytest.mark.parametrize("shape", [(24, 40), (40, 24), (16, 16), (3, 24, 40), (5, 40, 24)])
def test_a_step_of_muon_follows_the_papers_equation_on_a_matrix_and_on_each_expert(shape):
    torch.manual_seed(0)
    weight = torch.nn.Parameter(torch.randn(shape))
    optimizer = MuonAdamW([{"params": [weight], "method": "muon"}], lr=0.05, weight_decay=0.3)
    experts = weight.detach().double().numpy().reshape(-1, *shape[-2:])
    averages = np.zeros_like(experts)
    for _ in range(3):
        weight.grad = torch.randn(shape)
        before = experts
        gradients = weight.grad.double().numpy().reshape(experts.shape)
        stepped = [muon_by_hand(*each, lr=0.05, weight_decay=0.3) for each in zip(experts, gradients, averages)]
        experts, averages = (np.stack(parts) for parts in zip(*stepped))
        optimizer.step()
        actual = weight.detach().double().numpy().reshape(experts.shape)
        # Newton-Schulz runs in bfloat16: its error is a few hundredths of the step.
        size = np.abs(experts - before).max()
        assert np.abs(actual - experts).max() < 0.05 * size
        experts = actual


def head_blocks(name: str, weight: np.ndarray, config) -> list[slice]:
    """Return the rows of the blocks that Kimi K3's report cuts, a head of Q, K or V each, or all rows."""
    *_, kind, _ = name.split(".")
    nope, rope, value = config.qk_nope_head_dim, config.qk_rope_head_dim, config.v_head_dim
    sizes = {"q_b_proj": [nope + rope], "kv_b_proj": [nope, value]}
    sizes |= {name: [config.linear_head_dim] for name in ("q_proj", "k_proj", "v_proj")}
    blocks, start = [], 0
    while start < len(weight):
        for size in sizes.get(kind, [len(weight)]):
            blocks.append(slice(start, start + size))
            start += size
    return blocks


def test_muon_on_kimi_k3_updates_each_head_of_its_queries_keys_and_values_by_itself():
    torch.manual_seed(0)
    config = load("attnres-k3-tiny", num_hidden_layers=4)
    model = AttnResKimiK3ForCausalLM(config)
    whole = copy.deepcopy(model)
    optimizer = build_optimizer(model, name="muon", learning_rate=0.05, weight_decay=0.3)
    fill_gradients(model, 0)
    before = {name: parameter.detach().double().numpy().copy() for name, parameter in model.named_parameters()}
    optimizer.step()
    by_head = set()
    for name, parameter in model.named_parameters():
        if parameter.ndim == 2 and rules_of(optimizer)[id(parameter)]["method"] == "muon":
            gradient, expected = parameter.grad.double().numpy(), before[name].copy()
            blocks = head_blocks(name, expected, config)
            for rows in blocks:
                zero = np.zeros_like(gradient[rows])
                expected[rows], _ = muon_by_hand(expected[rows], gradient[rows], zero, lr=0.05, weight_decay=0.3)
            actual = parameter.detach().double().numpy()
            step = np.linalg.norm(expected - before[name])
            assert np.linalg.norm(actual - expected) < 0.05 * step, name  # which runs in bfloat16
            by_head |= {name.split(".")[-2]} if len(blocks) > 1 else set()
    assert by_head == {"q_proj", "k_proj", "v_proj", "q_b_proj", "kv_b_proj"}
    optimizer = build_optimizer(whole, name="muon", learning_rate=1.0, muon_per_head=False)
    assert {group["head_rows"] for group in optimizer.param_groups} == {()}


def test_muon_per_head_is_off_for_other_models_and_can_be_turned_on(tiny_model):
    groups = build_optimizer(tiny_model(), name="muon", learning_rate=1.0).param_groups
    assert {group["head_rows"] for group in groups} == {()}
    groups = build_optimizer(tiny_model(), name="muon", learning_rate=1.0, muon_per_head=True).param_groups
    assert len({group["head_rows"] for group in groups}) > 2


def test_muon_equals_pytorchs_bit_for_bit_on_a_matrix_and_up_to_bfloat16_on_experts():
    torch.manual_seed(0)
    matrix, stack = torch.nn.Parameter(torch.randn(24, 40)), torch.nn.Parameter(torch.randn(4, 40, 24))
    optimizer = MuonAdamW([{"params": [matrix, stack], "method": "muon"}], lr=0.05, weight_decay=0.3)
    slices = [torch.nn.Parameter(part.clone()) for part in (matrix.detach(), *stack.detach())]
    reference = torch.optim.Muon(slices, lr=0.05, weight_decay=0.3, adjust_lr_fn="match_rms_adamw")
    start = stack.detach().clone()
    for _ in range(4):
        matrix.grad, stack.grad = torch.randn_like(matrix), torch.randn_like(stack)
        for part, gradient in zip(slices, (matrix.grad, *stack.grad)):
            part.grad = gradient.clone()
        optimizer.step()
        reference.step()
    assert torch.equal(matrix, slices[0])
    expected = torch.stack([part.detach() for part in slices[1:]])
    assert (stack - expected).abs().max() < 0.02 * (expected - start).abs().max()
    averages = torch.stack([reference.state[part]["momentum_buffer"] for part in slices[1:]])
    assert torch.equal(optimizer.state[stack]["momentum_buffer"], averages)


def test_all_parameters_but_the_matrices_are_updated_exactly_as_by_adamw(tiny_model):
    model, reference = tiny_model(), tiny_model()
    settings = {"learning_rate": 0.05, "weight_decay": 0.3, "residual_lr_factor": 2.0}
    muon = build_optimizer(model, name="muon", **settings)
    adamw = build_optimizer(reference, name="adamw", **settings)
    for seed in range(3):
        for each, optimizer in ((model, muon), (reference, adamw)):
            fill_gradients(each, seed)
            optimizer.step()
    rules = rules_of(muon)
    for (name, ours), theirs in zip(model.named_parameters(), reference.parameters()):
        assert torch.equal(ours, theirs) == (rules[id(ours)]["method"] == "adamw"), name


def test_the_steps_of_muon_and_adamw_are_equally_large_at_one_learning_rate():
    sizes = {}
    for method in ("adamw", "muon"):
        torch.manual_seed(0)
        weight = torch.nn.Parameter(torch.zeros(64, 48))
        optimizer = MuonAdamW([{"params": [weight], "method": method}], lr=0.01, weight_decay=0.0, betas=(0.9, 0.95))
        for _ in range(60):  # until the averages have settled
            before, weight.grad = weight.detach().clone(), torch.randn_like(weight)
            optimizer.step()
        sizes[method] = (weight - before).square().mean().sqrt().item()
    assert sizes["muon"] == pytest.approx(0.2 * 0.01, rel=0.2)
    assert 0.7 < sizes["muon"] / sizes["adamw"] < 1.4


def test_flattened_parameters_are_refused_in_one_line():
    with pytest.raises(ValueError, match=r"shape \[7\].*'adamw'") as error:
        MuonAdamW([{"params": [torch.nn.Parameter(torch.ones(7))], "method": "muon"}])
    assert "\n" not in str(error.value)
    optimizer = MuonAdamW([{"params": [torch.nn.Parameter(torch.ones(2, 3))], "method": "muon"}])
    optimizer.param_groups[0]["params"] = [torch.nn.Parameter(torch.ones(6))]  # as an engine does
    with pytest.raises(ValueError, match=r"shape \[6\]"):
        optimizer.step()


# --- saving, copying and training


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_a_saved_optimizer_resumes_bit_for_bit(tiny_model, tmp_path, name):
    def build(model):
        optimizer = build_optimizer(model, name=name, learning_rate=0.05, residual_lr_factor=0.5, muon_per_head=True)
        return optimizer, build_schedule(optimizer, "wsd", steps=6, warmup_steps=2, decay_steps=2)

    model = tiny_model()
    optimizer, schedule = build(model)
    for seed in range(6):
        if seed == 3:
            torch.save([x.state_dict() for x in (model, optimizer, schedule)], tmp_path / "saved.pt")
        fill_gradients(model, seed)
        optimizer.step()
        schedule.step()

    resumed = tiny_model(seed=1)
    states = torch.load(tmp_path / "saved.pt", weights_only=True)
    for each, state in zip((resumed, *(rest := build(resumed))), states):
        each.load_state_dict(state)
    for seed in range(3, 6):
        fill_gradients(resumed, seed)
        rest[0].step()
        rest[1].step()
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), resumed.parameters()))
    assert [g["lr"] for g in optimizer.param_groups] == [g["lr"] for g in rest[0].param_groups]


def test_a_copy_of_model_and_optimizer_makes_the_steps_of_the_original(tiny_model):
    model = tiny_model()
    optimizer = build_optimizer(model, name="muon", learning_rate=0.05)
    fill_gradients(model, 0)
    optimizer.step()
    copies = copy.deepcopy((model, optimizer))
    for each, its_optimizer in ((model, optimizer), copies):
        fill_gradients(each, 1)
        its_optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), copies[0].parameters()))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_a_trainer_resumes_bit_for_bit(tiny_model, tmp_path, name):
    blocks = torch.randint(3, 20, (16, 12), generator=torch.Generator().manual_seed(0))

    def run(checkpoint=None):
        model = tiny_model()
        # A Trainer reads a checkpoint's tensors by the model's own names, so they must be written under these.
        model.save_pretrained = partial(model.save_pretrained, save_original_format=False)
        optimizer = build_optimizer(model, name=name, learning_rate=0.02)
        schedule = build_schedule(optimizer, "cosine", steps=6, warmup_steps=1)
        arguments = TrainingArguments(
            tmp_path / "run",
            max_steps=6,
            per_device_train_batch_size=2,
            gradient_accumulation_steps=2,
            max_grad_norm=1.0,
            logging_steps=1,
            save_steps=3,
            report_to="none",
            disable_tqdm=True,
            use_cpu=True,
        )
        rows = [{"input_ids": block, "labels": block} for block in blocks]
        trainer = Trainer(model, arguments, train_dataset=rows, optimizers=(optimizer, schedule))
        trainer.train(resume_from_checkpoint=checkpoint)
        return model, [line["loss"] for line in trainer.state.log_history if "loss" in line]

    whole, losses = run()
    resumed, again = run(str(tmp_path / "run" / "checkpoint-3"))
    assert losses == again
    assert losses[-1] < losses[0] - 0.1
    assert all(torch.equal(a, b) for a, b in zip(whole.parameters(), resumed.parameters()))


def test_the_experts_of_another_backbone_get_muon_too():
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = MixtralForCausalLM(MixtralConfig(vocab_size=50, num_key_value_heads=2, num_local_experts=4, **sizes))
    rules = rules_of(build_optimizer(model, name="muon", learning_rate=0.1))
    assert {rules[id(p)]["method"] for p in model.model.layers[0].mlp.experts.parameters()} == {"muon"}
    assert rules[id(model.model.layers[0].input_layernorm.weight)]["weight_decay"] == 0.0


# --- schedules

runs = st.tuples(st.integers(0, 20), st.integers(1, 40), st.integers(1, 20))  # warm-up, middle, decay


def rates(name: str, steps: int, warmup: int, decay: int, min_rate: float) -> np.ndarray:
    """Return the rates of two groups in each step of a run, `[steps, 2]`."""
    parameters = [torch.nn.Parameter(torch.zeros(1)) for _ in range(2)]
    optimizer = torch.optim.SGD([{"params": [p], "lr": lr} for p, lr in zip(parameters, (1.0, 0.25))])
    schedule = build_schedule(optimizer, name, steps=steps, warmup_steps=warmup, decay_steps=decay, min_rate=min_rate)
    seen = []
    for _ in range(steps):
        seen.append([group["lr"] for group in optimizer.param_groups])
        optimizer.step()
        schedule.step()
    return np.array([*seen, [group["lr"] for group in optimizer.param_groups]])


@given(st.sampled_from(["cosine", "wsd"]), runs, st.sampled_from([0.0, 0.1]))
def test_a_schedule_rises_to_the_groups_rate_then_falls_to_the_minimum(name, lengths, min_rate):
    warmup, middle, decay = lengths
    steps = warmup + middle + decay
    both = rates(name, steps, warmup, decay, min_rate)
    assert np.allclose(both[:, 1], 0.25 * both[:, 0])  # the groups keep their ratio
    rate = both[:, 0]
    assert rate[warmup] == 1.0
    assert np.allclose(rate[:warmup], np.arange(warmup) / max(1, warmup))
    assert np.all(np.diff(rate[warmup:]) <= 1e-12)
    assert rate[-1] == pytest.approx(min_rate, abs=1e-9)
    if name == "wsd":
        assert np.all(rate[warmup : warmup + middle + 1] == 1.0)
        assert np.all(np.diff(rate[warmup + middle :]) < 0)


def test_lengths_that_do_not_fit_and_unknown_schedules_are_refused():
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))])
    for name, options, message in [
        ("wsd", {"warmup_steps": 6, "decay_steps": 5}, "warmup_steps \\(6\\) and decay_steps \\(5\\).*10 steps"),
        ("cosine", {"warmup_steps": 11}, "must fit into the 10 steps"),
        ("wsd", {"warmup_steps": -1}, "must not be negative"),
        ("cosine", {"min_rate": 1.5}, "min_rate is 1.5"),
        ("linear", {}, "'linear', but must be 'cosine' or 'wsd'"),
    ]:
        with pytest.raises(ValueError, match=message):
            build_schedule(optimizer, name, steps=10, **options)
