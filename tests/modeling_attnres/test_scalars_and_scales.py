"""Residual scalars and scaled residuals: reads recomputed from the outputs of sublayers, start, and refused values."""

import math

import pytest
import torch
from torch import Tensor

from attnres.conversion import retrofit
from attnres.residual_attnres import residual_tensors
from attnres.residual_scalars_attnres import ResidualScalars
from attnres.scaled_attnres import Scaled

from ..cases import each_once
from .connections import (
    assert_reads,
    build,
    build_start,
    check_derivatives,
    connections_of,
    difference,
    double,
    loss_of,
)

LEARNED = ["layer_scale", "rezero", "stream", "shifted", "layer"]
FORMS = [*LEARNED, "depth", "mixed"]


def scalars_recurrence(scalars: list[tuple[float, float] | None]):
    """Return `read`: before a sublayer with scalars `(a, b)`, `h <- (1 + a) h + b v_0`; after it, `h <- h + v`."""

    def read(v: list[Tensor]) -> Tensor:
        stream = v[0]
        for sublayer, output in enumerate([*v[1:], None]):
            if sublayer < len(scalars) and scalars[sublayer] is not None:
                a, b = scalars[sublayer]
                stream = (1 + a) * stream + b * v[0]
            if output is not None:
                stream = stream + output
        return stream

    return read


@torch.no_grad()
@pytest.mark.parametrize(
    ("case", "each"),
    [("llama", "layer"), ("llama", "sublayer"), ("gpt_neox", "layer")],  # gpt_neox has one sublayer in a layer
)
def test_the_stream_is_scaled_and_the_embedding_added(backbones, case, each):
    model = double(build(backbones, case, "residual_scalars", residual_scalars_each=each))
    scalars = [None if c.stream is None else (c.stream.item(), c.embedding.item()) for c in connections_of(model)]
    every = 2 if each == "layer" and case != "gpt_neox" else 1
    assert [pair is not None for pair in scalars[:-1]] == [i % every == 0 for i in range(len(scalars) - 1)]
    assert scalars[-1] is None  # the connection of the output
    assert_reads(backbones, model, double(backbones.build(case)), scalars_recurrence(scalars[:-1]))


def test_nanochats_start_falls_with_depth(backbones):
    model = build_start(backbones, "llama", "residual_scalars", residual_scalars_start="nanochat")
    pairs = [(c.stream.item(), c.embedding.item()) for c in connections_of(model) if c.stream is not None]
    assert len(pairs) == 5
    assert pairs[0] == pytest.approx((0.15, 0.20)) and pairs[-1] == pytest.approx((0.05, 0.05))
    assert pairs == sorted(pairs, reverse=True)


@torch.no_grad()
def test_gates_that_depend_on_the_place_refuse_a_model_whose_layers_were_removed(backbones):
    model = build(backbones, "llama", "scaled", scaled_form="mixed")
    model.model.layers = model.model.layers[1:]
    model.config.num_hidden_layers -= 1
    with pytest.raises(ValueError, match="start of sublayer 2: layers of this model cannot be moved, removed or added"):
        model(backbones.token_ids())


def scaled_recurrence(form: str, connections: list[Scaled]):
    """Return `read`: `h_{l+1} = alpha (h_l + c) + beta v_l`, in the forms of the table in `scaled_attnres.py`."""

    def factors(index: int) -> tuple:
        weight, k = connections[index].weight, index + 2
        weight = None if weight is None else weight.double()
        if form == "depth":
            return math.sqrt(1 - 1 / k), 0, math.sqrt(1 / k)
        if form == "mixed":
            start = 1 / math.sqrt(k)
            logit = 0.3 * math.log(start / (1 - start))
            beta = 1 / (1 + torch.exp(-(logit + weight) / 0.3))
            return torch.sqrt((1 - beta**2).clamp(min=1e-3)), 0, beta
        if form == "layer":
            return (1, 0, 1) if weight is None else (1 + weight, 0, 1 + weight)
        if form == "shifted":
            return 1 + weight, connections[index].shift.double(), 1
        return (1 + weight, 0, 1) if form == "stream" else (1, 0, 1 + weight)

    def read(v: list[Tensor]) -> Tensor:
        stream = v[0]
        for index, output in enumerate(v[1:]):
            alpha, shift, beta = factors(index)
            stream = alpha * (stream + shift) + beta * output
        return stream

    return read


