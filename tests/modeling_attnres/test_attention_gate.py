"""Gated attention: its equation at every place, on every backbone, in training, generation and on disk."""

import copy
import pickle
from itertools import product

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from attnres.attention_gate_attnres import GATE_FIELDS, GatedAttention, gate_tensors

from ..cases import each_once
from .connections import assert_same_gradients, cached_logits, double, gradients

FUNCTIONS = [
    {},
    {"attention_gate_scale": "double"},
    {"attention_gate_activation": "silu"},
    {"attention_gate_form": "add"},
    {"attention_gate_form": "add", "attention_gate_activation": "silu"},
]
PLACES = {"llama": ("sdpa", "value", "key", "query"), "kimi_linear": ("sdpa", "query")}
GRANULARITIES = ("elementwise", "headwise", "head_shared")
FORMS = [(backbone, *form) for backbone, places in PLACES.items() for form in product(places, GRANULARITIES)]
FORMS += [(backbone, "output", "elementwise") for backbone in PLACES]
EVERY_FORM = pytest.mark.parametrize(("backbone", "place", "granularity"), FORMS)
EVERY_PLACE = pytest.mark.parametrize("place", [*PLACES["llama"], "output"])
LLAMA = {"intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2}
LLAMA |= {"vocab_size": 99, "hidden_size": 32, "head_dim": 12, "max_position_embeddings": 64, "pad_token_id": 0}
# For logits with a standard deviation of about one. Norms are in float32, whatever the model's dtype.
TOLERANCE = 2e-4


def gate(place: str, granularity: str = "elementwise", **function: str) -> dict[str, str]:
    return {"attention_gate": place, "attention_gate_granularity": granularity, **function}


@torch.no_grad()
def make_vivid(model: PreTrainedModel) -> PreTrainedModel:
    """Draw weights so large that every term moves the logits, gates included."""
    generator = torch.Generator().manual_seed(5)
    for name, tensor in model.named_parameters():
        if name.endswith(("A_log", "dt_bias")):
            continue
        scale = 0.3 if tensor.ndim == 1 else 1.0 if "embed" in name else tensor.shape[-1] ** -0.5
        tensor.copy_((tensor.ndim == 1) + scale * torch.randn(tensor.shape, generator=generator))
    return model


@pytest.fixture
def build(tiny_config):
    """Return `build(backbone, **fields)`: a model on Llama or Kimi Linear in eval mode, with vivid weights."""

    def build_model(backbone: str = "llama", **fields) -> PreTrainedModel:
        fields = {"attn_res_block_size": 3, "rms_norm_eps": 0.1, **fields}
        is_llama = backbone == "llama"
        config = AutoConfig.for_model("attnres_llama", **LLAMA | fields) if is_llama else tiny_config(**fields)
        torch.manual_seed(0)
        return make_vivid(AutoModelForCausalLM.from_config(config).eval())

    return build_model


# Each form with one function, and one form of each backbone with all.
CHECKED = [(*form, [function]) for form, function in each_once(FORMS, FUNCTIONS)]
CHECKED += [(backbone, "sdpa", "elementwise", FUNCTIONS) for backbone in PLACES]


@torch.no_grad()
@pytest.mark.parametrize(("backbone", "place", "granularity", "functions"), CHECKED)
def test_a_gated_model_follows_its_equations_cached_and_uncached(
    build, token_ids, straight_line, backbone, place, granularity, functions
):
    results = []
    for function in functions:
        model = build(backbone, **gate(place, granularity, **function))
        expected = straight_line.logits(model.state_dict(), model.config, token_ids)
        assert expected.std() > 0.5
        for logits in (model(token_ids).logits, cached_logits(model, token_ids)):
            torch.testing.assert_close(logits.double(), expected, rtol=0, atol=TOLERANCE)
        assert all((expected - other).abs().max() > 20 * TOLERANCE for other in results), "the functions differ"
        results.append(expected)


@torch.no_grad()
@pytest.mark.parametrize("q_lora_rank", [None, 12])
@pytest.mark.parametrize("connection", ["standard", "attn_res"])
def test_a_gate_works_with_other_connections_and_with_low_rank_queries(
    build, token_ids, straight_line, connection, q_lora_rank
):
    fields = {"residual_connection": connection, "q_lora_rank": q_lora_rank, **gate("query", "headwise")}
    model = build("kimi_linear", **fields)
    expected = straight_line.logits(model.state_dict(), model.config, token_ids)
    torch.testing.assert_close(model(token_ids).logits.double(), expected, rtol=0, atol=TOLERANCE)


@EVERY_FORM
def test_each_softmax_attention_has_a_linear_layer_g_proj(build, backbone, place, granularity):
    model = build(backbone, **gate(place, granularity))
    llama = {"sdpa": (4, 12), "query": (4, 12), "value": (2, 12), "key": (2, 12), "output": (1, 32)}
    mla = {"sdpa": (4, 16), "query": (4, 24), "output": (1, 32)}
    heads, width = (llama if backbone == "llama" else mla)[place]
    size = {"elementwise": heads * width, "headwise": heads, "head_shared": width}[granularity]
    layers = range(3) if backbone == "llama" else (1, 3)  # the others have KDA
    names = [f"model.layers.{layer}.self_attn.g_proj.weight" for layer in layers]
    assert {name: list(tensor.shape) for name, tensor in gate_tensors(model).items()} == {
        name: [size, 32] for name in names
    }
    assert {name for name in model.state_dict() if "g_proj" in name} == set(names)
    assert all(type(model.get_submodule(name.removesuffix(".weight"))) is nn.Linear for name in names)


def test_from_scratch_a_gate_starts_like_other_linear_layers():
    config = AutoConfig.for_model("attnres_llama", **LLAMA | {"hidden_size": 256, "initializer_range": 0.05})
    config.attention_gate = "sdpa"
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    for tensor in gate_tensors(model).values():
        assert tensor.dtype == torch.bfloat16
        assert tensor.float().std().item() == pytest.approx(0.05, rel=0.05)


@pytest.mark.parametrize(("place", "granularity"), [form[1:] for form in FORMS if form[0] == "llama"])
def test_gradients_equal_finite_differences(build, place, granularity):
    for function in FUNCTIONS:
        model = build(**gate(place, granularity, **function)).double()
        attention, x = model.model.layers[0].self_attn, torch.randn(1, 4, 32, dtype=torch.float64)
        x.requires_grad_()
        rotary = model.model.rotary_emb(x, torch.arange(4)[None])

        def run(x, weight):
            return torch.func.functional_call(attention, {"g_proj.weight": weight}, (x, rotary, None))[0]  # noqa: B023

        assert isinstance(attention, GatedAttention)
        assert torch.autograd.gradcheck(run, (x, attention.g_proj.weight), atol=1e-6, fast_mode=True)


@pytest.mark.parametrize("place", ["sdpa", "query", "output"])
def test_the_gradient_of_a_gate_on_latent_attention_equals_that_of_the_straight_lines(
    build, token_ids, straight_line, place
):
    # Without experts, because their choice is not smooth.
    model = double(build("kimi_linear", mlp_layer_types=["dense"] * 4, **gate(place)))
    name, tensor = next(iter(gate_tensors(model).items()))
    model(token_ids).logits.square().mean().backward()
    direction = torch.randn(tensor.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    step, losses = 1e-4, []
    for sign in (1, -1):
        tensors = model.state_dict() | {name: tensor + sign * step * direction}
        losses.append(straight_line.logits(tensors, model.config, token_ids).square().mean().item())
    expected = (losses[0] - losses[1]) / (2 * step)
    assert (tensor.grad * direction).sum().item() == pytest.approx(expected, rel=1e-3) and abs(expected) > 1e-4


@EVERY_PLACE
def test_generation_is_the_same_cached_uncached_and_left_padded(build, token_ids, place):
    model = build(**gate(place, "elementwise"))
    options = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    mask = torch.ones_like(token_ids)
    expected = model.generate(token_ids, attention_mask=mask, use_cache=False, **options)
    assert torch.equal(model.generate(token_ids, attention_mask=mask, **options), expected)
    padded, zeros = (torch.cat([torch.zeros_like(token_ids[:, :3]), part], dim=1) for part in (token_ids, mask))
    assert torch.equal(model.generate(padded, attention_mask=zeros, **options)[:, 3:], expected)
    assert torch.equal(
        model.generate(token_ids, attention_mask=mask, cache_implementation="static", **options), expected
    )


@torch.no_grad()
@EVERY_PLACE
def test_the_attention_implementation_may_change_and_attention_weights_are_recorded(build, token_ids, place):
    model = build(**gate(place))
    expected = model(token_ids).logits
    assert model.config._attn_implementation == "sdpa"
    model.set_attn_implementation("eager")
    outputs = model(token_ids, output_attentions=True)
    torch.testing.assert_close(outputs.logits, expected, rtol=0, atol=1e-5)
    assert [weights.shape for weights in outputs.attentions] == [(2, 4, 11, 11)] * 3
    model.set_attn_implementation("sdpa")
    assert torch.equal(model(token_ids).logits, expected)


@pytest.mark.slow
@pytest.mark.parametrize(("backbone", "place"), [("kimi_linear", "sdpa"), ("llama", "query")])
def test_a_gated_model_compiles_to_one_graph_in_its_first_call(build, token_ids, backbone, place):
    torch.compiler.reset()
    fewer = {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]}
    model = build(backbone, **gate(place, "elementwise"), **(fewer if backbone == "kimi_linear" else {}))
    compiled = torch.compile(copy.deepcopy(model), backend="eager", fullgraph=True)
    actual = compiled(token_ids, labels=token_ids, use_cache=False)
    torch.testing.assert_close(actual.logits, model(token_ids).logits, rtol=0, atol=1e-4)
    actual.loss.backward()
    assert all(tensor.grad.abs().max() > 0 for tensor in gate_tensors(compiled).values())


@pytest.mark.parametrize(("place", "use_reentrant"), each_once([*PLACES["llama"], "output"], [True, False]))
def test_gradient_checkpointing_does_not_change_gradients(build, token_ids, place, use_reentrant):
    model = build(**gate(place)).train()
    expected = gradients(model, token_ids)
    assert gate_tensors(model).keys() <= expected.keys()
    model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
    assert_same_gradients(gradients(model, token_ids), expected, 1e-5)


@torch.no_grad()
@EVERY_PLACE
def test_a_gated_model_can_be_copied_pickled_saved_and_loaded(build, token_ids, tmp_path, place):
    fields = gate(place, attention_gate_scale="double")
    model = build(**fields)
    model.save_pretrained(tmp_path)
    loaded, report = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(report.values())
    assert GATE_FIELDS.keys() <= loaded.config.to_diff_dict().keys()
    assert fields.items() <= loaded.config.to_dict().items()
    expected = model(token_ids).logits
    for again in (loaded, copy.deepcopy(model), pickle.loads(pickle.dumps(build(**fields)))):
        assert torch.equal(again(token_ids).logits, expected)
        gates = gate_tensors(again)
        assert gates.keys() == gate_tensors(model).keys()
        for tensor in gates.values():
            tensor.zero_()  # a copy must not share tensors with the model
    assert torch.equal(model(token_ids).logits, expected)


def test_a_configuration_without_a_gate_does_not_hold_its_fields():
    assert GATE_FIELDS.keys().isdisjoint(AutoConfig.for_model("attnres_llama", **LLAMA).to_dict())


def project_twice(model: PreTrainedModel, place: str) -> None:
    """Double the output of the gated projections: where each gate is 1/2, this gives the model without gates."""
    names = {"value": ["v_proj"], "query": ["q_proj", "q_b_proj"], "key": ["k_proj"]}.get(place, ["o_proj", "dense"])
    for module in model.modules():
        if isinstance(module, GatedAttention):
            projection = next(getattr(module, name) for name in names if getattr(module, name, None) is not None)
            projection.weight.mul_(2)
            # At "sdpa" the gate comes before the projection, so the bias is not gated.
            if projection.bias is not None and place != "sdpa":
                projection.bias.mul_(2)


FUSED = {"phi3": ("value", "key", "query"), "gpt_neox": ("value", "key", "query")}
FUSED |= {"gpt_neox, sequential": FUSED["gpt_neox"], "kimi_linear": ("value", "key"), "deepseek_v3": ("value", "key")}
BACKBONES = [
    *("deepseek_v3", "gemma2", "gemma3_text", "gpt_neox", "gpt_neox, sequential", "granite", "kimi_linear", "llama"),
    *("mistral", "mixtral", "olmo2", "phi3", "qwen2", "qwen3", "qwen3_moe", "smollm3"),
]


@torch.no_grad()
@pytest.mark.parametrize("case", BACKBONES)
def test_every_backbone_gates_a_place_or_refuses_it(backbones, case):
    fields = {"num_hidden_layers": 4} | ({"layer_types": None} if case.startswith("gemma") else {})
    fields |= {"layer_types": ["linear_attention", "full_attention"] * 2} if case == "kimi_linear" else {}
    fields |= {"no_rope_layers": [1, 0, 1, 0]} if case == "smollm3" else {}
    ungated, ids = backbones.build_member(case, **fields), backbones.token_ids()
    expected = ungated(ids).logits
    # Of backbones whose attention is made like another's, two places.
    alike = ("gemma2", "granite", "mistral", "mixtral", "qwen2", "qwen3_moe", "smollm3")
    for place in ("sdpa", "value") if case in alike else (*PLACES["llama"], "output"):
        if place in FUSED.get(case, ()):
            message = rf"^`attention_gate` is '{place}', but must be another .* has no \w_proj"
            with pytest.raises(ValueError, match=message):
                backbones.build_member(case, **fields, **gate(place))
            continue
        model = AutoModelForCausalLM.from_config(backbones.member_config(case, **fields, **gate(place))).eval()
        model.load_state_dict(ungated.state_dict(), strict=False)
        project_twice(model, place)
        for tensor in gate_tensors(model).values():
            tensor.normal_()
        assert (model(ids).logits - expected).abs().max() > 1e-3, place
        for tensor in gate_tensors(model).values():
            tensor.zero_()
        torch.testing.assert_close(model(ids).logits, expected, rtol=0, atol=1e-4 * expected.abs().max().item())


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"attention_gate": "mlp"},
            "`attention_gate` is 'mlp', but must be one of None, 'sdpa', 'value', 'key', 'query'",
        ),
        (
            gate("sdpa", "global"),
            "`attention_gate_granularity` is 'global', but must be one of 'elementwise', 'headwise'",
        ),
        (
            gate("sdpa", attention_gate_form="max"),
            "`attention_gate_form` is 'max', but must be one of 'multiply', 'add'.",
        ),
        (gate("sdpa", attention_gate_activation="tanh"), "`attention_gate_activation` is 'tanh', but must be one of"),
        (gate("sdpa", attention_gate_scale=2), "`attention_gate_scale` is 2, but must be one of 'unit', 'double'."),
        *(
            (
                gate("output", granularity),
                f"`attention_gate_granularity` is '{granularity}', but must be 'elementwise' where",
            )
            for granularity in ("headwise", "head_shared")
        ),
        *(
            (
                gate("sdpa", attention_gate_scale="double", **function),
                "`attention_gate_scale` is 'double', but must be 'unit'",
            )
            for function in FUNCTIONS[2:]
        ),
    ],
)
def test_values_that_are_not_allowed_are_refused_in_one_line(fields, message):
    with pytest.raises(ValueError) as error:
        AutoConfig.for_model("attnres_llama", **LLAMA | fields)
    assert str(error.value).startswith(message) and "\n" not in str(error.value)
    config = AutoConfig.for_model("attnres_llama", **LLAMA)
    vars(config).update(fields)
    with pytest.raises(ValueError, match=r"^`attention_gate"):
        AutoModelForCausalLM.from_config(config)


