"""Identity Hyper-Connections: what sublayers read, rebuilt from the outputs before them, and where they start."""

import math

import pytest
import torch
from torch import Tensor

from attnres.identity_hc_attnres import IdentityHyperConnections
from attnres.residual_attnres import residual_tensors

from .connections import build, build_start, difference, double, loss_of

EPS = 0.1  # that one can see


def stream_recurrence(weights: list[dict[str, Tensor]], streams: int):
    """`read`: what the sublayer after `v_0 .. v_l` reads, with the streams built anew from all outputs every time.

    X = v_0, n times;  x = X / sqrt(mean(X^2) + eps) over all of n d;  H_pre = sigmoid(a_1 F_1 x + b_1),
    H_post = 2 sigmoid(a_2 F_2 x + b_2);  h = sum_j H_pre[j] X_j;  X_j += H_post[j] v. At the end the mean.
    """

    def pre_and_post(x: list[Tensor], of: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        flat = torch.cat(x, dim=-1)
        flat = flat / torch.sqrt((flat * flat).mean(-1, keepdim=True) + EPS)
        f, a, b = of["weight"], of["scale"], of["bias"]
        pre = a[0] * (flat @ f[:streams].T) + b[:streams] - math.log(streams - 1)
        post = a[1] * (flat @ f[streams:].T) + b[streams:]
        return 1 / (1 + torch.exp(-pre)), 2 / (1 + torch.exp(-post))

    def read(v: list[Tensor]) -> Tensor:
        x = [v[0]] * streams
        for output, of in zip(v[1:], weights):
            _, post = pre_and_post(x, of)
            x = [stream + post[..., j, None] * output for j, stream in enumerate(x)]
        if len(v) > len(weights):
            return sum(x) / streams
        pre, _ = pre_and_post(x, weights[len(v) - 1])
        return sum(pre[..., j, None] * stream for j, stream in enumerate(x))

    return read


def weights_of(model) -> list[dict[str, Tensor]]:
    """The tensors of every sublayer in turn."""
    connections = [m for m in model.modules() if isinstance(m, IdentityHyperConnections)]
    connections.sort(key=lambda connection: connection.sublayer)
    assert not dict(connections[-1].named_parameters())  # of the output
    return [dict(connection.named_parameters()) for connection in connections[:-1]]


@torch.no_grad()
@pytest.mark.parametrize("streams", [2, 4])
@pytest.mark.parametrize("case", ["llama", "kimi_linear"])
def test_sublayers_read_weighted_streams_and_write_to_each(backbones, case, streams):
    model = double(build(backbones, case, "identity_hc", residual_streams=streams, rms_norm_eps=EPS))
    standard, token_ids = double(backbones.build(case, rms_norm_eps=EPS)), backbones.token_ids()
    expected = backbones.straight_line(standard, token_ids, stream_recurrence(weights_of(model), streams))
    assert difference(standard(token_ids).logits, expected) > 0.05
    assert difference(model(token_ids).logits, expected) < 1e-6
    first = model(token_ids[:, :7], use_cache=True)
    last = model(token_ids[:, 7:], past_key_values=first.past_key_values)
    assert difference(torch.cat([first.logits, last.logits], dim=1), expected) < 1e-5


def test_the_derivative_of_a_chain_of_reads_and_writes_is_that_of_finite_differences(backbones):
    fields = {"residual_streams": 3, "hidden_size": 4, "num_hidden_layers": 1}
    config = backbones.member_config("llama", residual_connection="identity_hc", **fields)
    connections = [IdentityHyperConnections(config, sublayer).double() for sublayer in range(3)]
    generator = torch.Generator().manual_seed(0)
    new = {"generator": generator, "dtype": torch.float64}
    names = ("weight", "bias", "scale")
    own = [torch.randn(getattr(c, name).shape, **new).requires_grad_() for c in connections[:2] for name in names]
    embedding = torch.randn(1, 2, 4, **new).requires_grad_()

    def chain(embedding: Tensor, *own: Tensor) -> Tensor:
        state, inputs = embedding, []
        for i, connection in enumerate(connections):
            tensors = dict(zip(names, own[3 * i : 3 * i + 3]))
            read, _, state = torch.func.functional_call(connection, tensors, (state,))
            inputs.append(read)
            if i < 2:
                state = connection.write(state, torch.sin(read + i))  # what is written depends on what is read
        return torch.stack(inputs)

    assert torch.autograd.gradcheck(chain, (embedding, *own))
    assert torch.autograd.gradgradcheck(chain, (embedding, *own))


@pytest.mark.parametrize("streams", [2, 3, 4, 7])
@pytest.mark.parametrize("case", ["llama", "kimi_linear"])
def test_it_starts_as_the_standard_model(backbones, case, streams):
    model, token_ids = build_start(backbones, case, "identity_hc", residual_streams=streams), backbones.token_ids()
    with torch.no_grad():
        expected = backbones.build(case)(token_ids).logits
        # Where 1/n is no number of the computer, rounding differs, and these weights amplify it.
        assert difference(model(token_ids).logits, expected) < (1e-6 if streams in (2, 4) else 1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("streams", [3, 4, 7])
def test_in_half_precision_the_weights_start_at_one_nth_and_one(backbones, streams, dtype):
    model = build_start(backbones, "llama", "identity_hc", residual_streams=streams).to(dtype)
    x = torch.randn(2, 5, streams, 32, generator=torch.Generator().manual_seed(0)).to(dtype)
    pre, post = model.model.layers[1].mlp_res_proj.coefficients(x)
    assert pre.dtype is post.dtype is torch.float32
    torch.testing.assert_close(pre, torch.full_like(pre, 1 / streams), rtol=1e-6, atol=0)
    assert (post == 1).all()


def test_a_model_made_under_another_default_dtype_starts_the_same(backbones):
    torch.set_default_dtype(torch.bfloat16)
    try:
        config = backbones.member_config("llama", residual_connection="identity_hc")
        connection = IdentityHyperConnections(config, 3)
    finally:
        torch.set_default_dtype(torch.float32)
    assert connection.weight.dtype is torch.bfloat16
    pre, post = connection.coefficients(torch.ones(1, 1, 4, 32))
    torch.testing.assert_close(pre, torch.full_like(pre, 0.25), rtol=1e-6, atol=0)
    assert (post == 1).all()


def test_at_the_start_the_scales_and_biases_learn_and_the_streams_part(backbones):
    model, token_ids = build_start(backbones, "llama", "identity_hc"), backbones.token_ids()
    optimizer = torch.optim.SGD(residual_tensors(model).values(), lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        loss_of(model, token_ids).backward()
        optimizer.step()
    # From the second step on the projections learn too. What the first sublayer reads are copies of the embedding.
    for name, tensor in residual_tensors(model).items():
        assert tensor.grad.abs().max() > 0, name
    seen = []
    model.model.output_attn_res_proj.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    with torch.no_grad():
        model(token_ids)
    ((streams,),) = seen
    assert (streams - streams.mean(-2, keepdim=True)).abs().max() > 1e-4


def test_autocast_leaves_coefficients_and_streams_in_float32(backbones):
    model, token_ids = build(backbones, "llama", "identity_hc"), backbones.token_ids()
    connection = model.model.layers[1].mlp_res_proj
    x = torch.randn(2, 5, 4, 32, generator=torch.Generator().manual_seed(0))
    states = []
    model.model.output_attn_res_proj.register_forward_pre_hook(lambda _, args: states.append(args[0]))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        within = connection.coefficients(x)
        model(token_ids)
    assert all(map(torch.equal, within, connection.coefficients(x)))
    assert states[0][0].dtype is torch.float32


@pytest.mark.parametrize("value", [1, 0, -4, 2.5, "4", True, None])
def test_a_wrong_number_of_streams_is_refused_in_one_line(backbones, value):
    with pytest.raises(ValueError) as error:
        backbones.member_config("llama", residual_connection="identity_hc", residual_streams=value)
    assert f"`residual_streams` is {value!r}, but must be an integer >= 2." in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("changed", [None, "bias", "scale"])
def test_trained_weights_are_told_from_the_start(backbones, changed):
    model = build_start(backbones, "llama", "identity_hc")
    name = f"model.layers.2.mlp_res_proj.{changed}"
    tensors = residual_tensors(model)
    with torch.no_grad():
        if changed:
            tensors[name][0] = 1e-3
    reason = IdentityHyperConnections.differs_from_standard(model.config, tensors)
    assert reason is None if changed is None else name in reason
