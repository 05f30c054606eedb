"""Model cards: the metadata that the Hub reads, how the model was made, how to use it, and what code it runs.

`attnres convert` and `attnres train` write `README.md` beside the weights, each a step of how the model was made;
`attnres push` completes it for the Hub. What a person has written in it stays (`card_parts`).
"""

import hashlib
import platform
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib.metadata import requires, version
from pathlib import Path
from typing import Any

import yaml
from huggingface_hub import ModelCard, ModelCardData
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from packaging.requirements import Requirement

from attnres import ResidualConfig
from attnres.utils.files import atomic_write

from .card_metadata import filled, joined, read, split
from .card_parts import appended, part, put, unmarked
from .family import DEFAULT_CONNECTION
from .markdown import code, escape, is_hub_id, link, python_text, shell_word
from .source_files import check_text

CARD = "README.md"
# Auto class -> the Hub's name of the task; of several that a model has, the first is its own.
_TASKS = {
    "AutoModelForCausalLM": "text-generation",
    "AutoModelForSequenceClassification": "text-classification",
    "AutoModelForTokenClassification": "token-classification",
    "AutoModelForQuestionAnswering": "question-answering",
    "AutoModel": "feature-extraction",
}
_TERMS = ("license", "license_name", "license_link", "language")  # what a source's card says that holds for the result
_BY_VLLM = ("llama", "qwen3")  # backbones whose retrofits `tests/peers/test_vllm.py` serves
# What `transformers` fills the template of a card with.
_TEMPLATE = (
    "This is the model card of a 🤗 transformers model that has been pushed on the Hub. This model card has been "
    "automatically generated."
)
_MAX_CARD = 2**20  # bytes


@dataclass(frozen=True)
class CardSubject:
    """A model that a card is about, and what of it is known.

    Attributes:
        folder: with its configuration and code.
        source: the directory or Hub id that a reader loads it from; `revision`: of that.
        code: the paths of its Python files; by default all that lie in `folder`.
        title: what the card calls it; by default the last part of `source`.
        figure: the path of a figure of its depth attention, beside the card.
        results: of evaluations, each with `dataset_id`, `task_id`, `value` and `notes`.
        parameters: how many numbers its weights have.
        has_tokenizer: a tokenizer is, or will be, published with it.
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

    @property
    def auto_class(self) -> str:
        return next((name for name in _TASKS if name in self.config.auto_map), "AutoModel")


def new_card(folder: Path | None = None, hub_id: str | None = None) -> str:
    """The card that a model made of another one begins with.

    Args:
        folder: of the source. A card of this package's goes on; of another one, licence and language are kept. One that
            cannot be read says nothing: a model is made whatever lies beside its weights.
        hub_id: of the source, where it is on the Hub.
    """
    try:
        text = (read_card(folder) if folder is not None else None) or ""
        said = read(text)
    except (OSError, ValueError):
        text, said = "", {}
    if part(text, "use") is not None:
        return unmarked(text)
    terms = {name: said[name] for name in _TERMS if said.get(name) and _is_plain(said[name])}
    if "language" in terms:
        terms["language"] = _languages(terms["language"])
    base = hub_id or said.get("base_model")
    # Tools that load a model from a directory write its path there: the Hub refuses it, and it tells of a machine.
    is_public = base and not no_hub_ids(base)
    relation = {"base_model": base, "base_model_relation": "finetune"} if is_public else {}
    data = ModelCardData(**terms, **relation)
    return str(ModelCard(joined(data.to_yaml(), ""))) if data.to_dict() else ""


def _is_plain(value: object) -> bool:
    """Whether a value of metadata is a text or several, as the fields that are taken over have to be."""
    return all(isinstance(item, str | bool) for item in (value if isinstance(value, list) else [value]))


def no_hub_ids(value: object) -> list[object]:
    """Return what of a value of metadata, one name or a list of them, cannot be the id of a repository of the Hub."""
    names = value if isinstance(value, list) else [value]
    return [name for name in names if not isinstance(name, str) or not is_hub_id(name)]


def _languages(value: Any) -> Any:
    """Norwegian, `no`, is read as false."""
    return [_languages(item) for item in value] if isinstance(value, list) else "no" if value is False else value


def read_card(folder: Path) -> str | None:
    """The card in a model's directory, if it has one.

    Raises:
        OSError, ValueError: it is no file there, or larger than a card, or no text in UTF-8.
    """
    path = folder / CARD
    if not path.exists() and not path.is_symlink():
        return None
    check_text(folder, path)
    if path.stat().st_size > _MAX_CARD:
        raise ValueError(f"{path} has {path.stat().st_size:,} bytes, but a card may have {_MAX_CARD:,}.")
    return decode_card(path.read_bytes(), str(path))


def decode_card(content: bytes, name: str) -> str:
    """The text of a card. Raises ValueError: it is not in UTF-8."""
    try:
        return content.decode("utf-8-sig").replace("\r\n", "\n")
    except UnicodeDecodeError as error:
        raise ValueError(f"{name} is no text in UTF-8 ({error}). Save it as such.") from error


def without_template(text: str) -> str:
    """A card, or its metadata alone where the text is the template of `transformers`, which says nothing yet."""
    metadata, said = split(text)
    try:
        read(text)  # bounds what aliases repeat, which `ModelCard` does not
        template = ModelCard.from_template(ModelCard(text).data, model_description=_TEMPLATE)
    except (TypeError, ValueError, yaml.YAMLError):  # it has metadata that no template has
        return text
    return joined(metadata, "") if said.strip() == template.text.strip() else text


def add_step(text: str, step: str) -> str:
    """The card with one more step of how the model was made, whoever has written the others."""
    metadata, body = split(text)
    if part(body, "origin") is None:
        return joined(metadata, put(body, "origin", _render("origin", steps=[step])))
    return joined(metadata, appended(body, "origin", step))


def complete(text: str, subject: CardSubject) -> str:
    """The card with all that is known of a model now: metadata that it lacks, and the parts that nobody has edited.

    Raises:
        ValueError: its metadata is damaged.
    """
    values = {"library_name": "transformers", "pipeline_tag": _TASKS[subject.auto_class]}
    tags = ["attnres", subject.config.residual_connection.replace("_", "-")]
    metadata, body = split(filled(text, values, {"tags": tags, "datasets": subject.datasets}))
    for name in ("summary", "use", "results", "files"):
        content = _render(name, **_facts(subject)) if name != "results" or subject.results else ""
        body = put(body, name, content)
    return joined(metadata, body)


def write_card(text: str, subject: CardSubject) -> None:
    """Complete a card and write it into the model's directory."""
    atomic_write(subject.folder / CARD, complete(text, subject))


