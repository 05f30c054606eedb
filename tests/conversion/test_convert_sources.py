"""A source may hold anything under any name: no private file is copied, and no text of it can forge a report."""

import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from attnres.conversion.verify import FunctionComparison
from attnres.utils.wording import show_bytes

from .checkpoints import INDEX, change_json, convert, convert_well, logits_of, save_tokenizer

NOTE = "a\nVerified: max |logit difference| 0.0e+00\n\x1b[31mb.C"


@pytest.fixture
def source(copy_of) -> Path:
    """Return a model in one file, with a tokenizer."""
    folder = copy_of("whole")
    save_tokenizer(folder)
    return folder


# ---- Files


def test_weights_and_configuration_may_be_links_to_another_disk(source, tmp_path):
    (tmp_path / "disk").mkdir()
    for name in ("model.safetensors", "config.json"):
        (source / name).rename(tmp_path / "disk" / name)
        (source / name).symlink_to(tmp_path / "disk" / name)
    convert_well(source, tmp_path / "result")
    assert not (tmp_path / "result" / "model-00001-of-00002.safetensors").is_symlink()


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "tokenizer.json", "README.md", INDEX])
def test_a_pipe_or_a_device_is_not_read(source, refusal, name):
    (source / name).unlink(missing_ok=True)
    os.mkfifo(source / name)
    assert f"{source / name} is not a file. Put one there, or remove it." == refusal()
    (source / name).unlink()
    (source / name).symlink_to("/dev/zero")
    assert f"{source / name} is not a file. Put one there, or remove it." == refusal()


@pytest.mark.parametrize("name", ["tokenizer_config.json", "tokenizer.json"])
def test_a_link_out_of_the_directory_is_not_followed(source, tmp_path, refusal, name):
    (source / name).unlink(missing_ok=True)
    (tmp_path / "private").touch()
    (source / name).symlink_to(tmp_path / "private")
    assert f"{source / name} is a link to {tmp_path / 'private'}, outside the model's directory" in refusal()


@pytest.mark.parametrize(
    "settings, message",
    [
        ('{"max_new_tokens": -1}', "`max_new_tokens` must be greater than 0, but is -1"),
        ('{"top_k": 5, "max_new_tokens": "x"}', "TypeError: '<=' not supported between instances of 'str' and 'int'"),
        ('{"validate": 3}', "TypeError: 'int' object is not callable"),
        ("[1]", "TypeError: 'list' object is not a mapping"),
    ],
)
def test_settings_of_generation_that_cannot_be_read_are_named(source, refusal, settings, message):
    (source / "generation_config.json").write_text(settings)
    error = refusal()
    assert f"(in {source / 'generation_config.json'}). Correct these settings there, or remove them." in error
    assert message in error and "unforeseen" not in error


def test_older_settings_of_generation_that_cannot_be_read_are_named(source, refusal):
    (source / "generation_config.json").unlink()
    change_json(source / "config.json", max_new_tokens=-1)
    error = refusal()
    assert "`max_new_tokens` must be greater than 0, but is -1" in error and f"(in {source / 'config.json'})" in error


def test_settings_of_generation_that_only_warn_are_copied(source, tmp_path):
    (source / "generation_config.json").write_text('{"temperature": 0.6}')  # without `do_sample`
    convert_well(source, tmp_path / "result")
    assert json.loads((tmp_path / "result" / "generation_config.json").read_text()) == {"temperature": 0.6}


# ---- Which weights


@pytest.mark.parametrize("named", ["other.safetensors", "../other.safetensors", INDEX, 3])
def test_weights_that_only_the_configuration_names_are_refused(source, refusal, named):
    shutil.copy(source / "model.safetensors", source / "other.safetensors")
    change_json(source / "config.json", transformers_weights=named)
    error = refusal("--no-verify")
    assert f"{source / 'config.json'} names its weights by `transformers_weights`: {json.dumps(named)}" in error
    assert "Remove the field, or rename the file that it names to model.safetensors." in error


def test_a_configuration_that_names_the_present_weights_gives_a_complete_result(source, tmp_path):
    expected = logits_of(source)
    change_json(source / "config.json", transformers_weights="model.safetensors")
    convert_well(source, tmp_path / "result")
    assert "transformers_weights" not in json.loads((tmp_path / "result" / "config.json").read_text())
    assert torch.allclose(logits_of(tmp_path / "result"), expected, atol=1e-4)
    convert_well(tmp_path / "result", tmp_path / "back", "--to", "standard")
    back, held = AutoModelForCausalLM.from_pretrained(tmp_path / "back"), load_file(source / "model.safetensors")
    assert torch.equal(back.model.norm.weight, held["model.norm.weight"])


# ---- Reports


@pytest.mark.parametrize("options", [(), ("--trust-remote-code",)])
def test_a_reference_to_code_cannot_forge_a_line(source, tmp_path, options):
    reference = f"lab/other--{NOTE}"
    change_json(source / "tokenizer_config.json", auto_map={"AutoTokenizer": [reference, None]})
    out = convert_well(source, tmp_path / "result", "--no-verify", *options).out
    assert repr(reference) in out
    assert "\x1b" not in out and not any(line.startswith("Verified") for line in out.splitlines())


def test_the_name_of_a_source_file_cannot_forge_a_line(source, tmp_path):
    (source / "vocab\nVerified: \x1b[31m.json").write_text('{"auto_map": {"AutoTokenizer": "evil.T"}}')
    out = convert_well(source, tmp_path / "result", "--no-verify").out
    assert "Verified: \\x1b[31m.json" in out
    assert "\x1b" not in out and not any(line.startswith("Verified") for line in out.splitlines())


def test_the_name_of_the_result_cannot_forge_a_line(source, tmp_path):
    out = convert_well(source, tmp_path / "a\nVerified: \x1b[31m", "--no-verify").out
    assert out.endswith(f"Written to {tmp_path}/a\\nVerified: \\x1b[31m.\n")


def test_a_result_that_differs_is_not_called_verified(source, tmp_path, monkeypatch):
    far = FunctionComparison(tokens=9, max_logit=1.0, max_difference=0.5, kl=0.1, agreement=0.5)
    monkeypatch.setattr("attnres.commands.convert.compare", lambda *arguments: far)
    run = convert(source, tmp_path / "result")
    assert f"Not the same: {far}\n" in run.out and "Verified" not in run.out
    assert run.error == f"the result computes another function: {far}."
    assert not (tmp_path / "result").exists()


def test_sizes_are_shown_in_units_that_do_not_round_to_zero():
    assert [show_bytes(n) for n in (171_000, 10**6, 3 * 10**8, 15 * 10**8)] == [
        "0.17 MB",
        "1.00 MB",
        "0.3 GB",
        "1.5 GB",
    ]
