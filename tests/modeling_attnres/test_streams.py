"""Connections with n streams: reads recomputed from the outputs of sublayers, and properties that all four share."""

import math
from itertools import permutations

import pytest
import torch
from torch import Tensor

from attnres import CONNECTIONS
from attnres.residual_attnres import residual_tensors
from attnres.streams_attnres import ResidualStreams

from ..cases import each_once
from .connections import assert_reads, build, build_start, connections_of, difference, double, loss_of

EPS = 0.1  # large enough to matter
STREAMS = ["hyper_connections", "identity_hc", "mhc", "mhc_lite"]
every_connection = pytest.mark.parametrize("connection", STREAMS)

# ---- The equations as straight-line code


def rms_norm(x: Tensor) -> Tensor:
    return x / torch.sqrt((x * x).mean(-1, keepdim=True) + EPS)


def hyper_connections(x: Tensor, of: dict[str, Tensor], n: int) -> tuple[Tensor, Tensor, Tensor]:
    """Compute A_m, B and A_r of the streams `x` `[..., n, d]`: the static part, plus `s tanh(N W)` if dynamic."""
    a_m, a_r, b = of["static"][:, 0], of["static"][:, 1 : n + 1], of["static"][:, n + 1]
    if "weight" in of:
        w, (s_a, s_b), normed = of["weight"], of["scale"], rms_norm(x)
        a_m = a_m + s_a * torch.tanh(torch.einsum("...nd,d->...n", normed, w[0]))
        a_r = a_r + s_a * torch.tanh(torch.einsum("...nd,kd->...nk", normed, w[1 : n + 1]))
        b = b + s_b * torch.tanh(torch.einsum("...nd,d->...n", normed, w[n + 1]))
    return a_m, b, a_r


def pre_and_post(x: Tensor, of: dict[str, Tensor], n: int) -> tuple[Tensor, Tensor, Tensor]:
    """Compute H_pre and H_post of mHC and its successors, and the logits of H_res without their start."""
    flat = rms_norm(torch.cat([x[..., j, :] for j in range(n)], dim=-1))
    f, a, b = of["weight"], of["scale"], of["bias"]
    pre = a[0] * (flat @ f[:n].T) + b[:n] - math.log(n - 1)
    post = a[1] * (flat @ f[n : 2 * n].T) + b[n : 2 * n]
    logits = a[-1] * (flat @ f[2 * n :].T) + b[2 * n :]
    return 1 / (1 + torch.exp(-pre)), 2 / (1 + torch.exp(-post)), logits


def identity_hc(x: Tensor, of: dict[str, Tensor], n: int) -> tuple[Tensor, Tensor, Tensor]:
    pre, post, _ = pre_and_post(x, of, n)
    return pre, post, torch.eye(n).to(x)


def mhc(x: Tensor, of: dict[str, Tensor], n: int) -> tuple[Tensor, Tensor, Tensor]:
    """Compute H_res from exponentials: divide each row, then each column, by its sum, 20 times."""
    pre, post, logits = pre_and_post(x, of, n)
    h = torch.exp(logits.unflatten(-1, (n, n)) - 8 * (1 - torch.eye(n).to(x)))
    for _ in range(20):
        h = h / h.sum(-1, keepdim=True)
        h = h / h.sum(-2, keepdim=True)
    return pre, post, h


def mhc_lite(x: Tensor, of: dict[str, Tensor], n: int) -> tuple[Tensor, Tensor, Tensor]:
    """Compute H_res: the permutation matrices in the order of `itertools`, weighted by a softmax."""
    pre, post, logits = pre_and_post(x, of, n)
    p = torch.exp(logits - torch.tensor([0.0] + [8.0] * (math.factorial(n) - 1)).to(x))
    p = p / p.sum(-1, keepdim=True)
    h = torch.zeros(*p.shape[:-1], n, n).to(x)
    for r, order in enumerate(permutations(range(n))):
        for i, j in enumerate(order):
            h[..., i, j] += p[..., r]
    return pre, post, h


def stream_recurrence(coefficients, weights: list[dict[str, Tensor]], n: int):
    """Return `read`, which computes the input of the sublayer after `v_0 .. v_l` from streams rebuilt at each call.

    X = v_0, n times;  h = sum_j pre_j X_j;  X_j becomes sum_i res_ij X_i + post_j v. The output reads the mean.
    """

    def read(v: list[Tensor]) -> Tensor:
        x = torch.stack([v[0]] * n, dim=-2)
        for output, of in zip(v[1:], weights):
            _, post, res = coefficients(x, of, n)
            x = torch.einsum("...ij,...id->...jd", res, x) + post[..., None] * output[..., None, :]
        if len(v) > len(weights):
            return sum(x[..., j, :] for j in range(n)) / n
        pre, _, _ = coefficients(x, weights[len(v) - 1], n)
        return torch.einsum("...j,...jd->...d", pre, x)

    return read


