"""On a machine without a GPU, installed kernel packages do no harm: neither real ones nor fakes that always fail."""

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from textwrap import dedent

import pytest

HERE = Path(__file__).parent
PACKAGES = ("triton", "fla", "causal_conv1d")

# The fakes behave like Triton without a driver: they load and take kernels, but cannot run one. PyTorch looks into
# Triton when it is imported, so any module and any name in it must exist.
FAKES = {
    "triton/__init__.py": """
        import sys
        from importlib.machinery import ModuleSpec

        __version__ = "3.9.0"

        class Anything:
            def __init__(self, *args, **kwargs):
                pass

            def __call__(self, *args, **kwargs):
                return self

            def __getitem__(self, grid):
                raise RuntimeError("0 active drivers ([]). There should only be one.")

        def __getattr__(name):
            if name.startswith("__"):
                raise AttributeError(name)
            return Anything

        class Finder:
            def find_spec(self, name, path=None, target=None):
                return ModuleSpec(name, self, is_package=True) if name.startswith("triton.") else None

            def create_module(self, spec):
                return None

            def exec_module(self, module):
                module.__getattr__ = __getattr__

        sys.meta_path.append(Finder())
        import triton.language
    """,
    "fla/__init__.py": """
        import triton

        def chunk_kda(*args, **kwargs):
            return triton.jit(None)[1]()

        fused_recurrent_kda = causal_conv1d_fn = causal_conv1d_update = chunk_kda
    """,
    "causal_conv1d/__init__.py": "from fla import causal_conv1d_fn, causal_conv1d_update",
}


def run(*command: object, **environment: str) -> list[str]:
    """Run a Python command, and return a list of the last line that it prints."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "TRANSFORMERS_"))}
    # Hide a GPU.
    environment = inherited | {"CUDA_VISIBLE_DEVICES": ""} | environment
    done = subprocess.run(
        [sys.executable, *map(str, command)], env=environment, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout.splitlines()[-1:]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["fake", "real"])
def test_on_a_cpu_a_model_trains_generates_and_loads_as_remote_code(kind, tmp_path):
    fakes = tmp_path / "packages"
    fakes.mkdir()
    if kind == "fake":
        for name, text in FAKES.items():
            (fakes / name).parent.mkdir(parents=True, exist_ok=True)
            (fakes / name).write_text(dedent(text))
    elif not any(find_spec(name) for name in PACKAGES):
        pytest.skip("no kernel package is installed")
    session = HERE / "kernel_packages_session.py"
    loaded = run(session, "train", tmp_path / "model", PYTHONPATH=str(fakes), HF_HOME=str(tmp_path / "home"))
    assert kind == "real" or loaded == [str(sorted(PACKAGES))], "the packages were not looked at"
    without = [HERE / "without_attnres.py", os.pathsep.join([str(fakes), *filter(_is_packages, sys.path)])]
    run("-I", "-S", *without, session, "load", tmp_path / "model", HF_HOME=str(tmp_path / "home"))


def _is_packages(path: str) -> bool:
    return Path(path).name in ("site-packages", "dist-packages")
