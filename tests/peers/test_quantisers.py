"""Quantised, a retrofit computes what the quantised standard model does; its own tensors stay as they are."""

import pytest

REQUIREMENTS = ("torchao==0.18.0", "compressed-tensors==0.20.0")


@pytest.mark.slow
def test_a_quantised_retrofit_computes_what_the_quantised_model_does(python_with, run_session, assets):
    python = python_with("quantisers", *REQUIREMENTS)
    seen = run_session(python, "quantisers_session.py", assets / "checkpoints" / "stories260K-hf")
    with_gates = seen.pop("with gates")
    assert {name: found["kind"] for name, found in seen.items()} == {
        "torchao": "Int8Tensor",
        "compressed-tensors": "pack-quantized",
    }
    for name, found in seen.items():
        assert found["from standard"] <= 1e-4 < found["from exact"] < 1, name  # at logits up to 20
        assert found["in their dtype"], name
    assert seen["torchao"]["saved, from itself"] == 0
    for name in ("gated", "kimi-k3"):
        assert 0 < with_gates[name] < 1, name
    assert "`model.layers.1.self_attn.g_proj.weight` holds NaN or infinite values" in with_gates["damaged"]