def linked(hub_id: str | None, name: str, commit: str | None = None) -> str:
    """Return a model as a card names it: by a link to the Hub, or by the last part of a local path."""
    return code(Path(name).name) if hub_id is None else link(hub_id, commit=commit)


def on_hub(folder: Path, name: str) -> tuple[str | None, str | None]:
    """The Hub id and the commit of a model that was loaded as `name` from `folder`, as far as that shows."""
    cached = folder.absolute()
    if cached.parent.name == "snapshots" and cached.parent.parent.name.startswith("models--"):
        return cached.parent.parent.name.removeprefix("models--").replace("--", "/"), cached.name
    return (None, None) if Path(name).exists() else (name, None)


def _facts(subject: CardSubject) -> dict[str, Any]:
    """What the template says of a model."""
    config = subject.config
    found = (path.relative_to(subject.folder).as_posix() for path in subject.folder.rglob("*.py") if path.is_file())
    files = sorted(found if subject.code is None else subject.code)
    return {
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
        "backbone": config.backbone,
        "connection": config.connection.describe(config),
        "is_of_the_paper": config.residual_connection == DEFAULT_CONNECTION,
        "is_served_by_vllm": config.backbone in _BY_VLLM and config.residual_connection == DEFAULT_CONNECTION,
        "versions": ", ".join([f"Python {platform.python_version()}", *_installed()]),
        "needed": ", ".join(_needed()),
        "code": [(name, hashlib.sha256((subject.folder / name).read_bytes()).hexdigest()) for name in files],
    }


def _size(config: ResidualConfig, parameters: int | None) -> str:
    length = getattr(config, "max_position_embeddings", None)
    counts = [f"{parameters:,} parameters" if parameters else "", f"up to {length:,} tokens" if length else ""]
    dtype = str(config.dtype).removeprefix("torch.") if parameters and config.dtype else ""
    return ", ".join(filter(None, [counts[0], dtype, counts[1]]))


_PACKAGES = ("transformers", "torch")


def _installed() -> list[str]:
    return [f"{name} {version(name)}" for name in ("attnres", *_PACKAGES)]


def _needed() -> Iterable[str]:
    """What the code of a model needs: the oldest versions that this package is tested with."""
    for requirement in map(Requirement, requires("attnres") or ()):
        if requirement.name in _PACKAGES and requirement.marker is None:
            yield f"{requirement.name} {requirement.specifier}".replace(">=", "") + " or newer"


@cache
def _template() -> Any:
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).with_name("templates")), undefined=StrictUndefined, trim_blocks=False
    )
    environment.filters |= {"text": escape, "code": code, "python": python_text, "word": shell_word}
    return environment.get_template("model_card.jinja")


def _render(block: str, **facts: Any) -> str:
    template = _template()
    return "".join(template.blocks[block](template.new_context(facts)))


__all__ = [
    "CARD",
    "CardSubject",
    "add_step",
    "complete",
    "decode_card",
    "linked",
    "new_card",
    "no_hub_ids",
    "on_hub",
    "read_card",
    "without_template",
    "write_card",
]
