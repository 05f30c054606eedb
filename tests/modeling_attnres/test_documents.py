"""Several documents in one row: the model computes the same for each document as for it alone."""

from collections.abc import Callable
from copy import deepcopy
from functools import partial
from itertools import product

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, DataCollatorWithFlattening, DynamicCache

from attnres import AttnResForCausalLM
from attnres.accelerated import delta_attention
from attnres.conversion import retrofit
from attnres.delta_attention_attnres import convolve

from ..caches import CACHE
from .rows import TOLERANCE, alone, error, of_travelled_code, refused

# One document is longer than a chunk of delta attention, one has one token, and borders split groups of four.
LENGTHS = (7, 1, 70, 3, 2)


@pytest.fixture(scope="module")
def model(vivid_model) -> AttnResForCausalLM:
    return vivid_model()


@pytest.fixture(scope="module")
def dense(vivid_model) -> AttnResForCausalLM:
    """Return a model without experts, because rounding can change their choice."""
    return vivid_model(mlp_layer_types=["dense"] * 4)


@pytest.fixture(scope="module")
def documents() -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(3, 99, (1, length), generator=generator) for length in LENGTHS]


@pytest.fixture(scope="module")
def row(documents) -> Tensor:
    return torch.cat(documents, 1)


POSITIONS = torch.cat([torch.arange(length) for length in LENGTHS]).unsqueeze(0)
BORDERS = torch.tensor([0, *LENGTHS]).cumsum(0)
NUMBERS = torch.repeat_interleave(torch.arange(len(LENGTHS)), torch.tensor(LENGTHS)).unsqueeze(0)
TOTAL = sum(LENGTHS)
SIGNS = {
    "position_ids": {"position_ids": POSITIONS},
    "cu_seq_lens_q": {"cu_seq_lens_q": BORDERS.int(), "max_length_q": 70},
    "cu_seq_lens_k": {"cu_seq_lens_k": BORDERS.int(), "max_length_k": 70},
    "cu_seqlens": {"cu_seqlens": BORDERS},
    "seq_idx": {"seq_idx": NUMBERS.int()},
    "position_ids, mask": {"position_ids": POSITIONS, "attention_mask": torch.ones(1, TOTAL, dtype=torch.long)},
    "seq_idx, mask": {"seq_idx": NUMBERS, "attention_mask": torch.ones(1, TOTAL, dtype=torch.long)},
}


@pytest.mark.parametrize("sign", SIGNS)
def test_each_sign_of_documents_keeps_them_apart(model, documents, row, sign):
    outputs = model(row, **SIGNS[sign])
    expected = alone(model, documents)
    assert error(outputs.logits, expected) < TOLERANCE
    assert outputs.get(CACHE) is None
    assert error(model(row).logits, expected) > 0.1, "documents do not matter here"


@pytest.mark.parametrize("sign", ["position_ids", "cu_seq_lens_q", "seq_idx", "seq_idx, mask"])
def test_documents_are_kept_apart_without_layers_of_linear_attention(vivid_model, documents, row, sign):
    model = vivid_model(layer_types=["full_attention"] * 4, mlp_layer_types=["dense"] * 4)
    assert error(model(row, **SIGNS[sign]).logits, alone(model, documents)) < TOLERANCE


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_documents_of_the_flattening_collator_are_kept_apart(model, documents, implementation):
    collator = DataCollatorWithFlattening(return_flash_attn_kwargs=True, return_seq_idx=True)
    batch = collator([{"input_ids": document[0].tolist()} for document in documents])
    labels = batch.pop("labels")
    assert set(batch) >= {"position_ids", "cu_seq_lens_q", "seq_idx"}
    model.set_attn_implementation(implementation)
    try:
        loss = model(**batch, labels=labels).loss
        losses = [
            model(document, labels=document).loss * (document.shape[1] - 1)
            for document in documents
            if len(document[0]) > 1
        ]
    finally:
        model.set_attn_implementation("sdpa")
    assert loss.item() == pytest.approx((sum(losses) / sum(length - 1 for length in LENGTHS)).item(), rel=1e-5)


def test_each_row_of_a_batch_has_separate_documents_and_padding_at_its_end_changes_nothing(model, documents, row):
    others = documents[::-1][:-1]
    filled = torch.cat([*others, torch.zeros(1, LENGTHS[0], dtype=torch.long)], 1)
    positions = torch.cat([*(torch.arange(document.shape[1]) for document in others), torch.zeros(LENGTHS[0])]).long()
    batch = {"input_ids": torch.cat([row, filled]), "position_ids": torch.stack([POSITIONS[0], positions])}
    mask = torch.ones(2, TOTAL, dtype=torch.long)
    mask[1, -LENGTHS[0] :] = 0
    for given in ({}, {"attention_mask": mask}):
        first, second = model(**batch, **given).logits.split(1)
        assert error(first, alone(model, documents)) < TOLERANCE
        assert error(second[:, : -LENGTHS[0]], alone(model, others)) < TOLERANCE


