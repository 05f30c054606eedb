"""Attention residuals with switches: their reads against the equations, retrofits, and refused values."""

import copy
import math
from unittest import mock

import pytest
import torch
from torch import Tensor

from attnres.analysis.depth_attention import depth_attention
from attnres.attn_res_attnres import AttnRes
from attnres.attn_res_switches_attnres import SWITCHES, SwitchedAttnRes
from attnres.conversion import retrofit
from attnres.residual_attnres import ResidualNorm, residual_tensors
from attnres.training.measures import depth_attention_summary

from ..cases import each_once
from .connections import assert_reads, build, build_start, connections_of, difference, double

EPS = 0.1  # large enough to matter
SINGLE = [
    {"query": "input_dependent"},
    {"query": "none"},
    {"activation": "sigmoid"},
    {"key_norm": False},
    {"heads": 4},
    {"temperature": 2.5},
    {"window": 2},
    {"values": "normed"},
    {"blocks": "rms"},
    {"count_prior": True},
    {"gated": True},
]
SEVERAL = [
    {"query": "input_dependent", "heads": 2, "key_norm": False, "activation": "sigmoid"},
    {"query": "input_dependent", "blocks": "rms", "gated": True, "window": 1, "count_prior": True},
    {"query": "none", "activation": "sigmoid", "values": "normed", "window": 3},
    {"query": "none", "count_prior": True, "blocks": "rms", "temperature": 0.5},
    {"heads": 8, "values": "normed", "blocks": "rms", "count_prior": True, "gated": True},
]


def named(switches: dict) -> dict:
    return {f"attn_res_{name}": value for name, value in switches.items()}


def text(value) -> str:
    return ",".join(f"{k} {v}" for k, v in value.items()) if isinstance(value, dict) else str(value)


def sheet(weights: list[dict[str, Tensor]], config):
    """Return `read`, which computes the input of the sublayer after `v_0 .. v_{l-1}`, source by source, head by head.

    `logit_i = q . k_i / T`, `q = w` or `W x`, `k = g * s / rms(s)` or `s`, or a trained number; plus log(outputs);
    softmax or sigmoids; values `s` or `s / rms(s)`; blocks `sum v`, or `sum v / rms(v)` when finished; with a gate the
    stream plus gamma times this result.
    """
    switch = {name: getattr(config, f"attn_res_{name}") for name in ("block_size", "scale")}
    switch |= {field.removeprefix("attn_res_"): getattr(config, field) for field in SWITCHES}

    def rms(x: Tensor) -> Tensor:
        return torch.sqrt((x * x).mean(-1, keepdim=True) + EPS)

    def read(v: list[Tensor]) -> Tensor:
        of, size = weights[len(v) - 1], switch["block_size"]
        s, outputs = [v[0]], [1]
        for start in range(1, len(v), size):
            block = v[start : start + size]
            is_normed = switch["blocks"] == "rms" and len(block) == size
            s.append(sum(output / rms(output) if is_normed else output for output in block))
            outputs.append(len(block))
        if switch["window"] is not None:
            kept = [0, *range(len(s))[1:][-switch["window"] :]]
            s, outputs = [s[i] for i in kept], [outputs[i] for i in kept]
        is_sum, width = switch["scale"] == "sum", v[0].shape[-1] // switch["heads"]
        x = read(v[:-1]) if len(v) > 1 else v[0]
        heads = []
        for head in range(switch["heads"]):
            channels = slice(head * width, head * width + width)
            exponentials = []
            for i, source in enumerate(s):
                if switch["query"] == "none":
                    logit = of["bias"][i] * torch.ones_like(source[..., :1])
                else:
                    query = of["weight"][0] if switch["query"] == "learned" else x @ of["weight"].T
                    key = of["norm"] * source / rms(source) if switch["key_norm"] else source
                    logit = (query * key)[..., channels].sum(-1, keepdim=True)
                logit = logit / switch["temperature"]
                exponentials.append(torch.exp(logit + (math.log(outputs[i]) if switch["count_prior"] else 0)))
            if switch["activation"] == "sigmoid":
                a = [1 / (1 + 1 / e) * (2 if is_sum else 1) for e in exponentials]
            else:
                a = [e / sum(exponentials) * (len(s) if is_sum else 1) for e in exponentials]
            values = [source / rms(source) if switch["values"] == "normed" else source for source in s]
            heads.append(sum(share * value[..., channels] for share, value in zip(a, values)))
        h = torch.cat(heads, dim=-1)
        return sum(v) + of["gamma"] * h if switch["gated"] else h

    return read


