"""Upload a model to the Hub for `attnres push`, in two commits.

The first commit holds the files, and the second one the card, whose code snippets load the first commit by its hash. No
commit can contain its own hash.
"""

import re
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from glob import escape
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from huggingface_hub import (
    CommitInfo,
    CommitOperationAdd,
    CommitOperationDelete,
    HfApi,
    RepoFile,
    get_session,
    get_token,
)
from huggingface_hub.errors import (
    BadRequestError,
    HfHubHTTPError,
    LocalTokenNotFoundError,
    RepositoryNotFoundError,
)
from huggingface_hub.utils import hf_raise_for_status

from attnres.utils.errors import about
from attnres.utils.hub import check_repo
from attnres.utils.wording import printable

from .card_text import (
    add_metadata,
    digest,
    find_part,
    mark_upload,
    merge_cards,
    put_part,
    read_model_card,
    remove_upload_mark,
)
from .cards import CARD, decode_card
from .markdown import shell_word
from .publication import RESULTS, Publication
from .published_names import is_read_on_loading

# Files that `from_pretrained` would read beside, or instead of, the published weights.
_WEIGHTS = re.compile(
    r"(model(-\d{5}-of-\d{5}|-residual(-\d+)?)?|adapter_model)\.safetensors|model\.safetensors\.index\.json"
    r"|adapter_config\.json|adapter_model\.bin"
)
# A function that takes the names of a repository's files and a function to read one of them. It returns the names of
# the files that hold measurements of the repository's weights.
FindMeasurements = Callable[[list[str], Callable[[str], bytes]], list[str]]
# The commit in the code snippet of a card.
_PINNED = re.compile(r'name, revision = "[^"]+", "([0-9a-f]{40})"')
_WAITS, _LONGEST_WAIT = (1, 2, 4, 8), 300  # seconds
_BUSY = (429, 500, 502, 503, 504)  # HTTP statuses after which a call is repeated
_IGNORE_NOTHING = "\n"  # replaces a `.gitignore` in the repository, which could leave out files


@dataclass(frozen=True)
class Published:
    """The outcome of an upload.

    Attributes:
        address: The URL of the repository, the branch or the pull request.
        is_new: Whether anything was uploaded.
        removed: The files of older weights that were removed from the repository.
        outdated: The measurements of other weights that were removed from the repository.
        notes: Notes about the card and other files of the repository, for the user.
    """

    address: str
    is_new: bool
    removed: list[str]
    outdated: list[str]
    notes: list[str]


@dataclass(frozen=True)
class UploadOptions:
    """The options of an upload.

    Attributes:
        private: Whether a new repository is private; if not, the default of its organization decides. With `True`, an
            existing public repository is refused.
        revision: The branch. It is made if it does not exist.
        create_pr: Whether to open a pull request instead of changing the branch, which must exist then.
        message: The message of the first commit. By default "Upload model".
        overwrite_card: Whether to upload the local card even if a person has edited the one on the Hub.
    """

    private: bool = False
    revision: str | None = None
    create_pr: bool = False
    message: str | None = None
    overwrite_card: bool = False


