"""Adapters: which weights get one, which tensors are trained and saved, and that loading and merging keep the model."""

import copy
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
from peft import AutoPeftModelForCausalLM, LoraConfig, PeftModel, get_peft_model
from peft.tuners.lora import LoraLayer, ParamWrapper
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel, Trainer, TrainingArguments

import attnres
from attnres.configuration import load
from attnres.residual_attnres import residual_tensors
from attnres.training.lora import add_adapters, expert_weights, projections
from attnres.training.optimizer import build_optimizer

SMALL = {
    "vocab_size": 99,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "attn_res_block_size": 3,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 16}
MODELS = {
    "attnres": None,  # the model of the fixture: KDA, MLA, dense MLP, experts and shared experts
    "attnres_llama": {"attention_bias": True},
    "attnres_qwen3": {"head_dim": 8, "tie_word_embeddings": True},
    "attnres_qwen3_moe": EXPERTS | {"head_dim": 8, "num_experts": 4, "mlp_only_layers": [1]},
    "attnres_mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "attnres_gpt_neox": {"rotary_pct": 0.5},
}
# Modules without adapters: routers, kernels, norms, embeddings, and the AttnRes tensors.
NOT_ADAPTED = (".gate.weight", "conv1d.weight", "norm.weight", "A_log", "embed_tokens.weight", "embed_in.weight")


@pytest.fixture(scope="module")
def base(tmp_path_factory, tiny_model):
    """Return `base(name)`, which gives a directory with a small model of that type."""
    made: dict[str, Path] = {}

    def build(name: str) -> Path:
        if name not in made:
            if MODELS[name] is None:
                model = tiny_model()
            else:
                torch.manual_seed(0)
                model = AutoModelForCausalLM.from_config(AutoConfig.for_model(name, **SMALL, **MODELS[name]))
                for tensor in residual_tensors(model).values():
                    torch.nn.init.normal_(tensor, mean=1.0 if tensor.ndim == 1 else 0.0, std=0.5)
            # The head is frozen: with initial weights its logits could not become large.
            model.get_output_embeddings().weight.data.mul_(8)
            made[name] = tmp_path_factory.mktemp(name)
            model.save_pretrained(made[name])
        return made[name]

    return build


def load_base(path: Path, **kwargs) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(path, **kwargs).eval()


def adapters(path: Path, **kwargs) -> PeftModel:
    torch.manual_seed(0)  # for the initial values of the adapters
    return add_adapters(load_base(path, **kwargs), rank=4)


@torch.no_grad()
def logits_of(model: torch.nn.Module, ids: Tensor) -> Tensor:
    return model.eval()(ids).logits


@torch.no_grad()
def move(model: PeftModel) -> None:
    """Change every trainable tensor, as training would."""
    generator = torch.Generator().manual_seed(3)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter += 0.05 * torch.randn(parameter.shape, generator=generator)


def blocks() -> list[dict[str, Tensor]]:
    ids = torch.randint(3, 20, (16, 12), generator=torch.Generator().manual_seed(0))
    return [{"input_ids": row, "labels": row} for row in ids]


def run(model: PeftModel, path: Path, steps: int = 12, resume: bool = False, **options) -> Trainer:
    arguments = TrainingArguments(
        output_dir=path,
        max_steps=steps,
        per_device_train_batch_size=4,
        learning_rate=1e-2,
        lr_scheduler_type="constant",
        logging_steps=1,
        report_to="none",
        disable_tqdm=True,
        dataloader_pin_memory=False,
        seed=0,
        **options,
    )
    trainer = Trainer(model, arguments, train_dataset=blocks())
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def losses_of(trainer: Trainer) -> list[float]:
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


# --- which weights get an adapter


