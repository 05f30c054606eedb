"""Run the Hub of the tests as a server in this process: `with Hub.running() as hub: ...`."""

import json
import os
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

from .api import Request, Response, answer
from .repositories import HubError, Repositories


@dataclass
class Fault:
    """A failure of the next requests whose path matches.

    Attributes:
        kind: `status`: the request is answered with `status`, `headers` and `message`, and changes nothing.
            `cut`: the connection ends after `after_bytes` bytes of the body, and the request changes nothing.
            `lost`: the request is carried out, and the connection ends before the answer.
            `call`: `function()` is called, then the request is answered.
        path: A regular expression, which is searched in the path with its query.
        method: The method of the requests; None for all methods.
        times: The number of requests that fail; None for all.
        skip: The number of matching requests that succeed before.
    """

    kind: str
    path: str = ""
    method: str | None = None
    times: int | None = 1
    skip: int = 0
    status: int = 500
    headers: dict[str, str] = field(default_factory=dict)
    message: str = "Internal Error - We're working hard to fix this as soon as possible!"
    after_bytes: int = 0
    function: Callable[[], object] | None = None

    def __post_init__(self):
        if self.kind not in ("status", "cut", "lost", "call"):
            raise ValueError(f"no such kind of fault: {self.kind}")


class Hub:
    """A Hub on this machine.

    The user `me`, who belongs to the organisations `lab` and `closed`, has a token that writes and one that reads; the
    user `other` has one that writes. New repositories of `closed` are private by default.

    Attributes:
        url: The address.
        repositories: The repositories by name.
    """

    write_token = "hf_write_of_me"
    read_token = "hf_read_of_me"
    other_token = "hf_write_of_other"

    def __init__(self, content: Path | None = None):
        self.repositories = Repositories()
        if content is not None:
            self.repositories.load(content)
        self._lock = threading.Lock()  # one request changes repositories, faults or the log at a time
        self._faults: list[Fault] = []
        self._log: list[dict] = []
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": self}))
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    @classmethod
    @contextmanager
    def running(cls, content: Path | None = None) -> Iterator["Hub"]:
        """Run a Hub as long as the context lasts.

        Args:
            content: A folder of files `OWNER/NAME/REVISION/...`, which public repositories hold from the start.
        """
        hub = cls(content)
        threading.Thread(target=hub._server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
        try:
            yield hub
        finally:
            hub.stop()

    def stop(self) -> None:
        """Refuse connections from now on. A second call does nothing."""
        self._server.shutdown()
        self._server.server_close()

    def environ(self, token: str | None = None, home: Path | str | None = None) -> dict[str, str]:
        """Return the environment of a process that uses this Hub.

        Args:
            token: The token of the process, if it has one.
            home: The folder of its cache; the default of `HF_HOME` otherwise.
        """
        environment = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("HF_", "HUGGING", "TRANSFORMERS_")) and not name.lower().endswith("_proxy")
        }
        environment |= {"HF_ENDPOINT": self.url, "HF_HUB_DISABLE_XET": "1", "HF_HUB_DISABLE_TELEMETRY": "1"}
        environment |= {"NO_PROXY": "127.0.0.1,localhost", "no_proxy": "127.0.0.1,localhost"}
        environment |= {"HF_TOKEN": token} if token is not None else {}
        return environment | ({"HF_HOME": str(home)} if home is not None else {})

    def fail(self, kind: str, path: str = "", **options: object) -> None:
        """Make a coming request fail; see `Fault` for kinds and options."""
        with self._lock:
            self._faults.append(Fault(kind, path, **options))

    def before(self, path: str, function: Callable[[], object]) -> None:
        """Call a function before the next request for this path is answered. The function may use the Hub."""
        self.fail("call", path, function=function)

    def heal(self) -> None:
        """Remove all faults."""
        with self._lock:
            self._faults.clear()

    def log(self, method: str | None = None, path: str = "") -> list[dict]:
        """Return the requests so far with this method, and with this text in their path.

        Each has its `method`, its `path` with the query, the number of bytes of its body that were `received`, and the
        `status` of its answer, which is None without an answer.
        """
        return [entry for entry in self._log if method in (None, entry["method"]) and path in entry["path"]]

    def forget(self) -> None:
        """Empty the log."""
        self._log.clear()

    def clear(self) -> None:
        """Go back to the start: no repositories, no faults, no log."""
        self.repositories.clear()
        self.heal()
        self.forget()

    def commits(self, repository: str) -> list[str]:
        """Return the titles of all commits, oldest first."""
        return [commit.title for commit in self.repositories[repository].commits.values()]

    def files(self, repository: str, revision: str = "main") -> dict[str, bytes]:
        """Return the files of a branch, pull request (`refs/pr/1`) or commit, by path."""
        files = self.repositories[repository].commit(revision).files
        return {path: file.content for path, file in files.items()}

    def _take_fault(self, method: str, path: str) -> Fault | None:
        """Return the fault of this request, if it has one."""
        for fault in self._faults:
            if fault.method in (None, method) and re.search(fault.path, path):
                if fault.skip > 0:
                    fault.skip -= 1
                    continue
                if fault.times is not None:
                    fault.times -= 1
                    if fault.times == 0:
                        self._faults.remove(fault)
                return fault
        return None


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"  # connections stay open, as on the Hub
    disable_nagle_algorithm = True
    hub: Hub

    def handle(self) -> None:
        """Serve a connection until the client closes it."""
        with suppress(ConnectionError):
            super().handle()

    def handle_request(self) -> None:
        """Log a request, and answer it unless its fault prevents that."""
        hub = self.hub
        entry = {"method": self.command, "path": self.path, "received": 0, "status": None}
        with hub._lock:
            hub._log.append(entry)
            fault = hub._take_fault(self.command, self.path)
        kind = fault.kind if fault else None
        body = self.read_body(limit=fault.after_bytes if kind == "cut" else None)
        entry["received"] = len(body)
        self.close_connection = kind in ("cut", "lost")
        if kind == "cut":
            return
        if kind == "status":
            response = Response.of(HubError(fault.status, fault.message, **fault.headers))
        else:
            if kind == "call":
                fault.function()
            address = urlsplit(self.path)
            request = Request(hub.url, self.command, address.path, parse_qs(address.query), body)
            with hub._lock:
                token = self.headers.get("Authorization", "").removeprefix("Bearer ")
                response = answer(hub.repositories, request, token)
        if kind != "lost":
            entry["status"] = response.status
            self.send(response)

    do_GET = do_HEAD = do_POST = do_PUT = handle_request

    def read_body(self, limit: int | None) -> bytes:
        """Read the body, or at least its first `limit` bytes. It has a known length or comes in chunks."""
        if self.headers.get("Transfer-Encoding", "").lower() != "chunked":
            length = int(self.headers.get("Content-Length", 0))
            return self.rfile.read(length if limit is None else min(length, limit))
        body = b""
        while (limit is None or len(body) < limit) and (size := int(self.rfile.readline(), 16)):
            body += self.rfile.read(size)
            self.rfile.readline()
        if limit is None:
            self.rfile.readline()
        return body

    def send(self, response: Response) -> None:
        """Send an answer. For a HEAD request, leave out the body."""
        is_bytes = isinstance(response.content, bytes)
        body = response.content if is_bytes else json.dumps(response.content).encode()
        self.send_response(response.status)
        kind = "application/octet-stream" if is_bytes else "application/json; charset=utf-8"
        for name, value in {"Content-Type": kind, "Content-Length": str(len(body)), **response.headers}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, format: str, *arguments: object) -> None:
        """Write nothing: `Hub.log` has the requests."""
