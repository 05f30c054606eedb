"""Tables of results in a Markdown file."""

import pytest

from attnres.analysis.tables import check_tables, update_tables


def test_tables_replace_what_is_between_their_marks_and_nothing_else(tmp_path):
    path = tmp_path / "RESULTS.md"
    path.write_text("Before.\n<!-- a -->\n<!-- end -->\nBetween.\n<!-- b -->\nold\n<!-- end -->\nAfter.\n")
    for _ in range(2):  # the second time over tables that are there
        update_tables(path, {"a": "| A |", "b": "| B |"})
        expected = "Before.\n<!-- a -->\n| A |\n<!-- end -->\nBetween.\n<!-- b -->\n| B |\n<!-- end -->\nAfter.\n"
        assert path.read_text() == expected
    path.write_text("<!-- a -->\nPrecious.\n<!-- b -->\n<!-- end -->\n")
    with pytest.raises(ValueError, match="does not end"):
        update_tables(path, {"a": "| A |"})
    assert "Precious." in path.read_text()


def test_places_are_checked_by_the_beginning_of_their_names(tmp_path):
    path = tmp_path / "RESULTS.md"
    check_tables(path, "a: ")  # a new one
    path.write_text("<!-- a: 1 -->\n<!-- end -->\n<!-- a: 2 -->\n<!-- b: 1 -->\n<!-- end -->\n")
    check_tables(path, "b: ")
    with pytest.raises(ValueError, match="`<!-- a: 2 -->` does not end"):
        check_tables(path, "a: ")
