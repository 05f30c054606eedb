"""Pipelines of four processes train as one process does, and send what the plan says."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from .pipeline_session import CASES, LENGTH, LLAMA

TOLERANCE = 1e-5  # relative, in float32


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> dict:
    """Return the results of all cases; see `pipeline_session.py`."""
    folder = tmp_path_factory.mktemp("pipeline")
    session = Path(__file__).with_name("pipeline_session.py")
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=4"]
    done = subprocess.run([*launcher, session, folder], capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads((folder / "results.json").read_text())


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_a_pipeline_trains_as_one_process_does(name, trained):
    """Losses, gradients, their norms, the weights after five steps, and the logits of an evaluation are the same."""
    worst = trained[name]["worst"]
    assert worst.keys() == {"loss", "gradients", "norm", "weights", "logits"}
    assert all(difference <= TOLERANCE for difference in worst.values()), worst
    assert trained[name]["is_complete"]  # each tensor is on some process


@pytest.mark.slow
@pytest.mark.parametrize("stages", [2, 4])
@pytest.mark.parametrize("virtual", [1, 2, 4])
def test_the_bytes_sent_are_those_of_the_paper(stages, virtual, trained):
    """One block is begun in each chunk. The embedding, which the formulas leave out, is counted apart."""
    chunks, micro_batches = stages * virtual, stages
    source = LENGTH * LLAMA["hidden_size"] * 4  # bytes of a micro-batch of one sequence
    naive, cached = (trained[f"counts, P={stages}, V={virtual}, {way}"]["results"] for way in ("naive", "cached"))
    blocks = chunks * (chunks - 1) / 2 + (chunks - 1)
    assert naive["sent_bytes"] == naive["sent_gradient_bytes"] == blocks * source * micro_batches
    blocks = stages * (stages - 1) / 2 + (virtual - 1) * stages**2 + (stages - 1)
    assert cached["sent_bytes"] == cached["sent_gradient_bytes"] == blocks * source * micro_batches
    assert sum(cached["transition_bytes"]) == cached["sent_bytes"]
    assert naive["peak_transition_bytes"] == chunks * source
    assert cached["peak_transition_bytes"] == stages * source
    assert naive["cached_bytes_peak"] == 0
    assert (cached["cached_bytes_peak"] > 0) == (virtual > 1)
