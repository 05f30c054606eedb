"""Right answers score 1 and others 0, from the generated text to the score."""

from fractions import Fraction

import pytest

from attnres.eval import scoring
from attnres.eval.benchmarks import benchmarks

from .models import GOLD_TEXT, FixedText, evaluate


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("72", 72),
        ("-5", -5),
        ("\N{MINUS SIGN}5", -5),
        ("1,000", 1000),
        ("1,234,567.5", Fraction("1234567.5")),
        ("1,00,000", 100000),
        ("276 000", 276000),
        ("276\N{NO-BREAK SPACE}000", 276000),
        ("$18.", 18),
        ("2.50", Fraction(5, 2)),
        ("2,5", Fraction(5, 2)),
        ("3.125", Fraction(25, 8)),
        ("3/4", Fraction(3, 4)),
        ("4分之3", Fraction(3, 4)),
        ("12%", Fraction(12, 100)),
        ("27.3\N{FULLWIDTH PERCENT SIGN}", Fraction(273, 1000)),
        ("١٨", 18),
        ("3/0", None),
        ("[invalid]", None),
        ("", None),
        ("-", None),
        ("eleven", None),
    ],
)
def test_numbers_are_read_as_written(text, value):
    assert scoring.number(text) == value


def test_cmath_has_the_tolerance_of_its_authors():
    def score(answer: str, gold: str) -> float:
        return scoring.cmath({"golden": gold}, [answer])["exact_match"]

    assert score("14", "14") == 1
    assert score("100", "101") == 0  # whole numbers must be equal, although these differ by less than 1%
    assert score("1,810", "1800") == score("1 810", "1800") == score("1800", "1,810") == 0
    assert score("1,800", "1800") == score("-1,800", "-1800") == 1
    assert score("-1810", "-1800") == score("-1800", "1800") == 0
    assert score("2,51", "2.5") == 1  # a decimal comma
    assert score("10.09", "10") == 1
    assert score("10.11", "10") == 0
    assert score("0.33", "1/3") == 0  # off by 1/99 of the smaller one
    assert score("0.333", "1/3") == 1
    assert score("3分之1", "2/6") == 1
    assert score("12", "12%") == 0
    assert score("0.12", "12%") == 1
    assert score("-14", "14") == 0
    assert score("[invalid]", "14") == 0
    assert score("0", "0.001") == 0


def test_triviaqa_accepts_any_of_the_names():
    doc = {"answer": {"value": "St. Louis", "aliases": ["Saint Louis, MO", "The Gateway City", "(A"]}}
    for text in ("St. Louis", "st louis", "Saint Louis,  MO.", "gateway city", "the Gateway-City", "A"):
        assert scoring.triviaqa(doc, [text])["exact_match"] == 1, text
    for text in ("Louis", "St. Louis or Chicago", "", ".", "the", "B"):
        assert scoring.triviaqa(doc, [text])["exact_match"] == 0, text


def test_math_accepts_an_answer_that_either_judge_accepts():
    solution = r"The answers are $\boxed{-2}$ and $\boxed{1}$."
    doc = {"solution": solution, "answer": "1"}
    ending = "Final Answer: The final answer is ${}$. I hope it is correct."
    for answer, score in ((r"-2, 1", 1), ("1", 1), ("2", 0), ("", 0)):
        assert scoring.math(doc, [ending.format(answer)])["exact_match"] == score, answer


