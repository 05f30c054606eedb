"""What of a model's directory `attnres push` publishes: its files, checked, and its card."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatch
from pathlib import Path
from tempfile import TemporaryDirectory

from huggingface_hub import EvalResultEntry, get_token
from transformers.utils import CONFIG_NAME, SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME

from attnres import ResidualConfig
from attnres.utils.hub import check_path
from attnres.utils.wording import counted

from .cards import CARD, CardSubject, complete, new_card, read_card
from .checkpoint import DTYPES, Checkpoint, open_checkpoint
from .complete import complete_model, read_config
from .published_names import side_files, vocabularies
from .secret_scan import find_secrets
from .side_files import TOKENIZER_FILES
from .source import unpublished_model
from .source_code import AUTO_MAP, module_of, objects, references, with_imports
from .source_files import check_file, check_text, read_json, read_object

RESULTS, INSPECTION = ".eval_results", "inspection"


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
    subject: CardSubject

    @property
    def weights(self) -> list[str]:
        """The paths of the files that are large."""
        return [name for name in self.files if name.endswith(".safetensors")]

    def card_for(self, repo: str, revision: str | None, card: str | None = None) -> str:
        """The card (this one, or another version of it) of the repository at a commit."""
        return complete(card or self.card, replace(self.subject, source=repo, revision=revision))


def plan_publication(
    folder: Path,
    results: Mapping[Path, Sequence[EvalResultEntry]] | None = None,
    report: Mapping[str, Path] | None = None,
) -> Publication:
    """Choose and check the files of a model's directory that are published.

    A file goes by a name that is known, never by a pattern: weights by their index, code by what refers to it, and the
    rest by `published_names`. All others stay.

    Args:
        results: of evaluations, which go along, by their files.
        report: the files of a report of `attnres inspect` by their names, as `attnres.analysis.report_files` finds
            them. They are published in the folder `inspection`.

    Raises:
        OSError, RuntimeError, ValueError: the model is incomplete or damaged or none of the family, or cannot be loaded
            by the code beside it; or a file holds what looks like a secret.
    """
    if (folder / "adapter_config.json").exists() and not (folder / CONFIG_NAME).exists():
        raise ValueError(
            f"{folder} holds an adapter, which does not load without its base. Publish the merged model (merge=true in "
            "the recipe), or the adapter by PEFT's own push_to_hub."
        )
    config, checkpoint = _check_model(folder)
    code = _code(folder, config)
    names = [CONFIG_NAME, *_weights(checkpoint), *code, *side_files(folder), *vocabularies(folder, code)]
    files = {name: folder / name for name in dict.fromkeys(names)}
    for path in files.values():
        check_file(folder, path)
    for path in (report or {}).values():
        check_file(folder if path.parent == folder / INSPECTION else path.parent, path)
    files |= {f"{INSPECTION}/{name}": path for name, path in (report or {}).items()}
    files |= {f"{RESULTS}/{path.name}": path for path in results or ()}
    there = (path for path in sorted(folder.rglob("*")) if path.is_file() and path.name != ".gitattributes")
    left_out = [n for n in (path.relative_to(folder).as_posix() for path in there) if n not in {*files, CARD}]
    card = read_card(folder)
    _check_secrets([*files.values(), *([folder / CARD] if card else [])])
    figures = [name for name in files if fnmatch(name, f"{INSPECTION}/depth_attention*.png") and not _is_detail(name)]
    subject = CardSubject(
        config,
        folder,
        str(folder),
        figure=figures[0] if len(figures) == 1 else None,  # of two models, whose it is does not show
        results=[entry for entries in (results or {}).values() for entry in entries],
        parameters=_count(checkpoint),
        code=[name for name in files if name.endswith(".py")],
        has_tokenizer=any(name in files for name in TOKENIZER_FILES),
    )
    publication = Publication(files, left_out, card if card is not None else new_card(), subject)
    try:
        publication.card_for("org/name", None)
    except ValueError as error:
        raise ValueError(f"{folder / CARD} cannot be read: {error}.") from error
    return publication


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
        if unpublished_model(checkpoint, config) is not None:
            raise ValueError(
                f"{folder} is a checkpoint that a run goes on from. Publish the model that it writes at its end, or "
                f"make one of this: `attnres convert`."
            )
        complete_model(checkpoint, config)
    return config, checkpoint


def _count(checkpoint: Checkpoint) -> int | None:
    """How many numbers the weights have; those of packed, quantised ones are not counted."""
    dtypes = {DTYPES.get(entry.dtype) for entry in checkpoint.entries.values()}
    if any(dtype is None or not dtype.is_floating_point for dtype in dtypes):
        return None
    return sum(math.prod(entry.shape) for entry in checkpoint.entries.values())


def _weights(checkpoint: Checkpoint) -> list[str]:
    names = [shard.path.name for shard in checkpoint.shards]
    index = checkpoint.folder / SAFE_WEIGHTS_INDEX_NAME
    return [*names, index.name] if index.exists() and names != [SAFE_WEIGHTS_NAME] else names


def _code(folder: Path, config: ResidualConfig) -> list[str]:
    """The Python files that loading runs: what `auto_map` refers to, and what came with a source's tokenizer."""
    path = folder / CONFIG_NAME
    found = references(read_object(path), path)
    if not found:
        raise ValueError(f"{path} has no `auto_map`: nothing loads the model where attnres is not installed. {_SAVE}")
    if elsewhere := next((reference for reference in found if "--" in reference), None):
        raise ValueError(f"{path} loads the model by code in another repository, {elsewhere!r}. {_SAVE}")
    for name in side_files(folder):
        if name.endswith(".json"):
            found += [reference for reference in _references_in(folder, folder / name) if "--" not in reference]
    files: list[Path] = []
    for parts in dict.fromkeys(tuple(module_of(reference, folder)) for reference in found):
        code = folder.joinpath(*parts[:-1], f"{parts[-1]}.py")
        if not code.is_file():
            raise FileNotFoundError(f"{folder} lacks {code.relative_to(folder)}, which loads the model. {_SAVE}")
        files += with_imports(code, folder)
    return sorted({file.relative_to(folder).as_posix() for file in files})


def _references_in(folder: Path, path: Path) -> list[str]:
    """The code that a JSON file refers to, at whatever depth."""
    check_text(folder, path)
    found: list[str] = []
    for fields in objects(read_json(path)):
        # In a vocabulary, the names are tokens, and have numbers.
        if not isinstance(fields.get(AUTO_MAP, 0), int):
            found += references(fields, path)
    return found


_SAVE = "Save it again by `save_pretrained`."


def _is_detail(figure: str) -> bool:
    return "_relative" in figure or "_spread" in figure


def _check_secrets(paths: Sequence[Path]) -> None:
    """Raises ValueError: a file to be published holds what looks like a secret."""
    token = get_token()
    found = [secret for path in paths for secret in find_secrets(path, token)]
    if found:
        others = (
            f" (and there {'are' if len(found) > 2 else 'is'} {counted(len(found) - 1, 'more secret')})"
            if len(found) > 1
            else ""
        )
        raise ValueError(
            f"{found[0]}{others}. Take it out, and revoke it if it was ever published. Nothing was uploaded."
        )


__all__ = ["CARD", "INSPECTION", "Publication", "plan_publication"]
