"""`attnres convert` compares the logits of source and result, prints their distance, and fails if it is too large."""

import os
import re
import shutil
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from attnres import BACKBONES, add_backbone
from attnres.configuration_attnres import attention_and_mlp
from attnres.conversion.convert import Conversion
from attnres.conversion.verify import PROMPTS, FunctionComparison, compare

from .checkpoints import change_json, change_tensors, convert, convert_well, save_tokenizer, standard_model

REPORT = re.compile(
    r"max \|logit difference\| (\S+) at logits up to (\S+), mean KL (\S+), top-1 agreement (\S+)% \((\S+) tokens\)"
)


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("source") / "llama"
    standard_model(rms_norm_eps=0.01).save_pretrained(folder)
    save_tokenizer(folder)
    return folder


@pytest.fixture
def copy(source, tmp_path) -> Path:
    return Path(shutil.copytree(source, tmp_path / "copy"))


def numbers_in(text: str) -> list[float]:
    """Return largest difference, largest logit, KL, agreement in percent and number of tokens."""
    return [float(number.replace(",", "")) for number in REPORT.search(" ".join(text.split())).groups()]


def direct_comparison(one: Path, other: Path, texts) -> list[float]:
    """Compute the numbers of [`numbers_in`] without the code under test."""
    tokenizer = AutoTokenizer.from_pretrained(one)
    a, b = (AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval() for folder in (one, other))
    ids = [torch.tensor([tokenizer(text)["input_ids"]]) for text in texts]
    with torch.no_grad():
        pairs = [(a(i).logits[0].double(), b(i).logits[0].double()) for i in ids]
    p, q = (torch.cat(logits) for logits in zip(*pairs))
    kl = (p.softmax(-1) * (p.log_softmax(-1) - q.log_softmax(-1))).sum(-1).mean()
    agreement = (p.argmax(-1) == q.argmax(-1)).double().mean() * 100
    return [(p - q).abs().max().item(), p.abs().max().item(), kl.item(), agreement.item(), len(p)]


def test_the_reported_numbers_are_right(source, tmp_path):
    run = convert_well(source, tmp_path / "result", "--scale", "mean", "--block-size", "2")
    reported, expected = numbers_in(run.out), direct_comparison(source, tmp_path / "result", PROMPTS)
    assert expected[0] > 0.1 and expected[2] > 1e-4 and expected[3] < 100, "the models must differ to compare numbers"
    assert reported == pytest.approx(expected, rel=0.05)


def test_the_divergence_is_from_the_source_to_the_result(source, copy):
    weight = AutoModelForCausalLM.from_pretrained(source).lm_head.weight.detach()
    change_tensors(copy, {"lm_head.weight": weight * 3})
    expected, reverse = direct_comparison(source, copy, PROMPTS)[2], direct_comparison(copy, source, PROMPTS)[2]
    assert abs(reverse - expected) > 0.1 * expected
    assert compare(source, copy).kl == pytest.approx(expected, rel=1e-4)


def test_verifying_is_the_default_and_finds_an_exact_retrofit_equal(source, tmp_path):
    difference, largest, kl, agreement, tokens = numbers_in(convert_well(source, tmp_path / "result").out)
    assert difference <= 1e-5 * largest and abs(kl) < 1e-9 and agreement == 100
    assert tokens == sum(len(text.encode()) for text in PROMPTS)


def test_verifying_can_be_left_out(source, tmp_path):
    assert "erified" not in convert_well(source, tmp_path / "result", "--no-verify").out


@pytest.fixture
def wrong_backbone():
    """Declare Helium, whose form is Llama's, with the norms of its sublayers exchanged."""
    add_backbone("helium", attention_and_mlp(("post_attention_layernorm", "self_attn"), ("input_layernorm", "mlp")))
    yield "helium"
    del BACKBONES["helium"]


def test_a_result_that_computes_another_function_is_not_written(wrong_backbone, tmp_path):
    standard_model(wrong_backbone, head_dim=8).save_pretrained(tmp_path / "source")
    error = convert(tmp_path / "source", tmp_path / "result").error
    assert error.startswith("the result computes another function: ")
    difference, largest, kl, *_ = numbers_in(error)
    assert difference > 1e-3 * largest and kl > 0
    assert os.listdir(tmp_path) == ["source"]
    assert numbers_in(convert_well(tmp_path / "source", tmp_path / "anyway", "--no-verify").out + error)


