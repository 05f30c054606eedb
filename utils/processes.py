"""Errors of a process that only tell that another process of the same run has ended."""

import os
import re

# What gloo, NCCL and the key-value store of `torch.distributed` say of a peer that is gone.
_LOST = re.compile(
    r"Connection (closed|reset) by (remote )?peer|Broken pipe|Socket (closed|Timeout)|recvValue failed|sendBytes failed"
    r"|failed to recv|remote process exited|NCCL communicator was aborted",
    re.IGNORECASE,
)


def is_lost_connection(error: BaseException) -> bool:
    """Whether an error says no more than that another process of this run is gone."""
    several = os.environ.get("WORLD_SIZE", "1") not in ("", "1")
    return several and isinstance(error, RuntimeError) and _LOST.search(str(error)) is not None


__all__ = ["is_lost_connection"]
