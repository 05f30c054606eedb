"""Choose and check the files and the card that `attnres push` publishes from a model's directory.

Nothing is uploaded here; `push.py` does that.
"""

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatch
from pathlib import Path

from huggingface_hub import EvalResultEntry, get_token
from transformers.utils import CONFIG_NAME, SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME

from attnres import AttnResKimiK3Config, ResidualConfig
from attnres.checkpoints import kimi_k3
from attnres.checkpoints.checkpoint import Checkpoint
from attnres.checkpoints.complete import check_complete, empty_model
from attnres.checkpoints.copies import check_files_of_weights, unpublished_model
from attnres.checkpoints.shards import DTYPES, copy_shard
from attnres.checkpoints.side_files import code_fields, module_of, references, with_imports
from attnres.checkpoints.source_files import AUTO_MAP, check_file, read_json, read_object
from attnres.utils.errors import about
from attnres.utils.hub import check_path, is_adapter
from attnres.utils.model_files import TOKENIZER_FILES
from attnres.utils.wording import counted

from .cards import CARD, CardSubject, complete, read_card
from .published_names import side_files, vocabularies
from .secret_scan import find_secrets

RESULTS, INSPECTION = ".eval_results", "inspection"
_SAVE = "Save it again by `save_pretrained`."


@dataclass(frozen=True)
class Publication:
    """The files and the card to publish.

    Attributes:
        files: Path in the repository -> local path. The card is not among them.
        left_out: The paths in the model's directory that are not published.
        card: The card in the model's directory; empty if there is none.
        subject: The model that the card is about. Its `source` is the directory until the repository is known.
        unread: The names of tensors in the files of weights that the model does not read.
    """

    files: dict[str, Path]
    left_out: list[str]
    card: str
    subject: CardSubject
    unread: list[str]

    @property
    def weights(self) -> list[str]:
        """The paths of the files of weights in the repository."""
        return [name for name in self.files if name.endswith(".safetensors")]

    def card_for(self, repo: str, revision: str | None, card: str | None = None) -> str:
        """Return the completed card for a repository.

        Args:
            repo: The id of the repository.
            revision: The commit that the card's code loads.
            card: The card to complete; by default that of the publication.

        Returns:
            The card.
        """
        return complete(card or self.card, replace(self.subject, source=repo, revision=revision))


def make_publication(
    folder: str | os.PathLike,
    results: Mapping[Path, Sequence[EvalResultEntry]] | None = None,
    report: Mapping[str, Path] | None = None,
    *,
    has_hashes: bool = False,
) -> Publication:
    """Choose and check the files of a model's directory that are published.

    Only files of known names are published: weights that the index names, code that `auto_map` or other code refers to,
    and the files of `published_names.py`.

    Args:
        folder: The model's directory.
        results: File of evaluation results -> its entries. The files are published in `.eval_results`.
        report: The files of a report of `attnres inspect` by their names, as `attnres.analysis.report_files` returns
            them. They are published in the folder `inspection`.
        has_hashes: Whether the card lists the SHA-256 of each file of code.

    Returns:
        The files and the card.

    Raises:
        OSError, RuntimeError, ValueError: The model is incomplete, damaged or not of the family, or the code beside it
            cannot load it; a tensor holds NaN or infinite values; or a file holds a string that looks like a secret.
    """
    folder = Path(folder)
    if is_adapter(folder):
        raise ValueError(
            f"{folder} holds an adapter, which does not load without its base. Publish the merged model (merge=true in "
            "the recipe), or the adapter by PEFT's own push_to_hub."
        )
    config, checkpoint, unused = _check_model(folder)
    code = _code(folder, config)
    names = [CONFIG_NAME, *_weights(checkpoint), *code, *side_files(folder), *vocabularies(folder, code)]
    files = {name: folder / name for name in dict.fromkeys(names)}
    for path in files.values():
        check_file(folder, path)
    # A report may lie in the model's directory or elsewhere. No file of it may be a link out of that folder.
    for path in (report or {}).values():
        check_file(folder if path.parent == folder / INSPECTION else path.parent, path)
    files |= {f"{INSPECTION}/{name}": path for name, path in (report or {}).items()}
    files |= {f"{RESULTS}/{path.name}": path for path in results or ()}
    # Each repository on the Hub has a `.gitattributes`, so that file need not be listed.
    present = (path for path in sorted(folder.rglob("*")) if path.is_file() and path.name != ".gitattributes")
    left_out = [n for n in (path.relative_to(folder).as_posix() for path in present) if n not in {*files, CARD}]
    card = read_card(folder)
    _check_secrets([*files.values(), *([folder / CARD] if card else [])])
    unread = checkpoint.unread(unused)
    for shard in checkpoint.shards:  # last, because this reads all weights
        copy_shard(shard, None, unused={*unread})
    figures = [name for name in files if fnmatch(name, f"{INSPECTION}/depth_attention*.png") and not _is_detail(name)]
    subject = CardSubject(
        config,
        folder,
        str(folder),
        # A report that compares two models has two figures, whose names do not show which one is of this model.
        figure=figures[0] if len(figures) == 1 else None,
        results=[entry for entries in (results or {}).values() for entry in entries],
        parameters=_count(checkpoint, config),
        code=[name for name in files if name.endswith(".py")],
        has_tokenizer=any(name in files for name in TOKENIZER_FILES),
        layout=kimi_k3.describe_layout(config, checkpoint),
        has_hashes=has_hashes,
    )
    publication = Publication(files, left_out, card or "", subject, unread)
    with about(folder / CARD):  # damaged metadata is found before anything is uploaded
        publication.card_for("org/name", None)
    return publication


