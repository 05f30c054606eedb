"""Errors of writing and of connections between processes are recognised and explained."""

import errno
import os
import socket

import pytest
from safetensors import SafetensorError

from attnres.utils.errors import is_lost_connection, is_timeout, why_not_written


@pytest.mark.parametrize(
    "error, reason",
    [
        (FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), "/proc/x"), "/proc/x: No such file or directory"),
        (OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), "No space left on device"),
        (socket.gaierror(-2, "Name or service not known"), "Name or service not known"),
        (OSError(errno.ENOSPC, "No space", "source.py", None, "copy.py"), "source.py -> copy.py: No space"),
        (OSError("the checkpoint is broken"), "the checkpoint is broken"),
        (OSError("x/model cannot be written: No (os error 27)"), "x/model cannot be written: No (os error 27)"),
        (SafetensorError("Error while serializing: I/O error: File too large (os error 27)"), "File too large"),
        (
            RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 64 vs 0"),
            "a file was cut short, as if by a full disk (No space left on device) or a limit of file sizes",
        ),
    ],
)
def test_the_reason_of_a_failed_write_is_one_line(error, reason):
    assert why_not_written(error) == reason


GLOO = "[gloo/transport/tcp/pair.cc:537] Read error [127.0.0.1]:4008: Connection reset by peer."


@pytest.mark.parametrize(
    "error, processes, is_lost",
    [
        (RuntimeError(GLOO), "2", True),
        (RuntimeError("Connection closed by peer [127.0.0.1]:7395. GLHF!"), "2", True),
        (RuntimeError(GLOO), "1", False),
        (RuntimeError("the checkpoint could not be read"), "2", False),
        (ConnectionResetError(errno.ECONNRESET, "Connection reset by peer"), "2", False),  # of a connection to the Hub
    ],
)
def test_a_lost_connection_to_another_process_is_recognised(error, processes, is_lost, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", processes)
    assert is_lost_connection(error) == is_lost


@pytest.mark.parametrize(
    "error, processes, is_expected",
    [
        (RuntimeError("[unbound_buffer.cc:78] Timed out waiting 12000ms for recv operation to complete"), "2", True),
        (RuntimeError("wait timeout after 5000ms, keys: /default_pg/0//1//cpu//0/1"), "2", True),
        (RuntimeError("The client socket has timed out after 5000ms while trying to connect"), "2", True),
        (RuntimeError("[unbound_buffer.cc:78] Timed out waiting 12000ms for recv operation to complete"), "1", False),
        (TimeoutError(errno.ETIMEDOUT, "Connection timed out"), "2", False),  # of a disk or of the Hub
    ],
)
def test_a_wait_for_another_process_that_took_too_long_is_recognised(error, processes, is_expected, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", processes)
    assert is_timeout(error) == is_expected
