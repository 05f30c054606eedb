"""Provide tests of publishing with a Hub, a process that uses it, and a model to publish."""

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from .. import forks
from ..hub.running import Hub

SESSION = Path(__file__).with_name("push_session.py")


@dataclass
class Publisher:
    """A process in `folder` that publishes on `hub`."""

    hub: Hub
    folder: Path
    process: subprocess.Popen

    def __call__(self, *arguments: object, token: str | None = Hub.write_token) -> dict:
        """Run `attnres ARGUMENTS`; return `status`, `out`, `err`, and `waits`, the seconds of each pause."""
        return self._ask({"arguments": [*map(str, arguments)], "token": token})

    def run(self, code: str, token: str | None = Hub.write_token) -> dict:
        """Run Python code, and return the same fields."""
        return self._ask({"code": code, "token": token})

    def card(self, repo: str, revision: str = "main") -> str:
        """Return the model card of a repository."""
        return self.hub.files(repo, revision)["README.md"].decode()

    def commits(self, repo: str) -> list[str]:
        """Return the titles of all commits, oldest first."""
        return self.hub.commits(repo)

    def edit(self, repo: str, path: str, content: str) -> None:
        """Edit a file as a person does in the browser."""
        done = self.run(
            "from huggingface_hub import HfApi\n"
            f"HfApi().upload_file(path_or_fileobj={content.encode()!r}, path_in_repo={path!r}, repo_id={repo!r})"
        )
        assert done["status"] == 0, done["err"]

    def _ask(self, step: dict) -> dict:
        pipe: IO[str] = self.process.stdin
        pipe.write(json.dumps(step) + "\n")
        pipe.flush()
        answer = json.loads(self.process.stdout.readline())
        tokens = (Hub.write_token, Hub.read_token, Hub.other_token)
        assert not [token for token in tokens if token in answer["out"] + answer["err"]], "no output may show a token"
        return answer


@contextmanager
def publisher(folder: Path) -> Iterator[Publisher]:
    """Return a process that publishes on a new Hub, with `folder` as its current directory."""
    with Hub.running() as hub:
        command = [sys.executable, str(SESSION)]
        environment = hub.environ(home=folder / "home")
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        with subprocess.Popen(command, cwd=folder, env=environment, **pipes) as process:
            yield Publisher(hub, folder, process)


def retrofit_of_stories(assets: Path, folder: Path) -> Path:
    """Save a retrofit of a real checkpoint as `model` in `folder`."""
    (folder / "stories").symlink_to(assets / "checkpoints" / "stories260K-hf")
    done = forks.run("-m", "attnres_cli", "convert", "stories", "model", cwd=folder)
    assert done.returncode == 0, done.stderr
    return folder / "model"
