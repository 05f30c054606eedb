"""Publishing and loading as users do by default, with `hf_xet`: a process of its own, as its settings are read once."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from .test_server import contents

PUBLISH = (
    "import sys, huggingface_hub as hub; print(hub.upload_folder(repo_id='me/model', folder_path=sys.argv[1]).oid)"
)
EACH_FIRST = """
import sys, huggingface_hub as hub
api, name = hub.HfApi(), "me/model"
files = [hub.CommitOperationAdd(file, f"{sys.argv[1]}/{file}") for file in sys.argv[2:]]
for file in files:
    api.preupload_lfs_files(name, [file], free_memory=False)
print(api.create_commit(name, files, commit_message="all").oid)
"""
LOAD = "import sys, huggingface_hub as hub; print(hub.snapshot_download('me/model', cache_dir=sys.argv[1]))"


@pytest.fixture
def run(hub, tmp_path):
    """`run(lines, *arguments, token=...)`: Python in a process; its environment has a token and one cache for all."""

    def run_lines(lines: str, *arguments: object, token: str = hub.write_token) -> subprocess.CompletedProcess[str]:
        quick = {"HF_XET_CLIENT_RETRY_BASE_DELAY": "10ms"}
        return subprocess.run(
            [sys.executable, "-c", lines, *map(str, arguments)],
            env=hub.environ(token, home=tmp_path / "home", xet=True) | quick,
            capture_output=True,
            text=True,
            timeout=120,
        )

    return run_lines


@pytest.fixture
def folder(folder) -> Path:
    """The model directory with chunks that are compressed: text, and numbers of four bytes."""
    (folder / "text.bin").write_bytes(b"".join(b"line %d\n" % line for line in range(50_000)))
    (folder / "numbers.bin").write_bytes(np.linspace(0, 1, 50_000, dtype=np.float32).tobytes() + b"end")
    return folder


def sent(hub) -> list[int]:
    """The bytes of each upload of content."""
    return [entry["received"] for entry in hub.log("POST", "/v1/xorbs/")]


def test_what_is_published_is_loaded_again(hub, me, folder, run, tmp_path):
    done = run(PUBLISH, folder)
    assert done.returncode == 0, done.stderr
    expected = contents(folder)
    assert expected.items() <= hub.files("me/model").items()
    assert not hub.log("PUT") and len(sent(hub)) == 1 and len(hub.log("POST", "/v1/shards")) == 1
    hub.forget()
    loaded = run(LOAD, tmp_path / "cache")
    assert loaded.returncode == 0, loaded.stderr
    assert expected.items() <= contents(Path(loaded.stdout.strip())).items()
    assert hub.log("GET", "/storage/xorbs/")
    hub.forget()
    plain = contents(Path(me.snapshot_download("me/model", cache_dir=tmp_path / "plain")))  # in this process: no hf_xet
    assert expected.items() <= plain.items()
    assert not hub.log("GET", "/storage/xorbs/")


def test_the_token_is_in_no_address_and_not_sent_to_the_storage(hub, me, folder, run, tmp_path):
    assert run(PUBLISH, folder).returncode == run(LOAD, tmp_path / "cache").returncode == 0
    entries = hub.log()
    assert not [entry for entry in entries if hub.write_token in entry["path"]]
    assert {entry["authorized"] for entry in entries if entry["host"] == "storage"} == {False}
    assert {entry["authorized"] for entry in entries if "/xet-write-token/" in entry["path"]} == {True}


def test_a_pull_request(hub, me, folder, run):
    done = run(PUBLISH.replace("sys.argv[1]", "sys.argv[1], create_pr=True"), folder, token=hub.other_token)
    assert done.returncode == 0, done.stderr
    assert set(hub.files("me/model")) == {".gitattributes"}
    assert contents(folder).items() <= hub.files("me/model", "refs/pr/1").items()


def test_from_the_first_question_to_the_commit_all_is_repeated(hub, me, folder, run):
    paths = ["/preupload/", "/xet-write-token/", "/v1/xorbs/", "/v1/shards", "/commit/"]
    for path in paths:
        hub.fail("status", path, status=429)
        hub.fail("status", path, status=503)
    done = run(PUBLISH, folder)
    assert done.returncode == 0, done.stderr
    for path in paths:
        assert [entry["status"] for entry in hub.log(path=path)] == [429, 503, 200], path
    assert contents(folder).items() <= hub.files("me/model").items()


@pytest.mark.parametrize("path", ["/xet-write-token/", "/v1/xorbs/"])
def test_what_is_forbidden_is_not_repeated(hub, me, folder, run, path):
    hub.fail("status", path, status=403, times=None)
    done = run(PUBLISH, folder)
    assert done.returncode == 1 and "403 Forbidden" in done.stderr
    assert len(hub.log(path=path)) == 1
    assert set(hub.files("me/model")) == {".gitattributes"}


def test_an_upload_that_is_cut_starts_again(hub, me, folder, run):
    hub.fail("cut", "/v1/xorbs/", after_bytes=100_000)
    hub.fail("cut", "/v1/xorbs/", after_bytes=100_000, reset=True)
    hub.fail("lost", "/v1/xorbs/")
    done = run(PUBLISH, folder)
    assert done.returncode == 0, done.stderr
    assert len(sent(hub)) == 4
    assert contents(folder).items() <= hub.files("me/model").items()


def test_a_commit_whose_answer_is_lost_is_made_twice(hub, me, folder, run):
    hub.fail("lost", "/commit/")
    assert run(PUBLISH, folder).returncode == 0
    first, second, start = me.list_repo_commits("me/model")
    assert (first.title, start.title) == (second.title, "initial commit")


def test_content_that_was_sent_but_not_committed_is_not_sent_again(hub, me, folder, run):
    hub.fail("status", "/commit/", status=403)
    assert run(PUBLISH, folder).returncode == 1 and len(sent(hub)) == 1
    hub.forget()
    assert run(PUBLISH, folder).returncode == 0
    assert sent(hub) == []
    assert contents(folder).items() <= hub.files("me/model").items()


@pytest.mark.parametrize("at_once", [True, False])
def test_a_folder_is_sent_from_its_start_again_but_files_one_by_one_are_not(hub, me, folder, run, at_once):
    files = ["small.safetensors", "large.safetensors", "README.md"]
    arguments = (PUBLISH, folder) if at_once else (EACH_FIRST, folder, *files)
    hub.fail("status", "/v1/shards", status=403, skip=0 if at_once else 1)
    assert run(*arguments).returncode == 1
    hub.forget()
    assert run(*arguments).returncode == 0
    small, large = (contents(folder)[file] for file in files[:2])
    assert (sum(sent(hub)) > len(small) + len(large)) == at_once
    assert sum(sent(hub)) >= len(large)
    assert hub.files("me/model")["small.safetensors"] == small
