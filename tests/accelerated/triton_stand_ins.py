"""Stand-ins for the Triton kernels, in PyTorch's operations: they take the kernels' arguments, and count launches.

The fixture `kernels` lets the direct path of a read take tensors of any machine, by the kernels or these.
"""

import ast
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from attnres.accelerated.triton import direct, host, implementation, launch

from .triton_cases import DEVICE, RUNS

KERNELS = ast.parse((Path(launch.__file__).with_name("kernels.py")).read_text())
ARGUMENTS = {node.name: [a.arg for a in node.args.args] for node in KERNELS.body if isinstance(node, ast.FunctionDef)}


class Kernel:
    """A kernel in PyTorch's operations. It counts the launches that Triton would bind, and those of compiled code."""

    def __init__(self, name: str, operations: Callable[..., None]):
        self.arg_names, self._operations, self.launches = ARGUMENTS[name], operations, Counter()

    def compute(self, arguments: SimpleNamespace) -> None:
        self._operations(arguments)

    def __getitem__(self, grid: tuple[int, int, int]) -> Callable:
        def bound(*arguments, num_warps: int, **constants: int) -> "Compiled":
            self.launch("bound", dict(zip(self.arg_names, arguments)) | constants)
            return Compiled(self)

        return bound

    def launch(self, kind: str, arguments: dict) -> None:
        assert arguments.keys() == {*self.arg_names}
        self.launches[kind] += 1
        self.compute(SimpleNamespace(**arguments))


class Compiled:
    """A kernel that takes all arguments, constants too, in the order of its parameters."""

    def __init__(self, kernel: Kernel):
        self._kernel = kernel

    def __getitem__(self, grid: tuple[int, int, int]) -> Callable:
        names = self._kernel.arg_names
        return lambda *values: self._kernel.launch("compiled", dict(zip(names, values, strict=True)))


def padded(tensors: tuple[Tensor, ...], k: SimpleNamespace) -> Tensor:
    assert len(tensors) == k.N
    return torch.stack(tensors[: k.count]).float()


def folded(k: SimpleNamespace) -> Tensor:
    query = k.query.view(-1).float()
    return query * k.key_norm.float() if k.HAS_KEY_NORM else query  # the general path has multiplied them


def forward(k: SimpleNamespace) -> None:
    values = padded(k.sources, k)
    inverse_rms = (values.square().mean(-1) + k.eps).rsqrt()
    logits = (values * folded(k)).sum(-1) * inverse_rms
    weights = logits.softmax(0)
    k.statistics.copy_(torch.stack([weights, logits, inverse_rms]))
    result = (weights.unsqueeze(-1) * values).sum(0) * k.factor
    if k.HAS_NORM:
        k.hidden.copy_(result)
        result = normed(k.hidden.float(), k.norm_weight.float(), k)
    k.result.copy_(result)


def normed(x: Tensor, weight: Tensor, k: SimpleNamespace) -> Tensor:
    return weight * (x * (x.square().mean(-1, keepdim=True) + k.norm_eps).rsqrt())


def backward(k: SimpleNamespace) -> None:
    values, grad = padded(k.sources, k), k.grad.float()
    weights, logits, inverse_rms = k.statistics
    k.partial.zero_()
    last = k.partial[-1:]
    if k.HAS_NORM:
        with torch.enable_grad():
            leaves = [tensor.detach().float().requires_grad_() for tensor in (k.hidden, k.norm_weight)]
            grad, last[0, 1] = torch.autograd.grad(normed(*leaves, k), leaves, grad)
        last = last[:, 0]
    similarity = (grad * values).sum(-1) * k.factor
    if k.HAS_GRAD_WEIGHTS:
        similarity += k.grad_weights
    k.contracted.copy_(similarity)
    along_query = weights * (similarity - (weights * similarity).sum(0)) * inverse_rms
    last[0] = (along_query.unsqueeze(-1) * values).flatten(0, -2).sum(0)
    if not k.NEEDS_SOURCES:
        return
    along_source = -along_query * logits * inverse_rms / k.WIDTH
    grads = (weights * k.factor).unsqueeze(-1) * grad + along_query.unsqueeze(-1) * folded(k)
    grads += along_source.unsqueeze(-1) * values
    if k.HAS_LATER:
        grads += padded(k.later_grads, k)
    for target, value in zip(k.grad_sources, grads):
        target.copy_(value)


def finish(k: SimpleNamespace) -> None:
    totals = k.partial.view(k.parts, -1, k.WIDTH).sum(0)
    k.grad_query.copy_((totals[0] * k.key_norm).view_as(k.grad_query))
    k.grad_key_norm.copy_(totals[0] * k.query.view(-1))
    if k.HAS_NORM:
        k.grad_norm.copy_(totals[1])


@pytest.fixture
def kernels(monkeypatch) -> SimpleNamespace:
    """Let the direct path take the tensors of this machine, by the kernels or their stand-ins."""
    if host.load() is None:
        assert shutil.which("c++") is None, "host.cpp does not compile"
        pytest.skip("needs a C++ compiler")
    forget_plans()
    computed = {"forward_kernel": forward, "backward_kernel": backward, "finish_kernel": finish}
    stand_ins = SimpleNamespace(**{name: Kernel(name, compute) for name, compute in computed.items()})
    if DEVICE == "cpu":
        monkeypatch.setattr(torch.Tensor, "is_cuda", True)
        monkeypatch.setattr(implementation, "why_not_on", lambda device, width: None)
        monkeypatch.setattr(direct, "is_right_on", lambda device: True)  # its launches would be counted
    if not RUNS:
        monkeypatch.setattr(launch, "kernels", lambda: stand_ins)
    yield stand_ins
    forget_plans()


def forget_plans() -> None:
    direct._plans.clear()
    direct._recent.clear()
