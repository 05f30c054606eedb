"""Load remote code first and import the installed `attnres` later; `test_remote_code.py` runs this.

mixed_session.py MODELS OUT        `MODELS` holds the saved models; results go to the file `OUT`
"""

import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

models, out = Path(sys.argv[1]), Path(sys.argv[2])
ids = torch.load(models / "ids.pt")

remote = AutoModelForCausalLM.from_pretrained(models / "causal", trust_remote_code=True)

import attnres  # noqa: E402, F401

local = AutoModelForCausalLM.from_pretrained(models / "causal", trust_remote_code=True)
seen = {"implementations": []}
for model in (remote, local):
    package = type(model).__module__.rpartition(".")[0]
    seen["implementations"].append(list(sys.modules[f"{package}.functional_attnres"].DEPTH_ATTENTION))
seen["classes"] = [f"{type(model).__module__}.{type(model).__name__}" for model in (remote, local)]
seen["logits"] = [model(ids).logits for model in (remote, local)]

remote.save_pretrained(models / "by-remote")
local.save_pretrained(models / "by-local")
seen["saved"] = [AutoModelForCausalLM.from_pretrained(models / f"by-{by}")(ids).logits for by in ("remote", "local")]
torch.save(seen, out)
