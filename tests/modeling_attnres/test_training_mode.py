"""Checkpointing, mixed precision, frozen parts, DDP and `torch.compile` do not change the gradients."""

import copy
from collections.abc import Callable, Iterator

import pytest
import torch
import transformers
from packaging.version import Version
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointImpl, checkpoint_wrapper
from transformers.integrations import moe

from attnres import AttnResForCausalLM, depth_attention
from attnres.residual_attnres import residual_tensors

from ..cases import each_once

VARIANTS = {
    "full": {"attn_res_block_size": 1},
    "S=3": {"attn_res_block_size": 3, "attn_res_scale": "sum"},
    "standard": {"residual_connection": "standard"},
}


@pytest.fixture(params=VARIANTS)
def model(request, vivid_model) -> AttnResForCausalLM:
    """Return a model in training mode; without dropout, its function is that of eval mode."""
    return vivid_model(**VARIANTS[request.param]).train()


def loss_of(model: nn.Module, token_ids: Tensor, **kwargs) -> Tensor:
    return model(token_ids, labels=token_ids, use_cache=False, **kwargs).loss


def gradients(model: nn.Module, token_ids: Tensor, loss: Callable[..., Tensor] = loss_of) -> dict[str, Tensor]:
    """Return the gradient of every parameter that has one."""
    model.zero_grad(set_to_none=True)
    loss(model, token_ids).backward()
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters() if parameter.grad is not None}


def assert_same_gradients(actual: dict[str, Tensor], expected: dict[str, Tensor], relative: float = 1e-4) -> None:
    assert actual.keys() == expected.keys()
    for name, gradient in actual.items():
        tolerance = relative * expected[name].abs().max().item()
        torch.testing.assert_close(gradient, expected[name], rtol=0, atol=tolerance, msg=lambda text: f"{name}: {text}")  # noqa: B023


# ---- Gradient checkpointing


@pytest.mark.parametrize(("use_reentrant", "every_n_layers"), [(True, None), (False, 2)])
def test_checkpointing_gives_the_same_gradients(model, token_ids, use_reentrant, every_n_layers):
    if every_n_layers and Version(transformers.__version__) < Version("5.20"):
        pytest.skip("this release of transformers checkpoints every layer or none")
    expected = gradients(model, token_ids)
    assert all(
        gradient.abs().max() > 1e-5 for name, gradient in expected.items() if "layers.0.self_attention_res" not in name
    )
    chosen = {"every_n_layers": every_n_layers} if every_n_layers else {}
    model.gradient_checkpointing_enable({"use_reentrant": use_reentrant}, **chosen)
    assert model.is_gradient_checkpointing
    assert_same_gradients(gradients(model, token_ids), expected)
    model.gradient_checkpointing_disable()
    assert_same_gradients(gradients(model, token_ids), expected)


def gradients_in_wrappers(model: nn.Module, token_ids: Tensor, implementation: CheckpointImpl) -> dict[str, Tensor]:
    """Return the gradients of a copy whose layers are in PyTorch's wrapper, by the model's names."""
    model = copy.deepcopy(model)
    layers = [checkpoint_wrapper(layer, checkpoint_impl=implementation) for layer in model.model.layers]
    model.model.layers = nn.ModuleList(layers)
    with torch.no_grad():  # without gradients, nothing can be lost
        loss_of(model, token_ids)
    return {k.replace("_checkpoint_wrapped_module.", ""): v for k, v in gradients(model, token_ids).items()}


def test_wrappers_of_pytorch_give_the_same_gradients_or_are_refused(model, token_ids):
    expected = gradients(model, token_ids)
    assert_same_gradients(gradients_in_wrappers(model, token_ids, CheckpointImpl.NO_REENTRANT), expected)
    if model.config.residual_connection == "standard":
        assert_same_gradients(gradients_in_wrappers(model, token_ids, CheckpointImpl.REENTRANT), expected)
        return
    with pytest.raises(ValueError, match=r"in a reentrant `checkpoint_wrapper`.* use `CheckpointImpl.NO_REENTRANT`"):
        gradients_in_wrappers(model, token_ids, CheckpointImpl.REENTRANT)


@pytest.mark.slow
@pytest.mark.parametrize(("fields", "use_reentrant"), each_once([*VARIANTS.values()], [True, False]))
def test_checkpointing_lowers_peak_memory(vivid_model, peak_bytes, fields, use_reentrant):
    # Recomputation needs the memory of one layer at a time: of six layers, less than a third of the memory remains.
    layer_types = ["linear_attention"] * 5 + ["full_attention"]
    model = vivid_model(num_hidden_layers=6, layer_types=layer_types, **fields).train()
    token_ids = torch.arange(3, 67).reshape(1, 64)

    def step() -> None:
        loss_of(model, token_ids).backward()

    step()  # allocates the gradients
    plain = peak_bytes(step)
    model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
    assert peak_bytes(step) < 0.4 * plain


