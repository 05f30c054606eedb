"""Completions of HumanEval and MBPP become programs, which are scored by the tests of their tasks."""

import os
from pathlib import Path

import pytest

from attnres.eval import code

ASSETS = os.environ.get("ATTNRES_ASSETS")
MBPP = Path(ASSETS or "", "hub/google-research-datasets/mbpp/full")
needs_assets = pytest.mark.skipif(not ASSETS, reason="ATTNRES_ASSETS is not set")

# Tasks in the format of HumanEval, written for these tests: (name of the function, prompt, rest of it, test).
TASKS = {
    "a helper of the prompt in the test": (
        "decode",
        'def encode(text: str) -> str:\n    """Each letter moved by three."""\n'
        '    return "".join(chr((ord(c) - 94) % 26 + 97) for c in text)\n\n\n'
        'def decode(text: str) -> str:\n    """Undo encode."""\n',
        '    return "".join(chr((ord(c) - 100) % 26 + 97) for c in text)\n',
        "def check(candidate):\n    from random import choice, randint\n    import string\n"
        "    for _ in range(300):\n"
        "        text = ''.join(choice(string.ascii_lowercase) for _ in range(randint(10, 20)))\n"
        "        assert candidate(encode(text)) == text\n",
    ),
    "the function by its own name in the test": (
        "evens_first",
        'def evens_first(numbers: list):\n    """Even numbers before odd ones; the list itself is left alone."""\n',
        "    return sorted(numbers, key=lambda n: n % 2)\n",
        "def check(candidate):\n    numbers = [3, 2, 1]\n    assert candidate(numbers) == [2, 3, 1]\n"
        "    assert numbers == [3, 2, 1], 'changed'\n"
        "    assert tuple(candidate([5, 4])) == tuple(evens_first([5, 4]))\n",
    ),
    "a root within a tolerance": (
        "root",
        "import math\nfrom typing import List, Optional\n\n\n"
        'def value(cs: List[float], x: float) -> float:\n    """sum of c_i x^i"""\n'
        "    return sum(c * math.pow(x, i) for i, c in enumerate(cs))\n\n\n"
        'def root(cs: List[float]) -> Optional[float]:\n    """The root of c_0 + c_1 x; None if there is none."""\n',
        "    return -cs[0] / cs[1] if cs[1] else None\n",
        "METADATA = {'author': 'us'}\n\n\ndef check(candidate):\n    import copy\n    import random\n"
        "    rng = random.Random(42)\n    for _ in range(100):\n"
        "        cs = [rng.randint(-10, 10), rng.randint(1, 10)]\n        x = candidate(copy.deepcopy(cs))\n"
        "        assert math.fabs(value(cs, x)) < 1e-4\n    assert candidate([1, 0]) is None\n",
    ),
    "exceptions and tuples": (
        "halve",
        'def halve(number):\n    """(half, half) of an even number; ValueError for an odd one."""\n',
        "    if number % 2:\n        raise ValueError('odd')\n    return number // 2, number // 2\n",
        "def check(candidate):\n    assert candidate(4) == (2, 2)\n    try:\n        candidate(3)\n"
        "    except ValueError:\n        pass\n    else:\n        assert False\n",
    ),
}


def task(name: str) -> tuple[dict, str]:
    """Return the item and its solution."""
    function, prompt, solution, test = TASKS[name]
    return {
        "task_id": "Own/0",
        "prompt": prompt,
        "canonical_solution": solution,
        "test": test,
        "entry_point": function,
    }, solution


def passes(doc: dict, completion: str) -> bool:
    (score,) = code.humaneval(doc, [completion]).values()
    return score == 1.0


@pytest.mark.parametrize("name", TASKS)
def test_solution_passes_and_others_fail(name):
    doc, solution = task(name)
    assert code.humaneval(doc, [solution]) == {"pass@1": 1.0}
    for wrong in "    return 7\n", "    return None\n", "", "    return (\n", "    import os; os._exit(0)\n":
        assert code.humaneval(doc, [wrong]) == {"pass@1": 0.0}, wrong


def test_solution_may_come_as_the_whole_function_or_in_a_code_fence():
    doc, solution = task("exceptions and tuples")
    whole = f"def halve(number):\n{solution}"
    assert passes(doc, whole)
    assert passes(doc, f"```python\n{whole}```\nThis raises for odd numbers.")
    assert passes(doc, f"Here it is:\n\n```\n{whole}")
    assert passes(doc, f"{solution}```\n\nSome words.")
    assert passes(doc, f"{solution}\n```python\nhalve(3)\n```")
    assert passes(doc, solution[1:])  # a tokenizer that drops a leading space
    assert passes(doc, [solution])  # a task without a filter passes the list of responses


def test_program_cannot_replace_the_helpers_that_the_test_calls():
    doc, _ = task("a helper of the prompt in the test")
    assert not passes(doc, "    return text\n\n\ndef encode(text):\n    return text\n")