def gradients(model: AttnResForCausalLM, compute: Callable[[], Tensor]) -> dict[str, Tensor]:
    weights = torch.randn(1, TOTAL, model.config.vocab_size, generator=torch.Generator().manual_seed(2))
    model.zero_grad()
    (compute() * weights).sum().backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("is_travelled", [False, True], ids=["installed", "travelled"])
def test_gradients_equal_those_of_separate_documents_with_gradient_checkpointing_too(
    dense, documents, row, is_travelled
):
    model = of_travelled_code(dense) if is_travelled else dense
    expected = gradients(model, lambda: alone(model, documents))
    packed = partial(gradients, model, lambda: model(row, position_ids=POSITIONS).logits)
    for settings in (None, {"use_reentrant": False}, {"use_reentrant": True}):
        if settings is not None:
            model.train().gradient_checkpointing_enable(settings)
        try:
            found = packed()
        finally:
            model.eval().gradient_checkpointing_disable()
        assert set(found) == set(expected)
        largest = max(gradient.abs().max() for gradient in expected.values())
        for name, gradient in expected.items():
            assert (found[name] - gradient).abs().max() < 1e-4 * gradient.abs().max() + 1e-7 * largest, name


def test_the_travelled_code_keeps_documents_apart_too(model, documents, row):
    travelled = of_travelled_code(model)
    others = torch.cat([row, row.flip(1)])
    positions = torch.cat([POSITIONS, torch.cat([torch.arange(length) for length in LENGTHS[::-1]])[None]])
    first, second = travelled(others, position_ids=positions).logits.split(1)
    assert error(first, alone(travelled, documents)) < TOLERANCE
    assert error(second, alone(travelled, [document.flip(1) for document in documents[::-1]])) < TOLERANCE


def test_under_autocast_documents_do_not_see_each_other(dense, documents, row):
    """Another first document changes no bit of the logits after it."""
    other = row.clone()
    other[:, : LENGTHS[0]] = 3 + (row[:, : LENGTHS[0]] - 2) % 96
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        logits, changed = (dense(ids, position_ids=POSITIONS).logits for ids in (row, other))
    assert not torch.equal(logits[:, : LENGTHS[0]], changed[:, : LENGTHS[0]])
    assert torch.equal(logits[:, LENGTHS[0] :], changed[:, LENGTHS[0] :])


@pytest.fixture(scope="module")
def two_layers(vivid_model) -> AttnResForCausalLM:
    """Return a model with one layer of each kind, which takes half as long to trace."""
    return vivid_model(num_hidden_layers=2, layer_types=["linear_attention", "full_attention"])


@pytest.mark.slow
@pytest.mark.parametrize("sign", ["cu_seq_lens_q", "position_ids, mask"])
def test_a_compiled_graph_without_breaks_keeps_documents_apart(two_layers, documents, row, sign):
    torch._dynamo.reset()
    with torch.no_grad():
        compiled = torch.compile(two_layers, fullgraph=True, backend="eager")
        assert error(compiled(row, **SIGNS[sign]).logits, alone(two_layers, documents)) < TOLERANCE


