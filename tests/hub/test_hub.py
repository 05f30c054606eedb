"""The Hub of the tests answers `huggingface_hub` as the real one does, as far as `attnres` depends on it."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi, constants
from huggingface_hub.errors import (
    BadRequestError,
    HfHubHTTPError,
    RemoteEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.utils import close_session, httpx

from .running import Hub


@pytest.fixture(scope="module", autouse=True)
def plain_client() -> Iterator[None]:
    """Let `huggingface_hub` use neither `hf_xet` nor the token or the proxy of the person who runs the tests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        patch.setattr(constants, "HF_HUB_DISABLE_IMPLICIT_TOKEN", True)
        patch.setenv("NO_PROXY", "127.0.0.1")
        patch.setenv("no_proxy", "127.0.0.1")
        close_session()
        yield
        close_session()


@pytest.fixture
def client_of(hub) -> Callable[[str | bool], HfApi]:
    """Return `client_of(token)`, a client of this Hub. The token False stands for none."""
    return lambda token: HfApi(endpoint=hub.url, token=token)


@pytest.fixture
def me(hub, client_of) -> HfApi:
    """Return the client of the user `me`, who may write to the empty repository `me/model`."""
    api = client_of(hub.write_token)
    api.create_repo("me/model")
    hub.forget()
    return api


@pytest.fixture
def folder(tmp_path) -> Path:
    """Return a model directory with two text files and an object."""
    folder = tmp_path / "folder"
    (folder / "code").mkdir(parents=True)
    (folder / "README.md").write_text("---\nlicense: mit\ntags: [attnres]\n---\n# A model\n")
    (folder / "code" / "config.json").write_text("{}\n")
    (folder / "model.safetensors").write_bytes(bytes(range(256)) * 1000)
    return folder


