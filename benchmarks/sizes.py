"""Write the tables of the guide on sizes: time and memory by model size, and the size of a full evaluation.

`python -m benchmarks.sizes` computes the tables of memory from plans, on tensors without data, and takes the counts of
the evaluation from `results/evaluation.json`. `python -m benchmarks.sizes TOKENIZER DATA` counts the evaluation first.
"""

import json
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from itertools import takewhile
from pathlib import Path
from statistics import median
from typing import Any

from transformers import AutoTokenizer, LlamaConfig, PreTrainedConfig, PreTrainedTokenizerBase, Qwen3Config

from attnres import ResidualConfig
from attnres.analysis.tables import markdown, update_tables
from attnres.configuration import count_parameters, load
from attnres.conversion.family import DEFAULT_CONNECTION, retrofit_config
from attnres.eval.paper import benchmarks
from attnres.planning import Costs, Device, Job, Layout, Plan, plan_layout

PAGE = Path(__file__).resolve().parents[1] / "docs" / "guides" / "sizes.md"
COUNTS = Path(__file__).with_name("results") / "evaluation.json"
H100 = Device()
BLOCKS = 8
# The shapes of public models. Only their sizes count here.
STORIES = LlamaConfig(
    vocab_size=512, hidden_size=64, intermediate_size=172, num_hidden_layers=5, num_attention_heads=8,
    num_key_value_heads=4, max_position_embeddings=512, tie_word_embeddings=True,
)  # fmt: skip
QWEN = Qwen3Config(
    vocab_size=151936, hidden_size=1024, intermediate_size=3072, num_hidden_layers=28, num_attention_heads=16,
    num_key_value_heads=8, head_dim=128, max_position_embeddings=40960, tie_word_embeddings=True,
)  # fmt: skip
LLAMA = LlamaConfig(
    vocab_size=128256, hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32,
    num_key_value_heads=8, max_position_embeddings=131072, tie_word_embeddings=False,
)  # fmt: skip
# Title -> the shape, or the name of a configuration that has attention residuals, and the tokens of a sequence.
MODELS: dict[str, tuple[PreTrainedConfig | str, int]] = {
    "stories260K": (STORIES, 512),
    "0.6B (Qwen3)": (QWEN, 4096),
    "8B (Llama 3.1)": (LLAMA, 4096),
    "`attnres-48b-a3b`": ("attnres-48b-a3b", 4096),
    "`kimi-k3`": ("kimi-k3", 4096),
}
CHOICES = COUNTS.with_name("multiple_choice.json")
SERVED, LONGEST = 64, 2048  # sequences that generate at once, and their tokens, in the estimate of an evaluation's time
COUNTED = 100  # items of a task whose tokens are counted
FULL_TRIVIAQA = 17_944  # items of its validation split; the counted copy of the data may hold fewer


def configurations(title: str) -> tuple[ResidualConfig, ResidualConfig]:
    """Return the configurations of a model with Block AttnRes and with the standard residual stream."""
    shape, _ = MODELS[title]
    if isinstance(shape, str):
        return load(shape), load(shape, residual_connection="standard")
    return retrofit_config(shape, num_blocks=BLOCKS), retrofit_config(shape, residual="standard")


@cache
def plans(title: str, training: bool) -> dict[tuple[str, bool], Plan]:
    """Return the plans of one sequence on one device, by connection and by whether layers run again.

    Args:
        title: A key of `MODELS`.
        training: Whether to plan training; if not, serving.
    """
    result = {}
    for config in configurations(title):
        costs = Costs(config, Job(1, MODELS[title][1], MODELS[title][1], training))
        for recomputes in (False, True) if training else (False,):
            plan = plan_layout(costs, Layout(checkpointing=recomputes), H100)
            result[config.residual_connection, recomputes] = plan
    return result


def size(number: float) -> str:
    """Return bytes in MB or GB with three digits."""
    unit, value = ("MB", number / 1e6) if number < 1e9 else ("GB", number / 1e9)
    return f"{value:,.0f} {unit}" if value >= 100 else f"{value:.3g} {unit}"


def extra(added: float, whole: float) -> str:
    """Return bytes that are added to a whole, with their share."""
    return f"{size(added)} ({added / whole:.1%})"


