"""The command line turns errors of libraries into one line that names the file and the remedy."""

import errno
import os

import pytest
import torch
from huggingface_hub.errors import (
    HfHubHTTPError,
    HFValidationError,
    LocalTokenNotFoundError,
    StrictDataclassFieldValidationError,
)
from huggingface_hub.utils import httpx
from safetensors import SafetensorError
from torch.distributed.checkpoint.api import CheckpointException

from attnres.commands.errors import describe
from attnres.utils.errors import about


def noted(error: BaseException, *arguments: str) -> BaseException:
    """Return an error after it has left [`about`]."""
    with pytest.raises(type(error)) as caught, about(*arguments):
        raise error
    return caught.value


def refusal(status: int) -> HfHubHTTPError:
    """Return the error of `huggingface_hub` for an answer of the Hub."""
    response = httpx.Response(status, request=httpx.Request("POST", "https://huggingface.co/api"))
    return HfHubHTTPError("a text of\n\nmany lines", response=response, server_message="you may\nonly read.")


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (SafetensorError("header too large"), "SafetensorError: header too large. Copy the file again."),
        (LocalTokenNotFoundError("no token"), "no token. Log in to the Hub by `hf auth login`, or set HF_TOKEN."),
        (HFValidationError("a b"), "HFValidationError: a b. Give NAME or ORG/NAME."),
        (
            httpx.ReadError("reset"),
            "ReadError: reset. Is the Hub reachable? The same command goes on: what was sent is not sent again.",
        ),
        (
            refusal(403),
            "the Hub answered 403: you may only read. Use a token that may do this. `attnres push` may also "
            "take another name or --create-pr.",
        ),
        (refusal(413), "the Hub answered 413: you may only read."),
        (
            refusal(503),
            "the Hub answered 503: you may only read. The same command goes on: what was sent is not sent again.",
        ),
        (MemoryError(), "MemoryError. Use a smaller model, or a machine with more memory."),
        (
            torch.OutOfMemoryError("CUDA out of memory."),
            "OutOfMemoryError: CUDA out of memory. Use a smaller batch, shorter sequences or a smaller dtype.",
        ),
        (
            RuntimeError("[enforce fail at alloc_cpu.cpp:127] DefaultCPUAllocator: can't allocate memory"),
            "RuntimeError: [enforce fail at alloc_cpu.cpp:127] DefaultCPUAllocator: can't allocate memory. Use a "
            "smaller model, or a machine with more memory.",
        ),
        (
            StrictDataclassFieldValidationError(field="x", cause=TypeError("not int")),
            "StrictDataclassFieldValidationError: Validation error for field 'x': TypeError: not int",
        ),
    ],
)
def test_an_error_of_a_library_has_a_remedy(error, line):
    assert describe(error) == (line, True)


def test_an_error_with_a_note_names_the_file_and_its_own_remedy():
    error = noted(KeyError("act"), "m/config.json", "Correct it there.")
    assert describe(error) == ("KeyError: 'act' (in m/config.json). Correct it there.", True)
    assert describe(noted(ValueError("m/config.json is empty."), "m/config.json")) == (
        "m/config.json is empty.",  # it names the file already
        True,
    )


def test_the_error_of_a_full_disk_names_the_file():
    error = noted(OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), "m/model.safetensors")
    assert describe(error) == ("m/model.safetensors: No space left on device", True)


def test_the_error_of_a_checkpoint_in_parts_is_that_of_its_first_process():
    error = noted(CheckpointException("load", {0: (ValueError("sizes differ"), None)}), "run/optimizer", "Remove it.")
    assert describe(error) == ("sizes differ (in run/optimizer). Remove it.", True)


def test_a_wait_for_another_process_says_which_settings_limit_it(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    line, is_foreseen = describe(RuntimeError("Timed out waiting 12000ms for recv operation to complete"))
    assert is_foreseen and line.startswith("process 1 has waited too long for the other processes: ")
    assert "`trainer.ddp_timeout`" in line
