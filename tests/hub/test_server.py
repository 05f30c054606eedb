"""The Hub of the tests answers `huggingface_hub` as the real one does."""

import subprocess
import sys
import warnings
from importlib.metadata import version
from pathlib import Path

import pytest
from huggingface_hub import CommitOperationAdd, CommitOperationDelete, ModelCard, constants
from huggingface_hub.errors import (
    BadRequestError,
    HfHubHTTPError,
    RemoteEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.utils import get_session

from .conftest import MEGABYTE
from .running import Hub


def contents(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def status_of(error: pytest.ExceptionInfo) -> int:
    return error.value.response.status_code


# Publishing and loading


def test_what_is_published_is_loaded_again(hub, me, folder, tmp_path):
    me.upload_folder(repo_id="me/model", folder_path=folder)
    expected = contents(folder)
    stored = hub.files("me/model")
    assert stored.pop(".gitattributes")
    assert stored == expected
    snapshot = contents(Path(me.snapshot_download("me/model", cache_dir=tmp_path / "cache")))
    assert {path: snapshot[path] for path in expected} == expected


def test_objects_go_to_the_storage_and_small_text_into_the_commit(hub, me, folder):
    me.upload_folder(repo_id="me/model", folder_path=folder)
    uploads = hub.log("PUT")
    assert sorted(entry["received"] for entry in uploads) == [300_000, 500_000, MEGABYTE, MEGABYTE]
    assert {entry["host"] for entry in uploads} == {"storage"}
    (commit,) = hub.log("POST", "/commit/main")
    assert commit["received"] < 1000
    assert len(hub.log("POST", "/api/complete_multipart")) == 1
    assert len(hub.log("POST", "/objects/verify")) == 2


def test_the_token_is_in_no_address_and_not_sent_to_the_storage(hub, me, folder, tmp_path):
    me.upload_folder(repo_id="me/model", folder_path=folder)
    me.snapshot_download("me/model", cache_dir=tmp_path / "cache")
    entries = hub.log()
    assert not [entry for entry in entries if hub.write_token in entry["path"]]
    storage = [entry for entry in entries if entry["host"] == "storage"]
    assert {entry["method"] for entry in storage} == {"PUT", "GET"}
    assert not [entry for entry in storage if entry["authorized"]]


def test_files_are_listed_with_size_and_checksum(me, folder):
    me.upload_folder(repo_id="me/model", folder_path=folder)
    names = {".gitattributes", *contents(folder)}
    assert set(me.list_repo_files("me/model")) == names
    info = me.model_info("me/model", files_metadata=True)
    assert {file.rfilename: file.size for file in info.siblings if file.lfs} == {
        "large.safetensors": 2_500_000,
        "small.safetensors": 300_000,
    }
    assert {entry.path for entry in me.list_repo_tree("me/model")} == (names - {"code/config.json"}) | {"code"}
    assert [entry.path for entry in me.list_repo_tree("me/model", "code")] == ["code/config.json"]
    small, code = me.get_paths_info("me/model", ["small.safetensors", "code", "absent"])
    assert (small.lfs.sha256, code.path) == (info.siblings[-1].lfs.sha256, "code")
    assert (info.card_data.license, info.tags) == ("mit", ["attnres"])
    assert me.verify_repo_checksums("me/model", local_dir=folder).mismatches == []


def test_what_did_not_change_is_not_uploaded_or_committed_again(hub, me, folder):
    first = me.upload_folder(repo_id="me/model", folder_path=folder)
    hub.forget()
    assert me.upload_folder(repo_id="me/model", folder_path=folder).oid == first.oid
    assert not hub.log("PUT") and not hub.log("POST", "/commit/")
    (folder / "README.md").write_text("---\nlicense: mit\n---\n# Changed\n")
    second = me.upload_folder(repo_id="me/model", folder_path=folder)
    assert not hub.log("PUT")
    assert [commit.commit_id for commit in me.list_repo_commits("me/model")][:2] == [second.oid, first.oid]


def test_a_commit_stays_as_it_is(hub, me, folder, tmp_path):
    first = me.upload_folder(repo_id="me/model", folder_path=folder)
    change = [CommitOperationAdd("code/config.json", b"[]"), CommitOperationDelete("small.safetensors")]
    second = me.create_commit("me/model", change, commit_message="a change", parent_commit=first.oid)
    assert "small.safetensors" not in hub.files("me/model")
    assert hub.files("me/model", first.oid)["code/config.json"] == b"{}\n"
    path = me.hf_hub_download("me/model", "code/config.json", revision=first.oid, cache_dir=tmp_path)
    assert Path(path).read_bytes() == b"{}\n"
    assert hub.repositories()["me/model"]["commits"][second.oid]["title"] == "a change"
    late = [CommitOperationAdd("late", b"")]
    with pytest.raises(HfHubHTTPError, match="A commit has happened since") as error:
        me.create_commit("me/model", late, commit_message="late", parent_commit=first.oid)
    assert status_of(error) == 412


def test_a_file_in_gitignore_is_left_out(hub, me, folder):
    (folder / ".gitignore").write_text("code\n")
    me.upload_folder(repo_id="me/model", folder_path=folder)
    assert "code/config.json" not in hub.files("me/model")


def test_content_is_there_from_the_start_without_a_token(tmp_path):
    for revision in ("main", "v1"):
        (tmp_path / "lab" / "model" / revision).mkdir(parents=True)
        (tmp_path / "lab" / "model" / revision / "config.json").write_text(revision)
    with Hub.running(tmp_path) as hub:
        call = "hf_hub_download('lab/model', 'config.json', revision='v1')"
        lines = f"from huggingface_hub import hf_hub_download; print(open({call}).read())"
        environment = hub.environ(home=tmp_path / "home")
        done = subprocess.run([sys.executable, "-c", lines], env=environment, capture_output=True, text=True)
        assert done.stdout.strip() == "v1", done.stderr
        assert not any(entry["authorized"] for entry in hub.log())


# Branches, tags and pull requests


def test_a_branch_and_a_tag(hub, me, folder):
    start = me.model_info("me/model").sha
    me.create_branch("me/model", branch="v1/small")
    me.create_branch("me/model", branch="v1/small", exist_ok=True)
    done = me.upload_folder(repo_id="me/model", folder_path=folder, revision="v1/small")
    me.create_tag("me/model", tag="released", revision="v1/small")
    refs = me.list_repo_refs("me/model")
    assert {branch.name: branch.target_commit for branch in refs.branches} == {"main": start, "v1/small": done.oid}
    assert [(tag.name, tag.target_commit) for tag in refs.tags] == [("released", done.oid)]
    assert set(hub.files("me/model")) == {".gitattributes"}
    with pytest.raises(HfHubHTTPError) as error:
        me.create_branch("me/model", branch="v1/small")
    assert status_of(error) == 409
    with pytest.raises(BadRequestError):
        me.create_branch("me/model", branch="refs/pr/5")


def test_a_pull_request_of_another_user(hub, me, client_of, folder):
    other = client_of(hub.other_token)
    commit = other.upload_folder(repo_id="me/model", folder_path=folder, create_pr=True)
    assert (commit.pr_num, commit.pr_revision) == (1, "refs/pr/1")
    assert set(hub.files("me/model")) == {".gitattributes"}
    assert set(hub.files("me/model", "refs/pr/1")) == {".gitattributes", *contents(folder)}
    assert me.model_info("me/model", revision="refs/pr/1").sha == commit.oid
    assert me.create_pull_request("me/model", title="another").git_reference == "refs/pr/2"
    me.upload_file(repo_id="me/model", path_or_fileobj=b"1", path_in_repo="one", revision="refs/pr/2")
    assert hub.files("me/model", "refs/pr/2")["one"] == b"1"


# Who may do what


def test_a_token_says_whose_it_is(hub, me, client_of):
    who = client_of(hub.read_token).whoami()
    assert (who["name"], [org["name"] for org in who["orgs"]]) == ("me", ["lab"])
    assert who["auth"]["accessToken"]["role"] == "read"
    with pytest.raises(HfHubHTTPError, match="Invalid user token") as error:
        client_of("hf_wrong").whoami()
    assert status_of(error) == 401
    client_of(False).model_info("me/model")
    with pytest.raises(HfHubHTTPError, match="Invalid credentials"):  # not even what all may read
        client_of("hf_wrong").model_info("me/model")


@pytest.mark.parametrize(
    ("token", "name", "status"),
    [
        (False, "me/new", 401),
        ("hf_wrong", "me/new", 401),
        (Hub.read_token, "me/new", 403),
        (Hub.write_token, "other/new", 403),
        (Hub.write_token, "me/model", 409),
    ],
)
def test_a_repository_is_not_created(hub, me, client_of, token, name, status):
    with pytest.raises(HfHubHTTPError) as error:
        client_of(token).create_repo(name)
    assert status_of(error) == status
    assert set(hub.repositories()) == {"me/model"}


def test_an_organization_and_a_repository_that_exists(hub, me):
    assert me.create_repo("lab/model").repo_id == "lab/model"
    assert me.create_repo("me/model", exist_ok=True).repo_id == "me/model"
    me.delete_repo("lab/model")
    assert set(hub.repositories()) == {"me/model"}


@pytest.mark.parametrize(
    ("token", "status"), [(False, 401), ("hf_wrong", 401), (Hub.read_token, 403), (Hub.other_token, 403)]
)
def test_a_commit_is_refused(hub, me, client_of, token, status):
    with pytest.raises(HfHubHTTPError) as error:
        client_of(token).upload_file(repo_id="me/model", path_or_fileobj=b"1", path_in_repo="one")
    assert status_of(error) == status
    assert set(hub.files("me/model")) == {".gitattributes"}


@pytest.mark.parametrize("token", [False, Hub.other_token])
def test_a_private_repository_is_not_found_by_others(hub, me, client_of, token, tmp_path):
    me.create_repo("me/secret", private=True)
    assert client_of(hub.read_token).model_info("me/secret").private
    with pytest.raises(RepositoryNotFoundError):
        client_of(token).model_info("me/secret")
    with pytest.raises(RepositoryNotFoundError):
        client_of(token).hf_hub_download("me/secret", ".gitattributes", cache_dir=tmp_path)
    me.update_repo_settings("me/secret", private=False)
    assert not client_of(token).model_info("me/secret").private


def test_what_is_not_there(me, tmp_path):
    with pytest.raises(RepositoryNotFoundError):
        me.model_info("me/absent")
    with pytest.raises(RevisionNotFoundError):
        me.model_info("me/model", revision="absent")
    with pytest.raises(RemoteEntryNotFoundError):
        me.hf_hub_download("me/model", "absent", cache_dir=tmp_path)
    with pytest.raises(RemoteEntryNotFoundError):
        list(me.list_repo_tree("me/model", "absent"))
    with pytest.raises(RepositoryNotFoundError):
        me.upload_file(repo_id="me/absent", path_or_fileobj=b"1", path_in_repo="one")
    with pytest.raises(RevisionNotFoundError):
        me.upload_file(repo_id="me/model", path_or_fileobj=b"1", path_in_repo="one", revision="absent")
    with pytest.raises(RemoteEntryNotFoundError, match="doesn't exist"):
        me.delete_file("absent", "me/model")


# What the Hub checks


@pytest.mark.parametrize("content", [b"right", b"wrong", b"righ"])
def test_an_object_is_stored_only_if_it_is_the_one_that_was_asked_for(hub, me, content):
    operation = CommitOperationAdd("x.bin", b"right")
    wanted = {"oid": operation.upload_info.sha256.hex(), "size": 5}
    headers = {"authorization": f"Bearer {hub.write_token}"}
    asked = {"operation": "upload", "transfers": ["basic"], "objects": [wanted]}
    answer = get_session().post(f"{hub.url}/me/model.git/info/lfs/objects/batch", json=asked, headers=headers).json()
    (actions,) = (item["actions"] for item in answer["objects"])
    right = content == b"right"
    assert get_session().put(actions["upload"]["href"], content=content).status_code == (200 if right else 422)
    verified = get_session().post(actions["verify"]["href"], json=wanted, headers=headers)
    assert verified.status_code == (200 if right else 404)


def test_a_commit_of_an_object_that_was_not_uploaded(hub, me):
    operation = CommitOperationAdd("x.bin", b"content")
    operation._upload_mode, operation._is_uploaded = "lfs", True
    with pytest.raises(BadRequestError, match="does not exist"):
        me.create_commit("me/model", [operation], commit_message="no object")


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ("license: [", "YAML metadata is invalid"),
        ("- a list", "must be an object"),
        ("license: my-own", '"license" must be one of'),
        ("license: other", '"license_name" is required'),
        ("base_model_relation: retrofit", '"base_model_relation" must be one of'),
        ("tags: [1]", '"tags" must be a string or an array of strings'),
        ("base_model: a/b/c", '"base_model" with value "a/b/c" is not valid'),
    ],
)
def test_a_card_with_bad_metadata_is_refused_before_anything_is_uploaded(hub, me, folder, metadata, message):
    (folder / "README.md").write_text(f"---\n{metadata}\n---\n# A model\n")
    with pytest.raises(ValueError, match=message):
        me.upload_folder(repo_id="me/model", folder_path=folder)
    assert [entry["path"] for entry in hub.log()] == ["/api/validate-yaml"]


