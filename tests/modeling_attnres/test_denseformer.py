"""DenseFormer with static weights: reads recomputed from the outputs of the sublayers, start, and refused layers."""

import copy

import pytest
import torch
from torch import Tensor

from attnres.denseformer_attnres import DenseFormer
from attnres.residual_attnres import residual_tensors

from .connections import assert_reads, build, build_start, double, loss_of


def weighted_stream(weights: list[Tensor], per_layer: int):
    """Return `read`, which computes the input of the sublayer after `v_0 .. v_l` by `Y_i = sum_j a_ij X_j`.

    `X_0 = v_0`, and `X_j = Y_{j-1}` plus the outputs of layer j. Other sublayers of a layer read the stream
    so far. `weights[i - 1]` are `a_i0 .. a_ii`.
    """

    def read(v: list[Tensor]) -> Tensor:
        streams, stream = [v[0]], v[0]
        for count, output in enumerate(v[1:], start=1):
            stream = stream + output
            if count % per_layer == 0:
                streams.append(stream)
                stream = sum(a * state for a, state in zip(weights[len(streams) - 2], streams, strict=True))
        return stream

    return read


def weights_of(model) -> list[Tensor]:
    """Return `a_1, a_2, ...`: one tensor for each layer but the first, and last that of the output."""
    return sorted((tensor.detach() for tensor in residual_tensors(model).values()), key=len)


@torch.no_grad()
@pytest.mark.parametrize("case", ["llama", "kimi_linear", "gpt_neox"])  # gpt_neox has one sublayer in a layer
def test_layers_read_averages_of_the_states_after_all_earlier_layers(backbones, case):
    model, standard = double(build(backbones, case, "denseformer")), double(backbones.build(case))
    weights = weights_of(model)
    assert [len(a) for a in weights] == list(range(2, model.config.num_hidden_layers + 2))
    assert_reads(backbones, model, standard, weighted_stream(weights, 1 if case == "gpt_neox" else 2))


def test_the_derivative_of_a_chain_of_reads_and_writes_equals_finite_differences(backbones):
    config = backbones.member_config("llama", residual_connection="denseformer", num_hidden_layers=3)
    connections = [DenseFormer(config, sublayer).double() for sublayer in range(7)]
    generator = torch.Generator().manual_seed(0)
    new = {"generator": generator, "dtype": torch.float64}
    weights = [torch.randn(n, **new).requires_grad_() for n in (2, 3, 4)]
    embedding = torch.randn(2, 3, 4, **new).requires_grad_()

    def chain(embedding: Tensor, *weights: Tensor) -> Tensor:
        state, inputs = embedding, []
        for i, connection in enumerate(connections):
            own = {"weight": weights[i // 2 - 1]} if i and i % 2 == 0 else {}
            read, _, state = torch.func.functional_call(connection, own, (state,))
            inputs.append(read)
            if i < 6:
                state = connection.write(state, torch.sin(read + i))  # the output depends on the input
        return torch.stack(inputs)

    assert torch.autograd.gradcheck(chain, (embedding, *weights), fast_mode=True)
    assert torch.autograd.gradgradcheck(chain, (embedding, *weights), fast_mode=True)


@pytest.mark.parametrize(("case", "dtype"), [("llama", torch.bfloat16), ("kimi_linear", torch.float32)], ids=str)
def test_a_model_starts_as_the_standard_model_to_the_last_bit_and_every_weight_learns(backbones, case, dtype):
    model, token_ids = build_start(backbones, case, "denseformer").to(dtype), backbones.token_ids()
    standard = build(backbones, case, "standard").to(dtype)
    with torch.no_grad():
        assert torch.equal(model(token_ids).logits, standard(token_ids).logits)
    loss_of(model, token_ids).backward()
    for name, tensor in residual_tensors(model).items():
        assert (tensor.grad != 0).all(), name


def test_in_bfloat16_an_average_is_rounded_once(backbones):
    config = backbones.member_config("llama", residual_connection="denseformer", num_hidden_layers=8)
    generator = torch.Generator().manual_seed(0)
    connection = DenseFormer(config, 16).bfloat16()
    with torch.no_grad():
        connection.weight.normal_(generator=generator)
    state = tuple(torch.randn(2, 5, 32, generator=generator).bfloat16() for _ in range(9))
    exact = sum(a.double() * x.double() for a, x in zip(connection.weight, state))
    read, _, _ = connection(state)
    assert read.dtype is torch.bfloat16
    # Half a step of bfloat16, and a little float32 rounding where terms cancel.
    assert ((read - exact).abs() <= 2**-8 * exact.abs() + 1e-5).all()


@torch.no_grad()
@pytest.mark.parametrize("name, fields", [("denseformer", {}), ("muddformer", {"muddformer_post_norm": True})])
def test_a_model_whose_layers_were_removed_is_refused_in_one_line(backbones, name, fields):
    model = build(backbones, "llama", name, **fields)
    model.model.layers = torch.nn.ModuleList([model.model.layers[i] for i in (0, 1, 3, 4)])
    model.config.num_hidden_layers = 4
    with pytest.raises(ValueError, match=r"sublayer 4 are for 4 earlier states, but there are 3: .*removed") as error:
        model(backbones.token_ids())
    assert "\n" not in str(error.value)


@torch.no_grad()
@pytest.mark.parametrize("order", [(1, 2, 3, 4), (0, 0, 1, 2), (0, 1, 0, 2), (0, 1, 2, 0)])
def test_a_moved_layer_is_refused_in_one_line(backbones, order):
    model = build(backbones, "llama", "denseformer")
    model.model.layers = torch.nn.ModuleList(copy.deepcopy(model.model.layers[i]) for i in order)
    model.config.num_hidden_layers = 4
    token_ids = backbones.token_ids()  # a batch of two sequences must not be taken for two states
    with pytest.raises(ValueError, match="layers of this model cannot be moved, removed or added"):
        model(token_ids)


@pytest.mark.parametrize(("change", "is_named"), [(lambda a: a, False), (lambda a: a[0].fill_(1e-3), True)])
def test_trained_weights_are_distinguished_from_initial_ones(backbones, change, is_named):
    model = build_start(backbones, "llama", "denseformer")
    tensors = residual_tensors(model)
    with torch.no_grad():
        change(tensors["model.layers.2.self_attention_res_proj.weight"])
    reason = DenseFormer.differs_from_standard(model.config, tensors)
    assert (reason is not None and "layers.2.self_attention_res_proj.weight" in reason) == is_named


@pytest.mark.parametrize(
    "fields",
    [{"residual_connection": "denseformer"}, {"residual_connection": "muddformer"}, {"attn_res_query": "none"}],
)
def test_an_output_that_cannot_read_earlier_drafts_no_tokens_and_leaves_the_model_unchanged(backbones, fields):
    model, token_ids = backbones.build_member("llama", **fields), backbones.token_ids()[:1]
    expected = model.generate(token_ids, max_new_tokens=4, do_sample=False)
    with pytest.raises(ValueError, match=r"sublayer|state|sources"):
        model.generate(token_ids, max_new_tokens=4, do_sample=False, assistant_early_exit=2)
    assert torch.equal(model.generate(token_ids, max_new_tokens=4, do_sample=False), expected)
