"""The name of a model: a named configuration, a folder, or an id on the Hub."""

import pytest

from attnres.checkpoints.source import ModelSource


@pytest.mark.parametrize("is_folder", [True, False], ids=["beside a folder of that name", "alone"])
def test_a_named_configuration_is_refused_where_weights_are_needed(tmp_path, monkeypatch, is_folder):
    monkeypatch.chdir(tmp_path)
    if is_folder:
        (tmp_path / "attnres-tiny").mkdir()
        (tmp_path / "attnres-tiny/config.json").write_text("{}")
        ModelSource("./attnres-tiny").check(needs_weights=True)
    with pytest.raises(FileNotFoundError, match=r"has no weights\. For a folder of that name, write \./attnres-tiny"):
        ModelSource("attnres-tiny").check(needs_weights=True)
    ModelSource("attnres-tiny").check()
