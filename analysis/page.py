"""The page for people: one HTML file with all that an inspection found, which needs nothing beside it and no network.

The same inspections and figures give the same bytes. What comes from a model or a text is escaped: by jinja2 in HTML,
and within the script element that carries the weights by `_json`.
"""

import base64
import hashlib
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files as resources
from pathlib import Path
from typing import Any
from urllib.parse import quote

import torch
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from attnres.utils.wording import counted

from .inspection import Inspection
from .overview import LABELS, MISSING, differences, key_numbers, number, overview
from .record import plain, versions

# Of each figure its title, what it shows, and how to read it.
FIGURES = {
    "depth_attention": (
        "Depth attention",
        "the weight of each source for each reader, a mean over tokens.",
        "A row is a reader, a column a source, and a darker cell a larger weight. The last cell of a row is the "
        "nearest source, the first column the embedding. The paper has such maps in Figure 8.",
    ),
    "depth_attention_spread": (
        "Depth attention from token to token",
        "the standard deviation of each weight over tokens.",
        "Where a cell is pale, all tokens are mixed alike; where it is dark, the weight depends on the token.",
    ),
    "depth_attention_relative": (
        "Depth attention against even weights",
        "each mean weight over the even one.",
        "One hue has more than its even share, the other less.",
    ),
    "weights_by_depth": (
        "Weights by depth",
        "how far the weights of each reader are from even ones, and how much goes to the embedding, to the nearest "
        "source and to the rest.",
        "Read it from the left, the first sublayer, to the right, the output. The paper finds most weight on the "
        "nearest source, and lasting weight on the embedding.",
    ),
    "mixing": (
        "Depth mixing",
        "how much of each single output every reader gets, a mean over tokens.",
        "A row is a reader, a column the embedding or the output of one sublayer. The standard residual connection has "
        "1 everywhere up to the diagonal.",
    ),
    "magnitudes": (
        "Magnitudes and gradients",
        "root mean squares by depth.",
        "In the paper's Figure 5 magnitudes grow with depth and the first layers get the largest gradients under the "
        "standard residual connection; with attention residuals magnitudes stay bounded and gradients are more even.",
    ),
    "sinks": (
        "Attention sinks",
        "the attention that later tokens give to the first one, by layer.",
        "The line of equal attention is what the first token would get by chance. Far above it, a layer uses the token "
        "as a sink. Layers of linear attention have no weights to show.",
    ),
    "interventions": (
        "Interventions",
        "the rise of the loss when one source is hidden, and when the weights of one reader are made uniform.",
        "A large weight need not mean that a source is used: this tells. Zero means that nothing is lost.",
    ),
}
_TEMPLATES = Path(__file__).parent / "templates"
_SCRIPTS = ("passage.js", "heat_map.js", "report.js")
_BOKEH = ("bokeh.min.js", "bokeh-api.min.js")
_IN_ADDRESSES = " !$()*+,-./:;=?@_~[]{}|^`"  # what can stand in the address of an image as it is
_LEVELS = 2**16 - 1
# What would not be seen; browsers drop some of it.
_HIDDEN = {code: chr(0x2400 + code) for code in range(32)} | {
    code: "·" for code in (0x7F, 0x2028, 0x2029, 0x202A, 0x202E)
}
_MARKS = str.maketrans(_HIDDEN | {ord("\n"): "↵", ord("\t"): "→"})


@dataclass(frozen=True)
class _Word:
    """A word of the text as a button, and the white space around it."""

    before: str
    label: str
    after: str
    blank: str = ""  # what it is, for those who cannot see it, if it is but white space


def render(inspections: Sequence[Inspection], figures: Mapping[str, str], files: Sequence[str] = ()) -> str:
    """The HTML text of the page.

    Args:
        inspections: one, or two that are compared.
        figures: kind -> SVG text, in the order of the page. The kind is a key of `FIGURES`, or such a key and after
            a colon what the figure is of: `mixing: A`.
        files: names of the files beside the page, to be linked.

    Raises:
        ValueError: there are no inspections or more than two, or a figure is of no known kind.
    """
    if len(inspections) not in (1, 2):
        raise ValueError(f"{len(inspections)} inspections were given: a page shows one, or compares two.")
    two = len(inspections) == 2
    scripts = [*map(_bokeh, _BOKEH), *(_text(name) for name in _SCRIPTS)]
    return _template().render(
        title=f"{' and '.join(dict.fromkeys(str(i.model['name']) for i in inspections))} across depth",
        two=two,
        models=[
            {"label": label, "attention": bool(i.depth_attention), "readers": i.depth.readers}
            for label, i in zip(LABELS, inspections)
        ],
        maps=_maps(inspections),
        facts=_facts(inspections),
        sections=overview(inspections),
        numbers=_numbers(inspections),
        strips=_strips(inspections),
        figures=[_figure(kind, svg) for kind, svg in figures.items()],
        files=[{"name": name, "address": quote(name)} for name in files],
        versions=", ".join(f"{name} {version}" for name, version in versions().items()),
        style=Markup(_text("report.css")),
        scripts=[Markup(script) for script in scripts],
        hashes=Markup(" ".join(f"'sha256-{_hash(script)}'" for script in scripts)),
        data=_json([_weights(inspection) for inspection in inspections]),
    )


def _template() -> Any:
    environment = Environment(
        loader=FileSystemLoader(_TEMPLATES), autoescape=True, undefined=StrictUndefined, trim_blocks=True
    )
    return environment.get_template("report.html")