def test_a_projection_with_as_many_outputs_as_there_are_experts_is_no_router():
    config = load("attnres-k3-tiny", num_hidden_layers=4, routed_expert_hidden_size=8, num_experts=8)
    with torch.device("meta"):
        names = projections(AutoModelForCausalLM.from_config(config))
    assert {"mlp.routed_expert_down_proj", "mlp.routed_expert_up_proj", "mlp.shared_experts.up_proj"} <= {*names}


@pytest.mark.parametrize("name", MODELS)
def test_the_matrices_of_the_decoder_layers_have_adapters_and_no_other_tensors_do(base, name):
    model = load_base(base(name))
    residual = residual_tensors(model)
    expected = {
        parameter_name
        for parameter_name, parameter in model.named_parameters()
        if ".layers." in parameter_name
        and parameter.ndim > 1
        and parameter_name not in residual
        and not parameter_name.endswith(NOT_ADAPTED)
    }
    adapted = set()
    for module_name, module in add_adapters(model, rank=4).get_base_model().named_modules():
        if isinstance(module, LoraLayer):
            parameter = module.parameter_name if isinstance(module, ParamWrapper) else "weight"
            adapted.add(f"{module_name.replace('.base_layer', '')}.{parameter}")
    assert adapted == expected
    assert any("experts." in name for name in adapted) == (name in ("attnres", "attnres_qwen3_moe", "attnres_mixtral"))


@pytest.mark.parametrize("name", MODELS)
def test_only_adapters_and_attn_res_tensors_are_trained(base, name):
    model = load_base(base(name))
    residual = {parameter_name: tensor.shape for parameter_name, tensor in residual_tensors(model).items()}
    adapted = add_adapters(model, rank=4)
    adapted(input_ids=blocks()[0]["input_ids"][None], labels=blocks()[0]["labels"][None]).loss.backward()
    trained = {n: p.shape for n, p in adapted.get_base_model().named_parameters() if p.grad is not None}
    lora = {n for n in trained if ".lora_A." in n or ".lora_B." in n}
    assert {n.replace(".modules_to_save.default", ""): trained[n] for n in trained.keys() - lora} == residual
    assert {n for n, p in adapted.get_base_model().named_parameters() if p.requires_grad} == set(trained)


def test_adapters_are_added_without_a_warning_of_the_names_that_peft_reads(base):
    with warnings.catch_warnings(action="error"):
        add_adapters(load_base(base("attnres_llama")), rank=4)


def test_a_linear_router_has_no_adapter_and_a_standard_model_can_be_adapted_too(base):
    model = load_base(base("attnres_mixtral"))
    for layer in model.model.layers:
        layer.mlp.gate = torch.nn.Linear(32, 4, bias=False)
        layer.mlp.router = torch.nn.ModuleDict({"layer": torch.nn.Linear(32, 4)})
        layer.self_attn.gate = torch.nn.Linear(32, 4, bias=False)  # with no experts beside it
    assert {name for name in projections(model) if "gate" in name or "router" in name} == {"self_attn.gate"}
    standard = AutoModelForCausalLM.from_config(AutoConfig.for_model("kimi_linear", **load_kimi_fields(base)))
    adapted = add_adapters(standard, rank=4)
    assert adapted.peft_config["default"].modules_to_save is None
    assert len(adapted.peft_config["default"].target_modules) == 17


def load_kimi_fields(base) -> dict:
    fields = AutoConfig.from_pretrained(base("attnres")).to_dict()
    return {key: value for key, value in fields.items() if not key.startswith(("attn_res", "residual", "model_type"))}


def test_targets_choose_among_the_projections_and_experts(base):
    model = load_base(base("attnres"))
    config = add_adapters(model, rank=4, targets=("q_proj", "shared_experts.up_proj", "gate_up_proj")).peft_config
    assert config["default"].target_modules == {"self_attn.q_proj", "mlp.shared_experts.up_proj"}
    assert config["default"].target_parameters == ["mlp.experts.gate_up_proj"]
    without = add_adapters(load_base(base("attnres")), rank=4, targets=("up_proj",), experts=False)
    assert without.peft_config["default"].target_modules == {"mlp.up_proj", "mlp.shared_experts.up_proj"}
    with pytest.raises(ValueError, match=r"no projection is named 'wq'; there are mlp.down_proj, "):
        add_adapters(load_base(base("attnres")), targets=("q_proj", "wq"))


