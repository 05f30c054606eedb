"""MUDDFormer: reads recomputed from the outputs of the sublayers, start, and derivatives."""

import math

import pytest
import torch
from torch import Tensor

from attnres.muddformer_attnres import MUDDFormer
from attnres.residual_attnres import residual_tensors

from ..cases import each_once
from .connections import assert_reads, build, build_start, check_derivatives, connections_of, double, loss_of

EPS = 0.1  # large enough to matter
FORMS = [
    {},
    {"muddformer_way": "residual"},
    {"muddformer_post_norm": True},
    {"muddformer_way": "residual", "muddformer_post_norm": True},
]


def rms_norm(x: Tensor) -> Tensor:
    return x / torch.sqrt((x * x).mean(-1, keepdim=True) + EPS)


def gelu(x: Tensor) -> Tensor:
    return x * (1 + torch.erf(x / math.sqrt(2))) / 2


def averages(connections: list[MUDDFormer], per_layer: int, is_residual: bool):
    """Return `read`, which computes the input of the sublayer after `v_0 .. v_l`.

    `X_j` is `Y_{j-1}` plus the outputs of layer j, and `Y_i` the average of `X_0 .. X_i` with the weights
    `GELU(N(X_i) W_1) W_2 + a_i`. `connections` has those of the first sublayers of layers 1, 2, ..., and the output's.
    """

    def read(v: list[Tensor]) -> Tensor:
        states, stream, inputs = [v[0]], v[0], v[0]
        for count, output in enumerate(v[1:], start=1):
            stream = inputs = stream + output
            if count % per_layer == 0:
                states.append(stream)
                c = connections[len(states) - 2]
                weights = gelu(rms_norm(stream) @ c.down.T) @ c.up.T + c.weight
                if c.gain is None:
                    mixed = sum(weights[..., [j]] * state for j, state in enumerate(states))
                else:
                    total = sum(weights[..., [j]] * rms_norm(state) for j, state in enumerate(states))
                    mixed = stream + c.gain * rms_norm(total)
                inputs = stream if is_residual and c is not connections[-1] else mixed
                stream = mixed
        return inputs

    return read


@torch.no_grad()
@pytest.mark.parametrize(
    ("case", "fields"),
    [*(("llama", fields) for fields in FORMS), *(("gpt_neox", fields) for fields in FORMS[:1])],  # one sublayer a layer
    ids=str,
)
def test_layers_read_averages_whose_weights_depend_on_the_token(backbones, case, fields):
    eps = "layer_norm_eps" if case == "gpt_neox" else "rms_norm_eps"
    model = double(build(backbones, case, "muddformer", **fields, **{eps: EPS}))
    standard = double(backbones.build(case, **{eps: EPS}))
    found = [c for c in connections_of(model) if c.weight is not None]
    layers = model.config.num_hidden_layers
    assert [len(c.weight) for c in found] == list(range(2, layers + 2))
    assert [len(c.down) for c in found] == [64] * (layers - 1) + [256]
    is_residual = fields.get("muddformer_way") == "residual"
    assert_reads(backbones, model, standard, averages(found, 1 if case == "gpt_neox" else 2, is_residual))


@pytest.mark.parametrize(("fields", "dtype"), each_once(FORMS, [torch.bfloat16, torch.float32]), ids=str)
def test_a_model_starts_as_the_standard_model_to_the_last_bit_and_learns(backbones, fields, dtype):
    model, token_ids = build_start(backbones, "llama", "muddformer", **fields).to(dtype), backbones.token_ids()
    with torch.no_grad():
        assert torch.equal(model(token_ids).logits, backbones.build("llama").to(dtype)(token_ids).logits)
    loss_of(model, token_ids).backward()
    tensors = residual_tensors(model)
    learns = [name for name in tensors if name.endswith((".up", ".weight"))]
    assert learns and all((tensors[name].grad != 0).any() for name in learns)
    with torch.no_grad():  # one step gives the other tensors a gradient
        for name in learns:
            tensors[name] -= 0.1 * tensors[name].grad / tensors[name].grad.abs().max()
    model.zero_grad()
    loss_of(model, token_ids).backward()
    assert all((tensor.grad != 0).any() for tensor in tensors.values())


@pytest.mark.parametrize("fields", FORMS, ids=str)
def test_the_derivative_of_a_chain_of_reads_and_writes_equals_finite_differences(backbones, fields):
    config = backbones.member_config(
        "llama", residual_connection="muddformer", hidden_size=4, num_hidden_layers=2, rms_norm_eps=EPS, **fields
    )
    connections = [MUDDFormer(config, sublayer).double() for sublayer in range(5)]
    check_derivatives(connections, std=0.3, fast_mode=True)


@pytest.mark.parametrize("fields", [{"muddformer_way": "both"}, {"muddformer_post_norm": 1}], ids=str)
def test_a_value_that_is_not_allowed_is_refused(backbones, fields):
    (name,) = fields
    with pytest.raises(ValueError, match=f"`{name}` is .*, but must be"):
        backbones.member_config("llama", residual_connection="muddformer", **fields)
