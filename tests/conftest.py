"""Shared fixtures: a small configuration that has every kind of layer, and models with non-trivial weights.

The process of pytest that hands tests to its workers imports this file too, before it starts them. What takes seconds
to import is therefore imported by the fixtures.
"""

import gc
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

import pytest
from filelock import FileLock
from hypothesis import HealthCheck, settings

if TYPE_CHECKING:
    import torch

    from attnres import AttnResConfig, AttnResForCausalLM

    from .hub.running import Hub

ROOT = Path(__file__).parents[1]
# Started in the background, by a shell without job control, this process ignores SIGINT, and so would those it starts.
signal.signal(signal.SIGINT, signal.default_int_handler)
# Without limits of time, which a busy machine does not keep, and with half of the usual number of examples.
settings.register_profile("untimed", deadline=None, max_examples=50, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("untimed")


def pytest_collection_finish() -> None:
    """Compute on one thread, and keep the garbage collector from searching what was imported.

    The models here are so small that a second thread gains nothing, and where cores are busy costs much. Each `Trainer`
    calls the garbage collector, for half of its time.
    """
    import torch

    torch.set_num_threads(1)
    gc.collect()
    gc.freeze()


# Every kind of sublayer: KDA and MLA, dense MLP and experts, over 4 layers = 8 sublayers.
TINY = {
    "vocab_size": 99,
    "hidden_size": 32,
    "intermediate_size": 64,
    "moe_intermediate_size": 16,
    "num_hidden_layers": 4,
    "layer_types": ["linear_attention", "full_attention"] * 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "linear_head_dim": 16,
    "linear_num_heads": 2,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


@pytest.fixture(scope="session")
def backbones() -> ModuleType:
    """The module `tests/conversion/backbones.py`: standard models and family members on every backbone."""
    from .conversion import backbones

    return backbones


@pytest.fixture(scope="session")
def once(tmp_path_factory) -> Callable[[str, Callable[[Path], object]], Path]:
    """`once(name, make)`: the folder of that name, which `make(folder)` fills once for all workers of pytest."""
    run = os.environ.get("PYTEST_XDIST_TESTRUNUID", str(os.getpid()))

    def folder_of(name: str, make: Callable[[Path], object]) -> Path:
        folder = tmp_path_factory.getbasetemp().parent / f"{name}-{run}"
        with FileLock(folder.with_suffix(".lock")):
            if not folder.exists():
                unfinished = tmp_path_factory.mktemp(name)
                make(unfinished)
                unfinished.rename(folder)
        return folder

    return folder_of


@pytest.fixture(scope="session")
def tiny_config() -> Callable[..., "AttnResConfig"]:
    """`tiny_config(**overrides)`: a small AttnRes configuration."""
    from attnres import AttnResConfig

    return lambda **overrides: AttnResConfig(**{**TINY, **overrides})


@pytest.fixture(scope="session")
def tiny_model(tiny_config) -> Callable[..., "AttnResForCausalLM"]:
    """`tiny_model(seed=0, **overrides)`: a small model, in eval mode, whose depth weights are far from uniform."""
    import torch

    from attnres import AttnResForCausalLM
    from attnres.residual_attnres import residual_tensors

    def build(seed: int = 0, **overrides) -> AttnResForCausalLM:
        torch.manual_seed(seed)
        model = AttnResForCausalLM(tiny_config(**overrides)).eval()
        for tensor in residual_tensors(model).values():
            torch.nn.init.normal_(tensor, mean=1.0 if tensor.ndim == 1 else 0.0, std=0.5)
        return model

    return build


@pytest.fixture(scope="session")
def tiny_kimi_k3(tmp_path_factory) -> Path:
    """The folder of a Kimi K3 with 4 layers and 99 tokens, as `save_pretrained` writes it; tests must not change it."""
    import torch
    from transformers import AutoModelForCausalLM

    from attnres.configuration import load

    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("tiny-kimi-k3")
    model = AutoModelForCausalLM.from_config(
        load("attnres-k3-tiny", num_hidden_layers=4, vocab_size=TINY["vocab_size"])
    )
    model.save_pretrained(folder)
    return folder


@pytest.fixture
def token_ids() -> "torch.Tensor":
    """Two sequences of 11 tokens without special tokens, `[2, 11]`."""
    import torch

    return torch.randint(3, TINY["vocab_size"], (2, 11), generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="session")
def assets() -> Path:
    """The folder of real checkpoints and corpora that `ATTNRES_ASSETS` names."""
    if "ATTNRES_ASSETS" not in os.environ:
        pytest.skip("ATTNRES_ASSETS is not set: this test needs a real checkpoint or corpus")
    return Path(os.environ["ATTNRES_ASSETS"])


@pytest.fixture
def hub() -> Iterator["Hub"]:
    """A Hub on this machine, empty, to publish to and to load from; see `tests/hub/running.py`."""
    from .hub.running import Hub

    with Hub.running() as hub:
        yield hub


@pytest.fixture(scope="session")
def wheel(tmp_path_factory) -> Path:
    """The wheel, built from a copy of the tree."""
    folder = tmp_path_factory.mktemp("wheel")
    ignored = shutil.ignore_patterns(
        ".*", "__pycache__", "build", "dist", "*.egg-info", "tests", "notebooks", "attnres-demo"
    )
    shutil.copytree(ROOT, folder / "tree", ignore=ignored)
    # The build backend is a dependency of torch, so it is here, and nothing is fetched.
    options = ["--no-deps", "--no-build-isolation", "--no-index", "--quiet", "--disable-pip-version-check"]
    command = [sys.executable, "-m", "pip", "wheel", *options, "--wheel-dir", str(folder), str(folder / "tree")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    (path,) = folder.glob("*.whl")
    return path
