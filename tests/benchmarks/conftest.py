"""Let tests import the folder `benchmarks`, which is not installed, from the checkout."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))
