"""Residual connections from outside the package: those of three models in `transformers`, in about 15 lines each."""

import math
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM
from transformers import initialization as init

import attnres
from attnres import CONNECTIONS, ResidualConfig, ResidualConnection, register_residual_connection
from attnres.analysis import semiseparable_rank, token_mixing
from attnres.conversion import retrofit
from attnres.residual_attnres import residual_tensors
from attnres.training.recipe import Recipe

from .connections import assert_same_gradients, build, connections_of, difference, double, gradients


class ChannelGate(ResidualConnection):
    """The connection of `muse_spark`: `alpha * h + beta * v`, gates for each channel. It is not near the plain sum."""

    name = "channel_gate"
    fields = {"gate_temperature": 1.0}

    def __init__(self, config, sublayer):
        super().__init__(config, sublayer)
        self.temperature = config.gate_temperature
        if sublayer < config.num_sublayers:
            self.weight = nn.Parameter(torch.zeros(config.hidden_size))

    def reset_parameters(self):
        if hasattr(self, "weight"):
            init.zeros_(self.weight)

    def mix(self, state, coefficients):
        return state, state

    def write(self, state, output):
        w = self.weight / self.temperature
        beta = w.sigmoid()
        alpha = ((-w).sigmoid() * (1 + beta)).clamp(min=1e-3).sqrt()
        return alpha * state + beta * output


class ScaledStream(ResidualConnection):
    """The connection of `zaya`: `scale * (h + bias) + v` for each channel. It starts as the plain sum."""

    name = "shifted_stream"
    retrofit = {}

    def __init__(self, config, sublayer):
        super().__init__(config, sublayer)
        if sublayer < config.num_sublayers:
            self.scale = nn.Parameter(torch.ones(config.hidden_size))
            self.bias = nn.Parameter(torch.zeros(config.hidden_size))

    def reset_parameters(self):
        if hasattr(self, "scale"):
            init.ones_(self.scale)
            init.zeros_(self.bias)

    def mix(self, state, coefficients):
        return state, state

    def write(self, state, output):
        return (state + self.bias) * self.scale + output


class DepthScaled(ResidualConnection):
    """The connection of `beam`: `sqrt((k - 1) / k) * h + v / sqrt(k)` at depth k. It has no tensors."""

    name = "depth_scaled"

    def mix(self, state, coefficients):
        return state, state

    def write(self, state, output):
        k = self.sublayer + 2
        return math.sqrt((k - 1) / k) * state + output / math.sqrt(k)


def channel_gate_step(h: Tensor, v: Tensor, k: int, tensors: dict[str, Tensor]) -> Tensor:
    b = 1 / (1 + torch.exp(-tensors["weight"]))
    return torch.sqrt(torch.clamp((1 - b) * (1 + b), min=1e-3)) * h + b * v


STEPS: dict[type[ResidualConnection], Callable[..., Tensor]] = {
    ChannelGate: channel_gate_step,
    ScaledStream: lambda h, v, k, tensors: tensors["scale"] * h + tensors["scale"] * tensors["bias"] + v,
    DepthScaled: lambda h, v, k, tensors: h * (1 - 1 / k) ** 0.5 + v * k**-0.5,
}
every_neighbour = pytest.mark.parametrize("connection", STEPS, ids=lambda connection: connection.name)


@pytest.fixture(autouse=True)
def registered() -> Iterator[None]:
    """Register the three connections for one test."""
    before = dict(CONNECTIONS)
    for connection in STEPS:
        assert register_residual_connection(connection) is connection
    yield
    for name in CONNECTIONS.keys() - before:
        for field in CONNECTIONS.pop(name).fields:
            delattr(ResidualConfig, field)


def tensors_of(model: nn.Module) -> list[dict[str, Tensor]]:
    """Return the tensors of the sublayers in order."""
    return [dict(connection.named_parameters()) for connection in connections_of(model)]


@torch.no_grad()
@every_neighbour
def test_a_registered_connection_computes_its_equation_and_generates_with_a_cache(backbones, connection):
    model, standard = double(build(backbones, "llama", connection.name)), double(backbones.build("llama"))
    token_ids, of_sublayers = backbones.token_ids(), tensors_of(model)

    def read(v: list[Tensor]) -> Tensor:
        h = v[0]
        for k, (output, tensors) in enumerate(zip(v[1:], of_sublayers), start=2):
            h = STEPS[connection](h, output, k, tensors)
        return h

    expected = backbones.straight_line(standard, token_ids, read)
    # `depth_scaled` multiplies everything by 1/sqrt(k), which the norms undo.
    assert (difference(standard(token_ids).logits, expected) < 1e-4) == (connection is DepthScaled)
    assert difference(model(token_ids).logits, expected) < 1e-6
    generated = [
        model.generate(token_ids, use_cache=use_cache, max_new_tokens=5, do_sample=False) for use_cache in (True, False)
    ]
    assert torch.equal(*generated)


@every_neighbour
def test_a_registered_connection_trains_with_checkpointing_and_loads_back(backbones, connection, tmp_path):
    model, token_ids = build(backbones, "llama", connection.name).train(), backbones.token_ids()
    expected = gradients(model, token_ids)
    assert expected.keys() == dict(model.named_parameters()).keys()
    model.gradient_checkpointing_enable()
    assert_same_gradients(gradients(model, token_ids), expected, 1e-5)
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert loaded.config.residual_connection == connection.name
    with torch.no_grad():
        assert torch.equal(loaded(token_ids).logits, model.eval()(token_ids).logits)
    CONNECTIONS.pop(connection.name)
    with pytest.raises(
        ValueError, match=f"`residual_connection` is '{connection.name}', but must be one of 'attn_res'"
    ):
        AutoConfig.from_pretrained(tmp_path)
    CONNECTIONS[connection.name] = connection


