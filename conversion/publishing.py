"""`attnres push`: what of a model directory is published, and its upload to the Hub in two commits.

The first has the files. The second has the card, whose snippets name the first: no commit can name itself.
"""

import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from fnmatch import fnmatch
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from huggingface_hub import (
    CommitInfo,
    CommitOperationAdd,
    CommitOperationDelete,
    EvalResultEntry,
    HfApi,
    get_token,
)
from huggingface_hub.errors import (
    HfHubHTTPError,
    HFValidationError,
    LocalTokenNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.utils import httpx, validate_repo_id
from transformers.utils import CONFIG_NAME, SAFE_WEIGHTS_INDEX_NAME

from attnres import ResidualConfig
from attnres.hub import check_path

from .card_parts import digest, marked, merge, part, put, unmarked
from .cards import CARD, Subject, complete, new_card, read_card
from .checkpoint import Checkpoint, open_checkpoint
from .complete import check_complete, empty_model, explain_config, read_config
from .layout import in_published_layout
from .side_files import SIDE_FILES, TOKENIZER_FILES
from .source_code import FOLDER, references, with_imports
from .source_files import check_file, read_object

RESULTS, INSPECTION = ".eval_results", "inspection"
_REPORT = ("report.html", "inspection.json", "*.csv", "*.png", "*.svg")
_WEIGHTS = ("model*.safetensors", SAFE_WEIGHTS_INDEX_NAME)
_WAITS, _LONGEST_WAIT = (1, 2, 4, 8), 300  # seconds
_MAX_CHECKED = 10 * 2**20  # bytes of a file that is looked through for the token
_PINNED = re.compile(r'name, revision = "[^"]+", "([0-9a-f]{40})"')


@dataclass(frozen=True)
class Publication:
    """What is to be published.

    Attributes:
        files: by their paths in the repository; without the card.
        left_out: paths in the model's directory that stay here.
        card: as it is here, or a new one.
        subject: of the card; its `source` is the directory until it is known where it goes.
    """

    files: dict[str, Path]
    left_out: list[str]
    card: str
    subject: Subject

    @property
    def weights(self) -> list[str]:
        """The paths of the files that are large."""
        return [name for name in self.files if name.endswith(".safetensors")]

    def card_for(self, repo: str, revision: str | None, card: str | None = None) -> str:
        """The card (this one, or another version of it) of the repository at a commit."""
        return complete(card or self.card, replace(self.subject, source=repo, revision=revision))


def plan_publication(
    folder: Path, results: Mapping[Path, Sequence[EvalResultEntry]] | None = None, inspection: Path | None = None
) -> Publication:
    """Choose and check the files of a model's directory that are published.

    Args:
        results: of evaluations, which go along, by their files.
        inspection: an `--out` of `attnres inspect`; by default the folder `inspection` of the model, if it is one.

    Raises:
        OSError, RuntimeError, ValueError: the model is incomplete or damaged or none of the family, or cannot be loaded
            by the code beside it; or a file holds the Hub token.
    """
    if (folder / "adapter_config.json").exists() and not (folder / CONFIG_NAME).exists():
        raise ValueError(
            f"{folder} holds an adapter, which does not load without its base. Publish the merged model (merge=true in "
            "the recipe), or the adapter by PEFT's own push_to_hub."
        )
    config, checkpoint = _check_model(folder)
    names = [CONFIG_NAME, *_weights(checkpoint), *_code(folder, config)]
    for pattern in SIDE_FILES:
        names += (path.relative_to(folder).as_posix() for path in sorted(folder.glob(pattern)) if path.is_file())
    files = {name: folder / name for name in dict.fromkeys(names)}
    for path in files.values():
        check_file(folder, path)
    files |= _inspected(inspection or folder / INSPECTION, is_asked=inspection is not None)
    files |= {f"{RESULTS}/{path.name}": path for path in results or ()}
    there = (path for path in sorted(folder.rglob("*")) if path.is_file() and path.name != ".gitattributes")
    left_out = [n for n in (path.relative_to(folder).as_posix() for path in there) if n not in {*files, CARD}]
    card = read_card(folder)
    _check_secrets([*files.values(), *([folder / CARD] if card else [])])
    figures = [name for name in files if fnmatch(name, f"{INSPECTION}/depth_attention*.png") and not _is_detail(name)]
    subject = Subject(
        config,
        folder,
        str(folder),
        figure=figures[0] if len(figures) == 1 else None,  # of two models, whose it is does not show
        results=[entry for entries in (results or {}).values() for entry in entries],
        code=[name for name in files if name.endswith(".py")],
        has_tokenizer=any(name in files for name in TOKENIZER_FILES),
    )
    publication = Publication(files, left_out, card if card is not None else new_card(), subject)
    publication.card_for("org/name", None)  # here a bad card shows
    return publication


def check_repo(repo: str) -> None:
    """Raises ValueError: this cannot be the id of a repository."""
    try:
        validate_repo_id(repo)
    except HFValidationError as error:
        raise ValueError(f"{repo!r} is no id of a repository, such as me/my-model: {error}") from error


def publish(
    publication: Publication,
    repo: str,
    *,
    private: bool = False,
    revision: str | None = None,
    create_pr: bool = False,
    message: str | None = None,
    overwrite_card: bool = False,
) -> tuple[str, bool, list[str]]:
    """Upload to the Hub. What an earlier, interrupted call has uploaded is not sent again.

    Args:
        repo: made if it is not there.
        private: make it so; a public one is refused.
        revision: a branch, made if it is not there.
        create_pr: open a pull request instead of changing the branch.
        overwrite_card: where the card was edited here and on the Hub, take the one here.

    Returns:
        The address of what was published, whether anything was new, and the files of older weights that were removed
        from the repository.

    Raises:
        OSError, RuntimeError, ValueError: in one line, with what to do.
    """
    check_repo(repo)
    api = HfApi(library_name="attnres", library_version=version("attnres"))
    with explained(repo):
        if get_token() is None:
            raise LocalTokenNotFoundError
        repo = _repeated(_make_repository, api, repo, private)
        if revision is not None and not revision.startswith("refs/"):
            _repeated(api.create_branch, repo, branch=revision, exist_ok=True)
        there = _repeated(api.list_repo_files, repo, revision=revision)
        uploaded = _uploaded_card(api, repo, revision) if CARD in there else None
        merged = merge(publication.card, uploaded, overwrite=overwrite_card)
        if uploaded is not None and merged != publication.card and (origin := part(publication.card, "origin")):
            merged = put(merged, "origin", origin)
        head = _repeated(api.model_info, repo, revision=revision).sha
        operations: list = [CommitOperationAdd(name, str(path)) for name, path in publication.files.items()]
        stale = [name for name in there if name not in publication.files and any(fnmatch(name, w) for w in _WEIGHTS)]
        operations += [CommitOperationDelete(name) for name in stale]
        if CARD not in there:
            operations.append(CommitOperationAdd(CARD, publication.card_for(repo, None).encode()))
        for operation in operations:  # one by one: what an upload has ended with is there if the next one fails
            if isinstance(operation, CommitOperationAdd) and operation.path_in_repo in publication.weights:
                options = {"revision": revision, "create_pr": create_pr, "free_memory": False}
                api.preupload_lfs_files(repo, [operation], **options)
        commit = _repeated(
            api.create_commit,
            repo,
            operations,
            commit_message=message or "Upload model",
            revision=revision,
            create_pr=create_pr,
        )
        target = commit.pr_revision or revision
        again = create_pr and commit.pr_revision is None  # nothing but the card has changed
        pinned = _PINNED.search(uploaded or "") if commit.oid == head else None
        pin = pinned[1] if pinned else commit.oid
        card = publication.card_for(repo, pin, merged)
        if uploaded is None or digest(card) != digest(unmarked(uploaded)):
            # Marked as what would be there if nobody had edited it: the next upload sees that somebody has.
            content = marked(card, publication.card, publication.card_for(repo, pin))
            last = _repeated(
                api.create_commit,
                repo,
                [CommitOperationAdd(CARD, content.encode())],
                commit_message="Model card: the commit to load",
                revision=target,
                create_pr=again,
            )
            commit = last if again else commit
            head = None  # something is new
    return _address(api, repo, commit, revision), commit.oid != head, stale


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
        raise RuntimeError(f"the Hub answered {status}: {_said(error)}. {_AGAIN}") from error
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
    statuses = (429,) if options.get("create_pr") else (429, 500, 502, 503, 504)
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


def _uploaded_card(api: HfApi, repo: str, revision: str | None) -> str:
    with TemporaryDirectory() as scratch:
        path = api.hf_hub_download(repo, CARD, revision=revision, local_dir=scratch)
        return Path(path).read_text(encoding="utf-8", errors="replace").replace("\r\n", "\n")


def _address(api: HfApi, repo: str, commit: CommitInfo, revision: str | None) -> str:
    if commit.pr_url is not None:
        return commit.pr_url
    return f"{api.endpoint}/{repo}" + (f"/tree/{revision}" if revision else "")


def _check_model(folder: Path) -> tuple[ResidualConfig, Checkpoint]:
    """Its configuration and its weights. Raises OSError, RuntimeError, ValueError: they are not there, or not whole."""
    check_path(folder)
    if not any(folder.glob("model*.safetensors")):
        raise FileNotFoundError(f"{folder} has no model*.safetensors. Save the model there by `save_pretrained`.")
    with TemporaryDirectory() as scratch:
        checkpoint = open_checkpoint(folder, Path(scratch))
        config = read_config(checkpoint)
        if not isinstance(config, ResidualConfig):
            raise ValueError(
                f"{folder} is of model type {config.model_type!r}, none of attnres: `hf upload` publishes it."
            )
        if in_published_layout(checkpoint, Path(scratch)) is not checkpoint:
            raise ValueError(
                f"{folder} is a checkpoint that a run goes on from. Publish the model that it writes at its end, or "
                f"make one of this: `attnres convert`."
            )
        with explain_config(folder):
            check_complete(checkpoint, empty_model(config, checkpoint))
    return config, checkpoint


def _weights(checkpoint: Checkpoint) -> list[str]:
    names = [shard.path.name for shard in checkpoint.shards]
    index = checkpoint.folder / SAFE_WEIGHTS_INDEX_NAME
    return [*names, index.name] if index.exists() and names != ["model.safetensors"] else names


def _code(folder: Path, config: ResidualConfig) -> list[str]:
    """The Python files that loading runs: what `auto_map` refers to, and what came with a source's tokenizer."""
    path = folder / CONFIG_NAME
    found = [ref for ref in references(read_object(path), path) if "--" not in ref]
    if not found:
        raise ValueError(f"{path} has no `auto_map`: nothing loads the model where attnres is not installed. {_SAVE}")
    files: list[Path] = []
    for module in dict.fromkeys(reference.rpartition(".")[0] for reference in found):
        if not (folder / f"{module}.py").is_file():
            raise FileNotFoundError(f"{folder} lacks {module}.py, which loads the model. {_SAVE}")
        files += with_imports(folder / f"{module}.py", folder)
    files += sorted((folder / FOLDER).rglob("*.py"))
    return sorted({file.relative_to(folder).as_posix() for file in files})


_SAVE = "Save it again by `save_pretrained`."


def _inspected(report: Path, is_asked: bool) -> dict[str, Path]:
    """The files of a report of `attnres inspect`, by their paths in the repository."""
    if not (report / "inspection.json").is_file():
        if is_asked:
            raise FileNotFoundError(f"{report} is no report of `attnres inspect`: it has no inspection.json.")
        return {}
    found = [path for pattern in _REPORT for path in sorted(report.glob(pattern))]
    for path in found:
        check_file(report, path)
    return {f"{INSPECTION}/{path.name}": path for path in found}


def _is_detail(figure: str) -> bool:
    return "_relative" in figure or "_spread" in figure


def _check_secrets(paths: Sequence[Path]) -> None:
    """Raises ValueError: a file to be published holds the token that would publish it."""
    token = get_token()
    for path in paths if token else ():
        if path.stat().st_size <= _MAX_CHECKED and token.encode() in path.read_bytes():
            raise ValueError(f"{path} holds your Hub token. Take it out, and make a new one if it was ever published.")


__all__ = ["Publication", "check_repo", "plan_publication", "publish"]
