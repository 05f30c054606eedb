"""A folder belongs to one run, with one recipe and the same data, and to one process at a time."""

import json
import os
import re
import shutil
from pathlib import Path

import pytest

from attnres.checkpoints import checkpoint
from attnres.checkpoints.source import ModelSource
from attnres.training.data.blocks import digest_of
from attnres.training.recipe import Recipe
from attnres.training.run_folder import (
    DATA,
    LOCK,
    RECIPE,
    RESULTS,
    check_data,
    check_folder,
    check_length,
    hold_folder,
    record_run,
)

from .. import forks
from .blocks import load, some_texts, write


def recipe(out: Path, **fields) -> Recipe:
    return Recipe("model", ("a.txt",), str(out), **{"steps": 8} | fields)


def begin(out: Path) -> None:
    """Make the folder of a run that was stopped after its fourth step."""
    with hold_folder(out, recipe(out)):
        (out / "checkpoint-4").mkdir()


def test_two_runs_cannot_use_a_folder_at_once(tmp_path):
    out = tmp_path / "out"
    with hold_folder(out, recipe(out)):
        other = f"""
from pathlib import Path
from attnres.training.run_folder import hold_folder
from attnres.training.recipe import Recipe
with hold_folder(Path({str(out)!r}), Recipe("model", ("a.txt",), {str(out)!r}, steps=8)):
    print("in")
"""
        done = forks.run("-c", other)
        assert "in" not in done.stdout.split()
        assert f"{out} is in use: another process trains into it, perhaps one that" in done.stderr
    assert [path.name for path in out.iterdir()] == [RECIPE]
    with hold_folder(out, recipe(out)):
        pass


def test_half_written_folders_of_a_killed_run_are_removed(tmp_path):
    begin(tmp_path)
    for name in (".partial-0a1b2c3d", ".model.partial", ".start"):
        (tmp_path / name).mkdir()
    (tmp_path / LOCK).touch()
    with hold_folder(tmp_path, recipe(tmp_path)):
        pass
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint-4", RECIPE]


def test_a_run_may_begin_in_a_folder_that_holds_only_a_lock(tmp_path):
    (tmp_path / LOCK).touch()
    check_folder(tmp_path, recipe(tmp_path))
    (tmp_path / "notes.txt").touch()
    with pytest.raises(FileExistsError, match="holds other files"):
        check_folder(tmp_path, recipe(tmp_path))


@pytest.mark.parametrize(
    ("kind", "files"),
    [
        ("model", {"config.json": '{"model_type": "attnres_llama"}', "model.safetensors": ""}),
        ("adapter", {"adapter_config.json": '{"peft_type": "LORA"}', "adapter_model.safetensors": ""}),
    ],
)
def test_a_model_among_other_files_is_refused_before_the_run_that_would_replace_it(tmp_path, kind, files):
    begin(tmp_path)
    (tmp_path / kind).mkdir()
    for name, text in files.items():
        (tmp_path / kind / name).write_text(text)
    check_folder(tmp_path, recipe(tmp_path))
    (tmp_path / kind / "notes.md").write_text("mine")
    with pytest.raises(FileExistsError, match=f"{kind} holds notes.md, which is not part of an? {kind}"):
        check_folder(tmp_path, recipe(tmp_path))


def test_a_run_does_not_resume_with_another_recipe_and_all_differences_are_named(tmp_path):
    begin(tmp_path)
    other = recipe(tmp_path, seed=1, learning_rate=1e-5, lora={"rank": 2}, trainer={"bf16": True}, steps=9)
    message = (
        "holds a run with learning_rate 0.0003, not 1e-05; lora default, not {'rank': 2}; seed 0, not 1; "
        "trainer default, not {'bf16': True}. Choose another `out`"
    )
    with pytest.raises(FileExistsError, match=re.escape(message)), hold_folder(tmp_path, other):
        pass


def stopped(out: Path, is_finished: bool = False) -> Path:
    """Make the folder of a run of 8 steps that was stopped after its fourth, or has finished. Return its checkpoint."""
    begin(out)
    checkpoint = (out / "checkpoint-4").rename(out / f"checkpoint-{8 if is_finished else 4}")
    state = {"global_step": 8 if is_finished else 4, "max_steps": 8}
    (checkpoint / "trainer_state.json").write_text(json.dumps(state))
    if is_finished:
        (out / RESULTS).write_text("{}")
    return checkpoint


@pytest.mark.parametrize("fields", [{"steps": 20}, {"steps": None, "tokens": 20 * 32 * 1024}, {"epochs": 3.0}])
@pytest.mark.parametrize("is_finished", [False, True])
def test_a_run_may_be_made_longer(fields, is_finished, tmp_path):
    checkpoint, longer = stopped(tmp_path, is_finished), recipe(tmp_path, **fields)
    check_folder(tmp_path, longer)
    with hold_folder(tmp_path, longer):
        line = check_length(tmp_path, checkpoint, 20)
        record_run(tmp_path, longer, {}, is_resumed=True)
    assert line == f"Resuming from {checkpoint}. The run has 20 steps instead of 8, and its schedule is that of 20."
    # If it is stopped, the same command resumes it.
    with hold_folder(tmp_path, longer):
        assert check_length(tmp_path, checkpoint, 8) == f"Resuming from {checkpoint}."


