"""Settings of the suite of `transformers`, which `tests/peers/transformers_suite.py` copies as `conftest.py`."""

import gc
import json
import os


def pytest_collection_modifyitems(items):
    left_out = set(json.loads(os.environ["LEFT_OUT"]))
    items[:] = [item for item in items if item.name not in left_out]


def pytest_collection_finish():
    # Many of the suite's tests call the garbage collector, which would search all that was imported each time.
    gc.freeze()
