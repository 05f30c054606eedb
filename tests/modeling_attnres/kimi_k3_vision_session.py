"""Compute a step of Kimi K3 with images in several processes; `test_kimi_k3_vision.py` runs this and checks results.

kimi_k3_vision_session.py FOLDER BATCH OUT        the model in FOLDER; OUT gets loss, gradients and a saved model
"""

import sys
from pathlib import Path

import torch
import torch.distributed
from transformers import AutoModelForImageTextToText
from transformers.distributed import DistributedConfig

import attnres  # noqa: F401 (it registers the model)

folder, batch, out = map(Path, sys.argv[1:])
sharded = DistributedConfig(fsdp_size=2, ep_size=2)
model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32, distributed_config=sharded)
model.train()
loss = model(**torch.load(batch)).loss
loss.backward()
gradients = {name: p.grad.full_tensor() for name, p in model.named_parameters() if p.grad is not None}
model.save_pretrained(out / "saved")
if torch.distributed.get_rank() == 0:
    torch.save({"loss": loss.item(), "gradients": gradients}, out / "seen")