def weights_of(model) -> list[dict[str, Tensor]]:
    """Return the tensors of the sublayers in order and of the output, by their names in saved files."""
    tensors, result = model.state_dict(), []
    places = [
        f"layers.{i}.{name}" for i in range(len(model.model.layers)) for name in ("self_attention_res", "mlp_res")
    ]
    for place in (*places, "output_attn_res"):
        own = {key: tensors.get(f"model.{place}_proj.{key}") for key in ("weight", "bias", "gamma")}
        result.append(own | {"norm": tensors.get(f"model.{place}_norm.weight")})
    return result


@torch.no_grad()
@pytest.mark.parametrize(
    ("case", "switches", "block_size"),
    [
        *(("llama", *case) for case in each_once(SINGLE + SEVERAL, [3, 3, 1])),
        *(("kimi_linear", switches, 3) for switches in SEVERAL[:2]),  # a read does not see on which backbone it is
    ],
    ids=text,
)
def test_sublayers_read_by_the_equations(backbones, case, switches, block_size):
    scale = "sum" if switches in SEVERAL or "activation" in switches else "mean"
    fields = {"attn_res_block_size": block_size, "attn_res_scale": scale, "rms_norm_eps": EPS}
    model = double(build(backbones, case, "attn_res", **fields, **named(switches)))
    assert {type(connection) for connection in connections_of(model)} == {SwitchedAttnRes}
    standard = double(backbones.build(case, rms_norm_eps=EPS))
    # With a cache, delta attention is in float32.
    assert_reads(backbones, model, standard, sheet(weights_of(model), model.config), cached=1e-4)


def test_every_switch_changes_reads_and_without_switches_the_plain_class_is_used(backbones):
    assert {field for switches in SINGLE for field in named(switches)} == SWITCHES.keys()
    plain = build(backbones, "llama", "attn_res", attn_res_block_size=3, **SWITCHES)
    assert {type(connection) for connection in connections_of(plain)} == {AttnRes}
    read = sheet(weights_of(plain), plain.config)
    v = list(torch.randn(8, 2, 3, 32, generator=torch.Generator().manual_seed(0)))
    for switches in SINGLE:
        other = build(backbones, "llama", "attn_res", attn_res_block_size=3, **named(switches))
        assert difference(sheet(weights_of(other), other.config)(v), read(v)) > 1e-3, switches


def test_a_check_changes_no_configuration_and_switches_that_are_off_are_not_saved(backbones):
    config = backbones.member_config("llama", **SWITCHES)
    before = copy.deepcopy(vars(config))
    SwitchedAttnRes.check(config)
    config.check_fields()
    assert vars(config) == before and before.keys() >= SWITCHES.keys()
    assert config.to_dict().keys().isdisjoint(SWITCHES)


@pytest.mark.parametrize(("switches", "block_size"), each_once(SEVERAL, [3, 1]), ids=text)
def test_derivatives_of_a_chain_of_reads_and_writes_equal_finite_differences(backbones, switches, block_size):
    width = max(4, switches.get("heads", 1))
    fields = {"attn_res_block_size": block_size, "hidden_size": width, "num_hidden_layers": 2, **named(switches)}
    config = backbones.member_config("llama", **fields)
    connections = [SwitchedAttnRes(config, sublayer).double() for sublayer in range(5)]
    norm = ResidualNorm(width).double()() if connections[0].has_norm else None
    new = {"generator": torch.Generator().manual_seed(0), "dtype": torch.float64}
    own = [torch.randn(p.shape, **new).requires_grad_() for c in connections for p in c.parameters()]
    embedding = torch.randn(1, 1, width, **new).requires_grad_()

    def chain(embedding: Tensor, *tensors: Tensor) -> Tensor:
        state, inputs, tensors = embedding, [], list(tensors)
        for connection in connections:
            named = {name: tensors.pop(0) for name, _ in connection.named_parameters()}
            read, _, state = torch.func.functional_call(connection, named, (state, norm))
            inputs.append(read)
            state = connection.write(state, torch.sin(read + len(inputs)))  # the output depends on the input
        return torch.stack(inputs)

    assert torch.autograd.gradcheck(chain, (embedding, *own), fast_mode=True)