@torch.no_grad()
@every_neighbour
def test_the_depth_mixing_of_a_registered_connection_is_that_of_a_stream(backbones, connection):
    mixing = token_mixing(build(backbones, "llama", connection.name), backbones.token_ids())
    assert difference(mixing.rebuilt(), mixing.inputs) < 1e-5
    assert mixing.constants.any() == (connection is ScaledStream)
    assert semiseparable_rank(mixing.matrices[..., 0, 0, -1]) == 1


def test_a_retrofit_is_exact_where_the_connection_declares_it(backbones):
    standard, token_ids = backbones.build("llama"), backbones.token_ids()
    model = retrofit(standard, "shifted_stream")
    assert residual_tensors(model)
    with torch.no_grad():
        assert difference(model(token_ids).logits, standard(token_ids).logits) < 1e-6
    for name in ("channel_gate", "depth_scaled"):
        with pytest.raises(ValueError, match=f"'{name}': it never equals the standard residual"):
            retrofit(standard, name)


def test_a_field_is_read_checked_and_saved(backbones, tmp_path):
    config = backbones.member_config("llama", residual_connection="channel_gate", gate_temperature=2.0)
    config.save_pretrained(tmp_path)
    assert AutoConfig.from_pretrained(tmp_path).gate_temperature == 2.0
    assert backbones.member_config("llama", residual_connection="channel_gate").gate_temperature == 1.0


@pytest.mark.parametrize(
    ("members", "message"),
    [
        ({"name": "attn_res"}, "there is a residual connection 'attn_res' already: SwitchedAttnRes"),
        ({"name": "other", "fields": {"attn_res_scale": "max"}}, "`attn_res_scale` of Other is a field .* already"),
        ({"name": "other", "fields": {"backbone": ""}}, "`backbone` of Other is a field .* already"),
        ({"name": "other", "fields": {"hidden_size": 7}}, "`hidden_size` of Other is a field .* already"),
        ({"name": "other", "fields": {"kv_lora_rank": 7}}, "`kv_lora_rank` of Other is a field .* already"),
    ],
    ids=["name", "field of another connection", "field of every configuration", *("field of a backbone",) * 2],
)
def test_a_name_or_field_that_is_taken_is_refused(members, message):
    before = dict(CONNECTIONS)
    with pytest.raises(ValueError, match=message):
        attnres.register_residual_connection(type("Other", (ResidualConnection,), members))
    assert before == CONNECTIONS


@pytest.mark.parametrize("name", [None, "", 3, "a b", ["x"]])
def test_a_name_that_is_not_an_identifier_is_refused(name):
    with pytest.raises(ValueError, match=r"the `name` of Other is .*, but must be an identifier"):
        register_residual_connection(type("Other", (ResidualConnection,), {"name": name}))
    with pytest.raises(TypeError, match="'mhc' must be a class that derives from ResidualConnection"):
        register_residual_connection("mhc")


def test_a_recipe_takes_a_registered_connection_and_its_fields():
    recipe = {"residual": "channel_gate", "gate_temperature": 2.0}
    assert Recipe("m", ("a.txt",), "out", steps=1, retrofit=recipe).retrofit == recipe
    with pytest.raises(ValueError, match="Did you mean `gate_temperature`"):
        Recipe("m", ("a.txt",), "out", steps=1, retrofit={"residual": "channel_gate", "gate_temperatur": 2.0})


def test_a_redefined_class_replaces_its_earlier_definition():
    again = type("ChannelGate", (ChannelGate,), {"fields": {"gate_temperature": 2.0}, "__module__": __name__})
    assert register_residual_connection(again) is CONNECTIONS["channel_gate"]
    assert ResidualConfig.gate_temperature == 2.0


class DampedStream(ResidualConnection):
    """A read multiplies the stream by a coefficient of each token. The start of its tensor is a list in a field."""

    name = "damped_stream"
    fields = {"damped_starts": [1.0]}

    def __init__(self, config, sublayer):
        super().__init__(config, sublayer)
        self.start = config.damped_starts[0]
        self.weight = nn.Parameter(torch.full((), self.start))

    def reset_parameters(self):
        init.constant_(self.weight, self.start)

    def coefficients(self, state):
        return self.weight / (1 + state.square().mean(-1, keepdim=True))

    def mix(self, state, coefficients):
        return coefficients * state, state

    def write(self, state, output):
        return state + output


@pytest.fixture
def damped() -> Iterator[None]:
    register_residual_connection(DampedStream)
    yield
    CONNECTIONS.pop("damped_stream")
    del ResidualConfig.damped_starts


@torch.no_grad()
@pytest.mark.usefixtures("damped")
def test_coefficients_need_no_argument_for_a_norm(backbones):
    mixing = token_mixing(build(backbones, "llama", "damped_stream"), backbones.token_ids())
    assert difference(mixing.rebuilt(), mixing.inputs) < 1e-5


@pytest.mark.usefixtures("damped")
def test_a_default_that_is_changed_in_place_is_that_of_one_configuration(backbones):
    backbones.member_config("llama", residual_connection="damped_stream").damped_starts.append(2.0)
    assert backbones.member_config("llama", residual_connection="damped_stream").damped_starts == [1.0]
