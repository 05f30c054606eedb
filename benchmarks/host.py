"""Measure the host's time for one aggregation on a GPU, without a GPU: Python, PyTorch and Triton, but no launch.

Where tensors are small, a GPU waits for its host. [`without_launches`] says which of the host's work is counted. The
floor is the least that a differentiable function of these tensors can cost: a `torch.autograd.Function` that saves its
inputs and allocates one tensor forward and one backward.
"""

from collections.abc import Callable, Iterator
from functools import partial
from importlib.metadata import version

import torch
from rich.table import Table
from torch import Tensor

from attnres import depth_attention
from attnres.functional_attnres import attend

from .aggregation import Inputs
from .peers import Peer
from .report import cell, make_table, verdict
from .timing import Setting, Ways, compare, interleave

FLOOR, OURS, IN_MODEL = "floor", "ours", "ours in a model"
TARGET = 1.5  # of ours / floor
SOURCES = (2, 5, 9, 17)
TOKENS, WIDTH = 4, 64  # as few numbers as possible, because copies take time here that a GPU would spend
INSTALL = {
    OURS: "pip install triton",
    "liger": "pip install --no-deps liger-kernel",
    "fla": "pip install --no-deps fla-core einops",
}


class Floor(torch.autograd.Function):
    """Save all inputs, and allocate one result forward and all gradients at once backward. Nothing is computed."""

    @staticmethod
    def forward(ctx, *inputs: Tensor) -> Tensor:
        """Return an empty tensor like the last of the inputs."""
        ctx.save_for_backward(*inputs)
        return torch.empty_like(inputs[-1])

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, ...]:
        """Return an empty gradient for each source, and the query and the norm's weight for theirs."""
        query, weight, *sources = ctx.saved_tensors
        grads = torch.empty((len(sources), *grad.shape), dtype=grad.dtype, device=grad.device)
        return query, weight, *grads.unbind(0)


def floor(query: Tensor, sources: list[Tensor], key_norm_weight: Tensor, eps: float) -> Tensor:
    """Call [`Floor`] with the arguments of a peer."""
    return Floor.apply(query, key_norm_weight, *sources)


def ours(query: Tensor, sources: list[Tensor], key_norm_weight: Tensor, eps: float) -> Tensor:
    """Call our Triton kernels by name."""
    return depth_attention(query, sources, key_norm_weight, eps, implementation="triton")


def ours_in_model(query: Tensor, sources: list[Tensor], key_norm_weight: Tensor, eps: float) -> Tensor:
    """Call our Triton kernels as a layer does, which also returns the sources for the next read."""
    return attend(query, sources, key_norm_weight, eps, True, "triton", fuse_later_grads=True)[0]


def load_liger() -> Peer:
    """Return Liger's operation. It takes one tensor, so the sources are stacked."""
    from liger_kernel.transformers.functional import liger_attn_res

    return lambda query, sources, weight, eps: liger_attn_res(torch.stack(sources), query, weight, eps)


def load_fla() -> Peer:
    """Return the operation of flash-linear-attention."""
    from fla.ops.attnres import fused_attnres

    return lambda query, sources, weight, eps: fused_attnres(query, sources, weight, rms_eps=eps)


LIBRARIES: dict[str, Callable[[], Peer]] = {"liger": load_liger, "fla": load_fla}


def load() -> tuple[dict[str, Peer], dict[str, str]]:
    """Load all functions that are installed.

    Returns:
        The functions by name, and for each missing one the reason and how to install it.
    """
    missing = {}
    try:
        import triton  # noqa: F401
    except ImportError:
        return {FLOOR: floor}, {name: f"Triton is not installed ({INSTALL[OURS]})" for name in INSTALL}
    functions = {FLOOR: floor, OURS: ours, IN_MODEL: ours_in_model}
    for name, load_library in LIBRARIES.items():
        try:
            functions[name] = load_library()
        except Exception as error:  # it is not installed, or does not load beside these versions
            missing[name] = f"{str(error).splitlines()[0]} ({INSTALL[name]})"
    return functions, missing


def ways(functions: dict[str, Peer], n: int, dtype: torch.dtype, name: str) -> Ways:
    """Return one way per function to run a pass over n sources that need gradients."""
    inputs = Inputs(n, WIDTH, TOKENS, dtype, "cpu")
    if name == "forward":
        return {name: partial(inputs.call, function) for name, function in functions.items()}
    leaves = [inputs.query, inputs.key_norm_weight, *inputs.sources]

    def step(function: Peer) -> None:
        torch.autograd.grad(inputs.call(function), leaves, inputs.grad)

    return {name: partial(step, function) for name, function in functions.items()}


def measure(setting: Setting) -> Iterator[dict]:
    """Yield one row per pass, dtype and number of sources, with the reason for each way that is missing."""
    functions, missing = load()
    setting = Setting(setting.threads, setting.repeats if setting.quick else 5 * setting.repeats, setting.quick)
    pairs = {f"{name} / {FLOOR}": (name, FLOOR) for name in (OURS, IN_MODEL)}
    pairs |= {f"{name} / {OURS}": (name, OURS) for name in LIBRARIES}
    versions = {name: version(name) for name, peer in (("triton", OURS), ("liger-kernel", "liger"), ("fla-core", "fla"))
                if peer in functions}  # fmt: skip
    for dtype in ("float32", "bfloat16"):
        for name in ("forward", "forward+backward"):
            for n in SOURCES[: 1 if setting.quick else None]:
                row = {"pass": name, "dtype": dtype, "sources": n, "peers": versions, "missing": missing}
                chosen = ways(functions, n, getattr(torch, dtype), name)
                yield row | compare(timed(chosen, setting), pairs)


def timed(ways: Ways, setting: Setting) -> dict:
    """Return the times of all ways without launches."""
    if OURS not in ways:
        return interleave(ways, setting)
    from .without_launches import without_launches

    with without_launches():
        return interleave(ways, setting)


def tables(rows: list[dict]) -> dict[str, Table]:
    """Return the table of all rows, by its name in the README."""
    libraries = [f"{name} / {OURS}" for name in LIBRARIES]
    own = f"{OURS} / {FLOOR}"
    columns = ["pass", "dtype", "sources", own, "target", f"{IN_MODEL} / {FLOOR}"]
    columns += [column for name in libraries for column in (name, "target")]
    cells = []
    for row in rows:
        line = [row["pass"], row["dtype"], row["sources"], cell(row, own), judge(row, own, TARGET, False)]
        line.append(cell(row, f"{IN_MODEL} / {FLOOR}"))
        for name in libraries:
            line += [cell(row, name), judge(row, name, 1, True)]
        cells.append(line)
    missing = sorted({f"{name} did not run: {why}." for row in rows for name, why in row["missing"].items()})
    versions = ", ".join(f"{name} {number}" for name, number in rows[0]["peers"].items()) if rows else ""
    note = " ".join([*([f"Measured with {versions}."] if versions else []), *missing])
    return {"host": make_table("Host time of one aggregation on a GPU, launches left out", columns, cells, note=note)}


def judge(row: dict, name: str, target: float, at_least: bool) -> str:
    """Return whether a ratio meets its target, or `-` if it was not measured."""
    return verdict(row["ratios"][name]["median"], target, at_least) if name in row["ratios"] else "-"
