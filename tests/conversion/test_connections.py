"""Every connection that can start as the standard one is retrofitted exactly, in memory and on disk, and undone."""

import inspect
import json
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from attnres import CONNECTIONS, PRESETS
from attnres.commands import options_convert
from attnres.conversion import retrofit
from attnres.conversion.family import retrofit_config
from attnres.residual_attnres import residual_tensors

from ..modeling_attnres import test_published_layout
from .checkpoints import change_tensors, convert, convert_well, files_of, standard_model, tensors_of

NOT_AT_START = "is not at the start, where "
# Case -> name, options, and a tensor whose change makes it another function, with the reason in the message.
CASES = {
    "attn_res": ("attn_res", {"block_size": 3}, (r"mlp_res_proj.weight", "trained pseudo-query")),
    "denseformer": ("denseformer", {}, (r"self_attention_res_proj.weight", NOT_AT_START)),
    "muddformer": ("muddformer", {}, (r"self_attention_res_proj.up", NOT_AT_START)),
    "dca": ("dca", {"dca_window": 3}, (r"mlp_res_proj.bias", NOT_AT_START)),
    "laurel": ("laurel", {"laurel_rank": 4}, (r"mlp_res_proj.up", "a map of the stream is added")),
    "gated_residual, 3": ("gated_residual", {"streams": 3}, (r"mlp_res_proj.up", "gates depend on the tokens")),
    "residual_scalars": ("residual_scalars", {}, (r"self_attention_res_proj.stream", NOT_AT_START)),
    "scaled": ("scaled", {"scaled_form": "shifted"}, (r"mlp_res_proj.shift", "or it shifts the stream")),
    "frac_connections": (
        "frac_connections",
        {"frac_connections_parts": 4},
        (r"mlp_res_proj.static", "mixes parts of the stream"),
    ),
    "hyper_connections, 3": (
        "hyper_connections",
        {"streams": 3},
        (r"mlp_res_proj.weight", "coefficients depend on the tokens"),
    ),
    "hyper_connections, 4": ("hyper_connections", {"streams": 4}, (r"mlp_res_proj.static", "is trained")),
    "identity_hc, 2": ("identity_hc", {"streams": 2}, (r"mlp_res_proj.bias", NOT_AT_START)),
    "identity_hc, 4": ("identity_hc", {"streams": 4}, (r"mlp_res_proj.scale", NOT_AT_START)),
    "mhc, 2": ("mhc", {"streams": 2}, (r"mlp_res_proj.scale", NOT_AT_START)),
    "mhc, 4": ("mhc", {"streams": 4}, (r"mlp_res_proj.bias", NOT_AT_START)),
    "mhc_lite, 4": ("mhc_lite", {"streams": 4}, (r"mlp_res_proj.bias", NOT_AT_START)),
}
# A connection without a case of its own has one without options, in which any of its tensors is changed.
CASES |= {
    name: (name, {}, ("", NOT_AT_START))
    for name, connection in CONNECTIONS.items()
    if connection.retrofit is not None and name not in ("standard", *(case[0] for case in CASES.values()))
}
EVERY_CASE = pytest.mark.parametrize("case", CASES)
# On Kimi Linear, one connection of each kind of state.
OF_EACH_KIND = ["attn_res", "denseformer", "mhc, 4"]
EVERY_CASE_AND_KIND = pytest.mark.parametrize(
    ("case", "model_type"), [*((case, "llama") for case in CASES), *((case, "kimi_linear") for case in OF_EACH_KIND)]
)
# On disk, which takes ten times as long, also a connection that starts at random, and one that has vectors only.
ON_DISK = [
    *((case, "llama") for case in ("attn_res", "identity_hc, 4", "residual_scalars", "mhc, 2")),
    *((case, "kimi_linear") for case in OF_EACH_KIND[:2]),
]
KIMI = {
    "num_hidden_layers": 4,
    "layer_types": ["linear_attention"] * 3 + ["full_attention"],
    "mlp_layer_types": ["dense"] + ["sparse"] * 3,
    "num_key_value_heads": 4,
    "q_lora_rank": None,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
    "linear_num_heads": 2,
    "linear_head_dim": 16,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "moe_intermediate_size": 16,
}
IDS = torch.randint(3, 150, (2, 17), generator=torch.Generator().manual_seed(1))


