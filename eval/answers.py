r"""Extract the answer from a generated text, however it is marked: the flexible filters of the task files.

A filter is `(responses, docs) -> responses`, as the harness's filter `custom` calls it. For each text it returns the
value that the text states, or `[invalid]`. A text that cannot be read with certainty, such as `2\sqrt{3}`, `10-15` or
`(A) or (B)`, has no answer. A part of it, such as 3 or 15, would not be the model's answer.

The time is linear in the length of a text. Each pattern below either matches where it starts, with optional parts only
after a number, or fails within the number where it starts.
"""

# ruff: noqa: RUF001 (the signs of other scripts are what this file is about)
import re
import unicodedata
from collections.abc import Iterable, Sequence
from fractions import Fraction

from .scoring import number

INVALID = "[invalid]"  # as the harness's own filters write it


def last_number(responses: Iterable[Sequence[str]], docs: Sequence[dict]) -> list[list[str]]:
    """Return the last number of each text, where `12%` is 12, for questions that ask for a number of percent.

    Args:
        responses: The generated texts of each item.
        docs: The items; unused.
    """
    return [[_last_number(text).removesuffix("%") for text in texts] for texts in responses]


def last_number_or_percentage(responses: Iterable[Sequence[str]], docs: Sequence[dict]) -> list[list[str]]:
    """Return the last number of each text, where `12%` is 0.12.

    Args:
        responses: The generated texts of each item.
        docs: The items; unused.
    """
    return [[_last_number(text) for text in texts] for texts in responses]


def announced_answer(responses: Iterable[Sequence[str]], docs: Sequence[dict]) -> list[list[str]]:
    """Return what follows the last "answer is" or "answer:" of each text, in the form of the question's answers.

    Args:
        responses: The generated texts of each item.
        docs: The items. If an item has `options`, or its `input` lists them as `(A)`, the answer must be one of them.
    """
    return [
        [_announced(text, has_options="options" in doc or "(A)" in doc.get("input", "")) for text in texts]
        for texts, doc in zip(responses, docs, strict=True)
    ]


# --- One form for each sign ---------------------------------------------------------------------------------------

_SUPERSCRIPTS = {"⁻": "-"} | {character: str(digit) for digit, character in enumerate("⁰¹²³⁴⁵⁶⁷⁸⁹")}
_SUPERSCRIPT = re.compile("[⁻⁰¹²³⁴⁵⁶⁷⁸⁹]+")
_FULL_WIDTH_COMMA = re.compile("(?<=[０-９])，(?=[０-９])")
# LaTeX -> what it stands for. Thousands are written `1{,}800`, `1,\!800` or `1\,800`.
_LATEX = [
    (re.compile(r"\{,\}"), ","),
    (re.compile(r"\\!"), ""),
    (re.compile(r"\\[,;: ]|~"), " "),
    (re.compile(r"\\([$%])"), r"\1"),
    (re.compile(r"\\(?:left|right)(?![a-z])"), ""),
    (re.compile(r"\\[dtc]frac"), r"\\frac"),
    (re.compile(r"\\(?:times|cdot)(?![a-z])"), "×"),
    (re.compile(r"\\div(?![a-z])"), "÷"),
]


class _Ascii(dict):
    """A table for `str.translate` that replaces digits, signs, spaces and currencies of any script by ASCII."""

    _SIGNS = {
        "\N{MINUS SIGN}": "-",
        "\N{EN DASH}": "-",
        "\N{FIGURE DASH}": "-",
        "\N{NON-BREAKING HYPHEN}": "-",
        "\N{FRACTION SLASH}": "/",
        "\N{DIVISION SLASH}": "/",
        "\N{ARABIC PERCENT SIGN}": "%",
        "\N{ARABIC DECIMAL SEPARATOR}": ".",
        "\N{ARABIC THOUSANDS SEPARATOR}": ",",
        "\N{RIGHT SINGLE QUOTATION MARK}": "'",
        # It stays, because in Chinese it separates clauses, each of which may contain a number.
        "\N{FULLWIDTH COMMA}": "\N{FULLWIDTH COMMA}",
    }

    def __missing__(self, code: int) -> str:
        character = chr(code)
        category = unicodedata.category(character)
        if character in self._SIGNS:
            plain = self._SIGNS[character]
        elif category == "Nd":
            plain = str(unicodedata.decimal(character))
        elif category == "Sc":
            plain = "$"
        elif category == "Zs":
            plain = " "
        elif category == "Cf":  # invisible, such as a mark of direction
            plain = ""
        elif category == "No" and "\N{FRACTION SLASH}" in (parts := unicodedata.normalize("NFKC", character)):
            plain = " " + parts.replace("\N{FRACTION SLASH}", "/")  # 1½ = 1 1/2
        elif "\N{FULLWIDTH EXCLAMATION MARK}" <= character <= "\N{FULLWIDTH TILDE}":
            plain = chr(code - 0xFEE0)
        else:
            plain = character
        self[code] = plain
        return plain