def test_a_change_of_a_weight_by_three_thousandths_is_noticed(source, copy):
    assert compare(source, source).is_same
    weight = AutoModelForCausalLM.from_pretrained(source).get_parameter("model.layers.1.mlp.up_proj.weight").detach()
    change_tensors(copy, {"model.layers.1.mlp.up_proj.weight": weight * 1.003})
    comparison = compare(source, copy)
    assert 0 < comparison.max_difference < 0.1 * comparison.max_logit
    assert not comparison.is_same


@pytest.mark.parametrize(
    ("largest", "difference", "agreement", "is_same"),
    [(10, 1e-3, 1.0, True), (10, 1.1e-3, 1.0, False), (20, 1.1e-3, 1.0, True), (10, 1e-4, 0.998, False)],
)
def test_equal_functions_have_close_logits_and_equal_top_tokens(largest, difference, agreement, is_same):
    assert FunctionComparison(500, largest, difference, 0.0, agreement).is_same is is_same


def test_nan_logits_are_not_the_same(source, copy):
    change_tensors(copy, {"model.norm.weight": torch.full((32,), torch.nan)})
    assert not compare(source, copy).is_same
    assert not compare(copy, copy).is_same


def test_a_tokenizer_that_gives_other_tokens_is_refused(source, copy):
    path = copy / "tokenizer.json"
    path.write_text(path.read_text().replace('"a":', '"\\u0000":', 1).replace('"b":', '"a":', 1))
    with pytest.raises(ValueError, match=r"the tokenizers of .* differ"):
        compare(source, copy)


def test_without_enough_memory_only_an_explicit_option_verifies(source, tmp_path, monkeypatch):
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=1_000_000))
    assert "Not verified: 1.1 GB more memory is needed" in convert_well(source, tmp_path / "a").out
    assert "Verified: " in convert_well(source, tmp_path / "b", "--verify").out


# ---- Texts


def test_a_text_takes_the_place_of_the_prompts(source, tmp_path):
    (tmp_path / "text").write_text("Grüße, 水!\n", encoding="utf-8-sig")  # the mark is no part of the text
    run = convert_well(source, tmp_path / "result", "--text", tmp_path / "text")
    assert numbers_in(run.out)[-1] == len("Grüße, 水!\n".encode())


def test_a_long_text_is_compared_up_to_the_limit_of_logits(source, tmp_path, monkeypatch):
    (tmp_path / "text").write_text("word " * 400_000)  # 2 MB
    monkeypatch.setattr("attnres.conversion.verify.MAX_LOGITS", 300 * 1300)
    run = convert_well(source, tmp_path / "result", "--text", tmp_path / "text")
    assert numbers_in(run.out)[-1] == 1300


@pytest.mark.parametrize(
    ("content", "message"),
    [(b"", "holds no text"), (b" \n\n", "holds no text"), (bytes(range(256)), "not a text in UTF-8")],
    ids=["empty", "blank", "binary"],
)
def test_a_file_without_text_is_refused_before_anything_is_written(source, tmp_path, content, message, monkeypatch):
    monkeypatch.setattr(Conversion, "write", None)
    (tmp_path / "text").write_bytes(content)
    error = convert(source, tmp_path / "result", "--text", tmp_path / "text").error
    assert message in error and str(tmp_path / "text") in error
    assert os.listdir(tmp_path) == ["text"]


def test_a_text_of_one_token_has_nothing_to_predict(source, tmp_path):
    (tmp_path / "text").write_text("a")
    assert "must have at least two tokens" in convert(source, tmp_path / "result", "--text", tmp_path / "text").error


def test_a_text_needs_a_tokenizer_and_the_prompts_do_not(source, tmp_path):
    shutil.copytree(source, tmp_path / "bare", ignore=shutil.ignore_patterns("tokenizer*", "special*"))
    (tmp_path / "text").write_text("Some text.")
    error = convert(tmp_path / "bare", tmp_path / "result", "--text", tmp_path / "text").error
    assert "no tokenizer" in error
    assert numbers_in(convert_well(tmp_path / "bare", tmp_path / "result").out)[-1] == 4 * 64  # random tokens


def test_a_tokenizer_with_more_tokens_than_the_model_is_reported(copy, tmp_path):
    standard_model(vocab_size=100).save_pretrained(copy)
    change_json(copy / "config.json", vocab_size=100)
    assert "but the model has only 100 tokens" in convert(copy, tmp_path / "result").error


def test_a_missing_text_is_bad_usage(source, tmp_path):
    assert convert(source, tmp_path / "result", "--text", tmp_path / "absent").code == 2