# Benchmark -> texts for its first item, with GOLD for the answer, and whether they are right.
WRITTEN = [
    ("gsm8k", "So it is 3 * 6 = 18 dollars. The answer is GOLD.", 1),
    ("gsm8k", "The answer is $GOLD", 1),
    ("gsm8k", "The answer is GOLD.00 dollars a day.", 1),
    ("gsm8k", "The answer is: GOLD", 1),
    ("gsm8k", "The answer is GOLD.\n\nQ: Another?\nA: The answer is 7.", 1),
    ("gsm8k", "The answer is 7. The answer is GOLD.", 0),
    ("gsm8k", "It is GOLD.", 0),
    ("gsm8k", "The answer is GOLD5.", 0),
    ("gsm8k", "The answer is -GOLD.", 0),
    ("mgsm", "3 + 4 = 7. The answer is GOLD.", 1),
    ("mgsm", "So she earns GOLD dollars, that is GOLD,00.", 1),
    ("mgsm", "16-3-4=9, 9*2=GOLD", 1),
    ("mgsm", "The answer is GOLD.\n\nQuestion: 5 and 6?", 1),
    ("mgsm", "She has 3 and 4.\n\nTogether that is GOLD.\n\nপ্রশ্ন: 5?", 1),
    ("mgsm", "GOLD, or 7", 0),
    ("mgsm", "no idea", 0),
    ("cmath", "4+5=9。答案是GOLD。", 1),
    ("cmath", "答案为 GOLD 支", 1),
    ("cmath", "答案是GOLD.0", 1),
    ("cmath", "答案是GOLD。\n\n问题", 1),
    ("cmath", "先算7。\n\n答案是GOLD。\n\n问题\N{FULLWIDTH COLON}答案是5。", 1),
    ("cmath", "一共是GOLD。", 0),
    ("cmath", "答案是7。答案是GOLD。", 0),
    ("triviaqa", " GOLD", 1),
    ("triviaqa", " the GOLD.\nQuestion: And?", 1),
    ("triviaqa", " I think GOLD", 0),
    ("bbh", "Quite so. So the answer is GOLD.", 1),
    ("bbh", "So the answer is GOLD", 1),
    ("bbh", "So the answer is GOLD.\n\nQ: And\nA: So the answer is maybe.", 1),
    ("bbh", "So the answer is not GOLD.", 0),
    ("bbh", "GOLD", 0),
    ("mmlu_pro", "It has to be so. The answer is (GOLD).", 1),
    ("mmlu_pro", "the answer is GOLD", 1),
    ("mmlu_pro", "The answer is (GOLD).\n\nQuestion:\nThe answer is (J).", 1),
    ("mmlu_pro", "(GOLD)", 0),
    ("mmlu_pro", "The answer is: (GOLD)", 0),
]
GOLD = {
    "gsm8k": lambda doc: doc["answer"].split("####")[1].strip(),
    "mgsm": lambda doc: str(doc["answer_number"]),
    "cmath": lambda doc: doc["golden"],
    "triviaqa": lambda doc: doc["answer"]["value"],
    "bbh": lambda doc: doc["target"],
    "mmlu_pro": lambda doc: doc["answer"],
}


def scores(loaded, name: str, text: str) -> dict[str, float]:
    """Return the scores of a text for the first item of a benchmark, by filter."""
    task = next(iter(loaded(name)["tasks"].values()))
    doc = task.eval_docs[0]
    model = FixedText(benchmarks()[name], text.replace("GOLD", GOLD[name](doc)))
    request = task.construct_requests(doc, "", metadata=(task.task_name, 0, 1))
    request.resps = model.generate_until([request])
    task._instances = [request]
    task.apply_filters()
    return {name: task.process_results(doc, [text])["exact_match"] for name, text in request.filtered_resps.items()}


@pytest.mark.parametrize(("name", "text", "score"), WRITTEN)
def test_the_headline_filter_finds_answers_in_the_words_of_the_shots(name, text, score, loaded):
    assert scores(loaded, name, text)[benchmarks()[name].metric.split(",")[1]] == score


