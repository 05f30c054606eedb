"""Errors of YAML take one line."""

import pytest
import yaml

from attnres.utils.yaml_files import UniqueKeys, load_card_metadata, load_yaml, read_yaml


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("[" * 5000, "nested too deeply"),
        ("!!int ''", "does not fit its tag"),
        ("!!timestamp x", "does not fit its tag"),
        ("!!bool x", "does not fit its tag"),
        ("2026-02-31", "day"),
    ],
)
def test_values_that_cannot_be_built_raise_a_value_error_in_one_line(text, reason, tmp_path):
    with pytest.raises(ValueError, match=reason):
        load_yaml(text)
    path = tmp_path / "some.yaml"
    path.write_text(text)
    with pytest.raises(ValueError, match=f"^{path} cannot be read as YAML: .*{reason}") as error:
        read_yaml(path)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("content", [b"a: [b", b"\xff\xfe\x00", b"a: \x07"])
def test_a_file_that_is_not_yaml_is_named(content, tmp_path):
    (tmp_path / "some.yaml").write_bytes(content)
    with pytest.raises(ValueError, match=f"^{tmp_path / 'some.yaml'} cannot be read as YAML: "):
        read_yaml(tmp_path / "some.yaml")


def test_a_key_may_stand_once_but_may_replace_a_merged_one():
    assert load_yaml("a: 1\na: 2") == {"a": 2}
    assert load_yaml("b: &b {a: 1}\nc: {<<: *b, a: 2}\nd: {<<: *b}", UniqueKeys)["c"] == {"a": 2}
    with pytest.raises(yaml.YAMLError, match="the key 'a' stands here a second time: remove one"):
        load_yaml("b: {a: 1, c: 3, a: 2}", UniqueKeys)


def test_the_metadata_of_a_card_is_read_as_by_the_hub(tmp_path):
    from huggingface_hub import metadata_load

    card = tmp_path / "README.md"
    for text in (
        "---\nlicense: mit\ntags: [a, b]\n---\n# Card\n",
        "# No metadata\n",
        "---\n---\n",
        "\ufeff---\na: 1\n---\n",
    ):
        card.write_text(text, encoding="utf-8")
        assert load_card_metadata(card) == metadata_load(card)
    card.write_text("---\n- a\n---\n")
    with pytest.raises(ValueError, match="must be a mapping"):
        load_card_metadata(card)
