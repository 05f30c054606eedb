"""Functions that the task files name where YAML is not enough: scorers, targets and choices of shots.

A filter of the task file extracts the answer from the generated text. A scorer reads that answer as a number or a name
and compares it with the gold answer. lm_eval calls it as `(doc, results) -> {metric: 0.0 or 1.0}`, where `results`
holds the one filtered answer.
"""

import random
import re
import string
import unicodedata
from fractions import Fraction

import datasets

_GROUPED_BY_COMMAS = re.compile(r"[+-]?\d{1,3}(,\d{2,3})*,\d{3}(\.\d+)?")  # also 1,00,000, as written in India
_GROUPED_BY_SPACES = re.compile(r"[+-]?\d{1,3}(\s\d{3})+(\.\d+)?")
_GROUPED_BY_POINTS = re.compile(r"[+-]?\d{1,3}(\.\d{3})+")
_WHOLE = re.compile(r"[+-]?\d[\d,\s]*")
_CHINESE_FRACTION = re.compile(r"(\d+)分之(\d+)")
# ASCII punctuation and typographic quotes.
_PUNCTUATION = str.maketrans({mark: " " for mark in string.punctuation + "\u2018\u2019\u00b4"})
_CMATH_TOLERANCE = Fraction(1, 100)


def number(text: str) -> Fraction | None:
    """Return the exact number that a short answer states, or `None` if it states none.

    It may have a sign, thousands separators, decimals, a dollar sign, and a point that ends the sentence. It may be a
    fraction such as `3/4` or `4分之3` (= 3/4), or a percentage such as `12%` (= 0.12).
    """
    text = _plain(text)
    if fraction := _CHINESE_FRACTION.fullmatch(text):
        text = f"{fraction[2]}/{fraction[1]}"
    percent = text.endswith("%")
    text = text.removesuffix("%").strip()
    if _GROUPED_BY_COMMAS.fullmatch(text) or _GROUPED_BY_SPACES.fullmatch(text):
        text = re.sub(r"[,\s]", "", text)
    try:
        value = Fraction(text.replace(",", "."))
    except (ValueError, ZeroDivisionError):
        return None
    return value / 100 if percent else value


def _plain(text: str) -> str:
    """Return a text with ASCII digits and signs, without a dollar sign and the point that ends the sentence."""
    return unicodedata.normalize("NFKC", text).replace("\N{MINUS SIGN}", "-").replace("$", "").strip().rstrip(".,。 ")


def gsm8k(doc: dict, results: list[str]) -> dict[str, float]:
    """Score 1 if the answer equals the number after `####` in the reference solution.

    Args:
        doc: The item, with `answer`.
        results: The one filtered answer.
    """
    gold = number(doc["answer"].split("####")[-1])
    return {"exact_match": float(number(results[0]) == gold)}


def mgsm(doc: dict, results: list[str]) -> dict[str, float]:
    """Score 1 if the answer equals the gold whole number.

    Args:
        doc: The item, with `answer_number`.
        results: The one filtered answer.
    """
    gold, text = doc["answer_number"], results[0]
    readings = [number(text)]
    # In some of the languages, 276000 is written 276.000.
    if _GROUPED_BY_POINTS.fullmatch(_plain(text)):
        readings.append(number(text.replace(".", "")))
    return {"exact_match": float(gold in readings)}


def mgsm_target(doc: dict) -> str:
    """Return the worked answer of a shot without its label, which ends in a colon."""
    if doc["answer"] is None:  # an item that is asked has a number alone
        return str(doc["answer_number"])
    return re.split("[:\N{FULLWIDTH COLON}]", doc["answer"], maxsplit=1)[1].strip()


def math(doc: dict, results: list[str]) -> dict[str, float]:
    """Score 1 if one of the two judges of lm_eval's `minerva_math` accepts the answer.

    Some reference solutions end with several boxes, of which any one is right. math-verify wants all of them. Minerva's
    rule compares with the last box, and knows fewer forms of one answer.

    Args:
        doc: The item, as lm_eval prepares it.
        results: The generated text.
    """
    # Imports sympy, which takes a second.
    from lm_eval.tasks.minerva_math.utils import process_results

    return {"exact_match": float(max(process_results(doc, results).values()))}


def cmath(doc: dict, results: list[str]) -> dict[str, float]:
    """Score 1 if the answer agrees with the gold one by the rule of the authors' script (XiaoMi/cmath on GitHub).

    Two whole numbers must be equal. If one of them is a decimal, fraction or percentage:

        |answer - gold| / (min(|answer|, |gold|) + 1e-6) < 0.01

    Args:
        doc: The item, with `golden`.
        results: The one filtered answer.
    """
    answer, gold = number(results[0]), number(doc["golden"])
    if gold is None:
        raise ValueError(f"the gold answer {doc['golden']!r} is not a number")
    if answer is None:
        return {"exact_match": 0.0}
    if all(_is_whole(text) for text in (results[0], doc["golden"])):
        return {"exact_match": float(answer == gold)}
    difference = abs(answer - gold) / (min(abs(answer), abs(gold)) + Fraction(1, 10**6))
    return {"exact_match": float(difference < _CMATH_TOLERANCE)}


def _is_whole(text: str) -> bool:
    """Return whether a number is written as a whole number. `1,810` is one, but `2,5` and `18.00` are decimals."""
    value = number(text)
    return value is not None and value.denominator == 1 and _WHOLE.fullmatch(_plain(text)) is not None


def triviaqa(doc: dict, results: list[str]) -> dict[str, float]:
    """Score 1 if the answer is one of the accepted names, up to case, articles, punctuation and spaces.

    Args:
        doc: The item, with `answer`, which holds `value` and `aliases`.
        results: The one filtered answer.
    """
    answer = _name(results[0])
    accepted = {_name(alias) for alias in [doc["answer"]["value"], *doc["answer"]["aliases"]]}
    return {"exact_match": float(bool(answer) and answer in accepted)}


def _name(text: str) -> str:
    """Return a name in lower case without articles and punctuation. A name of articles alone, as "A", stays."""
    words = unicodedata.normalize("NFC", text).lower().translate(_PUNCTUATION).split()
    return " ".join([word for word in words if word not in ("a", "an", "the")] or words)


def gpqa(dataset: datasets.Dataset) -> datasets.Dataset:
    """Return GPQA with its four choices shuffled, as `choice1` to `choice4`, and the letter of the right one.

    The order depends on the question's text alone, so it is the same in every process and for every limit.
    """

    def shuffle(doc: dict) -> dict:
        columns = ["Correct Answer", "Incorrect Answer 1", "Incorrect Answer 2", "Incorrect Answer 3"]
        order = random.Random(doc["Question"]).sample(columns, k=4)
        choices = {f"choice{place}": doc[column].strip() for place, column in enumerate(order, start=1)}
        return {**choices, "answer": "({})".format("ABCD"[order.index("Correct Answer")])}

    return dataset.map(shuffle)  # pyrefly: ignore[bad-return]  # its decorator is annotated for both kinds


def mbpp_shots(dataset: datasets.Dataset) -> datasets.Dataset:
    """Return the three problems that the authors of MBPP use as shots: numbers 2, 3 and 4 of the split `prompt`."""
    # pyrefly: ignore[bad-return]  # its decorator is annotated for both kinds
    return dataset.filter(lambda doc: doc["task_id"] in (2, 3, 4))