def _facts(inspections: Sequence[Inspection]) -> list[tuple[str, list[str]]]:
    """Name -> one value for each inspection; what none has is left out."""

    def of(inspection: Inspection) -> dict[str, str]:
        model, text = inspection.model, inspection.text
        return {
            "Model": str(model["name"]),
            "Revision": str(model["revision"] or MISSING),
            "Class": model["class"],
            "Residual connection": model["connection"],
            "Size": f"{model['parameters']:,} parameters in {model['dtype']}, hidden size {model['hidden_size']:,}",
            "Depth": f"{counted(model['layers'], 'layer')}, {counted(model['sublayers'], 'sublayer')}",
            "Text": text["name"],
            "Tokens": f"{text['tokens']:,}, in {counted(text['sequences'], 'sequence')} of {text['length']:,}",
            "SHA-256 of the text": text["sha256"][:16] + "…",
        }

    columns = [of(inspection) for inspection in inspections]
    rows = [(name, [column[name] for column in columns]) for name in columns[0]]
    return [row for row in rows if set(row[1]) != {MISSING}]


def _numbers(inspections: Sequence[Inspection]) -> list[tuple[str, list[str]]]:
    """Name -> the key number of each inspection, and of two their difference."""
    differ = dict(differences(*inspections)) if len(inspections) == 2 else {}
    return [
        (name, [number(value, 3) for value in (*values, *([differ[name]] if differ else ()))])
        for name, values in key_numbers(inspections)
    ]


def _maps(inspections: Sequence[Inspection]) -> list[tuple[str, bool]]:
    """What is said of which maps, and whether they are of depth attention."""
    attention = [inspection.depth_attention is not None for inspection in inspections]
    if len(attention) == 1 or attention[0] == attention[1]:
        return [("The map shows" if len(attention) == 1 else "Both maps show", attention[0])]
    return [(f"The map of {label} shows", of) for label, of in zip(LABELS, attention)]


def _strips(inspections: Sequence[Inspection]) -> list[dict[str, Any]]:
    """The words to choose from, with the places of the models that they are for: one strip if words are equal."""
    words = [inspection.passage.words for inspection in inspections]
    shared = len(words) == 2 and words[0] == words[1]
    places = [[0, 1]] if shared else [[place] for place in range(len(words))]
    return [{"models": of, "words": [_word(word) for word in words[of[0]]]} for of in places]


def _word(word: str) -> _Word:
    """White space goes outside the button, so that text runs on as it is; a word of nothing else gets marks for it."""
    word = word.replace("\r\n", "\n").replace("\r", "\n")
    inner = word.strip()
    if inner:
        start = word.index(inner)
        return _Word(word[:start], inner.translate(_MARKS), word[start + len(inner) :])
    line = word[: word.rfind("\n") + 1] or word  # what is after the last break indents the next line
    breaks, indent = "\n" * word.count("\n"), word.removeprefix(line)
    blank = f"white space: {_names_of(word)}" if word else "nothing"
    return _Word("", line.replace(" ", "␣").translate(_MARKS) or "·", breaks + indent, blank)


def _names_of(blank: str) -> str:
    names = {" ": "space", "\n": "line break", "\t": "tab"}
    counts = Counter(names.get(character, "blank") for character in blank)
    return ", ".join(counted(count, name) for name, count in counts.items())


def _figure(kind: str, svg: str) -> dict[str, str]:
    known, _, of = kind.partition(":")
    if known not in FIGURES:
        raise ValueError(f"no figure is known as {known!r}: there are {', '.join(FIGURES)}.")
    title, shows, caption = FIGURES[known]
    return {
        "title": f"{title}, {of.strip()}" if of else title,
        "shows": shows,
        "caption": f"{shows[0].upper()}{shows[1:]} {caption}",
        # White space means nothing in what is drawn, and so written it takes a fifth less than base64.
        "source": f"data:image/svg+xml,{quote(' '.join(svg.split()), safe=_IN_ADDRESSES)}",
    }


def _weights(inspection: Inspection) -> dict[str, Any]:
    """The weights of the passage, for the script.

    A reader whose weights are the same for every token has them as numbers (`constant`). The weights of the others
    follow one another in `data`, each `[sources, tokens]` in 16 bits between the `low` and `high` of the reader.
    """
    attention, depth, passage = inspection.depth_attention, inspection.depth, inspection.passage
    mean = (attention or inspection.mixing).mean
    readers, data = [], bytearray()
    for row, weights in zip(mean, passage.weights):
        weights = weights.double()
        reader = {"mean": plain(row[: len(weights)]), "low": 0.0, "high": 0.0, "constant": None}
        if (weights == weights[:, :1]).all():
            reader["constant"] = plain(weights[:, 0])
        else:
            low, high = reader["low"], reader["high"] = weights.min().item(), weights.max().item()
            levels = ((weights - low) / (high - low) * _LEVELS).round().to(torch.int32)
            data += levels.numpy().astype("<u2").tobytes()
        readers.append(reader)
    return {
        "attention": attention is not None,
        "readers": depth.readers,
        "sources": depth.sources if attention else depth.outputs,
        "tokens": passage.weights[0].shape[1],
        "weights": readers,
        "data": base64.b64encode(data).decode(),
    }


def _json(value: Any) -> Markup:
    """JSON that cannot end the script element it stands in, nor begin a comment there."""
    return Markup(json.dumps(value, ensure_ascii=True, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c"))


def _bokeh(name: str) -> str:
    return (resources("bokeh") / "server" / "static" / "js" / name).read_text(encoding="utf-8")


def _text(name: str) -> str:
    return (_TEMPLATES / name).read_text(encoding="utf-8")


def _hash(script: str) -> str:
    """By which the page's policy knows its own scripts, so that no other runs."""
    return base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()


__all__ = ["FIGURES", "render"]
