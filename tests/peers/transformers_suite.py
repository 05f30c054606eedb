"""Run `transformers`' own model tests on AttnRes, held against its backbones under the same tests.

    python tests/peers/transformers_suite.py [--cache DIR] [--every] [VARIANT ...]

The tests come from the sdist of the installed `transformers`; pip fetches it once, into the cache. Exit status 0: in
every variant every test passed that passed for its backbone, and no test failed that did not fail there. 1: not so.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from pathlib import Path
from xml.etree import ElementTree

from attnres.utils.declared import declared_connections, presets

HERE = Path(__file__).resolve().parent
CONNECTIONS = [
    name.title().replace("_", "") for name in declared_connections() if name != "attn_res" and name not in presets()
]
# Test classes of suite/model_testers.py: each variant, and the backbone that it is held against.
BY_DEFAULT = {
    "KimiK3": "KimiLinear",  # its classes are those of AttnRes on Kimi Linear and more
    "OnLlama": "Llama",
}
# Every residual connection on both backbones: each by its name, or all with `--every`.
ON_REQUEST = (
    dict.fromkeys(("Standard", "Full", "BlocksOf3", "BlocksOf4"), "KimiLinear")
    | {"OnMixtral": "Mixtral"}
    | {f"{name}On{backbone}": backbone for name in CONNECTIONS for backbone in ("Llama", "KimiLinear")}
)
YARDSTICKS = BY_DEFAULT | ON_REQUEST
FROM_SDIST = (
    "test_modeling_common.py",
    "test_training_mixin.py",
    "test_tensor_parallel_mixin.py",
    "test_expert_parallel_mixin.py",
    "test_fsdp_mixin.py",
)
# What those import and the sdist lacks. With these empty classes, tests of export and of `generate` are left out.
EMPTY_STAND_INS = {
    "exporters/test_export.py": "class ExportTesterMixin:\n    pass\n",
    "generation/test_utils.py": "class GenerationTesterMixin:\n    pass\n",
}
MAX_SECONDS_PER_RUN = 900
PROCESSES = 2


def fetch_sdist(cache: Path) -> Path:
    """Path of the sdist of the installed `transformers`, downloaded with pip unless it is in the cache."""
    release = version("transformers")
    sdist = cache / f"transformers-{release}.tar.gz"
    if not sdist.exists():
        cache.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary", ":all:"]
        subprocess.run([*command, f"transformers=={release}", "--dest", str(cache)], check=True)
    return sdist


def lay_out(sdist: Path, root: Path) -> None:
    """Write the package `tests` under `root`: the suite's files, the stand-ins for what it lacks, and our testers."""
    package = root / "tests"
    package.mkdir()
    (package / "__init__.py").touch()
    with tarfile.open(sdist) as archive:
        for name in FROM_SDIST:
            member = archive.extractfile(f"{sdist.name.removesuffix('.tar.gz')}/tests/{name}")
            (package / name).write_bytes(member.read())
    for name, text in EMPTY_STAND_INS.items():
        (package / name).parent.mkdir()
        (package / name).with_name("__init__.py").touch()
        (package / name).write_text(text)
    shutil.copy(HERE / "suite" / "distributed_testing_utils.py", package)
    shutil.copy(HERE / "suite" / "model_testers.py", package / "test_variants.py")
    shutil.copy(HERE / "suite" / "leave_out.py", root / "conftest.py")
    (root / "pytest.ini").touch()  # keeps pytest from using another project's settings


