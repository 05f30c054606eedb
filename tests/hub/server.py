"""A Hub on the loopback interface: what `huggingface_hub` asks for to publish and to load models.

    python -E -s server.py [--content FOLDER] [--part-size BYTES]

`FOLDER/OWNER/NAME/REVISION/...` are the files of public repositories at the start; all state is in memory. The server
prints its address, and ends when its standard input does: it never outlives the process that started it.

It listens on two ports, as the real Hub has a storage host beside it (see `storage.py`). `/control/...` is for tests:
`POST /control/faults` (see `faults.py`), `DELETE /control/faults`, `GET` and `DELETE /control/log`,
`GET` and `DELETE /control/repositories`.
"""

import argparse
import base64
import socket
import struct
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import api
import storage
import xet
from faults import Entry, Fault, Faults, Log
from http_types import Request, Response, Routes
from repositories import ACCOUNTS, Hub, HubError

ON_STORAGE = ("/storage/", "/v1/", "/v2/")

control = Routes()
faults, log = Faults(), Log()
lock = threading.RLock()  # one request changes the state at a time


class Cut(Exception):
    """The connection ends here."""


@control("POST", "/control/faults")
def add_fault(hub: Hub, request: Request) -> Response:
    faults.add(Fault(**request.json))
    return Response.of({})


@control("DELETE", "/control/faults")
def clear_faults(hub: Hub, request: Request) -> Response:
    faults.clear()
    return Response.of({})


@control("GET", "/control/log")
def show_log(hub: Hub, request: Request) -> Response:
    return Response.of(log.as_json())


@control("DELETE", "/control/log")
def clear_log(hub: Hub, request: Request) -> Response:
    log.clear()
    return Response.of({})


@control("GET", "/control/repositories")
def show_repositories(hub: Hub, request: Request) -> Response:
    """Each repository: `private`, `refs`, and per commit its title, message, parent and files (in base64)."""
    return Response.of(
        {
            name: {
                "private": repository.private,
                "refs": repository.refs,
                "commits": {
                    oid: {
                        "title": commit.title,
                        "message": commit.message,
                        "parent": commit.parent,
                        "files": {path: base64.b64encode(file.content).decode() for path, file in commit.files.items()},
                    }
                    for oid, commit in repository.commits.items()
                },
            }
            for name, repository in hub.by_name.items()
        }
    )


@control("DELETE", "/control/repositories")
def clear_repositories(hub: Hub, request: Request) -> Response:
    hub.by_name.clear()
    hub.uploads.clear()
    hub.xorbs.clear()
    return Response.of({})


class Server(ThreadingHTTPServer):
    def shutdown_request(self, request: socket.socket) -> None:
        """Ends a connection; where `handle_request` asked for a reset, without the FIN that would come before its RST.

        A client that read the FIN before the RST came would take a reset for an ordinary end.
        """
        lingering = request.getsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.calcsize("ii"))
        if any(lingering):
            self.close_request(request)
        else:
            super().shutdown_request(request)


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"  # connections stay open, as on the Hub
    disable_nagle_algorithm = True
    hub: Hub
    host: str

    def handle_request(self) -> None:
        if self.path.startswith("/control/"):
            self.send(self.answer(control, self.request_with(self.read_body())))
            return
        authorized = "hf_" in self.headers.get("Authorization", "")
        entry = Entry(self.command, self.path, self.host, authorized, range=self.headers["Range"])
        log.entries.append(entry)
        fault = faults.take(self.command, self.path)
        try:
            self.meet(fault, entry)
        except (Cut, ConnectionError):
            self.close_connection = True
            if fault is not None and fault.reset:
                self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))

    do_GET = do_HEAD = do_POST = do_PUT = do_DELETE = do_PATCH = handle_request

    def meet(self, fault: Fault | None, entry: Entry) -> None:
        """Answers a request in the way that the fault leaves possible."""
        kind = entry.fault = fault.kind if fault else None
        if kind == "cut" and self.command in ("PUT", "POST"):
            self.read_body(entry, limit=fault.after_bytes)
            raise Cut
        request = self.request_with(self.read_body(entry))
        if kind == "status":
            response = Response.of_error(HubError(fault.status, fault.message, **fault.headers))
        else:
            if kind == "slow":
                time.sleep(fault.seconds)
            response = self.answer(storage.route, request)
        if kind == "lost":
            raise Cut
        self.send(response, entry, limit=fault.after_bytes if kind == "cut" else None)

    def request_with(self, body: bytes) -> Request:
        return Request(self.command, self.path, {name.lower(): value for name, value in self.headers.items()}, body)

    def answer(self, routes: Routes, request: Request) -> Response:
        """The answer of one table of routes."""
        try:
            if routes is not control and request.path.startswith(ON_STORAGE) != (self.host == "storage"):
                raise HubError(404, f"{request.path} is not on this host")
            if self.host == "hub" and (token := request.headers.get("authorization", "").removeprefix("Bearer ")):
                request.account = ACCOUNTS.get(token)
                if request.account is None:
                    raise HubError(401, "Invalid credentials in Authorization header")
            with lock:
                return routes.answer(self.hub, request)
        except HubError as error:
            return Response.of_error(error)

    def read_body(self, entry: Entry | None = None, limit: int | None = None) -> bytes:
        """The body, or its first `limit` bytes, counted in `entry`."""
        content = bytearray()
        for piece in self.pieces():
            content += piece
            if entry is not None:
                entry.received = len(content)
            if limit is not None and len(content) >= limit:
                break
        return bytes(content)

    def pieces(self, most: int = 1 << 14):
        """The body in pieces, of a known length or chunked."""
        if self.headers.get("Transfer-Encoding", "").lower() == "chunked":
            while size := int(self.rfile.readline().split(b";")[0], 16):
                while size > 0:
                    piece = self.rfile.read(min(size, most))
                    if not piece:
                        raise Cut
                    size -= len(piece)
                    yield piece
                self.rfile.readline()
            self.rfile.readline()
            return
        left = int(self.headers.get("Content-Length", 0))
        while left > 0:
            piece = self.rfile.read(min(left, most))
            if not piece:
                raise Cut
            left -= len(piece)
            yield piece

    def send(self, response: Response, entry: Entry | None = None, limit: int | None = None) -> None:
        """Sends an answer, or of its body only `limit` bytes."""
        body = b"" if self.command == "HEAD" else response.body
        body = body if limit is None else body[:limit]
        if entry is not None:
            entry.status, entry.sent = response.status, len(body)
        self.send_response(response.status)
        for name, value in {**response.headers, "Content-Length": str(len(response.body))}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)
        if limit is not None:
            raise Cut

    def log_message(self, format: str, *arguments: object) -> None:
        """Nothing on standard error: what was asked is in `/control/log`."""


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--content", type=Path)
    parser.add_argument("--part-size", type=int, default=5_000_000)
    options = parser.parse_args()
    hub = Hub(options.part_size)
    if options.content is not None:
        hub.load(options.content)
    storage.route.routes += xet.route.routes + api.route.routes
    # Two names: to huggingface_hub 1.33 a redirect to another port of a host is one to the Hub itself.
    for host, name in (("storage", "localhost"), ("hub", "127.0.0.1")):
        handler = type("Handler", (Handler,), {"hub": hub, "host": host})
        server = Server(("127.0.0.1", 0), handler)
        setattr(hub, "url" if host == "hub" else "storage_url", f"http://{name}:{server.server_port}")
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
    print(hub.url, flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    main()
