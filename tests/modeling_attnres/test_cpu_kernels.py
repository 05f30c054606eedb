"""The compiled loops in a process of their own: when they are loaded, and what they leave as it was."""

import os
import subprocess
import sys

import pytest

pytest.importorskip("numba")


def printed(code: str, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=300, env=os.environ | environment
    )
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


def test_a_small_model_does_without_them():
    code = """
import sys, torch
from attnres import AttnResForCausalLM
from attnres.configuration import load
model = AttnResForCausalLM(load("attnres-tiny")).eval()
seen = []
with torch.no_grad():
    for tokens in (2, 999):
        model(torch.ones(1, tokens, dtype=torch.long))
        seen.append("attnres.cpu_loops_attnres" in sys.modules)
print(seen)
"""
    assert printed(code) == "[False, True]"


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


@pytest.mark.slow
def test_compiled_or_loaded_on_one_thread_or_two_the_bits_are_the_same(tmp_path):
    # A run that is killed and resumed compiles the first time and loads the second.
    code = """
import torch
from attnres.functional_attnres import attend
from transformers.models.llama.modeling_llama import LlamaRMSNorm
torch.manual_seed(0)
for dtype in (torch.float32, torch.bfloat16):
    leaves = [torch.randn(201, 331, dtype=dtype, requires_grad=True) for _ in range(4)]
    query, norm = torch.randn(331, requires_grad=True), LlamaRMSNorm(331).to(dtype)
    result, weights, _ = attend(query, leaves, None, 1e-6, True)
    normed, _, _ = attend(query, leaves, None, 1e-6, True, norm)
    loss = (result * normed).double().sum() + weights.double().square().sum()
    gradients = torch.autograd.grad(loss, [query, norm.weight, *leaves])
    print(*[tensor.view(torch.int32 if tensor.dtype == torch.float32 else torch.int16).long().sum().item()
            for tensor in (result, weights, normed, *gradients)])
"""
    compiled, loaded, on_two = (
        printed(f"import torch; torch.set_num_threads({threads}){code}", NUMBA_CACHE_DIR=str(tmp_path))
        for threads in (1, 1, 2)
    )
    assert list(tmp_path.iterdir())
    assert compiled == loaded == on_two
