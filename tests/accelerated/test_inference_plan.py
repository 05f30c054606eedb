"""A pass without gradients checks the model once for all its reads, and computes the same as its connections."""

from collections.abc import Callable
from copy import deepcopy

import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from attnres.accelerated import phases
from attnres.accelerated.numba import IMPLEMENTATION, call, support
from attnres.accelerated.numba.plan import CpuPlan
from attnres.attn_res_attnres import AttnRes
from attnres.kimi_linear_configuration_attnres import AttnResConfig
from attnres.residual_attnres import ResidualNorm

pytestmark = [pytest.mark.usefixtures("cpu_kernels")]

Reads = list[tuple[AttnRes, ResidualNorm, nn.Module | None]]
WIDTH = 48


def decoder(
    sublayers: int = 9, block_size: int = 1, scale: str = "mean", norms: bool = True, width: int = WIDTH
) -> Reads:
    """Return the connection, key norm and norm of each sublayer of a decoder, and last those of its output."""
    torch.manual_seed(0)
    config = AttnResConfig(hidden_size=width, attn_res_block_size=block_size, attn_res_scale=scale)
    reads = []
    for sublayer in range(sublayers + 1):
        connection, key_norm = AttnRes(config, sublayer), ResidualNorm(width)
        nn.init.normal_(connection.weight)
        nn.init.normal_(key_norm.weight, 1, 0.3)
        norm = LlamaRMSNorm(width, 1e-5) if norms and sublayer < sublayers else None
        if norm is not None:
            nn.init.normal_(norm.weight, 1, 0.3)
        reads.append((connection, key_norm, norm))
    return reads


def in_dtype(reads: Reads, dtype: torch.dtype) -> Reads:
    return [tuple(module if module is None else module.to(dtype) for module in read) for read in deepcopy(reads)]


def check_pass(reads: Reads, embedding: Tensor) -> None:
    """Check that each read of a plan, with the norm after it, equals calling the connection and the norm."""
    plan, state = IMPLEMENTATION.inference_plan(reads), embedding
    for connection, key_norm, norm in reads:
        h, is_normed, _ = plan.read(connection, state)
        expected = connection(state, key_norm())[0]
        assert is_normed == (norm is not None)
        torch.testing.assert_close(h, norm(expected) if is_normed else expected, rtol=1e-4, atol=1e-4)
        state = connection.write(state, (expected * 2).sin())


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tokens", [1, 40])
@pytest.mark.parametrize(("block_size", "scale"), [(1, "mean"), (3, "sum"), (4, "mean")])
def test_without_norms_a_plan_computes_the_same_bits_as_single_reads(block_size, scale, tokens, dtype):
    reads = in_dtype(decoder(block_size=block_size, scale=scale, norms=False), dtype)
    embedding = torch.randn(2, tokens, WIDTH).to(dtype)
    plan, state = IMPLEMENTATION.inference_plan(reads), embedding
    for connection, key_norm, _ in reads:
        h, is_normed, _ = plan.read(connection, state)
        sources = state if isinstance(state, tuple) else (state,)
        query = connection.weight[0].float() * key_norm.weight.float()
        expected, _, _ = IMPLEMENTATION.run(query, sources, connection.eps, scale == "sum")
        assert torch.equal(h, expected) and not is_normed
        state = connection.write(state, (h * 2).sin())


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("width", [7, 64, 300, 1024])
def test_a_norm_computed_with_a_read_equals_its_module(dtype, width):
    # Both round in the same places, but the loops sum the squares in another order than PyTorch. This moves float32 by
    # some units in the last place. It moves bfloat16 where it changes a rounding, in about one of 100,000 numbers, by
    # one unit before the weight and one after it.
    reads = in_dtype(decoder(width=width), dtype)
    plan, state = IMPLEMENTATION.inference_plan(reads), torch.randn(2, 30, width).to(dtype)
    for connection, key_norm, norm in reads[:-1]:
        normed, is_normed, _ = plan.read(connection, state)
        sources = state if isinstance(state, tuple) else (state,)
        query = connection.weight[0].float() * key_norm.weight.float()
        read, _, _ = IMPLEMENTATION.run(query, sources, connection.eps, False)
        expected = norm(read)
        assert is_normed and normed.dtype is dtype
        if dtype == torch.float32:
            torch.testing.assert_close(normed, expected, rtol=1e-6, atol=0)
        else:
            assert (normed != expected).float().mean() < 1e-3
            torch.testing.assert_close(normed, expected, rtol=2 * 2**-7, atol=0)
        state = connection.write(state, (normed * 2).sin())


