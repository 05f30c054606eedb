"""Write model cards: metadata for the Hub, how the model was made, how to use it, and the versions of its code.

`attnres convert` and `attnres train` write `README.md` beside the weights. Each adds its step to the part on how the
model was made. `attnres push` completes the card for the Hub. Text that a person has written stays (`card_text.py`).
"""

import hashlib
import platform
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from importlib.metadata import requires, version
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCard, ModelCardData
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from packaging.requirements import Requirement

from attnres import AttnResKimiK3Config, ResidualConfig
from attnres.checkpoints.kimi_k3 import describe_layout
from attnres.checkpoints.source_files import check_file
from attnres.conversion.family import DEFAULT_CONNECTION
from attnres.family import describe_connection
from attnres.utils.files import atomic_write
from attnres.utils.hub import is_hub_id

from .card_text import (
    add_metadata,
    add_step,
    find_part,
    put_part,
    read_model_card,
    remove_upload_mark,
    split_card,
)
from .markdown import code, escape, python_text, shell_word

CARD = "README.md"
# Auto class -> the Hub's name of the task. A model may have several Auto classes: the first one here counts.
_TASKS = {
    "AutoModelForCausalLM": "text-generation",
    "AutoModelForSequenceClassification": "text-classification",
    "AutoModelForTokenClassification": "token-classification",
    "AutoModelForQuestionAnswering": "question-answering",
    "AutoModel": "feature-extraction",
}
# Metadata of a source that holds for models made from it.
_TERMS = ("license", "license_name", "license_link", "language")
_BY_VLLM = ("llama", "qwen3")  # backbones whose retrofits `tests/peers/test_vllm.py` serves
# The text that `transformers` puts into its template of a card.
_TEMPLATE = (
    "This is the model card of a 🤗 transformers model that has been pushed on the Hub. This model card has been "
    "automatically generated."
)
_MAX_CARD = 2**20  # bytes
_PACKAGES = ("transformers", "torch")  # the model's code needs these; a card names their versions


@dataclass(frozen=True)
class CardSubject:
    """The model that a card is about.

    Attributes:
        config: The model's configuration.
        folder: The directory of its configuration and code.
        source: The directory or Hub id in the card's code for loading it.
        revision: The commit in the card's code for loading it.
        figure: The path of a figure of its depth attention, relative to the card.
        results: Results of evaluations, each with `dataset_id`, `task_id`, `value` and `notes`.
        parameters: The number of its parameters.
        has_tokenizer: Whether a tokenizer is, or will be, published with it.
        code: The paths of its Python files relative to `folder`. By default all in `folder`.
        title: The card's heading. By default the last part of `source`.
        datasets: The Hub ids of the data sets of its training.
        layout: A sentence on the layout of its weights. By default, for Kimi K3, the layout of `save_pretrained`.
        has_hashes: Whether the card lists the Python files with their SHA-256.
    """

    config: ResidualConfig
    folder: Path
    source: str
    revision: str | None = None
    figure: str | None = None
    results: Sequence[Any] = ()
    parameters: int | None = None
    has_tokenizer: bool = True
    code: Sequence[str] | None = None
    title: str | None = None
    datasets: Sequence[str] = field(default=())
    layout: str | None = None
    has_hashes: bool = False

    @property
    def auto_class(self) -> str:
        """The name of the Auto class that loads the model."""
        return next((name for name in _TASKS if name in self.config.auto_map), "AutoModel")


def write_card(subject: CardSubject, step: str, source: Path | None = None, hub_id: str | None = None) -> None:
    """Write the card of a model that was just made, into its directory.

    Args:
        subject: The model.
        step: How the model was made, as Markdown. It follows the steps that made the model's source.
        source: The directory of the source, if there is one, as [`begin_card`] takes it.
        hub_id: The source's id, if it is on the Hub.
    """
    atomic_write(subject.folder / CARD, complete(add_step(begin_card(source, hub_id), step), subject))


