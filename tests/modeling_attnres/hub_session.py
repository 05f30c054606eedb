"""Use a model on the Hub without `attnres`; `test_remote_code.py` runs this and checks the results.

hub_session.py IDS OUT        `IDS` is a file of token ids; results go to the file `OUT.pt`, a model to the folder `OUT`
"""

import sys

import torch
from transformers import AutoConfig, AutoModelForCausalLM

ids, out = torch.load(sys.argv[1]), sys.argv[2]
seen = {"logits": {}, "class": {}, "block_size": {}}
for name, options in {
    "default": {},
    "main": {"revision": "main"},
    "v1": {"revision": "v1"},
    "v1 from the cache": {"revision": "v1", "local_files_only": True},
}.items():
    model = AutoModelForCausalLM.from_pretrained("lab/model", trust_remote_code=True, **options)
    seen["logits"][name] = model(ids).logits
    seen["class"][name] = f"{type(model).__module__}.{type(model).__name__}"
    config = AutoConfig.from_pretrained("lab/model", trust_remote_code=True, **options)
    seen["block_size"][name] = config.attn_res_block_size
try:
    AutoModelForCausalLM.from_pretrained("lab/model", trust_remote_code=True, revision="absent")
except OSError as error:
    seen["absent"] = str(error)

model.save_pretrained(out)
torch.save(seen, f"{out}.pt")