def _check_model(folder: Path) -> tuple[ResidualConfig, Checkpoint, frozenset[str]]:
    """Return a model's configuration, its weights, and the tensors it does not use. Check that it is complete."""
    check_path(folder)
    checkpoint = Checkpoint(folder)
    if checkpoint.weights_path is None or "safetensors" not in checkpoint.weights_path.name:
        raise FileNotFoundError(f"{folder} has no model*.safetensors. Save the model there by `save_pretrained`.")
    check_files_of_weights(checkpoint)
    config = checkpoint.config
    kimi_k3.check_kimi_k3(checkpoint)
    if not isinstance(config, ResidualConfig):
        raise ValueError(
            f"{folder} is of model type {config.model_type!r}, which is not of the attnres family. Use `hf upload`."
        )
    if unpublished_model(checkpoint) is not None:
        raise ValueError(
            f"{folder} is a training checkpoint. Publish the model that the run writes at its end, or load this "
            "checkpoint by `from_pretrained` and save it by `save_pretrained`, which gives its tensors their "
            "published names."
        )
    return config, checkpoint, check_complete(checkpoint, empty_model(config, checkpoint), config)


def _count(checkpoint: Checkpoint, config: ResidualConfig) -> int | None:
    """Return the number of parameters, or None if weights are packed by a quantisation."""
    if isinstance(config, AttnResKimiK3Config):
        return kimi_k3.count_parameters(config, kimi_k3.has_head(checkpoint, config))
    dtypes = {DTYPES.get(entry.dtype) for entry in checkpoint.entries.values()}
    if any(dtype is None or not dtype.is_floating_point for dtype in dtypes):
        return None
    return sum(math.prod(entry.shape) for entry in checkpoint.entries.values())


def _weights(checkpoint: Checkpoint) -> list[str]:
    """Return the names of the files of weights, and of their index if they need it."""
    names = [shard.path.name for shard in checkpoint.shards]
    index = checkpoint.folder / SAFE_WEIGHTS_INDEX_NAME
    return [*names, index.name] if index.exists() and names != [SAFE_WEIGHTS_NAME] else names


def _code(folder: Path, config: ResidualConfig) -> list[str]:
    """Return the paths of the Python files that run when the model and its tokenizer are loaded."""
    path = folder / CONFIG_NAME
    referred = references(read_object(path), path)
    # A release of Kimi K3 may refer to code that is not in its directory.
    remedy = f"`attnres convert {folder} OUT` adds the code." if isinstance(config, AttnResKimiK3Config) else _SAVE
    if not referred:
        raise ValueError(f"{path} has no `auto_map`: nothing loads the model where attnres is not installed. {remedy}")
    if elsewhere := next((reference for reference in referred if "--" in reference), None):
        raise ValueError(f"{path} loads the model by code in another repository, {elsewhere!r}. {remedy}")
    for name in side_files(folder):
        if name.endswith(".json"):
            referred += [reference for reference in _references_in(folder, folder / name) if "--" not in reference]
    files: list[Path] = []
    for parts in dict.fromkeys(tuple(module_of(reference, folder)) for reference in referred):
        code = folder.joinpath(*parts[:-1], f"{parts[-1]}.py")
        if not code.is_file():
            raise FileNotFoundError(f"{folder} lacks {code.relative_to(folder)}, which loads the model. {remedy}")
        files += with_imports(code, folder)
    return sorted({file.relative_to(folder).as_posix() for file in files})


def _references_in(folder: Path, path: Path) -> list[str]:
    """Return the references to code in a JSON file, at any depth."""
    check_file(folder, path)
    referred: list[str] = []
    for fields, key in code_fields(read_json(path)):
        if key == AUTO_MAP:
            referred += references(fields, path)
    return referred


def _is_detail(figure: str) -> bool:
    """Return whether a figure shows another view of depth attention than the main one."""
    return "_relative" in figure or "_spread" in figure


def _check_secrets(paths: Sequence[Path]) -> None:
    """Raise ValueError if a file to be published holds a string that looks like a secret."""
    token = get_token()
    secrets = [secret for path in paths for secret in find_secrets(path, token)]
    if secrets:
        others = f" (and {counted(len(secrets) - 1, 'more secret')})" if len(secrets) > 1 else ""
        raise ValueError(
            f"{secrets[0]}{others}. Take it out, and revoke it if it was ever published. Nothing was uploaded."
        )


__all__ = ["CARD", "INSPECTION", "Publication", "make_publication"]
