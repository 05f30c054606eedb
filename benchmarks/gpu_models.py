"""Compare attention residuals with the standard residual stream in models on a GPU, in bfloat16, on the same weights.

It measures prefill, a training step and decoding, each eagerly, as CUDA graphs and compiled, for S = 4, S = 8 and Full.
"""

import gc
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from attnres.accelerated import IMPLEMENTATIONS

from . import graphs, workloads
from .clock import Clock
from .shapes import EAGER, STANDARD, build, connect, kimi_linear, llama, tiny_kimi_linear, token_ids
from .stored import cell, verdict
from .timing import Setting, Ways, compare, interleave

TARGETS = {"prefill": 1.02, "training step": 1.03, "decoding": 1.02}  # of ours / standard
CONNECTIONS: dict[str, dict] = {"Block S=4": {"block_size": 4}, "Block S=8": {"block_size": 8}, "Full": {"full": True}}
# Implementations that are measured too, in eager mode: PyTorch's operations, and fla's kernels where they run.
OTHERS = ("eager", "fla")
WITH_OTHERS = "Block S=4"  # the one connection that is also measured with `OTHERS`
BATCH, TOKENS, DECODED = 4, 2048, 8


def compiled(prepare: Callable[..., Ways], models: dict[str, PreTrainedModel], ids: Tensor) -> Ways:
    """Return the ways of a workload for models of which each is compiled."""
    torch.compiler.reset()
    return prepare({name: _Compiled(model) for name, model in models.items()}, ids)


class _Compiled:
    """A model whose calls are compiled. All other attributes are those of the model."""

    def __init__(self, model: PreTrainedModel):
        self._model, self._call = model, torch.compile(model, dynamic=False)

    def __call__(self, *args, **kwargs):
        return self._call(*args, **kwargs)

    def __getattr__(self, name: str):
        return getattr(self._model, name)

    def eval(self) -> "_Compiled":
        self._model.eval()
        return self

    def train(self) -> "_Compiled":
        self._model.train()
        return self


# Mode -> workload -> function that prepares its ways. In each mode, quick workloads come first.
MODES: dict[str, dict[str, Callable[[dict[str, PreTrainedModel], Tensor], Ways]]] = {
    "eager": {
        "prefill": workloads.prefill,
        "training step": workloads.training_step,
        "decoding": workloads.decoding,
    },
    "CUDA graph": {
        "decoding": graphs.decoding,
        "prefill": graphs.prefill,
        "training step": graphs.training_step,
    },
    "compiled": {
        "decoding": workloads.compiled_decoding,
        "prefill": partial(compiled, workloads.prefill),
        "training step": partial(compiled, workloads.training_step),
    },
}
COST = {"eager": 2, "CUDA graph": 2, "compiled": 5}  # mode -> time that a row gets, relative to other modes


@dataclass(frozen=True)
class Point:
    """One measurement: models of one shape, in one workload and one mode."""

    mode: str
    workload: str
    model: str
    config: PreTrainedConfig

    def ways(self, models: dict[str, PreTrainedModel], ids: Tensor) -> Ways:
        """Return one way per model, for token ids `[batch, seq]`."""
        return MODES[self.mode][self.workload](models, ids)


def points(quick: bool) -> list[Point]:
    """Return all measurements, the quicker and more important ones first."""
    if quick:
        shapes = {"Llama d=64": llama(width=64, layers=2), "Kimi Linear d=64": tiny_kimi_linear()}
        modes = {"eager": tuple(shapes), "compiled": ("Llama d=64",)}
    else:
        shapes = {f"Llama d={width}": llama(width) for width in (1024, 2048)}
        shapes |= {f"Kimi Linear d={width}": kimi_linear(hidden_size=width) for width in (1024, 2048)}
        modes = {
            "eager": tuple(shapes),
            "CUDA graph": tuple(shapes),
            "compiled": tuple(shapes)[::2] + tuple(shapes)[1::2],
        }
    all_points = [
        Point(mode, workload, name, shapes[name]) for mode in modes for name in modes[mode] for workload in MODES[mode]
    ]
    return [point for point in all_points if not quick or point.mode == "eager" or point.workload == "decoding"]


