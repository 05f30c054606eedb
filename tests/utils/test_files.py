"""An output directory appears whole or not at all, and only one process at a time writes it."""

import contextlib
import errno
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from filelock import FileLock
from transformers.utils import logging

from attnres.utils.files import Written, atomic_directory, atomic_write, entries_beyond
from attnres.utils.quiet import quiet_transformers

from ..kills import exit_code, in_child

# What `write` writes here; a file `b` and a file `left` of an earlier version belong to it too.
WRITTEN = Written(
    "a pair", "done", "ours", lambda folder: entries_beyond(folder, {"a", "b", "done", "left"}.__contains__)
)


def write(out: str | Path, text: str = "new", overwrite: bool = False, meanwhile: Callable = lambda: None) -> None:
    """Write a directory of two files, whose marker is `done` with the word "ours"."""
    with atomic_directory(out, WRITTEN, overwrite=overwrite) as stage:
        (stage / "a").write_text(text)
        meanwhile()
        (stage / "done").write_text(f"ours: {text}")


def test_a_full_disk_is_reported_with_the_name_of_the_file(tmp_path, monkeypatch):
    def fail(path, content):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", fail)
    with pytest.raises(OSError, match="No space left") as caught:
        atomic_write(tmp_path / "file", "new")
    assert caught.value.filename == str(tmp_path / "file")
    assert os.listdir(tmp_path) == []


@pytest.fixture
def out(tmp_path) -> Path:
    return tmp_path / "out"


def test_writing_through_a_link_keeps_the_link(tmp_path):
    (tmp_path / "file").write_text("old")
    (tmp_path / "link").symlink_to("file")
    atomic_write(tmp_path / "link", "new")
    assert (tmp_path / "link").is_symlink() and (tmp_path / "file").read_text() == "new"
    assert sorted(os.listdir(tmp_path)) == ["file", "link"]


def test_a_directory_appears_when_the_block_ends(out):
    write(out, meanwhile=lambda: out.exists() and pytest.fail("too early"))
    assert {path.name for path in out.iterdir()} == {"a", "done"}
    assert os.listdir(out.parent) == ["out"]


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, SystemExit])
def test_an_error_leaves_nothing_behind(out, error):
    def fail():
        raise error

    with pytest.raises(error):
        write(out, meanwhile=fail)
    assert os.listdir(out.parent) == []


def test_folders_above_are_made_and_after_a_failure_removed(out):
    write(out / "b" / "c")
    assert (out / "b" / "c" / "done").exists()
    with pytest.raises(ZeroDivisionError):
        write(out / "b" / "d" / "e" / "f", meanwhile=lambda: 1 / 0)
    assert os.listdir(out / "b") == ["c"]


def test_an_existing_directory_is_refused(out):
    write(out, "old")
    with pytest.raises(FileExistsError, match="give --overwrite"):
        write(out)
    assert (out / "a").read_text() == "old"


def test_a_place_that_cannot_be_written_is_named_as_it_was_given():
    for path in ("/proc/out", "/proc/self/out"):
        with pytest.raises(OSError, match="No such file") as caught:
            write(path)
        assert caught.value.filename == path


def test_overwrite_replaces_an_existing_directory(out):
    write(out, "old")
    (out / "left").write_text("over")
    write(out, overwrite=True)
    assert {path.name for path in out.iterdir()} == {"a", "done"}
    assert (out / "a").read_text() == "new"
    assert os.listdir(out.parent) == ["out"]


def test_the_old_directory_stays_until_the_new_one_is_complete_and_after_a_failure(out):
    write(out, "old")
    write(out, overwrite=True, meanwhile=lambda: (out / "a").read_text() == "old" or pytest.fail("too early"))
    with pytest.raises(ZeroDivisionError):
        write(out, "newer", overwrite=True, meanwhile=lambda: 1 / 0)
    assert (out / "a").read_text() == "new"
    assert os.listdir(out.parent) == ["out"]


@pytest.mark.parametrize(
    "files", [{}, {"thesis": "mine"}, {"done": "theirs"}], ids=["empty", "no marker", "other marker"]
)
def test_a_directory_without_the_marker_is_never_replaced(out, files):
    out.mkdir()
    for name, text in files.items():
        (out / name).write_text(text)
    with pytest.raises(FileExistsError, match="does not hold a pair: it has no done with ours"):
        write(out, overwrite=True)
    assert {path.name: path.read_text() for path in out.iterdir()} == files


