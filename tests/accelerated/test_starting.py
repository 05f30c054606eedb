"""If the loops cannot start, PyTorch computes. Threads, forks and the cache of machine code stay sound."""

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import attnres.accelerated

numba = pytest.importorskip("numba")
from attnres.accelerated.numba import cache, loops  # noqa: E402

ASK = """
import warnings, torch
from attnres.accelerated.numba import IMPLEMENTATION
sources = [torch.ones(999, 512)] * 2
with warnings.catch_warnings(record=True) as seen:
    warnings.simplefilter("always")
    reasons = [IMPLEMENTATION.supports(torch.ones(512), sources) for _ in range(3)]
assert len(set(reasons)) == 1
print(reasons[0], "|", sum("are computed without it" in str(w.message) for w in seen))
"""


def printed_anew(code: str, **environment: str) -> str:
    """Return what a fresh process prints. PyTorch reads OMP_NUM_THREADS on import, which a fork has done already."""
    command, environment = [sys.executable, "-P", "-c", code], os.environ | environment
    done = subprocess.run(command, capture_output=True, text=True, timeout=500, env=environment)
    assert done.returncode == 0, (done.returncode, done.stderr[-3000:])
    return done.stdout.strip()


@pytest.mark.slow
def test_importing_loads_no_compiler():
    code = """
import sys, transformers.modeling_utils
before = set(sys.modules)  # a PyTorch with CUDA imports its Triton
import attnres.accelerated
loaded = sys.modules.keys() - before
print(*attnres.accelerated.IMPLEMENTATIONS, sorted({"numba", "llvmlite", "triton", "fla"} & loaded))
"""
    output = printed_anew(code)
    assert output.split()[0] == "numba" and output.endswith(" []")


@pytest.mark.slow
def test_numba_is_not_used_if_its_compiler_is_disabled(printed):
    assert printed(ASK, NUMBA_DISABLE_JIT="1").endswith("NUMBA_DISABLE_JIT is set) | 1")


@pytest.mark.slow
@pytest.mark.parametrize("error", ["ImportError", "RuntimeError", "OSError", "AttributeError"])
def test_a_numba_that_fails_to_load_is_not_used(printed, tmp_path, error):
    (tmp_path / "numba").mkdir()
    (tmp_path / "numba" / "__init__.py").write_text(f"raise {error}('of another build')")
    answer = printed(ASK, PYTHONPATH=str(tmp_path))
    assert answer == f"numba does not start ({error}: of another build) | 1"


@pytest.mark.slow
def test_a_missing_numba_does_not_warn(printed):
    hide = "import sys; sys.modules['numba'] = None\nimport importlib.util as util; find = util.find_spec\n"
    hide += "util.find_spec = lambda name, *args: None if name == 'numba' else find(name, *args)\n"
    assert printed(hide + ASK) == "numba is not installed | 0"


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "geteuid"), reason="folders are protected by permissions")
def test_the_loops_are_compiled_each_time_if_no_folder_is_writable(printed, tmp_path):
    # A superuser can write to every folder, so files take the places of folders.
    for name in ("cache", "home"):
        (tmp_path / name).write_text("")
    copy_of_package(tmp_path)
    (tmp_path / "accelerated" / "numba" / "__pycache__").write_text("")
    code = ASK.replace("attnres.accelerated", "accelerated")
    environment = {"XDG_CACHE_HOME": str(tmp_path / "cache"), "HOME": str(tmp_path / "home")}
    assert printed(code, **environment, PYTHONPATH=str(tmp_path), PYTHONDONTWRITEBYTECODE="1") == "None | 0"


def copy_of_package(folder: Path) -> Path:
    """Copy the package to `folder`, from which it imports as `accelerated`."""
    source = Path(attnres.accelerated.__file__).parent
    return shutil.copytree(source, folder / "accelerated", ignore=shutil.ignore_patterns("__pycache__"))


@pytest.fixture
def small_loop(monkeypatch, tmp_path) -> Callable[[], numba.core.registry.CPUDispatcher]:
    """`small_loop()` returns a function that compiles quickly and uses the cache of the loops."""
    monkeypatch.setattr(cache, "folder", lambda: tmp_path)

    def add_one(number):
        return number + 1

    def build() -> numba.core.registry.CPUDispatcher:
        dispatcher = numba.njit(add_one)
        dispatcher._cache = cache.MachineCode("add_one")
        return dispatcher

    return build


def test_every_loop_uses_the_cache():
    assert all(isinstance(loop._cache, cache.MachineCode) for loop in loops.DISPATCHERS)