def replace_template(subject: CardSubject) -> None:
    """Complete the card in a model's directory, without the unfilled template that `transformers` has written there.

    Raises:
        OSError, ValueError: The card is damaged.
    """
    path = subject.folder / CARD
    text = decode_card(path.read_bytes(), CARD)
    metadata, body = split_card(text)
    try:
        # pyrefly: ignore[bad-argument-type]  # `data` of a `ModelCard` is a `ModelCardData`
        template = ModelCard.from_template(read_model_card(text).data, model_description=_TEMPLATE)
    except (TypeError, ValueError):  # the template cannot hold this metadata
        template = None
    is_unfilled = template is not None and body.strip() == template.text.strip()
    atomic_write(path, complete(metadata if is_unfilled else text, subject))


def begin_card(source: Path | None, hub_id: str | None = None) -> str:
    """Return the card that a model takes over from the model that it is made from.

    Args:
        source: The source's directory. A card of this package is continued; from another card, licence, language and
            base model are taken. A card that cannot be read is ignored, so that it does not stop a conversion.
        hub_id: The source's id, if it is on the Hub.
    """
    try:
        text = (read_card(source) if source is not None else None) or ""
        metadata = read_model_card(text).data
    except (OSError, ValueError):
        text, metadata = "", ModelCardData()
    if find_part(text, "use") is not None:  # this package has written the card
        return remove_upload_mark(text)
    terms: dict[str, Any] = {
        name: metadata[name] for name in _TERMS if metadata.get(name) and _is_plain(metadata[name])
    }
    base = hub_id or metadata.get("base_model")
    # Some tools write the path of a directory as `base_model`. The Hub refuses it, and it would reveal a local path.
    if base and not no_hub_ids(base):
        terms |= {"base_model": base, "base_model_relation": "finetune"}
    data = ModelCardData(**terms)
    return f"---\n{data}\n---\n" if data.to_dict() else ""


def _is_plain(value: object) -> bool:
    """Return whether a value of metadata is a text or a list of texts."""
    return all(isinstance(item, str) for item in (value if isinstance(value, list) else [value]))


def no_hub_ids(value: object) -> list[object]:
    """Return the names in a value of metadata, a name or a list, that cannot be ids of Hub repositories."""
    names = value if isinstance(value, list) else [value]
    return [name for name in names if not isinstance(name, str) or not is_hub_id(name)]


def read_card(folder: Path) -> str | None:
    """Return the card in a model's directory, or None if it has none.

    Raises:
        OSError, ValueError: It is a link out of the directory, has more than 1 MiB, or is not in UTF-8.
    """
    path = folder / CARD
    if not path.exists() and not path.is_symlink():
        return None
    check_file(folder, path)
    if path.stat().st_size > _MAX_CARD:
        raise ValueError(f"{path} has {path.stat().st_size:,} bytes, but a card may have at most {_MAX_CARD:,}.")
    return decode_card(path.read_bytes(), str(path))


def decode_card(content: bytes, name: str) -> str:
    """Decode the bytes of a card.

    Args:
        content: The bytes.
        name: The name of the file, for the message.

    Returns:
        The text.

    Raises:
        ValueError: It is not in UTF-8.
    """
    try:
        return content.decode("utf-8-sig").replace("\r\n", "\n")
    except UnicodeDecodeError as error:
        raise ValueError(f"{name} is not UTF-8 text ({error}). Save it as UTF-8.") from error


def complete(text: str, subject: CardSubject) -> str:
    """Complete a card: add metadata that it lacks, and rewrite the parts that nobody has edited.

    Args:
        text: The card.
        subject: The model.

    Returns:
        The new card.

    Raises:
        ValueError: The metadata is damaged.
    """
    values = {"library_name": "transformers", "pipeline_tag": _TASKS[subject.auto_class]}
    tags = ["attnres", subject.config.residual_connection.replace("_", "-")]
    contents = _render_parts(subject)
    metadata, body = split_card(add_metadata(text, values, {"tags": tags, "datasets": subject.datasets}))
    for name, content in contents.items():
        body = put_part(body, name, content)
    return f"{metadata.rstrip()}\n\n{body.lstrip()}"


