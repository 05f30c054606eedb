"""Use saved models without `attnres`; `test_remote_code.py` runs this and checks the results.

remote_session.py MODELS OUT        `MODELS` holds the saved models; results go to the file `OUT`
"""

import sys
from pathlib import Path

import torch
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    Trainer,
    TrainingArguments,
    pipeline,
)

models, out = Path(sys.argv[1]), Path(sys.argv[2])
ids = torch.load(models / "ids.pt")
trusted = {"trust_remote_code": True}
auto_classes = [AutoModel, AutoModelForCausalLM, AutoModelForSequenceClassification]


def error_of(folder: Path, **options) -> str:
    """Return type and message of the error that loading a language model raises, or an empty string."""
    try:
        AutoModelForCausalLM.from_pretrained(folder, **options)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


seen = {"refused": [error_of(models / "causal"), error_of(models / "causal", trust_remote_code=False)]}

config = AutoConfig.from_pretrained(models / "causal", **trusted)
seen["config"] = type(config).__module__, type(config).__name__, config.attn_res_block_size
seen["from_config"] = [type(auto_class.from_config(config, **trusted)).__name__ for auto_class in auto_classes]

causal = AutoModelForCausalLM.from_pretrained(models / "causal", **trusted)
seen["class"] = type(causal).__module__, type(causal).__name__
seen["implementations"] = causal.config._attn_implementation, causal.config._experts_implementation
seen["logits"] = causal(ids).logits
positions = torch.arange(ids.shape[1]).expand_as(ids) % 4
seen["packed"] = causal(ids, position_ids=positions).logits, causal(ids[:, 4:8]).logits
seen["depth_attentions"] = causal(ids, output_depth_attentions=True).depth_attentions
seen["generated"] = causal.generate(ids, max_new_tokens=5, min_new_tokens=5, do_sample=False)
arguments = TrainingArguments(str(out.parent / "run"), label_smoothing_factor=0.1, report_to="none", use_cpu=True)
trainer = Trainer(AutoModelForCausalLM.from_pretrained(models / "causal", **trusted), arguments)
with torch.no_grad():
    seen["smoothed_loss"] = trainer.compute_loss(trainer.model, {"input_ids": ids, "labels": ids})
generator = pipeline("text-generation", model=str(models / "causal"), **trusted)
seen["text"] = generator("w5 w17 w42", max_new_tokens=5, do_sample=False)

base = AutoModel.from_pretrained(models / "causal", **trusted)
seen["last_hidden_state"] = base(ids).last_hidden_state
classifier = AutoModelForSequenceClassification.from_pretrained(models / "classifier", **trusted)
seen["scores"] = classifier(ids).logits

backbone, report = AutoModelForCausalLM.from_pretrained(models / "backbone", output_loading_info=True, **trusted)
seen["new"] = sorted(report["missing_keys"])
seen["backbone"] = backbone.state_dict()

causal.save_pretrained(models / "again", max_shard_size="40KB")
classifier.save_pretrained(models / "classifier-again")
again = AutoModelForCausalLM.from_pretrained(models / "again", **trusted)
seen["logits_again"] = again(ids).logits

seen["errors"] = {folder.name: error_of(folder, **trusted) for folder in models.glob("bad-*")}
seen["attnres_modules"] = [name for name, module in sys.modules.items() if name.split(".")[0] == "attnres" and module]
torch.save(seen, out)
