"""Uploads and downloads by the protocol of `hf_xet`, on the storage host.

https://huggingface.co/docs/xet. A file is a sequence of chunks; chunks lie compressed in xorbs; shards say which chunks
make up a file. A client first asks the Hub for a token for the storage, then uploads xorbs, then a shard. Hashes of
xorbs and files are taken as the client tells them; the sha256 of each file is checked.
"""

import hashlib
import math
import re
import secrets
import struct
import time
from dataclasses import dataclass

import lz4
from api import MODEL, REVISION, for_change
from http_types import Request, Response, Routes
from repositories import Hub, HubError, Repository

HASH = "(?P<digest>[0-9a-f]{64})"
LAST = b"\xff" * 32  # where the list of files in a shard ends

route = Routes()


@dataclass
class Xorb:
    """Chunks as they were uploaded, decompressed, and where each begins in `data`."""

    data: bytes
    chunks: list[bytes]
    starts: list[int]


def read_xorb(data: bytes) -> Xorb:
    """Chunks after each other, each with a header of 8 bytes.

    Raises:
        ValueError: if they cannot be read.
    """
    chunks, starts, position = [], [], 0
    while position < len(data) and data[position] == 0:  # the version; a footer begins with a letter
        size, scheme = int.from_bytes(data[position + 1 : position + 4], "little"), data[position + 4]
        length = int.from_bytes(data[position + 5 : position + 8], "little")
        starts.append(position)
        position += 8 + size
        chunk = data[position - size : position]
        chunk = lz4.decompress(chunk) if scheme in (1, 2) else chunk
        if scheme == 2:  # the first bytes of all words, then the second ones, ...
            grouped, chunk, start = chunk, bytearray(length), 0
            for byte in range(4):
                count = len(range(byte, length, 4))
                chunk[byte::4] = grouped[start : start + count]
                start += count
        if len(chunk) != length or scheme > 2:
            raise ValueError(f"chunk {len(chunks)} is damaged")
        chunks.append(bytes(chunk))
    return Xorb(data[:position], chunks, [*starts, position])


def hex_of(digest: bytes) -> str:
    """A hash as text: four numbers of 8 bytes, little-endian in files."""
    return "".join(f"{number:016x}" for number in struct.unpack("<4Q", digest))


def read_shard(data: bytes) -> dict[str, tuple[str, list[tuple[str, int, int]]]]:
    """The files of a shard, by their hash: sha256, and of each segment the xorb and its first and last chunk (not
    included). All records have 48 bytes, 32 of them a hash.
    """
    files, position = {}, 48

    def record() -> tuple[bytes, tuple[int, ...]]:
        nonlocal position
        position += 48
        return data[position - 48 : position - 16], struct.unpack("<4I", data[position - 16 : position])

    while (head := record())[0] != LAST:
        digest, (flags, count, *_) = head
        segments = [(hex_of(xorb), first, last) for xorb, (_, _, first, last) in (record() for _ in range(count))]
        if flags >> 31:  # a record more per segment, to verify it
            position += 48 * count
        if not flags >> 30 & 1:
            raise ValueError("a file without its sha256")
        files[hex_of(digest)] = (hex_of(record()[0]), segments)
    return files


@route("GET", f"{MODEL}/xet-(?P<kind>read|write)-token/{REVISION}")
def give_token(hub: Hub, request: Request, name: str, kind: str, revision: str) -> Response:
    """A token for the storage, of one repository."""
    repository = hub.readable(name, request.account)
    for_pull_request = False
    if kind == "write":
        repository, for_pull_request = for_change(hub, request, name, revision)
    if not for_pull_request:  # the revision of which is not known yet
        repository.commit(revision)
    token, expires = f"xet_{kind}_{secrets.token_hex(8)}", int(time.time()) + 3600
    hub.xet_tokens[token] = repository
    headers = {"X-Xet-Cas-Url": hub.storage_url, "X-Xet-Access-Token": token, "X-Xet-Token-Expiration": str(expires)}
    return Response.of({"casUrl": hub.storage_url, "accessToken": token, "exp": expires}, **headers)


def repository_of(hub: Hub, request: Request, kind: str) -> Repository:
    """The repository of a token for the storage.

    Raises:
        HubError: 401 if it is none, 403 if it only reads and `kind` is `write`.
    """
    token = request.headers.get("authorization", "").removeprefix("Bearer ")
    if token not in hub.xet_tokens:
        raise HubError(401, "no token for the storage")
    if kind == "write" and not token.startswith("xet_write_"):
        raise HubError(403, "this token reads only")
    return hub.xet_tokens[token]


@route("POST", f"/v1/xorbs/default/{HASH}")
def receive_xorb(hub: Hub, request: Request, digest: str) -> Response:
    repository_of(hub, request, "write")
    new = digest not in hub.xorbs
    try:
        hub.xorbs[digest] = read_xorb(request.body)
    except (ValueError, IndexError) as error:
        raise HubError(400, f"not a xorb: {error}") from error
    return Response.of({"was_inserted": new})


@route("POST", "/v1/shards")
def receive_shard(hub: Hub, request: Request) -> Response:
    """Puts files together from chunks that were uploaded before."""
    repository = repository_of(hub, request, "write")
    try:
        files = read_shard(request.body)
    except (ValueError, struct.error) as error:
        raise HubError(400, f"not a shard: {error}") from error
    for digest, (sha256, segments) in files.items():
        missing = {xorb for xorb, _, _ in segments} - set(hub.xorbs)
        if missing:
            raise HubError(400, f"these xorbs were not uploaded: {sorted(missing)}")
        content = b"".join(chunk for xorb, first, last in segments for chunk in hub.xorbs[xorb].chunks[first:last])
        if hashlib.sha256(content).hexdigest() != sha256:
            raise HubError(422, f"the sha256 of what came is not {sha256}")
        repository.objects[sha256] = content
        repository.xet_hashes[sha256] = digest
        hub.xet_files[digest] = segments
    return Response.of({"result": 1})


@route("GET", f"/v1/reconstructions/{HASH}")
def reconstruct(hub: Hub, request: Request, digest: str) -> Response:
    """From which chunks a file, or a range of its bytes, is made, and from where to fetch these."""
    if digest not in repository_of(hub, request, "read").xet_hashes.values():
        raise HubError(404, "there is no such file")
    asked = re.fullmatch(r"bytes=(\d+)-(\d+)", request.headers.get("range", ""))
    start, last = map(int, asked.groups()) if asked else (0, math.inf)
    position, offset, terms, fetch = 0, None, [], {}
    for name, first, end in hub.xet_files[digest]:
        xorb = hub.xorbs[name]
        length = sum(map(len, xorb.chunks[first:end]))
        position += length
        if position <= start or position - length > last:
            continue
        offset = start - (position - length) if offset is None else offset
        terms.append({"hash": name, "unpacked_length": length, "range": {"start": first, "end": end}})
        bytes_ = {"start": xorb.starts[first], "end": xorb.starts[end] - 1}
        url = f"{hub.storage_url}/storage/xorbs/{name}?Signature={hub.signature(name)}"
        fetch.setdefault(name, []).append({"range": {"start": first, "end": end}, "url": url, "url_range": bytes_})
    if not terms:
        raise HubError(416, "Range Not Satisfiable")
    return Response.of({"offset_into_first_range": offset, "terms": terms, "fetch_info": fetch})


@route("POST", "/v1/telemetry")
def take_note(hub: Hub, request: Request) -> Response:
    return Response.of({})
