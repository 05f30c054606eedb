"""The task files are valid, complete and as in the paper. Prompts leak no answer and are the same in every process."""

import dataclasses
import json
import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest
from lm_eval.api.registry import filter_registry
from lm_eval.api.samplers import FirstNSampler
from lm_eval.config.group import AggMetricConfig, GroupConfig
from lm_eval.config.task import FewshotConfig, TaskConfig
from lm_eval.tasks import TaskManager
from lm_eval.tasks._yaml_loader import load_yaml

from attnres.eval.benchmarks import benchmarks, task_path
from attnres.eval.task_index import task_manager

from .models import Recorder, evaluate

FILES = sorted(task_path().glob("*.yaml"))
# Title, category, baseline and AttnRes as in Table 3 of arXiv 2603.15031, in its order; then the shots.
TABLE_3 = [
    ("MMLU", "General", 73.5, 74.6, 5),
    ("MMLU-Pro", "General", 52.2, 52.2, 5),
    ("GPQA-Diamond", "General", 36.9, 44.4, 5),
    ("BBH", "General", 76.3, 78.0, 3),
    ("ARC-Challenge", "General", 64.6, 65.7, 25),
    ("HellaSwag", "General", 83.2, 83.4, 5),
    ("TriviaQA", "General", 69.9, 71.8, 5),
    ("GSM8K", "Math & code", 81.7, 82.4, 8),
    ("MGSM", "Math & code", 64.9, 66.1, 8),
    ("MATH", "Math & code", 53.5, 57.1, 4),
    ("CMath", "Math & code", 84.7, 85.1, 3),
    ("HumanEval", "Math & code", 59.1, 62.2, 0),
    ("MBPP", "Math & code", 72.0, 73.9, 3),
    ("CMMLU", "Chinese", 82.0, 82.9, 5),
    ("C-Eval", "Chinese", 79.6, 82.5, 5),
]
# The number of leaf tasks and of items, as the benchmarks' papers count them. None if the data here is synthetic or a
# part.
SIZES = {
    "mmlu": (57, 14042),
    "mmlu_pro": (14, 12032),
    "gpqa_diamond": (1, None),
    "bbh": (27, 6511),
    "arc_challenge": (1, 1172),
    "hellaswag": (1, 10042),
    "triviaqa": (1, None),
    "gsm8k": (1, 1319),
    "mgsm": (11, 2750),
    "math": (7, 5000),
    "cmath": (2, 1698),
    "humaneval": (1, None),
    "mbpp": (1, 500),
    "cmmlu": (67, None),
    "ceval": (52, None),
}
SCORED_BY_LIKELIHOOD = {"mmlu", "gpqa_diamond", "ceval", "hellaswag", "arc_challenge", "cmmlu"}
BIG = {"mmlu", "mmlu_pro", "hellaswag", "math", "cmmlu", "ceval"}
EACH = [pytest.param(name, marks=pytest.mark.slow) if name in BIG else name for name in benchmarks()]


def fields(config: type) -> set[str]:
    return {field.name for field in dataclasses.fields(config)}


def problems(path: Path) -> list[str]:
    """Return the faults of a task file, for which the harness silently skips the file or ignores the key."""
    try:
        config = load_yaml(path)  # resolves `!function` and `include`
    except Exception as error:
        return [f"{type(error).__name__}: {error}"]
    is_group = isinstance(config.get("task"), list)
    known = {
        "": fields(TaskConfig) | (fields(GroupConfig) if is_group else set()),
        "fewshot_config": fields(FewshotConfig),
        "generation_kwargs": {"until", "max_gen_toks", "do_sample", "temperature"},
        "aggregate_metric_list": fields(AggMetricConfig),
        "metric_list": {"metric", "aggregation", "higher_is_better"},
        "filter_list": {"name", "filter"},
    }
    entries = [("", config)]
    for section in known.keys() - {""} & config.keys():
        content = config[section] if isinstance(config[section], list) else [config[section]]
        entries += [(section, entry) for entry in content]
    faults = [
        f"unknown key {key!r} in {part or path.name}" for part, entry in entries for key in entry.keys() - known[part]
    ]
    for step in (step for entry in config.get("filter_list", []) for step in entry["filter"]):
        if step["function"] not in filter_registry:
            faults.append(f"unknown filter {step['function']!r}")
    for name in config["task"] if is_group else [config.get("task")]:
        if name not in task_manager().task_index:
            faults.append(f"the harness has no task {name!r}")
    if is_group and config["group"] not in task_manager().task_index:
        faults.append(f"the harness has no task {config['group']!r}")
    return faults


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_each_file_is_valid(path):
    assert problems(path) == []


