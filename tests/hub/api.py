"""Answer the requests by which `huggingface_hub` publishes and loads models, with one function for each endpoint.

Bytes are transferred in the simplest way that the client supports: each LFS object in one request, and downloads
without a redirect. Its other protocols are not tested here.
"""

import base64
import hashlib
import json
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import PurePosixPath
from typing import Any
from urllib.parse import unquote

from .cards import errors_of_card
from .repositories import (
    ACCOUNTS,
    PRIVATE_BY_DEFAULT,
    Account,
    Commit,
    File,
    HubError,
    Repositories,
    Repository,
    is_object,
    require_writer,
)

NAME = r"(?P<name>[^/]+/[^/]+)"
MODEL = f"/api/models/{NAME}"
REVISION = r"(?P<revision>refs/pr/\d+|[^/]+)"


@dataclass
class Request:
    """A request to the Hub at `url`; `account` is the owner of its token."""

    url: str
    method: str
    path: str
    query: dict[str, list[str]]
    body: bytes
    account: Account | None = None

    @property
    def json(self) -> Any:
        """The parsed body."""
        return json.loads(self.body or b"{}")


@dataclass
class Response:
    """An answer; its content is bytes, or a value to send as JSON."""

    content: Any
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, error: HubError) -> "Response":
        """Return an error as the Hub sends it: in the body, and in the header `X-Error-Message`."""
        line = " ".join(error.message.split()).encode("ascii", "replace").decode()
        return cls({"error": error.message}, error.status, {"X-Error-Message": line, **error.headers})


ROUTES: list[tuple[str, re.Pattern[str], Callable[..., Response]]] = []


def route(method: str, pattern: str) -> Callable[[Callable], Callable]:
    """Register a function as the answer to a method and path. It gets the groups of the pattern by their names."""

    def register(function: Callable) -> Callable:
        ROUTES.append((method, re.compile(pattern), function))
        return function

    return register


def answer(repositories: Repositories, request: Request, token: str) -> Response:
    """Return the answer to a request that carries `token`, which may be empty."""
    method = "GET" if request.method == "HEAD" else request.method
    try:
        if token and token not in ACCOUNTS:
            raise HubError(401, "Invalid credentials in Authorization header")
        request.account = ACCOUNTS.get(token)
        for routed, pattern, function in ROUTES:
            if routed == method and (match := pattern.fullmatch(request.path)):
                groups = {name: unquote(value or "") for name, value in match.groupdict().items()}
                return function(repositories, request, **groups)
        raise HubError(404, f"the Hub of the tests has no answer to {request.method} {request.path}")
    except HubError as error:
        return Response.of(error)


@route("GET", "/api/whoami-v2")
def whoami(repositories: Repositories, request: Request) -> Response:
    if request.account is None:
        raise HubError(401, "Invalid username or password.")
    organizations = [{"type": "org", "name": name} for name in request.account.organisations]
    token = {"displayName": "a token of the tests", "role": "write" if request.account.may_write else "read"}
    who = {"type": "user", "name": request.account.name, "orgs": organizations}
    return Response(who | {"auth": {"type": "access_token", "accessToken": token}})


@route("POST", "/api/validate-yaml")
def validate_card(repositories: Repositories, request: Request) -> Response:
    errors, warnings = errors_of_card(request.json["content"])
    shown = {"errors": [{"message": text} for text in errors], "warnings": [{"message": text} for text in warnings]}
    return Response(shown, 400 if errors else 200)


@route("POST", "/api/repos/create")
def create_repository(repositories: Repositories, request: Request) -> Response:
    fields = request.json
    account = require_writer(request.account, fields.get("organization"))
    name = f"{fields.get('organization') or account.name}/{fields['name']}"
    address = {"url": f"{request.url}/{name}", "name": name, "id": name}
    if name in repositories:
        return Response({"error": "You already created this model repo", **address}, 409)
    default = "private" if fields.get("organization") in PRIVATE_BY_DEFAULT else "public"
    repositories.create(name, private=fields.get("visibility", default) == "private")
    return Response(address)


