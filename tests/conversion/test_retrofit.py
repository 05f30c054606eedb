"""A retrofitted model computes the same function as the model it was made from, with the same weights."""

import pytest
import torch
from accelerate import dispatch_model
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    KimiLinearConfig,
    KimiLinearForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
)

from attnres import AttnResLlamaForCausalLM
from attnres.conversion import retrofit
from attnres.conversion.retrofit import retrofit_part
from attnres.residual_attnres import residual_tensors

from .checkpoints import change_json, standard_model

BLOCKS = [{"full": True}, {"block_size": 2}, {"block_size": 3}, {"block_size": 6}, {"num_blocks": 2}]


@pytest.fixture
def kimi(tiny_config):
    """Return `kimi(**overrides)`: a Kimi Linear model with norm weights away from one and large logits."""

    def build(**overrides) -> KimiLinearForCausalLM:
        fields = tiny_config(**overrides).to_dict()
        config = KimiLinearConfig(**{k: v for k, v in fields.items() if "res" not in k and k != "model_type"})
        torch.manual_seed(0)
        model = KimiLinearForCausalLM(config).eval()
        for name, parameter in model.named_parameters():
            if "norm" in name:
                torch.nn.init.normal_(parameter, mean=1.0, std=0.3)
            elif parameter.ndim >= 2 and "conv" not in name:
                torch.nn.init.normal_(parameter, std=0.3)
        return model

    return build


def relative_difference(a: torch.Tensor, b: torch.Tensor) -> float:
    return ((a - b).abs().max() / b.abs().max()).item()


@pytest.mark.parametrize("blocks", BLOCKS, ids=str)
def test_logits_stay_the_same(kimi, token_ids, blocks):
    model = kimi()
    with torch.no_grad():
        before, after = model(token_ids).logits, retrofit(model, **blocks)(token_ids).logits
    assert before.abs().max() >= 5, "the comparison needs logits of some size"
    assert relative_difference(after, before) <= 1e-4
    assert torch.equal(after.argmax(-1), before.argmax(-1))


@pytest.mark.parametrize("blocks", BLOCKS[:3], ids=str)
def test_cached_generation_of_a_left_padded_batch_stays_the_same(kimi, token_ids, blocks):
    model = kimi()
    mask = torch.ones_like(token_ids)
    mask[0, :4] = 0
    inputs = {"input_ids": token_ids.masked_fill(mask == 0, 0), "attention_mask": mask}
    options = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    assert torch.equal(model.generate(**inputs, **options), retrofit(model, **blocks).generate(**inputs, **options))


@pytest.mark.parametrize("blocks", BLOCKS[:4], ids=str)
def test_shared_weights_get_the_same_gradients(kimi, token_ids, blocks):
    model = kimi()

    def gradients(some_model) -> dict[str, torch.Tensor]:
        some_model.zero_grad()
        some_model(token_ids, labels=token_ids).loss.backward()
        return {name: p.grad.clone() for name, p in some_model.named_parameters() if p.grad is not None}

    before, after = gradients(model), gradients(retrofit(model, **blocks))
    assert set(before) <= set(after)
    for name, gradient in before.items():
        assert torch.allclose(after[name], gradient, rtol=1e-4, atol=1e-4 * gradient.abs().max()), name


def test_the_scale_mean_is_not_exact(kimi, token_ids):
    model = kimi()
    with torch.no_grad():
        before, after = model(token_ids).logits, retrofit(model, block_size=2, scale="mean")(token_ids).logits
    assert relative_difference(after, before) > 1e-4


@pytest.mark.parametrize("tie", [True, False])
def test_the_result_shares_every_backbone_tensor(kimi, tie):
    model = kimi()
    if tie:
        model.config.tie_word_embeddings = True
        model.lm_head.weight = model.model.embed_tokens.weight
    result = retrofit(model)
    before, after = model.state_dict(keep_vars=True), result.state_dict(keep_vars=True)
    assert all(after[name] is tensor for name, tensor in before.items())
    assert set(after) - set(before) == set(residual_tensors(result))
    assert not any(tensor.is_meta for tensor in after.values())
    assert (result.lm_head.weight is result.model.embed_tokens.weight) == tie


