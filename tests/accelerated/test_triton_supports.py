"""Where the Triton kernels run, and the reasons where they do not."""

import pytest
import torch
from torch import Tensor

from attnres.accelerated.triton import IMPLEMENTATIONS, OF_AUTO, implementation, kernels_available, launch, tested

from .triton_cases import DEVICE, DTYPES, HAS_TRITON, INTERPRETED, make, on_gpu

TRITON = IMPLEMENTATIONS["triton"]


@pytest.fixture
def as_if_on_gpu(monkeypatch):
    """Leave out the checks of the device."""
    monkeypatch.setattr(implementation, "why_not_on", lambda device, width: None)


def test_without_a_gpu_the_reason_is_the_device():
    assert not kernels_available("cpu")
    assert kernels_available("cuda") == (HAS_TRITON and not INTERPRETED and torch.cuda.is_available())
    query, sources = torch.ones(8), [torch.ones(2, 8)]
    assert TRITON.supports(query, sources) == "the sources are on cpu, not on a GPU"
    assert IMPLEMENTATIONS["fla"].supports(query, sources) == "the sources are on cpu, not on a GPU"
    assert "meta" in TRITON.supports(query.to("meta"), [source.to("meta") for source in sources])


def test_without_triton_the_reason_is_its_absence(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(launch, "why_no_kernels", lambda: "Triton is not installed")
    assert implementation.why_not_on(torch.device("cuda", 99), 8) == "Triton is not installed"


def test_the_reason_for_wide_rows_names_the_limit():
    assert str(launch.MAX_WIDTH) in implementation.why_not_on(torch.device("cuda"), launch.MAX_WIDTH + 1)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_plain_tensors_of_each_dtype_are_taken(dtype, as_if_on_gpu):
    query, sources = make(3, (5,), 8, dtype)
    assert TRITON.supports(query, sources) is None
    assert TRITON.pays(query, sources)


class Wrapped(Tensor):
    """A subclass that a user defines."""


@pytest.mark.parametrize(
    "change, reason",
    [
        (lambda source: source.double(), "float64"),
        (lambda source: source.to("meta"), "meta"),
        (lambda source: source.as_subclass(Wrapped), "Wrapped"),
    ],
)
def test_the_reason_names_what_is_wrong_with_a_tensor(change, reason, as_if_on_gpu):
    query, sources = make(3, (5,), 8)
    assert reason in TRITON.supports(query, [*sources[:2], change(sources[2])])


def test_fake_tensors_are_refused(as_if_on_gpu):
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        assert TRITON.supports(torch.ones(8), [torch.ones(2, 8)]) is not None


def test_the_kernels_do_not_run_under_a_transform(as_if_on_gpu):
    query, sources = make(2, (5,), 8)
    reasons = []

    def attend(query: Tensor) -> Tensor:
        reasons.append(TRITON.supports(query, sources))
        return query.sum()

    torch.func.grad(attend)(query.detach())
    torch.func.vmap(attend)(query.detach()[None])
    assert len(reasons) == 2 and None not in reasons


@on_gpu
def test_the_kernels_are_available_on_a_gpu():
    assert kernels_available("cuda")
    assert not kernels_available("cuda", width=launch.MAX_WIDTH + 1)
    query, sources = make(3, (5,), 8)
    assert DEVICE == "cuda" and TRITON.supports(query, sources) is None
    assert TRITON.supports(query, [*sources, sources[0].cpu()]) is not None


def test_auto_takes_the_direct_path_only_where_its_tests_have_passed(monkeypatch, tmp_path):
    assert (OF_AUTO.direct is not None) is (OF_AUTO.training_plan is not None) is tested.have_passed()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(tested, "__file__", str(tmp_path / "tested.py"))
    assert not tested.have_passed()
    tested.record()
    assert tested.have_passed()
