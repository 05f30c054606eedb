"""Documents: every kind of source, and every error of a file or a row, in one line that names the place."""

import json
import os
import shutil
import tracemalloc
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from datasets import Dataset
from hypothesis import given
from hypothesis import strategies as st

from attnres.training.data.documents import DataSpec, Documents, file_identities
from attnres.training.data.loaders import END_OF_TEXT

from ..blocks import split

pytestmark = pytest.mark.usefixtures("in_tmp_path")

LINES = st.sampled_from([END_OF_TEXT, f"{END_OF_TEXT} ", "", " ", "\x0c", "a", " b", "c ", "ü"])
TEXTS = ["One.", "Two,\nof two lines.", "Drei: ü."]


def texts(*paths, **fields) -> list[str]:
    return [document.row["text"] for document in Documents(DataSpec(paths, **fields))]


def places(*paths, **fields) -> list[str]:
    documents = Documents(DataSpec(paths, **fields))
    return [f"{document.source}:{document.first}-{document.last}" for document in documents]


def write_json_lines(path, rows) -> str:
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def write_parquet(path, columns: dict) -> str:
    pq.write_table(pa.table(columns), path)
    return str(path)


def one_of_each(texts: list[str]) -> dict[str, str]:
    """Return files of every kind with the same documents."""
    rows = [{"id": number, "text": text} for number, text in enumerate(texts)]
    Path("list.json").write_text(json.dumps(rows, indent=2))
    Path("marked.txt").write_text(f"\n{END_OF_TEXT}\n".join(texts))
    return {
        "lines": write_json_lines("lines.jsonl", rows),
        "lines named json": write_json_lines("lines.json", rows),
        "list": "list.json",
        "parquet": write_parquet("rows.parquet", {"id": range(len(texts)), "text": texts}),
        "text": "marked.txt",
    }


# Reading


def test_the_same_documents_come_from_files_of_every_kind():
    for kind, path in one_of_each(TEXTS).items():
        assert texts(path) == TEXTS, kind


def test_a_document_has_the_numbers_of_its_lines_or_of_its_row():
    files = one_of_each(TEXTS)
    assert places(files["text"]) == ["marked.txt:1-1", "marked.txt:3-4", "marked.txt:6-6"]
    for kind in ("lines", "list", "parquet"):
        assert places(files[kind]) == [f"{files[kind]}:{row}-{row}" for row in (1, 2, 3)]


def test_sources_are_read_in_the_order_given():
    write_json_lines("b.jsonl", [{"text": "b"}])
    write_json_lines("a.jsonl", [{"text": "a1"}, {"text": "a2"}])
    assert texts("b.jsonl", "a.jsonl", "b.jsonl") == ["b", "a1", "a2", "b"]
    assert texts("b.jsonl", "a.jsonl", limit=2) == ["b", "a1"]


def test_a_pattern_gives_its_files_in_alphabetical_order():
    for name in ("part-2", "part-10", "part-1"):
        write_json_lines(f"{name}.jsonl", [{"text": name}])
    assert texts("part-*.jsonl") == ["part-1", "part-10", "part-2"]


def test_a_folder_gives_the_files_of_the_split_only():
    write_json_lines("data/train-00.jsonl", [{"text": "t0"}])
    write_json_lines("data/train-01.jsonl", [{"text": "t1"}])
    write_json_lines("data/valid.jsonl", [{"text": "v"}])
    Path("data/README.md").write_text("Not a data set card.")
    assert texts("data") == ["t0", "t1"]
    assert texts("data", split="validation") == ["v"]
    assert places("data") == ["data/train-00.jsonl:1-1", "data/train-01.jsonl:1-1"]
    os.symlink("data", "link")
    shutil.copytree("data", "data[0]")
    for name in ("link", "data[0]"):
        assert places(name)[-1] == f"{name}/train-01.jsonl:1-1"


def test_a_folder_without_splits_gives_every_file_of_a_known_kind():
    write_json_lines("data/part/2.jsonl", [{"text": "2"}])
    Path("data/1.txt").write_text("1")
    for name in ("README.md", "LICENSE", ".hidden.txt", "table.csv"):
        Path(f"data/{name}").write_text("no")
    assert texts("data") == ["1", "2"]


