"""What a user without `attnres` does with saved models of Kimi K3; `test_kimi_k3_storage.py` judges what was seen.

kimi_k3_session.py MODELS OUT        `MODELS` holds the saved models; results go to the file `OUT`
"""

import sys
from pathlib import Path

import torch
from transformers import AutoModel, AutoModelForCausalLM

models, out = Path(sys.argv[1]), Path(sys.argv[2])
ids, seen = torch.load(out), {}
for folder in models.iterdir():
    model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
    decoder = AutoModel.from_pretrained(folder, trust_remote_code=True)
    model.save_pretrained(out.parent / "again" / folder.name)
    seen[folder.name] = {
        "class": (type(model).__name__, type(decoder).__name__, type(model).__module__),
        "logits": model(ids).logits,
        "hidden": decoder(ids).last_hidden_state,
        "generated": model.generate(ids, max_new_tokens=4, do_sample=False, eos_token_id=None),
        "has_attnres": sys.modules.get("attnres") is not None,
    }
torch.save(seen, out)