@pytest.mark.skipif(version("huggingface_hub") < "2", reason="earlier releases ask huggingface.co alone")
def test_a_card_is_validated(hub, monkeypatch):
    monkeypatch.setattr(constants, "ENDPOINT", hub.url)
    data = "license: apache-2.0\nbase_model: lab/base\nbase_model_relation: finetune\ntags: [attnres]"
    ModelCard(f"---\n{data}\n---\n# A model\n").validate()
    with pytest.raises(ValueError, match="base_model_relation"):
        ModelCard("---\nbase_model_relation: retrofit\n---\n# A model\n").validate()


def test_a_card_without_metadata_is_warned_about(me):
    with pytest.warns(UserWarning, match="empty or missing yaml metadata"):
        me.upload_file(repo_id="me/model", path_or_fileobj=b"# A model", path_in_repo="README.md")


def test_results_are_shown_or_their_error(me):
    good = "- dataset: {id: cais/hle, task_id: default}\n  value: 20.9\n  date: 2026-01-15\n"
    bad = "- dataset: {id: hle}\n  value: 20.9\n"
    files = {".eval_results/good.yaml": good, ".eval_results/bad.yaml": bad}
    me.create_commit(
        "me/model", [CommitOperationAdd(path, text.encode()) for path, text in files.items()], commit_message="results"
    )
    with warnings.catch_warnings():
        (result,) = me.model_info("me/model", expand=["evalResults"]).eval_results
    assert (result.dataset_id, result.task_id, result.value) == ("cais/hle", "default", 20.9)
