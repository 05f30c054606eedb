"""Show the report of an inspection in a browser: `attnres inspect --serve`.

The server is for one user on one machine. Other machines cannot reach it, but any page in the user's browser can send
it requests, even under the page's own host name (DNS rebinding). So the server answers only requests for its own
address, and serves only the files of the report, not other files in the folder.
"""

import os
import shutil
import stat
import webbrowser
from collections.abc import Generator
from contextlib import contextmanager
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import IO

from attnres.analysis.report_files import NUMBERS, PAGE, report_files, report_names

_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".json": "application/json",
    ".csv": "text/csv; charset=utf-8",
    ".png": "image/png",
    ".svg": "image/svg+xml",
}
_HEADERS = {
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",  # the next report may have the same address
}
# The page itself contains a stricter policy with the hashes of its scripts. SVG files could contain scripts as well.
_POLICIES = {".html": "frame-ancestors 'none'"}
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; frame-ancestors 'none'; sandbox"


class _Handler(BaseHTTPRequestHandler):
    """A handler of requests: it answers `GET` and `HEAD` for the files of a report."""

    server: "ReportServer"
    server_version, sys_version = "attnres", ""
    timeout = 30  # seconds that a connection may wait before it sends a request

    def do_GET(self) -> None:
        """Answer with a file."""
        self._answer(with_content=True)

    def do_HEAD(self) -> None:
        """Answer with the headers of a file."""
        self._answer(with_content=False)

    def _refuse(self) -> None:
        self._send(HTTPStatus.METHOD_NOT_ALLOWED, {"Allow": "GET, HEAD"})

    do_POST = do_PUT = do_PATCH = do_DELETE = do_OPTIONS = do_CONNECT = do_TRACE = _refuse

    def _answer(self, with_content: bool) -> None:
        """Answer a request for a file of the report, or with the status that rejects it."""
        # Exactly one `Host` header must name this server.
        if [host.lower() for host in self.headers.get_all("Host", [])] not in self.server.hosts:
            self._send(HTTPStatus.MISDIRECTED_REQUEST)
            return
        name = self.path.partition("?")[0].removeprefix("/")
        if name == "":
            self._send(HTTPStatus.FOUND, {"Location": f"/{PAGE}"})
            return
        if not self.path.startswith("/") or name not in report_names():
            self._send(HTTPStatus.NOT_FOUND)
            return
        try:
            with _opened(self.server.folder / name) as file:
                suffix = Path(name).suffix
                headers = {
                    "Content-Type": _TYPES[suffix],
                    "Content-Length": str(os.fstat(file.fileno()).st_size),
                    "Content-Security-Policy": _POLICIES.get(suffix, _POLICY),
                }
                self._send(HTTPStatus.OK, headers)
                if with_content:
                    shutil.copyfileobj(file, self.wfile)
        except (ConnectionError, TimeoutError):
            self.close_connection = True  # the browser was closed
        except OSError:
            self._send(HTTPStatus.NOT_FOUND)

    def _send(self, status: HTTPStatus, headers: dict[str, str] | None = None) -> None:
        """Send a status and the headers of every answer, with these headers added."""
        self.send_response(status)
        for name, value in ({"Content-Length": "0"} | _HEADERS | (headers or {})).items():
            self.send_header(name, value)
        self.end_headers()

    def log_message(self, *args: object) -> None:
        """Print nothing about requests."""


class ReportServer(ThreadingHTTPServer):
    """A server of the report in a folder, on a free port.

    Args:
        folder: The directory that `attnres inspect` has written.
        host: The address to listen on. A request may name this address or a name of this machine for itself.

    Raises:
        FileNotFoundError: The folder holds no report, or its page is a link.
    """

    def __init__(self, folder: Path, host: str = "127.0.0.1") -> None:
        page = folder / PAGE
        if not page.is_file():
            raise FileNotFoundError(
                f"{folder} has no {PAGE}: name the model to inspect, or the --out of an earlier call."
            )
        if not report_files(folder):
            raise FileNotFoundError(
                f"{folder} is no report of `attnres inspect`: its {NUMBERS} is missing, or of another program."
            )
        if page.is_symlink():
            raise FileNotFoundError(
                f"{page} is a link, and links are not followed: name the folder of {page.resolve()}."
            )
        self.folder = folder
        super().__init__((host, 0), _Handler)
        names = ("localhost", "127.0.0.1", "[::1]", f"[{host}]" if ":" in host else host)
        self.hosts = [[f"{name}:{self.server_port}"] for name in names]  # lists of one, like the header's values


@contextmanager
def _opened(path: Path) -> Generator[IO[bytes]]:
    """Open a regular file to read. Raise OSError for any other file and for a link, which may lead anywhere."""
    # Without O_NONBLOCK, opening a pipe would wait until another process writes to it.
    descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0))
    with os.fdopen(descriptor, "rb") as file:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise FileNotFoundError(path)
        yield file


def serve(folder: Path) -> None:
    """Serve a report to this machine alone, and open its page in a browser. Return only by an exception.

    Args:
        folder: The directory that `attnres inspect` has written.

    Raises:
        FileNotFoundError: The folder holds no report, or its page is a link.
    """
    with ReportServer(folder) as server:
        address = f"http://127.0.0.1:{server.server_port}/{PAGE}"
        print(f"{address}  (Ctrl-C ends it)", flush=True)
        # A text browser keeps `open` waiting until it is left, and needs answers meanwhile.
        Thread(target=webbrowser.open, args=(address,), daemon=True).start()
        server.serve_forever()


__all__ = ["ReportServer", "serve"]