def test_checkpointing_saves_depth_states_and_nothing_inside_the_layers(model):
    """Between forward and backward, only parameters and each source of the depth state are saved, each source once."""
    token_ids = torch.arange(3, 67).reshape(1, 64)

    def saved_elements() -> int:
        saved: dict[int, int] = {}
        own = {tensor.untyped_storage().data_ptr() for tensor in model.state_dict().values()}

        def pack(tensor: Tensor) -> Tensor:
            if tensor.untyped_storage().data_ptr() not in own:
                saved[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes() // tensor.element_size()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            loss = loss_of(model, token_ids)
        loss.backward()
        return sum(saved.values())

    # 4 layers = 8 sublayers: at most 9 sources of 64 x 32, and the head: normed output, logits, log-probabilities.
    state, head = 9 * 64 * 32, 64 * (2 * 32 + 3 * 99)
    assert saved_elements() > 4 * (state + head)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    assert saved_elements() < 1.5 * (state + head)


# ---- Which parameters learn


def test_every_parameter_gets_a_gradient_and_the_first_query_a_zero_one(model, token_ids):
    found = gradients(model, token_ids)
    assert found.keys() == dict(model.named_parameters()).keys()
    assert all(gradient.isfinite().all() for gradient in found.values())
    for name in residual_tensors(model):
        # The first sublayer has one source, whose weight is one for any query.
        assert (found[name].abs().max() == 0) == ("layers.0.self_attention_res" in name)


@pytest.fixture
def process_group(tmp_path) -> Iterator[None]:
    """Start a process group of this process alone."""
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize("checkpointing", [False, True])
def test_ddp_finds_no_unused_parameter(vivid_model, token_ids, process_group, checkpointing):
    model = vivid_model(**VARIANTS["S=3"]).train()
    expected = gradients(model, token_ids)
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    parallel = nn.parallel.DistributedDataParallel(model)
    for _ in range(2):  # DDP reports an unused parameter in the second step
        parallel.zero_grad()
        loss_of(parallel, token_ids).backward()
    assert_same_gradients({name: parameter.grad for name, parameter in model.named_parameters()}, expected)


@pytest.mark.parametrize("checkpointing", [None, True, False], ids=["plain", "reentrant", "not reentrant"])
@pytest.mark.parametrize("trained", ["depth", "rest"])
def test_frozen_parameters_do_not_change_the_gradients_of_the_others(vivid_model, token_ids, trained, checkpointing):
    model = vivid_model(attn_res_block_size=3).train()
    depth = set(residual_tensors(model))
    expected = {
        name: gradient
        for name, gradient in gradients(model, token_ids).items()
        if (name in depth) == (trained == "depth")
    }
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name in expected)
    if checkpointing is not None:
        model.gradient_checkpointing_enable({"use_reentrant": checkpointing})
    assert_same_gradients(gradients(model, token_ids), expected)


def test_training_lowers_the_loss_and_moves_the_queries(vivid_model, token_ids):
    model = vivid_model(attn_res_block_size=3).train()
    queries = {name: tensor for name, tensor in residual_tensors(model).items() if "_proj" in name}
    for tensor in queries.values():
        nn.init.zeros_(tensor)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(10):
        losses.append(loss_of(model, token_ids))
        optimizer.zero_grad()
        losses[-1].backward()
        optimizer.step()
    assert losses[-1] < 0.5 * losses[0]
    moved = {name for name, tensor in queries.items() if tensor.abs().max() > 1e-3}
    assert moved == {name for name in queries if "layers.0.self_attention_res" not in name}


# ---- Mixed precision


