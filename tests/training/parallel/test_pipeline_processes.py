"""Pipelines of four processes train as one process does, and send what the plan says."""

import json
from pathlib import Path

import pytest

from ... import forks
from .pipeline_session import CASES, COUNTED, LENGTH, LLAMA

TOLERANCE = 1e-5  # relative, in float32


def train(folder: Path) -> None:
    """Run `pipeline_session.py` in four processes."""
    done = forks.launch(Path(__file__).with_name("pipeline_session.py"), folder, processes=4, timeout=600)
    assert done.returncode == 0, done.stderr[-4000:]


@pytest.fixture(scope="module")
def trained(once) -> dict:
    """Return the results of `pipeline_session.py`, in four processes."""
    return json.loads((once("pipeline", train) / "results.json").read_text())


def assert_same_as_one_process(result: dict) -> None:
    """Assert that losses, gradients and their norms, weights, and the logits of an evaluation are the same."""
    worst = result["worst"]
    assert worst.keys() == {"loss", "gradients", "norm", "weights", "logits"}
    assert all(difference <= TOLERANCE for difference in worst.values()), worst
    assert result["is_complete"]  # each tensor is on some process


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in CASES if not CASES[name]["narrow"]])
def test_a_pipeline_trains_as_one_process_does(name, trained):
    assert_same_as_one_process(trained[name])


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in CASES if CASES[name]["narrow"]])
def test_a_pipeline_in_bfloat16_differs_from_one_process_by_no_more_than_rounding(name, trained):
    """The rounding is the difference between bfloat16 and float32, both in one process."""
    worst, rounding = trained[name]["worst"], trained[name]["rounding"]
    assert worst.keys() == rounding.keys() and trained[name]["is_complete"]
    assert all(rounding.values()), rounding
    assert all(worst[measure] <= 2 * rounding[measure] for measure in worst), (worst, rounding)


@pytest.mark.slow
@pytest.mark.parametrize(("stages", "virtual"), COUNTED)
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


@pytest.mark.slow
@pytest.mark.parametrize(
    "name, stages, virtual, blocks",
    [("Interleaved1F1B, P=4, V=2", 4, 2, 1), ("LoopedBFS, P=2, V=4", 2, 4, 2)],
)
def test_blocks_that_a_process_has_made_are_not_sent_back_to_it(name, stages, virtual, blocks, trained):
    """Each chunk is one layer, and ends with its last block. These are fewer bytes than the paper's formula says."""
    results, source = trained[name]["results"], LENGTH * LLAMA["hidden_size"] * 4
    paper = (stages * (stages - 1) / 2 + (virtual - 1) * stages**2) * blocks
    sent = paper - (virtual - 1) * stages * blocks + (stages - 1)  # and the embedding, once to each other process
    assert results["sent_bytes"] == results["sent_gradient_bytes"] == sent * source * results["microbatches"]


@pytest.mark.slow
def test_a_process_keeps_the_blocks_before_its_last_chunk(trained):
    """`LoopedBFS` runs all micro-batches forward first, so all of their blocks are kept at once."""
    results, source = trained["LoopedBFS, P=2, V=4"]["results"], LENGTH * LLAMA["hidden_size"] * 4
    embedding, blocks = 1, (4 - 1) * 2 * 2  # (V - 1) P N_p
    assert results["cached_bytes_peak"] == 3 * (embedding + blocks) * source
