"""Compare multiple choice with shared prefixes against the stock harness, on real questions of MMLU and HellaSwag.

    ATTNRES_ASSETS=DIR python benchmarks/multiple_choice.py [--questions 15] [--repeats 3] [--batch-size 8]

Three ways take turns: `SharedPrefixLM`; the harness's `HFLM`, whose logits cache runs all choices of one token in one
pass; and `HFLM` without this cache, which runs one pass per choice. All must give the same scores. The models have
random weights and a context of 4,096 tokens. Ratios are of the processor time of one thread, which other processes
disturb less than the time by the clock. The script writes `results/multiple_choice.json`.
"""

import argparse
import json
import logging
import os
import platform
import time
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from statistics import mean, median

import lm_eval
import torch
import transformers
from lm_eval.api.instance import Instance
from lm_eval.api.task import Task
from lm_eval.models.huggingface import HFLM
from tokenizers import ByteLevelBPETokenizer
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    PretrainedConfig,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)

from attnres.configuration import load as load_configuration
from attnres.eval.benchmarks import benchmarks, load
from attnres.eval.shared_prefix import SharedPrefixLM

RESULTS = Path(__file__).parent / "results" / "multiple_choice.json"
SUBJECTS = ("mmlu_anatomy", "mmlu_astronomy")
VOCABULARY = 4096
CONTEXT = 4096
LLAMA = {
    "hidden_size": 256,
    "intermediate_size": 688,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": CONTEXT,
    "vocab_size": VOCABULARY,
}


def make_tokenizer(corpus: Path) -> PreTrainedTokenizerBase:
    """Train a byte-level BPE like those of language models, in which the letter of an answer is one token."""
    bpe = ByteLevelBPETokenizer()
    bpe.train([str(corpus)], vocab_size=VOCABULARY, special_tokens=["<s>", "</s>"], show_progress=False)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe._tokenizer, bos_token="<s>", eos_token="</s>")
    assert all(len(tokenizer.encode(f" {letter}")) == 1 for letter in "ABCD")
    return tokenizer


def configurations() -> Iterator[tuple[str, PretrainedConfig]]:
    """Yield the models to measure, by name."""
    yield "Llama", AutoConfig.for_model("llama", **LLAMA)
    # KDA and MLA layers, experts, Block AttnRes.
    shape = {"vocab_size": VOCABULARY, "max_position_embeddings": CONTEXT}
    yield "attnres-tiny", load_configuration("attnres-tiny", **shape)


def questions(data: Path, limit: int) -> Iterator[tuple[str, list[Task]]]:
    """Yield the tasks of each benchmark, with `limit` questions each and the paper's number of examples."""
    for name, tasks in (("mmlu", SUBJECTS), ("hellaswag", ("hellaswag",))):
        loaded = load(benchmarks()[name], data)["tasks"]
        for task in tasks:
            loaded[task].build_all_requests(limit=limit)
        yield f"{benchmarks()[name].title}, {benchmarks()[name].shots}-shot", [loaded[task] for task in tasks]


def score(tasks: list[Task], answers: dict[int, tuple[float, bool]]) -> dict[str, float]:
    """Return the means of the tasks' metrics over all questions. `answers` has the `id` of each request as its key."""
    values: dict[str, list[float]] = {}
    for task in tasks:
        for _, group in groupby(task.instances, key=lambda instance: instance.doc_id):
            requests = list(group)
            for metric, value in task.process_results(requests[0].doc, [answers[id(r)] for r in requests]).items():
                if isinstance(value, float | int):
                    values.setdefault(metric, []).append(value)
    return {metric: mean(scores) for metric, scores in values.items() if metric in ("acc", "acc_norm")}


def measure(lm: HFLM, requests: list[Instance]) -> tuple[list[tuple[float, bool]], float, float]:
    """Return the answers, the seconds of the processor and the seconds by the clock."""
    cpu, wall = time.process_time(), time.perf_counter()
    answers = lm.loglikelihood(requests, disable_tqdm=True)
    return answers, time.process_time() - cpu, time.perf_counter() - wall