def parameter_rows() -> Iterator[list[str]]:
    """Yield the parameters of each model, the activated ones with the embeddings, and those of the connection."""
    for title in MODELS:
        config, standard = configurations(title)
        count, plain = count_parameters(config), count_parameters(standard)
        used = count.total - count.non_embedding + count.activated_non_embedding
        yield [title, f"{count.total:,}", f"{used:,}", f"{count.total - plain.total:,}"]


def inference_rows() -> Iterator[list[str]]:
    """Yield the memory of reading one prompt and going on from it, in the model's 16 bits."""
    for title, (_, context) in MODELS.items():
        found = plans(title, False)
        plan, standard = found[DEFAULT_CONNECTION, False].memory, found["standard", False].memory
        whole = sum(standard.values())
        working = plan["activations"] + plan["block states"]
        cells = (size(plan["weights"]), size(plan["caches"]), size(working), size(sum(plan.values())))
        yield [title, f"{context:,}", *cells, extra(sum(plan.values()) - whole, whole)]


def training_rows() -> Iterator[list[str]]:
    """Yield the memory of a training step on one sequence, whole on one device, and its time."""
    for title, (_, context) in MODELS.items():
        found = plans(title, True)
        plan, again = found[DEFAULT_CONNECTION, False], found[DEFAULT_CONNECTION, True]
        states = sum(plan.memory[part] for part in ("weights", "gradients", "optimizer"))
        row = [title, size(states)]
        for recomputes in (False, True):
            working, plain = (
                found[name, recomputes].memory["activations"] + found[name, recomputes].memory["block states"]
                for name in (DEFAULT_CONNECTION, "standard")
            )
            row += [size(working), size(working - plain)]
        hours = [each.seconds["compute"] / context * 1e9 / 3600 for each in (plan, again)]
        yield [*row, " / ".join(f"{value:,.3g}" if value < 1000 else f"{value:,.0f}" for value in hours)]


@dataclass
class Count:
    """What the tasks of a benchmark ask, in items and tokens.

    Attributes:
        items: The number of items.
        requests: The number of choices to score, or of answers to generate.
        prompt: The number of tokens of all prompts and choices, each prompt read once for all of its choices.
        shared: The same, where the beginning that the prompts of a task share is read once.
        generated: The largest number of tokens that may be generated.
    """

    items: float = 0
    requests: float = 0
    prompt: float = 0
    shared: float = 0
    generated: float = 0

    def add(self, other: "Count") -> None:
        """Add the counts of other tasks."""
        for name, value in vars(other).items():
            setattr(self, name, getattr(self, name) + value)


def count_task(task: Any, tokenizer: PreTrainedTokenizerBase, items: int) -> Count:
    """Count a task of the harness on its first items, and scale the counts to all of them.

    Args:
        task: The task, with its data.
        tokenizer: The tokenizer.
        items: The number of items of the whole task.
    """
    # These import the harness, which only counting needs.
    from attnres.eval.answer_length import answer_tokens
    from attnres.eval.suite import prepare

    prepare(task, seed=0)
    task.build_all_requests(limit=COUNTED, rank=0, world_size=1)
    generates = task.OUTPUT_TYPE == "generate_until"
    contexts = dict.fromkeys((request.doc_id, request.args[0]) for request in task.instances)
    choices = [] if generates else [request.args[1] for request in task.instances]
    ids = tokenizer([text for _, text in contexts], add_special_tokens=False)["input_ids"]
    # All others lie between these two in the order of lists, so they begin with what the two share.
    common = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(min(ids), max(ids))))
    common = common if len(ids) > 1 else 0
    tokens = sum(map(len, ids)) + sum(len(tokenizer(text, add_special_tokens=False)["input_ids"]) for text in choices)
    scale = items / len({number for number, _ in contexts})
    return Count(
        items=items,
        requests=len(task.instances) * scale,
        prompt=tokens * scale,
        shared=(tokens - common * len(ids)) * scale + common,
        generated=items * answer_tokens(task.config.generation_kwargs) if generates else 0,
    )


