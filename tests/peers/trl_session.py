"""Fine-tune a standard model and its retrofit with TRL, step by step alike; run by `test_trl.py`.

trl_session.py CHECKPOINT STORIES OUT        losses of each step go to the file `OUT`, by trainer and model
"""

import json
import sys
from collections.abc import Callable
from pathlib import Path

from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, Trainer, set_seed
from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer

from attnres.conversion import retrofit
from attnres.residual_attnres import residual_tensors

checkpoint, stories_file, out = sys.argv[1:]
tokenizer = AutoTokenizer.from_pretrained(checkpoint)
tokenizer.pad_token = tokenizer.eos_token
texts = [story.strip() for story in Path(stories_file).read_text(encoding="utf-8").split("<|endoftext|>")]
texts = [text for text in texts if len(text) > 400][:24]

COMMON = {
    "output_dir": "trained",
    "per_device_train_batch_size": 4,
    "max_steps": 4,
    "lr_scheduler_type": "constant",
    "logging_steps": 1,
    "report_to": [],
    "save_strategy": "no",
    "use_cpu": True,
    "bf16": False,
}
# Documents of 40 to 270 characters: of different lengths, so that several share a packed row.
LONG_AND_SHORT = Dataset.from_dict({"text": [text[: 40 + 10 * i] for i, text in enumerate(texts)]})
PREFERENCES = Dataset.from_dict(
    {
        "prompt": [text[:80] for text in texts],
        "chosen": [text[80:160] for text in texts],
        "rejected": [text[80:160] for text in texts[1:] + texts[:1]],
    }
)


def standard() -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(checkpoint)


def frozen() -> PreTrainedModel:
    """A retrofit whose own tensors stay at their start: it goes on computing what the standard model does."""
    model = retrofit(standard(), block_size=3)
    for tensor in residual_tensors(model).values():
        tensor.requires_grad_(False)
    return model


def attn_res() -> PreTrainedModel:
    return retrofit(standard(), block_size=3)


def sft(model: PreTrainedModel, **settings) -> Trainer:
    arguments = SFTConfig(**COMMON, learning_rate=1e-3, max_length=128, **settings)
    return SFTTrainer(model, args=arguments, train_dataset=LONG_AND_SHORT, processing_class=tokenizer)


def dpo(model: PreTrainedModel) -> Trainer:
    arguments = DPOConfig(**COMMON, learning_rate=1e-5, max_length=128)
    return DPOTrainer(model, args=arguments, train_dataset=PREFERENCES, processing_class=tokenizer)


def train(make_trainer: Callable[..., Trainer], make_model: Callable[[], PreTrainedModel], **settings) -> dict:
    set_seed(0)
    trainer = make_trainer(make_model(), **settings)
    rows = len(trainer.train_dataset)
    trainer.train()
    queries = [tensor for tensor in residual_tensors(trainer.model).values() if tensor.ndim == 2]
    return {
        "rows": rows,
        "losses": [entry["loss"] for entry in trainer.state.log_history if "loss" in entry],
        "largest query": max((query.detach().abs().max().item() for query in queries), default=0.0),
    }


seen = {}
for name, make_trainer, settings in (
    ("sft", sft, {}),
    ("packed sft", sft, {"packing": True, "packing_strategy": "wrapped"}),
    ("dpo", dpo, {}),
):
    seen[name] = {make.__name__: train(make_trainer, make, **settings) for make in (standard, frozen, attn_res)}
Path(out).write_text(json.dumps(seen))