@pytest.mark.parametrize("place", ["query", "key"])
def test_a_factor_of_a_whole_head_is_refused_where_a_norm_undoes_it(backbones, place):
    with pytest.raises(ValueError, match=f"`attention_gate_granularity` is 'headwise', .* {place[0]}_norm undoes"):
        backbones.build_member("qwen3", **gate(place, "headwise"))
    backbones.build_member("qwen3", **gate(place, "headwise", attention_gate_form="add"))
    backbones.build_member("olmo2", **gate(place, "headwise"))  # its norm is over all heads together


@pytest.mark.parametrize(("place", "width"), [("sdpa", 48), ("value", 24), ("output", 32)])
def test_a_gate_costs_only_the_product_with_its_weight(build, token_ids, place, width):
    counts = []
    for fields in ({}, gate(place)):
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            build(**fields)(token_ids)
        counts.append(counter.get_total_flops())
    assert counts[1] - counts[0] == 3 * 2 * token_ids.numel() * 32 * width


@torch.no_grad()
@EVERY_PLACE
def test_adapters_of_all_linear_layers_merge_into_a_gate(build, token_ids, place):
    peft = pytest.importorskip("peft")
    model = build(**gate(place))
    before = model(token_ids).logits
    adapted = peft.get_peft_model(model, peft.LoraConfig(target_modules="all-linear", r=4, init_lora_weights=False))
    assert isinstance(
        adapted.get_submodule("base_model.model.model.layers.0.self_attn.g_proj"), peft.tuners.lora.Linear
    )
    expected = adapted.eval()(token_ids).logits
    assert (expected - before).abs().max() > 1e-3
    torch.testing.assert_close(adapted.merge_and_unload()(token_ids).logits, expected, rtol=0, atol=1e-4)


def test_tensor_parallelism_shards_a_gate_like_its_projection():
    plans = {}
    for place, granularity in (form[1:] for form in FORMS if form[0] == "llama"):
        config = AutoConfig.for_model("attnres_llama", **LLAMA | gate(place, granularity))
        plans[place, granularity] = config.base_model_tp_plan
    rule, projection = "layers.*.self_attn.g_proj", "layers.*.self_attn.v_proj"
    for (place, granularity), plan in plans.items():
        is_sharded = place != "output" and granularity != "head_shared"
        assert plan.get(rule) == ("colwise" if is_sharded else None)
        assert (projection in plan) == (granularity != "head_shared"), "a gate that heads share needs them all"
    neox = AutoConfig.for_model("attnres_gpt_neox", attention_gate="sdpa").base_model_tp_plan
    assert neox["layers.*.attention.g_proj"] == "colwise"
