"""Kimi K3 generates and trains as any member of the family, and its delta attention never sees a later token."""

import inspect
import json
import math
import re
from collections.abc import Callable
from itertools import product

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves
from transformers import AutoModelForCausalLM, StaticCache, Trainer, TrainingArguments
from transformers.models.kimi_linear import modeling_kimi_linear as kimi_linear

from attnres import AttnResKimiK3Config, AttnResKimiK3ForCausalLM, delta_attention_attnres, peft_modules_to_save
from attnres.accelerated import delta_attention
from attnres.configuration import count_parameters, load
from attnres.family import describe_connection
from attnres.kimi_k3_attnres import KimiK3DeltaAttention, situ
from attnres.kimi_k3_shapes_attnres import released_shapes
from attnres.padding_attnres import Rows
from attnres.training.callbacks import ExpertBalance, routers
from attnres.training.lora import add_adapters

from ..caches import CACHE
from ..cases import each_once
from . import kimi_k3_release as release

# Before a fixture of all model tests replaces it.
CHUNK_OF_TRANSFORMERS = inspect.unwrap(kimi_linear.chunk_kimi_delta_attention)
IDS = torch.randint(3, 64, (2, 11), generator=torch.Generator().manual_seed(1))
PAD = 0


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A release in float32, whose routing does not hang on rounding."""
    fields = release.text_fields()
    return release.write(tmp_path_factory.mktemp("release"), fields, release.random_tensors(fields, torch.float32))


@pytest.fixture
def model(saved) -> AttnResKimiK3ForCausalLM:
    return AutoModelForCausalLM.from_pretrained(saved, dtype=torch.float32)


@pytest.fixture
def generate(model) -> Callable[..., Tensor]:
    """`generate(token_ids, **options)`: prompt and 6 greedy tokens, whatever the end-of-sequence token."""
    options = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None, "pad_token_id": PAD}
    return lambda token_ids, **changes: model.generate(token_ids, **options | changes)


def left_padded(lengths: list[int]) -> tuple[Tensor, Tensor]:
    mask = torch.stack([torch.arange(IDS.shape[1]) >= IDS.shape[1] - length for length in lengths])
    return IDS.masked_fill(~mask, PAD), mask.long()


# ---- Generation


@torch.no_grad()
@pytest.mark.parametrize("pieces", [[11], [1] * 11, [3, 1, 4, 1, 2], [1, 10], [10, 1]], ids=str)
def test_logits_do_not_depend_on_how_tokens_meet_the_cache(model, pieces):
    cache, logits = None, []
    for piece in IDS.split(pieces, dim=1):
        outputs = model(piece, **{CACHE: cache}, use_cache=True)
        cache = outputs[CACHE]
        logits.append(outputs.logits)
    torch.testing.assert_close(torch.cat(logits, 1), model(IDS, use_cache=False).logits, rtol=0, atol=1e-4)


@pytest.mark.parametrize("options", [{}, {"num_beams": 3}, {"use_cache": False}], ids=str)
def test_left_padding_changes_nothing(generate, options):
    padded, mask = left_padded([4, 9])
    together = generate(padded, attention_mask=mask, **options)
    for row, length in enumerate([4, 9]):
        alone = generate(IDS[row : row + 1, -length:], **options)
        assert torch.equal(together[row, -length - 6 :], alone[0])


@torch.no_grad()
def test_a_padded_batch_gives_the_logits_of_single_prompts(model):
    padded, mask = left_padded([4, 9])
    logits = model(padded, attention_mask=mask).logits
    for row, length in enumerate([4, 9]):
        alone = model(IDS[row : row + 1, -length:]).logits[0]
        torch.testing.assert_close(logits[row, -length:], alone, rtol=0, atol=1e-4)


def test_beam_search_finds_the_same_beams_without_cache(generate):
    with_cache, without = (generate(IDS, num_beams=4, num_return_sequences=4, use_cache=use) for use in (True, False))
    assert torch.equal(with_cache, without)


@pytest.mark.slow
def test_a_static_cache_and_compiled_decoding_change_nothing(generate, counted_compilation):
    padded, mask = left_padded([4, 9])
    static = generate(padded, attention_mask=mask, cache_implementation="static", return_dict_in_generate=True)
    assert isinstance(static[CACHE], StaticCache)
    assert torch.equal(static.sequences, generate(padded, attention_mask=mask))
    options, graphs = counted_compilation
    assert torch.equal(generate(IDS, cache_implementation="static", compile_config=options), generate(IDS))
    assert len(graphs) == 1


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Attempting to save a model with offloaded modules")
@pytest.mark.parametrize("room", ["40KB", "400KB"])
def test_offloaded_to_disk_the_model_computes_generates_and_saves_the_same(model, saved, tmp_path, room):
    options = {"device_map": "auto", "max_memory": {"cpu": room}, "offload_folder": tmp_path / "offload"}
    offloaded = AutoModelForCausalLM.from_pretrained(saved, dtype=torch.float32, **options)
    assert "disk" in offloaded.hf_device_map.values()
    assert torch.equal(offloaded(IDS).logits, model(IDS).logits)
    options = {"max_new_tokens": 4, "do_sample": False, "eos_token_id": None}
    assert torch.equal(offloaded.generate(IDS, **options), model.generate(IDS, **options))
    offloaded.save_pretrained(tmp_path / "again")
    assert torch.equal(AutoModelForCausalLM.from_pretrained(tmp_path / "again")(IDS).logits, model(IDS).logits)


@torch.no_grad()
def test_blocks_do_not_go_into_the_cache(model):
    with_blocks = model(IDS, use_cache=True)[CACHE]
    fields = release.text_fields(attn_res_block_size=...)
    standard = AttnResKimiK3ForCausalLM(AttnResKimiK3Config.from_dict(fields)).eval()
    without = standard(IDS, use_cache=True)[CACHE]

    def shapes(cache) -> list[torch.Size]:
        leaves = tree_leaves([vars(layer) for layer in cache.layers])
        return [leaf.shape for leaf in leaves if isinstance(leaf, Tensor)]

    assert shapes(with_blocks) == shapes(without)


# ---- Training


def loss_of(model: torch.nn.Module) -> Tensor:
    return model(IDS, labels=IDS, use_cache=False).loss


def gradients(model: torch.nn.Module) -> dict[str, Tensor]:
    model.zero_grad(set_to_none=True)
    loss_of(model).backward()
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


@pytest.mark.slow
def test_gradients_are_those_of_finite_differences(model):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "float32", torch.float64)
        patch.setattr(Tensor, "float", Tensor.double)
        model = AutoModelForCausalLM.from_config(model.config)
        generator = torch.Generator().manual_seed(3)
        model.double().set_experts_implementation("eager")
        # Drawn again, since tensors that start at zero or one would hide a term.
        drawn = {name: 0.3 * torch.randn(t.shape, generator=generator) for name, t in model.state_dict().items()}
        model.load_state_dict(drawn)
        found = gradients(model)
        kinds: dict[str, list[str]] = {}  # tensors of all layers with one name are moved together
        for name in found:
            kinds.setdefault(re.sub(r"\.\d+\.", ".", name), []).append(name)
        assert len(kinds) == 41
        parameters = dict(model.named_parameters())
        for kind, names in kinds.items():
            directions = {n: torch.randn(found[n].shape, generator=generator).double() for n in names}
            size = math.sqrt(sum(direction.square().sum() for direction in directions.values()))
            values = []
            with torch.no_grad():
                for step in (1e-5, -2e-5, 1e-5):
                    for name, direction in directions.items():
                        parameters[name].add_(direction, alpha=step / size)
                    values.append(loss_of(model))
            difference = (values[0] - values[1]) / 2e-5
            derivative = sum((found[name] * direction).sum() for name, direction in directions.items()) / size
            torch.testing.assert_close(derivative, difference, rtol=1e-4, atol=1e-8, msg=kind)


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_checkpointing_gives_the_same_gradients(model, use_reentrant):
    expected = gradients(model.train())
    for name, gradient in expected.items():
        # The first layer reads the embedding alone, whatever its query is.
        assert (gradient.abs().max() == 0) == name.startswith("model.layers.0.self_attention_res"), name
    model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
    for name, gradient in gradients(model).items():
        tolerance = 1e-4 * expected[name].abs().max().item()
        torch.testing.assert_close(gradient, expected[name], rtol=0, atol=tolerance, msg=name)


@pytest.mark.slow
def test_a_training_step_compiles_to_one_graph_with_the_same_gradients():
    fields = release.text_fields(num_hidden_layers=2, kda_layers=[1], full_attn_layers=[2], attn_res_block_size=1)
    model = AttnResKimiK3ForCausalLM(AttnResKimiK3Config.from_dict(fields)).train()
    expected = gradients(model)
    torch.compiler.reset()
    model.zero_grad(set_to_none=True)
    torch.compile(loss_of, fullgraph=True, backend="aot_eager")(model).backward()
    for name, parameter in model.named_parameters():
        tolerance = 1e-3 * expected[name].abs().max().item()
        torch.testing.assert_close(parameter.grad, expected[name], rtol=0, atol=tolerance, msg=name)
    torch.compiler.reset()


@pytest.mark.slow
def test_a_trainer_trains_and_balances_and_saves_a_release(model, tmp_path):
    data = [{"input_ids": row, "labels": row} for row in IDS.repeat(4, 1)]
    arguments = {"max_steps": 4, "learning_rate": 1e-3, "report_to": "none", "use_cpu": True, "save_strategy": "no"}
    biases = [router.e_score_correction_bias.clone() for router in routers(model)]
    before = loss_of(model).item()
    arguments = TrainingArguments(tmp_path / "run", **arguments)
    Trainer(model, arguments, train_dataset=data, callbacks=[ExpertBalance()]).train()
    assert loss_of(model.eval()).item() < before
    assert len(biases) == 6
    for bias, router in zip(biases, routers(model)):
        change = (router.e_score_correction_bias - bias).abs()
        assert 0 < change.max() < 0.0041
    model.save_pretrained(tmp_path / "out")
    assert json.loads((tmp_path / "out" / "config.json").read_text())["model_type"] == "kimi_k3"
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert torch.equal(again(IDS).logits, model(IDS).logits)


def test_adapters_reach_attention_and_experts_and_leave_queries_whole(model):
    added = ["mlp_res_norm", "mlp_res_proj", "output_attn_res_norm", "output_attn_res_proj"]
    assert peft_modules_to_save(model) == [*added, "self_attention_res_norm", "self_attention_res_proj"]
    adapted = add_adapters(model, rank=2)
    names = {name for name, parameter in adapted.named_parameters() if parameter.requires_grad}
    projections = ("q_proj", "f_a_proj", "self_attn.g_proj", "q_b_proj", "kv_b_proj", "routed_expert_down_proj")
    for part in (*projections, "experts"):
        assert any("lora_" in name and part in name for name in names), part
    queries = {name for name in names if "_res_proj" in name or "_res_norm" in name}
    assert queries
    assert all("modules_to_save" in name for name in queries)
    assert not any("gate.weight" in name or "conv1d" in name for name in names)


@torch.no_grad()
def test_an_adapter_loads_into_a_model_and_by_its_folder(model, saved, tmp_path):
    adapted = add_adapters(model, rank=2)
    for tensor in adapted.parameters():
        if tensor.requires_grad:
            tensor.add_(torch.randn_like(tensor), alpha=0.1)
    adapted.save_pretrained(tmp_path)
    expected = adapted(IDS).logits
    into = AutoModelForCausalLM.from_pretrained(saved, dtype=torch.float32)
    assert not torch.equal(into(IDS).logits, expected)
    into.load_adapter(tmp_path)
    # PEFT by itself adds the adapters of experts to their weights, and `add_adapters` to their outputs.
    for loaded in (into, AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)):
        torch.testing.assert_close(loaded(IDS).logits, expected, rtol=1e-3, atol=1e-4)


# ---- Delta attention


def of_transformers(function: Callable[..., tuple[Tensor, Tensor]]) -> Callable[..., tuple[Tensor, Tensor]]:
    def compute(query, key, value, g, beta, initial_state, output_final_state, **documents):
        options = {"initial_state": initial_state, "output_final_state": output_final_state}
        return function(query, key, value, g=g, beta=beta, use_qk_l2norm_in_kernel=True, **options)

    return compute


PATHS = {
    "fast": delta_attention.chunk,
    "chunks of transformers": of_transformers(CHUNK_OF_TRANSFORMERS),
    "token by token": of_transformers(inspect.unwrap(kimi_linear.recurrent_kimi_delta_attention)),
    "fast, two documents": delta_attention.chunk,
    "plain, two documents": delta_attention_attnres.chunk,
}


@pytest.mark.parametrize(
    ("path", "length", "dtype"),
    [
        (path, length, dtype)
        for (path, length), dtype in each_once(
            [*product(PATHS, [22, 65]), ("fast", 64), ("fast", 129), ("plain, two documents", 129)],
            [torch.float32, torch.bfloat16],
        )
    ],
)
def test_nothing_before_a_token_depends_on_it(path, length, dtype):
    torch.manual_seed(0)
    layer = KimiK3DeltaAttention(AttnResKimiK3Config.from_dict(release.text_fields()), 0).to(dtype)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.normal_(std=0.5)
    layer.chunk = PATHS[path]
    documents = (torch.arange(length) >= 5).int().unsqueeze(0) if "documents" in path else None
    inputs = torch.randn(1, length, 64, generator=torch.Generator().manual_seed(1)).to(dtype)
    for token in sorted({8, length // 2, *range(length - 3, length)}):
        changed = inputs.clone()
        changed[:, token] = torch.randn(64).to(dtype) * 4
        # The dependence that fla reports is in the backward pass, too.
        inputs.grad = changed.grad = None
        before, after = (layer(x.requires_grad_(), rows=Rows(documents))[:, :token] for x in (inputs, changed))
        assert torch.equal(before, after)
        for output, x in ((before, inputs), (after, changed)):
            output.float().square().sum().backward()
            assert x.grad[:, token:].count_nonzero() == 0
        assert torch.equal(inputs.grad, changed.grad)
        inputs.requires_grad_(False)


def test_the_installed_package_makes_the_delta_attention_fast(model):
    layer = model.model.layers[0].self_attn
    assert type(layer) is KimiK3DeltaAttention
    assert layer.chunk is delta_attention.chunk


@pytest.mark.parametrize("linear_beta", [25.0, None])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_situ_is_its_formula_in_every_dtype_with_its_gradients(dtype, linear_beta):
    gate, up = (torch.randn(7, 33, generator=torch.Generator().manual_seed(i)) * 8 for i in range(2))
    gate, up = (x.to(dtype).requires_grad_() for x in (gate, up))
    result = situ(gate, up, 4.0, linear_beta)
    exact = [x.detach().double().requires_grad_() for x in (gate, up)]
    bounded = exact[1] if linear_beta is None else linear_beta * torch.tanh(exact[1] / linear_beta)
    expected = 4 * torch.tanh(exact[0] / 4) * torch.sigmoid(exact[0]) * bounded
    assert result.dtype == dtype
    grad = torch.randn(7, 33, generator=torch.Generator().manual_seed(2)).to(dtype)
    result.backward(grad)
    expected.backward(grad.double())
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float64: 1e-14}[dtype]
    for actual, reference in ((result, expected), (gate.grad, exact[0].grad), (up.grad, exact[1].grad)):
        torch.testing.assert_close(actual.double(), reference, rtol=tolerance, atol=tolerance)


@torch.no_grad()
def test_situ_is_exact_at_all_sizes():
    sizes = torch.tensor([1e-30, 1e-8, 1e-3, 0.1, 1.0, 30.0, 1e3, 1e30]).double()
    gate = torch.cat((sizes, -sizes)).float()
    up = torch.cat((-sizes, sizes)).flip(0).float()
    bounded = 4 * torch.tanh(gate.double() / 4) * torch.sigmoid(gate.double())
    expected = bounded * 25 * torch.tanh(up.double() / 25)
    actual = situ(gate, up, 4.0, 25.0).double()
    torch.testing.assert_close(actual, expected, rtol=1e-6, atol=1e-37)
    assert situ(torch.tensor([float("nan")]), torch.tensor([1.0]), 4.0, 25.0).isnan()


# gate, up -> SiTU with the bounds 4 and 25, and its derivatives by both: by mpmath, with 40 digits.
SITU = {
    (0.5, -2.0): (-0.61791982367011468, -1.456349434532991, 0.3076456093886522),
    (-3.0, 7.0): (-0.82205815603503015, -0.59003463082657765, -0.11151622076712275),
    (6.0, 40.0): (83.218390479500871, 4.359262900845884, 0.54364970631987363),
    (-20.0, -100.0): (2.0595841834754968e-7, 2.059490674252915e-7, -1.1054617605235552e-11),
}


@pytest.mark.parametrize("width", [1, 600])  # one number, and rows that the compiled loops take where they are
def test_situ_and_its_derivatives_are_those_of_mpmath(width):
    for (gate, up), expected in SITU.items():
        inputs = [torch.full((width,), number, requires_grad=True) for number in (gate, up)]
        result = situ(*inputs, 4.0, 25.0)
        result.sum().backward()
        for actual, number in zip((result, *(x.grad for x in inputs)), expected, strict=True):
            torch.testing.assert_close(actual.double(), torch.full((width,), number).double(), rtol=3e-6, atol=1e-10)


@pytest.mark.parametrize("linear_beta", [25.0, None])
def test_situ_has_second_derivatives_and_works_in_transforms(linear_beta):
    inputs = [torch.randn(9, generator=torch.Generator().manual_seed(i)).double().requires_grad_() for i in range(2)]
    assert torch.autograd.gradgradcheck(lambda gate, up: situ(gate, up, 4.0, linear_beta), inputs)
    gate, up = (x.detach() for x in inputs)
    result, tangent = torch.func.jvp(lambda x: situ(x, up, 4.0, linear_beta), (gate,), (torch.ones(9).double(),))
    assert torch.equal(torch.func.vmap(lambda x, y: situ(x, y, 4.0, linear_beta))(gate, up), result)
    situ(inputs[0], inputs[1], 4.0, linear_beta).sum().backward()
    torch.testing.assert_close(tangent, inputs[0].grad)


# ---- Named configurations


@pytest.mark.slow
def test_the_released_configuration_has_the_released_size():
    config = load("kimi-k3")
    assert sum(map(torch.Size.numel, map(torch.Size, released_shapes(config).values()))) == 2_779_484_476_000
    count = count_parameters(config)
    assert count.total == 2_779_484_476_000
    embedding = 163_840 * 7168
    assert count.activated_non_embedding + embedding == 104_189_612_640
    assert describe_connection(config).startswith("Block AttnRes, 8 blocks of 12 layers (93 layers)")


def test_the_small_configuration_has_every_kind_of_layer():
    config = load("attnres-k3-tiny")
    assert (config.attn_res_block_size, config.gate_lower_bound, config.hidden_act) == (2, -5.0, "situ")
    assert {*config.layer_types} == {"linear_attention", "full_attention"}
    assert {*config.mlp_layer_types} == {"dense", "sparse"}
    smaller = load("attnres-k3-tiny", num_hidden_layers=4, num_local_experts=4, vocab_size=99)
    assert (len(smaller.layer_types), smaller.num_experts, smaller.vocab_size) == (4, 4, 99)
    assert AttnResKimiK3ForCausalLM(smaller)(torch.tensor([[1, 2, 3]])).logits.shape == (1, 3, 99)
    with pytest.raises(ValueError, match="`num_expert` is not a field of `AttnResKimiK3Config`"):
        load("attnres-k3-tiny", num_expert=4)
