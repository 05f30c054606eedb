"""The benchmark of the host's time names each library that is absent, and counts no launch."""

import sys
from importlib.util import find_spec

import pytest
import torch

from benchmarks import host
from benchmarks.timing import Setting

needs_triton = pytest.mark.skipif(find_spec("triton") is None, reason="needs Triton")


@pytest.mark.slow
@needs_triton
def test_libraries_that_are_not_installed_are_named_with_the_command_that_installs_them(monkeypatch):
    for name in ("liger_kernel", "fla"):
        monkeypatch.setitem(sys.modules, name, None)
    row = next(host.measure(Setting(repeats=1, quick=True)))
    assert row["missing"].keys() == host.INSTALL.keys()
    text = host.tables([row])["host"]
    for name, command in host.INSTALL.items():
        assert f"{name} did not run: " in text and f"({command})." in text


@pytest.mark.slow
@needs_triton
def test_ours_is_measured_beside_the_floor_and_what_is_replaced_comes_back():
    rows = list(host.measure(Setting(repeats=2, quick=True)))
    assert [row["pass"] for row in rows] == [*host.PASSES] * 2
    for row in rows[:3]:
        assert {"ours / floor", "ours in a model / floor"} <= row["ratios"].keys()
        assert row["ratios"]["ours / floor"]["median"] > 1
    assert rows[3]["ratios"]["apart / together"]["median"] > 1
    assert [table.count("\n|") - 2 for table in host.tables(rows).values()] == [4, 2, 2]
    assert not torch.ones(1).is_cuda


def test_the_floor_returns_a_gradient_for_each_tensor():
    for way in host.ways({host.FLOOR: host.floor}, 3, torch.bfloat16, "forward+backward").values():
        way()
    inputs = host.Inputs(3, 8, 2, torch.float32, "cpu")
    leaves = [inputs.query, inputs.key_norm_weight, *inputs.sources]
    grads = torch.autograd.grad(inputs.call(host.floor), leaves, inputs.grad)
    assert [grad.shape for grad in grads] == [leaf.shape for leaf in leaves]