@pytest.fixture
def reload(tmp_path):
    """Return `reload(model)`, which saves a model and loads it again."""

    def run(model):
        model.save_pretrained(tmp_path / "saved")
        return AutoModelForCausalLM.from_pretrained(tmp_path / "saved").eval()

    return run


HEADS = {
    "a separate tensor": lambda model: nn.Parameter(torch.randn_like(model.lm_head.weight)),
    "the embedding": lambda model: model.get_input_embeddings().weight,
    "a view of the embedding": lambda model: nn.Parameter(model.get_input_embeddings().weight.data),
}


@pytest.mark.parametrize(
    ("model_type", "head", "is_declared_tied"),
    [
        *(("llama", head, is_tied) for head in HEADS for is_tied in (True, False)),
        ("kimi_linear", "a separate tensor", True),
        ("gemma2", "a separate tensor", False),  # declares it tied by default
    ],
)
def test_the_head_is_tied_if_it_is_the_tensor_of_the_embedding(
    kimi, token_ids, reload, model_type, head, is_declared_tied
):
    model = kimi() if model_type == "kimi_linear" else standard_model(model_type, head_dim=8)
    model.config.tie_word_embeddings = is_declared_tied
    model.lm_head.weight = HEADS[head](model)
    with torch.no_grad():
        before, result = model(token_ids).logits, retrofit(model, full=True)
        assert result.lm_head.weight is model.lm_head.weight
        assert result.config.tie_word_embeddings == (head != "a separate tensor")
        assert model.config.tie_word_embeddings == is_declared_tied
        assert relative_difference(result(token_ids).logits, before) <= 1e-4
        again = reload(result)
        assert (again.lm_head.weight is again.get_input_embeddings().weight) == (head != "a separate tensor")
        assert relative_difference(again(token_ids).logits, before) <= 1e-4


@pytest.mark.parametrize("is_declared_tied", [True, False])
def test_a_directory_with_an_untied_head_is_retrofitted_exactly(token_ids, tmp_path, reload, is_declared_tied):
    model = standard_model(tie_word_embeddings=False)
    model.save_pretrained(tmp_path / "source")
    change_json(tmp_path / "source" / "config.json", tie_word_embeddings=is_declared_tied)
    with torch.no_grad():
        before, result = model(token_ids).logits, retrofit(tmp_path / "source", full=True)
        assert relative_difference(result(token_ids).logits, before) <= 1e-4
        assert relative_difference(reload(result)(token_ids).logits, before) <= 1e-4


def test_a_head_that_is_one_tensor_with_another_is_refused(kimi):
    model = kimi(vocab_size=32)
    model.lm_head.weight = model.model.layers[0].self_attn.o_proj.weight
    with pytest.raises(ValueError, match=r"one tensor with `model\.layers\.0\.self_attn\.o_proj\.weight`"):
        retrofit(model)


def test_mode_dtype_and_frozen_weights_are_kept(kimi):
    model = kimi().to(torch.bfloat16).train()
    model.model.embed_tokens.requires_grad_(False)
    result = retrofit(model)
    assert result.training
    assert {p.dtype for p in result.parameters()} == {torch.bfloat16}
    assert [n for n, p in result.named_parameters() if not p.requires_grad] == ["model.embed_tokens.weight"]
    assert not model.model.embed_tokens.weight.requires_grad


def test_a_standard_member_of_the_family_and_its_directory_are_retrofitted(tiny_model, token_ids, tmp_path):
    model = tiny_model(residual_connection="standard")
    model.save_pretrained(tmp_path)
    with torch.no_grad():
        expected = model(token_ids).logits
        assert relative_difference(retrofit(model, full=True)(token_ids).logits, expected) <= 1e-4
        assert relative_difference(retrofit(tmp_path, full=True)(token_ids).logits, expected) <= 1e-4


