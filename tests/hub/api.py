"""The Hub's endpoints below `/api`: accounts, repositories, revisions, what they hold, and commits."""

import base64
import fnmatch
import hashlib
import json
from pathlib import PurePosixPath

import cards
from http_types import Request, Response, Routes
from repositories import Commit, File, Hub, HubError, Repository, as_object, may_write_to

MODEL = r"/api/models/(?P<name>[^/]+/[^/]+)"
REVISION = r"(?P<revision>refs/pr/\d+|[^/]+)"

route = Routes()


@route("GET", "/api/whoami-v2")
def whoami(hub: Hub, request: Request) -> Response:
    account = request.account
    if account is None:
        raise HubError(401, "Invalid username or password.")
    organizations = [{"type": "org", "name": name, "roleInOrg": account.role} for name in account.organizations]
    token = {"displayName": "a token of the tests", "role": account.role}
    who = {"type": "user", "id": account.name, "name": account.name, "fullname": account.name, "orgs": organizations}
    return Response.of(who | {"auth": {"type": "access_token", "accessToken": token}})


@route("POST", "/api/validate-yaml")
def validate_yaml(hub: Hub, request: Request) -> Response:
    errors, warnings = cards.check(request.json["content"], request.json.get("repoType", "model"))
    found = {"errors": [{"message": text} for text in errors], "warnings": [{"message": text} for text in warnings]}
    return Response.of(found, 400 if errors else 200)


@route("POST", "/api/repos/create")
def create_repository(hub: Hub, request: Request) -> Response:
    asked = request.json
    if asked.get("type", "model") != "model":
        raise HubError(400, "this Hub holds models only")
    account = may_write_to(asked.get("organization"), request.account)
    name = f"{asked.get('organization') or account.name}/{asked['name']}"
    address = {"url": f"{hub.url}/{name}", "name": name, "id": name}
    if name in hub.by_name:
        return Response.of({"error": "You already created this model repo", **address}, 409)
    hub.create(name, private=asked.get("visibility") == "private", author=account.name)
    return Response.of(address)


@route("DELETE", "/api/repos/delete")
def delete_repository(hub: Hub, request: Request) -> Response:
    asked = request.json
    account = may_write_to(asked.get("organization"), request.account)
    name = f"{asked.get('organization') or account.name}/{asked['name']}"
    del hub.by_name[hub.writable(name, account).name]
    return Response.of({})


@route("PUT", f"{MODEL}/settings")
def change_settings(hub: Hub, request: Request, name: str) -> Response:
    repository = hub.writable(name, request.account)
    if "visibility" in request.json:
        repository.private = request.json["visibility"] == "private"
    return Response.of({"private": repository.private})


@route("GET", f"{MODEL}/auth-check(?P<write>/write)?")
def check_access(hub: Hub, request: Request, name: str, write: str) -> Response:
    (hub.writable if write else hub.readable)(name, request.account)
    return Response.of({})


@route("GET", f"{MODEL}(?:/revision/{REVISION})?")
def model_info(hub: Hub, request: Request, name: str, revision: str) -> Response:
    repository = hub.readable(name, request.account)
    commit = repository.commit(revision or "main")
    siblings = [{"rfilename": path} for path in sorted(commit.files)]
    if "blobs" in request.query:
        for sibling in siblings:
            file = commit.files[sibling["rfilename"]]
            sibling |= {"size": len(file.content), "blobId": file.oid}
            if file.lfs:
                sibling["lfs"] = {"sha256": file.sha256, **file.pointer_info}
    info = {"_id": name, "id": name, "modelId": name, "author": repository.namespace, "sha": commit.oid}
    info |= {"private": repository.private, "gated": False, "disabled": False, "downloads": 0, "likes": 0}
    info |= {"createdAt": commit.date, "lastModified": commit.date, "siblings": siblings}
    info |= cards.facts({path: file.content for path, file in commit.files.items()})
    return Response.of(info)


def entry_of(repository: Repository, path: str, file: File) -> dict:
    """A file as listings of a tree show it."""
    entry = {"type": "file", "path": path, "oid": file.oid, "size": len(file.content)}
    if file.lfs:
        entry["lfs"] = {"oid": file.sha256, **file.pointer_info}
        if file.sha256 in repository.xet_hashes:
            entry["xetHash"] = repository.xet_hashes[file.sha256]
    return entry


def folder_of(path: str) -> dict:
    return {"type": "directory", "path": path, "oid": hashlib.sha1(path.encode()).hexdigest(), "size": 0}


