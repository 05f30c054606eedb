"""Write small data sets with the columns and the layout of the four that the test assets lack."""

import json
from pathlib import Path

import pandas as pd

from attnres.eval.task_index import task_manager

QUESTIONS = 8  # in each split that is evaluated


def write_data_set(folder: Path, configs: dict[str, dict[str, list[dict]]], suffix: str = "parquet") -> None:
    """Write `{config: {split: rows}}` as on the Hub: a file for each split, and a README that lists them."""
    lines = ["---", "configs:"]
    for config, splits in configs.items():
        lines += [f"- config_name: {json.dumps(config)}", "  data_files:"]
        for split, rows in splits.items():
            path = folder / config / f"{split}.{suffix}"
            path.parent.mkdir(parents=True, exist_ok=True)
            frame = pd.DataFrame(rows)
            frame.to_parquet(path) if suffix == "parquet" else frame.to_csv(path, index=False)
            lines += [f"  - split: {split}", f"    path: {json.dumps(str(path.relative_to(folder)))}"]
    (folder / "README.md").write_text("\n".join([*lines, "---", ""]), encoding="utf-8")


def config_names(stock_group: str) -> list[str]:
    """Return the data set's configurations that a stock group of lm_eval reads."""
    index = task_manager().task_index
    return [index[name].cfg["dataset_name"] for name in index[stock_group].cfg["task"]]


def gpqa(count: int = QUESTIONS) -> list[dict]:
    wrong = {f"Incorrect Answer {place}": "wrong {} " + str(place) for place in (1, 2, 3)}
    return [
        {
            "Record ID": f"rec{number}",
            "Question": f"What is the value of item {number}?",
            "Correct Answer": f"right {number}",
            **{column: text.format(number) for column, text in wrong.items()},
            "Explanation": "It is.",
        }
        for number in range(count)
    ]


def humaneval(count: int = QUESTIONS) -> list[dict]:
    return [
        {
            "task_id": f"HumanEval/{number}",
            "prompt": f'def add_{number}(value: int) -> int:\n    """Add {number}."""\n',
            "canonical_solution": f"    return value + {number}\n",
            "test": f"def check(candidate):\n    assert candidate(2) == {2 + number}\n",
            "entry_point": f"add_{number}",
        }
        for number in range(count)
    ]


def chinese_choices(config: str, split: str, count: int, question: str, answer: str, **more: str) -> list[dict]:
    """Return rows of CMMLU (`question` is "Question", `answer` is "Answer") or C-Eval (in lower case)."""
    return [
        {
            question: f"{config} 的第 {number} 题, {split}",
            **{letter: f"选项 {letter}{number}" for letter in "ABCD"},
            answer: "ABCD"[(number * 7 + len(config)) % 4],
            **more,
        }
        for number in range(count)
    ]


def write_all(folder: Path) -> None:
    """Write GPQA, HumanEval, CMMLU and C-Eval as `ORG/NAME` in `folder`."""
    write_data_set(folder / "Idavidrein/gpqa", {"gpqa_diamond": {"train": gpqa()}}, suffix="csv")
    write_data_set(folder / "openai/openai_humaneval", {"openai_humaneval": {"test": humaneval()}})
    cmmlu = {
        config: {
            "test": chinese_choices(config, "test", QUESTIONS, "Question", "Answer"),
            "dev": chinese_choices(config, "dev", 5, "Question", "Answer"),
        }
        for config in config_names("cmmlu")
    }
    write_data_set(folder / "haonan-li/cmmlu", cmmlu)
    ceval = {
        config: {
            "test": chinese_choices(config, "test", QUESTIONS, "question", "answer", explanation=""),
            "val": chinese_choices(config, "val", QUESTIONS, "question", "answer", explanation=""),
            "dev": chinese_choices(config, "dev", 5, "question", "answer", explanation="显然"),
        }
        for config in config_names("ceval-valid")
    }
    write_data_set(folder / "ceval/ceval-exam", ceval)
