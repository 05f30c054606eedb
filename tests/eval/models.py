"""Models without weights: with right answers, with the first choice, with a fixed text, and a recorder of prompts."""

import re
from collections.abc import Callable

from lm_eval import evaluator
from lm_eval.api.instance import Instance
from lm_eval.api.model import LM

from attnres.eval.benchmarks import Benchmark

# Benchmark -> the index of the right choice, from the columns of an item.
GOLD_CHOICE: dict[str, Callable[[dict], int]] = {
    "mmlu": lambda doc: doc["answer"],
    "gpqa_diamond": lambda doc: [doc[f"choice{place}"] for place in (1, 2, 3, 4)].index(doc["Correct Answer"].strip()),
    "arc_challenge": lambda doc: doc["choices"]["label"].index(doc["answerKey"]),
    "hellaswag": lambda doc: int(doc["label"]),
    "cmmlu": lambda doc: "ABCD".index(doc["Answer"]),
    "ceval": lambda doc: "ABCD".index(doc["answer"]),
}

# Benchmark -> the right answer in the words in which the shots end.
GOLD_TEXT: dict[str, Callable[[dict], str]] = {
    "mmlu_pro": lambda doc: f"Option {doc['answer']} fits. The answer is ({doc['answer']}).\n\n",
    "bbh": lambda doc: f"We look closely. Quite. So the answer is {doc['target']}.\n\nQ: And",
    "triviaqa": lambda doc: f" {doc['answer']['value']}\n\nQuestion: And",
    "gsm8k": lambda doc: f" 1 + 2 = 3. The answer is {doc['answer'].split('####')[1].strip()}.\n\nQ: 5",
    "mgsm": lambda doc: f" 1 + 2 = 3.\n\n→ {doc['answer_number']}.\n\nQuestion: 5",
    "math": lambda doc: (
        f"{doc['solution']}\nFinal Answer: The final answer is ${boxed(doc['solution'])}$. I hope it is correct."
    ),
    "cmath": lambda doc: f"1+2=3。\n\n答案是{doc['golden']}。\n\n问题\N{FULLWIDTH COLON}5",
    "humaneval": lambda doc: doc["canonical_solution"] + "\ndef unrelated():\n    return 1\n",
    "mbpp": lambda doc: doc["code"] + "\n[DONE]\nassert False",
}


def boxed(solution: str) -> str:
    r"""Return the last content of `\boxed{...}` in a solution of MATH, which may contain braces, or of `\boxed `."""
    start = [match.end() for match in re.finditer(r"\\(?:boxed|fbox)\b\s*", solution)][-1]
    depth, text = 0, solution[start:]
    for end, character in enumerate(text):
        depth += (character == "{") - (character == "}")
        if depth == 0:
            return text[1:end] if end else text.split("$")[0]
    raise ValueError(f"the braces do not match: {text}")


def cut(request: Instance, text: str) -> str:
    """Return the text up to the first stop, as generation does."""
    for stop in request.args[1]["until"]:
        text = text.split(stop)[0]
    return text


class Oracle(LM):
    """A model that gives the right choice the likelihood 1, and writes the right answer in the words of the shots."""

    def __init__(self, benchmark: Benchmark) -> None:
        super().__init__()
        self.name = benchmark.name

    def loglikelihood(self, requests: list[Instance], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        return [(0.0 if request.idx == self.choice(request.doc) else -50.0, False) for request in requests]

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        return [cut(request, self.text(request.doc)) for request in requests]

    def loglikelihood_rolling(self, requests, disable_tqdm: bool = False):
        raise NotImplementedError

    def choice(self, doc: dict) -> int:
        return GOLD_CHOICE[self.name](doc)

    def text(self, doc: dict) -> str:
        return GOLD_TEXT[self.name](doc)


class FirstChoice(Oracle):
    """A model that always takes the first choice."""

    def choice(self, doc: dict) -> int:
        return 0

    def text(self, doc: dict) -> str:
        return "The answer is (A)."


class FixedText(Oracle):
    """A model that always generates the same text."""

    def __init__(self, benchmark: Benchmark, text: str) -> None:
        super().__init__(benchmark)
        self.fixed_text = text

    def text(self, doc: dict) -> str:
        return self.fixed_text


class Recorder(FirstChoice):
    """A model that records its prompts: `prompts[task, doc_id]` are the texts that it received for one item."""

    def __init__(self, benchmark: Benchmark) -> None:
        super().__init__(benchmark)
        self.prompts: dict[tuple[str, int], list[str]] = {}

    def loglikelihood(self, requests: list[Instance], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        self.record(requests)
        return super().loglikelihood(requests)

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        self.record(requests)
        return super().generate_until(requests)

    def record(self, requests: list[Instance]) -> None:
        for request in requests:
            self.prompts.setdefault((request.task_name, request.doc_id), []).append(repr(request.args))


def evaluate(model: Oracle, benchmark: Benchmark, tasks: dict, limit: int | None = None) -> dict:
    """Return the harness's results for a benchmark loaded as `tasks`, and its headline number."""
    results = evaluator.evaluate(
        model, tasks, limit=limit, bootstrap_iters=0, log_samples=True, confirm_run_unsafe_code=True
    )
    return {**results, "headline": results["results"][benchmark.group][benchmark.metric]}
