"""Every tensor is checked before a kernel gets its address, and no kernel touches memory beside its tensors."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

from attnres.accelerated.triton import launch, phase_one, read_fused

from .triton_cases import DEVICE, EPS, HAS_TRITON, INTERPRETED, begin, make, with_kernels

SESSION = Path(__file__).with_name("triton_guard_pages_session.py")


class Wrapped(Tensor):
    """A subclass, whose memory may be elsewhere."""


def change(tensors: list[Tensor], how: str) -> list[Tensor]:
    """Return the tensors with the last one changed so that it does not fit the others."""
    *others, last = tensors
    changed = {
        "longer": lambda: last.repeat(*[2] * last.ndim),
        "shorter": lambda: last[..., :-1].contiguous(),
        "of another dtype": lambda: last.to(torch.float16 if last.dtype is torch.float32 else torch.float32),
        "on another device": lambda: last.to("meta"),
        "not contiguous": lambda: torch.stack([last, last], -1)[..., 0],
        "a subclass": lambda: last.as_subclass(Wrapped),
    }[how]()
    return [*others, changed]


CHANGES = ["longer", "shorter", "of another dtype", "on another device", "not contiguous", "a subclass"]


@pytest.mark.parametrize("how", CHANGES)
@pytest.mark.parametrize("what", ["sources", "query", "grad", "grad_weights", "later_grads", "saved"])
@torch.no_grad()
def test_training_refuses_a_tensor_that_does_not_fit_before_it_launches(what, how, monkeypatch):
    monkeypatch.setattr(launch, "kernels", lambda: None)  # a launch would raise another error
    query, sources = make(3, (5,), 8, torch.bfloat16)
    statistics = torch.ones(3, 3, 5, device=DEVICE)
    given = {
        "sources": sources,
        "query": [query],
        "grad": [sources[0]],
        "grad_weights": [statistics[0]],
        "later_grads": sources,
        "saved": [statistics],
    }
    given[what] = change(given[what], how)
    with pytest.raises(ValueError, match="A kernel takes"):
        if what in ("sources", "query"):
            launch.forward(*given["query"], given["sources"], EPS, False)
        else:
            launch.backward(
                *given["grad"], *given["grad_weights"], given["later_grads"], *given["query"], given["sources"],
                *given["saved"], False, True,
            )  # fmt: skip


@pytest.mark.parametrize("what", ["sources", "query", "u", "m", "norm"])
@pytest.mark.parametrize("how", [change for change in CHANGES if change != "not contiguous"])
@torch.no_grad()
def test_a_read_refuses_a_tensor_that_does_not_fit(what, how, monkeypatch):
    monkeypatch.setattr(launch, "kernels", lambda: None)
    query, sources = make(2, (5,), 8, torch.bfloat16)
    phase = torch.ones(5, 8, device=DEVICE), torch.ones(5, device=DEVICE), torch.ones(5, device=DEVICE)
    norm = query.to(torch.bfloat16)
    given = {"sources": sources, "query": [query], "u": [phase[0]], "m": [phase[1]], "norm": [norm]}
    given[what] = change(given[what], how)
    if what == "sources" and how == "of another dtype":
        return  # sources of several dtypes are cast
    with pytest.raises(ValueError, match="A kernel takes"):
        read_fused(
            *given["query"], EPS, 1, given["sources"], (*given["u"], *given["m"], phase[2]), torch.bfloat16,
            *given["norm"], EPS,
        )  # fmt: skip


@pytest.mark.parametrize("width", [0, launch.MAX_WIDTH + 1])
def test_rows_that_no_kernel_takes_are_refused(width):
    source = torch.ones(2, width, device=DEVICE)
    with pytest.raises(ValueError, match="rows of 1 to"):
        launch.forward(source[0], [source], EPS, False)
    with pytest.raises(ValueError, match="float64"):
        launch.forward(torch.ones(4, device=DEVICE), [torch.ones(2, 4, dtype=torch.float64, device=DEVICE)], EPS, False)
    with pytest.raises(ValueError, match="A kernel takes"):
        phase_one(torch.ones(2, 5, device=DEVICE), EPS, torch.ones(2, 4, device=DEVICE))


@with_kernels
@torch.no_grad()
def test_the_default_dtype_and_device_do_not_change_a_read():
    query, sources = make(3, (2,), 8)
    expected = read_fused(query, EPS, 1, sources[1:], begin(query, sources[:1]))
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with torch.device("meta"):
            actual = read_fused(query, EPS, 1, sources[1:], begin(query, sources[:1]))
    finally:
        torch.set_default_dtype(before)
    assert torch.equal(actual, expected)


def guarded(*arguments: str) -> subprocess.CompletedProcess:
    environment = os.environ | {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.run(
        [sys.executable, str(SESSION), *arguments], env=environment, capture_output=True, text=True, timeout=600
    )


@pytest.mark.skipif(not (HAS_TRITON and INTERPRETED), reason="needs Triton's interpreter, which uses real addresses")
@pytest.mark.slow
@pytest.mark.parametrize("side", ["end", "begin"])
def test_no_memory_beside_the_tensors_is_touched(side):
    done = guarded(side, "1", "7", "64", "65")
    assert (done.returncode, done.stdout) == (0, "unharmed\n"), done.stderr[-2000:]


@pytest.mark.skipif(not (HAS_TRITON and INTERPRETED), reason="needs Triton's interpreter, which uses real addresses")
@pytest.mark.slow
def test_a_read_beside_a_tensor_would_be_noticed():
    assert guarded("beyond").returncode < 0
