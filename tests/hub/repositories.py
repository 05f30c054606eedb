"""What the Hub of the tests holds: accounts with their tokens, and repositories of immutable commits."""

import functools
import hashlib
import json
import secrets
from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

GIT_ATTRIBUTES = "".join(
    f"*.{ending} filter=lfs diff=lfs merge=lfs -text\n"
    for ending in ("bin", "gguf", "gz", "npy", "npz", "onnx", "parquet", "pkl", "pt", "pth", "safetensors", "zip")
).encode()
LARGE = 10_000_000  # bytes; from here on a file is kept as an object, whatever its name


class HubError(Exception):
    """An answer other than success: its status, its message and the code by which clients tell causes apart."""

    def __init__(self, status: int, message: str, code: str | None = None, **headers: str):
        super().__init__(message)
        self.status = status
        self.message = message
        self.headers = headers | ({"X-Error-Code": code} if code else {})


@dataclass(frozen=True)
class Account:
    """Who holds a token, and what the token allows: `role` is `read` or `write`."""

    name: str
    role: str
    organizations: tuple[str, ...] = ()

    def owns(self, namespace: str) -> bool:
        return namespace in (self.name, *self.organizations)


ACCOUNTS = {
    "hf_write_of_me": Account("me", "write", ("lab",)),
    "hf_read_of_me": Account("me", "read", ("lab",)),
    "hf_write_of_other": Account("other", "write"),
}


@dataclass(frozen=True)
class File:
    """A file of a commit; `lfs` says that git holds only a pointer to it."""

    content: bytes
    lfs: bool

    @functools.cached_property
    def sha256(self) -> str:
        return hashlib.sha256(self.content).hexdigest()

    @property
    def pointer(self) -> bytes:
        lines = ["version https://git-lfs.github.com/spec/v1", f"oid sha256:{self.sha256}", f"size {len(self.content)}"]
        return "".join(f"{line}\n" for line in lines).encode()

    @functools.cached_property
    def oid(self) -> str:
        """The name that git gives to the blob."""
        blob = self.pointer if self.lfs else self.content
        return hashlib.sha1(b"blob %d\0" % len(blob) + blob).hexdigest()

    @property
    def etag(self) -> str:
        return self.sha256 if self.lfs else self.oid

    @property
    def pointer_info(self) -> dict:
        return {"size": len(self.content), "pointerSize": len(self.pointer)}


@dataclass(frozen=True)
class Commit:
    parent: str | None
    title: str
    message: str
    author: str
    files: dict[str, File]
    date: str = field(default_factory=lambda: datetime.now(UTC).isoformat(timespec="milliseconds")[:23] + "Z")

    @functools.cached_property
    def oid(self) -> str:
        tree = sorted((path, file.oid) for path, file in self.files.items())
        text = json.dumps([self.parent, self.title, self.message, self.author, self.date, tree])
        return hashlib.sha1(text.encode()).hexdigest()


def as_object(path: str, size: int, sample: bytes) -> bool:
    """Whether the Hub keeps a file as an object of its own: by its name, its size, or for not being text."""
    endings = {line.split()[0].removeprefix("*") for line in GIT_ATTRIBUTES.decode().splitlines()}
    return Path(path).suffix in endings or size >= LARGE or b"\0" in sample


class Repository:
    """A model repository: `refs` name commits (`refs/heads/main`), `objects` holds what was uploaded, by sha256."""

    def __init__(self, name: str, private: bool = False):
        self.name = name
        self.private = private
        self.refs: dict[str, str] = {}
        self.commits: dict[str, Commit] = {}
        self.objects: dict[str, bytes] = {}
        self.xet_hashes: dict[str, str] = {}  # of the objects that came by `hf_xet`, by their sha256
        self.pull_requests: list[dict] = []

    @property
    def namespace(self) -> str:
        return self.name.split("/")[0]

    def ref(self, revision: str) -> str:
        """The full name of a branch, tag or pull request.

        Raises:
            HubError: 404 if there is none of this name.
        """
        for name in (f"refs/heads/{revision}", f"refs/tags/{revision}", revision):
            if name in self.refs:
                return name
        raise HubError(404, f"Invalid rev id: {revision}", "RevisionNotFound")

    def commit(self, revision: str) -> Commit:
        """The commit that a branch, a tag, a pull request or a commit id names.

        Raises:
            HubError: 404 if there is none.
        """
        return self.commits[revision if revision in self.commits else self.refs[self.ref(revision)]]

    def add(self, ref: str, commit: Commit) -> Commit:
        """Stores a commit as the newest of `ref`."""
        for file in commit.files.values():
            if file.lfs:
                self.objects[file.sha256] = file.content
        self.commits[commit.oid] = commit
        self.refs[ref] = commit.oid
        return commit

    def history(self, revision: str) -> Iterable[Commit]:
        """A commit and those before it, newest first."""
        commit: Commit | None = self.commit(revision)
        while commit is not None:
            yield commit
            commit = self.commits[commit.parent] if commit.parent else None

    def open_pull_request(self, title: str, author: str, base: Commit) -> dict:
        """A new pull request, whose reference `refs/pr/N` stands at `base`."""
        number = len(self.pull_requests) + 1
        self.refs[f"refs/pr/{number}"] = base.oid
        created = datetime.now(UTC).isoformat(timespec="milliseconds")[:23] + "Z"
        self.pull_requests.append({"num": number, "title": title, "author": author, "createdAt": created})
        return self.pull_requests[-1]