def test_changes_that_the_solution_makes_to_an_argument_reach_the_test():
    doc, _ = task("the function by its own name in the test")
    assert not passes(doc, "    numbers.sort(key=lambda n: n % 2)\n    return numbers\n")


MINIMAL = {
    "text": "Write a function to add two numbers.",
    "code": "def add(a, b): return a + b",
    "test_list": ["assert add(1, 2) == 3", "assert add(0, 0) == 0", "assert add(-1, 1) == 0"],
    "test_setup_code": "",
    "challenge_test_list": [],
}


@pytest.mark.parametrize(
    "completion",
    [
        "def add(a, b): return a + b",
        " def add(a, b):\r\n    return a + b\r\n[DONE]\n\nYou are an expert ...",
        "[BEGIN]\ndef add(a, b): return a + b\n[DONE]",
        "```python\ndef add(a, b): return a + b\n```",
        "def add(a, b): return a + b\n```\nwords",
        "The solution is\n```\ndef add(a, b): return a + b\n```",
        "ZERO = 0\ndef add(a, b): return a + b + ZERO\n```\nwords",
    ],
)
def test_completion_of_mbpp_is_cut_to_its_code(completion):
    assert code.mbpp(MINIMAL, [completion]) == {"pass@1": 1.0}


@pytest.mark.parametrize(
    "completion", ["", "def add(a, b): return 3", "def plus(a, b): return a + b", "words", "exit(0)"]
)
def test_wrong_completion_of_mbpp_fails(completion):
    assert code.mbpp(MINIMAL, [completion]) == {"pass@1": 0.0}


def test_program_cannot_replace_builtins_in_the_tests():
    doc = MINIMAL | {"test_list": ["assert sum([add(1, 2), 0]) == 3"]}
    assert code.mbpp(doc, ["def add(a, b): return 9\ndef sum(x): return 3"]) == {"pass@1": 0.0}
    named = MINIMAL | {"code": "def sum(a, b): return a + b", "test_list": ["assert sum(1, 2) == 3"]}
    assert code.mbpp(named, ["def sum(a, b): return a + b"]) == {"pass@1": 1.0}


def test_program_cannot_replace_modules_in_the_tests():
    doc = MINIMAL | {
        "code": "import sys\ndef add(a, b): return a + b",
        "test_list": ["assert add(1, 2) == sys.maxsize"],
    }
    replacement = "class sys: maxsize = 3\ndef add(a, b): return 3"
    assert code.mbpp(doc, [replacement]) == {"pass@1": 0.0}
    assert code.mbpp(doc, ["import sys\ndef add(a, b): return sys.maxsize"]) == {"pass@1": 1.0}
    named = MINIMAL | {"code": "def select(a, b): return a + b", "test_list": ["assert select(1, 2) == 3"]}
    assert code.mbpp(named, [named["code"]]) == {"pass@1": 1.0}


def test_setup_code_builds_on_the_programs_own_classes():
    doc = MINIMAL | {
        "code": "class Node: pass\ndef depth(node): return node.depth",
        "test_setup_code": "root = Node()\nroot.depth = 3",
        "test_list": ["assert depth(root) == 3"],
    }
    assert code.mbpp(doc, [doc["code"]]) == {"pass@1": 1.0}


def test_more_than_one_completion_is_refused():
    with pytest.raises(ValueError, match="one completion per task, got 2"):
        code.mbpp(MINIMAL, ["a", "b"])


def documents(split: str) -> list[dict]:
    from pyarrow import parquet

    return parquet.read_table(MBPP / f"{split}.parquet").to_pylist()


def failing(docs: list[dict]) -> list[int]:
    """Return the tasks whose reference solution fails."""
    return [doc["task_id"] for doc in docs if not code.mbpp(doc, [doc["code"]])["pass@1"]]


@pytest.mark.slow
@needs_assets
def test_references_of_mbpp_pass_and_stubs_fail():
    # Tasks with set-up code, types as arguments, a module in the tests, and objects of the program's class.
    special = (367, 533, 596, 601)
    docs = [doc for split in ("test", "validation", "train") for doc in documents(split) if doc["task_id"] in special]
    docs += documents("prompt")
    assert len(docs) == 14
    assert failing(docs) == []
    for doc in docs:
        names, _ = code.tested_names("\n".join(doc["test_list"]), doc["code"])
        stubs = "\n".join(f"def {name}(*args): return None" for name in names)
        assert code.mbpp(doc, [stubs]) == {"pass@1": 0.0}


@needs_assets
@pytest.mark.slow
@pytest.mark.parametrize("split, tasks", {"train": 374, "validation": 90}.items())
def test_references_of_mbpp_pass(split, tasks):
    """A fourth of each split is run. All of the test split are the gold answers of `test_oracle.py`."""
    docs = documents(split)
    assert len(docs) == tasks
    assert failing(docs[::4]) == []
