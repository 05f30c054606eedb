"""Declarations: they make their models, and what makes no sense is refused as it is read."""

import shutil
from dataclasses import asdict, replace

import pytest

from experiments import declared
from experiments.declared import BASELINE, DECLARED, HealingExperiment, ScratchExperiment


def test_a_misspelled_field_of_a_declaration_is_refused(tmp_path, monkeypatch):
    """As it is read: before another connection of it is trained."""
    text = (DECLARED / "claim-tiny.yaml").read_text()
    (tmp_path / "claim-tiny.yaml").write_text(text.replace("attn_res_block_size: 2", "attn_res_blocksize: 2"))
    monkeypatch.setattr(declared, "DECLARED", tmp_path)
    with pytest.raises(ValueError, match=r"claim-tiny\.yaml: attn_res_blocksize is no field of AttnResLlamaConfig"):
        ScratchExperiment.load("claim-tiny")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("model: {a: [", r"claim-odd\.yaml is no YAML: while parsing a flow"),
        ("- standard", r"claim-odd\.yaml holds no fields of a declaration\."),
        ("like: claim-tiny\nlenght: 2", r"claim-odd\.yaml declares no experiment \(TypeError: .*'lenght'"),
        ("length: 2", r"claim-odd\.yaml declares no experiment \(KeyError: 'rates'"),
        (
            "like: claim-tiny\ncosts: claim-big",
            "There is no experiment 'claim-big', but there is claim-odd, claim-tiny",
        ),
        ("like: claim-odd", r"claim-odd\.yaml is like 'claim-odd', which is no other declaration beside it"),
        ("like: 3", r"claim-odd\.yaml is like 3, which is no other"),
        (
            "like: claim-tiny\nrates: [2e-3]",
            r"claim-odd\.yaml: a rate must be a number above 0 .*; got '2e-3'",
        ),
        ("like: claim-tiny\nrates: [0]", "a rate must be a number above 0 .*; got 0"),
        ("like: claim-tiny\nrates: []", "a rate must be a number above 0 .*; got None"),
        ("like: claim-tiny\nrate: {standard: 0.002}", "a rate must be a number above 0 .*; got None"),
        ("like: claim-tiny\nbatch_size: 0", "batch_size must be a whole number above 0; got 0"),
        ("like: claim-tiny\nsweep_tokens: 8e3", "sweep_tokens must be a whole number above 0; got '8e3'"),
        ("like: claim-tiny\nseeds: [10]", "a seed must be a whole number but 10, .*; got 10"),
        ("like: claim-tiny\nconnections: {Full: {}}", "connections must include standard"),
        ("like: claim-tiny\nconnections: {standard: }", r"declares no experiment \(TypeError"),
        ("like: claim-tiny\nconnections: [standard]", r"declares no experiment \(AttributeError"),
        ("like: claim-tiny\nmodel: {model_type: llama, hiden_size: 3}", "hiden_size, .* is no field of LlamaConfig"),
        (
            "like: claim-tiny\nmodel: {model_type: attnres_llama, vocab_size: 9}",
            "vocabulary of model and text must be one; got 9 and 512",
        ),
        ("like: claim-tiny\nmodel: {model_type: attnres_llama, vocab_size: a}", "StrictDataclassFieldValidationError"),
        *(
            (f"like: claim-tiny\n{fields}", rf"claim-odd\.yaml: {message}")
            for fields, message in (
                ("length: 1", r"length must be at least 2"),
                ('bfloat16: "no"', "bfloat16 must be true or false; got 'no'"),
                ("seeds: []", "a seed must be a whole number but 10, .*; got None"),
                ("warmup: 9", "warmup must be at most half of 16 steps"),
                ("text: {corpus: a, vocab_size: 70000, characters: 9}", "vocab_size of the text must be from 258 to"),
                ("connections: {standard: {to_dict: 1}}", "to_dict is no field of AttnResLlamaConfig"),
                ("connections: {standard: {num_hidden_layers: 0}}", "`num_hidden_layers` is 0, but must be an integer"),
                ("connections: {standard: {num_attention_heads: 0}}", "`num_attention_heads` is 0, but must be an"),
            )
        ),
        ("like: claim-tiny\ntext: {corpus: a}", r"claim-odd\.yaml declares no experiment \(TypeError: .*vocab_size"),
    ],
)
def test_a_damaged_declaration_is_named(text, message, tmp_path, monkeypatch):
    shutil.copy(DECLARED / "claim-tiny.yaml", tmp_path)
    (tmp_path / "claim-odd.yaml").write_text(text)
    monkeypatch.setattr(declared, "DECLARED", tmp_path)
    with pytest.raises(ValueError, match=message):
        ScratchExperiment.load("claim-odd")


