"""Results are kept task by task, under the settings that they were computed with."""

import pytest

from attnres.eval.store import Store

SETUP = {
    "model": "a",
    "limit": 100,
    "files": {"model.safetensors": [1, 2], "config.json": [3, 4], "tokenizer.json": [5]},
}


def test_what_was_written_is_there_for_the_next_run_with_the_same_settings(tmp_path):
    Store(tmp_path / "model", SETUP).write("gsm8k", {"results": {"exact_match": 0.5}, "answer": "四"})
    again = Store(tmp_path / "model", SETUP)
    assert "gsm8k" in again
    assert "mmlu" not in again
    assert again.read("gsm8k") == {"results": {"exact_match": 0.5}, "answer": "四"}
    assert again.setup == SETUP


@pytest.mark.parametrize(
    "change, message",
    [
        ({"model": "b"}, "holds results with model 'a', not 'b'. Choose another --out"),
        ({"limit": None}, "holds results with limit 100, not None"),
        ({"files": {"model.safetensors": [1, 3]}}, "holds results with other files"),
    ],
)
def test_results_of_other_settings_are_refused_and_kept(tmp_path, change, message):
    Store(tmp_path, SETUP).write("gsm8k", {})
    with pytest.raises(FileExistsError, match=message):
        Store(tmp_path, SETUP | change)
    assert "gsm8k" in Store(tmp_path, SETUP)


def test_a_result_cut_off_while_it_was_written_does_not_count(tmp_path):
    """What a killed process may leave is the partial file, under another name."""
    store = Store(tmp_path, SETUP)
    (tmp_path / ".gsm8k.json.partial").write_text('{"results": ')
    assert "gsm8k" not in store
    store.write("gsm8k", {"results": 1})
    assert store.read("gsm8k") == {"results": 1}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["gsm8k.json", "setup.json"]