@pytest.mark.parametrize(
    ("foreign", "message"),
    [
        (["thesis/one"], "holds thesis, which is not part of a pair. Move it away"),
        (["x", "y", "z"], "holds x, y, z, which are not part of a pair. Move them away"),
        (["v", "w", "x", "y", "z"], "holds v, w, x and 2 more, which are"),
        (["a/left"], "holds a, which is not"),
    ],
)
def test_a_directory_with_anything_else_is_never_replaced(out, foreign, message):
    write(out, "old")
    for path in foreign:
        if path.startswith("a/"):
            (out / "a").unlink()
        (out / path).parent.mkdir(exist_ok=True)
        (out / path).write_text("mine")
    with pytest.raises(FileExistsError, match=message):
        write(out, overwrite=True)
    assert {(out / path).read_text() for path in foreign} == {"mine"}
    assert (out / "done").read_text() == "ours: old"


@pytest.mark.parametrize("exists", [True, False])
def test_a_file_that_someone_else_puts_there_during_the_work_is_kept(out, exists):
    if exists:
        write(out, "old")

    def meanwhile():
        out.mkdir(exist_ok=True)
        (out / "thesis").write_text("mine")

    with pytest.raises(FileExistsError, match="thesis" if exists else "give --overwrite"):
        write(out, overwrite=exists, meanwhile=meanwhile)
    assert (out / "thesis").read_text() == "mine"
    assert os.listdir(out.parent) == ["out"]


def test_a_file_or_a_broken_link_is_never_replaced(out):
    out.symlink_to("nothing")
    for overwrite in (False, True):
        with pytest.raises(FileExistsError):
            write(out, overwrite=overwrite)
    assert os.readlink(out) == "nothing"
    out.unlink()
    out.write_text("mine")
    for overwrite in (False, True):
        with pytest.raises(FileExistsError):
            write(out, overwrite=overwrite)
    assert out.read_text() == "mine"


def test_a_link_to_an_old_directory_is_replaced_and_its_target_stays(out, tmp_path):
    write(tmp_path / "elsewhere", "old")
    out.symlink_to("elsewhere")
    write(out, overwrite=True)
    assert not out.is_symlink() and (out / "a").read_text() == "new"
    assert (tmp_path / "elsewhere" / "a").read_text() == "old"


def test_a_relative_path_holds_even_if_the_current_folder_changes(tmp_path, monkeypatch):
    (tmp_path / "here").mkdir()
    (tmp_path / "there").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    write("out", meanwhile=lambda: os.chdir(tmp_path / "there"))
    assert (os.listdir(tmp_path / "here"), os.listdir(tmp_path / "there")) == (["out"], [])


def test_the_old_directory_is_put_back_where_the_last_step_fails(out, monkeypatch):
    write(out, "old")
    rename = Path.rename

    def fail_for_the_new_one(path, target):
        if path.name == ".out.partial":
            raise OSError("no")
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", fail_for_the_new_one)
    with pytest.raises(OSError, match="no"):
        write(out, overwrite=True)
    assert (out / "a").read_text() == "old"
    assert os.listdir(out.parent) == ["out"]


def leave(out: Path, role: str, **files: str) -> None:
    """Make a folder beside `out` such as a killed run leaves."""
    folder = out.with_name(f".{out.name}.{role}")
    folder.mkdir()
    for name, text in files.items():
        (folder / name).write_text(text)


def test_files_of_a_killed_run_are_removed(out):
    leave(out, "partial", a="half", rest="of it")
    out.with_name(".out.lock").touch()
    write(out)
    assert {path.name for path in out.iterdir()} == {"a", "done"}
    assert os.listdir(out.parent) == ["out"]


def test_an_old_directory_that_a_killed_run_had_moved_comes_back(out):
    leave(out, "replaced", a="old", done="ours: old")
    leave(out, "partial", a="new", done="ours: new")
    with pytest.raises(FileExistsError, match="give --overwrite"):
        write(out)
    assert (out / "a").read_text() == "old"
    assert os.listdir(out.parent) == ["out"]


