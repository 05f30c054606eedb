"""Check that every implementation of depth attention computes the readable form on this device.

This runs before any implementation is timed.
"""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from attnres.accelerated import IMPLEMENTATIONS
from attnres.accelerated.triton import kernels_available, phase_one, read_fused
from attnres.functional_attnres import DEPTH_ATTENTION, reference

from .clock import Clock

EPS = 1e-6
# Sources, tokens, width.
CASES = [(1, 37, 64), (2, 512, 1024), (5, 37, 1000), (9, 512, 2048), (17, 64, 4096), (64, 5, 8192)]
LIBRARIES = ["fla"]
QUICK = [(1, 5, 8), (3, 7, 64)]
LEAST_SCALE = 0.2
DTYPES = ("float32", "bfloat16", "float16")


def measure(device: str, quick: bool, clock: Clock) -> Iterator[dict]:
    """Yield one row per implementation, dtype and case, or one with the reason per dtype that does not run."""
    cases = [(dtype, case) for case in (QUICK if quick else CASES) for dtype in DTYPES]
    refused = set()
    # A library may tune itself for minutes per width, so libraries run after all others and for two cases only.
    names = [name for name in DEPTH_ATTENTION if name not in ("auto", *LIBRARIES)]
    todo = [(case, names) for case in cases] + [(case, LIBRARIES) for case in cases[:2]]
    for number, ((dtype, case), names) in enumerate(todo):
        for name in names:
            if (name, dtype) in refused:
                continue
            if clock.row(len(todo) - number) is None:
                yield {"implementation": name, "dtype": dtype, "case": case, "missing": "out of time"}
                continue
            query, sources = make(case, getattr(torch, dtype), device)
            implementation = IMPLEMENTATIONS.get(name)
            reason = implementation and implementation.supports(query, sources)
            if reason:
                refused.add((name, dtype))
                yield {"implementation": name, "dtype": dtype, "missing": reason}
                continue
            yield {"implementation": name, "dtype": dtype, "case": case} | compared(
                DEPTH_ATTENTION[name], query, sources
            )
        if names is not LIBRARIES and kernels_available(device, case[2]):
            query, sources = make(case, getattr(torch, dtype), device)
            yield {"implementation": "triton, two phases and norm", "dtype": dtype, "case": case} | two_phases(
                query, sources
            )


def make(case: tuple[int, int, int], dtype: torch.dtype, device: str) -> tuple[Tensor, list[Tensor]]:
    """Return a float32 query `[width]` and sources `[tokens, width]` of a case (sources, tokens, width)."""
    n, tokens, width = case
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(width, generator=generator) * (3 / width**0.5)
    sources = [torch.randn(tokens, width, generator=generator).to(device, dtype) for _ in range(n)]
    return query.to(device).requires_grad_(), [source.requires_grad_() for source in sources]


def compared(attend: Callable, query: Tensor, sources: list[Tensor]) -> dict:
    """Compare result, weights and all gradients with the readable form in float64, for both scales."""
    error = 0.0
    for is_sum in (False, True):
        exact = [tensor.detach().double().requires_grad_() for tensor in (query, *sources)]
        actual = attend(query, sources, EPS, is_sum)[:2]
        expected = reference(exact[0], exact[1:], None, EPS, is_sum)
        actual = [*actual, *torch.autograd.grad(loss(*actual), (query, *sources))]
        expected = [*expected, *torch.autograd.grad(loss(*expected), exact)]
        error = max(error, *(relative_error(*pair) for pair in zip(actual, expected)))
    return judged(error, sources[0].dtype)


@torch.no_grad()
def two_phases(query: Tensor, sources: list[Tensor]) -> dict:
    """Compare phase one over half of the sources, the read that continues from it, and the norm after the read."""
    half, width, dtype = len(sources) // 2, query.numel(), sources[0].dtype
    phase = None
    if half:
        phase = tuple(part[1] for part in phase_one(torch.stack([-query, query]), EPS, *sources[:half]))
    weight = torch.linspace(-2, 3, width, device=query.device).to(dtype)
    actual = read_fused(query, EPS, 1, sources[half:], phase, dtype, weight, EPS)
    expected, _ = reference(query.double(), [source.double() for source in sources], None, EPS, False)
    expected = torch.nn.functional.rms_norm(expected, (width,), weight.double(), EPS)
    return judged(relative_error(actual, expected), dtype, roundings=3)


def loss(result: Tensor, weights: Tensor) -> Tensor:
    """Return a scalar in float64 that depends on every entry of the result and of the depth weights."""
    # Multiples of 1/64, which every dtype holds exactly, because a gradient has the dtype of the result.
    direction = torch.linspace(-64, 64, result.numel(), dtype=torch.float64, device=result.device).round() / 64
    direction = direction.view(result.shape)
    return (result * direction.to(result.dtype)).double().sum() + (weights.double() * direction.sum(-1)).square().sum()


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """Return the largest difference, relative to the largest entry, or infinity if any entry is not a number."""
    # The scale has a minimum because with one source the query's gradient is zero, a difference of numbers near one.
    error = (actual.double() - expected).abs().max() / expected.abs().max().clamp(min=LEAST_SCALE)
    return error.item() if bool(error.isfinite()) else float("inf")


def judged(error: float, dtype: torch.dtype, roundings: int = 1) -> dict:
    """Return the error, the error that is allowed after `roundings` roundings to `dtype`, and whether it is allowed."""
    allowed = 5e-5 + 2 * roundings * torch.finfo(dtype).eps
    return {"error": error, "allowed": allowed, "is_right": error <= allowed}


def table(rows: list[dict]) -> tuple[str, list[str], list[list[str]], str]:
    """Return title, columns, cells and note of a table with the largest error of each implementation and dtype."""
    cells, missing = [], {}
    groups = dict.fromkeys((row["implementation"], row.get("dtype")) for row in rows)
    for name, dtype in groups:
        group = [row for row in rows if (row["implementation"], row.get("dtype")) == (name, dtype)]
        done = [row for row in group if "error" in row]
        missing |= {row["implementation"]: row["missing"] for row in group if "missing" in row}
        if done:
            wrong = [str(row["case"]) for row in done if not row["is_right"]]
            worst = max(done, key=lambda row: row["error"] / row["allowed"])
            verdict = f"wrong: {', '.join(wrong)}" if wrong else "right"
            cells.append([name, dtype, str(len(done)), f"{worst['error']:.1e}", f"{worst['allowed']:.1e}", verdict])
    note = " ".join(f"{name} did not run: {why}." for name, why in missing.items())
    columns = ["implementation", "dtype", "cases", "error", "allowed", "verdict"]
    return "Against the readable form in float64", columns, cells, note