@route("GET", f"{MODEL}(?:/revision/{REVISION})?")
def model_info(repositories: Repositories, request: Request, name: str, revision: str) -> Response:
    repository = repositories.readable(name, request.account)
    commit = repository.commit(revision or "main")
    siblings = [{"rfilename": path} for path in sorted(commit.files)]
    info = {"_id": name, "id": name, "sha": commit.oid, "private": repository.private, "siblings": siblings}
    return Response(info | {"lastModified": commit.date})


@route("GET", f"{MODEL}/tree/{REVISION}(?:/(?P<folder>.+))?")
def list_tree(repositories: Repositories, request: Request, name: str, revision: str, folder: str) -> Response:
    files = repositories.readable(name, request.account).commit(revision).files
    root = PurePosixPath(folder)
    paths = [PurePosixPath(path) for path in sorted(files) if PurePosixPath(path).is_relative_to(root)]
    if folder and not paths:
        raise HubError(404, f"{folder} does not exist on {revision}", "EntryNotFound")
    if request.query.get("recursive", ["false"])[0].lower() != "true":
        # A file in a subfolder is listed as the folder directly below the root.
        paths = sorted({root / path.relative_to(root).parts[0] for path in paths})
    entries = []
    for path in map(str, paths):
        if path in files:
            entry = {"type": "file", "path": path, "oid": files[path].etag, "size": len(files[path].content)}
            if files[path].is_object:
                entry["lfs"] = {"oid": files[path].etag, "size": entry["size"], "pointerSize": 130}
        else:
            entry = {"type": "directory", "path": path, "oid": hashlib.sha1(path.encode()).hexdigest(), "size": 0}
        entries.append(entry)
    return Response(entries)


@route("POST", f"{MODEL}/branch/(?P<branch>[^/]+)")
def create_branch(repositories: Repositories, request: Request, name: str, branch: str) -> Response:
    repository = repositories.writable(name, request.account)
    if branch.startswith("refs/"):
        raise HubError(400, f"Invalid reference for a branch: {branch}")
    if f"refs/heads/{branch}" in repository.refs:
        raise HubError(409, f"Reference already exists: {branch}")
    start = repository.commit(request.json.get("startingPoint", "main"))
    repository.refs[f"refs/heads/{branch}"] = start.oid
    return Response({})


def repository_to_change(repositories: Repositories, request: Request, name: str, revision: str) -> Repository:
    """Return the repository of a commit to `revision`, or of a new pull request, which any account may open."""
    if request.query.get("create_pr") == ["1"]:
        require_writer(request.account)
        return repositories.readable(name, request.account)
    return repositories.writable(name, request.account, revision)


@route("POST", f"{MODEL}/preupload/{REVISION}")
def plan_upload(repositories: Repositories, request: Request, name: str, revision: str) -> Response:
    """Return for each file how to upload it, whether `.gitignore` leaves it out, and the hash of its old content."""
    files = repository_to_change(repositories, request, name, revision).commit(revision).files
    hosted = files[".gitignore"].content.decode() if ".gitignore" in files else ""
    rules = [line.strip() for line in request.json.get("gitIgnore", hosted).splitlines()]
    rules = [rule for rule in rules if rule and not rule.startswith("#")]
    plans = []
    for file in request.json["files"]:
        path = file["path"]
        mode = "lfs" if is_object(path, file["size"], base64.b64decode(file["sample"])) else "regular"
        ignored = any(fnmatch(path, pattern) for rule in rules for pattern in (rule, f"{rule}/*"))
        plan = {"path": path, "uploadMode": mode, "shouldIgnore": ignored}
        plans.append(plan | ({"oid": files[path].etag} if path in files else {}))
    return Response({"files": plans})