def test_an_adapter_that_is_not_possible_is_an_error_that_says_why(base):
    with pytest.raises(ValueError, match="`rank` of the adapters is 0"):
        add_adapters(load_base(base("attnres")), rank=0)
    with pytest.raises(ValueError, match="leave out the experts"):
        add_adapters(load_base(base("attnres")), dropout=0.1)
    assert add_adapters(load_base(base("attnres")), dropout=0.1, experts=False)
    with pytest.raises(ValueError, match="does not keep its layers"):
        add_adapters(AutoModelForCausalLM.from_config(AutoConfig.for_model("gpt2", n_layer=1, n_embd=8, n_head=2)))


def test_rank_and_scale_of_linear_layers_and_of_experts(base):
    adapted = add_adapters(load_base(base("attnres")), rank=6, alpha=9.0)
    for module in adapted.modules():
        if isinstance(module, LoraLayer):
            # A token goes to 2 of the experts.
            assert module.r["default"] == (3 if isinstance(module, ParamWrapper) else 6)
            assert module.scaling["default"] == pytest.approx(1.5)
    chosen = add_adapters(load_base(base("attnres")), rank=6, expert_rank=1)
    experts = [module for module in chosen.modules() if isinstance(module, ParamWrapper)]
    assert {(module.r["default"], module.scaling["default"]) for module in experts} == {(1, 2.0)}


# --- the same model after saving, loading and merging


@pytest.mark.parametrize("name", MODELS)
def test_saved_loaded_and_merged_adapters_give_the_logits_of_the_trained_adapters(base, name, tmp_path, token_ids):
    plain = logits_of(load_base(base(name)), token_ids)
    adapted = adapters(base(name))
    assert torch.equal(logits_of(adapted, token_ids), plain)  # B is zero
    move(adapted)
    trained = logits_of(adapted, token_ids)
    assert (trained - plain).abs().max() > 1e-2
    adapted.save_pretrained(tmp_path / "adapter")
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        loaded = PeftModel.from_pretrained(load_base(base(name)), tmp_path / "adapter")
    assert torch.equal(logits_of(loaded, token_ids), trained)
    with loaded.disable_adapter():
        assert torch.equal(logits_of(loaded, token_ids), plain)
    found = AutoPeftModelForCausalLM.from_pretrained(tmp_path / "adapter")
    assert torch.equal(logits_of(found, token_ids), trained)

    merged = loaded.merge_and_unload()
    assert type(merged) is type(load_base(base(name)))
    assert (logits_of(merged, token_ids) - trained).abs().max() < 1e-5 * trained.abs().max()
    merged.save_pretrained(tmp_path / "merged")
    again = load_base(tmp_path / "merged")
    assert torch.equal(logits_of(again, token_ids), logits_of(merged, token_ids))


@pytest.mark.parametrize("name", ["attnres", "attnres_qwen3_moe"])
def test_the_adapter_file_holds_adapters_and_attn_res_tensors_and_no_base_weight(base, name, tmp_path):
    model = load_base(base(name))
    residual = residual_tensors(model)
    elements = sum(tensor.numel() for tensor in residual.values())
    for layer in model.model.layers:
        elements += sum(4 * sum(layer.get_submodule(n).weight.shape) for n in projections(model) if has(layer, n))
        for weight in (layer.get_parameter(n) for n in expert_weights(model) if has(layer, n)):
            elements += 2 * len(weight) * sum(weight.shape[1:])  # rank 4, shared by 2 experts
    add_adapters(model, rank=4).save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "adapter_model.safetensors")
    assert sum(tensor.numel() for tensor in tensors.values()) == elements
    others = {key.removeprefix("base_model.model.") for key in tensors if ".lora_" not in key}
    assert others == set(residual)
    size = (tmp_path / "adapter_model.safetensors").stat().st_size
    assert 4 * elements < size < 4 * elements + 200 * len(tensors)