def source_model(model_type: str) -> PreTrainedModel:
    return standard_model(model_type, **(KIMI if model_type == "kimi_linear" else {}))


def difference(result: PreTrainedModel, expected: PreTrainedModel) -> float:
    """Return the largest difference of two models' logits, as a share of the largest logit."""
    with torch.no_grad():
        a, b = (model.eval()(IDS % model.config.vocab_size).logits for model in (result, expected))
    assert b.abs().max() >= 2, "the comparison needs logits of some size"
    return ((a - b).abs().max() / b.abs().max()).item()


def assert_exact(result: PreTrainedModel, expected: PreTrainedModel) -> None:
    """Assert that two models are equal up to rounding, and nearer still if both use the family's delta attention.

    Two connections round more than the others: attention residuals multiply a mean of n sources by n, and streams of
    Gated Residual have different gains.
    """
    assert difference(result, expected) <= 1e-5
    nearer = 1e-5 if result.config.residual_connection in ("attn_res", "gated_residual") else 1e-6
    assert difference(result, retrofit(expected, "standard")) <= nearer


def flags(options: dict) -> list[str]:
    """Return options of a retrofit as those of the command: a field of the configuration by `--set`."""
    known = inspect.signature(options_convert.convert).parameters
    pairs = (
        (f"--{name.replace('_', '-')}", str(value)) if name in known else ("--set", f"{name}={value}")
        for name, value in options.items()
    )
    return [part for pair in pairs for part in pair]


@EVERY_CASE_AND_KIND
def test_a_retrofit_in_memory_is_exact_also_after_saving_and_loading(case, model_type, tmp_path):
    name, options, _ = CASES[case]
    model = source_model(model_type)
    result = retrofit(model, name, **options)
    assert result.config.residual_connection == name
    assert all(
        getattr(result.config, CONNECTIONS[name].options.get(key, key)) == value for key, value in options.items()
    )
    assert residual_tensors(result) and not any(tensor.is_meta for tensor in result.state_dict().values())
    assert_exact(result, model)
    result.save_pretrained(tmp_path / "saved")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    assert again.config.residual_connection == name
    assert_exact(again, model)


@EVERY_CASE
def test_a_retrofit_in_half_precision_keeps_dtype_and_mode_and_is_standard_until_it_is_trained(case):
    name, options, (part, reason) = CASES[case]
    result = retrofit(source_model("llama").to(torch.bfloat16).train(), name, **options)
    added = {id(tensor) for tensor in residual_tensors(result).values()}
    dtypes = {(id(parameter) in added, parameter.dtype) for parameter in result.parameters()}
    added_dtype = torch.float32 if CONNECTIONS[name].float32 else torch.bfloat16
    assert dtypes <= {(False, torch.bfloat16), (True, added_dtype)} and result.training
    assert all(tensor.requires_grad for tensor in residual_tensors(result).values())
    # Two random starts have equal numbers by chance, many of them in 16 bits. These do not count as trained.
    tensors = residual_tensors(result)
    assert result.config.connection.differs_from_standard(result.config, tensors) is None
    trained = next(tensor for tensor in sorted(tensors) if f"layers.1.{part}" in tensor)
    with torch.no_grad():
        tensors[trained].add_(0.5)
    difference = result.config.connection.differs_from_standard(result.config, tensors)
    assert f"`{trained}`" in difference and reason in difference


@pytest.fixture(scope="module")
def sources(tmp_path_factory) -> Path:
    """Return a folder with `llama` and `kimi_linear` in shards, which tests must not change."""
    folder = tmp_path_factory.mktemp("sources")
    for model_type in ("llama", "kimi_linear"):
        source_model(model_type).save_pretrained(folder / model_type, max_shard_size="40KB")
    return folder


