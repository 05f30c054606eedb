"""Run `attnres train` in a chosen way: `many_devices_session.py train RECIPE [key=value ...]`.

- With `AS_ON_GPUS` in the environment, accelerate treats CPUs as GPUs. It uses FSDP2 on GPUs only, although
  FSDP2 runs on CPUs.
- With `STOPPED_AFTER`, a process gets SIGTERM after this step, as from a scheduler, and then runs the command again.
"""

import os
import signal

import torch.distributed as dist
from accelerate import PartialState
from accelerate.utils import DistributedType

from attnres.commands.main import main
from attnres.training.callbacks import StopOnSignal
from attnres.training.train import TERMINATED

start, end_step = PartialState.__init__, StopOnSignal.on_step_end
stops = [int(step) for step in os.environ.get("STOPPED_AFTER", "").split()]


def start_as_on_gpus(state: PartialState, *args, **kwargs) -> None:
    start(state, *args, **kwargs)
    if state.distributed_type == DistributedType.MULTI_CPU:
        state.distributed_type = DistributedType.MULTI_GPU


def stop_after_step(self: StopOnSignal, args, state, control, **kwargs) -> None:
    if state.global_step in stops:
        stops.remove(state.global_step)
        os.kill(os.getpid(), signal.SIGTERM)
    end_step(self, args, state, control, **kwargs)


if os.environ.get("AS_ON_GPUS"):
    PartialState.__init__ = start_as_on_gpus
if os.environ.get("FIRST_PROCESS_LOADS"):  # `fsdp_cpu_ram_efficient_loading: true` in accelerate's file
    os.environ["FSDP_CPU_RAM_EFFICIENT_LOADING"] = "true"

if __name__ == "__main__":
    if stops:
        StopOnSignal.on_step_end = stop_after_step
        leave, dist.destroy_process_group = dist.destroy_process_group, lambda: None  # the second run has it too
        try:
            main()
        except SystemExit as end:
            assert end.code == TERMINATED, end.code
        dist.destroy_process_group = leave
    main()
