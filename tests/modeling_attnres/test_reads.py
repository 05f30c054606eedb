"""A pass without gradients finds out once what holds for all its reads, and computes what its connections would."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook

from attnres import AttnResForCausalLM, depth_attention, depth_attention_reference, two_phase_attnres
from attnres.configuration_attnres import AttnResConfig
from attnres.plain_attnres import is_untouched
from attnres.reads_attnres import Reads
from attnres.residual_attnres import AttnRes, ResidualNorm

TOKENS = torch.arange(3, 43).view(2, -1)

pytestmark = pytest.mark.usefixtures("cpu_kernels")


@pytest.fixture
def calls(monkeypatch) -> list[int]:
    """Fills with the sublayers whose connections are called."""
    seen, forward = [], AttnRes.forward

    def spy(self, *args):
        seen.append(self.sublayer)
        return forward(self, *args)

    monkeypatch.setattr(AttnRes, "forward", spy)
    return seen


def logits_and_next(model: AttnResForCausalLM) -> tuple[Tensor, Tensor]:
    """Of a prompt, and of one token after it."""
    outputs = model(TOKENS, use_cache=True)
    return outputs.logits, model(TOKENS[:, :1], past_key_values=outputs.past_key_values, use_cache=True).logits


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("block_size", [1, 3, 4])
@pytest.mark.parametrize("scale", ["mean", "sum"])
def test_a_pass_without_gradients_is_the_same_to_the_last_bit(vivid_model, calls, block_size, scale, dtype):
    model = vivid_model(attn_res_block_size=block_size, attn_res_scale=scale).to(dtype)
    expected = logits_and_next(model)
    assert len(calls) == 2 * (model.config.num_sublayers + 1)
    calls.clear()
    with torch.no_grad():
        actual = logits_and_next(model)
    assert calls == []
    for ours, right in zip(actual, expected):
        assert torch.equal(ours, right)


def record_nothing(*args) -> None: ...


def replace_forward(module: nn.Module) -> None:
    module.forward = type(module).forward.__get__(module)


@pytest.mark.parametrize("name", ["layers.1.mlp_res_proj", "layers.1.mlp_res_norm", "output_attn_res_norm"])
@pytest.mark.parametrize(
    "change",
    [
        lambda module: module.register_forward_hook(record_nothing),
        lambda module: module.register_forward_pre_hook(record_nothing),
        replace_forward,
    ],
)
@torch.no_grad()
def test_connections_that_do_more_than_their_class_are_called(vivid_model, calls, name, change):
    model = vivid_model()
    module = model.model.get_submodule(name)
    assert is_untouched(module)
    change(module)
    assert not is_untouched(module)
    model(TOKENS)
    assert calls == list(range(model.config.num_sublayers + 1))


@torch.no_grad()
def test_a_hook_on_all_modules_sees_the_connections(vivid_model):
    seen = []
    with register_module_forward_hook(lambda module, *args: seen.append(type(module))):
        vivid_model()(TOKENS)
    assert seen.count(AttnRes) == seen.count(ResidualNorm) > 0


@torch.no_grad()
def test_recording_calls_the_connections_and_leaves_no_trace(vivid_model, calls):
    model = vivid_model()
    recorded = model(TOKENS, output_depth_attentions=True, output_hidden_states=True)
    assert len(calls) == len(recorded.depth_attentions) == model.config.num_sublayers + 1
    calls.clear()
    torch.testing.assert_close(model(TOKENS).logits, recorded.logits, rtol=1e-4, atol=5e-4)
    assert calls == []


@torch.no_grad()
def test_what_kernels_do_not_serve_is_left_to_the_connections(vivid_model, calls):
    model = vivid_model().half()
    model(TOKENS)
    assert len(calls) == model.config.num_sublayers + 1


def connections(sublayers: int, width: int) -> list[tuple[AttnRes, ResidualNorm, None]]:
    torch.manual_seed(0)
    config = AttnResConfig(hidden_size=width, attn_res_block_size=1)
    found = []
    for sublayer in range(sublayers):
        connection, key_norm = AttnRes(config, sublayer), ResidualNorm(width, True)
        nn.init.normal_(connection.weight)
        nn.init.normal_(key_norm.weight, 1, 0.3)
        found.append((connection, key_norm, None))
    return found


@torch.no_grad()
@pytest.mark.parametrize("has_phases", [False, True])
@pytest.mark.parametrize(
    "change",
    [lambda source: source.mT.contiguous().mT, lambda source: source.double(), lambda source: source[:, ::2]],
    ids=["not contiguous", "other dtype", "fewer tokens"],
)
def test_each_read_looks_at_the_sources_that_are_new(change: Callable[[Tensor], Tensor], has_phases, monkeypatch):
    """Sources that change in the middle of a pass: no decoder of the family has them, and a user's may."""
    if has_phases:
        monkeypatch.setattr(two_phase_attnres, "_CACHED", 0)
    found = connections(9, 24)
    reads = Reads.of(found)
    sources = (torch.randn(2, 6, 24),)
    for connection, key_norm, _ in found:
        if len(sources) == 6:  # with phases, within the group of sublayers that reads four of them at once
            sources = tuple(change(source) for source in sources)
        expected, _, _ = connection(sources, key_norm())
        actual, is_normed = reads.read(connection, sources)
        torch.testing.assert_close(actual, expected)
        assert not is_normed
        sources = *sources, torch.randn_like(sources[0])


@torch.no_grad()
@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore::DeprecationWarning")
def test_a_traced_function_is_that_function_for_other_sources():
    query, sources = torch.randn(8), torch.randn(3, 5, 8)
    traced = torch.jit.trace(lambda *args: depth_attention(query, args), tuple(sources), check_trace=False)
    other = torch.randn(3, 5, 8)
    torch.testing.assert_close(traced(*other), depth_attention_reference(query, other.unbind()))