def contents(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def status_of(error: pytest.ExceptionInfo) -> int:
    return error.value.response.status_code


def add(api: HfApi, repo: str = "me/model", **options) -> object:
    """Commit a small file."""
    return api.upload_file(repo_id=repo, path_or_fileobj=b"1", path_in_repo="one", **options)


def test_a_published_model_is_loaded_again_and_not_uploaded_twice(hub, me, folder, tmp_path):
    first = me.upload_folder(repo_id="me/model", folder_path=folder)
    expected = contents(folder)
    assert hub.files("me/model").keys() == expected.keys() | {".gitattributes"}
    snapshot = contents(Path(me.snapshot_download("me/model", cache_dir=tmp_path / "cache")))
    assert {path: snapshot[path] for path in expected} == expected
    assert {entry.path for entry in me.list_repo_tree("me/model")} == {
        *(".gitattributes", "README.md", "model.safetensors", "code")
    }
    (upload,) = hub.log("PUT")
    assert upload["received"] == 256_000  # the object alone; text is in the commit
    assert not [entry for entry in hub.log() if hub.write_token in entry["path"]]
    hub.forget()
    assert me.upload_folder(repo_id="me/model", folder_path=folder).oid == first.oid
    assert not hub.log("PUT") and not hub.log("POST", "/commit/")


def test_a_commit_never_changes(hub, me, folder):
    first = me.upload_folder(repo_id="me/model", folder_path=folder)
    change = [CommitOperationAdd("code/config.json", b"[]"), CommitOperationDelete("model.safetensors")]
    me.create_commit("me/model", change, commit_message="a change", parent_commit=first.oid)
    assert "model.safetensors" not in hub.files("me/model")
    assert hub.files("me/model", first.oid)["code/config.json"] == b"{}\n"
    assert hub.commits("me/model")[-1] == "a change"
    with pytest.raises(HfHubHTTPError, match="A commit has happened since") as error:
        add(me, parent_commit=first.oid)
    assert status_of(error) == 412


def test_branches_and_pull_requests_leave_main_alone(hub, me, client_of, folder):
    me.create_branch("me/model", branch="v1/small", exist_ok=True)
    me.create_branch("me/model", branch="v1/small", exist_ok=True)
    add(me, revision="v1/small")
    other = client_of(hub.other_token)
    commit = other.upload_folder(repo_id="me/model", folder_path=folder, create_pr=True)
    assert (commit.pr_num, commit.pr_revision) == (1, "refs/pr/1")
    add(other, revision="refs/pr/1")
    assert add(me, create_pr=True).pr_num == 2
    assert set(hub.files("me/model")) == {".gitattributes"}
    assert set(hub.files("me/model", "v1/small")) == {".gitattributes", "one"}
    assert set(hub.files("me/model", "refs/pr/1")) == {".gitattributes", "one", *contents(folder)}
    with pytest.raises(BadRequestError):
        me.create_branch("me/model", branch="refs/pr/5")


def test_files_under_a_gitignore_of_the_repository_are_left_out(hub, me, folder):
    me.upload_file(repo_id="me/model", path_or_fileobj=b"code\n", path_in_repo=".gitignore")
    me.upload_folder(repo_id="me/model", folder_path=folder)
    assert "code/config.json" not in hub.files("me/model")


@pytest.mark.parametrize(
    ("token", "status"), [(False, 401), ("hf_wrong", 401), (Hub.read_token, 403), (Hub.other_token, 403)]
)
def test_a_client_that_may_not_write_changes_nothing(hub, me, client_of, token, status):
    for call in (lambda api: add(api), lambda api: api.create_repo("lab/new")):
        with pytest.raises(HfHubHTTPError) as error:
            call(client_of(token))
        assert status_of(error) == status
    assert hub.repositories.keys() == {"me/model"}
    assert set(hub.files("me/model")) == {".gitattributes"}


def test_a_private_repository_is_not_found_by_others(hub, me, client_of):
    me.create_repo("lab/secret", private=True)
    assert client_of(hub.read_token).model_info("lab/secret").private
    for token in (False, hub.other_token):
        with pytest.raises(RepositoryNotFoundError):
            client_of(token).model_info("lab/secret")


def test_a_missing_repository_revision_or_file_raises_its_error(me, tmp_path):
    with pytest.raises(RepositoryNotFoundError):
        add(me, "me/absent")
    with pytest.raises(RevisionNotFoundError):
        me.model_info("me/model", revision="absent")
    with pytest.raises(RemoteEntryNotFoundError):
        me.hf_hub_download("me/model", "absent", cache_dir=tmp_path)
    with pytest.raises(RemoteEntryNotFoundError, match="doesn't exist"):
        me.delete_file("absent", "me/model")


def test_an_object_is_committed_only_if_it_was_uploaded_as_announced(hub, me):
    operation = CommitOperationAdd("x.bin", b"right")
    address = f"{hub.url}/storage/upload/me/model/{operation.upload_info.sha256.hex()}"
    assert httpx.put(address, content=b"wrong").status_code == 422
    operation._upload_mode, operation._is_uploaded = "lfs", True  # as if the client had uploaded it
    with pytest.raises(BadRequestError, match="does not exist"):
        me.create_commit("me/model", [operation], commit_message="no object")
    assert httpx.put(address, content=b"right").status_code == 200
    me.create_commit("me/model", [operation], commit_message="an object")
    assert hub.files("me/model")["x.bin"] == b"right"


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


@pytest.mark.slow
def test_a_fault_makes_the_matching_requests_fail(hub, me, folder):
    hub.fail("status", "/api/whoami", status=418, skip=1, times=None)
    me.whoami()
    for _ in range(2):
        with pytest.raises(HfHubHTTPError) as error:
            me.whoami()
        assert status_of(error) == 418
    hub.heal()
    me.whoami()
    with pytest.raises(RuntimeError, match=r"Error while uploading 'model\.safetensors'"):
        hub.fail("cut", "/storage/", method="PUT", after_bytes=1000)
        hub.fail("status", "/storage/", status=403, times=None)
        me.upload_folder(repo_id="me/model", folder_path=folder)
    assert [(entry["received"], entry["status"]) for entry in hub.log("PUT")] == [(1000, None), (256_000, 403)]
    hub.heal()
    hub.fail("lost", "/commit/")
    with pytest.raises(httpx.TransportError):
        add(me)
    assert hub.files("me/model")["one"] == b"1"  # the commit was made before the connection ended


def test_a_hub_can_stop_during_a_request(hub, me):
    hub.before("/api/models/me/model", hub.stop)
    assert me.model_info("me/model").id == "me/model"
    close_session()  # the connection to the stopped Hub is still open
    with pytest.raises(httpx.ConnectError):
        me.model_info("me/model")
