"""Every residual connection on two backbones: generation, saving, training, dtypes and records."""

import pytest
import torch
from accelerate import cpu_offload
from transformers import AutoConfig, AutoModelForCausalLM

import attnres
from attnres.residual_attnres import residual_tensors

from .. import forks
from ..cases import each_once
from .connections import (
    BACKBONES,
    FORMS,
    assert_same_gradients,
    build,
    build_start,
    difference,
    fields_of,
    gradients,
    loss_of,
)

# Every registered connection. Other files test the plain forms of `attn_res` and `standard`.
CONNECTIONS = [*(name for name in attnres.CONNECTIONS if name not in ("attn_res", "standard")), *FORMS]
RETROFITS = [
    name for name in CONNECTIONS if attnres.CONNECTIONS[fields_of(name)["residual_connection"]].retrofit is not None
]
# One connection of each kind of state.
QUICK = ("denseformer", "mhc", "attn_res, gated")


every_connection = pytest.mark.parametrize("connection", CONNECTIONS)


@pytest.mark.parametrize(
    ("case", "connection", "options"),
    [(case, name, options) for case in BACKBONES for name, options in each_once(QUICK, [{}, {"num_beams": 3}])],
)
def test_generation_is_the_same_with_and_without_a_cache(backbones, case, connection, options):
    model, token_ids = build(backbones, case, connection), backbones.token_ids()
    options = options | {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False}
    generated = [model.generate(token_ids, use_cache=use_cache, **options) for use_cache in (True, False)]
    assert generated[0].shape == (2, 17)
    assert torch.equal(*generated)


@torch.no_grad()
@every_connection
def test_a_saved_model_loads_back_bit_for_bit(backbones, connection, tmp_path):
    model, token_ids = build(backbones, "llama", connection), backbones.token_ids()
    model.save_pretrained(tmp_path, max_shard_size="40KB")
    loaded, report = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert type(loaded) is type(model) and not any(report.values())
    assert fields_of(connection).items() <= loaded.config.to_dict().items()
    assert AutoConfig.from_pretrained(tmp_path).to_dict() == loaded.config.to_dict()
    assert torch.equal(loaded(token_ids).logits, model(token_ids).logits)


@pytest.mark.slow
def test_the_code_beside_the_weights_gives_the_same_without_the_package(backbones, run, tmp_path):
    models = {
        f"{case}-{connection}": build(backbones, case, connection)
        for case in BACKBONES
        for connection in (CONNECTIONS if case == BACKBONES[0] else ["mhc"])
    }
    models["values"] = build(backbones, "llama", "mhc", value_residual="half")
    folder, token_ids = tmp_path / "models", backbones.token_ids()
    for name, model in models.items():
        model.save_pretrained(folder / name)
    torch.save(token_ids, folder / "ids.pt")
    run("remote_backbones_session.py", folder, tmp_path / "seen.pt")
    seen = torch.load(tmp_path / "seen.pt")
    assert seen["attnres_modules"] == []
    for name, model in models.items():
        there = seen["models"][name]
        with torch.no_grad():
            expected = model(token_ids, output_hidden_states=True)
        assert there["class"][0].startswith("transformers_modules.") and there["report"] == {}
        for logits in (there["logits"], there["again"]):
            # Without the package, delta attention has another form; the difference depends on the processor.
            assert difference(logits, expected.logits) < 1e-4, name
        assert len(there["hidden_states"]) == len(expected.hidden_states)
        generated = model.generate(token_ids, max_new_tokens=5, do_sample=False, eos_token_id=None)
        assert torch.equal(there["generated"], generated)
        with torch.no_grad():
            again = AutoModelForCausalLM.from_pretrained(folder / name / "again")(token_ids).logits
        assert torch.equal(again, expected.logits)


@pytest.mark.parametrize(
    ("connection", "value_residual", "use_reentrant"),
    each_once(["standard", "attn_res", "denseformer", "mhc"], [None, None, "half", "half"], [False, True]),
)
def test_checkpointing_gives_the_same_gradients_of_adapters_that_follow_layers_by_hooks(
    backbones, connection, value_residual, use_reentrant
):
    """PEFT's aLoRA removes its hooks in a full backward hook of each layer, which must run after its backward pass."""
    peft = pytest.importorskip("peft")
    token_ids, found = backbones.token_ids(), []
    for checkpointing in (False, True):
        model = build(backbones, "llama", connection, value_residual=value_residual).train()
        config = peft.LoraConfig(
            task_type="CAUSAL_LM",
            target_modules=["q_proj", "v_proj"],
            alora_invocation_tokens=token_ids[0, 4:6].tolist(),
            init_lora_weights=False,  # otherwise half of the gradients are zero
        )
        torch.manual_seed(0)
        model = peft.get_peft_model(model, config)
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
            model.enable_input_require_grads()  # else the first layer has no input with a gradient
        found.append(gradients(model, token_ids))
    plain, checkpointed = found
    assert all(gradient.any() for gradient in plain.values())
    assert_same_gradients(checkpointed, plain, 1e-5)


