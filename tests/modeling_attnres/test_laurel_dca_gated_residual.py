"""LAuReL, DCA and Gated Residual: reads recomputed from the outputs of sublayers, start, derivatives, bad values."""

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from attnres.dca_attnres import DCA
from attnres.gated_residual_attnres import GatedResidual
from attnres.laurel_attnres import LAuReL
from attnres.residual_attnres import ResidualConnection, residual_tensors

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

EPS = 0.1  # large enough to matter
FORMS = [
    ("laurel", {"laurel_form": "rw"}),
    ("laurel", {"laurel_form": "lr", "laurel_rank": 3}),
    ("laurel", {"laurel_form": "rw_lr"}),
    ("dca", {"dca_window": None}),
    ("dca", {"dca_window": 1}),
    ("dca", {"dca_window": 3}),
]


def rms_norm(x: Tensor) -> Tensor:
    return x / torch.sqrt((x * x).mean(-1, keepdim=True) + EPS)


def laurel_recurrence(connections: list[LAuReL]):
    """Return `read`: `h_{l+1} = a v_l + b h_l + B A h_l`, where `a, b = 2 softmax`."""

    def read(v: list[Tensor]) -> Tensor:
        stream = v[0]
        for c, output in zip(connections, v[1:]):
            a, b = (1, 1) if c.weights is None else 2 * torch.softmax(c.weights, 0)
            added = 0 if c.down is None else stream @ c.down.T @ c.up.T
            stream = a * output + b * stream + added
        return stream

    return read


def dca_sums(connections: list[DCA], window: int | None):
    """Return `read`: sums of `(b + s relu(w . N(x))) x` over the embedding, the sum of old outputs, and the latest."""

    def read(v: list[Tensor]) -> Tensor:
        c = connections[len(v) - 1]
        if c.bias is None:
            return v[0]
        sources, old = v, v[1:-window] if window is not None else []
        if window is not None:
            sources = [v[0], *([sum(old[1:], old[0])] if old else []), *v[1:][-window:]]
        assert len(sources) == len(c.bias)
        return sum(
            (1 + b + c.scale * torch.relu(rms_norm(x) @ c.weight[0])[..., None]) * x for x, b in zip(sources, c.bias)
        )

    return read


def recurrence(name: str, fields: dict, connections: list[ResidualConnection]):
    return laurel_recurrence(connections) if name == "laurel" else dca_sums(connections, fields["dca_window"])


@torch.no_grad()
@pytest.mark.parametrize(("name", "fields"), FORMS, ids=str)
@pytest.mark.parametrize("case", ["llama"])
def test_sublayers_read_by_the_equation(backbones, case, name, fields):
    model = double(build(backbones, case, name, rms_norm_eps=EPS, **fields))
    standard = double(backbones.build(case, rms_norm_eps=EPS))
    assert_reads(backbones, model, standard, recurrence(name, fields, connections_of(model)))


def gated_streams(connections: list[GatedResidual], norms: list[nn.Module]):
    """Return `read`, which gives the input of the norm of a sublayer whose output is the gated read.

    No input of an RMSNorm has every gated read as its output. So the norms of the standard model are taken out.
    """

    def read(v: list[Tensor]) -> Tensor:
        c = connections[0]
        streams = torch.stack([v[0]] * c.streams, dim=-2)
        for index in range(len(v)):
            c = connections[index]
            is_output = c.weight is None
            normed = streams if is_output else norms[index].weight * rms_norm(streams)
            gained = c.factors(torch.float64) * normed
            seen = (c.factors(torch.float64) * rms_norm(streams) if is_output else gained).flatten(-2) / c.streams
            hidden = seen @ c.down.T
            gate = torch.sigmoid((hidden * torch.sigmoid(hidden)) @ c.up.T).unflatten(-1, (c.streams, -1))
            inputs = (2 * gate * gained).mean(-2)
            if index < len(v) - 1:
                streams = streams + 2 * torch.sigmoid(seen @ c.weight.T)[..., None] * v[index + 1][..., None, :]
        return inputs

    return read


