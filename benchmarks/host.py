"""Measure the host's time for one aggregation on a GPU, without a GPU: Python, PyTorch and Triton, but no launch.

Where tensors are small, a GPU waits for its host. [`without_launches`] says which of the host's work is counted. The
floor is the least that a differentiable function of these tensors can cost: a `torch.autograd.Function` that saves its
inputs and allocates one tensor forward and one backward. In a model a source has several reads, whose gradients are
added. So one pass runs several reads in turn, where the libraries leave the additions to PyTorch.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from importlib.metadata import version

import torch
from torch import Tensor
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from attnres import depth_attention
from attnres.accelerated.autograd import FollowingNorm
from attnres.accelerated.triton import direct
from attnres.functional_attnres import attend
from attnres.utils.extras import require_extra

from .aggregation import Inputs
from .peers import Peer
from .stored import cell, markdown_table, verdict
from .timing import Setting, Ways, compare, interleave

FLOOR, OURS, IN_MODEL = "floor", "ours", "ours in a model"
FLA_BY_NAME = "fla by name"  # flash-linear-attention as an implementation of this package
PASSES = ("forward", "forward+backward", "reads in turn", "read and norm")
APART, TOGETHER = "apart", "together"  # the read and the norm that follows
TARGET = 1.5  # of ours / floor
READS = 4  # of a pass of reads in turn, as in a block of four sublayers
SOURCES = (2, 5, 9, 17)
TOKENS, WIDTH = 4, 64  # as few numbers as possible, because copies take time here that a GPU would spend
INSTALL = {
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


def floor(query: Tensor, sources: Sequence[Tensor], key_norm_weight: Tensor, eps: float) -> Tensor:
    """Call [`Floor`] with the arguments of a peer."""
    return Floor.apply(query, key_norm_weight, *sources)


def ours(
    query: Tensor, sources: Sequence[Tensor], key_norm_weight: Tensor, eps: float
) -> Tensor | tuple[Tensor, Tensor]:
    """Call our Triton kernels by name."""
    return depth_attention(query, sources, key_norm_weight, eps, implementation="triton")


def in_model(
    implementation: str, query: Tensor, sources: Sequence[Tensor], key_norm_weight: Tensor, eps: float
) -> Tensor | tuple[Tensor, Sequence[Tensor]]:
    """Call an implementation as a layer does, which also returns the sources for the next read."""
    result, _, sources = attend(query, sources, key_norm_weight, eps, False, implementation, fuse_later_grads=True)
    return result, sources


def load_liger() -> Peer:
    """Return Liger's operation. It takes one tensor, so the sources are stacked."""
    from liger_kernel.transformers.functional import liger_attn_res

    return lambda query, sources, weight, eps: liger_attn_res(torch.stack(tuple(sources)), query, weight, eps)


def load_fla() -> Peer:
    """Return the operation of flash-linear-attention."""
    from fla.ops.attnres import fused_attnres

    return lambda query, sources, weight, eps: fused_attnres(query, sources, weight, rms_eps=eps)


LIBRARIES: dict[str, Callable[[], Peer]] = {"liger": load_liger, "fla": load_fla}


def load() -> tuple[dict[str, Peer], dict[str, str]]:
    """Load all functions that are installed.

    Returns:
        The functions by name, and for each missing library the reason and how to install it.
    """
    functions: dict[str, Peer] = {FLOOR: floor, OURS: ours, IN_MODEL: partial(in_model, "triton")}
    missing: dict[str, str] = {}
    for name, load_library in LIBRARIES.items():
        try:
            functions[name] = load_library()
        except Exception as error:  # it is not installed, or does not load beside these versions
            missing[name] = f"{str(error).splitlines()[0]} ({INSTALL[name]})"
    if "fla" in functions:
        functions[FLA_BY_NAME] = partial(in_model, "fla")
    return functions, missing


def ways(functions: dict[str, Callable], n: int, dtype: torch.dtype, name: str) -> Ways:
    """Return one way per function to run a pass over n sources that need gradients."""
    inputs = Inputs(n, WIDTH, TOKENS, dtype, "cpu")
    if name == "forward":
        return {name: partial(inputs.call, function) for name, function in functions.items()}
    leaves = [inputs.query, inputs.key_norm_weight, *inputs.sources]

    def read(function: Callable, sources: Sequence[Tensor]) -> tuple[Tensor, Sequence[Tensor]]:
        result = function(inputs.query, sources, inputs.key_norm_weight, inputs.eps)
        return result if isinstance(result, tuple) else (result, sources)

    def step(reads: int, function: Callable) -> None:
        result, sources = read(function, inputs.sources)
        for _ in range(reads - 1):  # each read is added to the last source, the partial sum of the current block
            result, sources = read(function, (*sources[:-1], sources[-1] + result))
        torch.autograd.grad(result, leaves, inputs.grad)

    reads = READS if name == "reads in turn" else 1
    return {name: partial(step, reads, function) for name, function in functions.items()}