def publish(
    publication: Publication,
    repo: str,
    options: UploadOptions,
    find_measurements: FindMeasurements = lambda names, read: [],
) -> Published:
    """Upload a model to the Hub. Files that an interrupted call has uploaded are not sent again.

    Older weights in the repository are removed. If the weights change, measurements of the older ones are removed too.

    Args:
        publication: The files and the card.
        repo: The id of the repository. It is made if it does not exist.
        options: The options of the upload.
        find_measurements: A function that returns which files of the repository hold measurements of its weights. It
            gets the names of all files, and a function that returns the content of a file.

    Returns:
        The outcome.

    Raises:
        OSError, RuntimeError: The upload failed.
        ValueError: The Hub refuses the card, or a person has edited both cards; or `--private` does not fit the
            repository.
    """
    revision, create_pr = options.revision, options.create_pr
    check_repo(repo, revision)
    api = HfApi(library_name="attnres", library_version=version("attnres"))
    if get_token() is None:
        raise LocalTokenNotFoundError("no token for the Hub.")
    repo = _repeated(_make_repository, api, repo, options.private)
    if revision is not None and not revision.startswith("refs/") and not create_pr:
        _repeated(api.create_branch, repo, branch=revision, exist_ok=True)
    head = _repeated(api.model_info, repo, revision=revision).sha
    remote_files = _repeated(_list_files, api, repo, head)
    remote_card = _uploaded_card(api, repo, head, remote_files)
    merged, _ = _merged(publication, remote_card, options.overwrite_card)
    card = publication.card_for(repo, None, merged)
    _validate(card, api.endpoint)  # before anything large is sent

    operations: list = [CommitOperationAdd(name, str(path)) for name, path in publication.files.items()]
    if CARD not in remote_files:
        operations.append(CommitOperationAdd(CARD, mark_upload(card, publication.card, card).encode()))
    with about(repo, "The same command goes on: what was uploaded is not sent again.", only=RuntimeError):  # of hf_xet
        _send(api, repo, operations, revision=revision, create_pr=create_pr)
    others = [name for name in remote_files if name not in publication.files]
    stale = [name for name in others if _WEIGHTS.fullmatch(name)]
    has_other_weights = _has_other_weights(operations, remote_files)
    outdated = []
    if has_other_weights:
        measurements = find_measurements([*remote_files], lambda name: _downloaded(api, repo, head, name))
        outdated = [name for name in measurements if name in others]
    commit = _repeated(
        api.create_commit,
        repo,
        [*operations, *map(CommitOperationDelete, [*stale, *outdated])],
        commit_message=options.message or "Upload model",
        revision=revision,
        create_pr=create_pr,
    )

    is_new = commit.oid != head
    # Without new files, the head may be a commit of the card. Then the card keeps the commit of files that it pins.
    pinned = None if is_new else _PINNED.search(remote_card or "")
    pin = pinned[1] if pinned else commit.oid
    target = commit.pr_revision or revision
    # A commit without changes opens no pull request, so the commit of the card has to open it.
    in_new_pr = create_pr and commit.pr_revision is None
    card_commit, notes = _commit_card(api, publication, repo, pin, target, in_new_pr, options.overwrite_card)
    if card_commit is not None and in_new_pr:
        commit = card_commit
        target = commit.pr_revision
    left = [name for name in others if name not in outdated]
    if has_other_weights:
        results = find_part(merged, "results")
        notes += _notes_on_results(repo, left, results is not None and results.is_edited, target)
    if read := [name for name in left if is_read_on_loading(name)]:
        notes.append(
            f"the repository holds files that {publication.subject.folder} does not have, and `from_pretrained` may "
            f"read them with this model: {', '.join(read)}. If they belong to another model, remove them: "
            f"{_removal(repo, read, target)}"
        )
    is_new = is_new or card_commit is not None
    return Published(_address(api, repo, commit, revision), is_new, stale, outdated, notes)


def _list_files(api: HfApi, repo: str, commit: str) -> dict[str, RepoFile]:
    """Return the files of a commit by their paths."""
    entries = api.list_repo_tree(repo, recursive=True, revision=commit)
    return {entry.path: entry for entry in entries if isinstance(entry, RepoFile)}


def _has_other_weights(operations: list[CommitOperationAdd], remote_files: dict[str, RepoFile]) -> bool:
    """Return whether a repository holds weights, and not exactly those of the upload, by their SHA-256."""
    added = {operation.path_in_repo: operation.upload_info.sha256.hex() for operation in operations}
    weights = {name: sha256 for name, sha256 in added.items() if name.endswith(".safetensors")}
    held = {
        name: file.lfs and file.lfs.sha256
        for name, file in remote_files.items()
        if name in weights or (_WEIGHTS.fullmatch(name) and name.endswith((".safetensors", ".bin")))
    }
    return bool(held) and held != weights


def _notes_on_results(repo: str, left: list[str], has_edited_results: bool, revision: str | None) -> list[str]:
    """Return notes on results of other weights that stay in a repository because a person has written them."""
    notes = []
    if results := [name for name in left if name.startswith(f"{RESULTS}/")]:
        notes.append(
            "the weights have changed, and these results were not written by attnres eval: "
            f"{', '.join(map(printable, results))}. If they belong to the older weights, remove them: "
            f"{_removal(repo, results, revision)}"
        )
    if has_edited_results:
        notes.append(
            "the weights have changed, and a person has edited the results in README.md, which stay. Correct them "
            "there if they belong to the older weights."
        )
    return notes


def _removal(repo: str, names: list[str], revision: str | None) -> str:
    """Return the command that removes files from a repository."""
    patterns = " ".join(shell_word(escape(name)) for name in names)  # the command takes patterns
    branch = f" --revision {shell_word(revision)}" if revision else ""
    return f"`hf repos delete-files {repo} {patterns}{branch}`."


def _send(api: HfApi, repo: str, operations: list[CommitOperationAdd], **options: Any) -> None:
    """Send the weights before the commit, one file at a time, so that a failure does not lose the files before it."""
    options |= {"free_memory": False, "gitignore_content": _IGNORE_NOTHING}
    large = [operation for operation in operations if operation.path_in_repo.endswith(".safetensors")]
    small = [operation for operation in operations if operation not in large]
    for batch in (small, *([operation] for operation in large)):
        try:
            api.preupload_lfs_files(repo, batch, **options)
        except RuntimeError as error:
            if error.__cause__ is None:
                raise
            # The client's message names only the file. The reason is in the cause.
            raise RuntimeError(f"{str(error).rstrip('.')}: {error.__cause__}") from error


