"""Inspections of members, of standard models and of their retrofits, loaded in different ways; and wrong input."""

import hashlib
import json
import os
import threading
from dataclasses import fields
from importlib.metadata import version

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.dynamic_module_utils import get_class_from_dynamic_module

import attnres
from attnres.analysis import (
    InspectedText,
    Inspection,
    depth_attention,
    depth_mixing,
    inspect_model,
    inspection,
    magnitudes,
    write_report,
)
from attnres.analysis.record import to_csv, to_json
from attnres.analysis.text import cut, language_reference, read_text
from attnres.conversion import retrofit

from ..modeling_attnres.connections import build

SMALL = {"length": 64, "tokens": 256, "intervention_tokens": 64, "batch_size": 2}


@pytest.fixture(scope="module")
def source(assets):
    return assets / "checkpoints" / "stories260K-hf"


@pytest.fixture(scope="module")
def tokenizer(source):
    return AutoTokenizer.from_pretrained(source)


@pytest.fixture(scope="module")
def text(assets):
    return read_text(assets / "corpora" / "tinystories" / "valid.txt", 1000)


@pytest.fixture(scope="module")
def standard(source, tokenizer, text) -> Inspection:
    return inspect_model(AutoModelForCausalLM.from_pretrained(source), tokenizer, text, **SMALL)


def assert_alike(result: object, expected: object, relative: float = 1e-4) -> None:
    """Assert that the numbers of two measurements are equal up to rounding."""
    for field in fields(expected):
        a, b = getattr(result, field.name), getattr(expected, field.name)
        if isinstance(b, Tensor):
            scale = b.nan_to_num().abs().max().item()
            torch.testing.assert_close(a, b, rtol=relative, atol=relative * scale, equal_nan=True)


def test_a_standard_model_has_a_matrix_of_ones(standard):
    assert standard.depth_attention is None
    assert torch.equal(standard.mixing.mean, torch.ones(11, 11, dtype=torch.float64).tril())
    assert not standard.mixing.spread.any()
    assert standard.model["class"] == "LlamaForCausalLM" and standard.model["connection"] == "standard"
    assert (standard.text["sequences"], standard.text["tokens"]) == (4, 256)
    assert [weights.shape for weights in standard.passage.weights] == [(n, 64) for n in range(1, 12)]


@pytest.mark.parametrize("residual", ["attn_res", "mhc"])
def test_a_retrofit_has_the_measurements_of_its_source(source, tokenizer, text, standard, residual):
    result = inspect_model(retrofit(source, residual), tokenizer, text, **SMALL)
    torch.testing.assert_close(result.mixing.mean, standard.mixing.mean, rtol=1e-5, atol=1e-5)
    assert result.interventions.loss == pytest.approx(standard.interventions.loss, abs=1e-4)
    for name in ("inputs", "outputs", "gradients", "largest"):
        torch.testing.assert_close(
            getattr(result.magnitudes, name), getattr(standard.magnitudes, name), rtol=1e-2, atol=0
        )
    assert_alike(result.sinks, standard.sinks, 1e-3)
    if residual == "attn_res":
        assert result.depth_attention.distance.max() < 1e-6 and result.depth_attention.entropy[1:].min() > 0.999999
        # The embedding is a source of both models, and is hidden from the same readers.
        assert result.interventions.hidden[0] == pytest.approx(standard.interventions.hidden[0].item(), abs=1e-3)
    else:
        assert_alike(result.interventions, standard.interventions, 1e-3)


@pytest.mark.slow
def test_an_inspection_has_a_short_repr_and_a_figure(source, tokenizer, text, standard, assets, tmp_path):
    result = inspect_model(
        retrofit(source), tokenizer, assets / "corpora" / "tinystories" / "valid.txt", **SMALL | {"tokens": 64}
    )
    assert result.text["name"] == "valid.txt"
    assert len(repr(result)) < 2000 and "mean=<11 x 6>" in repr(result.depth_attention)
    assert result == result and result != standard
    for one in (result, standard):
        one.plot(tmp_path / "map.png")
        assert (tmp_path / "map.png").read_bytes().startswith(b"\x89PNG")
    write_report([standard, result], tmp_path / "report")
    assert (tmp_path / "report" / "report.html").exists()


