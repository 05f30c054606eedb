"""How many of this project's files a training step passes through: a reader follows the calls through each of them."""

import sys
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from attnres.conversion import retrofit

ROOT = Path(__file__).parents[1]


def files_of_a_forward_pass(width: int, implementation: str) -> set[str]:
    """Return the files of the project that a forward pass in training enters, by path."""
    config = LlamaConfig(
        hidden_size=width, intermediate_size=64, num_hidden_layers=4, num_attention_heads=4, vocab_size=99
    )
    model = retrofit(LlamaForCausalLM(config), block_size=3).train()
    model.config.depth_attention_implementation = implementation
    ids = torch.randint(99, (2, 16))
    model(ids, labels=ids).loss.backward()  # the first pass also compiles
    files = set()

    def enter(frame, event: str, argument: object) -> None:
        file = Path(frame.f_code.co_filename)
        if event == "call" and file.is_relative_to(ROOT) and "site-packages" not in file.parts:
            files.add(str(file.relative_to(ROOT)))

    sys.setprofile(enter)
    try:
        model(ids, labels=ids)
    finally:
        sys.setprofile(None)
    return files - {str(Path(__file__).relative_to(ROOT))}


def test_plain_pytorch_enters_at_most_eight_files():
    assert len(files := files_of_a_forward_pass(64, "eager")) <= 8, files


@pytest.mark.parametrize("width", [64, 256])  # the loops compute from 256 on
def test_a_processor_enters_at_most_fifteen_files_and_none_for_gpus(width):
    pytest.importorskip("numba")
    files = files_of_a_forward_pass(width, "auto")
    assert len(files) <= 15, files
    assert not {file for file in files if "triton" in file}
    assert ("accelerated/numba/loops.py" in files) is (width == 256)
