"""A directory of files shown in a browser: `attnres inspect --serve`."""

import webbrowser
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path


class _Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *args: object) -> None:
        """Say nothing of requests."""


def serve(folder: Path, page: str) -> None:
    """Serve the directory on this machine alone, and open a page of it, until the process is interrupted.

    Raises:
        FileNotFoundError: the page is not in the directory.
    """
    if not (folder / page).is_file():
        raise FileNotFoundError(f"{folder} has no {page}: name the model to inspect, or the --out of an earlier call.")
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(_Quiet, directory=str(folder))) as server:
        address = f"http://127.0.0.1:{server.server_port}/{page}"
        print(f"{address}  (Ctrl-C ends it)", flush=True)
        webbrowser.open(address)
        server.serve_forever()


__all__ = ["serve"]