def test_an_inspection_has_the_numbers_of_the_single_measurements(source, tokenizer, text):
    model = retrofit(source)
    result = inspect_model(model, tokenizer, text, **SMALL)
    ids, words = cut(text, tokenizer, 64, 256)
    assert_alike(result.depth_attention, depth_attention(model, ids))
    assert_alike(result.mixing, depth_mixing(model, ids))
    assert_alike(result.magnitudes, magnitudes(model, ids.split(2)))
    assert words[0] == "<s>" and text.content.startswith("".join(words[1:]))
    assert ids[:, 0].eq(tokenizer.bos_token_id).all()
    assert tokenizer.decode(ids[0, 1:]) == "".join(words[1:])


@pytest.mark.slow
def test_remote_code_bfloat16_and_adapters_give_the_same_numbers(source, tokenizer, text, tmp_path):
    """Classes of remote code are not those of the package. An inspection leaves no trace in a model."""
    model = retrofit(source)
    for name, tensor in model.named_parameters():
        if name.endswith("_res_proj.weight"):
            torch.nn.init.normal_(tensor.data, std=0.1)
    model.save_pretrained(tmp_path / "saved")
    expected = inspect_model(model, tokenizer, text, **SMALL)
    remote_class = get_class_from_dynamic_module("backbones_attnres.AttnResLlamaForCausalLM", str(tmp_path / "saved"))
    remote = remote_class.from_pretrained(tmp_path / "saved")
    assert type(remote).__module__.startswith("transformers_modules")
    remote.train()
    assert_alike(inspect_model(remote, tokenizer, text, **SMALL).interventions, expected.interventions, 1e-3)
    assert all(module.training for module in remote.modules())
    assert not any({"forward", "write"} & vars(module).keys() for module in remote.modules())

    narrow = inspect_model(model.to(torch.bfloat16), tokenizer, text, **SMALL)
    torch.testing.assert_close(narrow.magnitudes.inputs, expected.magnitudes.inputs, rtol=0.05, atol=0)
    result, exact = narrow.depth_attention.mean, expected.depth_attention.mean
    torch.testing.assert_close(result, exact, rtol=0.05, atol=0.01, equal_nan=True)

    model.to(torch.float32)
    saved = attnres.peft_modules_to_save(model)
    adapted = get_peft_model(model, LoraConfig(target_modules="all-linear", modules_to_save=saved))
    assert_alike(inspect_model(adapted, tokenizer, text, **SMALL).depth_attention, narrow.depth_attention, 0.05)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_gpu_gives_the_same_numbers(source, tokenizer, text):
    expected = inspect_model(retrofit(source), tokenizer, text, **SMALL)
    for place in ("cuda", "auto"):
        model = AutoModelForCausalLM.from_pretrained(source, device_map=place)
        result = inspect_model(retrofit(model), tokenizer, text, **SMALL)
        assert_alike(result.depth_attention, expected.depth_attention, 1e-3)
        assert_alike(result.mixing, expected.mixing, 1e-3)
        assert_alike(result.magnitudes, expected.magnitudes, 1e-2)
        assert_alike(result.interventions, expected.interventions, 1e-2)


