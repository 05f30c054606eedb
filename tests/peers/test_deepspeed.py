"""DeepSpeed ZeRO-3 trains models of the family in two processes, on CPUs, as one process does, and resumes."""

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from ..training.parallel.test_many_devices import PIPES, RUNS, SIZES, assert_same_run, finish
from ..training.running import ACCELERATE_YAMLS

# DeepSpeed's setup imports torch, which is in the environment below.
REQUIREMENTS = ("--no-build-isolation", "deepspeed==0.19.8")


@pytest.fixture(scope="module")
def train(python_with, assets) -> Callable[..., tuple[str, str]]:
    """Return `train(run, out, is_sharded)`, which trains one of `RUNS` and returns the output and the errors.

    `code` is the exit status that is expected, and `variables` those of the environment.
    """
    python = python_with("deepspeed", *REQUIREMENTS)
    (config,) = [path for path in ACCELERATE_YAMLS if path.stem == "zero3"]
    source = assets / "checkpoints" / "stories260K-hf"
    text = assets / "corpora" / "tinystories" / "valid.txt"
    launcher = ["-m", "accelerate.commands.launch", "--config_file", config, "--num_processes", "2"]
    launcher += ["--mixed_precision", "no", "--main_process_port", "0"]

    def run(name: str, out: Path, is_sharded: bool, code: int = 0, **variables: str) -> tuple[str, str]:
        recipe = [part.format(source=source) for part in RUNS[name]]
        data = (f"train={text}", f"out={out}", "optimizer=adamw", "learning_rate=3e-4")
        start = [python, *launcher] if is_sharded else [sys.executable]
        command = [*start, "-m", "attnres_cli", "train", *recipe, *data, *SIZES]
        # accelerate ignores DeepSpeed where it is told to use CPUs, so DeepSpeed alone is told.
        environment = os.environ | {"CUDA_VISIBLE_DEVICES": "", "DS_ACCELERATOR": "cpu"} | variables
        return finish(subprocess.Popen([*map(str, command)], env=environment, **PIPES), code)

    return run


@pytest.mark.slow
@pytest.mark.engines
@pytest.mark.parametrize("name", ["retrofit", "scratch"])
def test_zero_3_gives_the_run_of_one_process_and_resumes(name, train, tmp_path):
    """A retrofit with tied weights is healed, and a hybrid with balanced experts is trained from scratch."""
    out, expected = tmp_path / "out", tmp_path / "expected"
    train(name, expected, is_sharded=False)
    output, _ = train(name, out, is_sharded=True)
    assert "\n2 processes, the model sharded by DeepSpeed (ZeRO-3)\n" in output
    assert_same_run(out, expected)
    if name == "scratch":
        return
    # As after a kill between the checkpoints.
    shutil.copytree(out, tmp_path / "whole")
    for part in ("checkpoint-6", "model"):
        shutil.rmtree(out / part)
    for part in ("results.json", "loss.png"):
        (out / part).unlink()
    assert "Resuming from" in train(name, out, is_sharded=True)[0]
    assert_same_run(out, tmp_path / "whole", tolerance=0)


@pytest.mark.slow
@pytest.mark.engines
def test_a_launch_on_cpus_where_accelerate_ignores_deepspeed_is_refused(train, tmp_path):
    _, errors = train("retrofit", tmp_path / "out", is_sharded=True, code=1, ACCELERATE_USE_CPU="true")
    assert "attnres: accelerate was told to shard the model by DeepSpeed, but cannot do so here" in errors