def has(layer: torch.nn.Module, name: str) -> bool:
    module, _, last = name.rpartition(".")
    try:
        return hasattr(layer.get_submodule(module), last)
    except AttributeError:
        return False


@pytest.mark.slow
def test_adapters_of_the_published_sizes_are_megabytes():
    def megabytes(name: str) -> float:
        with torch.device("meta"):
            adapted = add_adapters(AutoModelForCausalLM.from_config(load(name)))
        return sum(4 * p.numel() for p in adapted.parameters() if p.requires_grad) / 1e6

    assert megabytes("attnres-194m") < 100
    assert megabytes("attnres-48b-a3b") < 1000


FRESH = """
import sys, torch, attnres
from peft import AutoPeftModelForCausalLM, PeftModel
from transformers import AutoModelForCausalLM
base, folder = sys.argv[1:]
expected = torch.load(folder + "/expected.pt")
loaded = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), folder).eval()
found = AutoPeftModelForCausalLM.from_pretrained(folder).eval()
for model in (loaded, found, loaded.merge_and_unload()):
    with torch.no_grad():
        difference = model(expected["ids"]).logits - expected["logits"]
    assert difference.abs().max() < 1e-5 * expected["logits"].abs().max()
"""


@pytest.mark.slow
def test_a_trained_adapter_loads_in_another_process(base, tmp_path, token_ids):
    adapted = run(adapters(base("attnres")), tmp_path / "run", save_strategy="no").model
    logits = logits_of(adapted, token_ids)
    assert (logits - logits_of(load_base(base("attnres")), token_ids)).abs().max() > 0.1
    adapted.save_pretrained(tmp_path)
    torch.save({"ids": token_ids, "logits": logits}, tmp_path / "expected.pt")
    command = [sys.executable, "-c", FRESH, str(base("attnres")), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-2000:]


# --- training


@pytest.mark.slow
@pytest.mark.parametrize("name", ["attnres", "attnres_llama"])
def test_training_lowers_the_loss_and_leaves_the_base_weights_alone(base, name, tmp_path):
    before = load_base(base(name))
    residual = residual_tensors(before)
    trainer = run(adapters(base(name)), tmp_path, save_strategy="no")
    losses = losses_of(trainer)
    assert losses[-1] < losses[0] - 0.3
    after = dict(trainer.model.get_base_model().named_parameters())
    frozen = {
        n.replace(".base_layer", "").replace(".original_module", ""): p for n, p in after.items() if not p.requires_grad
    }
    assert frozen.keys() == dict(before.named_parameters()).keys()
    assert all(torch.equal(frozen[n], p) for n, p in before.named_parameters())
    for tensor_name, tensor in residual.items():
        if ".layers.0.self_attention_res_" in tensor_name or ".layers.0.parallel_res_" in tensor_name:
            continue  # it reads a single source, so its gradient is zero
        module = tensor_name.removesuffix(".weight")
        assert not torch.equal(after[f"{module}.modules_to_save.default.weight"], tensor), tensor_name


