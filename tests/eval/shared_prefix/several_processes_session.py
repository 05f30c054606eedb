"""Score HellaSwag in several processes, each with its part of the questions; run by `test_real_questions.py`.

torchrun ... several_processes_session.py FOLDER HUB OUT        the first process writes the results to `OUT`
"""

import json
import sys
from pathlib import Path

import lm_eval
import torch

from attnres.eval.benchmarks import benchmarks, load
from attnres.eval.shared_prefix import SharedPrefixLM

folder, hub, out = sys.argv[1:]
done = []
lm = SharedPrefixLM(folder, device="cpu", batch_size=4, progress=done.append)
results = lm_eval.evaluate(lm, load(benchmarks()["hellaswag"], Path(hub)), limit=7, bootstrap_iters=0)
if lm.rank == 0:
    results = {"processes": lm.world_size, "requests": done[-1], "results": results["results"]}
    Path(out).write_text(json.dumps(results))
torch.distributed.destroy_process_group()
