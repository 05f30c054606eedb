"""Hold the accounts and repositories of the Hub of the tests. Commits never change."""

import functools
import hashlib
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

OBJECT_ENDINGS = (".bin", ".gguf", ".npz", ".onnx", ".parquet", ".pt", ".pth", ".safetensors", ".zip")
OBJECT_SIZE = 10_000_000  # bytes


class HubError(Exception):
    """An error as the Hub answers it. Clients tell causes apart by `code`, which becomes the header `X-Error-Code`."""

    def __init__(self, status: int, message: str, code: str | None = None, **headers: str):
        super().__init__(message)
        self.status = status
        self.message = message
        self.headers = headers | ({"X-Error-Code": code} if code else {})


@dataclass(frozen=True)
class Account:
    """The owner of a token, and whether the token may write."""

    name: str
    may_write: bool
    organisations: tuple[str, ...] = ()

    def owns(self, namespace: str) -> bool:
        """Return whether this account, or one of its organisations, has this name."""
        return namespace in (self.name, *self.organisations)


ACCOUNTS = {
    "hf_write_of_me": Account("me", may_write=True, organisations=("lab", "closed")),
    "hf_read_of_me": Account("me", may_write=False, organisations=("lab", "closed")),
    "hf_write_of_other": Account("other", may_write=True),
}
# Organisations whose new repositories are private unless a request says otherwise.
PRIVATE_BY_DEFAULT = ("closed",)


def require_writer(account: Account | None, namespace: str | None = None) -> Account:
    """Return the account if it may write to `namespace`, which is the account's by default.

    Raises:
        HubError: 401 without an account; 403 if the token only reads, or the namespace belongs to others.
    """
    if account is None:
        raise HubError(401, "Invalid username or password.")
    if not account.may_write:
        raise HubError(403, "Forbidden: this token reads only, and this request needs one that writes")
    if namespace is not None and not account.owns(namespace):
        raise HubError(403, f'Forbidden: {account.name} has no right to write under the namespace "{namespace}"')
    return account


@dataclass(frozen=True)
class File:
    """A file of a commit. An object (`is_object`) is uploaded by LFS, another file within the commit."""

    content: bytes
    is_object: bool

    @functools.cached_property
    def etag(self) -> str:
        """The hash by which clients recognise the content: sha256 of an object, else git's name for the blob."""
        if self.is_object:
            return hashlib.sha256(self.content).hexdigest()
        return hashlib.sha1(b"blob %d\0" % len(self.content) + self.content).hexdigest()


def is_object(path: str, size: int, sample: bytes) -> bool:
    """Return whether the Hub keeps a file as an object: for its name, its size, or because it is not text."""
    return Path(path).suffix in OBJECT_ENDINGS or size >= OBJECT_SIZE or b"\0" in sample


def now() -> str:
    """Return the time in the Hub's format."""
    return datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


@dataclass(frozen=True)
class Commit:
    """All files of a repository at one time, with the parent commit, title and date."""

    parent: str | None
    title: str
    files: dict[str, File]
    date: str = field(default_factory=now)

    @functools.cached_property
    def oid(self) -> str:
        """The id of the commit, which depends on all that it holds."""
        tree = sorted((path, file.etag) for path, file in self.files.items())
        return hashlib.sha1(repr((self.parent, self.title, self.date, tree)).encode()).hexdigest()


@dataclass
class Repository:
    """A model repository: `refs` name commits (`refs/heads/main`), `objects` holds uploaded bytes by their sha256."""

    name: str
    private: bool = False
    refs: dict[str, str] = field(default_factory=dict)
    commits: dict[str, Commit] = field(default_factory=dict)
    objects: dict[str, bytes] = field(default_factory=dict)
    authors_of_pull_requests: list[str] = field(default_factory=list)

    @property
    def namespace(self) -> str:
        """The account or organisation that owns it."""
        return self.name.split("/")[0]

    def ref(self, revision: str) -> str:
        """Return the full name of a branch or pull request.

        Raises:
            HubError: 404 if no branch or pull request has this name.
        """
        for name in (f"refs/heads/{revision}", revision):
            if name in self.refs:
                return name
        raise HubError(404, f"Invalid rev id: {revision}", "RevisionNotFound")

    def commit(self, revision: str) -> Commit:
        """Return the commit that a branch, a pull request or a commit id names.

        Raises:
            HubError: 404 if the revision does not exist.
        """
        return self.commits[revision if revision in self.commits else self.refs[self.ref(revision)]]

    def add(self, ref: str, commit: Commit) -> None:
        """Store a commit as the newest of `ref`."""
        self.commits[commit.oid] = commit
        self.refs[ref] = commit.oid

    def open_pull_request(self, author: str) -> str:
        """Return the reference of a new pull request, `refs/pr/N`, which has no commit yet."""
        self.authors_of_pull_requests.append(author)
        return f"refs/pr/{len(self.authors_of_pull_requests)}"

    def is_pull_request_of(self, account: Account | None, revision: str) -> bool:
        """Return whether `revision` is a pull request that `account` has opened."""
        opened = enumerate(self.authors_of_pull_requests, 1)
        return account is not None and revision in {f"refs/pr/{n}" for n, author in opened if author == account.name}


class Repositories(dict[str, Repository]):
    """All repositories by name, with checks of who may read and change them."""

    def create(self, name: str, private: bool = False) -> None:
        """Create a repository whose branch `main` holds `.gitattributes`."""
        repository = self[name] = Repository(name, private)
        attributes = "".join(f"*{ending} filter=lfs diff=lfs merge=lfs -text\n" for ending in OBJECT_ENDINGS)
        files = {".gitattributes": File(attributes.encode(), is_object=False)}
        repository.add("refs/heads/main", Commit(None, "initial commit", files))

    def load(self, folder: Path) -> None:
        """Add public repositories: the files `folder/OWNER/NAME/REVISION/...` become branches."""
        for branch in sorted(folder.glob("*/*/*/")):
            name = branch.parent.relative_to(folder).as_posix()
            repository = self.setdefault(name, Repository(name))
            files = {}
            for path in (path for path in branch.rglob("*") if path.is_file()):
                content = path.read_bytes()
                file = File(content, is_object(path.name, len(content), content[:512]))
                files[path.relative_to(branch).as_posix()] = file
            repository.add(f"refs/heads/{branch.name}", Commit(None, "initial commit", files))

    def readable(self, name: str, account: Account | None) -> Repository:
        """Return a repository that `account` may read.

        Raises:
            HubError: The repository does not exist or is private: 401 without an account, 404 with one. The Hub does
                not reveal which repositories exist.
        """
        repository = self.get(name)
        if repository and (not repository.private or (account and account.owns(repository.namespace))):
            return repository
        if account is None:
            raise HubError(401, "Invalid username or password.", "RepoNotFound")
        raise HubError(404, "Repository not found", "RepoNotFound")

    def writable(self, name: str, account: Account | None, revision: str = "main") -> Repository:
        """Return a repository whose `revision` the account may change.

        Raises:
            HubError: As `readable` and `require_writer`. The account that opened a pull request may change it.
        """
        repository = self.readable(name, account)
        require_writer(account, None if repository.is_pull_request_of(account, revision) else repository.namespace)
        return repository
