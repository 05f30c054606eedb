"""Run `attnres train` on CPUs as if they were GPUs: `many_devices_session.py train RECIPE [key=value ...]`.

accelerate uses FSDP2 and tensor parallelism on GPUs only, although both run on CPUs. This session makes it treat CPUs
as GPUs.
"""

import os

from accelerate import PartialState
from accelerate.utils import DistributedType

from attnres.commands.main import main

start = PartialState.__init__


def start_as_on_gpus(state: PartialState, *args, **kwargs) -> None:
    start(state, *args, **kwargs)
    if state.distributed_type == DistributedType.MULTI_CPU:
        state.distributed_type = DistributedType.MULTI_GPU


PartialState.__init__ = start_as_on_gpus
if os.environ.get("FIRST_PROCESS_LOADS"):  # `fsdp_cpu_ram_efficient_loading: true` in accelerate's file
    os.environ["FSDP_CPU_RAM_EFFICIENT_LOADING"] = "true"

if __name__ == "__main__":
    main()
