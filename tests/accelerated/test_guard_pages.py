"""The loops touch no byte beyond the tensors that they were given: every one of them lies between forbidden pages."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("numba")
if sys.platform == "win32":
    pytest.skip("memory is protected by another call there", allow_module_level=True)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_nothing_is_read_or_written_beyond_its_ends(dtype):
    session = Path(__file__).with_name("guard_pages_session.py")
    done = subprocess.run([sys.executable, session, dtype, "beyond"], capture_output=True, text=True, timeout=600)
    assert done.stdout.split() and int(done.stdout.split()[0]) > 200, done.stderr[-2000:]
    assert done.returncode in (-signal.SIGSEGV, -signal.SIGBUS), "the guards let a write pass"