def _commit_card(
    api: HfApi,
    publication: Publication,
    repo: str,
    pin: str,
    revision: str | None,
    create_pr: bool,
    overwrite: bool,
) -> tuple[CommitInfo | None, list[str]]:
    """Commit the card that names the commit `pin`, unless it is there already.

    Returns:
        The commit, if one was made, and notes for the user.
    """
    # The card is read again, because a person may have edited it during the upload. `parent_commit` makes the Hub
    # refuse the commit if somebody commits after that; then the loop starts again.
    for is_last in (False, False, True):
        head = _repeated(api.model_info, repo, revision=revision).sha
        uploaded = _uploaded_card(api, repo, head, [CARD])
        merged, notes = _merged(publication, uploaded, overwrite)
        card = publication.card_for(repo, pin, merged)
        if digest(card) == digest(remove_upload_mark(uploaded or "")):
            return None, notes
        # The mark has the digest of an unedited card, so that the next upload recognises edits in this one.
        content = mark_upload(card, publication.card, publication.card_for(repo, pin))
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
    raise AssertionError("the last round returns or raises")


def _merged(publication: Publication, uploaded: str | None, overwrite: bool) -> tuple[str, list[str]]:
    """Return the card to continue from, and notes for the user on its metadata.

    Raises:
        ValueError: A person has edited both cards, or the metadata of the one on the Hub is damaged.
    """
    local = publication.card
    merged = merge_cards(local, uploaded, overwrite=overwrite)
    if merged == local:
        return local, []
    with about("README.md on the Hub", "Mend it there."):
        remote_fields, local_fields = (read_model_card(card).data.to_dict() for card in (merged, local))
        merged = add_metadata(merged, local_fields)
    if origin := find_part(local, "origin"):
        merged = put_part(merged, "origin", origin.content)
    differing = [name for name, value in local_fields.items() if remote_fields.get(name, value) != value]
    names = ", ".join(f"`{name}`" for name in differing)
    note = f"README.md on the Hub was edited: it keeps its {names} (--overwrite-card takes the local values)."
    return merged, [note] if differing else []


def _validate(card: str, endpoint: str) -> None:
    """Raise ValueError if the Hub does not accept the metadata of a card."""
    try:
        _repeated(_post, f"{endpoint}/api/validate-yaml", {"repoType": "model", "content": card})
    except BadRequestError as error:
        reason = " ".join((error.server_message or str(error)).split())
        raise ValueError(f"the Hub refuses the metadata of {CARD}: {reason}.") from error


def _post(address: str, content: dict[str, str]) -> None:
    # `ModelCard.validate` would rewrite the card first, and before huggingface_hub 2 it ignores the endpoint.
    hf_raise_for_status(get_session().post(address, json=content, headers={"Accept": "text/plain"}))


def _repeated(call: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    """Return the result of a call, which is repeated while the Hub is busy. The client itself repeats only uploads."""
    # After an error of the server, the pull request may have been opened: repeating the call could open another.
    statuses = (429,) if options.get("create_pr") else _BUSY
    for wait in (*_WAITS, None):
        try:
            return call(*arguments, **options)
        except HfHubHTTPError as error:
            if wait is None or error.response.status_code not in statuses:
                raise
            after = error.response.headers.get("Retry-After", "")
            time.sleep(min(int(after), _LONGEST_WAIT) if after.isdigit() else wait)
    raise AssertionError("the last round returns or raises")


def _make_repository(api: HfApi, repo: str, private: bool) -> str:
    """Return the full id of the repository, which is made if it does not exist."""
    try:
        info = api.model_info(repo if "/" in repo else f"{api.whoami()['name']}/{repo}")
    except RepositoryNotFoundError:
        # Without a visibility, the Hub follows the default of the organization, which may be private.
        return api.create_repo(repo, private=private or None, exist_ok=True).repo_id
    if private and not info.private:
        raise ValueError(f"{info.id} exists and is public: --private cannot make it private. Choose another name.")
    return info.id


def _uploaded_card(api: HfApi, repo: str, commit: str, files: Collection[str]) -> str | None:
    """Return the card of a commit with these files, or None if it has no card."""
    if CARD not in files:
        return None
    return decode_card(_downloaded(api, repo, commit, CARD), "README.md on the Hub")


def _downloaded(api: HfApi, repo: str, commit: str, name: str) -> bytes:
    """Return the content of a file of a commit."""
    with TemporaryDirectory() as scratch:
        path = _repeated(api.hf_hub_download, repo, name, revision=commit, local_dir=scratch)
        return Path(path).read_bytes()


def _address(api: HfApi, repo: str, commit: CommitInfo, revision: str | None) -> str:
    if commit.pr_url is not None:
        return commit.pr_url
    return f"{api.endpoint}/{repo}" + (f"/tree/{revision}" if revision else "")


__all__ = ["Published", "UploadOptions", "publish"]
