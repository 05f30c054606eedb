"""Errors of YAML take one line."""

import pytest

from attnres.utils.yaml_files import parse_yaml, read_yaml


@pytest.mark.parametrize("content", [b"a: [b", b"\xff\xfe\x00", b"a: \x07", b"2026-02-31"])
def test_a_file_that_is_not_yaml_is_named(content, tmp_path):
    (tmp_path / "some.yaml").write_bytes(content)
    with pytest.raises(ValueError, match=f"^{tmp_path / 'some.yaml'} cannot be read as YAML: "):
        read_yaml(tmp_path / "some.yaml")


def test_a_key_may_stand_once_but_may_replace_a_merged_one():
    assert parse_yaml("b: &b {a: 1}\nc: {<<: *b, a: 2}\nd: {<<: *b}", "x")["c"] == {"a": 2}
    with pytest.raises(ValueError, match="x is broken YAML: the key 'a' stands here a second time: remove one"):
        parse_yaml("b: {a: 1, c: 3, a: 2}", "x")