@torch.no_grad()
@pytest.mark.parametrize("switches", SINGLE + SEVERAL, ids=text)
def test_replaying_reads_and_writes_on_one_hot_outputs_gives_the_mixing_matrix(backbones, switches):
    model = double(build(backbones, "llama", "attn_res", attn_res_block_size=3, **named(switches)))
    connections, reads, outputs = connections_of(model), [], []
    forward, write = SwitchedAttnRes.forward, SwitchedAttnRes.write

    def read_recorded(self, state, norm_weight=None):
        inputs, weights, after = forward(self, state, norm_weight)
        reads.append((self.coefficients(state, norm_weight), inputs))
        outputs.extend([] if outputs else [state])
        return inputs, weights, after

    def write_recorded(self, state, output):
        outputs.append(output)
        return write(self, state, output)

    with mock.patch.multiple(SwitchedAttnRes, forward=read_recorded, write=write_recorded):
        model(backbones.token_ids(), use_cache=False)
    outputs = torch.stack(outputs)
    one_hot = torch.eye(len(outputs), dtype=torch.float64)[..., None, None, None].expand(-1, -1, 2, 11, 1)
    state = one_hot[0]
    for l, (connection, (coefficients, inputs)) in enumerate(zip(connections, reads, strict=True)):  # noqa: E741
        row, state = connection.mix(state, coefficients)  # (outputs, batch, seq, 1 or hidden)
        assert not row[l + 1 :].any()
        assert difference((row * outputs).sum(0), inputs) < 1e-9
        state = connection.write(state, one_hot[l + 1]) if l + 1 < len(outputs) else None


@torch.no_grad()
@pytest.mark.parametrize(
    "switches", [{"window": 2}, {"heads": 4}, {"activation": "sigmoid"}, {"query": "none"}], ids=text
)
def test_depth_attentions_are_the_weights_of_all_sources(backbones, switches):
    model, token_ids = (
        build(backbones, "llama", "attn_res", attn_res_block_size=3, **named(switches)),
        backbones.token_ids(),
    )
    attentions = model(token_ids, output_depth_attentions=True).depth_attentions
    assert [tuple(a.shape) for a in attentions] == [(n, 2, 11) for n in (1, 2, 2, 2, 3, 3, 3, 4, 4, 4, 5)]
    if "activation" not in switches:
        torch.testing.assert_close(torch.stack([a.sum(0) for a in attentions]), torch.ones(11, 2, 11))
    if "window" in switches:
        assert not attentions[-1][1:3].any() and attentions[-1][[0, 3, 4]].all()
    rows = depth_attention(model, token_ids).mean
    torch.testing.assert_close(rows[-1].float(), attentions[-1].mean((1, 2)))
    assert 0 < depth_attention_summary(attentions)["depth_entropy"] <= 1


@pytest.mark.parametrize(
    ("switches", "gated"), [*((one, False) for one in SINGLE + SEVERAL), *((one, True) for one in SEVERAL)], ids=text
)
def test_a_retrofit_starts_as_the_standard_model_or_is_refused(backbones, switches, gated):
    standard, token_ids = backbones.build("llama"), backbones.token_ids()
    if switches == {"gated": True} and not gated:
        return  # this is the plain form
    switches = switches | {"gated": gated}
    inexact = [
        field
        for field in named(switches)
        if field.split("attn_res_")[1] in ("window", "values", "blocks", "count_prior")
    ]
    if inexact and not gated:
        with pytest.raises(ValueError, match="no model can be retrofitted so: `attn_res_") as caught:
            retrofit(standard, block_size=3, **named(switches))
        assert "\n" not in str(caught.value) and any(f"`{field}` is " in str(caught.value) for field in inexact)
        started = build_start(
            backbones, "llama", "attn_res", attn_res_block_size=3, attn_res_scale="sum", **named(switches)
        )
        with torch.no_grad():
            assert difference(started(token_ids).logits, standard(token_ids).logits) > 1e-3
        return
    for block_size in (1, 3):
        model = retrofit(standard, block_size=block_size, **named(switches))
        assert named(switches).items() <= model.config.to_dict().items()
        with torch.no_grad():
            found, expected = model(token_ids).logits, standard(token_ids).logits
        assert torch.equal(found, expected) if gated else difference(found, expected) < 5e-6
        tensors = {name: tensor.detach().clone() for name, tensor in residual_tensors(model).items()}
        assert SwitchedAttnRes.differs_from_standard(model.config, tensors) is None
        query = next(name for name in tensors if name.endswith(("_proj.weight", "_proj.bias")))
        gate = query.rpartition(".")[0] + ".gamma"
        for trained in (query, gate) if gated else (query,):  # behind a closed gate a query may be trained
            tensors[trained].view(-1)[0] = 0.5
            reason = SwitchedAttnRes.differs_from_standard(model.config, tensors)
            assert reason is None if gated and trained == query else f"`{trained}` is trained" in reason