@route("POST", f"/{NAME}.git/info/lfs/objects/batch")
def locate_objects(repositories: Repositories, request: Request, name: str) -> Response:
    """Return the address for the upload of each object that the repository lacks."""
    repository = repositories.readable(name, request.account)
    require_writer(request.account)
    objects = []
    for item in request.json["objects"]:
        target = {"upload": {"href": f"{request.url}/storage/upload/{name}/{item['oid']}"}}
        actions = {} if item["oid"] in repository.objects else {"actions": target}
        objects.append({"oid": item["oid"], "size": item["size"], "authenticated": True, **actions})
    return Response({"transfer": "basic", "objects": objects})


@route("PUT", f"/storage/upload/{NAME}/(?P<sha256>[0-9a-f]{{64}})")
def receive_object(repositories: Repositories, request: Request, name: str, sha256: str) -> Response:
    if hashlib.sha256(request.body).hexdigest() != sha256:
        raise HubError(422, f"the sha256 of the object is not {sha256}")
    repositories[name].objects[sha256] = request.body
    return Response({})


def files_after(repository: Repository, files: dict[str, File], kind: str, value: dict) -> dict[str, File]:
    """Return the files after one operation of a commit.

    Raises:
        HubError: 400 for an object that was not uploaded or an unknown operation; 404 if the file to delete does not
            exist.
    """
    path = value["path"]
    if kind == "file":
        return files | {path: File(base64.b64decode(value["content"]), is_object=False)}
    if kind == "lfsFile":
        if value["oid"] not in repository.objects:
            raise HubError(400, f"Your push was rejected: an LFS pointer points to a file that does not exist: {path}")
        return files | {path: File(repository.objects[value["oid"]], is_object=True)}
    if kind not in ("deletedFile", "deletedFolder"):
        raise HubError(400, f"no such operation in a commit: {kind}")
    kept = {name: file for name, file in files.items() if name != path and not name.startswith(path.rstrip("/") + "/")}
    if len(kept) == len(files):
        raise HubError(404, f"A file with this name doesn't exist: {path}", "EntryNotFound")
    return kept


@route("POST", f"{MODEL}/commit/{REVISION}")
def commit(repositories: Repositories, request: Request, name: str, revision: str) -> Response:
    """Make a commit. The body has one JSON object a line: a header, then the operations."""
    repository = repository_to_change(repositories, request, name, revision)
    header, *operations = [json.loads(line) for line in request.body.splitlines() if line.strip()]
    ref = repository.ref(revision)
    parent = repository.commit(ref)
    if header["value"].get("parentCommit", parent.oid) != parent.oid:
        raise HubError(412, "A commit has happened since. Please refresh and try again.")
    files = parent.files
    for operation in operations:
        files = files_after(repository, files, operation["key"], operation["value"])
    if "README.md" in files and files["README.md"] != parent.files.get("README.md"):
        errors, _ = errors_of_card(files["README.md"].content.decode())
        if errors:
            raise HubError(400, "Invalid metadata in README.md: " + "; ".join(errors))
    new = Commit(parent.oid, header["value"]["summary"], files)
    result = {"success": True, "commitOid": new.oid, "commitUrl": f"{request.url}/{name}/commit/{new.oid}"}
    if request.query.get("create_pr") == ["1"]:
        ref = repository.open_pull_request(request.account.name)
        result["pullRequestUrl"] = f"{request.url}/{name}/discussions/{ref.rpartition('/')[2]}"
    repository.add(ref, new)
    return Response(result)


@route("GET", f"/{NAME}/resolve/{REVISION}/(?P<path>.+)")
def download(repositories: Repositories, request: Request, name: str, revision: str, path: str) -> Response:
    commit = repositories.readable(name, request.account).commit(revision)
    headers = {"X-Repo-Commit": commit.oid}
    if path not in commit.files:
        raise HubError(404, "Entry not found", "EntryNotFound", **headers)
    file = commit.files[path]
    return Response(file.content, headers=headers | {"ETag": f'"{file.etag}"'})
