"""Scorers and shots that the task files name where YAML cannot say it.

A filter of the task file cuts the answer out of the generated text; what is here reads that answer as a number or a
name and compares it with the gold one. A scorer is `(doc, results) -> {metric: 0.0 or 1.0}`, where `results` holds the
one filtered answer, as lm_eval calls it.
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
_CHINESE_FRACTION = re.compile(r"(\d+)分之(\d+)")
# ASCII punctuation and typographic quotes.
_PUNCTUATION = str.maketrans(dict.fromkeys(string.punctuation + "\u2018\u2019\u00b4", " "))
_CMATH_TOLERANCE = Fraction(1, 100)


def number(text: str) -> Fraction | None:
    """The number that a short answer states, exactly, or None if it states none.

    Reads signs, thousands separators, decimals, `3/4`, `4分之3` (= 3/4), `12%` (= 0.12) and a dollar sign; a point that
    ends the sentence does not count.
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
    """The text in ASCII forms of digits and signs, without currency and the end of a sentence."""
    return unicodedata.normalize("NFKC", text).replace("\N{MINUS SIGN}", "-").replace("$", "").strip().rstrip(".,。 ")


def gsm8k(doc: dict, results: list[str]) -> dict[str, float]:
    """1 if the answer is the number after `####` in the reference solution."""
    gold = number(doc["answer"].split("####")[-1])
    return {"exact_match": float(number(results[0]) == gold)}


def mgsm(doc: dict, results: list[str]) -> dict[str, float]:
    """1 if the answer is the gold whole number; in some of the languages 276.000 is how one writes it."""
    gold, text = doc["answer_number"], results[0]
    readings = [number(text)]
    if _GROUPED_BY_POINTS.fullmatch(_plain(text)):
        readings.append(number(text.replace(".", "")))
    return {"exact_match": float(gold in readings)}


def mgsm_target(doc: dict) -> str:
    """The worked answer of a shot without its label, which ends in a colon; of other documents the number."""
    if doc["answer"] is None:
        return str(doc["answer_number"])
    return re.split("[:\N{FULLWIDTH COLON}]", doc["answer"], maxsplit=1)[1].strip()


def math(doc: dict, results: list[str]) -> dict[str, float]:
    """1 if either judge of lm_eval's `minerva_math` says so.

    math-verify compares with all that the reference solution has in boxes at its end, also where any one of them is
    right; Minerva's own rule compares with the last box, and knows fewer forms of one answer.
    """
    from lm_eval.tasks.minerva_math.utils import process_results

    return {"exact_match": float(max(process_results(doc, results).values()))}


def cmath(doc: dict, results: list[str]) -> dict[str, float]:
    """1 if the answer agrees with the gold one as the authors' evaluation script has it (XiaoMi/cmath on GitHub).

    Two whole numbers have to be equal. Where one is a decimal, fraction or percentage:

        |answer - gold| / (min(|answer|, |gold|) + 1e-6) < 0.01
    """
    answer, gold = number(results[0]), number(doc["golden"])
    if answer is None:
        return {"exact_match": 0.0}
    if _plain(results[0]).lstrip("+-").isdecimal() and doc["golden"].isdecimal():
        return {"exact_match": float(answer == gold)}
    difference = abs(answer - gold) / (min(abs(answer), abs(gold)) + Fraction(1, 10**6))
    return {"exact_match": float(difference < _CMATH_TOLERANCE)}


def triviaqa(doc: dict, results: list[str]) -> dict[str, float]:
    """1 if the answer is one of the accepted names, up to case, articles, punctuation and spaces."""
    answer = _name(results[0])
    accepted = {_name(alias) for alias in [doc["answer"]["value"], *doc["answer"]["aliases"]]}
    return {"exact_match": float(bool(answer) and answer in accepted)}


def _name(text: str) -> str:
    words = unicodedata.normalize("NFC", text).lower().translate(_PUNCTUATION).split()
    return " ".join([word for word in words if word not in ("a", "an", "the")] or words)


def gpqa(dataset: datasets.Dataset) -> datasets.Dataset:
    """GPQA with its four choices in an order that depends on the question's text alone, as `choice1` to `choice4`.

    The order is the same in every process, for every limit and every choice of tasks.
    """

    def shuffle(doc: dict) -> dict:
        columns = ["Correct Answer", "Incorrect Answer 1", "Incorrect Answer 2", "Incorrect Answer 3"]
        order = random.Random(doc["Question"]).sample(columns, k=4)
        choices = {f"choice{place}": doc[column].strip() for place, column in enumerate(order, start=1)}
        return {**choices, "answer": "({})".format("ABCD"[order.index("Correct Answer")])}

    return dataset.map(shuffle)


def mbpp_shots(dataset: datasets.Dataset) -> datasets.Dataset:
    """The three problems that the authors of MBPP show: numbers 2, 3 and 4 of the split `prompt`."""
    return dataset.filter(lambda doc: doc["task_id"] in (2, 3, 4))