def test_a_model_whose_dynamic_rotary_embedding_has_grown_stays_the_same():
    shape = {"vocab_size": 99, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    rope = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}
    config = LlamaConfig(**shape, intermediate_size=64, max_position_embeddings=16, rope_parameters=rope)
    torch.manual_seed(0)
    model = LlamaForCausalLM(config).eval()
    ids = torch.randint(99, (1, 40))
    with torch.no_grad():
        model(ids)  # longer than `max_position_embeddings`, so the frequencies change to those of length 40
        result = retrofit(model, full=True)
        for length in (8, 40):
            expected = model(ids[:, :length]).logits
            assert relative_difference(result(ids[:, :length]).logits, expected) <= 1e-4


def test_the_implementation_of_attention_and_experts_is_kept(kimi):
    model = kimi()
    model.set_attn_implementation("eager")
    model.set_experts_implementation("eager")
    config = retrofit(model).config
    assert (config._attn_implementation, config._experts_implementation) == ("eager", "eager")


def test_without_a_block_size_there_are_up_to_eight_blocks(kimi):
    assert retrofit(kimi()).config.attn_res_block_size == 1  # 8 sublayers
    deep = kimi(num_hidden_layers=9, layer_types=["full_attention"] * 9, mlp_layer_types=["dense"] * 9)
    assert retrofit(deep).config.attn_res_block_size == 3  # 18 sublayers: 6 blocks


def test_another_backbone_is_refused_with_the_list_of_supported_ones():
    model = GPT2LMHeadModel(GPT2Config(vocab_size=9, n_embd=32, n_layer=1, n_head=2))
    with pytest.raises(ValueError, match=r"model type 'gpt2'. Supported are .*'kimi_linear', 'llama', .*add_backbone"):
        retrofit(model)


def test_a_model_that_has_attention_residuals_is_refused(tiny_model):
    with pytest.raises(ValueError, match="residual_connection='attn_res' already"):
        retrofit(tiny_model())


def test_the_directory_of_a_model_that_has_attention_residuals_is_named(tiny_model, tmp_path):
    tiny_model().save_pretrained(tmp_path / "model")
    with pytest.raises(
        ValueError, match=f"^the model, loaded from {tmp_path}/model, has residual_connection='attn_res' already"
    ):
        retrofit(tmp_path / "model")


def test_an_offloaded_model_is_refused(tiny_model):
    model = tiny_model(residual_connection="standard")
    model.lm_head.to("meta")
    with pytest.raises(ValueError, match=r"`lm_head.weight` is offloaded.*without `device_map`"):
        retrofit(model)


def test_a_model_on_several_devices_is_refused():
    """`accelerate` moves activations between its devices, by hooks that the modules of a retrofit lack."""
    model = dispatch_model(small_llama(), {"": "cpu"}, force_hooks=True)
    assert hasattr(model.lm_head, "_hf_hook") and not hasattr(retrofit(model).lm_head, "_hf_hook")
    model.hf_device_map = {"model": 0, "lm_head": 1}
    with pytest.raises(ValueError, match=r"over the devices 0, 1, .* `attnres convert`.*with `device_map`"):
        retrofit(model)