# Texts in which the strict filter finds no answer, and whether the flexible one must find it.
MARKED = [
    ("gsm8k", "The answer is **GOLD**.", 1),
    ("gsm8k", r"The answer is $\boxed{GOLD}$.", 1),
    ("gsm8k", "The answer is $ GOLD", 1),
    ("gsm8k", "3 * 6 = GOLD\n#### GOLD", 1),
    ("gsm8k", "She has 20-2=GOLD.", 1),
    ("gsm8k", "She earns $GOLD per day...", 1),
    ("gsm8k", "The answer is 7. The answer is GOLD.", 1),
    ("gsm8k", "It is **GOLD**, or 7.", 0),
    ("gsm8k", "eighteen", 0),
    ("cmath", "一共是GOLD。", 1),
    ("cmath", "答案是 **GOLD**。", 1),
    ("cmath", r"答案是 $\boxed{GOLD}$。", 1),
    ("cmath", "**GOLD**。不是7。", 1),
    ("cmath", "**GOLD**。也许7。", 0),
    ("bbh", "So the answer is **GOLD**.", 1),
    ("bbh", r"So the answer is $\boxed{GOLD}$.", 1),
    ("bbh", r"So the answer is \boxed{\text{GOLD}}.", 1),
    ("bbh", "**Answer:** GOLD", 1),
    ("bbh", "The answer is: GOLD.", 1),
    ("bbh", "The Answer is GOLD\nNo doubt.", 1),
    ("bbh", 'Is the answer: maybe?\nThe final answer: "GOLD".', 1),
    ("bbh", "So the answer is **not GOLD**.", 0),
    ("bbh", "**Answer**: GOLD", 1),
    ("bbh", "GOLD", 0),
    ("mmlu_pro", "The answer is: (GOLD).", 1),
    ("mmlu_pro", "The answer is **(GOLD)**.", 1),
    ("mmlu_pro", r"So the answer is $\boxed{GOLD}$.", 1),
    ("mmlu_pro", "**Answer:** GOLD. It is so.", 1),
    ("mmlu_pro", r"$\boxed{GOLD}$", 0),
]


@pytest.mark.parametrize(("name", "text", "flexible"), MARKED)
def test_the_second_filter_finds_marked_answers(name, text, flexible, loaded):
    benchmark = benchmarks()[name]
    assert benchmark.second == "exact_match,flexible-extract"
    assert scores(loaded, name, text) == {benchmark.metric.split(",")[1]: 0, "flexible-extract": flexible}


@pytest.mark.parametrize("name", GOLD_TEXT)
def test_an_empty_answer_scores_zero(name, loaded):
    benchmark = benchmarks()[name]
    assert evaluate(FixedText(benchmark, ""), benchmark, loaded(name), limit=2)["headline"] == 0.0


def test_programs_that_do_nothing_fail(loaded):
    for name in ("humaneval", "mbpp"):
        benchmark = benchmarks()[name]
        assert evaluate(FixedText(benchmark, "    pass\n"), benchmark, loaded(name), limit=3)["headline"] == 0.0


def test_the_shots_of_mgsm_are_whole(loaded):
    """The stock targets cut off one letter too many in Japanese and Chinese."""
    for name, task in loaded("mgsm")["tasks"].items():
        prompt = task.fewshot_context(task.eval_docs[0], 8)
        for shot in task.dataset["train"]:
            label, answer = shot["answer"].replace("\N{FULLWIDTH COLON}", ":", 1).split(":", maxsplit=1)
            assert answer.strip() in prompt, name
            assert "".join(label.split()) in "".join(prompt.split()), name


def test_the_shots_of_mbpp_are_those_of_its_authors(loaded):
    (task,) = loaded("mbpp")["tasks"].values()
    assert [doc["task_id"] for doc in task.sampler.sample(3)] == [2, 3, 4]
    prompt = task.fewshot_context(task.eval_docs[0], 3)
    assert prompt.count("[BEGIN]\n") == 4 and prompt.count("\n[DONE]\n\n") == 3 and "\r" not in prompt
    for shot in prompt.split("[BEGIN]\n")[1:-1]:
        compile(shot.split("[DONE]")[0], "shot", "exec")
    assert prompt.endswith("[BEGIN]\n")


@pytest.mark.parametrize("name", GOLD_TEXT)
def test_an_answer_written_like_the_shots_is_not_cut_and_is_found(name, loaded):
    for task in loaded(name)["tasks"].values():
        for shot in task.sampler.sample(benchmarks()[name].shots):
            text = task.doc_to_target(shot, task.fewshot_cfg.doc_to_target).removesuffix("[DONE]")
            assert not [stop for stop in task.config.generation_kwargs["until"] if stop in text], task.task_name
            request = task.construct_requests(shot, "", metadata=(task.task_name, 0, 1))
            request.resps, task._instances = [text], [request]
            task.apply_filters()
            assert "[invalid]" not in request.filtered_resps.values(), (task.task_name, text)
