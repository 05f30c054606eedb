"""The Hub of the tests as a process, and what tests ask of it: `with Hub.running() as hub: ...`."""

import base64
import json
import os
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

SERVER = Path(__file__).with_name("server.py")
WRITE_TOKEN = "hf_write_of_me"
READ_TOKEN = "hf_read_of_me"
OTHER_TOKEN = "hf_write_of_other"


class Hub:
    """A Hub on this machine. The user `me`, who belongs to the organisation `lab`, has a token that writes and one that
    reads; the user `other` has one that writes.

    Attributes:
        url: its address.
        pid: the id of its process.
    """

    write_token = WRITE_TOKEN
    read_token = READ_TOKEN
    other_token = OTHER_TOKEN

    def __init__(self, url: str, pid: int):
        self.url = url
        self.pid = pid

    @classmethod
    @contextmanager
    def running(cls, content: Path | None = None, part_size: int = 5_000_000) -> Iterator["Hub"]:
        """A Hub as long as the context lasts.

        Args:
            content: a folder whose files `OWNER/NAME/REVISION/...` are there from the start, in public repositories.
            part_size: in bytes; larger objects are uploaded in parts of this size.
        """
        command = [sys.executable, "-E", "-s", str(SERVER), "--part-size", str(part_size)]
        command += ["--content", str(content)] if content is not None else []
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
            yield cls(process.stdout.readline().strip(), process.pid)  # leaving closes its input, which ends it

    def environ(self, token: str | None = None, home: Path | str | None = None, xet: bool = False) -> dict[str, str]:
        """The environment of a process that uses this Hub.

        Args:
            token: what the process finds as its token; None: it has none.
            home: where it keeps its cache; None: where `HF_HOME` is by default.
            xet: whether it transfers objects by `hf_xet`, as it does by default with the real Hub, or by plain HTTP.
        """
        environment = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("HF_", "HUGGING", "TRANSFORMERS_")) and not name.lower().endswith("_proxy")
        }
        environment |= {"HF_ENDPOINT": self.url, "HF_HUB_DISABLE_XET": "0" if xet else "1"}
        environment |= {"HF_HUB_DISABLE_TELEMETRY": "1"}
        environment |= {"NO_PROXY": "127.0.0.1,localhost", "no_proxy": "127.0.0.1,localhost"}
        environment |= {"HF_TOKEN": token} if token is not None else {}
        return environment | ({"HF_HOME": str(home)} if home is not None else {})

    def fail(self, kind: str, path: str = "", **options: object) -> None:
        """Makes a coming request fail; see `Fault` in `faults.py` for kinds and options."""
        self._control("POST", "faults", {"kind": kind, "path": path, **options})

    def heal(self) -> None:
        """Takes back all faults that have not happened."""
        self._control("DELETE", "faults")

    def log(self, method: str | None = None, path: str = "") -> list[dict]:
        """The requests so far with this method and this text in their path; see `Entry` in `faults.py`."""
        entries = self._control("GET", "log")
        return [entry for entry in entries if method in (None, entry["method"]) and path in entry["path"]]

    def forget(self) -> None:
        """Empties the log."""
        self._control("DELETE", "log")

    def clear(self) -> None:
        """Back to the start: no repositories, no faults, no log."""
        self._control("DELETE", "repositories")
        self.heal()
        self.forget()

    def repositories(self) -> dict[str, dict]:
        """Each repository by its name: `private`, `refs` (name to commit), `commits` (`title`, `message`, `parent`)."""
        return self._control("GET", "repositories")

    def files(self, repository: str, revision: str = "main") -> dict[str, bytes]:
        """The files of a branch, tag, pull request (`refs/pr/1`) or commit, by path."""
        state = self.repositories()[repository]
        refs = state["refs"]
        names = (f"refs/heads/{revision}", f"refs/tags/{revision}", revision)
        oid = next((refs[name] for name in names if name in refs), revision)
        return {path: base64.b64decode(content) for path, content in state["commits"][oid]["files"].items()}

    def _control(self, method: str, what: str, body: object = None):
        request = urllib.request.Request(
            f"{self.url}/control/{what}", method=method, data=None if body is None else json.dumps(body).encode()
        )
        with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=30) as response:
            return json.load(response)