@pytest.mark.slow
@pytest.mark.parametrize("moves_away", [False, True])
def test_after_a_kill_at_any_file_call_the_whole_old_directory_or_the_whole_new_one_is_there(out, moves_away):
    whole = {"a": "old", "b": "old", "done": "ours: old"}, {"a": "new", "done": "ours: new"}
    held = []
    for call in range(1, 60):
        write(out, "old", overwrite=out.exists())
        (out / "b").write_text("old")
        code = exit_code(in_child(lambda: write(out, overwrite=True), killed_at=call))
        if moves_away and out.exists():
            out.rename(out.with_name("away"))  # as a user may do before the next run
        with contextlib.suppress(FileExistsError):
            write(out)
        if moves_away and (out.parent / "away").exists():
            shutil.rmtree(out.parent / "away")
        held.append(whole.index({path.name: path.read_text() for path in out.iterdir()}))
        write(out, overwrite=True)
        assert os.listdir(out.parent) == ["out"]
        if code == 0:
            break
    assert code == 0 and 0 in held and 1 in held


def test_the_next_run_removes_an_old_directory_that_a_killed_run_left(out):
    write(out, "newer")
    leave(out, "replaced", a="old", done="ours: old")
    write(out, "newest", overwrite=True)
    assert (out / "a").read_text() == "newest"
    assert os.listdir(out.parent) == ["out"]


def test_a_second_writer_is_refused_and_does_not_disturb_the_first(out):
    def second():
        with pytest.raises(FileExistsError, match="is being written by another process"):
            write(out, "second")

    write(out, "first", meanwhile=second)
    assert (out / "a").read_text() == "first"
    assert os.listdir(out.parent) == ["out"]


def test_a_directory_that_another_run_finishes_before_the_lock_is_refused(out, monkeypatch):
    acquire = FileLock.acquire

    def finish_another_first(lock, *args, **kwargs):
        monkeypatch.setattr(FileLock, "acquire", acquire)
        write(out, "first")
        return acquire(lock, *args, **kwargs)

    monkeypatch.setattr(FileLock, "acquire", finish_another_first)
    with pytest.raises(FileExistsError, match="give --overwrite"):
        write(out, "second")
    assert (out / "a").read_text() == "first"
    assert os.listdir(out.parent) == ["out"]


@pytest.mark.slow
def test_one_of_many_simultaneous_writers_wins(out):
    """Processes begin together. Each writes its number and exits with 0, or with 1 if it is refused."""
    for _ in range(10):
        start = time.monotonic() + 0.05
        children = []
        for number in range(6):
            child = os.fork()
            if child == 0:
                try:
                    time.sleep(max(0.0, start - time.monotonic()))
                    write(out, str(number), meanwhile=lambda number=number: time.sleep(0.001 * number))
                    os._exit(0)
                except FileExistsError:
                    os._exit(1)
                finally:
                    os._exit(2)
            children.append(child)
        codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
        assert sorted(codes) == [0, 1, 1, 1, 1, 1]
        winner = str(codes.index(0))
        assert ((out / "a").read_text(), (out / "done").read_text()) == (winner, f"ours: {winner}")
        assert os.listdir(out.parent) == ["out"]
        (out / "a").unlink()
        (out / "done").unlink()
        out.rmdir()


@pytest.mark.parametrize("parent", ["/proc", "/dev/null"])
def test_the_error_of_a_folder_without_write_access_does_not_blame_another_process(parent):
    with pytest.raises(OSError) as error:
        write(f"{parent}/out")
    assert "another process" not in str(error.value)


@pytest.mark.parametrize("bars", [True, False])
def test_quiet_transformers_restores_what_it_changes_even_after_an_error(bars):
    verbosity, had_bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    try:
        logging.set_verbosity_info()
        (logging.enable_progress_bar if bars else logging.disable_progress_bar)()
        with pytest.raises(ZeroDivisionError), quiet_transformers():
            assert logging.get_verbosity() == logging.ERROR
            assert not logging.is_progress_bar_enabled()
            1 / 0  # noqa: B018
        assert logging.get_verbosity() == logging.INFO
        assert logging.is_progress_bar_enabled() == bars
    finally:
        logging.set_verbosity(verbosity)
        (logging.enable_progress_bar if had_bars else logging.disable_progress_bar)()
