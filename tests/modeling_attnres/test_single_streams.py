"""PostNorm and Highway: reads recomputed from the outputs of sublayers, start, and refused values."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from attnres.conversion import retrofit
from attnres.highway_attnres import Highway
from attnres.post_norm_attnres import PostNorm
from attnres.residual_attnres import residual_tensors

from .connections import assert_reads, build, build_start, connections_of, double

EPS = 0.1  # large enough to matter


def rms_norm(x: Tensor) -> Tensor:
    return x / torch.sqrt((x * x).mean(-1, keepdim=True) + EPS)


def post_norm_recurrence(norms: list[Tensor]):
    """Return `read`: `h_0 = N_0(v_0)`, `h_{l+1} = N_{l+1}(h_l + v_l)`; it returns `h_l + v_l`, before the last norm."""

    def read(v: list[Tensor]) -> Tensor:
        stream = v[0]
        for weight, output in zip(norms, v[1:]):
            stream = weight * rms_norm(stream) + output
        return stream

    return read


def highway_recurrence(gates: list[tuple[Tensor, Tensor]]):
    """Return `read`: `h_{l+1} = g v_l + (1 - g) h_l`, `g = sigmoid(W x + b)`, where x is the normed `h_l`."""

    def read(v: list[Tensor]) -> Tensor:
        stream = v[0]
        for (weight, bias), output in zip(gates, v[1:]):
            gate = 1 / (1 + torch.exp(-(rms_norm(stream) @ weight.T + bias)))
            stream = gate * output + (1 - gate) * stream
        return stream

    return read


def recurrence(connection: str, model: nn.Module) -> Callable[[list[Tensor]], Tensor]:
    if connection == "post_norm":
        layers = model.model.layers
        norms = [norm.weight for layer in layers for norm in (layer.input_layernorm, layer.post_attention_layernorm)]
        return post_norm_recurrence(norms)
    gates = connections_of(model)
    assert gates[-1].weight is None  # the connection of the output
    return highway_recurrence([(gate.weight, gate.bias) for gate in gates[:-1]])


@torch.no_grad()
@pytest.mark.parametrize("connection", ["post_norm", "highway"])
@pytest.mark.parametrize("case", ["llama", "kimi_linear"])
def test_sublayers_read_by_the_equation(backbones, case, connection):
    model = double(build(backbones, case, connection, rms_norm_eps=EPS))
    standard = double(backbones.build(case, rms_norm_eps=EPS))
    # The backbones' norms compute in float32, and with PostNorm they are applied to the stream itself.
    uncached = 1e-5 if connection == "post_norm" else 1e-6
    assert_reads(backbones, model, standard, recurrence(connection, model), uncached)


@pytest.mark.parametrize("connection", [Highway, PostNorm])
def test_the_derivative_of_a_chain_of_reads_and_writes_equals_finite_differences(backbones, connection):
    config = backbones.member_config(
        "llama", residual_connection=connection.name, hidden_size=4, num_hidden_layers=1, rms_norm_eps=EPS
    )
    connections = [connection(config, sublayer).double() for sublayer in range(3)]
    generator = torch.Generator().manual_seed(0)
    names, new = ("weight", "bias"), {"generator": generator, "dtype": torch.float64}
    own = [
        torch.randn(getattr(c, name).shape, **new).requires_grad_()
        for c in connections[:2]
        for name in (names if connection is Highway else ())
    ]
    embedding = torch.randn(1, 2, 4, **new).requires_grad_()

    def chain(embedding: Tensor, *own: Tensor) -> Tensor:
        state, inputs = embedding, []
        for i, of_sublayer in enumerate(connections):
            tensors = dict(zip(names, own[2 * i : 2 * i + 2]))
            arguments = (state, rms_norm if connection is PostNorm and i < 2 else None)
            read, _, state = torch.func.functional_call(of_sublayer, tensors, arguments)
            inputs.append(read)
            if i < 2:
                state = of_sublayer.write(state, torch.sin(read + i))
        return torch.stack(inputs)

    assert torch.autograd.gradcheck(chain, (embedding, *own))
    assert torch.autograd.gradgradcheck(chain, (embedding, *own))


def test_new_highway_layers_mostly_carry_the_stream(backbones):
    model = build_start(backbones, "llama", "highway", highway_bias=-2.0)
    for name, tensor in residual_tensors(model).items():
        if name.endswith(".bias"):
            assert (tensor == -2).all()
        else:
            assert tensor.std().item() == pytest.approx(model.config.initializer_range, rel=0.2)


@pytest.mark.parametrize("connection", ["post_norm", "highway"])
def test_a_retrofit_is_refused_because_the_plain_sum_is_impossible(backbones, connection):
    with pytest.raises(ValueError, match=f"'{connection}': it never equals the standard residual"):
        retrofit(backbones.build("llama"), connection)


@pytest.mark.parametrize("value", ["-1", None, float("nan"), float("inf"), True, 10**400])
def test_a_bias_out_of_range_is_refused(backbones, value):
    with pytest.raises(ValueError, match=r"`highway_bias` is .*, but must be a number from -100 to 100"):
        backbones.member_config("llama", residual_connection="highway", highway_bias=value)


def test_post_norm_needs_sublayers_that_begin_with_a_norm(backbones):
    with pytest.raises(ValueError, match="'post_norm', but must be another one: the sublayers of 'olmo2' do not begin"):
        backbones.member_config("olmo2", residual_connection="post_norm")