def watch(module: nn.Module) -> None:
    module.register_forward_hook(lambda *args: None)


def watch_before(module: nn.Module) -> None:
    module.register_forward_pre_hook(lambda *args: None)


def replace_forward(module: nn.Module) -> None:
    module.forward = type(module).forward.__get__(module)


def to_meta(module: nn.Module) -> None:
    module.to("meta")


def widen(module: nn.Module) -> None:
    module.weight = nn.Parameter(torch.zeros(*module.weight.shape[:-1], WIDTH + 1))


def add_row(module: nn.Module) -> None:
    module.weight = nn.Parameter(torch.zeros(2, WIDTH))


def use_a_plain_tensor(module: nn.Module) -> None:
    del module._parameters["weight"]
    module.weight = torch.zeros(WIDTH)


@torch.no_grad()
@pytest.mark.parametrize("place", [0, 4, -1])
@pytest.mark.parametrize("part", [0, 1], ids=["connection", "key norm"])
@pytest.mark.parametrize(
    "change",
    [watch, watch_before, replace_forward, nn.Module.compile, to_meta, widen, add_row, use_a_plain_tensor],
)
def test_there_is_no_plan_if_a_connection_or_key_norm_does_more_than_its_class(place, part, change):
    reads = decoder()
    assert IMPLEMENTATION.inference_plan(reads) is not None
    change(reads[place][part])
    assert IMPLEMENTATION.inference_plan(reads) is None


@torch.no_grad()
@pytest.mark.parametrize(("of", "name"), [(AttnRes, "forward"), (AttnRes, "write"), (ResidualNorm, "forward")])
def test_there_is_no_plan_if_a_class_is_patched(monkeypatch, of, name):
    monkeypatch.setattr(of, name, lambda self, *args: torch.ones(1))
    assert IMPLEMENTATION.inference_plan(decoder()) is None


@torch.no_grad()
@pytest.mark.parametrize("change", ["watched", "replaced", "patched", "other dtype", "other kind"])
def test_a_norm_that_does_more_than_its_class_is_left_to_the_model(monkeypatch, change):
    reads = decoder()
    norm = reads[4][2]
    if change == "watched":
        watch(norm)
    elif change == "replaced":
        replace_forward(norm)
    elif change == "patched":
        monkeypatch.setattr(LlamaRMSNorm, "forward", lambda self, x: x)
    elif change == "other dtype":
        norm.bfloat16()
    else:
        reads[4] = (*reads[4][:2], nn.RMSNorm(WIDTH))
    plan, state = IMPLEMENTATION.inference_plan(reads), torch.randn(2, 3, WIDTH)
    seen = []
    for connection, _, _ in reads[:-1]:
        h, is_normed, _ = plan.read(connection, state)
        seen.append(is_normed)
        state = connection.write(state, h)
    assert seen == [change != "patched" and i != 4 for i in range(9)]


def test_there_is_a_plan_only_without_gradients_and_without_hooks_on_all_modules():
    reads = decoder()
    assert IMPLEMENTATION.inference_plan(reads) is None
    with torch.no_grad():
        plan = IMPLEMENTATION.inference_plan(reads)
        with register_module_forward_hook(lambda *args: None):
            assert IMPLEMENTATION.inference_plan(reads) is None
    h, is_normed, _ = plan.read(reads[0][0], torch.randn(2, 3, WIDTH))  # gradients are enabled in the middle of a pass
    assert h.requires_grad and not is_normed


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.float16, torch.float64])
def test_sources_of_other_dtypes_are_left_to_the_connections(dtype):
    reads = in_dtype(decoder(), dtype)
    h, is_normed, _ = IMPLEMENTATION.inference_plan(reads).read(reads[0][0], torch.randn(2, 3, WIDTH).to(dtype))
    assert h.dtype is dtype and not is_normed


