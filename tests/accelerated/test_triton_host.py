"""The host's part of a read, in C++: how it is compiled, and what its node of autograd does with errors and memory."""

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

IS_RIGHT_ON = direct.is_right_on  # which the fixture replaces


pytestmark = pytest.mark.usefixtures("kernels")


@pytest.fixture
def compiled(kernels, tmp_path, monkeypatch) -> Path:
    """Let compiled code go to an empty folder, as in a new process; return the file compiled before."""
    file = Path(host.load().__file__)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(host, "__file__", str(tmp_path / "package" / "host.py"))
    monkeypatch.setattr(host, "_loaded", [])
    return file


def write_compiler(folder: Path, text: str) -> str:
    path = folder / "compiler"
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return str(path)


@pytest.mark.parametrize(
    "compiler, reason",
    [
        (None, r"\[Errno 2\] No such file or directory: 'no such'"),
        ("echo host.cpp: note: x >&2; echo host.cpp:1: error: no version >&2; exit 1", "host.cpp:1: error: no version"),
        ('for result; do true; done; echo half > "$result"; kill -9 $$', "died with <Signals.SIGKILL: 9>"),
        ('for result; do true; done; echo no library > "$result"', "invalid ELF header|file too short"),
    ],
)
def test_without_a_compiler_that_works_a_warning_says_why(compiled, monkeypatch, tmp_path, compiler, reason):
    monkeypatch.setenv("CXX", "'no such'" if compiler is None else write_compiler(tmp_path, compiler))
    with pytest.warns(UserWarning, match=rf"host.cpp could not be compiled: .*({reason}).*apt-get install"):
        assert host.load() is None
    assert host.load() is None  # without another attempt
    assert not [*tmp_path.rglob("tmp*")]  # nothing half done is left


def test_a_file_is_compiled_once_and_again_if_it_is_damaged(compiled, monkeypatch, tmp_path):
    command = f"for result; do true; done; echo x >> {tmp_path}/runs; printf '\\377' >&2; cp {compiled} \"$result\""
    monkeypatch.setenv("CXX", write_compiler(tmp_path, command))
    for _ in range(2):
        assert host.load().ReadPlan
        monkeypatch.setattr(host, "_loaded", [])
    assert (tmp_path / "runs").read_text() == "x\n"

    (file,) = tmp_path.rglob("attnres_host.so")
    (tmp_path / "damaged").write_bytes(compiled.read_bytes()[:-9])
    os.replace(tmp_path / "damaged", file)  # another file, since the first one is in use
    (file.parent / "tmp_of_a_killed_process").mkdir()
    assert host.load().ReadPlan
    assert (tmp_path / "runs").read_text() == "x\nx\n"
    assert file.read_bytes() == compiled.read_bytes()
    assert not [*file.parent.glob("tmp*")]


def test_a_compiled_file_is_loaded_from_a_folder_that_cannot_be_written_to(compiled, monkeypatch, tmp_path):
    beside = tmp_path / "package" / "__pycache__" / compiled.parent.name
    shutil.copytree(compiled.parent, beside)
    monkeypatch.setattr(host, "writable_folder", lambda *_: pytest.fail("asked for a folder to write to"))
    assert Path(host.load().__spec__.origin).parent == beside


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
    monkeypatch.setattr(direct, "is_right_on", IS_RIGHT_ON)
    monkeypatch.setattr(direct, "_right_on", {})
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


class InBackward(torch.autograd.Function):
    """Read in the backward pass, before any other read."""

    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx, grad: Tensor) -> Tensor:
        query, sources = make(3, (2, 4), 16)
        assert direct.attend(query, sources, torch.ones_like(query), EPS, True, True) is None
        return grad


def test_the_trial_does_not_run_in_a_backward_pass(monkeypatch):
    monkeypatch.setattr(direct, "is_right_on", IS_RIGHT_ON)
    monkeypatch.setattr(direct, "_right_on", {})
    InBackward.apply(torch.ones(1, requires_grad=True)).backward()
    assert not direct._right_on
    assert read()[0].grad_fn is not None


def test_one_stacked_tensor_may_hold_the_sources():
    query, sources = make(3, (2, 4), 16)
    weight = torch.ones_like(query)
    expected = direct.attend(query, sources, weight, EPS, True, True)[0]
    assert torch.equal(direct.attend(query, torch.stack(sources), weight, EPS, True, True)[0], expected)


def test_a_number_of_sources_that_changes_while_they_are_read_is_refused():
    class Lying(list):
        def __len__(self) -> int:
            return 3

    query, sources = make(3, (2, 4), 16)
    read()
    assert direct.attend(query, Lying(sources[:2]), torch.ones_like(query), EPS, True, True) is None


@pytest.mark.parametrize("change", [lambda x: x.double(), lambda x: x.transpose(-1, -2).contiguous().transpose(-1, -2)])
def test_saved_tensors_that_a_hook_changed_give_the_same_gradients_or_an_error(change):
    query, sources = make(3, (2, 4), 16)
    weight = torch.ones_like(query).requires_grad_()
    leaves = [query, weight, *sources]
    expected = torch.autograd.grad(direct.attend(query, sources, weight, EPS, True, True)[0].sum(), leaves)
    with torch.autograd.graph.saved_tensors_hooks(
        lambda x: x, lambda x: change(x) if x.shape[-1:] == (16,) and x.ndim > 1 else x
    ):
        result = direct.attend(query, sources, weight, EPS, True, True)[0]
    try:
        actual = torch.autograd.grad(result.sum(), leaves)
    except ValueError as error:
        assert "A kernel takes" in str(error)
    else:
        torch.testing.assert_close(actual, expected)