@pytest.mark.parametrize(("connection", "use_reentrant"), each_once(CONNECTIONS, [True, False]))
def test_checkpointing_gives_the_same_gradients(backbones, connection, use_reentrant):
    model, token_ids = build(backbones, "llama", connection).train(), backbones.token_ids()
    expected = gradients(model, token_ids)
    assert expected.keys() == dict(model.named_parameters()).keys()
    # The first sublayer has one source, and the softmax over one source is constant.
    first = "model.layers.0.self_attention_res_" if connection in FORMS else "none"
    assert all(expected[name].abs().max() > 1e-6 for name in residual_tensors(model) if not name.startswith(first))
    model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
    calls = []
    for layer in model.model.layers:
        layer.mlp.register_forward_pre_hook(lambda *_: calls.append(1))
    assert_same_gradients(gradients(model, token_ids), expected, 1e-5)
    assert len(calls) == 2 * len(model.model.layers)  # every layer ran twice


@pytest.mark.parametrize(("connection", "how"), each_once(CONNECTIONS, ["bfloat16", "autocast"]))
def test_loss_and_gradients_in_half_precision_are_about_the_same(backbones, connection, how):
    model, token_ids = build(backbones, "llama", connection).train(), backbones.token_ids()
    expected = loss_of(model, token_ids).detach()
    wide = gradients(model, token_ids)
    if how == "bfloat16":
        model.to(torch.bfloat16)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=how == "autocast"):
        found = gradients(model, token_ids)
        loss = loss_of(model, token_ids).float()
    # Norms or gates keep these streams from growing with depth, so each output and its rounding weigh more.
    amplifies = connection not in RETROFITS
    torch.testing.assert_close(loss.detach(), expected, rtol=0.1 if amplifies else 0.05, atol=0)
    assert found.keys() == wide.keys()
    for name, gradient in found.items():
        assert gradient.isfinite().all() and gradient.dtype is model.get_parameter(name).dtype, name
    if not amplifies:
        own = residual_tensors(model)
        narrow, expected = (torch.cat([of[name].float().flatten() for name in own]) for of in (found, wide))
        # The similarity depends on how weights round: 0.89 for one model and text, above 0.98 for the others.
        assert torch.cosine_similarity(narrow, expected, dim=0) > 0.85


@torch.no_grad()
@every_connection
def test_hidden_states_are_the_inputs_of_the_layers_and_the_normed_output(backbones, connection):
    model, token_ids, inputs = build(backbones, "llama", connection), backbones.token_ids(), []
    if model.config.connection.takes_norm:  # what a read returns is normed
        for layer in model.model.layers:
            layer.self_attn.register_forward_pre_hook(
                lambda _, args, kwargs: inputs.append(args[0] if args else kwargs["hidden_states"]), with_kwargs=True
            )
    else:
        for layer in model.model.layers:
            layer.input_layernorm.register_forward_pre_hook(lambda _, args: inputs.append(args[0]))
    model.model.norm.register_forward_pre_hook(lambda _, args: inputs.append(args[0]))
    outputs = model(token_ids, output_hidden_states=True)
    inputs = inputs[: len(model.model.layers) + 1]
    assert len(outputs.hidden_states) == len(inputs)
    assert all(map(torch.equal, outputs.hidden_states[:-1], inputs[:-1]))
    assert torch.equal(outputs.hidden_states[-1], model.model.norm(inputs[-1]))
    assert torch.equal(outputs.logits, model(token_ids).logits)


@torch.no_grad()
@pytest.mark.parametrize(("connection", "dtype"), each_once(RETROFITS, [torch.bfloat16, torch.float64]))
def test_a_model_made_under_another_default_dtype_starts_as_the_standard_model(backbones, connection, dtype):
    logits = []
    for name in (connection, "standard"):
        config = backbones.member_config("llama", **fields_of(name))
        torch.set_default_dtype(dtype)
        try:
            model = AutoModelForCausalLM.from_config(config)
        finally:
            torch.set_default_dtype(torch.float32)
        own = torch.promote_types(dtype, torch.float32) if config.connection.float32 else dtype
        assert {tensor.dtype for tensor in residual_tensors(model).values()} <= {own}
        model.load_state_dict(backbones.build("llama").state_dict(), strict=False)
        logits.append(model.float().eval()(backbones.token_ids()).logits)
    # Sums of blocks, and of streams with different gains, are rounded in another order.
    assert difference(*logits) < (1e-5 if connection in (*FORMS, "gated_residual") else 1e-6)


