"""Use a model with kernel packages but without a GPU; `test_kernel_packages.py` runs this.

kernel_packages_session.py train FOLDER     with `attnres`: train a step, generate, save the model and its outputs
kernel_packages_session.py load FOLDER      without `attnres`: load the model, and compare the outputs
"""

import sys
from pathlib import Path

import torch

step, folder = sys.argv[1], Path(sys.argv[2])
ids = torch.arange(3, 3 + 2 * 70).reshape(2, 70)  # more than a chunk of delta attention

if step == "train":
    from attnres import AttnResForCausalLM
    from attnres.accelerated.triton import kernels_available
    from attnres.configuration import load

    assert not kernels_available("cpu") and not kernels_available("cuda")
    torch.manual_seed(0)
    model = AttnResForCausalLM(load("attnres-tiny"))
    model(ids, labels=ids).loss.backward()
    assert all(parameter.grad is not None for name, parameter in model.named_parameters() if "_res_" in name)
    model.eval().save_pretrained(folder)
else:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
    assert "transformers_modules" in type(model).__module__

with torch.no_grad():
    seen = [model(ids).logits, model.generate(ids, max_new_tokens=3, do_sample=False)]
if step == "train":
    torch.save(seen, folder / "seen.pt")
else:
    logits, generated = torch.load(folder / "seen.pt")
    torch.testing.assert_close(seen[0], logits, rtol=0, atol=1e-5 * logits.abs().max().item())
    assert torch.equal(seen[1], generated)
print(sorted(name for name in ("triton", "fla", "causal_conv1d") if name in sys.modules))
