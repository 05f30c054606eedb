"""The compiled loops in a process of their own: when they are loaded, and what they leave as it was."""

import os
import subprocess
import sys

import pytest

pytest.importorskip("numba")


def printed(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout.strip()


def test_the_loops_are_loaded_for_what_is_large():
    code = """
import sys, torch
from attnres import depth_attention
seen = []
for tokens, width in ((9, 99), (999, 33), (1, 512)):
    depth_attention(torch.ones(width), [torch.ones(tokens, width)] * 2)
    seen.append(sys.modules.pop("attnres.cpu_loops_attnres", None) is not None)
    sys.modules["attnres.cpu_kernels_attnres"].loops.cache_clear()
print(seen)
"""
    assert printed(code) == "[False, True, True]"


@pytest.mark.parametrize("threads", [1, os.cpu_count() + 1])
def test_pytorch_keeps_the_threads_that_it_was_given(threads):
    # One thread of two processes each, on as many cores: with a second one, which waits for the other process to let
    # it run, each operation took twenty times as long.
    code = f"""
import torch
from attnres import depth_attention
torch.set_num_threads({threads})
depth_attention(torch.ones(512), [torch.ones(999, 512)] * 2)
print(torch.get_num_threads())
"""
    assert printed(code) == str(threads)
