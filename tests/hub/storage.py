"""Uploads of large objects by the LFS protocol, and downloads of files.

As on the real Hub, objects live on a host of their own (here: another port), which takes addresses that are signed and
knows no tokens: `/storage/...` below is served there, all else by the Hub itself.
"""

import hashlib
import math
import re
import secrets
from dataclasses import dataclass, field

from api import REVISION
from http_types import Request, Response, Routes
from repositories import Hub, HubError, Repository

NAME = r"/(?P<name>[^/]+/[^/]+)"
SHA256 = re.compile("[0-9a-f]{64}")

route = Routes()


@dataclass
class Upload:
    """An upload that was asked for; `parts` of a multipart one are kept by number until it is complete."""

    repository: Repository
    oid: str
    part_size: int | None
    parts: dict[int, bytes] = field(default_factory=dict)

    def store(self, content: bytes) -> None:
        """Keeps the object.

        Raises:
            HubError: 422 if it is not the one that was asked for.
        """
        if hashlib.sha256(content).hexdigest() != self.oid:
            raise HubError(422, f"the sha256 of what came is not {self.oid}")
        self.repository.objects[self.oid] = content


@route("POST", f"{NAME}.git/info/lfs/objects/batch")
def batch(hub: Hub, request: Request, name: str) -> Response:
    """Where to send each object; nowhere if it is there. Objects larger than a part are sent in parts."""
    repository = hub.readable(name, request.account)
    if request.account is None or request.account.role != "write":
        hub.writable(name, request.account)
    asked = request.json
    objects, transfer = [], "basic"
    for wanted in asked["objects"]:
        oid, size = wanted["oid"], wanted["size"]
        answer = {"oid": oid, "size": size, "authenticated": True}
        objects.append(answer)
        if not SHA256.fullmatch(oid):
            answer["error"] = {"code": 422, "message": f"not a sha256: {oid}"}
            continue
        if oid in repository.objects:
            continue
        in_parts = size > hub.part_size and "multipart" in asked["transfers"]
        ticket = secrets.token_hex(16)
        hub.uploads[ticket] = Upload(repository, oid, hub.part_size if in_parts else None)
        target = f"{hub.storage_url}/storage/upload/{ticket}"
        upload = {"href": target}
        if in_parts:
            transfer = "multipart"
            parts = {f"{part + 1:05d}": f"{target}/{part + 1}" for part in range(math.ceil(size / hub.part_size))}
            upload = {
                "href": f"{hub.url}/api/complete_multipart?upload={ticket}",
                "header": {"chunk_size": str(hub.part_size), **parts},
            }
        answer["actions"] = {"upload": upload, "verify": {"href": f"{hub.url}/{name}.git/info/lfs/objects/verify"}}
    return Response.of({"transfer": transfer, "objects": objects})


def upload_of(hub: Hub, ticket: str) -> Upload:
    if ticket not in hub.uploads:
        raise HubError(403, "SignatureDoesNotMatch")
    return hub.uploads[ticket]


@route("PUT", "/storage/upload/(?P<ticket>[0-9a-f]+)(?:/(?P<part>[0-9]+))?")
def receive(hub: Hub, request: Request, ticket: str, part: str) -> Response:
    upload = upload_of(hub, ticket)
    if part and upload.part_size is not None:
        upload.parts[int(part)] = request.body
    else:
        upload.store(request.body)
    return Response(headers={"ETag": f'"{hashlib.md5(request.body).hexdigest()}"'})


@route("POST", "/api/complete_multipart")
def complete(hub: Hub, request: Request) -> Response:
    """Joins the parts, each of which is named with the ETag that its upload gave."""
    upload = upload_of(hub, request.query["upload"][0])
    named = {part["partNumber"]: part["etag"] for part in request.json["parts"]}
    tags = {number: f'"{hashlib.md5(content).hexdigest()}"' for number, content in upload.parts.items()}
    if named != tags:
        raise HubError(422, "the parts that are named are not those that came")
    upload.store(b"".join(content for _, content in sorted(upload.parts.items())))
    return Response.of({})


@route("POST", f"{NAME}.git/info/lfs/objects/verify")
def verify(hub: Hub, request: Request, name: str) -> Response:
    repository = hub.readable(name, request.account)
    content = repository.objects.get(request.json["oid"])
    if content is None:
        raise HubError(404, f"there is no object {request.json['oid']}")
    if len(content) != request.json["size"]:
        raise HubError(422, f"the object has {len(content)} bytes, not {request.json['size']}")
    return Response.of({})


@route("GET", f"{NAME}/resolve/{REVISION}/(?P<path>.+)")
def resolve(hub: Hub, request: Request, name: str, revision: str, path: str) -> Response:
    """A file, or where the storage has it."""
    repository = hub.readable(name, request.account)
    commit = repository.commit(revision)
    facts = {"X-Repo-Commit": commit.oid}
    if path not in commit.files:
        raise HubError(404, "Entry not found", "EntryNotFound", **facts)
    file = commit.files[path]
    if not file.lfs:
        return part_of(file.content, request, facts | {"ETag": f'"{file.oid}"'})
    facts |= {"X-Linked-Size": str(len(file.content)), "X-Linked-ETag": f'"{file.sha256}"'}
    if file.sha256 in repository.xet_hashes:  # for clients with `hf_xet`, which do not follow `Location`
        facts["X-Xet-Hash"] = repository.xet_hashes[file.sha256]
        facts["Link"] = f'<{hub.url}/api/models/{name}/xet-read-token/{commit.oid}>; rel="xet-auth"'
    signature = hub.signature(f"{name}/{file.sha256}")
    location = f"{hub.storage_url}/storage/{name}/{file.sha256}?Signature={signature}"
    return Response(302, b"Found", facts | {"Location": location})


def check_signature(hub: Hub, request: Request, name: str) -> None:
    if request.query.get("Signature") != [hub.signature(name)]:
        raise HubError(403, "AccessDenied")


@route("GET", "/storage/xorbs/(?P<digest>[0-9a-f]{64})")
def deliver_xorb(hub: Hub, request: Request, digest: str) -> Response:
    check_signature(hub, request, digest)
    return part_of(hub.xorbs[digest].data, request, {})


@route("GET", f"/storage{NAME}/(?P<oid>[0-9a-f]{{64}})")
def deliver(hub: Hub, request: Request, name: str, oid: str) -> Response:
    check_signature(hub, request, f"{name}/{oid}")
    return part_of(hub.by_name[name].objects[oid], request, {"ETag": f'"{oid}"'})


def part_of(content: bytes, request: Request, headers: dict[str, str]) -> Response:
    """The range that was asked for, or all.

    Raises:
        HubError: 416 if the range begins behind the end.
    """
    headers = {"Accept-Ranges": "bytes", "Content-Type": "application/octet-stream", **headers}
    match = re.fullmatch(r"bytes=(\d*)-(\d*)", request.headers.get("range", ""))
    if match is None or match.groups() == ("", ""):
        return Response(200, content, headers)
    first, last, size = match[1], match[2], len(content)
    start = int(first) if first else max(size - int(last), 0)
    stop = min(int(last) + 1, size) if first and last else size
    if start >= size:
        raise HubError(416, "Range Not Satisfiable", **{"Content-Range": f"bytes */{size}"})
    headers["Content-Range"] = f"bytes {start}-{stop - 1}/{size}"
    return Response(206, content[start:stop], headers)
