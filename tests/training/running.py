"""Helpers for the tests of training: train with a plain `Trainer`, read results, and measure a model's inputs."""

import json
import os
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, Trainer, TrainerCallback, TrainingArguments

import attnres.configuration

from .. import forks

ACCELERATE_YAMLS = sorted(Path(attnres.configuration.__file__).with_name("accelerate").glob("*.yaml"))
BLOCKS = torch.randint(3, 90, (8, 12), generator=torch.Generator().manual_seed(0))


def uneven_rows() -> list[dict[str, Any]]:
    """Return seven rows like conversations: the first has one label, and each next row has one more."""
    rows = []
    for number, ids in enumerate(BLOCKS[:7]):
        labels = torch.where(torch.arange(len(ids)) >= len(ids) - 1 - number, ids, -100)
        rows.append({"input_ids": ids, "labels": labels, "documents": f"chats.jsonl:{number}"})
    return rows


def results(out: Path) -> dict:
    """Read `results.json` of a run."""
    return json.loads((out / "results.json").read_text())


def wait_for(path: Path, process: subprocess.Popen | forks.Fork) -> None:
    """Wait until a running process has made a file or folder."""
    while not path.exists():
        assert process.poll() is None
        time.sleep(0.01)


def run_until(path: Path, arguments: Sequence[str], environments: Sequence[Mapping[str, str]] = (os.environ,)) -> None:
    """Run `python ARGUMENTS` in a fork for each environment, and kill all when they have made a file or folder."""
    with ExitStack() as stack:  # which kills them at its end
        first, *_ = [stack.enter_context(forks.start(*arguments, env=env)) for env in environments]
        wait_for(path, first)


def train(
    model: PreTrainedModel, folder: Path, *callbacks: TrainerCallback, steps: int = 4, blocks=BLOCKS, **options: Any
) -> list[dict[str, float]]:
    """Train in steps of 2 micro-batches of 2 blocks, and return the lines of the log that have a loss."""
    arguments = TrainingArguments(
        folder,
        max_steps=steps,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        **{"logging_steps": 2, "save_strategy": "no", "learning_rate": 1e-3, "report_to": "none"} | options,
        disable_tqdm=True,
        use_cpu=True,
    )
    rows = [block if isinstance(block, dict) else {"input_ids": block, "labels": block} for block in blocks]
    trainer = Trainer(model, arguments, train_dataset=rows, eval_dataset=rows, callbacks=list(callbacks))
    trainer.train()
    return [line for line in trainer.state.log_history if "loss" in line]


@torch.no_grad()
def sizes_by_hooks(model: PreTrainedModel, ids: Tensor) -> Tensor:
    """Return the root mean square of the input of each sublayer and of the output, by depth.

    Hooks measure it: at the input of each norm or, where a read returns a normed input, at that of the module behind.
    """
    sizes = []

    def see(module: nn.Module, args: tuple[Tensor, ...], kwargs: dict[str, Any]) -> None:
        sizes.append((args[0] if args else kwargs["hidden_states"]).square().mean().sqrt())

    names = (
        ("self_attn", "mlp") if model.config.connection.takes_norm else ("input_layernorm", "post_attention_layernorm")
    )
    seen = [getattr(layer, name) for layer in model.model.layers for name in names] + [model.model.norm]
    handles = [module.register_forward_pre_hook(see, with_kwargs=True) for module in seen]
    model.eval()(ids, use_cache=False, output_depth_attentions=True)  # recorded passes read as in training
    for handle in handles:
        handle.remove()
    assert len(sizes) == len(seen)
    return torch.stack(sizes)