def measure(device: str, quick: bool, clock: Clock) -> Iterator[dict]:
    """Yield one row per model, workload, mode and connection."""
    setting = Setting(repeats=2 if quick else 30, quick=quick, device=device)
    todo = points(quick)
    models, held = {}, None
    for number, point in enumerate(todo):
        cost = sum(COST[later.mode] for later in todo[number:]) / COST[point.mode]
        seconds = clock.row(cost)
        row = {"model": point.model, "workload": point.workload, "mode": point.mode, "dtype": "bfloat16"}
        if seconds is None:
            yield row | {"missing": "out of time"}
            continue
        if held != (point.model, point.mode):
            models = None
            _free(device)
            models, held = variants(point, device), (point.model, point.mode)
        try:
            ids = token_ids(point.config, *sizes(point.workload, quick), device)
            ways = point.ways(models, ids)
            times = interleave(
                ways, setting, calls=DECODED if point.workload == "decoding" else 1, most_seconds=0.7 * seconds
            )
        except Exception as error:  # the model cannot be captured or compiled, or does not fit into memory
            yield row | {"missing": (next(iter(str(error).splitlines()), "") or type(error).__name__)[:200]}
            ways = None
            _free(device)
            continue
        ways = None
        for connection in CONNECTIONS:
            by_way = {"standard": times[STANDARD], "ours": times[connection]}
            by_way |= {
                f"ours {other}": times[key] for other in OTHERS if (key := other_name(other, connection)) in times
            }
            pairs = {f"{way} / standard": (way, "standard") for way in by_way if way != "standard"}
            yield row | {"connection": connection, "tokens": ids.numel()} | compare(by_way, pairs)


def sizes(workload: str, quick: bool) -> tuple[int, int]:
    """Return the length and the number of sequences."""
    if quick:
        return 16, 1
    return (512, 1) if workload == "decoding" else (TOKENS, BATCH)


def variants(point: Point, device: str) -> dict[str, PreTrainedModel]:
    """Return the standard model and one model per connection, on the same weights.

    In eager mode there is one more model for each of `OTHERS` that runs here.
    """
    standard = build(point.config, torch.bfloat16, device)
    models = {STANDARD: standard} | {name: connect(standard, **blocks) for name, blocks in CONNECTIONS.items()}
    if point.mode == "eager":
        sources = [torch.zeros(1, point.config.hidden_size, dtype=torch.bfloat16, device=device)]
        query = torch.zeros(point.config.hidden_size, dtype=torch.float32, device=device)
        for other in OTHERS:
            implementation = IMPLEMENTATIONS.get(other)
            if implementation is None or implementation.supports(query, sources) is None:
                models[other_name(other, WITH_OTHERS)] = connect(standard, other, **CONNECTIONS[WITH_OTHERS])
    return models


def other_name(other: str, connection: str) -> str:
    """Return the name of the model with this connection and another implementation."""
    return EAGER + connection if other == "eager" else f"{other}, {connection}"


def _free(device: str) -> None:
    gc.collect()
    if device != "cpu":
        torch.cuda.empty_cache()


def table(rows: list[dict]) -> tuple[str, list[str], list[list[str]], str]:
    """Return title, columns, cells and note of the table."""
    ratios = ["ours / standard", *(f"ours {other} / standard" for other in OTHERS)]
    cells = [
        [
            *(row[key] for key in ("mode", "model", "workload", "connection")),
            cell(row, ratios[0], 3),
            verdict(row["ratios"][ratios[0]]["median"], TARGETS[row["workload"]]),
            *(cell(row, ratio, 3) for ratio in ratios[1:]),
        ]
        for row in rows
        if "ratios" in row
    ]
    missing = [
        f"{row['mode']}, {row['model']}, {row['workload']}: {row['missing']}." for row in rows if "missing" in row
    ]
    columns = ["mode", "model", "workload", "connection", ratios[0], "target", *ratios[1:]]
    return "Models, bfloat16, time as a ratio to the standard residual stream", columns, cells, " ".join(missing)
