"""Use Kimi K3 with a `transformers` that has classes of its own for it; `test_kimi_k3_remote.py` runs this.

kimi_k3_later_session.py FOLDER OUT        `FOLDER` holds a saved model; results go to the file `OUT`
"""

import sys
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.auto import configuration_auto

# No release of `transformers` has classes for Kimi K3 yet, so the classes of Llama stand in.
configuration_auto.CONFIG_MAPPING_NAMES["kimi_k3"] = "LlamaConfig"
configuration_auto.SPECIAL_MODEL_TYPE_TO_MODULE_NAME["kimi_k3"] = "llama"

import attnres  # noqa: E402 (after the change)

folder, out = Path(sys.argv[1]), Path(sys.argv[2])
ids = torch.load(out)
model, report = attnres.AttnResKimiK3ForCausalLM.from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
model.save_pretrained(out.parent / "saved later")
torch.save(
    {
        "auto": type(AutoConfig.for_model("kimi_k3")).__name__,
        "by configuration": type(AutoModelForCausalLM.from_config(model.config)).__name__,
        "left": {kind: list(names) for kind, names in report.items()},
        "logits": model(ids).logits,
    },
    out,
)
