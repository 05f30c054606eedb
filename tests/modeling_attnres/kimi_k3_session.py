"""Use saved models of Kimi K3 without `attnres`; `test_kimi_k3_remote.py` runs this and checks the results.

kimi_k3_session.py MODELS OUT        `MODELS` holds the saved models; results go to the file `OUT`
"""

import sys
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoModelForImageTextToText

models, out = Path(sys.argv[1]), Path(sys.argv[2])
given, seen = torch.load(out), {}
ids = given.pop("ids")
options = {"trust_remote_code": True, "dtype": torch.float32}
for folder in models.iterdir():
    config = AutoConfig.from_pretrained(folder, trust_remote_code=True)
    model, report = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True, **options)
    decoder = AutoModel.from_pretrained(folder, **options)
    model.save_pretrained(out.parent / "again" / folder.name)
    seen[folder.name] = {
        "classes": [(type(thing).__module__, type(thing).__name__) for thing in (config, model, decoder)],
        "config": config.to_dict(),
        "left": {kind: list(names) for kind, names in report.items()},
        "logits": model(ids).logits,
        "hidden": decoder(ids).last_hidden_state,
        "generated": model.generate(ids, max_new_tokens=4, do_sample=False, eos_token_id=None),
    }
    if config.vision_config is not None:
        model = AutoModelForImageTextToText.from_pretrained(folder, **options)
        model.save_pretrained(out.parent / "again" / "that sees")
        seen["that sees"] = {"class": type(model).__module__, "logits": model(**given).logits}
    if "packed" in folder.name:
        model = AutoModelForCausalLM.from_pretrained(folder, packed_experts=True, **options)
        seen[folder.name]["packed"] = (type(model.model.layers[1].mlp.experts).__name__, model(ids).logits)
seen["attnres_modules"] = [name for name, module in sys.modules.items() if name.split(".")[0] == "attnres" and module]
torch.save(seen, out)