published = test_published_layout.published  # a fixture: the layout in which Kimi Linear was published, written by hand


@pytest.mark.slow
@pytest.mark.parametrize("case", OF_EACH_KIND)
def test_convert_retrofits_kimi_linear_as_it_was_published(case, published, tmp_path):
    name, options, _ = CASES[case]
    convert_well(published, tmp_path / "result", "--residual", name, *flags(options))
    result = AutoModelForCausalLM.from_pretrained(tmp_path / "result")
    assert_exact(result, AutoModelForCausalLM.from_pretrained(published))


def test_a_connection_that_starts_at_random_starts_the_same_each_time(sources, tmp_path):
    for name in ("one", "other"):
        torch.rand(1)
        options = ["--residual", "identity_hc", "--no-verify"]
        convert_well(sources / "llama", tmp_path / name / "model", *options)  # one name, because the card has it
    assert files_of(tmp_path / "one") == files_of(tmp_path / "other")
    weights = [t for n, t in tensors_of(tmp_path / "one" / "model").items() if n.endswith("_res_proj.weight")]
    assert not torch.equal(weights[0], weights[1]), "the connections of two sublayers must differ"


@pytest.mark.parametrize(("case", "model_type"), ON_DISK)
def test_convert_verifies_a_retrofit_that_loads_and_can_be_undone_until_it_is_trained(
    case, model_type, sources, tmp_path
):
    name, options, (tensor, reason) = CASES[case]
    source, result = sources / model_type, tmp_path / "result"
    run = convert_well(source, result, "--residual", name, *flags(options))
    assert "Verified: " in run.out and "Not the same" not in run.out
    before, after = files_of(source), files_of(result)
    assert all(after[file] == before[file] for file in before if file.endswith(".safetensors"))
    model = AutoModelForCausalLM.from_pretrained(result)
    assert model.config.residual_connection == name
    added = tensors_of(result).keys() - tensors_of(source).keys()
    assert added == residual_tensors(model).keys()
    assert_exact(model, AutoModelForCausalLM.from_pretrained(source))

    convert_well(result, tmp_path / "back", "--to", "standard")
    after, index = files_of(tmp_path / "back"), "model.safetensors.index.json"
    assert after.keys() == before.keys()
    assert [file for file in before if after[file] != before[file] and file != index] == []
    assert {*CONNECTIONS[name].fields, "residual_connection"}.isdisjoint(json.loads(after["config.json"]))

    trained = next(n for n in sorted(added) if f"layers.1.{tensor}" in n)
    change_tensors(result, {trained: tensors_of(result)[trained] + 0.5})
    error = convert(result, tmp_path / "again", "--to", "standard").error
    assert "no standard decoder computes the same function" in error and f"`{trained}`" in error and reason in error
    assert not (tmp_path / "again").exists()


@pytest.mark.parametrize("name", ["denseformer", "identity_hc"])
def test_a_connection_without_blocks_cannot_be_regrouped(name, sources, tmp_path):
    convert_well(sources / "llama", tmp_path / "result", "--residual", name, "--no-verify")
    error = convert(tmp_path / "result", tmp_path / "regrouped", "--set-block-size", "2").error
    assert f"residual_connection={name!r}, which has no option --set-block-size." in error


# ---- Fields by name


