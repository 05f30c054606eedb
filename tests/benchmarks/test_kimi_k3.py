"""Tests of the part `kimi_k3`: what its models have in common, so that their times can be compared."""

import pytest
import torch
from transformers import PreTrainedModel
from transformers.models.kimi_linear.modeling_kimi_linear import KimiLinearTopkRouter

from attnres.kimi_k3_attnres import AttnResKimiK3ForCausalLM, KimiK3Activation
from benchmarks import kimi_k3
from benchmarks.shapes import token_ids

FORMS = (kimi_k3.BOUNDS, kimi_k3.GATES, kimi_k3.WHOLE)
CONTROLS = {form: kimi_k3.LINEAR if form == kimi_k3.BOUNDS else kimi_k3.CONTROL + form for form in FORMS}


@pytest.fixture(scope="module")
def config():
    return kimi_k3.linear_config(quick=True)


@pytest.fixture(scope="module")
def ids(config):
    return token_ids(config, 16, 1, "cpu")


@pytest.fixture(scope="module")
def models(config, ids) -> dict[str, PreTrainedModel]:
    models = kimi_k3.variants(config, torch.float32, "cpu")
    for model in models.values():
        kimi_k3.balance(model, ids.shape[1])
    return models


def products(model: PreTrainedModel, ids, workload: str) -> int:
    prepare, *_ = kimi_k3.WORKLOADS[workload]
    return kimi_k3.count_products(prepare({"": model}, ids)[""])


@pytest.mark.parametrize("workload", kimi_k3.WORKLOADS)
@pytest.mark.parametrize("form", FORMS)
def test_a_control_has_the_matrix_products_of_its_form(models, ids, form, workload):
    control = models[CONTROLS[form]]
    assert products(models[form], ids, workload) == products(control, ids, workload)
    assert not any(isinstance(module, KimiK3Activation) for module in control.modules())
    assert isinstance(models[form], AttnResKimiK3ForCausalLM)


def test_gates_add_matrix_products(models, ids):
    counts = [products(models[name], ids, "prefill") for name in (kimi_k3.LINEAR, kimi_k3.GATES)]
    assert counts[0] < counts[1]


def test_the_products_of_experts_are_counted():
    rows, experts, k, n = 6, 3, 16, 32
    x, weight = torch.randn(rows, k, requires_grad=True), torch.randn(experts, k, n, requires_grad=True)
    ends = torch.tensor([1, 4, 6], dtype=torch.int32)

    def forward():
        return torch.nn.functional.grouped_mm(x, weight, offs=ends)

    assert kimi_k3.count_products(forward) == rows * k * n
    # The backward pass has one product for each factor.
    assert kimi_k3.count_products(lambda: forward().backward(torch.ones(rows, n))) == 3 * rows * k * n


@pytest.mark.parametrize("form", FORMS)
def test_a_form_shares_all_tensors_of_its_control(models, form):
    own = {id(tensor) for tensor in models[CONTROLS[form]].parameters()}
    added = [name for name, tensor in models[form].named_parameters() if id(tensor) not in own]
    # Only the norm of the latent space is no matrix product, and the rates of decays mean something else.
    kinds = {name.rpartition("mlp.")[2].rpartition("forget_gate.")[2] for name in added}
    assert kinds == {"A_log"} | ({"routed_expert_norm.weight"} if form == kimi_k3.WHOLE else set())


@torch.no_grad()
def test_every_model_sends_the_same_tokens_to_the_same_experts(models, ids):
    chosen = {}
    for name, model in models.items():
        routers = [module for module in model.modules() if isinstance(module, KimiLinearTopkRouter)]
        states = torch.randn(ids.shape[1], model.config.hidden_size)
        chosen[name] = [router(states)[2] for router in routers]
    expected = chosen.pop(kimi_k3.LINEAR)
    assert expected
    for others in chosen.values():
        assert all(map(torch.equal, others, expected))
    # Each token has different experts, and no expert is left out.
    assert all(len({*row.tolist()}) == row.numel() for row in expected[0])
    assert expected[0].unique().numel() == models[kimi_k3.LINEAR].config.num_local_experts