def test_a_tilde_is_the_home_folder(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    path = write_json_lines("home/data/a.jsonl", [{"text": "a"}])
    assert texts("~/data", "~/data/a.jsonl", "~/data/*.jsonl") == ["a"] * 3
    os.rename(path, "~.jsonl")
    assert texts("~.jsonl", "./~.jsonl") == ["a"] * 2


def test_a_folder_laid_out_as_on_the_hub_gives_the_files_of_a_configuration():
    Path("org/name").mkdir(parents=True)
    for config in ("old", "new"):
        write_parquet(f"org/name/{config}.parquet", {"text": [f"{config} {n}" for n in range(1000)], "n": range(1000)})
    files = "  data_files:\n  - split: train\n    path: {}.parquet\n"
    configs = "".join(f"- config_name: {config}\n{files.format(config)}" for config in ("old", "new"))
    Path("org/name/README.md").write_text(f"---\nconfigs:\n{configs}---\n")
    assert texts("org/name:new") == [f"new {n}" for n in range(1000)]
    assert places("org/name:old")[-1] == "org/name/old.parquet:1000-1000"
    with pytest.raises(ValueError, match=r"^org/name cannot be loaded: Config name is missing\. .*'old', 'new'"):
        texts("org/name")
    with pytest.raises(ValueError, match=r"^org/name:new has no split 'test'; it has 'train'.$"):
        texts("org/name:new", split="test")


def test_the_files_of_a_stream_are_identified_as_they_are_read():
    write_json_lines("a.jsonl", [{"text": "a"}])
    spec = DataSpec(("a.jsonl", "absent.jsonl", "org/name"), streaming=True, bad_rows="skip")  # the last is on the Hub
    assert [name for name, *_ in file_identities(spec)] == ["a.jsonl"]
    with pytest.raises(FileNotFoundError, match=r"^absent\.jsonl does not exist"):
        file_identities(replace(spec, bad_rows="error"))
    Path("data/wiki").mkdir(parents=True)
    path = write_json_lines("data/wiki/en.jsonl", [{"text": "b"}])
    files = "configs:\n- config_name: en\n  data_files:\n  - split: train\n    path: en.jsonl\n"
    Path("data/wiki/README.md").write_text(f"---\n{files}---\n")
    identities = file_identities(DataSpec("data/wiki:en", streaming=True))
    assert identities == [(path, Path(path).stat().st_size, Path(path).stat().st_mtime_ns)]


def test_a_benchmark_laid_out_as_on_the_hub_can_be_read(assets):
    path = assets / "hub" / "openai" / "gsm8k"
    questions = [document.row["question"] for document in Documents(DataSpec((f"{path}:main",), column="question"))]
    assert len(questions) == 7473
    assert questions[0].startswith("Natalia sold clips")


@pytest.mark.parametrize("streaming", [False, True])
def test_other_names_are_data_sets_of_the_hub(streaming, monkeypatch):
    requests = []

    def load_dataset(path, config, *, split, streaming):
        requests.append((path, config, split, streaming))
        data = Dataset.from_dict({"text": [f"row {n}" for n in range(1000)], "n": range(1000)})
        return data.to_iterable_dataset() if streaming else data

    monkeypatch.setattr("attnres.training.data.documents.load_dataset", load_dataset)
    assert texts("org/name:config", split="test", streaming=streaming) == [f"row {n}" for n in range(1000)]
    assert places("org.1/na-me", streaming=streaming)[-1] == "org.1/na-me:1000-1000"
    assert requests == [("org/name", "config", "test", streaming), ("org.1/na-me", None, "train", streaming)]
    with pytest.raises(ValueError, match=r"^org/name has no column `body`; it has `text`, `n`.$"):
        texts("org/name", column="body", streaming=streaming)
    rows = [document.row for document in Documents(DataSpec("name", column="n", streaming=streaming), whole_rows=True)]
    assert rows[7] == {"text": "row 7", "n": 7}
    for path in ("org/name/file", "/org/name", "org name", "org/name.jsonl", "org/name:a:b"):
        with pytest.raises(FileNotFoundError, match=f"^{path} does not exist.$"):
            texts(path, streaming=streaming)


@given(st.lists(LINES, max_size=12), st.sampled_from(["\n", "\r\n"]))
def test_a_text_file_is_split_at_marks_or_else_in_paragraphs(lines, newline):
    Path("some.txt").write_bytes(newline.join(lines).encode())
    expected = split(Path("some.txt").read_text())
    if not expected:
        with pytest.raises(ValueError, match=r"^some.txt holds no documents.$"):
            texts("some.txt")
        return
    assert texts("some.txt") == expected
    for document in Documents(DataSpec(("some.txt",))):
        own_lines = lines[document.first - 1 : document.last]
        assert "\n".join(own_lines).strip() == document.row["text"]
        assert own_lines[0].strip() and own_lines[-1].strip()


@pytest.mark.slow
def test_a_text_file_is_not_read_whole():
    story = "A line of a story.\n" * 50 + f"{END_OF_TEXT}\n"
    Path("long.txt").write_text(story * 3000)
    tracemalloc.start()
    count = sum(1 for _ in Documents(DataSpec(("long.txt",))))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert count == 3000
    assert peak < os.path.getsize("long.txt") / 20


def test_real_stories_are_split_at_their_marks(assets):
    path = assets / "corpora" / "tinystories" / "valid.txt"
    assert texts(path) == split(path.read_text())


def test_rows_without_a_visible_character_are_left_out():
    path = write_json_lines("a.jsonl", [{"text": ""}, {"text": " \n"}, {"text": "b"}])
    assert places(path) == ["a.jsonl:3-3"]


def test_a_byte_order_mark_is_left_out():
    Path("a.jsonl").write_text('{"text": "a"}\n', encoding="utf-8-sig")
    Path("a.json").write_text('[{"text": "a"}]', encoding="utf-8-sig")
    Path("a.txt").write_text("a", encoding="utf-8-sig")
    assert texts("a.jsonl", "a.json", "a.txt") == ["a"] * 3


# Errors


def write_bad_parquet(path: str) -> None:
    offsets, data = pa.py_buffer(b"\0\0\0\0\1\0\0\0\2\0\0\0"), pa.py_buffer(b"a\xff")
    write_parquet(path, {"text": pa.Array.from_buffers(pa.string(), 2, [None, offsets, data])})


ROWS = {
    "cut JSON": (
        "a.jsonl",
        b'{"text": "a"}\n{"text": "b\n{"text": "c"}\n',
        "a.jsonl:2: broken JSON at column 10: Unterminated string starting at.",
        ["a", "c"],
    ),
    "more than JSON": (
        "a.jsonl",
        b'\n{"text": "a"} {}\n',
        "a.jsonl:2: broken JSON at column 15: Extra data.",
        [],
    ),
    "no object": ("a.jsonl", b'{"text": "a"}\n["b"]\n', "a.jsonl:2: holds a list, not a JSON object.", ["a"]),
    "no object in a list": ("a.json", b'["b", {"text": "a"}]', "a.json:1: holds a string, not a JSON object.", ["a"]),
    "no column in one row": (
        "a.jsonl",
        b'{"text": "a"}\n{"body": "b", "id": 7}\n',
        "a.jsonl:2 has no column `text`; it has `body`, `id`. Give `column=NAME`.",
        ["a"],
    ),
    "no column at all": (
        "a.jsonl",
        b'{"text": "a"}\n{}\n',
        "a.jsonl:2 has no column `text`; it has no columns.",
        ["a"],
    ),
    "null": (
        "a.jsonl",
        b'{"text": null}\n{"text": "b"}\n',
        "a.jsonl:1: column `text` holds null, not a string.",
        ["b"],
    ),
    "a number": ("a.json", b'[{"text": 7}]', "a.json:1: column `text` holds a number, not a string.", []),
    "another encoding in JSON": (
        "a.jsonl",
        b'{"text": "a"}\n{"text": "\xe9t\xe9"}\n{"text": "c"}\n',
        "a.jsonl:2: not UTF-8 text (byte 0xe9).",
        ["a", "c"],
    ),
    "another encoding in text": (
        "a.txt",
        b"a\n\n\nb\nb \xff\n\nc",
        "a.txt:5: not UTF-8 text (byte 0xff).",
        ["a", "c"],
    ),
    "half a character": (
        "a.jsonl",
        b'{"text": "\\ud83d\\ude00"}\n{"text": "\\uD83D"}\n',
        "a.jsonl:2: not Unicode text (a lone surrogate).",
        ["\U0001f600"],
    ),
    "half a character in a list": (
        "a.json",
        b'[{"text": "a"},\n {"text": "b\\ud800c"}, {"text": "\\ud83d\\ude00"}]',
        "a.json:2: not Unicode text (a lone surrogate).",
        ["a", "\U0001f600"],
    ),
    "another encoding in parquet": ("a.parquet", write_bad_parquet, "a.parquet:2: not UTF-8 text (byte 0xff).", ["a"]),
    "no strings in parquet": (
        "a.parquet",
        lambda path: write_parquet(path, {"text": [7]}),
        "a.parquet:1: column `text` holds a number, not a string.",
        [],
    ),
}


FILES = {
    "absent": ("a.jsonl", None, "a.jsonl does not exist."),
    "absent folder": ("./data", None, "./data does not exist."),
    "no match": ("*.jsonl", None, "*.jsonl matches no file."),
    "empty lines": ("a.jsonl", b"\n\n", "a.jsonl holds no documents."),
    "empty list": ("a.json", b"[]", "a.json holds no documents."),
    "empty text": ("a.txt", b"", "a.txt holds no documents."),
    "only marks": ("a.txt", f"{END_OF_TEXT}\n".encode(), "a.txt holds no documents."),
    "empty parquet": (
        "a.parquet",
        lambda path: write_parquet(path, {"text": pa.array([], pa.string())}),
        "a.parquet holds no documents.",
    ),
    "no column in parquet": (
        "a.parquet",
        lambda path: write_parquet(path, {"body": ["a"], "id": [1]}),
        "a.parquet has no column `text`; it has `body`, `id`. Give `column=NAME`.",
    ),
    "broken list": (
        "a.json",
        b'[{"text": "a"},\n {"text": "b"]',
        "a.json:2: broken JSON at column 14: Expecting ',' delimiter.",
    ),
    "list of another encoding": ("a.json", b'[{"text": "a"},\n {"\xff"}]', "a.json:2: not UTF-8 text (byte 0xff)."),
    "not parquet": ("a.parquet", b"text", "a.parquet cannot be read: Parquet file size is 4 bytes"),
    "endless link": ("a.jsonl", lambda path: os.symlink(path, path), "a.jsonl does not exist."),
    "folder of that name": ("a.jsonl", os.mkdir, "a.jsonl holds no .jsonl, .json, .parquet or .txt file."),
    "unknown kind": (
        "a.csv",
        b"text\na\n",
        "a.csv has an unknown suffix, which must be .jsonl, .json, .parquet or .txt.",
    ),
    "no such split": (
        "data",
        lambda path: write_json_lines("data/valid.jsonl", [{"text": "v"}]),
        "data has no split 'train'; it has 'validation'.",
    ),
    "no metadata": (
        "data",
        lambda path: write_json_lines("data/a.jsonl", [{}]) and Path("data/README.md").write_text("---\n- [\n---\n"),
        "data/README.md begins with metadata that cannot be read: while parsing a flow node",
    ),
    "no configurations": ("data:new", lambda path: os.mkdir("data"), "data has no configuration 'new'"),
}


def make(path, content) -> None:
    if callable(content):
        content(path)
    elif content is not None:
        Path(path).write_bytes(content)


@pytest.mark.parametrize("path, content, message, rest", ROWS.values(), ids=ROWS)
def test_a_row_that_cannot_be_used_is_an_error_in_one_line_or_skipped(path, content, message, rest):
    make(path, content)
    with pytest.raises(ValueError) as error:
        texts(path)
    assert str(error.value).startswith(message) and "\n" not in str(error.value)
    documents = Documents(DataSpec((path,), bad_rows="skip"))
    assert [document.row["text"] for document in documents] == rest
    assert str(documents.skipped) == f"Skipped 1 row, the first because: {error.value}"


@pytest.mark.parametrize("path, content, message", FILES.values(), ids=FILES)
def test_a_file_that_cannot_be_used_is_an_error_in_one_line_or_skipped(path, content, message):
    make(path, content)
    write_json_lines("good.jsonl", [{"text": "good"}])
    paths = (path, "good.jsonl") if path != "*.jsonl" else (path,)
    if path == "*.jsonl":
        os.remove("good.jsonl")
    with pytest.raises((ValueError, OSError)) as error:
        texts(*paths)
    assert str(error.value).startswith(message) and "\n" not in str(error.value)
    documents = Documents(DataSpec(paths, bad_rows="skip"))
    assert [document.row["text"] for document in documents] == ["good"] * (len(paths) - 1)
    assert str(documents.skipped) == f"Skipped 1 file, the first because: {error.value}"


def test_each_iteration_counts_skipped_rows_and_files_anew():
    write_json_lines("a.jsonl", [{"text": 1}, {"text": "a"}, {}])
    documents = Documents(DataSpec(("absent.jsonl", "a.jsonl", "missing.txt"), bad_rows="skip"))
    for _ in range(2):
        assert [document.row["text"] for document in documents] == ["a"]
        assert str(documents.skipped) == "Skipped 2 rows and 2 files, the first because: absent.jsonl does not exist."


def test_a_file_that_must_not_be_read_is_named(monkeypatch):
    write_json_lines("a.jsonl", [{"text": "a"}])

    def refuse(name, *arguments, **options):
        raise PermissionError(13, "Permission denied", name)

    monkeypatch.setattr("attnres.training.data.loaders.open", refuse, raising=False)
    with pytest.raises(PermissionError, match=r"^a.jsonl cannot be read: Permission denied.$"):
        texts("a.jsonl")


def test_without_a_network_a_data_set_of_the_hub_is_an_error_in_one_line(monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    with pytest.raises(ValueError, match=r"^org/name:config cannot be loaded: [^\n]*org/name[^\n]*$"):
        texts("org/name:config")


def test_a_value_that_is_not_allowed_is_refused():
    with pytest.raises(ValueError, match="`bad_rows` is 'drop', but must be 'error' or 'skip'"):
        DataSpec(("a",), bad_rows="drop")
    with pytest.raises(ValueError, match="`limit` is 0, but must be at least 1"):
        DataSpec(("a",), limit=0)
    with pytest.raises(ValueError, match="`paths` is empty"):
        DataSpec(())
    assert DataSpec("a.jsonl").paths == ("a.jsonl",)
