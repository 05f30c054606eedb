"""A checkpoint is opened once: its files are parsed once, and few files of code are entered again."""

import json
from pathlib import Path

import pytest

from .. import forks

pytestmark = pytest.mark.slow  # a profiled process
SESSION = Path(__file__).with_name("walk_session.py")


@pytest.fixture(scope="module")
def walk(assets, tmp_path_factory) -> dict:
    """Return what `walk_session.py` prints of a small Llama."""
    source, target = assets / "checkpoints" / "stories260K-hf", tmp_path_factory.mktemp("walk") / "result"
    done = forks.run(SESSION, source, target, "checkpoints", "conversion", timeout=300)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_each_json_file_of_a_source_is_parsed_once(walk):
    assert walk["code"] == 0
    assert walk["parses"]["config.json"] == 1 and max(walk["parses"].values()) == 1


def test_a_reader_of_a_conversion_returns_to_few_files(walk):
    """Two rooms, without the models: the files in the order in which their functions are first called."""
    assert walk["returns"] <= 12, walk["files"]