def test_a_run_is_not_made_shorter_than_it_is(tmp_path):
    checkpoint = stopped(tmp_path)
    with pytest.raises(
        FileExistsError, match="of 8 steps that has made 4, but the recipe asks for 3: give `steps` of at least 4"
    ):
        check_length(tmp_path, checkpoint, 3)
    finished = stopped(tmp_path / "finished", is_finished=True)
    with pytest.raises(FileExistsError, match=r"made 8, but .* at least 9"):
        check_length(finished.parent, finished, 6)


@pytest.mark.parametrize("is_finished", [False, True])
def test_a_run_that_is_refused_when_it_would_go_on_stays_as_it_was(is_finished, tmp_path):
    stopped(tmp_path, is_finished)
    before = {path: path.read_text() for path in tmp_path.iterdir() if path.is_file()}
    with pytest.raises(OSError), hold_folder(tmp_path, recipe(tmp_path, steps=20)):
        raise OSError("not enough space")
    assert {path: path.read_text() for path in tmp_path.iterdir() if path.is_file()} == before


def test_a_finished_run_of_the_same_length_or_without_checkpoint_is_refused(tmp_path):
    checkpoint = stopped(tmp_path, is_finished=True)
    with pytest.raises(FileExistsError, match=r"holds a finished run\. Give more `steps` to go on with it"):
        check_folder(tmp_path, recipe(tmp_path))
    shutil.rmtree(checkpoint)
    with pytest.raises(FileExistsError, match="holds a finished run, without a checkpoint to go on from"):
        check_folder(tmp_path, recipe(tmp_path, steps=20))


def test_a_run_resumes_with_another_micro_batch_size_and_number_of_checkpoints(tmp_path):
    begin(tmp_path)
    with hold_folder(tmp_path, recipe(tmp_path, micro_batch_size=1, keep=9)):
        pass


def test_a_run_of_a_pipeline_resumes_with_another_pipeline_but_not_without_one(tmp_path):
    with hold_folder(tmp_path, recipe(tmp_path, pipeline={"stages": 2})):
        (tmp_path / "checkpoint-4").mkdir()
    with hold_folder(tmp_path, recipe(tmp_path, pipeline={"stages": 4, "schedule": "GPipe"})):
        pass
    message = "holds a run with pipeline {'stages': 2}, not default"
    with pytest.raises(FileExistsError, match=message), hold_folder(tmp_path, recipe(tmp_path)):
        pass


def test_a_folder_that_cannot_be_made_is_named(tmp_path):
    with pytest.raises(OSError) as caught, hold_folder(Path("/proc/x"), recipe(Path("/proc/x"))):
        pass
    assert str(caught.value) == (
        "`out` /proc/x of the recipe cannot be written (No such file or directory): choose another place."
    )


def test_a_run_that_is_refused_before_it_begins_leaves_nothing_behind(tmp_path):
    out = tmp_path / "new" / "out"
    with pytest.raises(ValueError, match="too few"), hold_folder(out, recipe(out)):
        assert (out / RECIPE).exists()
        raise ValueError("too few tokens")
    assert [*tmp_path.iterdir()] == []
    with pytest.raises(KeyboardInterrupt), hold_folder(out, recipe(out)):
        record_run(out, recipe(out), {"train": "1"}, is_resumed=False)
        raise KeyboardInterrupt
    assert (out / RECIPE).exists()
    with pytest.raises(ValueError), hold_folder(out, recipe(out)):
        raise ValueError("a damaged checkpoint")
    assert (out / RECIPE).exists()


def digest(folder: Path, texts: list[str], tokenizer) -> str:
    folder.mkdir(exist_ok=True)
    return digest_of(load(write(str(folder / "a.jsonl"), texts), tokenizer, cache=folder / "cache"))


def test_a_digest_depends_on_the_tokens_alone(tokenizer, tmp_path):
    texts = some_texts(60)
    expected = digest(tmp_path / "one", texts, tokenizer)
    assert digest(tmp_path / "a-folder-of-another-name", texts, tokenizer) == expected
    os.utime(tmp_path / "one" / "a.jsonl", (1, 1))
    assert digest(tmp_path / "one", texts, tokenizer) == expected
    assert digest(tmp_path / "one", [*texts[:-1], texts[-1] + " more"], tokenizer) != expected


