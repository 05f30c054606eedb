"""Declarations make their models. A misspelt field or a value of another type is refused as it is loaded."""

import shutil
from dataclasses import asdict, replace

import pytest
from huggingface_hub.errors import StrictDataclassError

from experiments import declared
from experiments.declared import BASELINE, DECLARED, HealingExperiment, ScratchExperiment, names


@pytest.mark.parametrize(
    ("text", "error", "message"),
    [
        ("connections: {standard: {attn_res_blocksize: 2}}", ValueError, "'attn_res_blocksize' is not a field of Attn"),
        ("model: {model_type: llama, hiden_size: 3}", ValueError, "'hiden_size' is not a field of LlamaConfig"),
        ("lenght: 2", TypeError, "'lenght'"),
        ("rates: [2e-3]", StrictDataclassError, "rates"),  # YAML reads `2e-3` as text
        ("sweep_tokens: 8e3", StrictDataclassError, "sweep_tokens"),
        ('bfloat16: "no"', StrictDataclassError, "bfloat16"),
        ('text: {corpus: a, vocab_size: "300", characters: 9}', StrictDataclassError, "vocab_size"),
    ],
)
def test_a_declaration_from_scratch_that_makes_no_sense_is_refused(text, error, message, tmp_path, monkeypatch):
    shutil.copy(DECLARED / "claim-tiny.yaml", tmp_path)
    (tmp_path / "claim-odd.yaml").write_text(f"like: claim-tiny\n{text}")
    monkeypatch.setattr(declared, "DECLARED", tmp_path)
    with pytest.raises(error, match=message):
        ScratchExperiment.load("claim-odd")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("report: {standard: {rate: 3e-4}}", "rate"),
        ("report: {standard: {trained: foo}}", "trained"),
        ('sweeps: {rates: {low: {steps: "3"}}}', "steps"),
    ],
)
def test_a_recipe_of_healing_that_makes_no_sense_is_refused(text, message, tmp_path, monkeypatch):
    (tmp_path / "healing").mkdir()
    shutil.copy(DECLARED / "healing" / "tiny.yaml", tmp_path / "healing")
    (tmp_path / "healing" / "odd.yaml").write_text(f"like: healing-tiny\n{text}")
    monkeypatch.setattr(declared, "DECLARED", tmp_path)
    with pytest.raises(StrictDataclassError, match=message):
        HealingExperiment.load("healing-odd")


def test_a_declaration_that_is_like_another_states_its_differences():
    short, long = ScratchExperiment.load("claim-children"), ScratchExperiment.load("claim-children-long")
    changes = {"name": long.name, "tokens": 4 * short.tokens, "sweep_tokens": long.tokens // 2, "rates": [0.002, 0.004]}
    changes |= {"title": long.title, "rate_pairs": long.rate_pairs, "rate_seed": 0, "seeds": [*range(8)]}
    assert long == replace(short, rate={"standard": 0.008, "Block, S=4": 0.004}, **changes)
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


@pytest.mark.parametrize("name", names("healing"))
def test_every_recipe_of_healing_has_a_baseline(name):
    experiment = HealingExperiment.load(name)
    assert all(experiment.baseline(recipe) for recipe in experiment.report.values())