@pytest.mark.parametrize(
    ("file", "good", "bad", "problem"),
    [
        ("gsm8k.yaml", "num_fewshot: 8", "num_fewshots: 8", "unknown key 'num_fewshots'"),
        ("gsm8k.yaml", "- gsm8k_cot", "- gsm8k_cott", "has no task 'gsm8k_cott'"),
        ("gsm8k.yaml", "function: regex", "function: regexp", "unknown filter 'regexp'"),
        ("gsm8k.yaml", "weight_by_size", "weighted", "unknown key 'weighted'"),
        ("gsm8k.yaml", "max_gen_toks", "max_tokens", "unknown key 'max_tokens'"),
        ("gsm8k.yaml", "scoring.gsm8k", "scoring.gsm9k", "has no function 'gsm9k'"),
        ("arc_challenge.yaml", "sampler: first_n", "sampling: first_n", "unknown key 'sampling'"),
        ("cmath.yaml", "group: attnres_cmath", "group: attnres_cmaht", "has no task 'attnres_cmaht'"),
        ("attnres_cmath_test.yaml", "output_type: generate", "output_type\n  generate", "ScannerError"),
        ("attnres_cmath_validation.yaml", "attnres_cmath_test.yaml", "attnres_cmath.yaml", "FileNotFoundError"),
    ],
)
def test_validation_finds_a_broken_file(file, good, bad, problem, tmp_path):
    for path in FILES:
        text = path.read_text(encoding="utf-8")
        assert path.name != file or good in text
        (tmp_path / path.name).write_text(text.replace(good, bad, 1) if path.name == file else text, encoding="utf-8")
    assert problem in " ".join(problems(tmp_path / file))


def test_the_group_has_the_15_benchmarks_of_table_3_in_order():
    described = [(b.title, b.category, b.baseline, b.attn_res, b.shots) for b in benchmarks().values()]
    assert described == TABLE_3
    index = task_manager().task_index
    assert index["attnres_paper"].cfg["task"] == [benchmark.group for benchmark in benchmarks().values()]
    for benchmark in benchmarks().values():
        (headline,) = index[benchmark.group].cfg["aggregate_metric_list"]
        assert headline["weight_by_size"] is True
        assert benchmark.metric == f"{headline['metric']},{headline['filter_list'][0]}"
        assert index[benchmark.group].cfg["metadata"]["shots_from"]


def test_the_headline_filter_of_mmlu_pro_is_the_stock_one():
    stock = load_yaml(task_manager().task_index["mmlu_pro_law"].yaml_path)["filter_list"]
    assert load_yaml(task_path() / "mmlu_pro.yaml")["filter_list"][:1] == stock


@pytest.mark.slow
def test_no_stock_task_is_overridden(caplog):
    with caplog.at_level(logging.WARNING, logger="lm_eval"):
        manager = TaskManager(include_path=task_path())
    assert not [record for record in caplog.messages if "overrides" in record or "attnres" in record]
    ours = [name for name in manager.all_tasks if str(manager.task_index[name].yaml_path).startswith(str(task_path()))]
    assert len(ours) == 16 + 4 == len(FILES)
    # The index of the folders that the task files name has the same stock tasks as the index of everything.
    for name, entry in task_manager().task_index.items():
        assert manager.task_index[name].yaml_path == entry.yaml_path


