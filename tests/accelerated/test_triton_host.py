"""The host's part of a read, in C++: how it is compiled, and what its node of autograd does with errors and memory."""

import functools
import gc
import os
import shutil
import weakref
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from attnres.accelerated.triton import direct, host

from .triton_cases import EPS, RUNS, make
from .triton_stand_ins import forget_plans

LOAD = host.load.__wrapped__  # without its cache
IS_RIGHT_ON = direct.is_right_on.__wrapped__


pytestmark = pytest.mark.usefixtures("kernels")


@pytest.fixture
def cache(kernels, tmp_path, monkeypatch) -> Path:
    """Let compiled code go to an empty folder, and return it."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path


def write_compiler(folder: Path, text: str) -> str:
    path = folder / "compiler"
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return str(path)


@pytest.mark.parametrize(
    "compiler, reason",
    [
        (None, r"\[Errno 2\] No such file or directory: 'nosuch'"),
        (
            "echo host.cpp: note: x >&2; echo 'host.cpp:1: error: no <version>' >&2; exit 1",
            "host.cpp:1: error: no <vers",
        ),
        ('for result; do true; done; echo half > "$result"; kill -9 $$', "died with <Signals.SIGKILL: 9>"),
        ('for result; do true; done; echo no library > "$result"', "invalid ELF header|file too short"),
    ],
)
def test_without_a_compiler_that_works_a_warning_says_why(cache, monkeypatch, tmp_path, compiler, reason):
    monkeypatch.setenv("CXX", "nosuch" if compiler is None else write_compiler(tmp_path, compiler))
    with pytest.warns(UserWarning, match=rf"host.cpp does not compile: .*({reason}).*apt-get install"):
        assert LOAD() is None
    assert not [*cache.rglob("tmp*")]  # nothing half done is left


def test_a_damaged_file_is_compiled_again_and_a_good_one_loaded(cache, monkeypatch):
    compiled = []

    def copy(file: Path) -> None:
        compiled.append(file.read_bytes())
        os.replace(shutil.copy(host.load().__file__, file.with_suffix(".copy")), file)

    monkeypatch.setattr(host, "_compile", lambda file: file.write_bytes(b"damaged"))
    with pytest.warns(UserWarning, match="does not compile"):
        assert LOAD() is None
    monkeypatch.setattr(host, "_compile", copy)
    assert LOAD().ReadPlan
    assert LOAD().ReadPlan
    assert compiled == [b"damaged"]


def read(n: int = 3) -> tuple[Tensor, list[Tensor]]:
    """Return the result of a read, and the tensors that need gradients: the query, the norm's weight, the sources."""
    query, sources = make(n, (2, 4), 16)
    weight = torch.ones_like(query).requires_grad_()
    return direct.attend(query, sources, weight, EPS, True, True)[0], [query, weight, *sources]


class Broken(Exception):
    """An error of this test alone."""


@pytest.mark.skipif(RUNS, reason="stand-ins raise here")
def test_an_error_in_a_backward_pass_reaches_the_caller_as_it_is(kernels, monkeypatch):
    def fail(kernel: object, arguments: object) -> None:
        raise Broken("no memory left")

    result, leaves = read()
    monkeypatch.setattr(type(kernels.backward_kernel), "compute", fail)
    with pytest.raises(Broken, match="no memory left"):
        torch.autograd.grad(result.sum(), leaves)
    with pytest.raises(Broken, match="no memory left"):
        read()


def test_a_graph_outlives_the_plans_of_its_reads():
    result, leaves = read()
    forget_plans()
    gc.collect()
    grads = torch.autograd.grad(result.sum(), leaves)
    assert all(grad.isfinite().all() for grad in grads)


def test_a_graph_that_is_gone_keeps_no_tensor():
    result, leaves = read()
    sources = [weakref.ref(source) for source in leaves[2:]]
    torch.autograd.grad(result.sum(), leaves, retain_graph=True)
    del leaves
    assert all(source() is not None for source in sources)
    del result
    gc.collect()
    assert all(source() is None for source in sources)


def test_the_trial_of_the_path_is_not_seen_by_a_checkpoint(monkeypatch):
    monkeypatch.setattr(direct, "is_right_on", functools.cache(IS_RIGHT_ON))
    query, sources = make(3, (2, 4), 16)
    weight = torch.ones_like(query).requires_grad_()

    def attend(*sources: Tensor) -> Tensor:
        return direct.attend(query, sources, weight, EPS, True, True)[0]

    # Only the forward pass makes the trial. Tensors that it saved would be missed when the pass is repeated.
    result = checkpoint(attend, *sources, use_reentrant=False)
    actual = torch.autograd.grad(result.sum(), [query, *sources])
    torch.testing.assert_close(actual, torch.autograd.grad(attend(*sources).sum(), [query, *sources]))


def test_a_tensor_that_was_changed_after_the_read_is_an_error():
    result, leaves = read()
    with torch.no_grad():
        leaves[2].add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(result.sum(), leaves)