@torch.no_grad()
@pytest.mark.parametrize("has_phases", [False, True])
@pytest.mark.parametrize(
    "change",
    [lambda source: source.mT.contiguous().mT, lambda source: source.double(), lambda source: source[:, ::2]],
    ids=["not contiguous", "other dtype", "fewer tokens"],
)
def test_each_read_checks_all_its_sources(change: Callable[[Tensor], Tensor], has_phases, monkeypatch):
    """Sources may change in the middle of a pass. No decoder of the family does this, but a user's may."""
    if has_phases:
        monkeypatch.setattr(phases, "_CACHED", 0)
    reads = decoder(norms=False)
    plan, sources = IMPLEMENTATION.inference_plan(reads), (torch.randn(2, 6, WIDTH),)
    for connection, key_norm, _ in reads:
        if len(sources) == 6:  # with phases, this lies within a group whose phase one has read four of them
            sources = tuple(change(source) for source in sources)
        expected, _, _ = connection(sources, key_norm())
        torch.testing.assert_close(plan.read(connection, sources)[0], expected)
        sources = *sources, torch.randn_like(sources[0])


@torch.no_grad()
@pytest.mark.parametrize("shape, is_read", [((2, 1), True), ((2, 3), False), ((1, 16), False)])
def test_of_small_sources_the_loops_read_one_token_and_the_connections_several(shape, is_read, monkeypatch):
    monkeypatch.setattr(support, "_MANY", 1 << 15)
    reads, embedding = decoder(), torch.randn(*shape, WIDTH)
    h, is_normed, _ = IMPLEMENTATION.inference_plan(reads).read(reads[0][0], embedding)
    assert is_normed is is_read
    torch.testing.assert_close(h, reads[0][2](embedding) if is_normed else embedding)


def other_numbers(source: Tensor) -> None:
    source.mul_(-3)


def other_memory(source: Tensor) -> None:
    source.set_(torch.randn(source.shape))


def other_data(source: Tensor) -> None:
    source.data = torch.randn(source.shape)


@torch.no_grad()
@pytest.mark.parametrize("has_phases", [False, True])
@pytest.mark.parametrize("change", [other_numbers, other_memory, other_data])
@pytest.mark.parametrize("which", [0, -1])
def test_a_source_that_changes_between_two_reads_is_read_again(change, has_phases, which, monkeypatch):
    if has_phases:
        monkeypatch.setattr(phases, "_CACHED", 0)
    reads = decoder(norms=False)
    plan, sources = IMPLEMENTATION.inference_plan(reads), (torch.randn(2, 6, WIDTH),)
    for connection, key_norm, _ in reads:
        if len(sources) == 6:
            change(sources[which])
        expected, _, _ = connection(sources, key_norm())
        torch.testing.assert_close(plan.read(connection, sources)[0], expected)
        sources = *sources, torch.randn_like(sources[0])


@torch.no_grad()
@pytest.mark.parametrize("shape", [(1, 1), (2, 8), (2, 20)], ids=str)
def test_a_result_stays_as_it_is_during_later_reads_and_passes(shape):
    reads, kept = decoder(), []
    for _ in range(2):
        plan, state = IMPLEMENTATION.inference_plan(reads), torch.randn(*shape, WIDTH)
        for connection, _, _ in (*reads, reads[3], reads[3]):  # the same place may be read again
            h = plan.read(connection, state)[0]
            kept.append((h, h.clone()))
            state = *(state if isinstance(state, tuple) else (state,)), torch.randn(*shape, WIDTH)
    assert all(torch.equal(h, before) for h, before in kept)
    assert len({h.data_ptr() for h, _ in kept}) == len(kept)


