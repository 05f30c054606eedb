"""What a user without `attnres` does with a saved model of Kimi K3; `test_kimi_k3_storage.py` judges what was seen.

kimi_k3_session.py MODEL OUT        `MODEL` is the saved model; results go to the file `OUT`
"""

import sys
from pathlib import Path

import torch
from transformers import AutoModel, AutoModelForCausalLM

folder, out = Path(sys.argv[1]), Path(sys.argv[2])
model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
ids = torch.load(out)
decoder = AutoModel.from_pretrained(folder, trust_remote_code=True)
model.save_pretrained(out.parent / "again")
seen = {
    "class": (type(model).__name__, type(decoder).__name__, type(model).__module__),
    "logits": model(ids).logits,
    "hidden": decoder(ids).last_hidden_state,
    "generated": model.generate(ids, max_new_tokens=4, do_sample=False, eos_token_id=None),
    "has_attnres": "attnres" in sys.modules,
}
torch.save(seen, out)
