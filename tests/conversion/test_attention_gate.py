"""Adding a gate to a model without one is exact or refused: in memory, on disk, and back."""

import json

import pytest
import torch
from transformers import AutoModelForCausalLM

from attnres.attention_gate_attnres import GATE_FIELDS, gate_tensors
from attnres.checkpoints.checkpoint import Checkpoint
from attnres.checkpoints.copies import copyable
from attnres.conversion import retrofit
from attnres.conversion.convert import Conversion, prepare_retrofit, prepare_standard
from attnres.residual_attnres import residual_tensors
from attnres.utils.declared import declared_connections

from ..modeling_attnres import test_published_layout
from .checkpoints import change_json, change_tensors, convert, convert_well, files_of, tensors_of
from .test_connections import difference, source_model

GATE = "model.layers.1.self_attn.g_proj.weight"
SILU = {"attention_gate_form": "add", "attention_gate_activation": "silu"}
DOUBLE = {"attention_gate_form": "multiply", "attention_gate_activation": "sigmoid", "attention_gate_scale": "double"}
FORMS = [
    *({"attention_gate": place} for place in ("sdpa", "value", "key", "query", "output")),
    *({"attention_gate": "sdpa", "attention_gate_granularity": one} for one in ("headwise", "head_shared")),
    *({"attention_gate": place, **SILU} for place in ("sdpa", "value", "output")),
]
published = test_published_layout.published  # a fixture: the layout in which Kimi Linear was published, written by hand


def write_to(folder, conversion: Conversion) -> None:
    folder.mkdir()
    conversion.write(folder)


def open_at(folder, tmp_path):
    (tmp_path / "scratch").mkdir(exist_ok=True)
    return copyable(Checkpoint(folder), tmp_path / "scratch")


@pytest.mark.parametrize("form", FORMS, ids=lambda form: ",".join(form.values()))
@pytest.mark.parametrize("connection", ["standard", "attn_res"])
def test_a_retrofit_with_a_gate_is_exact_for_every_place_and_connection(connection, form):
    model = source_model("llama")
    result = retrofit(model, connection, **form)
    assert difference(result, model) <= 1e-6 and not any(tensor.is_meta for tensor in result.state_dict().values())
    assert (result.config.residual_connection, result.config.attention_gate) == (connection, form["attention_gate"])
    assert result.config.attention_gate_scale == ("unit" if "attention_gate_form" in form else "double")
    gates = gate_tensors(result)
    assert len(gates) == 3 and all(tensor.requires_grad and not tensor.any() for tensor in gates.values())
    with torch.no_grad():
        for tensor in gates.values():
            tensor.normal_()
    assert difference(result, model) > 1e-3


@pytest.mark.parametrize("place", ["sdpa", "query", "output"])
def test_a_gate_is_exact_on_latent_attention(place):
    model = source_model("kimi_linear")
    result = retrofit(model, "identity_hc", attention_gate=place)
    assert difference(result, retrofit(model, "standard")) <= 1e-6 and len(gate_tensors(result)) == 1


def test_a_retrofit_in_half_precision_adds_gates_of_its_dtype():
    result = retrofit(source_model("llama").bfloat16().train(), attention_gate="sdpa")
    assert {parameter.dtype for parameter in result.parameters()} == {torch.bfloat16} and result.training


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"attention_gate_scale": "unit"},
            "'multiply', .* 'sigmoid', .* 'unit' changes attention even at zero .*; mul",
        ),
        ({"attention_gate_activation": "silu"}, "'multiply', .* 'silu', .* 'unit' changes attention even"),
        ({"attention_gate_form": "add"}, "'add', .* 'sigmoid', .* 'unit' changes attention even"),
        ({"attention_gate": "mlp"}, r"^`attention_gate` is 'mlp', but must be one of None, 'sdpa'"),
        ({"attention_gate": None, "attention_gate_form": "add"}, r"^`attention_gate_form` is 'add', but without `att"),
    ],
)
def test_a_gate_that_would_change_the_function_is_refused(options, message, tmp_path):
    model = source_model("llama")
    model.save_pretrained(tmp_path / "model")
    for run in (
        lambda: retrofit(model, **{"attention_gate": "sdpa", **options}),
        lambda: prepare_retrofit(open_at(tmp_path / "model", tmp_path), **{"attention_gate": "sdpa", **options}),
    ):
        with pytest.raises(ValueError, match=message) as error:
            run()
        assert "\n" not in str(error.value)


def test_a_place_that_the_backbone_lacks_is_refused(tmp_path):
    model = source_model("phi3")
    with pytest.raises(ValueError, match=r"^`attention_gate` is 'value', .* attention of 'phi3' has no v_proj\.$"):
        retrofit(model, attention_gate="value")