@torch.no_grad()
@pytest.mark.parametrize(("case", "streams"), [("llama", 2), ("llama", 4), ("kimi_linear", 3)])
def test_gated_streams_are_read_and_written_by_the_equation(backbones, case, streams):
    model = double(build(backbones, case, "gated_residual", rms_norm_eps=EPS, residual_streams=streams))
    standard = double(backbones.build(case, rms_norm_eps=EPS))
    layers = standard.model.layers
    norms = [norm for layer in layers for norm in (layer.input_layernorm, layer.post_attention_layernorm)]
    token_ids = backbones.token_ids()
    plain = standard(token_ids).logits
    for layer in layers:
        layer.input_layernorm = layer.post_attention_layernorm = nn.Identity()
    expected = backbones.straight_line(standard, token_ids, gated_streams(connections_of(model), norms))
    assert difference(model(token_ids).logits, expected) < 1e-5
    assert difference(plain, expected) > 0.05


@pytest.mark.parametrize(("name", "fields"), [*FORMS, ("gated_residual", {})], ids=str)
def test_a_model_starts_as_the_standard_model_and_learns(backbones, name, fields):
    model, token_ids = build_start(backbones, "llama", name, **fields), backbones.token_ids()
    with torch.no_grad():
        assert difference(model(token_ids).logits, backbones.build("llama")(token_ids).logits) < 1e-5
    loss_of(model, token_ids).backward()
    later = {"laurel": (".down",), "dca": (".weight",), "gated_residual": (".down",)}[name]  # zero factors hide them
    for key, tensor in residual_tensors(model).items():
        assert (tensor.grad != 0).any() or key.endswith(later), key


def test_gated_streams_part_in_the_first_step(backbones):
    """Streams that stay equal would make several of them useless."""
    model, token_ids = build_start(backbones, "llama", "gated_residual"), backbones.token_ids()
    loss_of(model, token_ids).backward()
    gradient = model.model.layers[0].mlp_res_proj.weight.grad
    assert all(difference(gradient[i], gradient[j]) > 1e-3 for i in range(4) for j in range(i))


def test_a_checkpoint_that_stores_whole_gains_is_refused(backbones, tmp_path):
    build_start(backbones, "llama", "gated_residual").save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    older = {name.replace(".gains", ".gain"): tensor for name, tensor in tensors.items()}
    save_file(older, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"gains"):
        AutoModelForCausalLM.from_pretrained(tmp_path)


GATED = ("gated_residual", {"residual_streams": 2, "gated_residual_rank": 1, "num_hidden_layers": 1})


@pytest.mark.parametrize(("name", "fields"), [*FORMS, GATED], ids=str)
def test_the_derivative_of_a_chain_of_reads_and_writes_equals_finite_differences(backbones, name, fields):
    fields = {"residual_connection": name, "rms_norm_eps": EPS, "laurel_rank": 2, "num_hidden_layers": 2} | fields
    config = backbones.member_config("llama", hidden_size=4, **fields)
    count = config.num_sublayers + 1  # with that of the output
    check_derivatives([config.connection(config, sublayer).double() for sublayer in range(count)])


@pytest.mark.parametrize(
    ("name", "fields", "message"),
    [
        ("laurel", {"laurel_form": "pa"}, "`laurel_form` is 'pa', but must be one of 'rw', 'lr', 'rw_lr'"),
        ("laurel", {"laurel_rank": 0}, "`laurel_rank` is 0, but must be an integer from 1 to 32"),
        ("dca", {"dca_window": 0}, "`dca_window` is 0, but must be an integer >= 1, or null"),
        ("gated_residual", {"gated_residual_rank": 2.5}, "`gated_residual_rank` is 2.5, but must be an integer from 1"),
    ],
    ids=str,
)
def test_a_value_that_is_not_allowed_is_refused(backbones, name, fields, message):
    with pytest.raises(ValueError, match=message):
        backbones.member_config("llama", residual_connection=name, **fields)


@torch.no_grad()
def test_a_model_whose_layers_were_removed_is_refused_in_one_line(backbones):
    model = build(backbones, "llama", "dca", dca_window=None)
    model.model.layers = nn.ModuleList([model.model.layers[i] for i in (0, 1, 3, 4)])
    model.config.num_hidden_layers = 4
    with pytest.raises(ValueError, match="are for 7 tensors, but there are 5: layers of this model cannot be moved"):
        model(backbones.token_ids())