REFUSED = [
    (
        {"query": "none", "key_norm": False},
        "`attn_res_key_norm` is False, but must be True where `attn_res_query` is 'none'",
    ),
    ({"query": "none", "heads": 4}, "`attn_res_heads` is 4, but must be 1 where `attn_res_query` is 'none'"),
    (
        {"activation": "sigmoid", "count_prior": True},
        "`attn_res_count_prior` is True, .* `attn_res_activation` is 'sigmoid'",
    ),
    ({"heads": 5}, r"`attn_res_heads` is 5, .* divides `hidden_size` \(32\)"),
    ({"heads": True}, "`attn_res_heads` is True, but must be an integer"),
    ({"temperature": 0}, "`attn_res_temperature` is 0, but must be a number from 1e-30 to 1e30"),
    ({"temperature": float("nan")}, "`attn_res_temperature` is nan, but must be a number from 1e-30 to 1e30"),
    ({"window": 0}, "`attn_res_window` is 0, but must be None or an integer >= 1"),
    ({"query": "static"}, "`attn_res_query` is 'static', but must be one of 'learned', 'input_dependent', 'none'"),
    ({"activation": None}, "`attn_res_activation` is None, but must be one of 'softmax', 'sigmoid'"),
    ({"values": "rms"}, "`attn_res_values` is 'rms', but must be one of 'raw', 'normed'"),
    ({"blocks": "mean"}, "`attn_res_blocks` is 'mean', but must be one of 'sum', 'rms'"),
    ({"gated": 1}, "`attn_res_gated` is 1, but must be true or false"),
]


@pytest.mark.parametrize(("switches", "message"), REFUSED, ids=text)
def test_switches_that_are_not_allowed_are_refused_in_one_line(backbones, switches, message):
    for refuse in (
        lambda: backbones.member_config("llama", **named(switches)),
        lambda: retrofit(backbones.build("llama"), **named(switches)),
    ):
        with pytest.raises(ValueError, match=message) as caught:
            refuse()
        assert "\n" not in str(caught.value)


# Of the switches, these read the index of the sublayer or the sizes of the blocks.
FEWER = [{"count_prior": True}, {"blocks": "rms"}, {"window": 2, "count_prior": True}, {"window": 2, "blocks": "rms"}]
FEWER += [switches for switches in SEVERAL if switches.get("query") != "none"]


@torch.no_grad()
@pytest.mark.parametrize(("switches", "layers"), each_once(FEWER, [4, 3]), ids=text)
def test_a_model_that_leaves_layers_out_equals_one_without_these_layers(backbones, switches, layers):
    fields = {"attn_res_block_size": 3, **named(switches)}
    whole = double(build(backbones, "llama", "attn_res", num_hidden_layers=5, **fields))
    fewer = double(build(backbones, "llama", "attn_res", num_hidden_layers=layers, **fields))
    fewer.load_state_dict({name: whole.state_dict()[name] for name in fewer.state_dict()})
    token_ids = backbones.token_ids()
    expected = fewer(token_ids, output_depth_attentions=True)
    before = whole(token_ids).logits
    whole.config.num_hidden_layers = layers  # early exit
    early = whole(token_ids, output_depth_attentions=True)
    whole.config.num_hidden_layers = 5
    assert torch.equal(whole(token_ids).logits, before)
    del whole.model.layers[layers:]
    removed = whole(token_ids, output_depth_attentions=True)
    for actual in (early, removed):
        assert torch.equal(actual.logits, expected.logits)
        for weights, right in zip(actual.depth_attentions, expected.depth_attentions, strict=True):
            assert torch.equal(weights, right)


@torch.no_grad()
def test_a_state_of_another_place_is_refused_where_a_switch_needs_the_index(backbones):
    model = build(backbones, "llama", "attn_res", attn_res_count_prior=True, attn_res_block_size=3)
    state, norm = (torch.zeros(1, 2, 32),) * 2, model.model.output_attn_res_norm
    with pytest.raises(ValueError, match="sublayer 10 must read 5 sources, got a state with 2"):
        model.model.output_attn_res_proj(state, norm())
