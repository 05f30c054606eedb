"""What `huggingface_hub` does when something goes wrong on the way, by the faults that the Hub of the tests has.

What it repeats by itself and what it leaves to its caller is what `attnres push` builds on.
"""

from pathlib import Path

import pytest
from huggingface_hub import CommitOperationAdd, constants
from huggingface_hub.errors import HfHubHTTPError
from huggingface_hub.utils import get_session, httpx

from .conftest import MEGABYTE
from .test_server import contents, status_of

# Requests of an upload, in their order.
BEFORE = [("POST", "/api/repos/create"), ("POST", "/api/validate-yaml")]
REPEATED = [
    ("POST", "/preupload/"),
    ("POST", "/objects/batch"),
    ("PUT", "/storage/upload/"),
    ("POST", "/complete_multipart"),
    ("POST", "/objects/verify"),
]


def publish(api, folder: Path):
    api.create_repo("me/model", exist_ok=True)
    return api.upload_folder(repo_id="me/model", folder_path=folder)


@pytest.mark.parametrize(("method", "path"), REPEATED)
def test_preparing_and_uploading_are_repeated(hub, me, folder, waits, method, path):
    (folder / "small.safetensors").unlink()
    for status in (408, 429, 500, 502, 503):
        hub.fail("status", path, method=method, status=status)
    publish(me, folder)
    assert waits == [1, 2, 4, 8, 8]
    assert [entry["status"] for entry in hub.log(method, path)][:6] == [408, 429, 500, 502, 503, 200]
    assert contents(folder).items() <= hub.files("me/model").items()


@pytest.mark.parametrize(("method", "path"), [*BEFORE, ("POST", "/commit/")])
@pytest.mark.parametrize("status", [429, 503])
def test_creating_checking_and_committing_are_not_repeated(hub, me, folder, waits, method, path, status):
    hub.fail("status", path, method=method, status=status, headers={"Retry-After": "1"})
    with pytest.raises(HfHubHTTPError) as error:
        publish(me, folder)
    assert status_of(error) == status
    assert waits == [] and len(hub.log(method, path)) == 1
    assert set(hub.files("me/model")) == {".gitattributes"}
    hub.forget()
    publish(me, folder)  # once more, by hand: objects that arrived are not sent again
    assert len(hub.log("PUT")) == (0 if "commit" in path else 4)


@pytest.mark.parametrize("status", [400, 403, 413, 422])
def test_an_error_of_the_client_is_not_repeated(hub, me, folder, waits, status):
    hub.fail("status", "/storage/upload/", status=status, times=None)
    (folder / "large.safetensors").unlink()
    with pytest.raises(RuntimeError, match=r"Error while uploading 'small.safetensors'") as error:
        publish(me, folder)
    assert error.value.__cause__.response.status_code == status
    assert waits == [] and len(hub.log("PUT")) == 1


@pytest.mark.parametrize(
    ("headers", "wait"),
    [
        ({"Retry-After": "7"}, 8),
        ({"RateLimit": '"api";r=0;t=30', "Retry-After": "7"}, 31),
        ({"Retry-After": "Wed, 21 Oct 2026 07:28:00 GMT"}, 1),
    ],
)
def test_the_wait_is_that_of_the_hub_and_a_second(hub, me, folder, waits, headers, wait):
    hub.fail("status", "/preupload/", status=429, headers=headers)
    publish(me, folder)
    assert waits == [wait]


def test_after_five_repetitions_the_client_gives_up(hub, me, folder, waits):
    hub.fail("status", "/preupload/", status=504, times=None)
    with pytest.raises(HfHubHTTPError) as error:
        publish(me, folder)
    assert status_of(error) == 504
    assert waits == [1, 2, 4, 8, 8] and len(hub.log("POST", "/preupload/")) == 6


@pytest.mark.parametrize("reset", [False, True])
def test_an_upload_that_is_cut_starts_again(hub, me, folder, waits, reset):
    hub.fail("cut", "/storage/upload/", method="PUT", after_bytes=100_000, reset=reset)
    publish(me, folder)
    assert waits == [1]
    assert contents(folder).items() <= hub.files("me/model").items()
    (cut,) = [entry for entry in hub.log("PUT") if entry["fault"]]
    assert cut["status"] is None and 100_000 <= cut["received"] < 300_000