_ASCII = _Ascii()


def _plain(text: str) -> str:
    """Return a text in which digits, signs, spaces, currencies, exponents and fractions have one form each."""
    text = _FULL_WIDTH_COMMA.sub(",", text)
    text = _SUPERSCRIPT.sub(lambda run: "^{" + "".join(map(_SUPERSCRIPTS.__getitem__, run[0])) + "}", text)
    text = text.translate(_ASCII)
    for pattern, replacement in _LATEX:
        text = pattern.sub(replacement, text)
    return text


# --- The last number ----------------------------------------------------------------------------------------------

# 1800, 1,800.50, 1 800, 1'800, .5
_NUMERAL = r"(?:\d{1,3}(?:[ '_]\d{3}(?!\d))+(?:[.,]\d+)?|\d+(?:[.,]\d+)*|(?<![A-Za-z0-9.)])\.\d+)"
_LATEX_FRACTION = rf"\\frac[ ]?(?:\{{[ ]?-?{_NUMERAL}[ ]?\}}|\d)[ ]?(?:\{{[ ]?{_NUMERAL}[ ]?\}}|\d)"
_EXPONENT = r"(?:\{[ ]?[+-]?\d{1,4}[ ]?\}|[+-]?\d{1,4}(?!\d))"

_TOKEN = re.compile(
    rf"""
    # Not numbers: x_1, m^2, and values that cannot be read: a root, a fraction of anything but numbers. An underscore
    # that follows nothing marks a number, as in __18__.
      (?P<unreadable> \\sqrt(?:\[[^][{{}}]*\])?[ ]?(?:\{{[^{{}}]*\}}|\d+) | √[ ]?\d+
        | (?!{_LATEX_FRACTION}) \\frac[ ]?(?:\{{[^{{}}]*\}}|\d)?[ ]?(?:\{{[^{{}}]*\}}|\d)? )
    | (?P<index> (?:\^|(?<=[A-Za-zÀ-Ͽ0-9)\]}}'])_)[ ]?(?:\{{[^{{}}]*\}} | -?\d+) )
    | (?P<number>
        # A dash before a space is the mark of a list, except after `=` and the like.
        (?P<sign> (?<![\d)\]}}%])-(?=\$?[ ]?[\d.\\]) | (?:(?<==[ ])|(?<=\bis[ ])|(?<=[=({{$]))-[ ](?=[\d.\\])
          | \$[ ]?-(?=[\d.\\]) | [负負][ ]?(?=[\d.]) | \b(?:minus|negative)[ ](?=\$?[\d.\\]) )?
        (?:\$[ ]?|\b(?:USD|EUR|GBP|CNY|RMB|INR|Rs)\.?[ ]?)?
        (?: # 1又4分之3, 百分之12
            (?:(?P<whole_zh>\d+)又)? (?P<below_zh>\d+|百)分之(?P<above_zh>{_NUMERAL})
            # 1\frac{{3}}{{4}}
          | (?P<latex>{_LATEX_FRACTION})
          | (?P<first>{_NUMERAL})
            (?: (?P<power>[ ]?\^[ ]?{_EXPONENT})
              | (?P<e>[eE][+-]?\d{{1,4}}(?![\dA-Za-z]))
              | (?P<times_power>[ ]?[×*][ ]?10[ ]?\^[ ]?{_EXPONENT})
              | (?:[ ]?又[ ]?|[ ]and[ ]|[ ]?)(?P<and_latex>{_LATEX_FRACTION})
              | (?:[ ]?又[ ]?|[ ]and[ ]|[ ])(?P<and_above>\d+)[ ]?/[ ]?(?P<and_below>\d+)
              | [ ]?/[ ]?(?P<below>{_NUMERAL})
            )?
        )
        (?P<percent>[ ]?%)?
        (?:[ ](?P<magnitude>hundred|thousand|million|billion|trillion)\b(?!-))?
        (?P<factor>[ ]?(?:\\pi|π))?
      )
    # Not a number either: a digit in a name, such as m2, x18 or COVID-19.
    | (?P<name> [A-Za-zÀ-ɏ]+(?:-?\d+(?:[.,]\d+)*)? )
    """,
    re.VERBOSE,
)
_MAGNITUDES = {"hundred": 10**2, "thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12}
# A text between two numbers that makes the second a part of an expression (20 - 2), a range, a ratio or one of several
# answers.
_JOINED = re.compile(
    r"[)}\]*_]*(?P<space> ?)(?:[-+×÷·/:^]|\*{1,2})(?P=space)[({\[*_]*"
    r"|[*_$,)} ]*(?:(?<![A-Za-z])(?:or|and)(?![A-Za-z])|或者?|和|、)[*_$({ ]*"
)
# A text before a number that is not the answer: `not 7`, `不是7`.
_DENIED = re.compile(r"(?:\bnot|不是|并非)[\s*_$({\\]*\Z", re.IGNORECASE)
_NEAR = 40  # how many characters before a number can change its meaning


def _last_number(text: str) -> str:
    """Return the last number that a text states, in a form that `scoring.number` reads."""
    text = _plain(text if isinstance(text, str) else "")
    answer, end = INVALID, -_NEAR - 1  # `end` of the last number
    for token in _TOKEN.finditer(text):
        start = token.start()
        if token["unreadable"]:
            answer, end = INVALID, token.end()
        elif token["number"]:
            if start - end <= _NEAR and _is_joined(text[end:start], token["sign"]):
                answer = INVALID
            elif not _DENIED.search(text[max(0, start - _NEAR) : start]):
                answer = _value(token)
            end = token.end()
    return answer


def _is_joined(between: str, sign: str | None) -> bool:
    """Return whether a number belongs to the one before it, given the text between them."""
    return bool(_JOINED.fullmatch(between)) or (sign == "-" and not between.strip(" "))


def _value(token: re.Match) -> str:
    """Return the value of a number token: as it is written if it is one numeral, otherwise computed."""
    if token["factor"]:
        return INVALID
    sign, percent = ("-" if token["sign"] else ""), ("%" if token["percent"] else "")
    if token["above_zh"] and token["below_zh"] == "百":
        return f"{sign}{_numeral(token['above_zh'])}%"
    tail = ("power", "e", "times_power", "and_latex", "and_above", "below", "magnitude")
    if token["first"] and not any(token[name] for name in tail):
        return sign + _numeral(token["first"]) + percent
    try:
        value = _computed(token) * _MAGNITUDES.get(token["magnitude"], 1)
    except (ArithmeticError, ValueError):
        return INVALID
    return f"{-value if sign else value}{percent}"


def _numeral(text: str) -> str:
    """Return a numeral without the spaces and marks between its thousands."""
    return re.sub("[ '_]", "", text)


def _read(text: str) -> Fraction:
    """Return the value of a numeral. Raise ValueError if it is not one."""
    if (value := number(_numeral(text))) is None:
        raise ValueError(f"{text} is not a number")
    return value


def _computed(token: re.Match) -> Fraction:
    """Return the value of a fraction, mixed number or power. Raise ValueError or ArithmeticError if it has none."""
    if token["above_zh"]:
        part = _read(token["above_zh"]) / _read(token["below_zh"])
        return _mixed(token["whole_zh"], part) if token["whole_zh"] else part
    if token["latex"]:
        return _latex_fraction(token["latex"])
    first = _read(token["first"])
    if token["power"]:
        return _power(first, token["power"])
    if token["e"] or token["times_power"]:
        return first * _power(Fraction(10), token["e"] or token["times_power"].partition("10")[2])
    if token["and_latex"]:
        return _mixed(token["first"], _latex_fraction(token["and_latex"]))
    if token["and_above"]:
        return _mixed(token["first"], _read(token["and_above"]) / _read(token["and_below"]))
    return first / _read(token["below"]) if token["below"] else first


def _mixed(whole: str, part: Fraction) -> Fraction:
    """Return the value of a mixed number such as 1 3/4. Raise ValueError if it is not one."""
    if not 0 < part < 1 or _read(whole).denominator != 1:
        raise ValueError("not a mixed number")
    return _read(whole) + part


def _latex_fraction(text: str) -> Fraction:
    braced = re.findall(r"\{([^}]*)\}|(\d)", text)
    above, below = (_read(in_braces or digit) for in_braces, digit in braced)
    return above / below


def _power(base: Fraction, exponent: str) -> Fraction:
    power = int(exponent.strip("eE^{} "))
    # A few characters, such as 9^9999, stand for a number too long to compute.
    if abs(power) > 100 or base.numerator.bit_length() + base.denominator.bit_length() > 100:
        raise ValueError("too large")
    return base**power


# --- The announced answer -----------------------------------------------------------------------------------------

# `The answer is`, `Answer:`, `**Answer**:`, `**Final answer:**`
_ANNOUNCEMENT = re.compile(r"\banswer\b[*_\s]*(?:is\b[*_\s]*[:：]?|[:：])", re.IGNORECASE)
_MARKS = " \t*_$`\"'“”‘’"
_WRAPPED = re.compile(r"\\(?:boxed|fbox|text|textbf|textrm|mathrm|mathbf)\s*\{")
_MAX_NESTED = 4  # `\boxed{\textbf{A}}` has two levels
_BUT = re.compile(r"not\b.*?\bbut\b(?:\s+rather\b)?\s*(.*)", re.IGNORECASE)
_OPTION = re.compile(r"(?:option |choice )?(?:\(([A-Za-z])\)|([A-Z])(?=[).:,]|\s*\Z))", re.IGNORECASE)
_ANOTHER_OPTION = re.compile(r"\s*(?:,|/|&|\band\b|\bor\b)\s*(?:option )?(?:\([A-Za-z]\)|[A-Z](?=[).]|\s*\Z))")


def _announced(text: str, has_options: bool) -> str:
    """Return the last answer that a text announces."""
    announcements = _ANNOUNCEMENT.finditer(text if isinstance(text, str) else "")
    announcement = max(announcements, key=re.Match.start, default=None)
    if announcement is None:
        return INVALID
    # An answer may stand on the line after its announcement.
    line = text[announcement.end() :].lstrip(_MARKS + "\r\n").partition("\n")[0]
    if contrast := _BUT.match(line):
        line = contrast[1]
    line = _unmarked(line)
    if has_options:
        return _option(line)
    plain = _plain(line)
    token = _TOKEN.match(plain)
    if token is not None and token["number"] and token.end() == len(plain) and not token["percent"]:
        value = number(_value(token))
        if value is not None and value.denominator == 1:
            return str(value)
    return line or INVALID


def _unmarked(line: str) -> str:
    """Return an answer without bold, quotes, boxes and the point that ends the sentence."""
    line = line.strip(_MARKS + "\r").removeprefix(r"\(").removeprefix(r"\[").strip()
    for _ in range(_MAX_NESTED):
        if (wrapped := _WRAPPED.match(line)) is None:
            break
        content, depth = [], 1
        for character in line[wrapped.end() :]:
            depth += (character == "{") - (character == "}")
            if depth == 0:
                break
            content.append(character)
        line = "".join(content).strip(_MARKS)
    line = line.rstrip(_MARKS + "\r").removesuffix(r"\)").removesuffix(r"\]").rstrip(_MARKS)
    return line.removesuffix(".").rstrip(_MARKS)


def _option(line: str) -> str:
    """Return the one option that an answer begins with, such as `(A)`, or its text if it begins with no letter.

    In a few questions of BBH, the gold answer is the text of an option.
    """
    plain = re.sub("[*_$`]", "", line.translate(_ASCII)).strip()
    option = _OPTION.match(plain)
    if option is None:
        return line or INVALID
    if _ANOTHER_OPTION.match(plain, option.end()):
        return INVALID
    return f"({(option[1] or option[2]).upper()})"


__all__ = ["INVALID", "announced_answer", "last_number", "last_number_or_percentage"]
