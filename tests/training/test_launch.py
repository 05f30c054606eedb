"""A run is refused before any work if its recipe cannot start from its model."""

import pytest

from .. import forks


@pytest.mark.slow
@pytest.mark.parametrize("changes", [(), ("tokenizer=absent",), ("retrofit={}",)], ids=str)
def test_healing_random_weights_is_refused_before_a_tokenizer_is_asked_for(changes, tmp_path):
    (tmp_path / "text.txt").write_text("Once upon a time.")
    recipe = ("heal", "model=attnres-tiny", "train=text.txt", "out=out", *changes)
    done = forks.run("-m", "attnres_cli", "train", *recipe, cwd=tmp_path)
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert line.startswith(
        "attnres: attnres-tiny is a named configuration with random weights, so there is nothing to "
    )
    assert "by the recipe `pretrain`, or give model=DIR, a checkpoint that `attnres convert` made." in line
