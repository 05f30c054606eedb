"""Prepare an image and a prompt by a saved processor, where `attnres` is not installed.

    kimi_k3_images_session.py MODEL IMAGE OUT

OUT gets the inputs of the model, and the names of the classes' modules.
"""

import sys

import torch
from transformers import AutoProcessor

model, image, out = sys.argv[1:]
processor = AutoProcessor.from_pretrained(model, trust_remote_code=True)
content = [{"type": "image", "path": image}, {"type": "text", "text": "What is it?"}]
inputs = processor.apply_chat_template(
    [{"role": "user", "content": content}], tokenize=True, return_dict=True, return_tensors="pt"
)
modules = [type(part).__module__ for part in (processor, processor.image_processor)]
torch.save({"inputs": dict(inputs), "modules": modules, "attnres": "attnres.family" in sys.modules}, out)