@every_connection
def test_a_model_materialised_from_the_meta_device_has_its_initial_values(backbones, connection):
    expected = build_start(backbones, "llama", connection)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(backbones.member_config("llama", **fields_of(connection)))
    assert {tensor.device.type for tensor in model.parameters()} == {"meta"}
    model.to_empty(device="cpu")
    with torch.no_grad():
        for tensor in model.parameters():
            tensor.fill_(torch.nan)
    model.init_weights()
    start = residual_tensors(expected)
    for name, tensor in residual_tensors(model).items():
        if tensor.ndim == 2 and start[name].any():  # drawn at random
            rel = 4 * tensor.numel() ** -0.5  # two deviations of n numbers differ by about n^(-1/2)
            assert (tensor.std() / start[name].std()).item() == pytest.approx(1, rel=max(rel, 0.1)), name
        else:
            assert torch.equal(tensor, start[name]), name


@torch.no_grad()
@every_connection
def test_a_connection_reads_its_tensors_only_when_it_is_called(backbones, connection):
    """Offloading and FSDP2 hold the tensors of a module only during its call."""
    model, token_ids = build(backbones, "llama", connection), backbones.token_ids()
    expected = model(token_ids).logits
    assert torch.equal(cpu_offload(model)(token_ids).logits, expected)


COMPILE = """
import sys
import torch
from transformers import AutoModelForCausalLM
import attnres

model = AutoModelForCausalLM.from_pretrained(sys.argv[1], attn_implementation="eager")
token_ids = torch.load(sys.argv[2])
compiled = torch.compile(model, fullgraph=True, backend=sys.argv[4])
with torch.set_grad_enabled(sys.argv[3] == "training"):
    logits = compiled(token_ids, use_cache=False).logits  # the first call of the process
    expected = model(token_ids, use_cache=False).logits
assert (logits - expected).abs().max() < 1e-5 * expected.abs().max()
if sys.argv[3] == "training":
    for result in (logits, expected):
        result.square().sum().backward()
        found = {name: p.grad for name, p in model.named_parameters()}
        if result is logits:
            first = found
            model.zero_grad()
    rounding = 1e-5 * max(gradient.abs().max() for gradient in found.values())
    for name, gradient in found.items():
        assert (gradient - first[name]).abs().max() <= 1e-3 * gradient.abs().max() + rounding, name
"""


# Connections of PyTorch's plain operations. Their backward pass is not traced too, which takes as long again.
FORWARD_ONLY = (
    *("denseformer", "residual_scalars", "scaled", "laurel", "frac_connections", "highway", "post_norm"),
    *("hyper_connections", "identity_hc", "mhc_lite", "gated_residual", "attn_res, by head", "attn_res, static"),
)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("connection", "case", "mode"),
    [
        *((connection, "llama", "training") for connection in ("attn_res", *CONNECTIONS)),
        ("attn_res", "kimi_linear", "inference"),
    ],
)
def test_the_first_call_of_a_process_may_be_compiled(backbones, tmp_path, case, connection, mode):
    fields = {"num_hidden_layers": 1, "hidden_size": 256}  # two sublayers and the output
    if case == "kimi_linear":
        fields |= {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]}
    build(backbones, case, connection, **fields).save_pretrained(tmp_path / "model")
    torch.save(backbones.token_ids(), tmp_path / "ids.pt")
    backend = "eager" if connection in FORWARD_ONLY else "aot_eager"
    done = forks.run("-c", COMPILE, tmp_path / "model", tmp_path / "ids.pt", mode, backend)
    assert done.returncode == 0, done.stderr[-4000:]


@torch.no_grad()
@every_connection
def test_a_hook_may_replace_an_output_by_a_mean_that_broadcasts(backbones, connection):
    model, token_ids, logits = build(backbones, "llama", connection), backbones.token_ids(), []
    for shape in (lambda mean, _: mean, lambda mean, output: mean.expand_as(output)):
        hook = model.model.layers[1].mlp.register_forward_hook(
            lambda module, args, output: shape(output.mean((0, 1), keepdim=True), output)  # noqa: B023
        )
        logits.append(model(token_ids).logits)
        hook.remove()
    assert torch.equal(*logits)
    assert not torch.equal(logits[0], model(token_ids).logits)