def norm_ways(n: int, dtype: torch.dtype) -> Ways:
    """Return the ways to run a read and the norm that follows, forward and backward: apart, and by our kernels."""
    inputs = Inputs(n, WIDTH, TOKENS, dtype, "cpu")
    norm = LlamaRMSNorm(WIDTH).to(dtype)
    leaves = [inputs.query, inputs.key_norm_weight, norm.weight, *inputs.sources]
    read = inputs.query, inputs.sources, inputs.key_norm_weight, inputs.eps

    def apart() -> None:
        result, _ = in_model("triton", *read)
        torch.autograd.grad(norm(result), leaves, inputs.grad)

    def together() -> None:
        following = FollowingNorm(norm.weight, norm.variance_epsilon)
        attended = direct.attend(*read, False, True, following, needs_weights=False)
        if attended is None:
            raise RuntimeError("the direct path does not take these tensors")
        torch.autograd.grad(attended[0], leaves, inputs.grad)

    return {APART: apart, TOGETHER: together}


def measure(setting: Setting) -> Iterator[dict]:
    """Yield one row per pass, dtype and number of sources, with the reason for each library that is missing.

    Raises:
        ModuleNotFoundError: Triton is not installed.
    """
    with require_extra("gpu"):
        from .without_launches import without_launches
    functions, missing = load()
    setting = Setting(setting.threads, setting.repeats if setting.quick else 5 * setting.repeats, setting.quick)
    pairs = {f"{name} / {FLOOR}": (name, FLOOR) for name in (OURS, IN_MODEL)}
    pairs |= {f"{name} / {OURS}": (name, OURS) for name in LIBRARIES}
    pairs[f"{APART} / {TOGETHER}"] = APART, TOGETHER
    pairs |= {f"{way} / {IN_MODEL}": (way, IN_MODEL) for way in (*LIBRARIES, FLA_BY_NAME)}
    versions = {name: version(name) for name, peer in (("triton", OURS), ("liger-kernel", "liger"), ("fla-core", "fla"))
                if peer in functions}  # fmt: skip
    for dtype in ("float32", "bfloat16"):
        for name in PASSES:
            for n in SOURCES[: 1 if setting.quick else None]:
                row = {"pass": name, "dtype": dtype, "sources": n, "peers": versions, "missing": missing}
                if name == PASSES[-1]:
                    chosen = norm_ways(n, getattr(torch, dtype))
                else:
                    chosen = ways(functions, n, getattr(torch, dtype), name)
                with without_launches():
                    times = interleave(chosen, setting)
                yield row | compare(times, pairs)


def tables(rows: list[dict]) -> dict[str, str]:
    """Return the tables of one read, of reads in turn, and of a read with a norm, by their names in the README."""
    missing = sorted({f"{name} did not run: {why}." for row in rows for name, why in row["missing"].items()})
    versions = ", ".join(f"{name} {number}" for name, number in rows[0]["peers"].items())
    note = " ".join([f"Measured with {versions}.", *missing])
    single, in_model = f"{OURS} / {FLOOR}", f"{IN_MODEL} / {FLOOR}"
    alone, in_turn, with_norm = [], [], []
    for row in rows:
        if row["pass"] == "read and norm":
            with_norm.append([row["dtype"], row["sources"], cell(row, f"{APART} / {TOGETHER}")])
            continue
        if row["pass"] != "reads in turn":
            line = [row["pass"], row["dtype"], row["sources"], cell(row, single), judge(row, single, TARGET, False)]
            alone.append([*line, cell(row, in_model), *_libraries(row, OURS)])
            continue
        line = [row["dtype"], row["sources"], cell(row, in_model), *_libraries(row, IN_MODEL)]
        in_turn.append([*line, cell(row, f"{FLA_BY_NAME} / {IN_MODEL}")])
    columns = ["pass", "dtype", "sources", single, "target", in_model, *_library_columns(OURS)]
    columns_in_turn = ["dtype", "sources", in_model, *_library_columns(IN_MODEL), f"{FLA_BY_NAME} / {IN_MODEL}"]
    title = "Host time of one aggregation on a GPU, launches left out"
    title_in_turn = f"Host time of {READS} reads in turn and their backward pass, launches left out"
    return {
        "host": markdown_table(title, columns, alone, note=note),
        "host-in-turn": markdown_table(title_in_turn, columns_in_turn, in_turn, note=note),
        "host-norm": markdown_table(
            "Host time of a read, the norm that follows and their backward pass, launches left out",
            ["dtype", "sources", f"{APART} / {TOGETHER}"],
            with_norm,
        ),
    }


def _library_columns(base: str) -> list[str]:
    return [column for name in LIBRARIES for column in (f"{name} / {base}", "target")]


def _libraries(row: dict, base: str) -> list[str]:
    """Return the cells of [`_library_columns`]."""
    names = [f"{name} / {base}" for name in LIBRARIES]
    return [text for name in names for text in (cell(row, name), judge(row, name, 1, True))]


def judge(row: dict, name: str, target: float, at_least: bool) -> str:
    """Return whether a ratio meets its target, or `-` if it was not measured."""
    return verdict(row["ratios"][name]["median"], target, at_least) if name in row["ratios"] else "-"