def compare(ways: dict[str, HFLM], tasks: list[Task], repeats: int) -> dict:
    """Measure the ways in turn and check that their answers agree.

    Args:
        ways: models for the harness, by name; the first is ours.
        tasks: tasks whose requests are built.
        repeats: how often each way runs.

    Returns:
        Times, scores and ratios to ours.
    """
    requests = [request for task in tasks for request in task.instances]
    seconds = {name: {"processor": [], "clock": []} for name in ways}
    scores, difference = {}, 0.0
    for _ in range(repeats):
        answers = {}
        for name, lm in ways.items():
            answers[name], cpu, wall = measure(lm, requests)
            seconds[name]["processor"].append(cpu)
            seconds[name]["clock"].append(wall)
            scores[name] = score(tasks, {id(request): answer for request, answer in zip(requests, answers[name])})
        first, *others = answers.values()
        for other in others:
            difference = max(difference, *(abs(a - b) for (a, _), (b, _) in zip(first, other)))
            assert [greedy for _, greedy in first] == [greedy for _, greedy in other]
    assert len({json.dumps(score) for score in scores.values()}) == 1, scores
    assert difference < 1e-3, difference
    ours = next(iter(ways))
    ratios = {
        name: {kind: median(a / b for a, b in zip(seconds[name][kind], seconds[ours][kind])) for kind in seconds[name]}
        for name in ways
        if name != ours
    }
    return {
        "requests": len(requests),
        "scores of all": scores[ours],
        "largest difference of log-likelihoods": difference,
        "seconds": seconds,
        "median ratio to shared prefixes": ratios,
    }


def main() -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--questions", type=int, default=15, help="questions of each subject of MMLU, and of HellaSwag (default: 15)"
    )
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=8)
    options = parser.parse_args()
    for name in ("lm_eval", "transformers"):
        logging.getLogger(name).setLevel(logging.ERROR)
    torch.set_num_threads(1)
    assets = Path(os.environ["ATTNRES_ASSETS"])
    tokenizer = make_tokenizer(assets / "corpora" / "wikitext2" / "valid.txt")
    load_before = os.getloadavg()[0]
    results = {}
    for title, tasks in questions(assets / "hub", options.questions):
        lengths = [len(tokenizer.encode(request.args[0])) for task in tasks for request in task.instances[::4]]
        print(f"\n{title}: {len(lengths)} questions of {mean(lengths):.0f} tokens, examples included")
        print(f"{'model':14}{'way':28}{'processor':>10}{'clock':>9}{'ratio':>7}")
        for model_name, config in configurations():
            torch.manual_seed(0)
            model = AutoModelForCausalLM.from_config(config).eval()
            arguments = {"tokenizer": tokenizer, "batch_size": options.batch_size}
            comparison = compare(
                {
                    "shared prefixes": SharedPrefixLM(model, **arguments),
                    "stock": HFLM(model, **arguments),
                    "stock, a pass for each choice": HFLM(model, **arguments, logits_cache=False),
                },
                tasks,
                options.repeats,
            )
            results[f"{title}, {model_name}"] = {"tokens of a question": mean(lengths)} | comparison
            for name, times in comparison["seconds"].items():
                ratio = comparison["median ratio to shared prefixes"].get(name, {"processor": 1.0})["processor"]
                print(
                    f"{model_name:14}{name:28}{median(times['processor']):9.1f}s{median(times['clock']):8.1f}s{ratio:7.2f}"
                )
            print(f"{'':14}scores of all: {comparison['scores of all']}", flush=True)
    versions = {module.__name__: module.__version__ for module in (torch, transformers, lm_eval)}
    machine = {
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, 1 thread used",
        "load before": load_before,
        "batch size": options.batch_size,
        "versions": versions,
    }
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text(json.dumps(machine | {"results": results}, indent=2) + "\n")


if __name__ == "__main__":
    main()
