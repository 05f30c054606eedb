"""Print a hash of the prompts of each benchmark: `prompts_session.py HUB SYNTHETIC_HUB NAME...`."""

import hashlib
import json
import sys
from pathlib import Path

from attnres.eval.benchmarks import benchmarks, load

hub, synthetic, *names = sys.argv[1:]
hashes = {}
for name in names:
    benchmark = benchmarks()[name]
    folder = hub if (Path(hub) / benchmark.dataset).is_dir() else synthetic
    tasks = load(benchmark, Path(folder))["tasks"]
    prompts = []
    for task_name, task in sorted(tasks.items()):
        task.build_all_requests(limit=8)
        prompts += [(task_name, instance.doc_id, instance.args) for instance in task.instances]
    hashes[name] = hashlib.sha256(repr(prompts).encode()).hexdigest()
print(json.dumps(hashes))
