r"""The flexible filters extract the value that a text states, or nothing, but never another value."""

# ruff: noqa: RUF001 (the signs of other scripts are what is tested)
import statistics
import time
from fractions import Fraction

import pytest

from attnres.eval import answers, scoring

# The end of a generated text -> the number that it states, or None for no answer.
NUMBERS = [
    # Marks.
    ("The answer is **18**.", 18),
    ("The answer is __18__.", 18),
    ("_18_", 18),
    ("***__18__***", 18),
    ("__$1_800__", 1800),
    ("__-5__", -5),
    ("答案是__18__。", 18),
    ("答案是_18_。", 18),
    ("She has ___18___ left.", 18),
    (r"Thus $\boxed{18}$.", 18),
    (r"\boxed{18\text{ dollars}}", 18),
    ("#### 18", 18),
    ("\\[ 20 - 2 = 18 \\]", 18),
    ("20-2=18", 18),
    ("She pays 18 dollars!", 18),
    # Thousands.
    ("1,800", 1800),
    (r"\boxed{1{,}800}", 1800),
    (r"\boxed{1,\!800}", 1800),
    (r"$1\,800$", 1800),
    ("1 800", 1800),
    ("1\N{THIN SPACE}800", 1800),
    ("1\N{NARROW NO-BREAK SPACE}800", 1800),
    ("1\N{NO-BREAK SPACE}800\N{NO-BREAK SPACE}000.5", Fraction("1800000.5")),
    ("1'800", 1800),
    ("1\N{RIGHT SINGLE QUOTATION MARK}800", 1800),
    ("1_800", 1800),
    ("1,00,000", 100000),
    ("１，８００", 1800),
    ("小明有5，400人", 400),  # two clauses
    # Signs.
    ("\N{MINUS SIGN}5", -5),
    ("it is \N{EN DASH}5", -5),
    ("－５", -5),
    ("x=-5", -5),
    ("x = - 5", -5),
    ("-$18", -18),
    ("$-18", -18),
    ("minus 5", -5),
    ("是负5", -5),
    (r"-\frac{3}{4}", Fraction(-3, 4)),
    ("Costs:\n- 5 dollars", 5),
    # Decimals and fractions.
    (".5", Fraction(1, 2)),
    ("It is $.50.", Fraction(1, 2)),
    ("-.5", Fraction(-1, 2)),
    ("so...5", 5),
    (r"\frac{3}{4}", Fraction(3, 4)),
    (r"\dfrac{3}{4}", Fraction(3, 4)),
    (r"\frac34", Fraction(3, 4)),
    (r"\frac{-3}{4}", Fraction(-3, 4)),
    ("3 / 4", Fraction(3, 4)),
    ("3\N{FRACTION SLASH}4", Fraction(3, 4)),
    ("¾", Fraction(3, 4)),
    ("1½", Fraction(3, 2)),
    ("1又1/2", Fraction(3, 2)),
    ("1又2分之1", Fraction(3, 2)),
    ("-1 1/2", Fraction(-3, 2)),
    ("1 and 1/2", Fraction(3, 2)),
    (r"1\frac{1}{2}", Fraction(3, 2)),
    ("4分之3", Fraction(3, 4)),
    ("1/0", None),
    ("1 3/2", None),
    # Powers.
    ("1.8e3", 1800),
    (r"1.8 \times 10^{3}", 1800),
    ("1.8 × 10³", 1800),
    ("5*10^-1", Fraction(1, 2)),
    ("2^{10}", 1024),
    ("1e9999", None),
    ("9^9999", None),
    # Units, currencies and names.
    ("18 m²", 18),
    ("18 m^2", 18),
    ("18 cm^{2}", 18),
    ("18 m2", 18),
    (r"18\text{ m}^2", 18),
    ("18kg", 18),
    ("€18", 18),
    ("US$18", 18),
    ("USD 18", 18),
    ("Rs.500", 500),
    ("18 元", 18),
    ("18 in COVID-19", 18),
    ("x_1 = 18 = x_2", 18),
    (r"18 = \text{total}_{2}", 18),
    ("18 is α_2", 18),
    ("18 is f(x)_2", 18),
    ("3 million", 3_000_000),
    ("2 hundred-dollar bills", 2),
    # Other scripts.
    ("১৮", 18),
    ("๑๘", 18),
    ("答案：１８。", 18),
    ("１８．５", Fraction(37, 2)),
    # Numbers that are not the answer.
    ("The answer is not 7 but 18.", 18),
    ("It is 18, not __7__.", 18),
    ("The answer is 18, not 7.", 18),
    ("答案是18，不是7。", 18),
    # Several answers, ranges, and expressions without a result.
    ("18 or 20", None),
    ("**18** or **20**", None),
    ("__18__ or __20__", None),
    ("**10**-**15**", None),
    ("__20__ - __2__", None),
    ("18和20", None),
    ("10-15", None),
    ("10\N{EN DASH}15", None),
    ("20 - 2", None),
    ("20 * 2", None),
    ("(3+4)*2", None),
    ("3:4", None),
    ("12:30", None),
    ("3/4/2020", None),
    ("1.2.3", None),
    ("3,4,5", None),
    (r"\sqrt{3}", None),
    (r"2\sqrt{3}", None),
    (r"\sqrt[3]{8}", None),
    (r"2\pi", None),
    (r"\frac{a}{2}", None),
    ("eighteen", None),
    ("", None),
    # The last of several statements counts.
    ("First 18, then 7.", 7),
    ("It is 18.\n2 apples are left.", 2),
    ("Step 1: 18", 18),
]