@torch.no_grad()
@pytest.mark.parametrize("form", [form for form in FORMS if form != "depth"])  # `depth` is nearly the standard model
@pytest.mark.parametrize("case", ["llama"])
def test_stream_and_outputs_are_scaled(backbones, case, form):
    model = double(build(backbones, case, "scaled", scaled_form=form))
    *connections, output = connections_of(model)
    assert output.weight is None and output.shift is None
    sizes = {"rezero": 1, "layer": 1}
    assert [None if c.weight is None else c.weight.numel() for c in connections[1::2]] == [sizes.get(form, 32)] * 5
    assert_reads(backbones, model, double(backbones.build(case)), scaled_recurrence(form, connections))


@torch.no_grad()
def test_a_stream_that_shrinks_with_depth_is_the_standard_one_times_a_factor(backbones):
    """Norms see the same direction, so logits differ by the norms' epsilon alone."""
    fields = {"rms_norm_eps": 1e-12}
    standard, token_ids = double(backbones.build("llama", **fields)), backbones.token_ids()
    for form in ("depth", "mixed"):
        model = double(build_start(backbones, "llama", "scaled", scaled_form=form, **fields))
        *connections, _ = connections_of(model)
        expected = backbones.straight_line(standard, token_ids, scaled_recurrence(form, connections))
        assert difference(model(token_ids).logits, expected) < 1e-6, form
        assert difference(model(token_ids).logits, standard(token_ids).logits) < 1e-6, form


@torch.no_grad()
@pytest.mark.parametrize(
    ("fields", "dtype"),
    each_once(
        [
            *({"scaled_form": form} for form in LEARNED),
            {"residual_scalars_each": "layer"},
            {"residual_scalars_each": "sublayer"},
        ],
        [torch.bfloat16, torch.float32],
    ),
    ids=str,
)
def test_a_model_starts_as_the_standard_model_to_the_last_bit(backbones, fields, dtype):
    connection = "scaled" if "scaled_form" in fields else "residual_scalars"
    model, token_ids = build_start(backbones, "llama", connection, **fields).to(dtype), backbones.token_ids()
    assert torch.equal(model(token_ids).logits, backbones.build("llama").to(dtype)(token_ids).logits)
    assert all(tensor.dtype is torch.float32 for tensor in residual_tensors(model).values())


@pytest.mark.parametrize("form", FORMS)
def test_derivatives_of_scales_equal_finite_differences(backbones, form):
    config = backbones.member_config(
        "llama", residual_connection="scaled", scaled_form=form, hidden_size=4, num_hidden_layers=2
    )
    check_derivatives([Scaled(config, sublayer).double() for sublayer in range(5)])


@pytest.mark.parametrize("each", ["layer", "sublayer"])
def test_derivatives_of_scalars_equal_finite_differences(backbones, each):
    fields = {"residual_connection": "residual_scalars", "residual_scalars_each": each}
    config = backbones.member_config("llama", **fields, hidden_size=4, num_hidden_layers=2)
    check_derivatives([ResidualScalars(config, sublayer).double() for sublayer in range(5)])


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"residual_connection": "scaled", "scaled_form": "beam"},
            "`scaled_form` is 'beam', but must be one of 'layer_",
        ),
        (
            {"residual_connection": "scaled", "scaled_start": "1"},
            "`scaled_start` is '1', but must be a number from -100",
        ),
        ({"residual_connection": "residual_scalars", "residual_scalars_each": "block"}, "must be one of 'layer', 'sub"),
        ({"residual_connection": "residual_scalars", "residual_scalars_start": 1}, "must be one of 'standard', 'nano"),
    ],
)
def test_a_value_that_is_not_allowed_is_refused(backbones, fields, message):
    with pytest.raises(ValueError, match=message):
        backbones.member_config("llama", **fields)


@pytest.mark.parametrize(
    ("connection", "fields", "message"),
    [
        ("scaled", {"scaled_form": "depth"}, "in a retrofit: the others shrink the stream"),
        ("scaled", {"scaled_form": "mixed"}, "in a retrofit: the others shrink the stream"),
        ("scaled", {"scaled_start": 0.1}, "`scaled_start` is 0.1, but must be 1 in a retrofit"),
    ],
)
def test_a_form_that_is_not_the_standard_one_is_refused_in_a_retrofit(backbones, connection, fields, message):
    with pytest.raises(ValueError, match=message):
        retrofit(backbones.build("llama"), connection, **fields)


@pytest.mark.parametrize("connection", ["scaled", "residual_scalars"])
def test_every_tensor_learns_from_the_start(backbones, connection):
    model = build_start(backbones, "llama", connection)
    loss_of(model, backbones.token_ids()).backward()
    assert all((tensor.grad != 0).any() for tensor in residual_tensors(model).values())