def test_data_that_has_changed_since_the_run_began_is_refused_by_name(tmp_path):
    record_run(tmp_path, recipe(tmp_path), {"train": "1", "held_out": "2"}, is_resumed=False)
    check_data(tmp_path, {"train": "1", "held_out": "2"})
    with pytest.raises(FileExistsError, match=r"^`train` has changed since the run in .* began"):
        check_data(tmp_path, {"train": "3", "held_out": "2"})
    with pytest.raises(FileExistsError, match=r"^`train` and `held_out` have changed since"):
        check_data(tmp_path, {"train": "3", "held_out": "3"})
    record_run(tmp_path, recipe(tmp_path), {"train": "1"}, is_resumed=True)
    assert "held_out" in json.loads((tmp_path / DATA).read_text())
    record_run(tmp_path, recipe(tmp_path), {"train": "3", "held_out": "2"}, is_resumed=False)
    check_data(tmp_path, {"train": "3", "held_out": "2"})


@pytest.mark.parametrize("content", ["{", "", "[]", "null"])
def test_a_damaged_record_of_the_data_is_refused(tmp_path, content):
    (tmp_path / "data.json").write_text(content)
    with pytest.raises(ValueError, match=r"data\.json is damaged, so that changed data would go unnoticed"):
        check_data(tmp_path, {"train": "1"})


@pytest.mark.parametrize("content", ["[]", "{", "", "5", "steps: many", "unknown: 1", "steps: .nan", b"\xff\xfe"])
@pytest.mark.parametrize("is_stopped", [True, False])
def test_a_damaged_recipe_of_a_run_is_refused(content, is_stopped, tmp_path):
    out = tmp_path / "out"
    begin(out)
    if not is_stopped:
        (out / "checkpoint-4").rmdir()
    (out / RECIPE).write_bytes(content if isinstance(content, bytes) else content.encode())
    message = rf"^{out / RECIPE} is not the recipe of a run \(.*\)\. Restore it .*`out`\.$"
    with pytest.raises(ValueError, match=message), hold_folder(out, recipe(out)):
        pass


def test_a_folder_with_a_recipe_that_a_person_wrote_is_not_taken_for_a_run(tmp_path):
    (tmp_path / RECIPE).write_text(f"# mine\nmodel: model\ntrain: [a.txt]\nout: {tmp_path}\nsteps: 8\n")
    (tmp_path / "model").mkdir()
    with pytest.raises(FileExistsError, match=r"holds other files\. Choose another `out`\."):
        check_folder(tmp_path, recipe(tmp_path))
    assert (tmp_path / RECIPE).read_text().startswith("# mine")


def test_another_commit_of_a_model_on_the_hub_is_refused_with_both_names(monkeypatch, tmp_path):
    for commit in ("1a2b", "3c4d"):
        on_hub = Recipe("org/model", ("a.txt",), "out", steps=8)
        (snapshot := tmp_path / "snapshots" / commit).mkdir(parents=True)
        (snapshot / "config.json").write_text("{}")
        monkeypatch.setattr(checkpoint, "_download", lambda name, revision, snapshot=snapshot: snapshot)
        if commit == "1a2b":
            record_run(tmp_path, on_hub, {"model": on_hub.source.identity()}, is_resumed=False)
            check_data(tmp_path, {"model": on_hub.source.identity()})
    message = r"^`model` has changed since .* \(`model` was at commit 1a2b on the Hub, and is at commit 3c4d now\): "
    with pytest.raises(FileExistsError, match=message):
        check_data(tmp_path, {"model": on_hub.source.identity()})


@pytest.mark.parametrize("changed", ["config.json", "shards/first.safetensors"])
def test_a_model_that_has_changed_since_the_run_began_is_refused(changed, tmp_path):
    """Also if only a file of weights in another folder has changed, which an index may name."""
    source = tmp_path / "source"
    (source / "shards").mkdir(parents=True)
    (source / "config.json").write_text("{}")
    (source / "shards" / "first.safetensors").write_bytes(b"first")
    index = {"metadata": {}, "weight_map": {"lm_head.weight": "shards/first.safetensors"}}
    (source / "model.safetensors.index.json").write_text(json.dumps(index))
    before = {"model": ModelSource(str(source)).identity()}
    assert before == {"model": ModelSource(str(source)).identity()}
    (source / changed).write_text('{"attn_res_block_size": 5}')
    record_run(tmp_path, recipe(tmp_path), before, is_resumed=False)
    with pytest.raises(FileExistsError, match=r"^`model` has changed since the run in .* began"):
        check_data(tmp_path, {"model": ModelSource(str(source)).identity()})


@pytest.mark.parametrize("is_of_run", [True, False])
def test_a_run_of_an_earlier_version_without_a_checkpoint_begins_anew(tmp_path, is_of_run):
    """Its recipe lacks the key `import`. A recipe with a comment is one that a person wrote."""
    with hold_folder(tmp_path, recipe(tmp_path)):
        (tmp_path / DATA).write_text("{}")
    text = (tmp_path / RECIPE).read_text()
    before = text.replace("import: []\n", "" if is_of_run else "# by hand\n")
    assert before != text
    (tmp_path / RECIPE).write_text(before)
    if is_of_run:
        check_folder(tmp_path, recipe(tmp_path))
    else:
        with pytest.raises(FileExistsError, match="holds other files"):
            check_folder(tmp_path, recipe(tmp_path))
