"""Show the report of an inspection in a browser: `attnres inspect --serve`.

The server is for one user on one machine. Other machines cannot reach it, but any page in the user's browser can send
it requests, even under the page's own host name (DNS rebinding). So the server answers only requests for its own
address, and serves only the files of the report, not other files in the folder.
"""

import webbrowser
from contextlib import suppress
from functools import partial
from http import HTTPStatus
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

from attnres.analysis.report_files import NUMBERS, PAGE, report_files

_HEADERS = {
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",  # the next report may have the same address
}


class _Handler(SimpleHTTPRequestHandler):
    """A handler of requests: it answers `GET` and `HEAD` for the files of a report."""

    server: "ReportServer"

    def send_head(self) -> Any:
        """Send the headers and return the opened file, or refuse a request for another host or file."""
        name = self.path.partition("?")[0].removeprefix("/") or PAGE
        if self.headers.get("Host", "").lower() not in self.server.hosts or name not in self.server.names:
            self.send_error(HTTPStatus.NOT_FOUND)
            return None
        self.path = f"/{name}"
        return super().send_head()

    def end_headers(self) -> None:
        """Add the headers of every answer."""
        for name, value in _HEADERS.items():
            self.send_header(name, value)
        super().end_headers()

    def copyfile(self, source: Any, outputfile: Any) -> None:
        """Send a file. It is no error if the browser is closed meanwhile."""
        with suppress(ConnectionError):
            super().copyfile(source, outputfile)

    def log_message(self, *args: object) -> None:
        """Print nothing about requests."""


class ReportServer(ThreadingHTTPServer):
    """A server of the report in a folder, on a free port of this machine.

    Args:
        folder: The directory that `attnres inspect` has written.

    Raises:
        FileNotFoundError: The folder holds no report.
    """

    def __init__(self, folder: Path) -> None:
        if not (folder / PAGE).is_file():
            raise FileNotFoundError(
                f"{folder} has no {PAGE}: name the model to inspect, or the --out of an earlier call."
            )
        # A link may lead to any file.
        self.names = {name for name, path in report_files(folder).items() if path.is_file() and not path.is_symlink()}
        if PAGE not in self.names:
            raise FileNotFoundError(
                f"{folder} is no report of `attnres inspect`: its {NUMBERS} is missing or of another program, or its "
                f"{PAGE} is a link."
            )
        super().__init__(("127.0.0.1", 0), partial(_Handler, directory=str(folder)))
        self.hosts = {f"{name}:{self.server_port}" for name in ("localhost", "127.0.0.1")}


def serve(folder: Path) -> None:
    """Serve a report to this machine alone, and open its page in a browser. Return only by an exception.

    Args:
        folder: The directory that `attnres inspect` has written.

    Raises:
        FileNotFoundError: The folder holds no report.
    """
    with ReportServer(folder) as server:
        address = f"http://127.0.0.1:{server.server_port}/{PAGE}"
        print(f"{address}  (Ctrl-C ends it)", flush=True)
        # A text browser keeps `open` waiting until it is left, and needs answers meanwhile.
        Thread(target=webbrowser.open, args=(address,), daemon=True).start()
        server.serve_forever()


__all__ = ["ReportServer", "serve"]