@pytest.mark.parametrize(
    "damage",
    [
        lambda whole: whole[: len(whole) // 2],
        lambda whole: b"",
        lambda whole: whole[:-9] + b"\x00" * 9,
        lambda whole: whole.replace(b"add_one", b"add_two"),
    ],
    ids=["half", "nothing", "end", "middle"],
)
def test_a_damaged_or_shortened_file_of_machine_code_is_written_anew(small_loop, tmp_path, damage):
    assert small_loop()(2) == 3
    (file,) = tmp_path.iterdir()
    whole = file.read_bytes()
    read = small_loop()
    assert read(2) == 3 and sum(read.stats.cache_hits.values()) == 1
    file.write_bytes(damage(whole))
    compiled = small_loop()
    assert compiled(2) == 3 and not compiled.stats.cache_hits
    assert len(file.read_bytes()) > 0.9 * len(whole)
    assert sum((again := small_loop()).stats.cache_hits.values()) == 0 and again(2) == 3 and again.stats.cache_hits


SUM = """
import torch
from accelerated.numba import IMPLEMENTATION
query, sources = torch.zeros(512), [torch.full((4, 512), 2.0)] * 2
print(IMPLEMENTATION.run(query, sources, 1e-6, True)[0].mean().item())  # without `supports`, which checks results
"""


@pytest.mark.slow
def test_a_change_of_any_kernel_file_is_compiled(printed, tmp_path):
    folder = copy_of_package(tmp_path) / "numba"
    environment = {"PYTHONPATH": str(tmp_path), "NUMBA_CACHE_DIR": str(tmp_path / "cache")}
    # The base must not be zeros, or a change of its factor would not show.
    zeros, ones = "np.zeros(width, np.float32), np.float32(", "np.ones(width, np.float32), np.float32("
    replace(folder / "loops.py", f"{zeros}0)", f"{ones}0)")
    assert printed(SUM, **environment) == "4.0"
    loads = "first = splat(builder, values[2], lanes)", "first = _constant(_FLOAT, 7.0, lanes)"
    replace(folder / "rows.py", *loads)
    assert printed(SUM, **environment) == "11.0"


def replace(file: Path, old: str, new: str) -> None:
    text = file.read_text()
    assert text.count(old) == 1, (file, text.count(old))
    file.write_text(text.replace(old, new))


BITS = """
import torch
from attnres.accelerated.numba import IMPLEMENTATION, call, kernels
torch.manual_seed(0)
leaves = [torch.randn(201, 331, requires_grad=True) for _ in range(4)]
query = torch.randn(331, requires_grad=True)
result, weights, _ = IMPLEMENTATION.run(query, leaves, 1e-6, True)
gradients = torch.autograd.grad(result.double().sum() + weights.double().square().sum(), [query, *leaves])
phases = kernels.phase_one(torch.randn(5, 331), 1e-6, call.checked(leaves))
print(*[tensor.view(torch.int32).long().sum().item() for tensor in (result, weights, *phases, *gradients)])
"""


@pytest.mark.slow
def test_compiled_or_loaded_on_one_thread_or_two_the_bits_are_the_same(printed, tmp_path):
    # A run that is killed and resumed compiles the first time and loads the second.
    compiled, loaded, on_two = (
        printed(f"import torch; torch.set_num_threads({threads}){BITS}", NUMBA_CACHE_DIR=str(tmp_path))
        for threads in (1, 1, 2)
    )
    assert list(tmp_path.iterdir())
    assert compiled == loaded == on_two


@pytest.mark.slow
@pytest.mark.parametrize("threads", [1, os.cpu_count() + 1])
def test_pytorch_and_numba_keep_their_numbers_of_threads(printed, threads):
    # Two processes with one thread each may share two cores. If numba gave PyTorch a second thread, each operation
    # would wait for the other process, and take twenty times as long.
    code = f"""
import threading, torch, numba
from attnres.accelerated.numba import IMPLEMENTATION
torch.set_num_threads({threads})
def call():
    IMPLEMENTATION.run(torch.ones(512), [torch.ones(999, 512)] * 2, 1e-6, True)
    seen.append(torch.get_num_threads())
seen = []
call()
other = threading.Thread(target=call)
other.start(), other.join()
call()
print(*{{seen[0], seen[2], torch.get_num_threads()}}, numba.get_num_threads() == numba.config.NUMBA_NUM_THREADS)
"""
    assert printed(code) == f"{threads} True"


CROWD = """
import threading, torch
from attnres.accelerated.numba import IMPLEMENTATION
torch.set_num_threads(2)
query, sources = torch.ones(512), [torch.ones(999, 512)] * 2
def work():
    for _ in range(200):
        result, _, _ = IMPLEMENTATION.run(query, sources, 1e-6, True)
        wrong.extend([1] if not (result == 2).all() else [])
wrong = []
crowd = [threading.Thread(target=work) for _ in range(4)]
[thread.start() for thread in crowd]
[thread.join() for thread in crowd]
import numba
print(numba.threading_layer(), len(wrong))
"""


@pytest.mark.slow
def test_several_threads_may_call_at_once():
    """The layer `workqueue` is the only one of numba that is not safe for several threads by itself."""
    answer = printed_anew(CROWD, NUMBA_THREADING_LAYER="workqueue", NUMBA_NUM_THREADS="2", OMP_NUM_THREADS="2")
    assert answer == "workqueue 0"


@pytest.mark.slow
def test_one_thread_computes_if_the_threads_do_not_start():
    code = CROWD.replace("numba.threading_layer()", "'none'")
    threads = {"NUMBA_THREADING_LAYER": "unheard-of", "NUMBA_NUM_THREADS": "2", "OMP_NUM_THREADS": "2"}
    command = [sys.executable, "-P", "-c", code]  # a fresh process, as in `printed_anew`
    done = subprocess.run(command, capture_output=True, text=True, timeout=500, env=os.environ | threads)
    assert done.stdout.strip() == "none 0", done.stderr[-2000:]
    assert done.stderr.count("numba's threads do not start (ValueError") == 1


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork")
@pytest.mark.parametrize("layer", ["workqueue", "default"])
def test_a_process_forked_after_use_computes_the_same(printed, layer):
    code = """
import os, signal, torch
from attnres.accelerated.numba import IMPLEMENTATION
torch.set_num_threads(2)
query, sources = torch.randn(512), [torch.randn(999, 512) for _ in range(2)]
def numbers():
    return IMPLEMENTATION.run(query, sources, 1e-6, True)[0].numpy().tobytes()
expected = numbers()
child = os.fork()
if child == 0:
    signal.alarm(60)
    os._exit(0 if numbers() == expected else 3)
print(os.waitpid(child, 0)[1], numbers() == expected)
"""
    assert printed(code, NUMBA_THREADING_LAYER=layer, NUMBA_NUM_THREADS="2") == "0 True"
