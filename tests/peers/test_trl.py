"""TRL's trainers take a retrofit like any other model: they train it as they train the model that it was made of."""

import math

import pytest

REQUIREMENTS = ("trl==1.16.0",)


@pytest.fixture(scope="module")
def python(python_with):
    return python_with("trl", *REQUIREMENTS)


@pytest.mark.slow
def test_each_trainer_trains_a_retrofit_as_the_standard_model(python, run_session, assets):
    """With the retrofit's own tensors frozen, step by step alike; with those trained, away from it."""
    checkpoint = assets / "checkpoints" / "stories260K-hf"
    seen = run_session(python, "trl_session.py", checkpoint, assets / "corpora" / "tinystories" / "valid.txt")
    assert seen["packed sft"]["standard"]["rows"] < seen["sft"]["standard"]["rows"]
    for trainer, runs in seen.items():
        standard, frozen, attn_res = (runs[name]["losses"] for name in ("standard", "frozen", "attn_res"))
        assert len(standard) == 4
        assert frozen == pytest.approx(standard, abs=1e-5), trainer
        assert attn_res[0] == pytest.approx(standard[0], abs=1e-5), trainer
        assert attn_res != pytest.approx(standard, abs=1e-5), trainer
        assert runs["frozen"]["largest query"] == 0 < runs["attn_res"]["largest query"]
    # The model is its own reference.
    assert seen["dpo"]["attn_res"]["losses"][0] == pytest.approx(math.log(2), abs=1e-5)


@pytest.mark.slow
def test_packing_trains_the_hybrid_as_rows_of_one_document_each(python, run_session):
    """`packing=True` joins documents into rows without padding, and so does `padding_free=True`, with a whole batch."""
    seen = run_session(python, "trl_packing_session.py")
    assert seen["packed"]["rows"] < seen["padded"]["rows"] == seen["padding-free"]["rows"]
    for way in ("packed", "padding-free"):
        assert seen[way]["losses"] == pytest.approx(seen["padded"]["losses"], abs=2e-5), way