@pytest.mark.parametrize(("text", "value"), NUMBERS)
def test_the_last_number_is_read_if_the_text_states_a_single_value(text, value):
    for before in ("", "We had 3 apples.\n"):
        for extract in (answers.last_number, answers.last_number_or_percentage):
            ((taken,),) = extract([[before + text]], [{}])
            assert scoring.number(taken) == (3 if before and text in ("", "eighteen") else value), taken


@pytest.mark.parametrize("text", ["12%", r"12\%", "12 %", "12％", "百分之12", r"\boxed{12\%}"])
def test_a_percentage_is_read_as_a_number_of_percent_or_as_a_fraction(text):
    assert answers.last_number([[text]], [{}]) == [["12"]]
    assert scoring.number(answers.last_number_or_percentage([[text]], [{}])[0][0]) == Fraction(12, 100)


OPTIONS = {"input": "Which?\nOptions:\n(A) a dog\n(B) a cat"}
LETTERS = {"question": "Which?", "options": ["dog", "cat"]}
OPEN = {"input": "What?"}
ANNOUNCED = [
    *((OPTIONS, f"So the answer is {text}", "(A)") for text in ("(A).", "A", "A.", "A)", "**A**", "**(A)**", "（Ａ）")),
    *((OPTIONS, f"So the answer is {text}", "(A)") for text in (r"\boxed{A}", r"$\boxed{\text{(A)}}$.", "option A.")),
    (OPTIONS, "**Answer**: (A)", "(A)"),
    (OPTIONS, "**Answer:** (A) a dog", "(A)"),
    (OPTIONS, "Final answer： (A)", "(A)"),
    (OPTIONS, "Answer:\n(A)", "(A)"),
    (OPTIONS, "The answer is not (B) but (A).", "(A)"),
    (OPTIONS, "The answer is not B, the answer is A.", "(A)"),
    (OPTIONS, "The answer is (B). No, the answer is (A).", "(A)"),
    (OPTIONS, "The answer is (A) or (B).", None),
    (OPTIONS, "The answer is A and B.", "A and B"),
    (OPTIONS, "The answer is (A), (B).", None),
    (OPTIONS, "The answer is not (A).", "not (A)"),
    (OPTIONS, "The answer is A dog.", "A dog"),
    (OPTIONS, "The answer is", None),
    (OPTIONS, "Not sure, (A)", None),
    *((LETTERS, f"So the answer is {text}", "(J)") for text in ("(J).", "J", ": (J)", "**(J)**", r"\boxed{J}")),
    (LETTERS, "The answer is Because it is so.", "Because it is so"),
    (OPEN, "So the answer is \N{MINUS SIGN}50.", "-50"),
    (OPEN, "The answer is ８.", "8"),
    (OPEN, r"The answer is $\boxed{1{,}234}$.", "1234"),
    (OPEN, "The answer is **yes**.", "yes"),
    (OPEN, 'The answer is "plausible".', "plausible"),
    (OPEN, "The answer is ] ) } >.", "] ) } >"),
    (OPEN, "**Answer**: alpha beta", "alpha beta"),
    (OPEN, "The answer is", None),
    (OPEN, "yes", None),
]


@pytest.mark.parametrize(("doc", "text", "answer"), ANNOUNCED)
def test_the_announced_answer_has_the_form_of_the_gold_answers(doc, text, answer):
    assert answers.announced_answer([[text]], [doc]) == [[answer or answers.INVALID]]


RUNS = ["1", "1,", "1 ", "123 ", "1/", "1 / ", "1-", "-", "- ", "$", "1^", "\\frac{", "\\sqrt[", "_{", "1又", "a1-"]
RUNS += ["answer ", "answer is", "answer:*", "not ", "\\boxed{", "(A)", "1 and ", "1.", "百分之", "% (1"]


@pytest.mark.parametrize("extract", [answers.last_number, answers.announced_answer])
@pytest.mark.parametrize("run", RUNS)
def test_a_long_answer_takes_time_in_proportion_to_its_length(extract, run):
    def seconds(length: int) -> float:
        text = "the answer is " + run * (length // len(run))
        started = time.process_time()
        extract([[text]], [OPEN])
        return time.process_time() - started

    # Quadratic time would be 64 times longer for 8 times the text.
    ratios = [seconds(16_000) / max(seconds(2_000), 1e-4) for _ in range(3)]
    assert statistics.median(ratios) < 30