def on_hub(folder: Path, name: str) -> tuple[str | None, str | None]:
    """Return the Hub id and the commit of a model, as far as its directory shows them.

    Args:
        folder: The directory it was loaded from, perhaps one of the Hub's cache.
        name: The directory or Hub id that the user gave.

    Returns:
        The id and the commit, each None if it is not known.
    """
    cached = folder.absolute()  # in the Hub's cache: models--ORG--NAME/snapshots/COMMIT
    if cached.parent.name == "snapshots" and cached.parent.parent.name.startswith("models--"):
        return cached.parent.parent.name.removeprefix("models--").replace("--", "/"), cached.name
    return (None, None) if Path(name).exists() else (name, None)


def _render_parts(subject: CardSubject) -> dict[str, str]:
    """Return the content of each part that the template of the card writes. It is empty if the part is not needed."""
    config = subject.config
    is_kimi_k3 = isinstance(config, AttnResKimiK3Config)
    is_of_the_paper = config.residual_connection == DEFAULT_CONNECTION
    facts = {
        "name": subject.title or Path(subject.source).name,
        "source": subject.source,
        "revision": subject.revision,
        "pinned": "revision=revision, " if subject.revision else "",
        "figure": subject.figure,
        "results": subject.results,
        "size": _size(config, subject.parameters),
        "auto_class": subject.auto_class,
        "task": _TASKS[subject.auto_class],
        "generates": subject.auto_class == "AutoModelForCausalLM",
        "has_tokenizer": subject.has_tokenizer,
        "backbone": config.model_type if is_kimi_k3 else config.backbone,
        "layout": subject.layout or describe_layout(config),
        "connection": describe_connection(config),
        "is_of_the_paper": is_of_the_paper,
        "is_served_by_vllm": is_of_the_paper and config.backbone in _BY_VLLM and config.value_residual is None,
        "versions": ", ".join([f"Python {platform.python_version()}", *_installed()]),
        "needed": ", ".join(_needed()),
        "hashes": _hashes(subject) if subject.has_hashes else [],
    }
    environment = Environment(loader=FileSystemLoader(Path(__file__).with_name("templates")), undefined=StrictUndefined)
    environment.filters |= {"text": escape, "code": code, "python": python_text, "word": shell_word}
    template = environment.get_template("model_card.jinja")
    return {name: "".join(block(template.new_context(facts))) for name, block in template.blocks.items()}


def _hashes(subject: CardSubject) -> list[tuple[str, str]]:
    """Return the path and the SHA-256 of each Python file of a model."""
    present = (path.relative_to(subject.folder).as_posix() for path in subject.folder.rglob("*.py") if path.is_file())
    files = sorted(present if subject.code is None else subject.code)
    return [(name, hashlib.sha256((subject.folder / name).read_bytes()).hexdigest()) for name in files]


def _size(config: ResidualConfig, parameters: int | None) -> str:
    """Return the number of parameters, their dtype and the largest length as text, as far as they are known."""
    length = getattr(config, "max_position_embeddings", None)
    facts = [
        f"{parameters:,} parameters" if parameters else "",
        str(config.dtype).removeprefix("torch.") if parameters and config.dtype else "",
        f"up to {length:,} tokens" if length else "",
    ]
    size = ", ".join(filter(None, facts))
    return size[:1].upper() + size[1:]


def _installed() -> list[str]:
    return [f"{name} {version(name)}" for name in ("attnres", *_PACKAGES)]


def _needed() -> Iterable[str]:
    """Yield the packages that a model's code needs, with the oldest versions that this package is tested with."""
    for requirement in map(Requirement, requires("attnres") or ()):
        if requirement.name in _PACKAGES and requirement.marker is None:
            yield f"{requirement.name} {requirement.specifier}".replace(">=", "") + " or newer"


__all__ = [
    "CARD",
    "CardSubject",
    "begin_card",
    "complete",
    "decode_card",
    "no_hub_ids",
    "on_hub",
    "read_card",
    "replace_template",
    "write_card",
]