def run(variant: str, root: Path, left_out: Collection[str] = ()) -> dict[str, str]:
    """Run one test class in a process of its own, and print how it went.

    Of its own, because `transformers` remembers on the parent class what it found out about a model class.

    Args:
        variant: name of the class.
        root: folder of the suite.
        left_out: names of tests that are not run.

    Returns:
        The outcome of each test by its name.
    """
    report = root / f"{variant}.xml"
    command = [sys.executable, "-m", "pytest", "-q", "--tb=short", "-W", "ignore", "-p", "no:cacheprovider"]
    command += ["-c", "pytest.ini", f"--junitxml={report}", f"tests/test_variants.py::{variant}"]
    env = os.environ | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    env["LEFT_OUT"] = json.dumps([*left_out])
    env["PYTHONPATH"] = os.pathsep.join(filter(None, [str(root), os.environ.get("PYTHONPATH")]))
    log = root / f"{variant}.log"
    with log.open("w") as stream:
        subprocess.run(command, cwd=root, env=env, stdout=stream, stderr=subprocess.STDOUT, timeout=MAX_SECONDS_PER_RUN)
    if not report.exists():
        raise RuntimeError(f"{variant}: pytest did not finish\n{log.read_text()}")
    print(f"{variant}: {log.read_text().splitlines()[-1]}", flush=True)
    return {case.get("name"): outcome(case) for case in ElementTree.parse(report).iter("testcase")}


def outcome(case: ElementTree.Element) -> str:
    """Of a test and its subtests the worst."""
    kinds = {child.tag for child in case}
    if kinds & {"failure", "error"}:
        return "failed"
    return "skipped" if "skipped" in kinds else "passed"


def passes(outcomes: dict[str, str]) -> set[str]:
    """Return the names of the tests that passed."""
    return {name for name, result in outcomes.items() if result == "passed"}


def compare(variant: str, outcomes: dict[str, str], yardstick: dict[str, str]) -> list[str]:
    """Return the tests in which the variant is worse than its yardstick, one line for each."""
    rank = ("missing", "failed", "skipped", "passed")
    pairs = {name: (outcomes.get(name, "missing"), yardstick.get(name, "skipped")) for name in outcomes | yardstick}
    return [
        f"{variant}: {name} {found}, but {expected} for {YARDSTICKS[variant]}"
        for name, (found, expected) in pairs.items()
        if rank.index(found) < rank.index(expected)
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    help_text = f"of {', '.join(YARDSTICKS)}; default: the first {len(BY_DEFAULT)}"
    parser.add_argument("variants", nargs="*", metavar="VARIANT", help=help_text)
    parser.add_argument("--every", action="store_true", help="all of them, which takes half an hour")
    parser.add_argument("--cache", type=Path, default=HERE.parents[1] / ".peer", help="where the sdist is kept")
    arguments = parser.parse_args()
    if unknown := set(arguments.variants) - set(YARDSTICKS):
        parser.error(f"unknown variant {', '.join(sorted(unknown))}; choose from {', '.join(YARDSTICKS)}")

    started = time.monotonic()
    worse = []
    variants = arguments.variants or list(YARDSTICKS if arguments.every else BY_DEFAULT)
    yardsticks = {YARDSTICKS[variant] for variant in variants}
    with tempfile.TemporaryDirectory() as root, ThreadPoolExecutor(PROCESSES) as pool:
        lay_out(fetch_sdist(arguments.cache), Path(root))
        outcomes = dict(zip(variants, pool.map(lambda name: run(name, Path(root)), variants)))
        # Nothing is worse than passed: a backbone runs the tests that one of its variants does not pass.
        passed = {
            yardstick: set.intersection(*(passes(outcomes[name]) for name in variants if YARDSTICKS[name] == yardstick))
            for yardstick in sorted(yardsticks)
        }
        outcomes |= zip(passed, pool.map(lambda name: run(name, Path(root), passed[name]), passed))
        for name in passed:
            failing = [test for test, result in outcomes[name].items() if result == "failed"]
            print(f"fails for {name} itself: {', '.join(failing) or 'nothing'}")
        for variant in variants:
            found = compare(variant, outcomes[variant], outcomes[YARDSTICKS[variant]])
            worse += found
            if found:
                print(*found, (Path(root) / f"{variant}.log").read_text(), sep="\n")
    print(f"{len(worse)} tests went worse than for the backbone ({time.monotonic() - started:.0f} s)", *worse, sep="\n")
    return 1 if worse else 0


if __name__ == "__main__":
    sys.exit(main())
