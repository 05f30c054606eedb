"""Use saved models on other backbones without `attnres`; `test_remote_backbones.py` runs this.

remote_backbones_session.py MODELS OUT        `MODELS` holds a folder for each model; results go to the file `OUT`
"""

import sys
from pathlib import Path

import torch
import transformers
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

models, out = Path(sys.argv[1]), Path(sys.argv[2])
ids = torch.load(models / "ids.pt")
trusted = {"trust_remote_code": True}

seen = {}
for folder in sorted(path for path in models.iterdir() if path.is_dir()):
    model, report = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True, **trusted)
    outputs = model(ids, output_hidden_states=True, output_depth_attentions=True)
    config = AutoConfig.from_pretrained(folder, **trusted)
    with torch.device("meta"):
        made = {
            name: type(getattr(transformers, name).from_config(config, **trusted)).__name__
            for name in config.auto_map
            if name != "AutoConfig"
        }
    try:
        model.generate(ids, attention_maks=ids, max_new_tokens=1)
    except ValueError as error:
        refused = str(error)
    model.save_pretrained(folder / "again", max_shard_size="40KB")
    seen[folder.name] = {
        "class": (type(model).__module__, type(model).__name__),
        "config": (type(config).__module__, type(config).__name__, getattr(config, "attn_res_block_size", None)),
        "made": made,
        "report": {kind: sorted(names) for kind, names in report.items() if names},
        "logits": outputs.logits,
        "hidden_states": outputs.hidden_states,
        "depth_attentions": outputs.depth_attentions,
        "base": AutoModel.from_pretrained(folder, **trusted)(ids).last_hidden_state,
        "generated": model.generate(ids, max_new_tokens=5, do_sample=False, eos_token_id=None),
        "refused": refused,
        "again": AutoModelForCausalLM.from_pretrained(folder / "again", **trusted)(ids).logits,
    }
modules = [name for name, module in sys.modules.items() if name.split(".")[0] == "attnres" and module]
torch.save({"models": seen, "attnres_modules": modules}, out)
