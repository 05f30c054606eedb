"""A conversion that is interrupted, terminated or killed leaves no result or the old one, and the next one works."""

import json
from pathlib import Path

import pytest
import torch

from .. import forks
from .checkpoints import change_tensors, standard_model

pytestmark = pytest.mark.slow  # thirty conversions, one after the other

MOMENTS = ["reading", "copying", "adding", "verifying", "renaming"]
SIGNALS = {"SIGINT": 130, "SIGTERM": 143, "SIGKILL": -9}


@pytest.fixture(scope="module")
def session(tmp_path_factory) -> dict:
    """Return the results of `interrupted_session.py`, by moment and signal."""
    folder = tmp_path_factory.mktemp("interrupted")
    for name in ("source", "damaged"):
        standard_model().save_pretrained(folder / name, max_shard_size="20KB")
    change_tensors(folder / "damaged", {"model.norm.weight": torch.full((32,), torch.nan)})
    (folder / "runs").mkdir()
    script = Path(__file__).with_name("interrupted_session.py")
    done = forks.run(script, folder / "source", folder / "damaged", folder / "runs", timeout=900)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads((folder / "runs" / "seen.json").read_text())


@pytest.mark.parametrize("name", SIGNALS)
@pytest.mark.parametrize("moment", MOMENTS)
def test_a_conversion_stopped_at_any_moment_leaves_no_result(session, moment, name):
    seen = session[f"{moment} {name}"]
    assert (seen["code"], seen["result"]) == (SIGNALS[name], None), seen["log"]
    assert "Traceback" not in seen["log"]
    assert seen["left"] == [] or name == "SIGKILL"


@pytest.mark.parametrize("moment", MOMENTS)
def test_the_next_conversion_clears_the_files_of_a_killed_one(session, moment):
    seen = session[f"{moment} SIGKILL"]
    assert "`model.norm.weight`" in seen["damaged log"], "it must fail because of the damage"
    assert (seen["damaged"], seen["left after damaged"]) == (1, [])
    assert (seen["again"], seen["left after again"]) == (0, ["result"])
    assert seen["result after again"] == session["two"]["result"]


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM"])
@pytest.mark.parametrize("moment", ["copying", "renaming"])
def test_a_stopped_conversion_keeps_the_result_that_it_was_to_replace(session, moment, name):
    seen = session[f"{moment} {name} overwrite"]
    assert seen["code"] == SIGNALS[name], seen["log"]
    assert seen["old"] == session["one"]["result"]
    assert (seen["left"], seen["result"]) == (["result"], seen["old"])


@pytest.mark.parametrize("moment", ["copying", "renaming"])
def test_a_killed_conversion_does_not_lose_the_result_that_it_was_to_replace(session, moment):
    seen = session[f"{moment} SIGKILL overwrite"]
    assert seen["code"] == -9
    assert seen["result"] == (None if moment == "renaming" else seen["old"]), "between two renames there is no result"
    assert (seen["damaged"], seen["left after damaged"]) == (1, ["result"])
    assert seen["result after damaged"] == seen["old"]
    assert (seen["again"], seen["left after again"]) == (0, ["result"])
    assert seen["result after again"] == session["two"]["result"]


def test_a_second_conversion_to_the_same_target_is_refused_and_does_not_disturb_the_first(session):
    seen = session["two"]
    assert seen["second"] == 1
    assert "is being written by another process" in seen["log"]
    assert (seen["first"], seen["left"]) == (0, ["result"])
