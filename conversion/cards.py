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
from huggingface_hub.repocard import REGEX_YAML_BLOCK
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from packaging.requirements import Requirement

from attnres import ResidualConfig
from attnres.files import atomic_write

from .card_parts import is_edited, part, put, unmarked
from .family import DEFAULT_CONNECTION
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
_NOT_A_CARD = "This model card has been automatically generated."  # in the template that `transformers` fills in


@dataclass(frozen=True)
class Subject:
    """A model that a card is about, and what of it is known.

    Attributes:
        folder: with its configuration and code.
        source: the directory or Hub id that a reader loads it from; `revision`: of that.
        code: the paths of its Python files; by default all that lie in `folder`.
        title: what the card calls it; by default the last part of `source`.
        figure: the path of a figure of its depth attention, beside the card.
        results: of evaluations, each with `dataset_id`, `task_id`, `value` and `notes`.
        has_tokenizer: a tokenizer is, or will be, published with it.
    """

    config: ResidualConfig
    folder: Path
    source: str
    revision: str | None = None
    figure: str | None = None
    results: Sequence[Any] = ()
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
        folder: of the source. A card of this package's goes on; of another one, licence and language are kept.
        hub_id: of the source, where it is on the Hub.
    """
    text = read_card(folder) if folder is not None else None
    if text is not None and part(text, "use") is not None:
        return unmarked(text)
    said = _metadata(text or "")
    base = hub_id or said.get("base_model")
    terms = {name: said[name] for name in _TERMS if name in said}
    relation = {"base_model": base, "base_model_relation": "finetune"} if base else {}
    return str(ModelCard(_document(ModelCardData(**terms, **relation, tags=[]), "")))


def read_card(folder: Path) -> str | None:
    """The card in a model's directory, if it has one. Raises OSError, ValueError: it cannot be read as one."""
    path = folder / CARD
    if not path.exists():
        return None
    check_text(folder, path)
    return path.read_text(encoding="utf-8", errors="replace").replace("\r\n", "\n")


def is_template(text: str) -> bool:
    """Whether a card is the template of `transformers`, which says nothing yet."""
    return _NOT_A_CARD in text


def add_step(text: str, step: str) -> str:
    """The card with one more step of how the model was made, whoever has written the others."""
    said = part(text, "origin")
    if said is None:
        return put(text, "origin", _render("origin", steps=[step]))
    if not is_edited(text, "origin"):
        return put(text, "origin", f"{said}\n\n{step}")
    return text.replace(said, f"{said}\n\n{step}")


def complete(text: str, subject: Subject) -> str:
    """The card with all that is known of a model now: metadata that it lacks, and the parts that nobody has edited.

    Raises:
        ValueError: its metadata is not a YAML block that the Hub takes.
    """
    try:
        card = ModelCard(text)
    except (ValueError, TypeError, AttributeError, yaml.YAMLError) as error:
        reason = " ".join(str(error).split())
        raise ValueError(f"the metadata of {CARD} cannot be read: {reason}") from error
    if _add_metadata(card.data, subject):
        text = str(card)
    block = REGEX_YAML_BLOCK.match(text)
    head, body = (text[: block.end()], text[block.end() :]) if block else ("", text)
    for name in ("summary", "use", "results", "files"):
        content = _render(name, **_facts(subject)) if name != "results" or subject.results else ""
        body = put(body, name, content)
    return f"{head}\n{body.lstrip()}" if head else body


def write_card(text: str, subject: Subject) -> None:
    """Complete a card and write it into the model's directory."""
    atomic_write(subject.folder / CARD, complete(text, subject))


def linked(hub_id: str | None, name: str, commit: str | None = None) -> str:
    """A model as a card names it: by a link to the Hub, or by the last part of a local path."""
    if hub_id is None:
        return f"`{Path(name).name}`"
    at = f" at revision [`{commit[:10]}`](https://huggingface.co/{hub_id}/tree/{commit})" if commit else ""
    return f"[{hub_id}](https://huggingface.co/{hub_id}){at}"


def on_hub(folder: Path, name: str) -> tuple[str | None, str | None]:
    """The Hub id and the commit of a model that was loaded as `name` from `folder`, as far as that shows."""
    cached = folder.absolute()
    if cached.parent.name == "snapshots" and cached.parent.parent.name.startswith("models--"):
        return cached.parent.parent.name.removeprefix("models--").replace("--", "/"), cached.name
    return (None, None) if Path(name).exists() else (name, None)


def _add_metadata(data: ModelCardData, subject: Subject) -> bool:
    """Fill in what is not said; whether anything was."""
    before = data.to_dict()
    connection = subject.config.residual_connection
    for name, value in {"library_name": "transformers", "pipeline_tag": _TASKS[subject.auto_class]}.items():
        if data.get(name) is None:
            data[name] = value
    for name, values in {
        "datasets": subject.datasets,
        "tags": ["attnres", connection.replace("_", "-")],
    }.items():
        said = data.get(name) or []
        said = [said] if isinstance(said, str) else list(said)
        data[name] = [*said, *(value for value in dict.fromkeys(values) if value not in said)] or None
    return data.to_dict() != before


def _metadata(text: str) -> dict[str, Any]:
    """What a card of anybody's says in its metadata; nothing if that is damaged."""
    match = REGEX_YAML_BLOCK.search(text)
    try:
        said = yaml.safe_load(match[2]) if match else None
    except yaml.YAMLError:
        said = None
    return {key: value for key, value in said.items() if value} if isinstance(said, dict) else {}


def _document(data: ModelCardData, body: str) -> str:
    return f"---\n{data.to_yaml()}\n---\n{body}"


def _facts(subject: Subject) -> dict[str, Any]:
    """What the template says of a model."""
    config = subject.config
    found = (path.relative_to(subject.folder).as_posix() for path in subject.folder.rglob("*.py") if path.is_file())
    code = sorted(found if subject.code is None else subject.code)
    return {
        "name": subject.title or Path(subject.source).name,
        "source": subject.source,
        "revision": subject.revision,
        "pinned": "revision=revision, " if subject.revision else "",
        "figure": subject.figure,
        "results": subject.results,
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
        "code": [(name, hashlib.sha256((subject.folder / name).read_bytes()).hexdigest()) for name in code],
    }


_PACKAGES = ("transformers", "torch")


def _installed() -> list[str]:
    return [f"{name} {version(name)}" for name in ("attnres", *_PACKAGES)]


def _needed() -> Iterable[str]:
    """What the code of a model needs: the oldest versions that this package is tested with."""
    for requirement in map(Requirement, requires("attnres") or ()):
        if requirement.name in _PACKAGES and requirement.marker is None:
            yield f"{requirement.name} {requirement.specifier}".replace(">=", "") + " or newer"


def _cell(value: object) -> str:
    return " ".join(str(value).split()).replace("|", "\\|")


@cache
def _template() -> Any:
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).with_name("templates")), undefined=StrictUndefined, trim_blocks=False
    )
    environment.filters["cell"] = _cell
    return environment.get_template("model_card.jinja")


def _render(block: str, **facts: Any) -> str:
    template = _template()
    return "".join(template.blocks[block](template.new_context(facts)))


__all__ = [
    "CARD",
    "Subject",
    "add_step",
    "complete",
    "is_template",
    "linked",
    "new_card",
    "on_hub",
    "read_card",
    "write_card",
]