@pytest.mark.parametrize("length", [22, 63, 64, 65, 129])
def test_a_token_changes_nothing_before_it(dense, length):
    ids = torch.randint(3, 99, (1, length), generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        before = dense(ids).logits
        for place in {1, 4, length // 2, length - 1}:
            changed = ids.clone()
            changed[0, place] = 3 + (ids[0, place] - 2) % 96
            after = dense(changed).logits
            assert torch.equal(before[:, :place], after[:, :place])
            assert not torch.equal(before[:, place:], after[:, place:])


@pytest.fixture(scope="module")
def ids() -> Tensor:
    return torch.randint(3, 99, (4, 20), generator=torch.Generator().manual_seed(4))


def test_position_ids_that_continue_from_a_cache_belong_to_the_same_document(model, ids):
    cache = DynamicCache(config=model.config)
    first = model(ids[:1, :12], **{CACHE: cache}).logits
    rest = model(ids[:1, 12:], **{CACHE: cache}, position_ids=torch.arange(12, 20).unsqueeze(0)).logits
    assert error(torch.cat([first, rest], 1), model(ids[:1]).logits) < TOLERANCE


def test_documents_that_would_fill_a_cache_are_refused(model, row):
    cache = DynamicCache(config=model.config)
    mask = torch.ones_like(row)
    for options in (
        {"use_cache": True},
        {CACHE: cache},
        {CACHE: cache, "attention_mask": mask},
    ):
        message = refused(model, input_ids=row, position_ids=POSITIONS, **options)
        assert "cannot fill a cache" in message and "use_cache=False" in message
    assert cache.get_seq_length() == 0


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"cu_seq_lens_q": torch.tensor([0, 7])}, "`cu_seq_lens_q` must hold the borders"),
        ({"seq_idx": NUMBERS[:, :-1]}, "`seq_idx` must have the tokens' shape"),
        ({"seq_idx": NUMBERS, "position_ids": torch.arange(TOTAL)[None]}, "`position_ids` and `seq_idx` begin"),
        ({"seq_idx": NUMBERS * 0, "position_ids": POSITIONS}, "`position_ids` and `seq_idx` begin"),
        ({"seq_idx": NUMBERS, "cu_seqlens": torch.tensor([0, 7, TOTAL])}, "`cu_seqlens` and `seq_idx` begin"),
        (
            {"cu_seq_lens_q": BORDERS, "cu_seq_lens_k": torch.tensor([0, 7, TOTAL])},
            "`cu_seq_lens_q` and `cu_seq_lens_k` begin",
        ),
        ({"position_ids": POSITIONS.expand(3, 1, -1)}, "`position_ids` must be [batch, seq]"),
        ({"max_length_k": 70}, "`max_length_k` is less than the 83 tokens of a row"),
        ({"max_length_q": torch.tensor(70)}, "`max_length_q` is less than the 83 tokens of a row"),
    ],
)
def test_contradicting_or_unfitting_signs_are_refused(model, row, arguments, named):
    assert named in refused(model, input_ids=row, **arguments)


def test_an_empty_document_is_ignored(model, documents, row):
    borders = torch.cat([BORDERS[:2], BORDERS[1:]])
    found = model(row, cu_seq_lens_q=borders, position_ids=POSITIONS, seq_idx=NUMBERS).logits
    assert error(found, alone(model, documents)) < TOLERANCE


def test_the_borders_and_the_length_of_one_document_change_nothing(model, ids):
    row, cache = ids[:1, :12], DynamicCache(config=model.config)
    whole = {f"cu_seq_lens_{side}": torch.tensor([0, 12]) for side in "qk"} | {"max_length_q": 12, "max_length_k": 12}
    first = model(row, **whole, **{CACHE: cache}).logits
    both = {"cu_seq_lens_q": torch.tensor([0, 8]), "cu_seq_lens_k": torch.tensor([0, 20])}
    rest = model(ids[:1, 12:], **both, max_length_q=8, max_length_k=20, **{CACHE: cache}).logits
    assert error(torch.cat([first, rest], 1), model(ids[:1]).logits) < TOLERANCE


