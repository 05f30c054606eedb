"""Fixtures of the model tests: the equations as straight lines, a model in which every term counts, memory."""

import importlib.util
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch
from transformers.models.kimi_linear import modeling_kimi_linear as kimi_linear

from attnres import AttnResForCausalLM
from attnres.accelerated import delta_attention, numba

HERE = Path(__file__).parent


@pytest.fixture(scope="session", autouse=True)
def same_delta_attention():
    """Kimi Linear with the family's form of delta attention, so that all the rest can be equal to the last bit.

    `test_kda.py` holds one form against the other.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kimi_linear, "chunk_kimi_delta_attention", delta_attention.chunk_kimi_delta_attention)
        yield


def load(path: Path) -> ModuleType:
    """The module in a file that is no test."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def straight_line() -> ModuleType:
    """The module `straight_line.py` beside this file."""
    return load(Path(__file__).with_name("straight_line.py"))


@pytest.fixture(scope="session")
def vivid_model(tiny_model) -> Callable[..., AttnResForCausalLM]:
    """`vivid_model(seed=0, **overrides)`: as `tiny_model`, with weights so large that every term moves the logits.

    At the usual initialisation sublayers hardly change the embedding, so that a wrong one would pass unseen.
    """

    def build(seed: int = 0, **overrides) -> AttnResForCausalLM:
        model = tiny_model(seed, **overrides)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "_res_" in name or "forget_gate.A_log" in name or "dt_bias" in name:
                    continue
                if parameter.ndim == 1:  # norm weights
                    parameter.normal_(1.0, 0.3)
                elif "embed_tokens" in name:
                    parameter.normal_()
                else:
                    parameter.normal_(std=parameter.shape[-1] ** -0.5)
            for name, buffer in model.named_buffers():
                if "e_score_correction_bias" in name:
                    buffer.normal_(std=0.2)
        return model

    return build


@pytest.fixture(scope="module")
def cpu_kernels() -> Iterator[None]:
    """The kernels of a CPU compute what is as small as in these tests too."""
    pytest.importorskip("numba")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(numba, "_MANY", 0)
        yield


@pytest.fixture(scope="session")
def peak_bytes() -> Callable[[Callable[[], object]], int]:
    """`peak_bytes(function)`: the most bytes that the call held at once beyond those held before, by the allocator."""

    def measure(function: Callable[[], object]) -> int:
        activities = [torch.profiler.ProfilerActivity.CPU]
        with torch.profiler.profile(activities=activities, profile_memory=True) as profile:
            result = function()
        del result
        events = [event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]
        held = peak = 0
        for event in sorted(events, key=lambda event: event.start_ns()):
            held += event.nbytes()
            peak = max(peak, held)
        assert peak > 0, "the profiler saw no allocation"
        return peak

    return measure


@pytest.fixture(scope="session")
def run(tmp_path_factory) -> Callable[..., subprocess.CompletedProcess[str]]:
    """`run(script, *arguments, with_attnres=False, **environment)`: a script in a process with caches of its own."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "TRANSFORMERS_"))}

    def run_script(
        script: str, *arguments: object, with_attnres: bool = False, **environment: str
    ) -> subprocess.CompletedProcess[str]:
        command = [sys.executable]
        if not with_attnres:
            command += [
                "-I",
                "-S",
                str(HERE / "without_attnres.py"),
                os.pathsep.join(path for path in sys.path if path.endswith("site-packages")),
            ]
        environment = inherited | {"HF_HOME": str(tmp_path_factory.mktemp("home"))} | environment
        done = subprocess.run(
            [*command, str(HERE / script), *map(str, arguments)],
            env=environment,
            cwd=tmp_path_factory.mktemp("cwd"),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert done.returncode == 0, done.stderr[-4000:]
        return done

    return run_script
