"""The name of a model: a named configuration, a folder, or an id on the Hub."""

import pytest

from attnres.checkpoints.source import ModelSource


def test_a_folder_with_the_name_of_a_configuration_is_refused_where_weights_are_needed(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "attnres-tiny").mkdir()
    (tmp_path / "attnres-tiny/config.json").write_text("{}")
    with pytest.raises(FileNotFoundError, match=r"has no weights\. For a folder of that name, write \./attnres-tiny"):
        ModelSource("attnres-tiny").check(needs_weights=True)
    ModelSource("./attnres-tiny").check(needs_weights=True)
    ModelSource("attnres-tiny").check()
