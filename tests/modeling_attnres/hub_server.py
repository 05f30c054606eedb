"""A Hub of one model repository on the loopback interface: the three endpoints that loading a model needs.

    python hub_server.py FOLDER        serves `FOLDER/<revision>/<files>` as the revisions of the repository `lab/model`

It prints its address, and ends when its standard input does: it never outlives the process that started it.
"""

import hashlib
import json
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

REPOSITORY = "lab/model"
REVISIONS = Path(sys.argv[1])


def commit_of(revision: str) -> str:
    """The 40 hex digits that name a revision for good."""
    return hashlib.sha1(revision.encode()).hexdigest()


COMMITS = {commit_of(folder.name): folder for folder in REVISIONS.iterdir()}


class Hub(BaseHTTPRequestHandler):
    def do_HEAD(self) -> None:
        self.answer(with_body=False)

    def do_GET(self) -> None:
        self.answer(with_body=True)

    def answer(self, with_body: bool) -> None:
        status, headers, body = self.find(unquote(urlsplit(self.path).path))
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        if with_body:
            self.wfile.write(body)

    def find(self, path: str) -> tuple[int, dict[str, str], bytes]:
        """Status, headers and body for `/api/models/REPO[/revision/R | /tree/R]` or `/REPO/resolve/R/FILE`."""
        _, _, api = path.partition(f"/api/models/{REPOSITORY}")
        _, _, resolve = path.partition(f"/{REPOSITORY}/resolve/")
        revision = (resolve or api.removeprefix("/revision/").removeprefix("/tree/") or "main").split("/")[0]
        commit = revision if revision in COMMITS else commit_of(revision)
        if REPOSITORY not in path:
            return 404, {"X-Error-Code": "RepoNotFound"}, b""
        if commit not in COMMITS:
            return 404, {"X-Error-Code": "RevisionNotFound"}, b""
        files = sorted(file for file in COMMITS[commit].rglob("*") if file.is_file())
        names = [file.relative_to(COMMITS[commit]).as_posix() for file in files]
        if api.startswith("/tree/"):
            sizes = [file.stat().st_size for file in files]
            tree = [{"type": "file", "path": n, "size": size, "oid": "0" * 40} for n, size in zip(names, sizes)]
            return 200, {"Content-Type": "application/json"}, json.dumps(tree).encode()
        if not resolve:
            info = {"id": REPOSITORY, "sha": commit, "siblings": [{"rfilename": name} for name in names]}
            return 200, {"Content-Type": "application/json"}, json.dumps(info).encode()
        file = COMMITS[commit] / resolve.partition("/")[2]
        if file not in files:
            return 404, {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": commit}, b""
        content = file.read_bytes()
        return 200, {"X-Repo-Commit": commit, "ETag": f'"{hashlib.sha1(content).hexdigest()}"'}, content

    def log_message(self, format: str, *args: object) -> None:
        """Requests are not of interest."""


if __name__ == "__main__":
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    print(f"http://127.0.0.1:{server.server_port}", flush=True)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    sys.stdin.read()
