"""A process waits for the others no longer than the limit of its recipe, but as long as the first one prepares data."""

import signal
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest

from attnres.training.recipe import Recipe

from .. import forks
from .parallel.test_many_devices import environment_of

WAITS = """
import os, signal, sys, time
from datetime import timedelta
from pathlib import Path
from accelerate import PartialState
from attnres.training.recipe import Recipe
from attnres.commands.guard import guarded
from attnres.training.train import first_process_first

stops, pid = sys.argv[1:]

def stop():
    Path(pid).write_text(str(os.getpid()))
    os.kill(os.getpid(), signal.SIGSTOP)

recipe = Recipe("m", ("a.txt",), "out", steps=1, pipeline={"stages": 2, "timeout": 2})
limit = recipe.timeout
with guarded():
    state = PartialState(cpu=True, timeout=timedelta(seconds=limit))
    start = time.monotonic()
    with first_process_first(state, limit):
        if state.is_main_process:
            time.sleep(2 * limit)
        assert time.monotonic() - start > 1.5 * limit
    print("prepared", flush=True)
    if os.environ["RANK"] == stops == "1":
        stop()
    with first_process_first(state, limit):
        if os.environ["RANK"] == stops == "0":
            stop()
    state.wait_for_everyone()
"""


@pytest.mark.slow
@pytest.mark.parametrize("stops", ["0", "1"])
def test_a_process_that_stops_before_training_ends_the_others_but_a_long_preparation_does_not(stops, tmp_path):
    path, other = tmp_path / "pid", 1 - int(stops)
    with forks.ranks(environment_of("ddp", 2), 2) as ranks, ThreadPoolExecutor() as threads:
        ends = [threads.submit(forks.run, "-c", WAITS, stops, path, env=rank, timeout=60) for rank in ranks]
        done = ends[other].result()
        psutil.Process(int(path.read_text())).kill()
        stopped = ends[int(stops)].result()
    assert stopped.returncode == -signal.SIGKILL and stopped.stdout == done.stdout == "prepared\n"
    assert done.returncode == 1
    message = "has waited too long for the other processes: one of them hangs, or a step takes longer."
    assert f"attnres: process {other} {message} `pipeline.timeout` of the recipe" in done.stderr


def test_the_limit_is_that_of_the_pipeline_or_of_trainer():
    assert Recipe("m", ("a.txt",), "out", steps=1).timeout == 1800
    assert Recipe("m", ("a.txt",), "out", steps=1, pipeline={"stages": 2}).timeout == 600
    assert Recipe("m", ("a.txt",), "out", steps=1, trainer={"ddp_timeout": 5}).timeout == 5
