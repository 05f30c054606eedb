"""Compare `attnres convert` with copying the directory: time and peak memory, on a synthetic sharded checkpoint.

    python benchmarks/convert.py [--gigabytes 4] [--repeats 5] [--folder DIR]

The two take turns. Each writes into a directory that is removed afterwards. Before each turn, the disk's buffers are
flushed. The script writes `results/convert.json`.
"""

import argparse
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import torch
from safetensors.torch import save_file
from transformers import LlamaConfig, LlamaForCausalLM

from attnres.checkpoints.checkpoint import Checkpoint
from attnres.checkpoints.copies import copyable
from attnres.conversion.convert import plan_retrofit
from attnres.conversion.plan import write

SHARD_BYTES = 500 * 10**6
RESULTS = Path(__file__).parent / "results" / "convert.json"


def make_checkpoint(folder: Path, gigabytes: float) -> None:
    """Write a Llama of hidden size 2048 in bfloat16, with random weights, in shards of about half a gigabyte."""
    shape = {"hidden_size": 2048, "intermediate_size": 8192, "num_attention_heads": 16, "num_key_value_heads": 16}
    layers = max(1, round(gigabytes / 0.134))  # a layer of this shape has 0.134 GB
    config = LlamaConfig(**shape, num_hidden_layers=layers, dtype="bfloat16", architectures=["LlamaForCausalLM"])
    config.save_pretrained(folder)
    with torch.device("meta"):
        names = LlamaForCausalLM(config).state_dict()
    shards, size = [[]], 0
    for name, tensor in names.items():
        if size > SHARD_BYTES:
            shards.append([])
            size = 0
        shards[-1].append((name, tensor.shape))
        size += 2 * tensor.numel()
    weight_map = {}
    for i, shard in enumerate(shards):
        file = f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors"
        save_file({name: torch.randn(shape).bfloat16() for name, shape in shard}, folder / file, {"format": "pt"})
        weight_map |= {name: file for name, _ in shard}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def seconds(action: Callable[[Path], object], target: Path) -> float:
    """Return the seconds that `action(target)` takes. `target` is made before and removed afterwards."""
    target.mkdir()
    os.sync()
    start = time.perf_counter()
    action(target)
    elapsed = time.perf_counter() - start
    shutil.rmtree(target)
    return elapsed


def peak_megabytes(command: list[str]) -> float:
    """Run a command; return the peak resident memory of its process in MiB, mapped files included."""
    # A small process starts the command, because the kernel counts the memory of the process that starts a command too.
    code = (
        "import resource, subprocess, sys; subprocess.run(sys.argv[1:], check=True, stdout=subprocess.DEVNULL); "
        "print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)"
    )
    done = subprocess.run([sys.executable, "-c", code, *command], check=True, stdout=subprocess.PIPE, text=True)
    return int(done.stdout) / 1024


def main() -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, default=4.0)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--folder", type=Path, help="a folder on the disk to measure")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as temporary:
        folder = Path(temporary)
        source = folder / "source"
        source.mkdir()
        make_checkpoint(source, options.gigabytes)
        opened = copyable(Checkpoint(source), folder)
        plan = plan_retrofit(opened)
        actions = {
            "convert": lambda target: write(plan, target),
            "cp -r": lambda target: subprocess.run(["cp", "-r", str(source), str(target)], check=True),
        }
        times = {name: [] for name in actions}
        for _ in range(options.repeats):
            for name, action in actions.items():
                times[name].append(seconds(action, folder / "target"))
        convert = [sys.executable, "-m", "attnres_cli", "convert", "--no-verify", str(source)]
        peak = peak_megabytes([*convert, str(folder / "converted")])
        results = {
            "machine": f"{platform.machine()}, {os.cpu_count()} cores, torch {torch.__version__}",
            "gigabytes": opened.checkpoint.num_bytes / 1e9,
            "seconds": times,
            "median_ratio_to_cp": median(a / b for a, b in zip(*times.values())),
            "peak_megabytes": peak,
        }
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text(json.dumps(results, indent=2) + "\n")
    for name, values in times.items():
        print(f"{name:8} {median(values):6.1f} s, {results['gigabytes'] / median(values):.2f} GB/s")
    print(f"ratio {results['median_ratio_to_cp']:.2f} (median of pairs), peak memory {peak:.0f} MB")


if __name__ == "__main__":
    main()