@route("GET", f"{MODEL}/tree/{REVISION}(?:/(?P<folder>.+))?")
def list_tree(hub: Hub, request: Request, name: str, revision: str, folder: str) -> Response:
    repository = hub.readable(name, request.account)
    commit = repository.commit(revision)
    root = PurePosixPath(folder)
    inside = {path: file for path, file in commit.files.items() if PurePosixPath(path).is_relative_to(root)}
    if folder and not inside:
        raise HubError(404, f"{folder} does not exist on {revision}", "EntryNotFound")
    recursive = request.query.get("recursive", ["False"])[0].lower() in ("true", "1")
    entries = {}
    for path, file in sorted(inside.items()):
        parents = [parent for parent in reversed(PurePosixPath(path).parents) if root in parent.parents]
        for parent in parents if recursive else parents[:1]:
            entries[str(parent)] = folder_of(str(parent))
        if recursive or not parents:
            entries[path] = entry_of(repository, path, file)
    return Response.of(list(entries.values()))


@route("POST", f"{MODEL}/paths-info/{REVISION}")
def paths_info(hub: Hub, request: Request, name: str, revision: str) -> Response:
    repository = hub.readable(name, request.account)
    commit = repository.commit(revision)
    entries = []
    for path in request.form.get("paths", []):
        if path in commit.files:
            entries.append(entry_of(repository, path, commit.files[path]))
        elif any(PurePosixPath(path) in PurePosixPath(other).parents for other in commit.files):
            entries.append(folder_of(path))
    return Response.of(entries)


@route("GET", f"{MODEL}/refs")
def list_refs(hub: Hub, request: Request, name: str) -> Response:
    refs = hub.readable(name, request.account).refs
    kinds = {"branches": "refs/heads/", "tags": "refs/tags/", "converts": "refs/convert/", "pullRequests": "refs/pr/"}
    return Response.of(
        {
            kind: [
                {"name": ref.removeprefix(start), "ref": ref, "targetCommit": oid}
                for ref, oid in refs.items()
                if ref.startswith(start)
            ]
            for kind, start in kinds.items()
        }
    )


@route("GET", f"{MODEL}/commits/{REVISION}")
def list_commits(hub: Hub, request: Request, name: str, revision: str) -> Response:
    return Response.of(
        [
            {
                "id": commit.oid,
                "title": commit.title,
                "message": commit.message,
                "authors": [{"user": commit.author}],
                "date": commit.date,
            }
            for commit in hub.readable(name, request.account).history(revision)
        ]
    )


@route("POST", f"{MODEL}/(?P<kind>branch|tag)/(?P<at>[^/]+)")
def create_reference(hub: Hub, request: Request, name: str, kind: str, at: str) -> Response:
    """`/branch/NAME` starts at `startingPoint`; `/tag/REVISION` is named in the body."""
    repository = hub.writable(name, request.account)
    asked = request.json
    new, start = (at, asked.get("startingPoint", "main")) if kind == "branch" else (asked["tag"], at)
    ref = f"refs/heads/{new}" if kind == "branch" else f"refs/tags/{new}"
    if new.startswith("refs/"):
        raise HubError(400, f"Invalid reference for a {kind}: {new}")
    if ref in repository.refs:
        raise HubError(409, f"Reference already exists: {ref}")
    repository.refs[ref] = repository.commit(start).oid
    return Response.of({})


@route("DELETE", f"{MODEL}/(?P<kind>branch|tag)/(?P<old>[^/]+)")
def delete_reference(hub: Hub, request: Request, name: str, kind: str, old: str) -> Response:
    repository = hub.writable(name, request.account)
    ref = f"refs/heads/{old}" if kind == "branch" else f"refs/tags/{old}"
    if ref == "refs/heads/main":
        raise HubError(403, "Cannot delete branch main")
    if repository.refs.pop(ref, None) is None:
        raise HubError(404, f"Invalid rev id: {old}", "RevisionNotFound")
    return Response.of({})


@route("POST", f"{MODEL}/discussions")
def open_discussion(hub: Hub, request: Request, name: str) -> Response:
    repository = hub.readable(name, request.account)
    account = may_write_to(None, request.account)
    if not request.json.get("pullRequest"):
        raise HubError(400, "this Hub knows pull requests only")
    return Response.of(repository.open_pull_request(request.json["title"], account.name, repository.commit("main")))