@pytest.mark.parametrize("fields", VARIANTS.values(), ids=VARIANTS)
def test_bf16_autocast_trains_close_to_float32(tiny_model, token_ids, fields):
    def loss_under_autocast(model: nn.Module, token_ids: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            outputs = model(token_ids, labels=token_ids, use_cache=False)
        assert outputs.logits.dtype == torch.bfloat16
        return outputs.loss

    # Without experts, because gradients jump where rounding changes a token's expert.
    model = tiny_model(mlp_layer_types=["dense"] * 4, **fields).train()
    expected = gradients(model, token_ids)
    found = gradients(model, token_ids, loss_under_autocast)
    assert {gradient.dtype for gradient in found.values()} == {torch.float32}
    expected, found = (torch.cat([grads[name].flatten() for name in expected]) for grads in (expected, found))
    assert 0 < (found - expected).norm() < 0.1 * expected.norm()


@pytest.mark.parametrize("block_size", [1, 3])
def test_autocast_keeps_the_depth_state_as_wide_as_the_residual_stream(vivid_model, token_ids, block_size):
    dtypes = []
    for fields in ({"residual_connection": "standard"}, {"attn_res_block_size": block_size}):
        model = vivid_model(**fields)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            outputs = model(token_ids, output_hidden_states=True)
        dtypes.append([hidden.dtype for hidden in outputs.hidden_states])
    assert dtypes[0] == dtypes[1] == [torch.float32] * 5

    sources: list[Tensor] = []
    model.model.output_attn_res_proj.register_forward_pre_hook(lambda module, args: sources.extend(args[0]))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        model(token_ids)
    assert len(sources) == 1 + -(-8 // block_size)
    assert {source.dtype for source in sources} == {torch.float32}


def test_a_bf16_model_trains(model, token_ids):
    expected = loss_of(model, token_ids)
    model.to(torch.bfloat16)
    torch.testing.assert_close(loss_of(model, token_ids).float(), expected, rtol=0.03, atol=0)
    found, parameters = gradients(model, token_ids), dict(model.named_parameters())
    assert found.keys() == parameters.keys()
    assert all(found[name].isfinite().all() and found[name].dtype == parameters[name].dtype for name in found)


# ---- torch.compile


# Without delta attention, because its reference is a loop of 64 steps that takes long to trace.
QUICK_TO_TRACE = {"num_hidden_layers": 2, "layer_types": ["full_attention"] * 2, "attn_res_block_size": 3}
EVERY_LAYER = {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"], "attn_res_block_size": 3}


@pytest.fixture
def compiled() -> Iterator[Callable]:
    """Return `compiled(function, backend)`, which compiles to one graph; a graph break is an error."""
    torch._dynamo.reset()
    yield lambda function, backend: torch.compile(function, fullgraph=True, backend=backend)
    torch._dynamo.reset()


# Older versions choose the kernel of experts by values that a compiler cannot know.
compiles_experts = pytest.mark.skipif(
    not hasattr(moe, "_grouped_mm_fallback_backward_fake"),
    reason="this version of transformers cannot compile the gradients of its experts on a CPU",
)
COMPILATIONS = [
    pytest.param(QUICK_TO_TRACE, "inductor", id="MLA and experts, to machine code"),
    pytest.param(EVERY_LAYER, "aot_eager", id="KDA"),
]


@pytest.mark.slow
@compiles_experts
@pytest.mark.parametrize(("fields", "backend"), COMPILATIONS)
def test_training_step_compiles_to_one_graph_with_the_same_gradients(vivid_model, token_ids, compiled, fields, backend):
    model = vivid_model(**fields).train()
    expected = gradients(model, token_ids)
    assert_same_gradients(gradients(model, token_ids, compiled(loss_of, backend)), expected, 1e-3)


@pytest.mark.slow
@compiles_experts
def test_compiled_checkpointing_gives_the_same_gradients(vivid_model, token_ids, compiled):
    model = vivid_model(**QUICK_TO_TRACE).train()
    expected = gradients(model, token_ids)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    assert_same_gradients(gradients(model, token_ids, compiled(loss_of, "aot_eager")), expected, 1e-3)


@pytest.mark.parametrize(
    ("n", "scale", "learns"), [(1, "mean", True), (2, "sum", False), (3, "sum", True), (4, "mean", False)]
)
def test_depth_attention_compiles_for_any_number_of_sources(compiled, n, scale, learns):
    generator = torch.Generator().manual_seed(n)
    query, *sources = (torch.randn(*shape, 8, generator=generator) for shape in [(), *[(2, 3)] * n])
    query.requires_grad_(learns)
    options = {"scale": scale, "return_weights": True}
    with torch.set_grad_enabled(learns):
        expected = depth_attention(query, sources, torch.ones(8), **options)
        actual = compiled(depth_attention, "eager")(query, sources, torch.ones(8), **options)
    torch.testing.assert_close(actual, expected)
    assert [tensor.requires_grad for tensor in actual] == [learns, learns]


@pytest.mark.slow
@torch.no_grad()
def test_compiled_forward_follows_the_number_of_tokens(vivid_model, token_ids, compiled):
    model = vivid_model(**QUICK_TO_TRACE)
    compiled_model = compiled(model, "eager")
    for length in (11, 7, 5):
        logits = compiled_model(token_ids[:, :length]).logits
        torch.testing.assert_close(logits, model(token_ids[:, :length]).logits, rtol=0, atol=1e-4)
