"""Render the findings of an inspection as one HTML page, which needs neither other files nor a network.

The same inspections and figures give the same bytes. Text from a model or a data set is escaped: by jinja2 in HTML, and
by `_json` within the script element that holds the weights.
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

from attnres.utils.extras import require_extra
from attnres.utils.wording import counted

from .inspection import LABELS, PASSAGE_TOKENS, Inspection, passage_tokens
from .key_numbers import MISSING, differences, key_numbers, number
from .overview import overview
from .record import plain, versions

with require_extra("analysis"):
    import bokeh
    from jinja2 import Environment, FileSystemLoader, StrictUndefined
    from markupsafe import Markup

# Kind of figure -> its title, what it shows, and how to read it.
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
        "Depth attention against uniform weights",
        "each mean weight divided by the uniform one.",
        "Cells of one hue have more than an even share of the weight, cells of the other hue less.",
    ),
    "weights_by_depth": (
        "Weights by depth",
        "how far the weights of each reader are from uniform ones, and how much goes to the embedding, to the nearest "
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
        "The line of uniform attention is the share that the first token would get by chance. A layer far above it "
        "uses the token as a sink. Layers of linear attention have no weights to show.",
    ),
    "interventions": (
        "Interventions",
        "the rise of the loss when one source is hidden, and when the weights of one reader are made uniform.",
        "A large weight need not mean that the model uses the source; the rise of the loss shows its use. Zero means "
        "that nothing is lost.",
    ),
}
_TEMPLATES = Path(__file__).parent / "templates"
_SCRIPTS = ("passage.js", "heat_map.js", "report.js")
_BOKEH_SCRIPTS = ("bokeh.min.js", "bokeh-api.min.js")
# Characters that need no escape in the address of an image.
_SAFE_IN_ADDRESSES = " !$()*+,-./:;=?@_~[]{}|^`"
_LEVELS = 2**16 - 1  # the highest level of a weight in 16 bits
# Control characters, some of which browsers drop, get visible signs.
_CONTROL_SIGNS = {code: chr(0x2400 + code) for code in range(32)} | {
    code: "·" for code in (0x7F, 0x2028, 0x2029, 0x202A, 0x202E)
}
_VISIBLE = str.maketrans(_CONTROL_SIGNS | {ord("\n"): "↵", ord("\t"): "→"})


@dataclass(frozen=True)
class _Word:
    """The button of a word of the text, and the white space around it."""

    before: str
    label: str
    after: str
    spoken: str = ""  # for screen readers, the name of a word that is nothing but white space


def render(inspections: Sequence[Inspection], figures: Mapping[str, str], files: Sequence[str] = ()) -> str:
    """Render the page.

    Args:
        inspections: One inspection, or two that are compared.
        figures: The SVG text of each figure by its kind, in the order of the page. A kind is a key of `FIGURES`, or
            such a key followed by a colon and a label, as in `mixing: A`.
        files: The names of files in the folder of the page, to which the page links.

    Returns:
        The HTML text.

    Raises:
        ValueError: There are no inspections or more than two, or the kind of a figure is not known.
    """
    if len(inspections) not in (1, 2):
        raise ValueError(f"{len(inspections)} inspections were given: a page shows one, or compares two.")
    is_comparison = len(inspections) == 2
    scripts = [*map(_bokeh_script, _BOKEH_SCRIPTS), *map(_template_text, _SCRIPTS)]
    environment = Environment(
        loader=FileSystemLoader(_TEMPLATES), autoescape=True, undefined=StrictUndefined, trim_blocks=True
    )
    return environment.get_template("report.html").render(
        counted=counted,
        title=f"{' and '.join(dict.fromkeys(str(i.model['name']) for i in inspections))} across depth",
        two=is_comparison,
        models=[
            {"label": label, "attention": bool(i.depth_attention), "readers": i.depth.consumers}
            for label, i in zip(LABELS, inspections)
        ],
        maps=_map_sentences(inspections),
        facts=_facts(inspections),
        sections=overview(inspections),
        numbers=_key_number_rows(inspections),
        strips=_strips(inspections),
        figures=[_figure(kind, svg) for kind, svg in figures.items()],
        files=[{"name": name, "address": quote(name)} for name in files],
        versions=", ".join(f"{name} {version}" for name, version in versions().items()),
        style=Markup(_template_text("report.css")),
        scripts=[Markup(script) for script in scripts],
        # The page's policy allows only scripts with these hashes. A script in the name of a model would not run.
        hashes=Markup(" ".join(f"'sha256-{_sha256(script)}'" for script in scripts)),
        data=_json([_passage_data(inspection) for inspection in inspections]),
    )


def _facts(inspections: Sequence[Inspection]) -> list[tuple[str, list[str]]]:
    """Return the facts about models and texts: pairs of a name and the value of each inspection."""

    def facts_of(inspection: Inspection) -> dict[str, str]:
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

    columns = [facts_of(inspection) for inspection in inspections]
    rows = [(name, [column[name] for column in columns]) for name in columns[0]]
    return [row for row in rows if set(row[1]) != {MISSING}]


def _key_number_rows(inspections: Sequence[Inspection]) -> list[tuple[str, list[str]]]:
    """Return the key numbers: pairs of a name and the number of each inspection, with the difference of two."""
    by_name = dict(differences(*inspections)) if len(inspections) == 2 else {}
    return [
        (name, [number(value, 3) for value in (*values, *([by_name[name]] if by_name else ()))])
        for name, values in key_numbers(inspections)
    ]


def _map_sentences(inspections: Sequence[Inspection]) -> list[tuple[str, bool]]:
    """Return the beginnings of the sentences about the maps, each with whether the map shows depth attention."""
    has_attention = [inspection.depth_attention is not None for inspection in inspections]
    if len(has_attention) == 1:
        return [("The map shows", has_attention[0])]
    if has_attention[0] == has_attention[1]:
        return [("Both maps show", has_attention[0])]
    return [(f"The map of {label} shows", has) for label, has in zip(LABELS, has_attention)]


def _strips(inspections: Sequence[Inspection]) -> list[dict[str, Any]]:
    """Return the strips of words to click on, each with the indices of its models: one strip if words are equal."""
    words = [inspection.passage.words for inspection in inspections]
    is_shared = len(words) == 2 and words[0] == words[1]
    model_indices = [[0, 1]] if is_shared else [[index] for index in range(len(words))]
    return [
        {
            "models": indices,
            "words": [_word(word) for word in words[indices[0]]],
            "shortened_to": _shortened_to(inspections[indices[0]]),
            "prompt": inspections[indices[0]].passage.prompt,
            "tokens": len(words[indices[0]]),
        }
        for indices in model_indices
    ]


def _shortened_to(inspection: Inspection) -> int | None:
    """Return how many tokens the passage has, if it has fewer because the model is deep; else `None`."""
    limit = passage_tokens(inspection.depth)
    return limit if limit < min(PASSAGE_TOKENS, inspection.text["length"]) else None


def _word(word: str) -> _Word:
    """Split a word into the label of its button and the white space around it, which keeps the layout of the text."""
    word = word.replace("\r\n", "\n").replace("\r", "\n")
    inner = word.strip()
    if inner:
        start = word.index(inner)
        return _Word(word[:start], inner.translate(_VISIBLE), word[start + len(inner) :])
    # A word of white space alone gets a button with visible signs. White space after its last line break stays outside
    # the button, since it indents the next line.
    line = word[: word.rfind("\n") + 1] or word
    breaks, indent = "\n" * word.count("\n"), word.removeprefix(line)
    spoken = f"white space: {_names_of(word)}" if word else "nothing"
    return _Word("", line.replace(" ", "␣").translate(_VISIBLE) or "·", breaks + indent, spoken)


def _names_of(blank: str) -> str:
    """Name white space in words: `2 line breaks, 1 tab`."""
    names = {" ": "space", "\n": "line break", "\t": "tab"}
    counts = Counter(names.get(character, "blank") for character in blank)
    return ", ".join(counted(count, name) for name, count in counts.items())


def _figure(kind: str, svg: str) -> dict[str, str]:
    """Return the texts of a figure, and its address, which contains the figure itself."""
    key, _, label = kind.partition(":")
    if key not in FIGURES:
        raise ValueError(f"the kind of a figure must be one of {', '.join(FIGURES)}, got {key!r}.")
    title, shows, caption = FIGURES[key]
    return {
        "title": f"{title}, {label.strip()}" if label else title,
        "shows": shows,
        "caption": f"{shows[0].upper()}{shows[1:]} {caption}",
        # White space has no meaning in an SVG file. Percent encoding takes a fifth less space than base64.
        "source": f"data:image/svg+xml,{quote(' '.join(svg.split()), safe=_SAFE_IN_ADDRESSES)}",
    }


def _passage_data(inspection: Inspection) -> dict[str, Any]:
    """Return the weights of the passage, for the script `passage.js`.

    If the weights of a consumer are the same for every token, they are numbers in `constant`. The weights of the other
    consumers follow one another in `data`, in base64: for each consumer `[sources, tokens]` levels in 16 bits, where 0
    is its `low` and 65535 its `high`.
    """
    attention, depth, passage = inspection.depth_attention, inspection.depth, inspection.passage
    mean = (attention or inspection.mixing).mean
    consumers, data = [], bytearray()
    for row, weights in zip(mean, passage.weights):
        weights = weights.double()
        consumer = {"mean": plain(row[: len(weights)]), "low": 0.0, "high": 0.0, "constant": None}
        if (weights == weights[:, :1]).all():
            consumer["constant"] = plain(weights[:, 0])
        else:
            low, high = consumer["low"], consumer["high"] = weights.min().item(), weights.max().item()
            levels = ((weights - low) / (high - low) * _LEVELS).round().to(torch.int32)
            data += levels.numpy().astype("<u2").tobytes()
        consumers.append(consumer)
    return {
        "attention": attention is not None,
        "readers": depth.consumers,
        "sources": depth.sources if attention else depth.outputs,
        "tokens": passage.weights[0].shape[1],
        "weights": consumers,
        "data": base64.b64encode(data).decode(),
    }


def _json(value: Any) -> Markup:
    """Return JSON that can neither end the script element around it nor begin a comment there."""
    return Markup(json.dumps(value, ensure_ascii=True, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c"))


def _bokeh_script(name: str) -> str:
    return (resources(bokeh) / "server" / "static" / "js" / name).read_text(encoding="utf-8")


def _template_text(name: str) -> str:
    return (_TEMPLATES / name).read_text(encoding="utf-8")


def _sha256(script: str) -> str:
    return base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()


__all__ = ["FIGURES", "render"]