@route("GET", f"{MODEL}/discussions/(?P<number>[0-9]+)")
def show_discussion(hub: Hub, request: Request, name: str, number: str) -> Response:
    repository = hub.readable(name, request.account)
    if not 1 <= int(number) <= len(repository.pull_requests):
        raise HubError(404, f"no discussion {number}")
    shown = dict(repository.pull_requests[int(number) - 1])
    shown |= {"author": {"name": shown["author"]}, "repo": {"name": name, "type": "model"}, "status": "open"}
    shown |= {"isPullRequest": True, "changes": {"base": "refs/heads/main"}, "filesWithConflicts": [], "events": []}
    return Response.of(shown)


def for_change(hub: Hub, request: Request, name: str, revision: str) -> tuple[Repository, bool]:
    """The repository, and whether the change goes to a new pull request, which a reader may open too."""
    if request.query.get("create_pr") == ["1"]:
        repository = hub.readable(name, request.account)
        may_write_to(None, request.account)
        return repository, True
    return hub.writable(name, request.account, revision), False


@route("POST", f"{MODEL}/preupload/{REVISION}")
def preupload(hub: Hub, request: Request, name: str, revision: str) -> Response:
    """How each file is to be uploaded, whether `.gitignore` leaves it out, and what is there under its name."""
    repository, _ = for_change(hub, request, name, revision)
    commit = repository.commit(revision)
    hosted = commit.files[".gitignore"].content.decode() if ".gitignore" in commit.files else ""
    rules = [line.strip() for line in request.json.get("gitIgnore", hosted).splitlines()]
    rules = [rule for rule in rules if rule and not rule.startswith("#")]
    files = []
    for asked in request.json["files"]:
        path, there = asked["path"], commit.files.get(asked["path"])
        lfs = as_object(path, asked["size"], base64.b64decode(asked["sample"]))
        ignored = any(fnmatch.fnmatch(path, rule) or fnmatch.fnmatch(path, rule + "/*") for rule in rules)
        answer = {"path": path, "uploadMode": "lfs" if lfs else "regular", "shouldIgnore": ignored}
        files.append(answer | ({"oid": there.etag} if there else {}))
    return Response.of({"files": files, "commitOid": commit.oid})


def carried_out(repository: Repository, files: dict[str, File], key: str, value: dict) -> dict[str, File]:
    """The files after one operation of a commit.

    Raises:
        HubError: 400 for an object that was not uploaded or an operation that does not exist, 404 for a file that is
            to be deleted and is not there.
    """
    path = value["path"]
    if key == "file":
        return files | {path: File(base64.b64decode(value["content"]), lfs=False)}
    if key == "lfsFile":
        if value["oid"] not in repository.objects:
            raise HubError(
                400, f"Your push was rejected because an LFS pointer pointed to a file that does not exist: {path}"
            )
        return files | {path: File(repository.objects[value["oid"]], lfs=True)}
    if key not in ("deletedFile", "deletedFolder"):
        raise HubError(400, f"no such operation in a commit: {key}")
    gone = {path} if key == "deletedFile" else {other for other in files if other.startswith(path.rstrip("/") + "/")}
    if not gone or not gone <= set(files):
        raise HubError(404, f"A file with this name doesn't exist: {path}", "EntryNotFound")
    return {other: file for other, file in files.items() if other not in gone}


@route("POST", f"{MODEL}/commit/{REVISION}")
def commit(hub: Hub, request: Request, name: str, revision: str) -> Response:
    """A commit from lines of JSON: a header, then the operations."""
    repository, for_pull_request = for_change(hub, request, name, revision)
    try:
        first, *operations = [json.loads(line) for line in request.body.splitlines() if line.strip()]
        header = first["value"]
    except (ValueError, KeyError) as error:
        raise HubError(400, f"not a commit: {error!r}") from error
    ref = repository.ref(revision)
    parent = repository.commit(ref)
    if header.get("parentCommit", parent.oid) != parent.oid:
        raise HubError(412, "A commit has happened since. Please refresh and try again.")
    files = parent.files
    for operation in operations:
        files = carried_out(repository, files, operation["key"], operation["value"])
    if "README.md" in files and files["README.md"] != parent.files.get("README.md"):
        errors, _ = cards.check(files["README.md"].content.decode(), "model")
        if errors:
            raise HubError(400, "Invalid metadata in README.md: " + "; ".join(errors))
    new = Commit(parent.oid, header["summary"], header.get("description", ""), request.account.name, files)
    answer = {"success": True, "commitOid": new.oid, "commitUrl": f"{hub.url}/{name}/commit/{new.oid}"}
    if for_pull_request:
        number = repository.open_pull_request(header["summary"], request.account.name, parent)["num"]
        ref = f"refs/pr/{number}"
        answer["pullRequestUrl"] = f"{hub.url}/{name}/discussions/{number}"
    repository.add(ref, new)
    return Response.of(answer)
