"""Fixtures of the evaluation tests: data, real and synthetic, and loaded benchmarks."""

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest


@pytest.fixture(scope="session", autouse=True)
def quick_harness(tmp_path_factory):
    """Prepare data sets in a temporary folder, and let lm_eval compile each template only once.

    Commands that a test starts prepare them there too, so that no test depends on the data sets of the user.
    """
    import datasets
    from lm_eval import utils

    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("datasets")
        patch.setattr(datasets.config, "HF_DATASETS_CACHE", folder)
        patch.setenv("HF_DATASETS_CACHE", str(folder))
        patch.setattr(utils.env, "from_string", cache(utils.env.from_string))
        yield


@pytest.fixture(scope="session")
def hub(assets) -> Path:
    """Return the folder of the real data sets of 11 of the 15 benchmarks, as `ORG/NAME`."""
    return assets / "hub"


@pytest.fixture(scope="session")
def synthetic_hub(tmp_path_factory) -> Path:
    """Return a folder of small data sets in the form of the four others: GPQA, HumanEval, CMMLU, C-Eval."""
    from .synthetic import write_all

    folder = tmp_path_factory.mktemp("hub")
    write_all(folder)
    return folder


SYNTHETIC = ("gpqa_diamond", "humaneval", "cmmlu", "ceval")


@pytest.fixture(scope="session")
def loaded(request) -> Callable[[str], dict]:
    """Return `loaded(name)`, which loads a benchmark once, with real data or, if there is none, synthetic data."""
    from attnres.eval.benchmarks import benchmarks, load

    @cache
    def tasks(name: str) -> dict:
        folder = request.getfixturevalue("synthetic_hub" if name in SYNTHETIC else "hub")
        return load(benchmarks()[name], folder)

    return tasks
