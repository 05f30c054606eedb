"""Fine-tune the hybrid with TRL on documents in rows of their own, packed and padding-free; run by `test_trl.py`.

trl_packing_session.py OUT        losses of each step go to the file `OUT`, by the way of making rows
"""

import json
import sys
from pathlib import Path

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast, set_seed
from trl import SFTConfig, SFTTrainer

from attnres import AttnResForCausalLM
from attnres.configuration import load

LENGTHS = (5, 20, 33, 7, 64, 12, 9, 40)  # the longest fills a packed row
WAYS = {
    "padded": {},
    "packed": {"packing": True, "max_length": 64},
    "padding-free": {"padding_free": True, "max_length": None},
}

out = Path(sys.argv[1])
config = load("attnres-tiny")
config.num_hidden_layers, config.vocab_size = 4, 99
config.layer_types, config.mlp_layer_types = config.layer_types[:4], config.mlp_layer_types[:4]
assert "linear_attention" in config.layer_types
vocabulary = {f"token {i}": i for i in range(config.vocab_size)}
tokenizer = PreTrainedTokenizerFast(
    tokenizer_object=Tokenizer(models.WordLevel(vocabulary, unk_token="token 1")),
    pad_token="token 0",
    eos_token="token 2",
    unk_token="token 1",
)
generator = torch.Generator().manual_seed(0)
documents = [torch.randint(3, config.vocab_size, (length,), generator=generator).tolist() for length in LENGTHS]


def train(**settings) -> dict:
    set_seed(0)
    arguments = SFTConfig(
        "trained",
        per_device_train_batch_size=len(LENGTHS),
        max_steps=3,
        learning_rate=1e-3,
        lr_scheduler_type="constant",
        logging_steps=1,
        report_to=[],
        save_strategy="no",
        use_cpu=True,
        bf16=False,
        **settings,
    )
    trainer = SFTTrainer(
        AttnResForCausalLM(config),
        args=arguments,
        train_dataset=Dataset.from_dict({"input_ids": documents}),
        processing_class=tokenizer,
    )
    rows = len(trainer.train_dataset)
    trainer.train()
    return {"rows": rows, "losses": [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]}


out.write_text(json.dumps({way: train(**settings) for way, settings in WAYS.items()}))