def test_what_arrived_before_an_upload_broke_off_is_not_sent_again(hub, me, folder, waits):
    hub.fail("cut", r"/storage/upload/\w+/3", method="PUT", after_bytes=100_000, times=None)
    with pytest.raises(RuntimeError, match=r"Error while uploading 'large.safetensors'"):
        publish(me, folder)
    assert set(hub.files("me/model")) == {".gitattributes"}
    assert len(hub.log("POST", "/objects/verify")) == 1  # the small object is there
    hub.heal()
    hub.forget()
    publish(me, folder)
    assert [entry["received"] for entry in hub.log("PUT")] == [MEGABYTE, MEGABYTE, 500_000]
    assert contents(folder).items() <= hub.files("me/model").items()


def test_a_commit_whose_answer_is_lost_is_found_by_the_next_upload(hub, me, folder, waits):
    hub.fail("lost", "/commit/")
    with pytest.raises(httpx.TransportError):
        publish(me, folder)
    assert waits == []
    assert contents(folder).items() <= hub.files("me/model").items()
    hub.forget()
    assert publish(me, folder).oid == me.model_info("me/model").sha
    assert not hub.log("PUT") and not hub.log("POST", "/commit/")


def test_a_pull_request_whose_answer_is_lost_is_opened_twice(hub, me, folder, waits):
    hub.fail("lost", "/commit/")
    with pytest.raises(httpx.TransportError):
        me.upload_folder(repo_id="me/model", folder_path=folder, create_pr=True)
    assert me.upload_folder(repo_id="me/model", folder_path=folder, create_pr=True).pr_num == 2


def test_a_download_that_is_cut_goes_on_where_it_stopped(hub, me, folder, tmp_path, monkeypatch):
    monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 1000)  # of 10 MB, an incomplete one is thrown away
    publish(me, folder)
    hub.forget()
    hub.fail("cut", "/storage/", method="GET", after_bytes=200_000)
    path = me.hf_hub_download("me/model", "small.safetensors", cache_dir=tmp_path / "cache")
    assert Path(path).read_bytes() == contents(folder)["small.safetensors"]
    first, second = hub.log("GET", "/storage/")
    assert (first["sent"], first["range"]) == (200_000, None)
    assert (second["status"], second["sent"], second["range"]) == (206, 100_000, "bytes=200000-")


def test_a_download_that_is_reset_is_not_repeated_and_leaves_nothing(hub, me, folder, tmp_path):
    publish(me, folder)
    hub.fail("cut", "/storage/", method="GET", after_bytes=200_000, reset=True)
    with pytest.raises(httpx.ReadError):
        me.hf_hub_download("me/model", "small.safetensors", cache_dir=tmp_path / "cache")
    assert not [path for path in (tmp_path / "cache").rglob("blobs/*")]


@pytest.mark.parametrize(
    ("range_", "status", "expected"),
    [
        ("bytes=2-", 206, b"2345"),
        ("bytes=1-3", 206, b"123"),
        ("bytes=-2", 206, b"45"),
        ("bytes=9-", 416, None),
        ("lines=1", 200, b"012345"),
    ],
)
def test_parts_of_a_file(hub, me, range_, status, expected):
    me.create_commit("me/model", [CommitOperationAdd("digits", b"012345")], commit_message="digits")
    answer = get_session().get(f"{hub.url}/me/model/resolve/main/digits", headers={"Range": range_})
    assert answer.status_code == status
    assert expected is None or answer.content == expected


def test_a_slow_answer(hub, me):
    hub.fail("slow", "/api/models/me/model", seconds=2)
    with pytest.raises(httpx.TimeoutException):
        me.model_info("me/model", timeout=0.1)
    assert me.model_info("me/model", timeout=60).id == "me/model"


def test_a_fault_may_let_requests_pass_and_is_taken_back(hub, me):
    hub.fail("status", "/api/whoami", status=500, skip=1, times=None)
    me.whoami()
    for _ in range(2):
        with pytest.raises(HfHubHTTPError):
            me.whoami()
    hub.heal()
    me.whoami()
