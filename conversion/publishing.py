"""`attnres push`: the upload of a model to the Hub, in two commits.

The first has the files. The second has the card, whose snippets name the first: no commit can name itself.
"""

import json
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from huggingface_hub import CommitInfo, CommitOperationAdd, CommitOperationDelete, HfApi, get_session, get_token
from huggingface_hub.errors import (
    BadRequestError,
    HfHubHTTPError,
    HFValidationError,
    LocalTokenNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.utils import hf_raise_for_status, httpx, validate_repo_id

from .card_metadata import filled, read
from .card_parts import digest, marked, merge, part, put, unmarked
from .cards import CARD, decode_card
from .publication import Publication

# What `from_pretrained` would read beside, or instead of, the weights that are published.
_WEIGHTS = re.compile(
    r"(model(-\d{5}-of-\d{5}|-residual(-\d+)?)?|adapter_model)\.safetensors|model\.safetensors\.index\.json"
    r"|adapter_config\.json|adapter_model\.bin"
)
_PINNED = re.compile(r'name, revision = "[^"]+", "([0-9a-f]{40})"')
_REVISION = re.compile(r"(?!.*\.\.)[\w][\w./-]*")
_WAITS, _LONGEST_WAIT = (1, 2, 4, 8), 300  # seconds
_BUSY = (429, 500, 502, 503, 504)
_IGNORE_NOTHING = "\n"  # in the place of a `.gitignore` that the repository may have


@dataclass(frozen=True)
class Published:
    """What came of an upload.

    Attributes:
        address: of the repository, the branch or the pull request.
        is_new: anything was uploaded.
        removed: files of older weights that went from the repository.
        notes: what to tell the user of the card.
    """

    address: str
    is_new: bool
    removed: list[str]
    notes: list[str]


def check_repo(repo: str, revision: str | None = None) -> None:
    """Raises ValueError: this cannot be the id of a repository, or the name of a revision."""
    try:
        validate_repo_id(repo)
    except HFValidationError as error:
        raise ValueError(
            f"{repo!r} is no id of a repository: NAME or ORG/NAME, of letters, digits, `-`, `_` and `.`."
        ) from error
    if revision is not None and not _REVISION.fullmatch(revision):
        raise ValueError(f"{revision!r} is no name of a branch.")


def publish(
    publication: Publication,
    repo: str,
    *,
    private: bool = False,
    revision: str | None = None,
    create_pr: bool = False,
    message: str | None = None,
    overwrite_card: bool = False,
) -> Published:
    """Upload to the Hub. What an earlier, interrupted call has uploaded is not sent again.

    Args:
        repo: made if it is not there.
        private: make it so; a public one is refused.
        revision: a branch, made if it is not there.
        create_pr: open a pull request instead of changing the branch, which has to be there.
        overwrite_card: where the card was edited here and on the Hub, take the one here.

    Raises:
        OSError, RuntimeError, ValueError: in one line, with what to do.
    """
    check_repo(repo, revision)
    api = HfApi(library_name="attnres", library_version=version("attnres"))
    with explained(repo):
        _check_token()
        repo = _repeated(_make_repository, api, repo, private)
        if revision is not None and not revision.startswith("refs/") and not create_pr:
            _repeated(api.create_branch, repo, branch=revision, exist_ok=True)
        head = _repeated(api.model_info, repo, revision=revision).sha
        there = _repeated(api.list_repo_files, repo, revision=head)
        before = _uploaded_card(api, repo, head, there)
        merged, _ = _merged(publication, before, overwrite_card)
        card = publication.card_for(repo, None, merged)
        _validate(card, api.endpoint)
        operations: list = [CommitOperationAdd(name, str(path)) for name, path in publication.files.items()]
        if CARD not in there:
            operations.append(CommitOperationAdd(CARD, marked(card, publication.card, card).encode()))
        _send(api, repo, operations, revision=revision, create_pr=create_pr)
        stale = [name for name in there if name not in publication.files and _WEIGHTS.fullmatch(name)]
        commit = _repeated(
            api.create_commit,
            repo,
            [*operations, *map(CommitOperationDelete, stale)],
            commit_message=message or "Upload model",
            revision=revision,
            create_pr=create_pr,
        )
        is_new = commit.oid != head
        pinned = None if is_new else _PINNED.search(before or "")
        pin = pinned[1] if pinned else commit.oid
        target = commit.pr_revision or revision
        in_new_pr = create_pr and commit.pr_revision is None  # nothing but the card has changed
        last, notes = _commit_card(api, publication, repo, pin, target, in_new_pr, overwrite_card)
        if last is not None and in_new_pr:
            commit = last
    return Published(_address(api, repo, commit, revision), is_new or last is not None, stale, notes)


def _send(api: HfApi, repo: str, operations: list[CommitOperationAdd], **options: Any) -> None:
    """Send what is large before the commit, one file at a time: what has been sent is there if the next one fails."""
    options |= {"free_memory": False, "gitignore_content": _IGNORE_NOTHING}
    large = [operation for operation in operations if operation.path_in_repo.endswith(".safetensors")]
    for some in ([operation for operation in operations if operation not in large], *([one] for one in large)):
        api.preupload_lfs_files(repo, some, **options)


def _commit_card(
    api: HfApi,
    publication: Publication,
    repo: str,
    pin: str,
    revision: str | None,
    create_pr: bool,
    overwrite: bool,
) -> tuple[CommitInfo | None, list[str]]:
    """Commit the card that names the commit `pin`, if it is not there; once more if another commit came first.

    What it is merged with is read now: uploads take long, and cards are edited meanwhile.
    """
    for is_last in (False, False, True):
        head = _repeated(api.model_info, repo, revision=revision).sha
        uploaded = _uploaded_card(api, repo, head, [CARD])
        merged, notes = _merged(publication, uploaded, overwrite)
        card = publication.card_for(repo, pin, merged)
        if digest(card) == digest(unmarked(uploaded or "")):
            return None, notes
        # Marked as what would be there if nobody had edited it: the next upload sees that somebody has.
        content = marked(card, publication.card, publication.card_for(repo, pin))
        try:
            commit = _repeated(
                api.create_commit,
                repo,
                [CommitOperationAdd(CARD, content.encode())],
                commit_message="Model card: the commit to load",
                revision=revision,
                create_pr=create_pr,
                parent_commit=head,
            )
        except HfHubHTTPError as error:
            if is_last or error.response.status_code != 412:
                raise
        else:
            return commit, notes
    raise AssertionError


def _merged(publication: Publication, uploaded: str | None, overwrite: bool) -> tuple[str, list[str]]:
    """The card to go on with, and what to tell of its metadata.

    Raises:
        ValueError: a person has edited both, or the metadata of the one on the Hub is damaged.
    """
    local = publication.card
    merged = merge(local, uploaded, overwrite=overwrite)
    if merged == local:
        return local, []
    try:
        there, here = read(merged), read(local)
        merged = filled(merged, here, {})
    except ValueError as error:
        raise ValueError(f"README.md on the Hub cannot be read: {error}. Mend it there.") from error
    if origin := part(local, "origin"):
        merged = put(merged, "origin", origin.content)
    differing = [name for name, value in here.items() if there.get(name, value) != value]
    named = ", ".join(f"`{name}`" for name in differing)
    note = f"README.md on the Hub was edited: its {named} stays, not what the one here says (--overwrite-card)."
    return merged, [note] if differing else []


def _validate(card: str, endpoint: str) -> None:
    """Raises ValueError: the Hub does not take the metadata of the card."""
    try:
        _repeated(_post, f"{endpoint}/api/validate-yaml", {"repoType": "model", "content": card})
    except BadRequestError as error:
        reason = error.response.text
        with suppress(ValueError, KeyError, TypeError):  # it is in JSON
            reason = "; ".join(found["message"] for found in json.loads(reason)["errors"])
        raise ValueError(f"the Hub does not take the metadata of {CARD}: {reason}.") from error


def _post(address: str, content: dict[str, str]) -> None:
    # `ModelCard.validate` would read and write the card anew, and before huggingface_hub 2 asks huggingface.co alone.
    hf_raise_for_status(get_session().post(address, json=content, headers={"Accept": "text/plain"}))


def _check_token() -> None:
    token = get_token()
    if token is None:
        raise LocalTokenNotFoundError
    if not (token.isascii() and token.isprintable()):
        raise ValueError("the token (of HF_TOKEN or `hf auth login`) has characters that no token has: copy it again.")


@contextmanager
def explained(repo: str) -> Iterator[None]:
    """Whatever the Hub or the way there refuses, in one line."""
    try:
        yield
    except LocalTokenNotFoundError as error:
        raise RuntimeError("you are not logged in to the Hub: `hf auth login`, or set HF_TOKEN.") from error
    except RevisionNotFoundError as error:
        raise ValueError(f"{repo} has no such revision, and only branches are made: {_said(error)}") from error
    except HfHubHTTPError as error:
        status = error.response.status_code
        reasons = {
            401: "the Hub does not know the token: `hf auth login`",
            403: f"the token may not write to {repo}: take one that may, another name, or --create-pr",
        }
        if status in reasons or isinstance(error, RepositoryNotFoundError):
            reason = reasons.get(status, f"{repo} is not there for this token: `hf auth whoami`")
            raise RuntimeError(f"{reason} ({_said(error)}).") from error
        remedy = f" {_AGAIN}" if status in _BUSY else ""
        raise RuntimeError(f"the Hub answered {status}: {_said(error)}.{remedy}") from error
    except ValueError as error:
        raise ValueError(" ".join(str(error).split())) from error
    except (ConnectionError, RuntimeError) as error:  # of the upload of a file, which its client has tried again
        reason = f"{error} {error.__cause__ or ''}"
        raise RuntimeError(f"{' '.join(reason.split())} {_AGAIN}") from error
    except httpx.HTTPError as error:
        raise RuntimeError(f"the connection to the Hub failed ({type(error).__name__}: {error}). {_AGAIN}") from error


_AGAIN = "The same command goes on: what was uploaded is not sent again."


def _said(error: HfHubHTTPError) -> str:
    """What the server has said, in one line; else the error."""
    return " ".join(str(error.server_message or error).split()).rstrip(".")


def _repeated(call: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    """What the call gives. It is made again while the Hub is busy, which its client does for uploads alone.

    An error of the server may come after it has opened a pull request: another would be opened.
    """
    statuses = (429,) if options.get("create_pr") else _BUSY
    for wait in (*_WAITS, None):
        try:
            return call(*arguments, **options)
        except HfHubHTTPError as error:
            if wait is None or error.response.status_code not in statuses:
                raise
            after = error.response.headers.get("Retry-After", "")
            time.sleep(min(int(after), _LONGEST_WAIT) if after.isdigit() else wait)
    raise AssertionError


def _make_repository(api: HfApi, repo: str, private: bool) -> str:
    """The full id of the repository, which is made if it is not there."""
    try:
        info = api.model_info(repo if "/" in repo else f"{api.whoami()['name']}/{repo}")
    except RepositoryNotFoundError:
        return api.create_repo(repo, private=private, exist_ok=True).repo_id
    if private and not info.private:
        raise ValueError(f"{info.id} is there and public: --private cannot make it private. Take another name.")
    return info.id


def _uploaded_card(api: HfApi, repo: str, commit: str, files: list[str]) -> str | None:
    """The card of a commit that has these files."""
    if CARD not in files:
        return None
    with TemporaryDirectory() as scratch:
        path = _repeated(api.hf_hub_download, repo, CARD, revision=commit, local_dir=scratch)
        return decode_card(Path(path).read_bytes(), "README.md on the Hub")


def _address(api: HfApi, repo: str, commit: CommitInfo, revision: str | None) -> str:
    if commit.pr_url is not None:
        return commit.pr_url
    return f"{api.endpoint}/{repo}" + (f"/tree/{revision}" if revision else "")


__all__ = ["Published", "check_repo", "publish"]