def test_fields_that_are_set_by_name_give_another_form_that_is_exact(sources, tmp_path):
    fields = {
        "attn_res_gated": True,
        "attn_res_query": "input_dependent",
        "attn_res_window": 2,
        "attn_res_blocks": "rms",
    }
    given = [part for field, value in fields.items() for part in ("--set", f"{field}={json.dumps(value)}")]
    run = convert_well(sources / "llama", tmp_path / "result", "--block-size", "3", *given)
    assert "Verified: " in run.out and "query input_dependent, window 2, blocks rms, gated True" in run.out
    result = AutoModelForCausalLM.from_pretrained(tmp_path / "result")
    assert (fields | {"attn_res_block_size": 3}).items() <= result.config.to_dict().items()
    assert any(name.endswith("_proj.gamma") for name in residual_tensors(result))
    assert_exact(result, AutoModelForCausalLM.from_pretrained(sources / "llama"))
    convert_well(tmp_path / "result", tmp_path / "regrouped", "--set-block-size", "2")
    convert_well(tmp_path / "regrouped", tmp_path / "back", "--to", "standard")
    assert json.loads((tmp_path / "back" / "config.json").read_text()).keys().isdisjoint(fields)

    gate = "model.layers.1.mlp_res_proj.gamma"
    change_tensors(tmp_path / "result", {gate: torch.ones(1)})
    for options in (["--to", "standard"], ["--set-block-size", "2"]):
        error = convert(tmp_path / "result", tmp_path / "again", *options).error
        assert f"`{gate}` is trained" in error


@pytest.mark.parametrize("preset", PRESETS)
def test_a_preset_with_value_residuals_is_exact_and_undone_until_it_is_trained(preset, sources, tmp_path):
    options = ["--residual", preset, "--block-size", "2", "--set", "value_residual=standard"]
    run = convert_well(sources / "llama", tmp_path / "result", *options)
    assert "Verified: " in run.out and ", value residuals" in run.out
    result = AutoModelForCausalLM.from_pretrained(tmp_path / "result")
    assert (PRESETS[preset] | {"attn_res_block_size": 2}).items() <= result.config.to_dict().items()
    assert_exact(result, AutoModelForCausalLM.from_pretrained(sources / "llama"))
    convert_well(tmp_path / "result", tmp_path / "back", "--to", "standard")
    before, after = files_of(sources / "llama"), files_of(tmp_path / "back")
    assert [file for file in before if after[file] != before[file] and not file.endswith("index.json")] == []
    name = "model.layers.1.self_attn.value_residual.weight"
    change_tensors(tmp_path / "result", {name: torch.ones(2)})
    error = convert(tmp_path / "result", tmp_path / "again", "--to", "standard").error
    assert f"`{name}` is not zero: its attention sees values of the first layer" in error


@pytest.mark.parametrize("added", [{"value_residual": "standard"}, {"attention_gate": "sdpa"}], ids=str)
@pytest.mark.parametrize("name", ["denseformer", "muddformer"])
def test_added_tensors_of_attention_are_not_taken_for_weights_of_the_connection(name, added, sources, tmp_path):
    fields = [part for field, value in added.items() for part in ("--set", f"{field}={value}")]
    run = convert_well(sources / "llama", tmp_path / "result", "--residual", name, *fields)
    assert "Verified: " in run.out and "Not the same" not in run.out


def test_an_option_replaces_the_value_of_a_preset():
    config = retrofit_config(AutoConfig.for_model("llama"), "delta", scale="sum")
    assert config.attn_res_gated and config.attn_res_scale == "sum"


def test_static_weights_cannot_be_regrouped(sources, tmp_path):
    convert_well(sources / "llama", tmp_path / "result", "--set", "attn_res_query=none", "--no-verify")
    error = convert(tmp_path / "result", tmp_path / "again", "--set-block-size", "2").error
    assert "`attn_res_query` is 'none'" in error