def small_llama() -> LlamaForCausalLM:
    shape = {"vocab_size": 99, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    return LlamaForCausalLM(LlamaConfig(**shape, intermediate_size=64))


def adapted() -> nn.Module:
    """Return the `PeftModel` of a small model with adapters on its query projections."""
    peft = pytest.importorskip("peft")
    return peft.get_peft_model(small_llama(), peft.LoraConfig(task_type="CAUSAL_LM", r=2, target_modules=["q_proj"]))


@pytest.mark.parametrize(
    ("make", "kind"),
    [
        (lambda: None, "NoneType"),
        (lambda: 3, "int"),
        (lambda: LlamaConfig(), "LlamaConfig"),
        (lambda: small_llama().state_dict(), "OrderedDict"),
        (lambda: nn.Linear(2, 2), "Linear"),
        (lambda: LlamaForCausalLM, "type"),
    ],
)
def test_an_object_that_is_no_model_is_refused_by_its_type(make, kind):
    with pytest.raises(
        TypeError, match=f"retrofit takes a model, a directory or a Hub id, got an object of type {kind}\\."
    ):
        retrofit(make())
    with pytest.raises(TypeError, match=f"retrofit takes a model, got an object of type {kind}\\."):
        retrofit_part(make())


@pytest.mark.parametrize("wrap", [torch.compile, nn.DataParallel, nn.Sequential])
@pytest.mark.parametrize("function", [retrofit, retrofit_part])
def test_a_wrapped_model_is_refused_by_the_type_of_its_wrapper(wrap, function):
    wrapped = wrap(small_llama())
    message = f"got an object of type {type(wrapped).__name__}, which wraps a model. Give that LlamaForCausalLM itself"
    with pytest.raises(TypeError, match=message):
        function(wrapped)


def test_a_model_with_a_compiled_layer_is_refused():
    model = small_llama()
    model.model.layers[1] = torch.compile(model.model.layers[1])
    with pytest.raises(ValueError, match=r"`model\.layers\.1` of the model is compiled\. Retrofit the model first"):
        retrofit(model)


@pytest.mark.parametrize("function", [retrofit, retrofit_part])
def test_a_model_with_adapters_is_refused_until_they_are_merged(function, tmp_path):
    peft_model = adapted()
    peft_model.save_pretrained(tmp_path)
    loaded = small_llama()
    loaded.load_adapter(tmp_path)
    from_files = r"PeftModel\.from_pretrained\(BASE, ADAPTER\)"
    for model, remedy in (
        (peft_model, "model"),
        (torch.compile(peft_model), "model"),
        (nn.DataParallel(peft_model), from_files),
        (peft_model.base_model.model, from_files),
        (loaded, from_files),
    ):
        kind, layer = type(model).__name__, r"model\.layers\.0\.self_attn\.q_proj"
        message = rf"the {kind} has adapters inside, such as `{layer}`\. Merge .* `{remedy}\.merge_and_unload"
        with pytest.raises(ValueError, match=message):
            function(model)
    assert isinstance(function(peft_model.merge_and_unload()), AttnResLlamaForCausalLM)


def test_the_directory_of_an_adapter_and_the_folder_of_its_run_are_refused(tmp_path):
    adapted().save_pretrained(tmp_path / "adapter")
    with pytest.raises(ValueError, match=r"adapter is an adapter, not a model .*\. Merge it first"):
        retrofit(tmp_path / "adapter")
    with pytest.raises(FileNotFoundError, match=r"holds no model, only the adapter .*adapter\. Merge it first"):
        retrofit(tmp_path)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"block_size": 2, "full": True}, "block_size and full"),
        ({"block_size": 2, "num_blocks": 2}, "block_size and num_blocks"),
        ({"block_size": 0}, "`attn_res_block_size` is 0"),
        ({"num_blocks": -1}, "`num_blocks` is -1"),
        ({"num_blocks": 2.5}, "`num_blocks` is 2.5, but must be an integer >= 1"),
        ({"num_blocks": "4"}, "`num_blocks` is '4', but must be an integer >= 1"),
        (
            {"blocks": 4},
            "`blocks` .4. is no option .*'attn_res'. Its options: block_size, scale, num_blocks, full, attn_res_block_",
        ),
        ({"scale": "max"}, "`attn_res_scale` is 'max'.*'mean', 'sum'"),
    ],
)
def test_bad_arguments_are_named(kimi, arguments, message):
    with pytest.raises(ValueError, match=message):
        retrofit(kimi(), **arguments)
