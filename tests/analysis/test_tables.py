"""Tables of results are written into a Markdown file between marks."""

from concurrent.futures import ThreadPoolExecutor

import pytest

from attnres.analysis.tables import markdown, update_tables

from .. import forks


def test_tables_replace_only_the_text_between_their_marks(tmp_path):
    path = tmp_path / "RESULTS.md"
    path.write_text("Before.\n<!-- a -->\n<!-- end -->\nBetween.\n<!-- b -->\nold\n<!-- end -->\nAfter.\n")
    for _ in range(2):  # the second time replaces the tables of the first
        update_tables(path, {"a": "| A |", "b": "| B |"})
        expected = "Before.\n<!-- a -->\n| A |\n<!-- end -->\nBetween.\n<!-- b -->\n| B |\n<!-- end -->\nAfter.\n"
        assert path.read_text() == expected
    path.write_text("<!-- a -->\nPrecious.\n<!-- b -->\n<!-- end -->\n")
    with pytest.raises(ValueError, match="does not end"):
        update_tables(path, {"a": "| A |"})
    assert "Precious." in path.read_text()
    path.write_text(twice := "<!-- a -->\n<!-- end -->\n<!-- a -->\nold\n<!-- end -->\n")
    with pytest.raises(ValueError, match="`<!-- a -->` occurs twice"):
        update_tables(path, {"a": "| A |"})
    assert path.read_text() == twice


def test_processes_that_write_one_page_wait_for_each_other(tmp_path):
    """Three processes write one table each, many times. No table is lost, and no other file is left."""
    path = tmp_path / "RESULTS.md"
    code = "import sys; from pathlib import Path; from attnres.analysis.tables import update_tables\n"
    code += "for row in range(200): update_tables(Path(sys.argv[1]), {sys.argv[2]: f'row {row}'})"
    with ThreadPoolExecutor() as writers:
        done = list(writers.map(lambda name: forks.run("-c", code, path, name), ("a", "b", "c")))
    assert [writer.returncode for writer in done] == [0, 0, 0], [writer.stderr for writer in done]
    assert all(f"<!-- {name} -->\nrow 199\n<!-- end -->" in path.read_text() for name in ("a", "b", "c"))
    assert list(tmp_path.iterdir()) == [path]


def test_a_table_aligns_columns_of_numbers():
    columns, rows = ["model", "loss"], [["standard", "4.1"], ["Full", "3.99"]]
    assert markdown(columns, rows).splitlines()[1:3] == ["|---|---|", "| standard | 4.1 |"]
    assert markdown(columns, iter(rows), texts=1).splitlines() == [
        "| model | loss |",
        "|---|---:|",
        "| standard | 4.1 |",
        "| Full | 3.99 |",
    ]
