"""Frac-Connections: reads recomputed from the outputs of the sublayers, start, derivatives, and refused values."""

import pytest
import torch
from torch import Tensor

from attnres.analysis import depth_mixing
from attnres.frac_connections_attnres import FracConnections
from attnres.residual_attnres import residual_tensors

from .connections import assert_reads, build, build_start, check_derivatives, connections_of, double, loss_of

EPS = 0.1  # large enough to matter


def parts_recurrence(connections: list[FracConnections]):
    """Return `read`: input `Y^T H`, stream `A^T H + B (x) f(h)`, coefficients `S + s tanh(N(H) W)` of each token."""

    def coefficients(c: FracConnections, parts: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        m = c.parts
        eye = torch.eye(m, dtype=parts.dtype)
        static = c.static.double() + torch.cat([eye, eye, torch.ones(m, 1, dtype=parts.dtype)], dim=1)
        if c.weight is None:
            found = static.expand(*parts.shape[:-1], -1)
        else:
            normed = parts / torch.sqrt((parts * parts).mean(-1, keepdim=True) + EPS)
            y, a, b = c.scale.double()
            scale = torch.cat([y.expand(m), a.expand(m), b.expand(1)])
            found = static + scale * torch.tanh(normed @ c.weight.double().T)
        return found[..., :m], found[..., m : 2 * m], found[..., 2 * m]

    def read(v: list[Tensor]) -> Tensor:
        parts = v[0].unflatten(-1, (connections[0].parts, -1))
        for c, output in zip(connections, [*v[1:], None]):
            y, a, b = coefficients(c, parts)
            if output is None:
                return torch.einsum("...ij,...id->...jd", y, parts).flatten(-2)
            parts = torch.einsum("...ij,...id->...jd", a, parts)
            parts = parts + b[..., None] * output.unflatten(-1, (c.parts, -1))
        return parts.flatten(-2)  # the output joins the parts

    return read


@torch.no_grad()
@pytest.mark.parametrize("fields", [{}, {"frac_connections_dynamic": False}, {"frac_connections_parts": 4}], ids=str)
@pytest.mark.parametrize("case", ["llama", "kimi_linear"])
def test_sublayers_read_by_the_equation(backbones, case, fields):
    model = double(build(backbones, case, "frac_connections", rms_norm_eps=EPS, **fields))
    *connections, output = connections_of(model)
    assert output.static is None
    standard = double(backbones.build(case, rms_norm_eps=EPS))
    assert_reads(backbones, model, standard, parts_recurrence(connections))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_model_starts_as_the_standard_model_to_the_last_bit_and_learns(backbones, dtype):
    model, token_ids = build_start(backbones, "llama", "frac_connections").to(dtype), backbones.token_ids()
    with torch.no_grad():
        assert torch.equal(model(token_ids).logits, backbones.build("llama").to(dtype)(token_ids).logits)
    loss_of(model, token_ids).backward()
    tensors = residual_tensors(model)
    assert all((tensor.grad != 0).any() for name, tensor in tensors.items() if not name.endswith(".scale"))


@pytest.mark.parametrize("is_dynamic", [True, False])
def test_the_derivative_of_a_chain_of_reads_and_writes_equals_finite_differences(backbones, is_dynamic):
    fields = {"residual_connection": "frac_connections", "frac_connections_dynamic": is_dynamic, "rms_norm_eps": EPS}
    config = backbones.member_config("llama", hidden_size=4, num_hidden_layers=1, **fields)
    connections = [FracConnections(config, sublayer).double() for sublayer in range(3)]
    check_derivatives(connections)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"frac_connections_parts": 3},
            r"`frac_connections_parts` is 3, but must be a divisor of `hidden_size` \(32\)",
        ),
        ({"frac_connections_parts": 1}, "must be an integer from 2 to 64"),
        ({"frac_connections_dynamic": "no"}, "must be true or false"),
    ],
    ids=str,
)
def test_a_value_that_is_not_allowed_is_refused(backbones, fields, message):
    with pytest.raises(ValueError, match=message):
        backbones.member_config("llama", residual_connection="frac_connections", **fields)


def test_a_mixing_matrix_is_refused_since_channels_are_mixed(backbones):
    with pytest.raises(ValueError, match="mixes the channels"):
        depth_mixing(build(backbones, "llama", "frac_connections"), backbones.token_ids())