@torch.no_grad()
@pytest.mark.parametrize("has_phases", [False, True])
def test_a_source_with_freed_memory_is_left_to_the_connection(has_phases, monkeypatch):
    if has_phases:
        monkeypatch.setattr(phases, "_CACHED", 0)
    addresses = []
    monkeypatch.setattr(call.engine, "run", lambda *args: addresses.append(args))
    reads = decoder(norms=False)
    plan, sources = IMPLEMENTATION.inference_plan(reads), (torch.randn(2, 6, WIDTH),)
    for connection, _, _ in reads[:5]:
        plan.read(connection, sources)
        sources = *sources, torch.randn_like(sources[0])
    assert addresses
    addresses.clear()
    sources[1].untyped_storage().resize_(0)
    # The real connection might raise, so this one only reports the call.
    monkeypatch.setattr(AttnRes, "forward", lambda self, *args: ("called",))
    assert plan.read(reads[5][0], sources)[:2] == ("called", False) and not addresses


@torch.no_grad()
def test_a_source_of_another_shape_is_left_to_the_connection(monkeypatch):
    reads = decoder(norms=False)
    plan = IMPLEMENTATION.inference_plan(reads)
    whole = torch.randn(2, 6, WIDTH)
    monkeypatch.setattr(AttnRes, "forward", lambda self, *args: ("called",))
    for odd in (whole.mean((0, 1), keepdim=True), whole[:, :3], whole[..., :9]):
        assert plan.read(reads[1][0], (whole, odd))[:2] == ("called", False)


@pytest.fixture
def groups(monkeypatch) -> list[tuple[int, int]]:
    """Return a list that gets the numbers of queries and sources of each phase one."""
    seen, begin = [], CpuPlan._phase_one

    def spy(self, queries, eps, sources):
        seen.append((len(queries), len(sources.addresses)))
        return begin(self, queries, eps, sources)

    monkeypatch.setattr(CpuPlan, "_phase_one", spy)
    monkeypatch.setattr(phases, "_CACHED", 0)
    return seen


@torch.no_grad()
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("scale", ["mean", "sum"])
@pytest.mark.parametrize("block_size", [1, 2, 3, 8])
@pytest.mark.parametrize("cost", [0.0, 1.9])
def test_in_two_phases_a_pass_computes_the_same(groups, monkeypatch, block_size, scale, cost, mode):
    monkeypatch.setattr(phases, "_COST_OF_SUM", cost)
    reads = decoder(sublayers=16, block_size=block_size, scale=scale)
    with mode():
        check_pass(reads, torch.randn(2, 20, WIDTH))
    assert bool(groups) == (cost == 0.0 or block_size < 8)


@torch.no_grad()
def test_full_attention_residuals_are_read_in_groups_of_which_the_last_includes_the_output(groups):
    reads = decoder(sublayers=16)
    check_pass(reads, torch.randn(2, 20, WIDTH))
    # The first three of 17 reads have too few sources for a group.
    assert groups == [(3, 4), (4, 7), (5, 11), (2, 16)]


@torch.no_grad()
def test_sources_that_fit_into_the_caches_are_read_in_one_phase(groups, monkeypatch):
    monkeypatch.setattr(phases, "_CACHED", 4 << 20)
    reads = decoder(sublayers=16)
    check_pass(reads, torch.randn(2, 20, WIDTH))
    assert groups == []


@torch.no_grad()
def test_a_pass_may_end_early():
    reads = decoder(sublayers=8)
    plan, state = IMPLEMENTATION.inference_plan(reads), torch.randn(2, 3, WIDTH)
    for connection, key_norm, _ in (*reads[:5], reads[-1]):
        expected = connection(state, key_norm())[0]
        state = connection.write(state, (expected * 2).sin())
    h, _, _ = plan.read(reads[-1][0], state)
    torch.testing.assert_close(h, reads[-1][0](state, reads[-1][1]())[0], rtol=1e-5, atol=1e-5)
