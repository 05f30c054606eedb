"""Run tests with other releases of `transformers` and PyTorch than those of constraints.txt.

    python tests/peers/versions.py [VERSION | newest ...]

A version is one of `transformers`, with which tests of the model and of the conversion run. `newest` is what a plain
`pip install` takes: the newest PyTorch and `transformers`, with Triton beside them. All fast tests run with it.

Each release lies in an environment of its own, over the one that runs this. It stays as it was made: remove
`.peer-newest` to get later releases. Exit status 1: a test failed with one.
"""

import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from environments import ROOT, environment

# The oldest that has Kimi Linear, with the newest huggingface-hub that it takes; the one that vLLM is
# tested with; and the newest, which `pip install` takes.
RELEASES = {"5.17.0": ("huggingface-hub==1.33.0",), "5.19.0": (), "5.24.0": ()}
NEWEST = "newest"
# What works with the release of constraints.txt can break where the family stands on what `transformers` does by
# itself: its loading, remote code, recorded outputs and caches. Left out is what is the family's own: equations,
# kernels, and the files of `convert`.
# One test of Kimi K3's equations suffices: the others check the reference, or the same equations in another dtype.
FOLDERS = ("modeling_attnres", "conversion")  # tested with any other release
TESTS = {
    "5.17.0": (
        "modeling_attnres/test_auto_classes.py",
        "modeling_attnres/test_backbone_checkpoints.py",
        "modeling_attnres/test_backbones.py",
        "modeling_attnres/test_float32.py",
        "modeling_attnres/test_generation.py",
        "modeling_attnres/test_kimi_k3.py::test_model_follows_the_equations_in_float32",
        "modeling_attnres/test_kimi_k3_storage.py",
        "modeling_attnres/test_kimi_k3_vision.py",
        "modeling_attnres/test_outputs.py",
        "modeling_attnres/test_published_layout.py",
        "modeling_attnres/test_remote_backbones.py",
        "modeling_attnres/test_remote_code.py",
        "modeling_attnres/test_saving_and_loading.py",
        "conversion/test_convert.py::test_the_result_computes_the_same_function",
        "conversion/test_float32.py",
        "conversion/test_retrofit.py",
        "conversion/test_without_extras.py",
    ),
    "5.19.0": (
        "modeling_attnres/test_auto_classes.py",
        "modeling_attnres/test_backbone_checkpoints.py",
        "modeling_attnres/test_backbones.py",
        "modeling_attnres/test_generation.py",
        "modeling_attnres/test_kimi_k3.py::test_model_follows_the_equations_in_float32",
        "modeling_attnres/test_kimi_k3_storage.py",
        "modeling_attnres/test_kimi_k3_vision.py",
        "modeling_attnres/test_outputs.py",
        "modeling_attnres/test_published_layout.py",
        "modeling_attnres/test_remote_backbones.py",
        "modeling_attnres/test_remote_code.py",
        "modeling_attnres/test_saving_and_loading.py",
        "conversion/test_convert_serving.py",  # in the layout that vLLM reads with this release
        "conversion/test_retrofit.py",
    ),
    # It has another name for the cache, and more tensors in float32, than the release that all tests run with.
    "5.24.0": (
        "modeling_attnres/test_backbone_checkpoints.py",
        "modeling_attnres/test_backbones.py",
        "modeling_attnres/test_deprecations.py",
        "modeling_attnres/test_float32.py",
        "modeling_attnres/test_generation.py",
        "modeling_attnres/test_kimi_k3.py::test_model_follows_the_equations_in_float32",
        "modeling_attnres/test_kimi_k3_storage.py",
        "modeling_attnres/test_kimi_k3_vision.py",
        "modeling_attnres/test_outputs.py",
        "modeling_attnres/test_published_layout.py",
        "modeling_attnres/test_remote_code.py",
        "modeling_attnres/test_saving_and_loading.py",
        "conversion/test_float32.py",
        "conversion/test_retrofit.py",
        "eval/shared_prefix/test_likelihood.py",
    ),
}


def make_environment(release: str) -> Path:
    """Make the environment of a release, and return the path of its Python."""
    if release == NEWEST:
        return environment(NEWEST, "--upgrade", "torch", "transformers", "triton")
    return environment(f"transformers-{release}", f"transformers=={release}", *RELEASES.get(release, ()))


def choose_tests(release: str) -> list[str | Path]:
    """Return the arguments of pytest that choose the tests for a release."""
    if release == NEWEST:
        return ["-m", "not slow", ROOT / "tests"]
    return [ROOT / "tests" / name for name in TESTS.get(release, FOLDERS)]


def run_tests(release: str, *options: str) -> bool:
    """Run the tests of a release, print what pytest wrote when it has ended, and return whether all passed."""
    python, started = make_environment(release), time.monotonic()
    command = [python, "-m", "pytest", "-p", "no:cacheprovider", *options, *choose_tests(release)]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    ended = f"{release}: exit status {done.returncode}, {time.monotonic() - started:.0f} s"
    print(done.stdout, ended, sep="\n", flush=True)
    return done.returncode == 0


def main(releases: list[str]) -> int:
    # Two releases at once, each in one process, take less than one after another in two: every process imports all
    # modules, and makes the models that tests share.
    with ThreadPoolExecutor(2) as pool:
        passed = [*pool.map(run_tests, (release for release in releases if release != NEWEST))]
    if NEWEST in releases:  # many more tests
        passed.append(run_tests(NEWEST, "--numprocesses", "2", "--dist", "worksteal"))
    return 0 if all(passed) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:] or [*RELEASES, NEWEST]))
