"""Run several `attnres train` commands one after another in the same processes: `lora_session.py COMMANDS.json`.

The file holds a list of `{"arguments": [...], "stopped_after": STEP or null}`. With a step, the run gets SIGTERM after
it, as from a scheduler, and then the command runs again.
"""

import json
import os
import signal
import sys
from pathlib import Path

import torch.distributed as dist

from attnres.commands.main import main
from attnres.training.train import TERMINATED
from attnres.training.trainer import StopOnSignal

end_step = StopOnSignal.on_step_end
stops: list[int] = []


def stop_after_step(self: StopOnSignal, args, state, control, **kwargs) -> None:
    if state.global_step in stops:
        stops.remove(state.global_step)
        os.kill(os.getpid(), signal.SIGTERM)
    end_step(self, args, state, control, **kwargs)


if __name__ == "__main__":
    StopOnSignal.on_step_end = stop_after_step
    leave, dist.destroy_process_group = dist.destroy_process_group, lambda: None  # all runs have it
    for run in json.loads(Path(sys.argv[1]).read_text()):
        sys.argv = ["attnres", "train", *run["arguments"]]
        if run["stopped_after"]:
            stops.append(run["stopped_after"])
        for status in (TERMINATED, 0) if stops else (0,):
            try:
                main()
            except SystemExit as end:
                assert (end.code or 0) == status, end.code
    if dist.is_initialized():
        leave()
