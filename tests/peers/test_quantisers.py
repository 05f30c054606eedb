"""Quantised, a retrofit computes what the quantised standard model does; its own tensors stay as they are."""

import pytest
import torch
from safetensors.torch import save_file

from attnres.kimi_k3_packed_attnres import decode_mxfp4
from attnres.kimi_k3_packing_attnres import encode_mxfp4

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


@pytest.mark.slow
def test_mxfp4_is_packed_as_compressed_tensors_packs_it(python_with, run_session, tmp_path):
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(400, 96, generator=generator) * 2.0 ** torch.randint(-60, 60, (400, 1), generator=generator)
    codes, scales = (torch.randint(high, (400, n), generator=generator).byte() for high, n in ((256, 48), (250, 3)))
    ties = torch.tensor([0.0, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0, 6.99, 7.0, 1e-3]).repeat(8)
    weights = {
        "random": rows.bfloat16(),
        "representable": decode_mxfp4(codes, scales),
        "ties": torch.stack([ties.roll(i) for i in range(12)]),
    }
    save_file(weights, tmp_path / "weights.safetensors")
    python = python_with("quantisers", *REQUIREMENTS)
    seen = run_session(python, "mxfp4_session.py", tmp_path / "weights.safetensors")
    for name, weight in weights.items():
        packed, scale = encode_mxfp4(weight)
        theirs = torch.tensor(seen[name]["packed"]).byte()
        assert torch.equal(scale, torch.tensor(seen[name]["scale"]).byte()), name
        # Their packing on a CPU makes a zero of either sign positive.
        positive = [codes.masked_fill(codes == 8, 0) for codes in (packed & 15, packed >> 4)]
        of_them = [codes.masked_fill(codes == 8, 0) for codes in (theirs & 15, theirs >> 4)]
        assert all(map(torch.equal, positive, of_them)), name