@pytest.mark.slow
def test_compiled_and_offloaded_models_give_the_same_numbers(source, tokenizer, text, standard, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(source)
    member = retrofit(model, "attn_res")
    member.save_pretrained(tmp_path / "member")
    expected = inspect_model(member, tokenizer, text, **SMALL)
    member.compile(backend="eager")
    assert_alike(inspect_model(member, tokenizer, text, **SMALL).magnitudes, expected.magnitudes, 1e-3)

    parts = dict.fromkeys(["model.embed_tokens", "model.norm", "model.rotary_emb", "lm_head"], "cpu")
    names = "model.output_attn_res_proj", "model.output_attn_res_norm"
    parts |= {f"model.layers.{i}": "cpu" if i < 2 else "disk" for i in range(5)} | dict.fromkeys(names, "disk")
    offloaded = AutoModelForCausalLM.from_pretrained(
        tmp_path / "member", device_map=parts, offload_folder=tmp_path / "offload"
    )
    assert any(parameter.is_meta for parameter in offloaded.parameters())
    result = inspect_model(offloaded, tokenizer, text, **SMALL)
    assert_alike(result.depth_attention, expected.depth_attention)
    assert_alike(result.mixing, expected.mixing)
    assert_alike(result.interventions, expected.interventions, 1e-3)
    assert_alike(result.magnitudes, expected.magnitudes, 1e-3)


@pytest.mark.parametrize(
    ("connection", "measure"),
    [("mhc", lambda *given: depth_mixing(*given).mean), ("attn_res", lambda *given: magnitudes(*given).inputs)],
    ids=["mixing", "sizes"],
)
def test_another_thread_may_run_the_model_meanwhile(backbones, connection, measure):
    model, ids = build(backbones, "llama", connection), backbones.token_ids()
    expected, logits = measure(model, ids), model(ids).logits
    is_over, others = threading.Event(), []

    def run() -> None:
        while not is_over.is_set():
            with torch.no_grad():
                others.append(model(ids).logits)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        result = [measure(model, ids) for _ in range(5)]
    finally:
        is_over.set()
        thread.join()
    assert all(torch.equal(one, expected) for one in result)
    assert others and all(torch.allclose(other, logits, atol=1e-5) for other in others)


# --- numbers in files


@pytest.mark.parametrize("path", ["file", "pipe"])
def test_the_digest_of_a_text_is_that_of_the_whole_file_and_its_mark_is_left_out(tmp_path, path):
    content = b"\xef\xbb\xbf\r\n  Once upon\r\na time.\r\n" + b"Lily \xc3\xa9.\n" * 1_000_000
    if path == "file":
        (tmp_path / path).write_bytes(content)
        text = read_text(tmp_path / path, 2)
    else:
        os.mkfifo(tmp_path / path)
        writer = threading.Thread(target=(tmp_path / path).write_bytes, args=[content])
        writer.start()
        text = read_text(tmp_path / path, 2)
        writer.join()
    assert text.sha256 == hashlib.sha256(content).hexdigest()
    assert text.content.startswith("Once upon\na time.\nLily é.") and len(text.content) < 41
    assert InspectedText("text", "é").sha256 == hashlib.sha256("é".encode()).hexdigest()


def test_no_more_tokens_are_read_than_given(source, tokenizer, text, tmp_path, monkeypatch):
    (tmp_path / "text.txt").write_text(text.content)
    model = retrofit(source, num_blocks=3)
    result = inspect_model(model, tokenizer, tmp_path / "text.txt", tokens=20, intervention_tokens=0)
    assert (result.text["tokens"], result.text["sequences"], result.text["length"]) == (20, 1, 20)
    assert result.magnitudes.tokens == result.mixing.tokens == len(result.passage.words) == 20
    monkeypatch.setattr(inspection, "PASSAGE_BYTES", 1000)
    for read in (model, AutoModelForCausalLM.from_pretrained(source)):
        short = inspect_model(read, tokenizer, text, tokens=20, intervention_tokens=0)
        weights = 2 * sum(range(1, len(short.depth.consumers) + 1))  # bytes of a token
        assert len(short.passage.words) == short.passage.weights[-1].shape[1] == 1000 // weights < 20
    with pytest.raises(ValueError, match="`tokens` must be at least 2, got 1"):
        inspect_model(model, tokenizer, text, tokens=1)


@pytest.mark.slow
def test_the_same_call_gives_the_same_bytes(source, tokenizer, text):
    def write() -> tuple[str, dict[str, str]]:
        result = [inspect_model(model, tokenizer, text, **SMALL) for model in (retrofit(source),)]
        return to_json(result), to_csv(result)

    assert write() == write()


def test_json_and_csv_hold_the_measured_numbers(source, tokenizer, text, standard):
    result = inspect_model(retrofit(source, num_blocks=3), tokenizer, text, name="retrofit", **SMALL)
    record = json.loads(to_json([standard, result]))
    assert record["versions"]["torch"] == version("torch")
    plain, blocks = record["models"]
    assert plain["depth_attention"] is None and plain["text"]["sha256"] == text.sha256
    assert blocks["depth"]["sources"] == ["embedding", "block 1", "block 2", "block 3"]
    assert blocks["depth_attention"]["mean"][1] == pytest.approx([0.5, 0.5, None, None], abs=1e-5)
    tables = {
        name: [line.split(",") for line in table.splitlines()] for name, table in to_csv([standard, result]).items()
    }
    assert {name: len(rows) - 1 for name, rows in tables.items()} == {
        "sublayers.csv": 22,
        "depth_attention.csv": sum(result.depth_attention.num_sources),
        "depth_mixing.csv": 2 * 66,
        "attention_sinks.csv": 10,
        "interventions.csv": 11 + 4 + 10,
    }
    head, *rows = tables["sublayers.csv"]
    row = dict(zip(head, rows[13]))
    assert (row["model"], row["name"], row["kind"]) == ("B: retrofit", "attention 1", "attention")
    assert float(row["output"]) == pytest.approx(result.magnitudes.outputs[3].item(), rel=1e-5)
    assert float(row["input"]) == pytest.approx(result.magnitudes.inputs[2].item(), rel=1e-5)
    assert float(row["on_nearest"]) == pytest.approx(0.5, abs=1e-4)


# --- wrong input


def test_wrong_input_is_rejected_in_one_line(source, tokenizer, text, tmp_path):
    model = retrofit(source)
    for content, options, message in (
        (
            InspectedText("a.txt", "Once upon a time"),
            {},
            r"a.txt has \d+ tokens, but one sequence takes 63: give a longer text",
        ),
        (text, {"length": 1}, "`length` must be from 2 to 512, .* got 1"),
        (text, {"length": 1024, "tokens": 2048}, "`length` must be from 2 to 512, .* got 1024"),
    ):
        with pytest.raises(ValueError, match=message):
            inspect_model(model, tokenizer, content, **SMALL | options)
    (tmp_path / "empty.txt").write_text(" \n")
    with pytest.raises(ValueError, match=r"empty.txt holds no text"):
        read_text(tmp_path / "empty.txt", 100)
    (tmp_path / "binary").write_bytes(b"abc\xff\xfe")
    with pytest.raises(ValueError, match="binary is not UTF-8: give a plain text file"):
        read_text(tmp_path / "binary", 100)
    with torch.no_grad():
        model.model.layers[2].mlp.up_proj.weight[3, 4] = torch.nan
    with pytest.raises(ValueError, match=r"not finite: `model.layers.2.mlp.up_proj.weight` holds values that are not"):
        inspect_model(model, tokenizer, text, **SMALL)
    shape = {"vocab_size": 512, "n_embd": 32, "n_layer": 2, "n_head": 2}
    other = AutoModelForCausalLM.from_config(AutoConfig.for_model("gpt2", **shape))
    with pytest.raises(ValueError, match=r"model type 'gpt2' cannot be inspected: .* `attnres.add_backbone` adds"):
        inspect_model(other, tokenizer, text, **SMALL)
    with pytest.raises(ValueError, match="model type 'gpt2' cannot be inspected"):
        depth_mixing(other, torch.zeros(1, 4, dtype=torch.long))


def test_hooks_are_rejected_except_those_that_record_outputs(source):
    model, ids = AutoModelForCausalLM.from_pretrained(source), torch.arange(1, 9)[None]
    model(ids, output_hidden_states=True)  # puts hooks of `transformers` on the layers
    assert any(module._forward_hooks for module in model.modules())
    assert torch.equal(depth_mixing(model, ids).mean, torch.ones(11, 11, dtype=torch.float64).tril())
    for register in ("register_forward_hook", "register_forward_pre_hook"):
        handle = getattr(model.model.layers[0], register)(lambda *call: None)
        with pytest.raises(ValueError, match="LlamaForCausalLM has hooks, which would not be called: remove them"):
            depth_mixing(model, ids)
        handle.remove()


def test_the_default_text_is_on_every_machine():
    text = language_reference(500)
    assert len(text.content) == 10_000 and "Python 3." in text.name and "assert" in text.content