class Hub:
    """All repositories, and who may do what with them.

    Args:
        part_size: in bytes; larger objects are uploaded in parts of this size.
    """

    def __init__(self, part_size: int):
        self.by_name: dict[str, Repository] = {}
        self.part_size = part_size
        self.uploads: dict[str, object] = {}  # those that were asked for, by the ticket in their address
        self.xet_tokens: dict[str, Repository] = {}
        self.xorbs: dict[str, object] = {}
        self.xet_files: dict[str, list[tuple[str, int, int]]] = {}
        self.secret = secrets.token_hex(16)
        self.url = self.storage_url = ""  # known once the server listens

    def signature(self, name: str) -> str:
        """What an address of the storage carries instead of a token."""
        return hashlib.sha256(f"{self.secret}{name}".encode()).hexdigest()

    def create(self, name: str, private: bool, author: str) -> Repository:
        """A repository whose branch `main` holds `.gitattributes`."""
        repository = self.by_name[name] = Repository(name, private)
        files = {".gitattributes": File(GIT_ATTRIBUTES, lfs=False)}
        repository.add("refs/heads/main", Commit(None, "initial commit", "", author, files))
        return repository

    def load(self, folder: Path) -> None:
        """The files `folder/OWNER/NAME/REVISION/...` as branches of public repositories."""
        for revision in sorted(folder.glob("*/*/*/")):
            name = revision.parent.relative_to(folder).as_posix()
            repository = self.by_name.setdefault(name, Repository(name))
            files = {}
            for path in (path for path in revision.rglob("*") if path.is_file()):
                content = path.read_bytes()
                files[path.relative_to(revision).as_posix()] = File(
                    content, as_object(path.name, len(content), content[:512])
                )
            repository.add(f"refs/heads/{revision.name}", Commit(None, "initial commit", "", "me", files))

    def readable(self, name: str, account: Account | None) -> Repository:
        """The repository of a name, as `account` sees it.

        Raises:
            HubError: 401 without a token, 404 with one, if there is none that the account may read.
        """
        repository = self.by_name.get(name)
        if repository and (not repository.private or (account and account.owns(repository.namespace))):
            return repository
        if account is None:  # the Hub does not tell a stranger which repositories exist
            raise HubError(401, "Invalid username or password.", "RepoNotFound")
        raise HubError(404, "Repository not found", "RepoNotFound")

    def writable(self, name: str, account: Account | None, revision: str = "main") -> Repository:
        """As `readable`, for a change of `revision`; pull requests may be changed by who opened them.

        Raises:
            HubError: 401 without a token; 403 with one that only reads, or in the namespace of others.
        """
        repository = self.readable(name, account)
        own = {
            f"refs/pr/{pull['num']}" for pull in repository.pull_requests if account and pull["author"] == account.name
        }
        may_write_to(None if revision in own else repository.namespace, account)
        return repository


def may_write_to(namespace: str | None, account: Account | None) -> Account:
    """The account, if it may write to the namespace (None: to any).

    Raises:
        HubError: 401 without an account, 403 otherwise.
    """
    if account is None:
        raise HubError(401, "Invalid username or password.")
    if account.role != "write":
        raise HubError(403, "Forbidden: this token reads only, and this request needs one that writes")
    if namespace is not None and not account.owns(namespace):
        raise HubError(403, f'Forbidden: {account.name} has no right to write under the namespace "{namespace}"')
    return account