def count_evaluation(tokenizer: PreTrainedTokenizerBase, name: str, data: Path) -> dict[str, Any]:
    """Count the benchmarks whose data a folder holds.

    Args:
        tokenizer: The tokenizer.
        name: Its name, for the page.
        data: The folder, as for `attnres eval --data`.

    Returns:
        The counts by benchmark, with the tokenizer's name and size.
    """
    from attnres.eval.suite import load_all

    counts = {}
    loaded, _ = load_all([*benchmarks().values()], data, True, lambda benchmark: None)
    for benchmark, tasks in loaded.items():
        whole = Count()
        for task in tasks["tasks"].values():
            # pyrefly: ignore[missing-attribute]  # every task of a file has it
            items = FULL_TRIVIAQA if benchmark.name == "triviaqa" else len(task.task_docs)
            whole.add(count_task(task, tokenizer, items))
        counts[benchmark.name] = {field: round(value) for field, value in vars(whole).items()}
        print(benchmark.name, counts[benchmark.name], flush=True)
    return {"tokenizer": name, "vocabulary": len(tokenizer), "counted": COUNTED, "benchmarks": counts}


def evaluation_rows(stored: dict[str, Any]) -> Iterator[list[str]]:
    """Yield the counts of each benchmark, and their sum."""
    sums = Count()
    for name, benchmark in benchmarks().items():
        if (count := stored["benchmarks"].get(name)) is None:
            yield [benchmark.title, "not counted", "", "", "", ""]
            continue
        yield [benchmark.title, *_millions(count)]
        sums.add(Count(**count))
    yield ["all that are counted", *_millions(vars(sums))]


def time_rows(stored: dict[str, Any]) -> Iterator[list[str]]:
    """Yield the time of an evaluation: measured for the smallest model on a benchmark, and estimated for others."""
    measured = json.loads(CHOICES.read_text(encoding="utf-8"))["results"]["MMLU, 5-shot, attnres-tiny"]
    seconds = median(measured["seconds"]["shared prefixes"]["processor"]) * 4 / measured["requests"]
    minutes = seconds * stored["benchmarks"]["mmlu"]["items"] / 60
    yield ["`attnres-tiny`, MMLU alone, measured", "one core of a CPU", f"{minutes:.0f} minutes", "none"]
    sums = Count()
    for count in stored["benchmarks"].values():
        sums.add(Count(**count))
    for title in ("0.6B (Qwen3)", "8B (Llama 3.1)", "`attnres-48b-a3b`"):
        forward = (
            plans(title, True)[DEFAULT_CONNECTION, False].seconds["compute"] / MODELS[title][1] / 3
        )  # a third of a step
        costs = Costs(configurations(title)[0], Job(1, LONGEST, SERVED * LONGEST, training=False))
        rate = plan_layout(costs, Layout(), H100).tokens_per_second
        hours = sums.shared * forward / 3600, sums.generated / rate / 3600
        shown = (f"{value:.2g} hours" if value >= 1 else f"{value * 60:.2g} minutes" for value in hours)
        yield [f"{title}, estimated", "H100", *shown]


def _millions(count: dict[str, float]) -> Iterator[str]:
    for field, value in count.items():
        yield f"{value:,.0f}" if field in ("items", "requests") else f"{value / 1e6:,.2f}" if value else "none"


def main(arguments: Iterable[str] = ()) -> None:
    """Compute all tables, and write them into the guide."""
    if given := [*arguments]:
        source, data = given
        # pyrefly: ignore[bad-argument-type]  # annotated as if there might be none
        counts = count_evaluation(AutoTokenizer.from_pretrained(source), Path(source).name, Path(data))
        COUNTS.write_text(json.dumps(counts, indent=1) + "\n", encoding="utf-8")
    stored = json.loads(COUNTS.read_text(encoding="utf-8"))
    tables = {
        "parameters": markdown(["model", "parameters", "activated", "added"], parameter_rows()),
        "inference": markdown(
            ["model", "tokens", "weights", "cache", "activations", "together", "AttnRes adds"],
            inference_rows(),
        ),
        "training": markdown(
            [
                "model",
                "states",
                "activations",
                "AttnRes adds",
                "activations, recomputed",
                "AttnRes adds",
                "H100 hours",
            ],
            training_rows(),
        ),
        "evaluation": markdown(
            ["benchmark", "items", "requests", "prompt tokens, M", "read once, M", "generated at most, M"],
            evaluation_rows(stored),
        ),
        "evaluation time": markdown(["model", "device", "prompts", "answers, at most"], time_rows(stored)),
    }
    update_tables(PAGE, tables)


if __name__ == "__main__":
    main(sys.argv[1:])