def test_each_sign_keeps_documents_apart_on_other_backbones(backbones, documents, row):
    """By default `transformers` makes a cache, and treats the row as one text."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(backbones.member_config("llama")).eval()
    documents = [document % model.config.vocab_size for document in documents]
    expected = alone(model, documents)
    for sign in ("position_ids", "cu_seq_lens_q", "cu_seq_lens_k", "seq_idx"):
        found = model(torch.cat(documents, 1), **SIGNS[sign]).logits
        assert error(found, expected) < TOLERANCE, sign


def test_flash_attention_keeps_documents_apart_in_a_single_row_only(model, row, monkeypatch):
    monkeypatch.setattr(model.config, "_attn_implementation_internal", "flash_attention_2")
    batch = {"input_ids": row.expand(2, -1), "position_ids": POSITIONS.expand(2, -1)}
    assert "in a single row only" in refused(model, **batch)
    assert "of a padded row" in refused(model, **batch, attention_mask=torch.ones(2, TOTAL))


@pytest.fixture
def kernel_calls(monkeypatch) -> list[dict[str, Tensor]]:
    """Replace the GPU kernels by functions with their signatures and results, and return the list of their calls."""
    calls = []

    def chunk_kda(q, k, v, g, beta, initial_state, output_final_state, use_qk_l2norm_in_kernel, cu_seqlens):
        calls.append({"shape": q.shape, "cu_seqlens": cu_seqlens})
        starts = torch.zeros(1, q.shape[1], dtype=torch.bool)
        starts[0, cu_seqlens[:-1]] = True
        return delta_attention.chunk_kda(q, k, v, g, beta, use_qk_l2norm_in_kernel=True, starts=starts)

    def causal_conv1d_fn(x, weight, bias, activation, seq_idx):
        calls.append({"seq_idx": seq_idx, "stride": x.stride(1)})
        return convolve(x, weight, bias, activation, seq_idx)

    monkeypatch.setattr(delta_attention, "chunk_kimi_delta_attention", chunk_kda)
    monkeypatch.setattr(delta_attention, "causal_conv1d_fn", causal_conv1d_fn)
    monkeypatch.setattr(delta_attention, "_runs_kernel", lambda function, tensor: True)
    return calls


def test_kernels_get_all_rows_as_one_row_with_borders_and_the_number_of_each_tokens_document(model, kernel_calls):
    ids = torch.randint(3, 99, (2, 9), generator=torch.Generator().manual_seed(5))
    numbers = torch.tensor([[0] * 4 + [1] * 5, [0] * 9])
    logits = model(ids, seq_idx=numbers).logits
    convolution, chunk = kernel_calls[:2]
    assert len(kernel_calls) == 4
    assert chunk["shape"][:2] == (1, 18) and chunk["cu_seqlens"].tolist() == [0, 4, 9, 18]
    # For documents, the kernel of `causal_conv1d` needs contiguous channels and 32-bit numbers.
    assert convolution["stride"] == 1 and torch.equal(convolution["seq_idx"], numbers.int())
    assert error(logits[:1], alone(of_travelled_code(model), [ids[:1, :4], ids[:1, 4:]])) < TOLERANCE


@pytest.mark.skipif(not torch.cuda.is_available(), reason="the kernels need a GPU")
def test_kernels_on_a_gpu_keep_documents_apart(dense, documents, row):
    for package in ("fla", "causal_conv1d"):
        pytest.importorskip(package)
    on_gpu = deepcopy(dense).cuda()
    found = on_gpu(row.cuda(), position_ids=POSITIONS.cuda()).logits.cpu()
    # The kernels compute in lower precision.
    assert error(found, alone(dense, documents)) < 2e-2


def test_documents_of_one_token_each_are_refused_with_a_cache(model, ids):
    with pytest.raises(ValueError, match="cannot fill a cache"):
        model(ids[:1, :4], position_ids=torch.zeros(1, 4).long(), **{CACHE: DynamicCache(config=model.config)})


@pytest.fixture(scope="module")
def llama(backbones) -> torch.nn.Module:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(backbones.member_config("llama")).eval()


JUMPS = torch.tensor([[0, 1, 2, 3, 7, 8, 20, 21, 22, 23, 24]]).expand(2, -1)


@pytest.mark.parametrize(
    ("case", "way"),
    [
        *(("llama", way) for way in ("inference", "no cache", "training", "recomputation")),
        *(("gemma3_text", way) for way in ("inference", "no cache")),
        *product(["kimi_linear"], ["inference", "training"]),  # without cache, it keeps apart only in some layers
    ],
)
def test_positions_that_jump_ahead_mean_what_they_mean_to_the_backbone(backbones, case, way):
    """By default, a row with jumps is one text. Without a cache, `transformers` begins a document at each jump."""
    ids, options = backbones.token_ids(), {"use_cache": False} if way == "no cache" else {}
    models = [backbones.build(case), retrofit(backbones.build(case), block_size=3)]
    for model in models:
        model.train(way in ("training", "recomputation"))
        if way == "recomputation":
            model.gradient_checkpointing_enable({"use_reentrant": False})
    expected, found = (model(ids, position_ids=JUMPS, **options).logits for model in models)
    assert error(found, expected) < TOLERANCE


def test_positions_that_jump_ahead_in_one_row_and_restart_in_another_are_refused(llama, backbones):
    ids, both = backbones.token_ids(), JUMPS.clone()
    both[1] = torch.arange(11) % 6
    assert "`position_ids` of a row jump ahead" in refused(llama, input_ids=ids, position_ids=both)
    found = llama(ids, position_ids=both, use_cache=False).logits
    assert error(found[:1], llama(ids[:1], position_ids=JUMPS[:1], use_cache=False).logits) < TOLERANCE
    with pytest.raises(RuntimeError, match="`position_ids` of a row jump ahead"):
        compiled(llama.model.prepare_rows)({"input_ids": ids, "position_ids": JUMPS})


def compiled(function: Callable) -> Callable:
    """Compile a function to one graph, with the backend that generates no code, to save time."""
    torch.compiler.reset()
    return torch.compile(function, fullgraph=True, backend="eager")


ONES = torch.ones(1, TOTAL, dtype=torch.long)
PACKED_WITH_CACHE = {
    "use_cache": {"use_cache": True},
    "cache": {CACHE: True},
    "use_cache, mask": {"use_cache": True, "attention_mask": ONES},
    "cache, mask": {CACHE: True, "attention_mask": ONES},
    "cache, masks": {CACHE: True, "attention_mask": {"full_attention": None, "linear_attention": ONES}},
    "cache, no masks": {CACHE: True, "attention_mask": {"full_attention": None, "linear_attention": None}},
}


@pytest.mark.parametrize(
    ("options", "is_compiled"),
    [*((options, False) for options in PACKED_WITH_CACHE), ("use_cache", True), ("cache, masks", True)],
)
def test_restarting_positions_cannot_fill_a_cache_compiled_or_not(model, row, options, is_compiled):
    """Compile only the preparation of rows, which a graph of the whole model contains, to save time."""
    prepare = compiled(model.model.prepare_rows) if is_compiled else model.model.prepare_rows
    arguments = {"input_ids": row, **PACKED_WITH_CACHE[options]}
    if CACHE in arguments:
        arguments[CACHE] = DynamicCache(config=model.config)
    one_document = torch.arange(TOTAL).unsqueeze(0)
    assert prepare(arguments | {"position_ids": one_document})["rows"].documents is None
    with pytest.raises((ValueError, RuntimeError), match=r"cannot fill a cache.*pass `use_cache=False`"):
        prepare(arguments | {"position_ids": POSITIONS})


@pytest.mark.parametrize("has_cache", [False, True])
def test_compiled_other_backbones_refuse_restarting_positions_with_a_cache(llama, row, has_cache):
    options = {CACHE: DynamicCache(config=llama.config)} if has_cache else {"use_cache": True}
    with pytest.raises(RuntimeError, match="cannot fill a cache"):
        compiled(llama.model.prepare_rows)({"input_ids": row, "position_ids": POSITIONS, **options})


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"cu_seq_lens_q": BORDERS - 1}, "`cu_seq_lens_q` must hold the borders"),
        ({"seq_idx": NUMBERS, "position_ids": torch.arange(TOTAL)[None]}, "`position_ids` and `seq_idx` begin"),
    ],
)
def test_contradicting_or_unfitting_signs_are_refused_when_compiled(model, row, arguments, message):
    with pytest.raises(RuntimeError, match=message):
        compiled(model.model.prepare_rows)({"input_ids": row, **arguments})


@pytest.mark.slow
def test_documents_are_kept_apart_with_a_mask_for_each_kind_of_layer_when_compiled(model, row):
    masks = {"full_attention": None, "linear_attention": None}
    batch = {"input_ids": row, "attention_mask": masks, "position_ids": POSITIONS, "use_cache": False}
    found = compiled(model.model.prepare_rows)(batch)
    expected = model.model.prepare_rows(batch)
    assert torch.equal(found["rows"].documents, expected["rows"].documents)
    full = "attention_mask", "full_attention"
    assert torch.equal(found[full[0]][full[1]], expected[full[0]][full[1]])


@pytest.mark.slow
def test_a_compiled_model_computes_one_document_with_a_cache_and_refuses_several(two_layers, row):
    graph = compiled(two_layers)
    one_document = torch.arange(TOTAL).unsqueeze(0)
    with torch.no_grad():
        found = graph(row, position_ids=one_document, use_cache=True)
        assert error(found.logits, two_layers(row).logits) < TOLERANCE
        assert found[CACHE].get_seq_length() == TOTAL
        with pytest.raises(RuntimeError, match="cannot fill a cache"):
            graph(row, position_ids=POSITIONS, use_cache=True)


@pytest.mark.parametrize("backbone", ["llama", "gemma2", "qwen3", "mistral"])
def test_each_sign_keeps_documents_of_padded_rows_apart_on_other_backbones(backbones, backbone, row):
    """`transformers` makes separate masks for Gemma's sliding windows."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(backbones.member_config(backbone)).eval()
    ids, mask = row[:, :12] % model.config.vocab_size, torch.ones(1, 12, dtype=torch.long)
    mask[:, 10:] = 0
    expected = alone(model, [ids[:, :7], ids[:, 7:10]])
    signs = {"seq_idx": torch.tensor([[0] * 7 + [1] * 5]), "cu_seq_lens_q": torch.tensor([0, 7, 12])}
    for name, sign in signs.items():
        found = model(ids, attention_mask=mask, **{name: sign}).logits[:, :10]
        assert error(found, expected) < TOLERANCE, name
    assert error(model(ids, attention_mask=mask).logits[:, :10], expected) > 1e-3, "documents do not matter here"