@pytest.mark.slow
def test_a_run_with_adapters_resumes_bit_for_bit(base, tmp_path):
    whole = run(adapters(base("attnres")), tmp_path / "whole", steps=6, save_strategy="no")
    run(adapters(base("attnres")), tmp_path / "parts", steps=3, save_steps=3)
    names = {path.name for path in (tmp_path / "parts" / "checkpoint-3").iterdir()}
    assert "adapter_model.safetensors" in names and "model.safetensors" not in names
    rest = run(adapters(base("attnres")), tmp_path / "parts", steps=6, resume=True)
    assert losses_of(rest)[3:] == losses_of(whole)[3:]


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("first", ["adapters", "checkpointing"])
def test_gradient_checkpointing_gives_the_same_gradients(base, reentrant, first):
    ids = torch.stack([row["input_ids"] for row in blocks()[:2]])

    def gradients(adapted: PeftModel) -> dict[str, Tensor]:
        move(adapted.train())
        adapted(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        return {name: p.grad for name, p in adapted.named_parameters() if p.requires_grad}

    model = load_base(base("attnres"))
    if first == "checkpointing":
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    torch.manual_seed(0)
    adapted = add_adapters(model, rank=4)
    if first == "adapters":  # as `Trainer` does it
        adapted.gradient_checkpointing_enable({"use_reentrant": reentrant})
    assert all(layer.gradient_checkpointing for layer in model.model.layers)
    plain, checkpointed = gradients(adapters(base("attnres"))), gradients(adapted)
    assert checkpointed.keys() == plain.keys()
    for name, gradient in plain.items():
        assert checkpointed[name] is not None, name
        torch.testing.assert_close(checkpointed[name], gradient)


@pytest.mark.slow
def test_a_16_bit_base_keeps_its_dtype_and_trained_tensors_are_float32(base, tmp_path, token_ids):
    adapted = adapters(base("attnres"), dtype=torch.bfloat16)
    kept = tuple(attnres.AttnResForCausalLM._keep_in_fp32_modules_strict)
    dtypes = {(p.requires_grad, p.dtype) for n, p in adapted.named_parameters() if not n.endswith(kept)}
    assert dtypes == {(True, torch.float32), (False, torch.bfloat16)}
    losses = losses_of(run(adapted, tmp_path, save_strategy="no"))
    assert losses[-1] < losses[0] - 0.3
    merged = logits_of(adapted.merge_and_unload(), token_ids)
    assert merged.dtype == torch.bfloat16


def test_the_optimizer_gives_the_trained_attn_res_tensors_their_own_rate(base):
    adapted = adapters(base("attnres"))
    optimizer = build_optimizer(adapted, learning_rate=0.1, residual_lr_factor=3.0)
    rates = {id(p): (g["lr"], g["weight_decay"]) for g in optimizer.param_groups for p in g["params"]}
    for name, parameter in adapted.named_parameters():
        if parameter.requires_grad:
            assert rates.pop(id(parameter)) == ((0.1, 0.1) if ".lora_" in name else (0.1 * 3.0, 0.0)), name
    assert not rates


def test_depth_attentions_and_generation_work_with_adapters(base, token_ids):
    adapted = adapters(base("attnres"))
    move(adapted)
    outputs = adapted(token_ids, output_depth_attentions=True, output_hidden_states=True)
    assert len(outputs.depth_attentions) == 9 and len(outputs.hidden_states) == 5
    options = {"max_new_tokens": 6, "do_sample": False}
    generated = adapted.generate(input_ids=token_ids, **options)
    merged = adapted.merge_and_unload()
    torch.testing.assert_close(
        merged(token_ids, output_depth_attentions=True).depth_attentions, outputs.depth_attentions, rtol=1e-4, atol=1e-5
    )
    assert torch.equal(merged.generate(input_ids=token_ids, **options), generated)


def test_all_linear_of_peft_adapts_no_attn_res_tensor(base):
    model = load_base(base("attnres"))
    residual = set(residual_tensors(model))
    adapted = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", target_modules="all-linear"))
    layers = [n for n, m in adapted.get_base_model().named_modules() if isinstance(m, LoraLayer)]
    assert len(layers) > 20
    assert not any("_res_" in name for name in layers)
    assert set(residual_tensors(adapted.get_base_model())) == residual


# ---- PEFT by itself


@pytest.mark.parametrize("name", ["attnres", "attnres_llama"])
def test_peft_alone_trains_and_saves_the_attn_res_tensors_in_modules_to_save(base, tmp_path, name):
    model = AutoModelForCausalLM.from_pretrained(base(name))
    names = attnres.peft_modules_to_save(model)
    assert "output_attn_res_proj" in names and "mlp_res_norm" in names
    config = LoraConfig(target_modules="all-linear", modules_to_save=names, task_type="CAUSAL_LM")
    adapted = get_peft_model(model, config)
    trained = [tensor for tensor in residual_tensors(adapted).values() if tensor.requires_grad]
    assert len(trained) == len(residual_tensors(AutoModelForCausalLM.from_pretrained(base(name))))
    ids = torch.randint(3, 99, (2, 11))
    adapted(ids, labels=ids).loss.backward()
    assert any(tensor.grad is not None and tensor.grad.abs().max() > 0 for tensor in trained)
    with torch.no_grad():
        for tensor in trained:
            tensor.add_(0.1)
        expected = adapted.eval()(ids).logits
        adapted.save_pretrained(tmp_path)
        again = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base(name)), tmp_path).eval()
        assert torch.allclose(again(ids).logits, expected, atol=1e-5)


