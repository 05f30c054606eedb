"""Fixtures of the model tests: the equations as straight-line code, a model in which every term matters, memory use."""

import importlib.util
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch
from transformers import CompileConfig
from transformers.models.kimi_linear import modeling_kimi_linear as kimi_linear

from attnres import AttnResForCausalLM
from attnres.accelerated import delta_attention
from attnres.accelerated.numba import support

HERE = Path(__file__).parent


@pytest.fixture(scope="session", autouse=True)
def same_delta_attention():
    """Give Kimi Linear the family's form of delta attention, so that everything else can be equal to the last bit.

    `test_kda.py` compares the two forms.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kimi_linear, "chunk_kimi_delta_attention", delta_attention.chunk_kimi_delta_attention)
        yield


@pytest.fixture
def counted_compilation() -> Iterator[tuple[CompileConfig, list[torch.fx.GraphModule]]]:
    """Return options by which `generate` compiles decoding, and the list of the graphs that it makes."""
    graphs = []

    def count(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> torch.fx.GraphModule:
        graphs.append(graph)
        return graph

    torch.compiler.reset()
    options = CompileConfig(fullgraph=True, backend=count, mode=None)
    options._compile_all_devices = True  # without it `generate` compiles on GPUs alone
    yield options, graphs
    torch.compiler.reset()


def load(path: Path) -> ModuleType:
    """Import the module in a file that is not a test."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def straight_line() -> ModuleType:
    """Return the module `straight_line.py` beside this file."""
    return load(Path(__file__).with_name("straight_line.py"))


@pytest.fixture(scope="session")
def vivid_model(tiny_model) -> Callable[..., AttnResForCausalLM]:
    """Return `vivid_model(seed=0, **overrides)`: `tiny_model` with weights so large that every term moves the logits.

    With the usual initial values, sublayers hardly change the embedding, so that tests would not notice a wrong one.
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
    """Make the CPU kernels compute inputs as small as those of these tests, too."""
    pytest.importorskip("numba")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(support, "_MANY", 0)
        yield


@pytest.fixture(scope="session")
def peak_bytes() -> Callable[[Callable[[], object]], int]:
    """Return `peak_bytes(function)`: the most bytes that the call allocates at once, measured by the profiler."""

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
    """Return `run(script, *arguments, with_attnres=False, **environment)`, which runs a script with empty caches."""
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