@pytest.mark.parametrize("name", EACH)
def test_each_benchmark_has_its_items_shots_and_kind_of_scoring(name, loaded):
    tasks = loaded(name)["tasks"].values()
    leaves, items = SIZES[name]
    assert len(tasks) == leaves
    assert items is None or sum(len(task.eval_docs) for task in tasks) == items
    kind = "multiple_choice" if name in SCORED_BY_LIKELIHOOD else "generate_until"
    for task in tasks:
        assert kind == task.OUTPUT_TYPE
        assert task.config.num_fewshot == benchmarks()[name].shots
        # No other sampler is free of random draws.
        assert type(task.sampler) is FirstNSampler or task.config.num_fewshot == 0
        assert kind == "multiple_choice" or task.config.generation_kwargs["do_sample"] is False


def plain(text: str) -> str:
    return " ".join(text.lower().split())


@pytest.mark.parametrize("name", EACH)
def test_no_item_is_among_its_own_shots(name, loaded):
    """The question appears once in its prompt, at the end, after shots that do not hold it."""
    shots, seen = benchmarks()[name].shots, 0
    for task in loaded(name)["tasks"].values():
        before = None
        for number, doc in enumerate(task.eval_docs):
            question = plain(task.doc_to_text(doc))
            # Whole prompts take long to make. In GPQA the shots are other items; elsewhere they are the same for all.
            if number < 10 or name == "gpqa_diamond":
                prompt, earlier = plain(task.fewshot_context(doc, shots)), before
                assert prompt.endswith(question), task.task_name
                before = prompt.removesuffix(question)
                assert name == "gpqa_diamond" or earlier in (None, before), task.task_name
            assert question not in before, task.task_name
            if name not in ("mmlu", "mmlu_pro", "cmmlu", "ceval"):  # where many ask "Which of the following is true?"
                raw = plain(raw_question(doc))
                assert raw not in before and question.count(raw) == 1, task.task_name
            seen += 1
    assert seen == (SIZES[name][1] or seen) > 0


def raw_question(doc: dict) -> str:
    return next(
        doc[key] for key in ("question", "Question", "query", "input", "problem", "text", "prompt") if key in doc
    )


def test_the_first_items_of_gpqa_are_not_their_own_shots(loaded):
    (task,) = loaded("gpqa_diamond")["tasks"].values()
    numbers = [
        [number for number in range(len(task.eval_docs)) if f"item {number}?" in task.fewshot_context(doc, 5)]
        for doc in task.eval_docs
    ]
    assert numbers[0] == [0, 1, 2, 3, 4, 5]
    assert numbers[4] == [0, 1, 2, 3, 4, 5]
    assert numbers[7] == [0, 1, 2, 3, 4, 7]


def test_prompts_do_not_depend_on_the_limit(loaded):
    for name in ("arc_challenge", "gpqa_diamond", "triviaqa", "mgsm", "cmath"):
        benchmark, prompts = benchmarks()[name], []
        for limit in (2, 5):
            recorder = Recorder(benchmark)
            evaluate(recorder, benchmark, loaded(name), limit=limit)
            prompts.append(recorder.prompts)
        few, more = prompts
        assert len(few) < len(more)
        assert few == {item: more[item] for item in few}


@pytest.mark.slow
def test_prompts_are_the_same_in_every_process_and_order(hub, synthetic_hub):
    names = ["arc_challenge", "gsm8k", "mgsm", "cmath", "triviaqa", "bbh", "gpqa_diamond", "humaneval"]
    hashes = []
    for seed, order in (("1", names), ("2", names[::-1])):
        command = [sys.executable, str(Path(__file__).with_name("prompts_session.py")), hub, synthetic_hub, *order]
        done = subprocess.run(
            command, env=os.environ | {"PYTHONHASHSEED": seed}, capture_output=True, text=True, timeout=300
        )
        assert done.returncode == 0, done.stderr[-3000:]
        hashes.append(json.loads(done.stdout.splitlines()[-1]))
    assert hashes[0].keys() == set(names)
    assert hashes[0] == hashes[1]
