"""Evaluate source and result of a conversion in lm-evaluation-harness, offline; run by `test_convert_serving.py`.

evaluation_session.py TASKS OUT FOLDER...        results go to the file `OUT`
"""

import json
import sys

import lm_eval
from lm_eval.tasks import TaskManager

import attnres  # noqa: F401  registers the family

tasks, out, *folders = sys.argv[1:]
manager = TaskManager(include_path=tasks, include_defaults=False)
seen = []
for folder in folders:
    results = lm_eval.simple_evaluate(
        "hf",
        model_args={"pretrained": folder, "dtype": "float32"},
        tasks=["stories", "choices"],
        task_manager=manager,
        device="cpu",
        batch_size=4,
        limit=20,
        bootstrap_iters=0,
    )
    seen.append({"results": results["results"], "samples": results["n-samples"]})
with open(out, "w") as file:
    json.dump(seen, file)
