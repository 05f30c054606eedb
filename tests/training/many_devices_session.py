"""`attnres.training.train` on CPUs as on GPUs: `many_devices_session.py RECIPE [key=value ...]`, started on each process.

accelerate keeps tensor parallelism and its FSDP2 from CPUs, where both run. What it asks is answered here as on GPUs.
"""

import sys

from accelerate import ParallelismConfig

from attnres.training.train import main

# It refuses CPUs, and checks nothing else that these tests set.
ParallelismConfig._validate_accelerator = lambda self, accelerator: None

if __name__ == "__main__":
    main(sys.argv[1:])