@pytest.mark.parametrize(
    ("options", "code", "message"),
    [
        ("--set attn_res_gate=true", 2, "--residual attn_res has no such field. It has attn_res_block_size, "),
        (
            "--residual identity_hc --set attn_res_gated=true",
            2,
            "--residual identity_hc has no such field. It has residual_streams, residual_streams_start, ",
        ),
        ("--set attn_res_gated", 2, "--set attn_res_gated: give FIELD=VALUE"),
        ("--set attn_res_gated=true --set attn_res_gated=false", 2, "each field once"),
        ("--set attn_res_gated={", 2, "the value is no YAML"),
        ("--set attn_res_heads=2020-13-45", 2, "the value is no YAML"),
        ("--set attention_gate=", 2, "--set attention_gate=: give FIELD=VALUE"),
        ("--set attn_res_gated=true --to standard", 2, "--to and --set exclude each other"),
        ("--set attn_res_query=static", 1, "but must be one of 'learned', 'input_dependent', 'none'"),
        ("--set attn_res_window=2", 1, "no model can be retrofitted so: `attn_res_window` is 2: sources are dropped"),
        (
            "--set residual_streams=false --residual identity_hc",
            1,
            "`residual_streams` is False, but must be an integer",
        ),
        ("--block-size 2 --set attn_res_block_size=3", 1, "give one of block_size and attn_res_block_size, not both"),
        (
            "--residual residual_scalars --set residual_scalars_start=nanochat",
            1,
            "`residual_scalars_start` is 'nanochat', but must be 'standard' in a retrofit",
        ),
        ("--full --set attn_res_block_size=3", 1, "give one of block_size, num_blocks and full"),
    ],
)
def test_an_unknown_field_or_value_is_refused_in_one_line(options, code, message, sources, tmp_path):
    run = convert(sources / "llama", tmp_path / "result", *options.split())
    assert run.code == code and message in run.err
    assert not (tmp_path / "result").exists()
    if code == 1:
        assert "\n" not in run.error


# ---- Refusals


WRONG = [
    ("attn_res", {"streams": 4}, "`streams`"),
    ("denseformer", {"block_size": 2}, "`block_size`"),
    ("denseformer", {"full": True}, "`full`"),
    ("identity_hc", {"num_blocks": 2}, "`num_blocks`"),
    ("identity_hc", {"scale": "sum"}, "`scale`"),
]


@pytest.mark.parametrize(("name", "options", "message"), WRONG)
def test_an_option_that_the_connection_lacks_is_refused_in_python_and_by_the_command(name, options, message, tmp_path):
    with pytest.raises(ValueError, match=f"{message}.* no option of the residual connection '{name}'") as caught:
        retrofit(standard_model(), name, **options)
    assert "\n" not in str(caught.value)
    given = [part for part in flags(options) if part != "True"]
    run = convert(tmp_path / "absent", tmp_path / "result", "--residual", name, *given)
    assert run.code == 2
    assert f"{given[0]} belongs to --residual " in run.err and f"not to {name}." in run.err


def test_values_that_are_not_allowed_are_refused_before_the_source_is_opened(tmp_path):
    for options, message in (
        (["--residual", "identity_hc", "--streams", "1"], "'--streams'"),
        (["--residual", "siblings"], "'identity_hc'"),
    ):
        run = convert(tmp_path / "absent", tmp_path / "result", *options)
        assert run.code == 2 and message in run.err


def test_an_unknown_connection_is_refused_with_the_list():
    with pytest.raises(ValueError, match=r"no residual connection 'siblings'; there is 'attn_res', .*'identity_hc'"):
        retrofit(standard_model(), "siblings")


@pytest.mark.parametrize("name", ["denseformer", "identity_hc"])
def test_a_retrofit_is_not_retrofitted(name):
    result = retrofit(standard_model(), name)
    with pytest.raises(ValueError, match=f"residual_connection='{name}' already"):
        retrofit(result)


def test_the_command_line_has_every_option_of_every_connection():
    known = inspect.signature(options_convert.convert).parameters
    for name in CONNECTIONS:
        assert {option for option in CONNECTIONS[name].retrofit_options() if option not in known} == set(), name


def test_the_configuration_of_a_backbone_has_no_field_of_any_connection(tmp_path):
    retrofit(standard_model(), "identity_hc", streams=3).save_pretrained(tmp_path / "result")
    assert AutoConfig.from_pretrained(tmp_path / "result").residual_streams == 3
    convert_well(tmp_path / "result", tmp_path / "back", "--to", "standard")
    fields = json.loads((tmp_path / "back" / "config.json").read_text())
    assert not [key for key in fields if "res" in key.split("_")[0] and key.startswith(("attn_res", "residual"))]