def test_a_declaration_that_is_like_another_states_its_differences():
    short, long = ScratchExperiment.load("claim-children"), ScratchExperiment.load("claim-children-long")
    own = {"name": long.name, "tokens": 4 * short.tokens, "sweep_tokens": long.tokens // 2, "rates": (0.002, 0.004)}
    assert long == replace(short, rate={"standard": 0.008, "Block, S=4": 0.004}, **own)
    assert short.setting() == ScratchExperiment.load("ablations-cpu").setting() | {
        "name": short.name,
        "text": asdict(short.text),
    }


@pytest.mark.parametrize("path", sorted(DECLARED.glob("*.yaml")), ids=lambda path: path.stem)
def test_every_declaration_makes_its_models(path):
    experiment = ScratchExperiment.load(path.stem)
    assert next(iter(experiment.connections)) == BASELINE
    assert set(experiment.published) <= set(experiment.connections)
    for fields in experiment.connections.values():
        config = experiment.config(fields)
        assert config.vocab_size == experiment.text.vocab_size
        assert getattr(config, "max_position_embeddings", experiment.length) >= experiment.length


def test_a_name_that_none_has_is_refused_with_those_that_there_are():
    with pytest.raises(ValueError, match=r"There is no experiment 'claims-cpu', but there is .*, claim-cpu, claim-gpu"):
        ScratchExperiment.load("claims-cpu")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("length: a", "length must be a whole number above 0; got 'a'"),
        ("held_out_length: 1", "held_out_length must be at least 2; got 1"),
        ("batch_size: 0", "batch_size must be a whole number above 0; got 0"),
        ("seen: -1", "seen must be a whole number above 0; got -1"),
        ("text: {corpus: a, vocab_size: 300, characters: 9}", "a declared text needs held_out"),
        ("report: {standard: {rate: 3e-4}}", "report, standard: rate must be a number above 0 such as .*; got '3e-4'"),
        ("report: {standard: {rate: 0}}", "report, standard: rate must .* above 0 .*; got 0"),
        ("report: {standard: {attnres_rate: -1}}", "report, standard: attnres_rate must .*; got -1"),
        ('report: {standard: {steps: "3"}}', "report, standard: steps must be a whole number above 0; got '3'"),
        ("report: {standard: {block_size: 0}}", "report, standard: block_size must be a whole number above 0; got 0"),
        (
            "report: {standard: {trained: foo}}",
            "trained must be one of all, all but key norms, .*; got 'foo'",
        ),
        ("report: {standard: {trained: [all]}}", r"declares no experiment \(TypeError: .*unhashable"),
        ("sweeps: {rates: {low: {steps: 0}}}", "rates, low: steps must be"),
        (
            "report: {Full: {block_size: 1}}",
            "`report` has no standard model, all of it trained, for 256 steps: add one",
        ),
    ],
)
def test_recipes_of_healing_that_make_no_sense_are_named(line, message, tmp_path, monkeypatch):
    (tmp_path / "healing").mkdir()
    shutil.copy(DECLARED / "healing" / "tiny.yaml", tmp_path / "healing")
    (tmp_path / "healing" / "odd.yaml").write_text(f"like: tiny\n{line}")
    monkeypatch.setattr(declared, "DECLARED", tmp_path)
    with pytest.raises(ValueError, match=rf"odd\.yaml:? .*{message}"):
        HealingExperiment.load("odd")
