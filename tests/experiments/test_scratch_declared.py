"""Declarations of comparisons from scratch: they make their models; what makes no sense is refused as it is read."""

import shutil
from dataclasses import asdict, replace

import pytest

from experiments import scratch_declared
from experiments.scratch_declared import BASELINE, DECLARED, declared


def test_a_misspelled_field_of_a_declaration_is_refused(tmp_path, monkeypatch):
    """As it is read: before another connection of it is trained."""
    text = (DECLARED / "claim-tiny.yaml").read_text()
    (tmp_path / "claim-tiny.yaml").write_text(text.replace("attn_res_block_size: 2", "attn_res_blocksize: 2"))
    monkeypatch.setattr(scratch_declared, "DECLARED", tmp_path)
    with pytest.raises(ValueError, match=r"claim-tiny\.yaml: attn_res_blocksize is no field of AttnResLlamaConfig"):
        declared("claim-tiny")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("model: {a: [", r"claim-odd\.yaml is no YAML: while parsing a flow"),
        ("- standard", r"claim-odd\.yaml holds no fields of a declaration\."),
        ("like: claim-tiny\nlenght: 2", r"claim-odd\.yaml declares no experiment \(TypeError: .*'lenght'"),
        ("length: 2", r"claim-odd\.yaml declares no experiment \(KeyError: 'text'"),
        (
            "like: claim-tiny\ncosts: claim-big",
            "There is no experiment 'claim-big', but there is claim-odd, claim-tiny",
        ),
        ("like: claim-odd", r"claim-odd\.yaml is like 'claim-odd', which is no other declaration beside it"),
        ("like: 3", r"claim-odd\.yaml is like 3, which is no other"),
        ("like: claim-tiny\nrates: [2e-3]", r"claim-odd\.yaml: a rate is '2e-3', no number above 0 such as 0\.004"),
        ("like: claim-tiny\nrates: [0]", "a rate is 0, no number above 0"),
        ("like: claim-tiny\nrates: []", "a rate is None, no number above 0"),
        ("like: claim-tiny\nrate: {standard: 0.002}", "a rate is None, no number above 0"),
        ("like: claim-tiny\nbatch_size: 0", "batch_size is 0, no whole number above 0"),
        ("like: claim-tiny\nsweep_tokens: 8e3", "sweep_tokens is '8e3', no whole number above 0"),
        ("like: claim-tiny\nseeds: [10]", "a seed is 10, no whole number but 10"),
        ("like: claim-tiny\nconnections: {Full: {}}", "of the connections none is standard"),
        ("like: claim-tiny\nconnections: {standard: }", r"declares no experiment \(TypeError"),
        ("like: claim-tiny\nconnections: [standard]", r"declares no experiment \(AttributeError"),
        ("like: claim-tiny\nmodel: {model_type: llama, hiden_size: 3}", "hiden_size, .* is no field of LlamaConfig"),
        (
            "like: claim-tiny\nmodel: {model_type: attnres_llama, vocab_size: 9}",
            "a vocabulary of 9 tokens, the",
        ),
        ("like: claim-tiny\nmodel: {model_type: attnres_llama, vocab_size: a}", "StrictDataclassFieldValidationError"),
        *(
            (f"like: claim-tiny\n{fields}", rf"claim-odd\.yaml: {message}")
            for fields, message in (
                ("length: 1", r"length is 1, no whole number above 1\."),
                ('bfloat16: "no"', "bfloat16 is 'no', neither true nor false"),
                ("seeds: []", "a seed is None, no whole number"),
                ("warmup: 9", "warmup is 9, more than half of 16 steps"),
                ("text: {corpus: a, vocab_size: 70000, characters: 9}", "vocab_size of the text is 70000, no whole"),
                ("published: {Full: abc}", "published: of Full it is 'abc', no number"),
                ("published: {Full: .nan}", "published: of Full it is nan, no number"),
                ("connections: {1: {}, standard: {}}", "a connection is called 1: a name is text"),
                ("connections: {standard: {}, S|4: {}}", r"a connection is called 'S\|4'"),
                ("connections: {standard: {}, 'S[4]': {}}", r"a connection is called 'S\[4\]'"),
                ("connections: {standard: {}, <!-- end -->: {}}", "a connection is called '<!-- end -->'"),
                ('connections: {standard: {}, "a\\nb": {}}', r"a connection is called 'a\\nb'"),
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
    monkeypatch.setattr(scratch_declared, "DECLARED", tmp_path)
    with pytest.raises(ValueError, match=message):
        declared("claim-odd")


def test_a_declaration_that_is_like_another_states_its_differences():
    short, long = declared("claim-children"), declared("claim-children-long")
    own = {"name": long.name, "tokens": 4 * short.tokens, "sweep_tokens": long.tokens // 2, "rates": (0.002, 0.004)}
    assert long == replace(short, rate={"standard": 0.008, "Block, S=4": 0.004}, **own)
    assert short.setting() == declared("ablations-cpu").setting() | {"name": short.name, "text": asdict(short.text)}


@pytest.mark.parametrize("path", sorted(DECLARED.glob("*.yaml")), ids=lambda path: path.stem)
def test_every_declaration_makes_its_models(path):
    experiment = declared(path.stem)
    assert next(iter(experiment.connections)) == BASELINE
    assert set(experiment.published) <= set(experiment.connections)
    for fields in experiment.connections.values():
        config = experiment.config(fields)
        assert config.vocab_size == experiment.text.vocab_size
        assert getattr(config, "max_position_embeddings", experiment.length) >= experiment.length


def test_a_name_that_none_has_is_refused_with_those_that_there_are():
    with pytest.raises(ValueError, match=r"There is no experiment 'claims-cpu', but there is .*, claim-cpu, claim-gpu"):
        declared("claims-cpu")