@pytest.mark.parametrize("name", ["attnres_llama", "attnres_qwen3", "attnres_gpt_neox"])
def test_peft_chooses_the_targets_that_it_chooses_for_the_backbone(base, name):
    model = AutoModelForCausalLM.from_pretrained(base(name))
    backbone = AutoConfig.for_model(name.removeprefix("attnres_"), **SMALL | (MODELS[name] or {}))
    adapted, standard = (
        get_peft_model(model, LoraConfig()).peft_config["default"].target_modules
        for model in (model, AutoModelForCausalLM.from_config(backbone))
    )
    assert adapted == standard


@pytest.mark.slow
@pytest.mark.parametrize("first", ["attnres", "peft"])
def test_peft_knows_the_family_in_either_order_of_imports(first):
    code = (
        f"import sys, {first}; alone = {first!r} == 'peft' or 'peft' not in sys.modules; import attnres, peft\n"
        "from peft.utils.constants import TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING as targets\n"
        "assert alone and targets['attnres_llama'] == targets['llama']"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-2000:]


@torch.no_grad()
def test_connections_that_peft_saves_follow_their_layers(base):
    model = AutoModelForCausalLM.from_pretrained(base("attnres_llama")).eval()
    ids, names = torch.randint(3, 99, (2, 11)), attnres.peft_modules_to_save(model)
    for tensor in residual_tensors(model).values():
        tensor.add_(torch.randn_like(tensor), alpha=0.3)
    config = LoraConfig(target_modules="all-linear", modules_to_save=names, task_type="CAUSAL_LM")
    adapted = get_peft_model(copy.deepcopy(model), config).eval()  # computes the same, because LoRA starts at zero
    before = adapted(ids, use_cache=False).logits
    for decoder in (model.model, adapted.get_base_model().model):
        del decoder.layers[0]
        decoder.config.num_hidden_layers = len(decoder.layers)
    expected = model(ids, use_cache=False).logits
    assert (expected - before).abs().max() > 1e-2
    torch.testing.assert_close(adapted(ids, use_cache=False).logits, expected)
    torch.testing.assert_close(adapted.merge_and_unload()(ids, use_cache=False).logits, expected)


@pytest.mark.parametrize("targets", [["mlp_res_proj"], "mlp_res_norm", ["q_proj", "output_attn_res_proj"]], ids=str)
def test_an_adapter_on_an_attn_res_tensor_is_refused_by_name(base, targets):
    model = AutoModelForCausalLM.from_pretrained(base("attnres_llama"))
    with pytest.raises(ValueError, match=r"'(mlp_res_proj|mlp_res_norm|output_attn_res_proj)' cannot have an adapter"):
        add_adapters(model, targets=targets)
