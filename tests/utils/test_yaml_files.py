"""Untrusted YAML is read in bounded time, and its errors take one line."""

import pytest
import yaml

from attnres.utils.yaml_files import UniqueKeys, load_card_metadata, load_yaml, read_yaml

LISTS = ["a: &a [x, x, x, x, x, x, x, x, x]"]
LISTS += [f"{name}: &{name} [{', '.join([f'*{of}'] * 9)}]" for of, name in zip("abcdefgh", "bcdefghi")]
# Merge keys copy: PyYAML would hang while it reads this, not only afterwards.
MAPPINGS = ["a: &a {k: v}"]
MAPPINGS += [f"{name}: &{name} {{<<: [{', '.join([f'*{of}'] * 9)}]}}" for of, name in zip("abcdefgh", "bcdefghi")]
TEXTS = [f"a: &a {'x' * 5000}", f"b: [{', '.join(['*a'] * 400)}]"]


@pytest.mark.parametrize("lines", [LISTS, MAPPINGS, TEXTS], ids=["lists", "merges", "texts"])
def test_aliases_that_repeat_too_much_are_refused_before_values_are_built(lines, monkeypatch):
    text = "\n".join(lines)
    assert len(text) < 8000
    monkeypatch.setattr(yaml.SafeLoader, "construct_document", lambda *_: pytest.fail("values were built"))
    with pytest.raises(ValueError, match=r"^its aliases \(`\*name`\) repeat more than 1,000,000 values and characters"):
        load_yaml(text)


@pytest.mark.slow
def test_ordinary_aliases_are_read_as_by_pyyaml():
    text = "base: &base {lr: 3e-4, steps: [1, 2]}\none: {<<: *base, lr: 1}\nall: [*base, *base]\n"
    assert load_yaml(text) == yaml.safe_load(text)
    long = "\n".join(f"- &item{n} {{id: {n}}}\n- *item{n}" for n in range(3000))
    assert load_yaml(long) == yaml.safe_load(long)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("a: &a\n  b: &b [1, *a]", "the value in line 1 contains itself"),
        ("&a [*a]", "the value in line 1 contains itself"),
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
