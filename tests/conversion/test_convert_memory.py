"""A conversion of a gigabyte takes hardly more memory than one of a tiny model: weights are copied in pieces."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from transformers import LlamaConfig, LlamaForCausalLM

from .checkpoints import INDEX

SHARD = 250_000_000  # bytes


def save_model(folder: Path, num_layers: int, hidden_size: int) -> int:
    """Save a Llama in bfloat16 in shards of about 250 MB, one at a time, and return its size in bytes."""
    config = LlamaConfig(
        vocab_size=1000,
        hidden_size=hidden_size,
        intermediate_size=4 * hidden_size,
        num_hidden_layers=num_layers,
        num_attention_heads=8,
        dtype="bfloat16",
    )
    config.save_pretrained(folder)
    with torch.device("meta"):
        shapes = {name: tensor.shape for name, tensor in LlamaForCausalLM(config).state_dict().items()}
    weight_map, shard, total = {}, {}, 0
    values = torch.randn(2**20).bfloat16()
    for i, (name, shape) in enumerate(shapes.items()):
        size = shape.numel()
        shard[name] = values.repeat(-(-size // len(values)))[:size].reshape(shape).clone()
        total += shard[name].nbytes
        if i == len(shapes) - 1 or sum(tensor.nbytes for tensor in shard.values()) > SHARD:
            file = f"model-{len(set(weight_map.values())) + 1:05d}.safetensors"
            save_file(shard, folder / file, metadata={"format": "pt"})
            weight_map |= dict.fromkeys(shard, file)
            shard = {}
    (folder / INDEX).write_text(json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}))
    return total


# A process begins with the peak of the process that started it, so a small one must start it.
MEASURE = """
import resource, subprocess, sys
code = subprocess.run(sys.argv[1:], stdout=subprocess.DEVNULL).returncode
print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)
sys.exit(code)
"""


def peak_bytes(*command: str | Path) -> int:
    """Return the peak memory of a process in bytes."""
    done = subprocess.run([sys.executable, "-c", MEASURE, *command], capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr
    return int(done.stdout) * (1 if sys.platform == "darwin" else 1024)


@pytest.mark.slow
def test_peak_memory_does_not_grow_with_the_checkpoint(tmp_path):
    peaks = {}
    for name, sizes in {"small": (2, 64), "large": (30, 1024)}.items():
        total = save_model(tmp_path / name, *sizes)
        command = [sys.executable, "-m", "attnres_cli", "convert", tmp_path / name, tmp_path / f"{name} result"]
        peaks[name] = peak_bytes(*command, "--no-verify", "--block-size", "4")
    assert total > 1e9
    assert len(list((tmp_path / "large result").glob("*.safetensors"))) == 5 + 1
    assert peaks["large"] < 500e6, peaks
    assert peaks["large"] - peaks["small"] < 100e6, peaks