def test_a_second_gate_is_refused_and_a_trained_one_stays():
    gated = retrofit(source_model("llama"), "standard", attention_gate="value")
    with torch.no_grad():
        for tensor in gate_tensors(gated).values():
            tensor.normal_()
    trained = {name: tensor.detach().clone() for name, tensor in gate_tensors(gated).items()}
    result = retrofit(gated, "attn_res", block_size=2)
    assert all(torch.equal(tensor, trained[name]) for name, tensor in gate_tensors(result).items())
    assert difference(result, gated) <= 1e-5
    with pytest.raises(ValueError, match=r"has attention_gate='value' already"):
        retrofit(gated, "attn_res", attention_gate="sdpa")


@pytest.mark.parametrize(("connection", "model_type"), [("standard", "kimi_linear"), ("attn_res", "llama")])
def test_a_gate_added_on_disk_is_exact_and_can_be_removed_until_it_is_trained(connection, model_type, tmp_path):
    source = source_model(model_type)
    source.save_pretrained(tmp_path / "source", max_shard_size="40KB")
    conversion = prepare_retrofit(open_at(tmp_path / "source", tmp_path), connection, attention_gate="sdpa")
    assert conversion.difference is None
    write_to(tmp_path / "result", conversion)
    result, report = AutoModelForCausalLM.from_pretrained(tmp_path / "result", output_loading_info=True)
    assert not any(report.values()) and result.config.attention_gate_scale == "double"
    assert difference(result, source if model_type == "llama" else retrofit(source, "standard")) <= 1e-6
    added = set(tensors_of(tmp_path / "result")) - set(tensors_of(tmp_path / "source"))
    assert added == {*residual_tensors(result), *gate_tensors(result)} and gate_tensors(result)

    convert_well(tmp_path / "result", tmp_path / "back", "--to", "standard")
    before, after = files_of(tmp_path / "source"), files_of(tmp_path / "back")
    assert after.keys() == before.keys()
    assert [file for file in before if after[file] != before[file] and not file.endswith("index.json")] == []
    assert GATE_FIELDS.keys().isdisjoint(json.loads(after["config.json"]))

    (name, *_) = gate_tensors(result)
    change_tensors(tmp_path / "result", {name: tensors_of(tmp_path / "result")[name] + 0.5})
    run = convert(tmp_path / "result", tmp_path / "again", "--to", "standard")
    assert run.code == 1 and f"`{name}` is a trained attention gate, with entries up to 0.5" in run.err
    change_tensors(tmp_path / "result", {name: None})
    assert convert(tmp_path / "result", tmp_path / "again", "--to", "standard").code == 1


def test_a_gate_that_is_never_exact_cannot_be_removed(tmp_path):
    model = retrofit(source_model("llama"), "standard", attention_gate="sdpa")
    model.save_pretrained(tmp_path / "model")
    change_json(tmp_path / "model" / "config.json", attention_gate_scale="unit")
    with pytest.raises(ValueError, match=r"same function: a gate with .* 'unit' changes attention"):
        prepare_standard(open_at(tmp_path / "model", tmp_path))


def test_kimi_linear_as_it_was_published_can_get_a_gate(published, tmp_path):
    write_to(tmp_path / "result", prepare_retrofit(open_at(published, tmp_path), attention_gate="sdpa"))
    result = AutoModelForCausalLM.from_pretrained(tmp_path / "result")
    assert gate_tensors(result)
    expected = retrofit(AutoModelForCausalLM.from_pretrained(published), "standard")
    assert difference(result, expected) <= 1e-5


def test_a_gate_for_a_quantised_checkpoint_is_refused(tmp_path):
    source_model("llama").save_pretrained(tmp_path / "model")
    change_json(tmp_path / "model" / "config.json", quantization_config={"quant_method": "compressed-tensors"})
    with pytest.raises(ValueError, match="is quantised, and its gates would load as quantised"):
        prepare_retrofit(open_at(tmp_path / "model", tmp_path), attention_gate="sdpa")


def test_every_retrofit_takes_the_fields_of_gates():
    assert all(GATE_FIELDS.keys() <= {*connection.fields} for connection in declared_connections().values())


@pytest.mark.parametrize(
    ("value", "message"),
    [(torch.nan, f"`{GATE}` holds NaN or infinite values"), (None, f"missing: {GATE}. Restore them")],
    ids=["not finite", "one missing"],
)
def test_a_checkpoint_with_a_damaged_gate_does_not_load(value, message, tmp_path):
    model = retrofit(source_model("llama"), "standard", attention_gate="sdpa")
    model.save_pretrained(tmp_path)
    change_tensors(tmp_path, {GATE: value and torch.full_like(model.get_parameter(GATE), value)})
    with pytest.raises(ValueError) as error:
        AutoModelForCausalLM.from_pretrained(tmp_path)
    assert message in str(error.value)
