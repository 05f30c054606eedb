"""The loops touch no byte beyond their tensors, each of which lies between pages without access."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("numba")
if sys.platform == "win32":
    pytest.skip("Windows protects memory by another call", allow_module_level=True)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_loops_touch_no_byte_beyond_a_tensor(dtype):
    session = Path(__file__).with_name("numba_guard_pages_session.py")
    done = subprocess.run([sys.executable, session, dtype, "beyond"], capture_output=True, text=True, timeout=600)
    assert done.stdout.split() and int(done.stdout.split()[0]) > 200, done.stderr[-2000:]
    assert done.returncode in (-signal.SIGSEGV, -signal.SIGBUS), "the guards let a write pass"