def streams_of(model) -> list[ResidualStreams]:
    """Return the connections of the sublayers in order; assert that the output's has no tensors."""
    *connections, last = connections_of(model)
    assert not last.state_dict()
    return connections


@torch.no_grad()
@pytest.mark.parametrize(
    ("connection", "case", "n", "fields"),
    [
        *((connection, "llama", n, {}) for connection, n in each_once([*STREAMS, *STREAMS], [2, 3, 4])),
        ("hyper_connections", "llama", 3, {"hyper_connections_dynamic": False}),
        ("mhc", "kimi_linear", 3, {}),
    ],
    ids=str,
)
def test_sublayers_read_mix_and_write_the_streams(backbones, case, connection, n, fields):
    model = double(build(backbones, case, connection, residual_streams=n, rms_norm_eps=EPS, **fields))
    weights = [dict(of.named_parameters()) for of in streams_of(model)]
    read = stream_recurrence(globals()[connection], weights, n)
    assert_reads(backbones, model, double(backbones.build(case, rms_norm_eps=EPS)), read)


# ---- A connection alone


def stirred(backbones, connection: str, n: int, hidden: int = 4, sublayers: int = 2, **fields) -> list[ResidualStreams]:
    """Make the connections of some sublayers and of the output in float64, with coefficients far from their start."""
    generator = torch.Generator().manual_seed(0)
    fields |= {"residual_streams": n, "hidden_size": hidden, "num_hidden_layers": (sublayers + 1) // 2}
    config = backbones.member_config("llama", residual_connection=connection, **fields)
    made = [CONNECTIONS[connection](config, i).double() for i in (*range(sublayers), config.num_sublayers)]
    with torch.no_grad():
        for tensor in (tensor for of in made for tensor in of.parameters()):
            tensor.normal_(generator=generator)
    return made


def random_streams(n: int, hidden: int = 4) -> Tensor:
    return torch.randn(2, 5, n, hidden, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


FIELDS = [("hyper_connections", {"hyper_connections_dynamic": False})] + [(name, {}) for name in STREAMS]


@pytest.mark.parametrize(("connection", "fields"), FIELDS, ids=str)
def test_the_derivative_of_a_chain_of_reads_and_writes_equals_finite_differences(backbones, connection, fields):
    made = stirred(backbones, connection, 3, mhc_sinkhorn_iterations=3, **fields)
    own = [dict(of.named_parameters()) for of in made]
    embedding = torch.randn(1, 2, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64).requires_grad_()

    def chain(embedding: Tensor, *tensors: Tensor) -> Tensor:
        state, inputs, tensors = embedding, [], iter(tensors)
        for i, of in enumerate(made):
            read, _, state = torch.func.functional_call(of, {name: next(tensors) for name in own[i]}, (state,))
            inputs.append(read)
            if i < 2:
                state = of.write(state, torch.sin(read + i))  # the output depends on the input
        return torch.stack(inputs)

    tensors = [tensor.detach().requires_grad_() for of in own for tensor in of.values()]
    assert torch.autograd.gradcheck(chain, (embedding, *tensors), fast_mode=True)
    assert torch.autograd.gradgradcheck(chain, (embedding, *tensors), fast_mode=True)


@torch.no_grad()
@pytest.mark.parametrize(("connection", "fields"), FIELDS, ids=str)
def test_reads_and_writes_with_fixed_coefficients_are_linear_in_the_state(backbones, connection, fields):
    of, _, last = stirred(backbones, connection, 3, **fields)
    streams, other, output = random_streams(3), random_streams(3).flip(1), torch.ones(2, 5, 4, dtype=torch.float64)
    coefficients = of.coefficients((streams,))
    assert [tuple(c.shape) for c in coefficients] == [(2, 5, 3), (2, 5, 3), (2, 5, 3, 3)][: len(coefficients)]

    inputs, state = of.mix((streams,), coefficients)
    read, _, after = of((streams,))
    assert torch.equal(read, inputs) and all(map(torch.equal, after, state))

    def step(streams: Tensor, output: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the input, the streams after the write, and their mean."""
        inputs, state = of.mix((streams,), coefficients)
        written = of.write(state, output)
        return inputs, *written, last.mix(written, last.coefficients(written))[0]

    for both, one, two in zip(step(3 * streams - other, output), step(streams, output), step(other, 2 * output)):
        torch.testing.assert_close(both, 3 * one - two)
    # With one-hot sources `[sources, batch, seq, 1]` for embedding and output, the streams are the weights of each.
    embedding = torch.zeros(2, 1, 1, 1, dtype=torch.float64)
    embedding[0] = 1
    weights = of.write(of.mix(embedding.expand(2, 2, 5, 1), coefficients)[1], 1 - embedding)
    assert weights[0].shape == (2, 2, 5, 3, 1)
    copies = streams[..., :1, :].expand_as(streams)
    torch.testing.assert_close(step(copies, output)[1], weights[0][0] * copies + weights[0][1] * output.unsqueeze(-2))


@torch.no_grad()
@pytest.mark.parametrize("order", [(1, 0, 2), (2, 0, 1)])
@every_connection
def test_permuting_streams_and_tensors_permutes_the_result(backbones, connection, order):
    of, *_ = stirred(backbones, connection, 3)
    streams, output, order = random_streams(3), torch.ones(2, 5, 4, dtype=torch.float64), torch.tensor(order)
    tensors = {name: tensor.clone() for name, tensor in of.named_parameters()}
    if connection == "hyper_connections":
        columns = torch.tensor([0, *(1 + order), 4])
        tensors["static"] = tensors["static"][order][:, columns]
        tensors["weight"] = tensors["weight"][columns]
    else:
        pairs = (order[:, None] * 3 + order).flatten()
        every = [*permutations(range(3))]
        moved = [tuple(int((order == p[o]).nonzero()) for o in order.tolist()) for p in every]
        conjugates = torch.tensor(sorted(range(6), key=lambda r: every.index(moved[r])))
        mixing = {"identity_hc": order[:0], "mhc": pairs, "mhc_lite": conjugates}[connection]
        rows = torch.cat([order, 3 + order, 6 + mixing])
        tensors["weight"] = tensors["weight"].unflatten(1, (3, 4))[rows][:, order].flatten(1)
        tensors["bias"] = tensors["bias"][rows]
    read, _, state = of((streams,))
    again, _, permuted = torch.func.functional_call(of, tensors, ((streams[..., order, :],),))
    torch.testing.assert_close(again, read)
    torch.testing.assert_close(of.write(permuted, output)[0], of.write(state, output)[0][..., order, :])


# ---- The start


@torch.no_grad()
@pytest.mark.parametrize("streams", [4, 5])
@every_connection
def test_a_model_starts_as_the_standard_model(backbones, connection, streams):
    model, token_ids = build_start(backbones, "llama", connection, residual_streams=streams), backbones.token_ids()
    standard = build_start(backbones, "llama", "standard")
    found, expected = model(token_ids).logits, standard(token_ids).logits
    if streams == 4:
        assert torch.equal(found, expected)
    else:  # 1/n is not a floating-point number, and these weights amplify its rounding
        assert difference(found, expected) < 1e-5
    found = model.bfloat16()(token_ids).logits
    assert torch.equal(found, standard.bfloat16()(token_ids).logits)


@torch.no_grad()
@pytest.mark.parametrize("connection", ["identity_hc", "mhc", "mhc_lite", "gated_residual"])
@pytest.mark.parametrize("streams", [2, 5])
def test_streams_that_start_apart_start_as_the_standard_model(backbones, connection, streams):
    fields = {"residual_streams": streams, "residual_streams_start": "apart"}
    model, token_ids = build_start(backbones, "llama", connection, **fields), backbones.token_ids()
    found, expected = model(token_ids), build_start(backbones, "llama", "standard")(token_ids)
    assert difference(found.logits, expected.logits) < 1e-5
    if connection != "gated_residual" and streams == 2:
        assert torch.equal(found.logits, expected.logits)


def test_a_configuration_without_a_start_has_equal_streams(backbones):
    """In Gated Residual, older checkpoints store the differences from that start."""
    config = backbones.member_config("llama", residual_connection="gated_residual")
    assert config.residual_streams_start == "equal"
    message = "`residual_streams_start` is 'far', but must be one of 'equal', 'apart'"
    with pytest.raises(ValueError, match=message):
        backbones.member_config("llama", residual_connection="mhc", residual_streams_start="far")


@torch.no_grad()
@pytest.mark.parametrize("streams", [2, 3, 4, 5])
@every_connection
def test_new_connections_keep_equal_streams_equal_through_a_hundred_sublayers(backbones, connection, streams):
    """The streams are the running sum to the last bit, so nothing drifts in a deep model."""
    config = backbones.member_config("llama", residual_connection=connection, residual_streams=streams)
    of = CONNECTIONS[connection](config, 3)
    stream = torch.randn(2, 5, 32, generator=torch.Generator().manual_seed(0))
    state = stream
    for _ in range(100):
        read, _, state = of(state)
        torch.testing.assert_close(read, stream, rtol=1e-6, atol=0)
        stream = stream + torch.sin(stream)
        state = of.write(state, torch.sin(state[0][..., 0, :]))
        assert torch.equal(state[0], stream.unsqueeze(-2).expand_as(state[0]))


@every_connection
def test_every_tensor_of_a_new_model_learns_and_the_streams_become_different(backbones, connection):
    model, token_ids = build_start(backbones, "llama", connection), backbones.token_ids()
    optimizer = torch.optim.SGD(residual_tensors(model).values(), lr=0.1)
    for _ in range(4):  # a tensor that is multiplied by zero gets a gradient only after the other factor has moved
        optimizer.zero_grad()
        loss_of(model, token_ids).backward()
        optimizer.step()
    for name, tensor in residual_tensors(model).items():
        assert tensor.grad.abs().max() > 0, name
    seen = []
    model.model.output_attn_res_proj.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    with torch.no_grad():
        model(token_ids)
    ((streams,),) = seen
    assert (streams - streams.mean(-2, keepdim=True)).abs().max() > 1e-4


@every_connection
def test_a_model_made_under_another_default_dtype_starts_the_same(backbones, connection):
    config = backbones.member_config("llama", residual_connection=connection)
    torch.set_default_dtype(torch.bfloat16)
    try:
        made = CONNECTIONS[connection](config, 3)
    finally:
        torch.set_default_dtype(torch.float32)
    assert {tensor.dtype for tensor in made.parameters()} == {torch.bfloat16}
    streams = torch.ones(1, 1, 4, 32)
    expected = CONNECTIONS[connection](config, 3).coefficients((streams,))
    assert all(map(torch.equal, made.coefficients((streams,)), expected))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@every_connection
def test_coefficients_are_in_float32_in_half_precision_and_under_autocast(backbones, connection, dtype):
    model, token_ids = build(backbones, "llama", connection), backbones.token_ids()
    of = model.model.layers[1].mlp_res_proj
    streams = torch.randn(2, 5, 4, 32, generator=torch.Generator().manual_seed(0))
    states, expected = [], (of((streams,)), of.coefficients((streams,)))
    model.model.output_attn_res_proj.register_forward_pre_hook(lambda _, args: states.append(args[0][0]))
    with torch.autocast("cpu", dtype=dtype):
        (read, _, state), coefficients = of((streams,)), of.coefficients((streams,))
        model(token_ids)
    assert torch.equal(read, expected[0][0])
    assert all(map(torch.equal, (*state, *coefficients), (*expected[0][2], *expected[1])))
    model.to(dtype)(token_ids)
    assert [streams.dtype for streams in states] == [torch.float32, dtype]
    assert {c.dtype for c in of.coefficients((streams.to(dtype),))} == {torch.float32}


# ---- Refused values and descriptions


@pytest.mark.parametrize("value", [1, 0, -4, 2.5, "4", True, None, 65, 10**9])
@every_connection
def test_a_wrong_number_of_streams_is_refused_in_one_line(backbones, connection, value):
    with pytest.raises(ValueError) as error:
        backbones.member_config("llama", residual_connection=connection, residual_streams=value)
    is_too_many_for_lite = connection == "mhc_lite" and value in (65, 10**9)  # mhc_lite has another message
    allowed = "from 2 to 5: each of the n! permutations" if is_too_many_for_lite else "an integer from 2 to 64."
    assert f"`residual_streams` is {value!r}, but must be {allowed}" in str(error.value)
    assert "\n" not in str(error.value)


@every_connection
def test_trained_weights_are_distinguished_from_initial_ones(backbones, connection):
    model = build_start(backbones, "llama", connection)
    start = {name: tensor.detach() for name, tensor in residual_tensors(model).items()}
    differs = CONNECTIONS[connection].differs_from_standard
    assert differs(model.config, start) is None
    # While `W` (Hyper-Connections) or the scales (the others) are zero, the factor beside them has no effect.
    silent = {"hyper_connections": "scale"}.get(connection, "weight")
    names = [name for name in start if name.startswith("model.layers.2.mlp_res_proj.")]
    assert len(names) >= 3
    for name in names:
        changed = start[name].clone()
        changed.view(-1)[0] += 0.5
        reason = differs(model.config, start | {name: changed})
        assert reason is None if name.endswith(silent) else name in reason
