"""Describe the residual connections for the command line, without importing PyTorch.

Help texts, options and `attnres list connections` derive from this table. The import of the registry
`attnres.CONNECTIONS` takes seconds; `tests/commands/test_quick.py` compares the table with it.
"""

import math
from typing import Any, NamedTuple


class Connection(NamedTuple):
    """A residual connection, or a preset of one, as the command line shows it."""

    meaning: str
    options: tuple[str, ...]  # options of a retrofit
    state: str  # the state between sublayers, in tensors [tokens, d]
    step: str  # time of a training step over that of the standard model, as measured in benchmarks/README.md
    used_by: str  # published models, or recipes of others, whose code was read
    lower: str = ""  # stored experiments in which its loss ended lower in every seed, of those that have it
    exact: str = "yes"  # whether a retrofit keeps the function, or in which forms


_BLOCKS = ("block_size", "scale", "num_blocks", "full")
# The first connection is the default.
CONNECTIONS: dict[str, Connection] = {
    "attn_res": Connection("attention over depth", _BLOCKS, "blocks + 1", "1.03", "Kimi K3", "7 of 9"),
    "standard": Connection("the residual stream", (), "1", "1", "most models"),
    "denseformer": Connection("averages over depth", (), "layers + 1", "1.01", "", "1 of 1"),
    "muddformer": Connection("averages set by token", (), "layers + 1", "1.05", "modded-nanogpt", "0 of 1"),
    "dca": Connection("sums by channel and token", (), "k + 2 = 4", "1.10", ""),
    "residual_scalars": Connection("scaled stream, embedding", (), "2", "1.02", "nanochat", "0 of 1"),
    "scaled": Connection("scaled outputs or stream", (), "1", "1.01", "ZAYA, Gemma 4", exact="5 of 7"),
    "laurel": Connection("weights, a low-rank map", (), "1", "1.05", ""),
    "frac_connections": Connection("one stream in parts", (), "1", "1.05", ""),
    "highway": Connection("gates of old and new", (), "1", "1.13", "", exact="no"),
    "hyper_connections": Connection("n streams, mixed", ("streams",), "n", "1.16", ""),
    "identity_hc": Connection("n streams, not mixed", ("streams",), "n", "1.12", "Hy-V4", "1 of 2"),
    "mhc": Connection("n streams, Sinkhorn", ("streams",), "n", "1.21", "DeepSeek-V4", "0 of 1"),
    "mhc_lite": Connection("n streams, permutations", ("streams",), "n", "1.19", ""),
    "gated_residual": Connection("n streams, gated", ("streams",), "n", "1.38", "Qwen3.8-Flash-Next", "0 of 1"),
    "post_norm": Connection("a normed stream", (), "1", "0.99", "", exact="no"),
}
# Published variants that are settings of a connection; `attnres.PRESETS` has their fields.
PRESETS: dict[str, Connection] = {
    "multi_head": Connection("attn_res, 4 heads (MHAR)", _BLOCKS, "blocks + 1", "", ""),
    "delta": Connection("stream, gated attn_res", _BLOCKS, "blocks + 2", "1.04", ""),
}


def flag(option: str) -> str:
    """Return the command-line option for an argument of a function, such as `--num-blocks` for `num_blocks`."""
    return f"--{option.replace('_', '-')}"


def owners(option: str) -> str:
    """Return the names of the connections that have an option, as `a, b or c`."""
    *others, last = (name for name, connection in CONNECTIONS.items() if option in connection.options)
    return f"{', '.join(others)} or {last}" if others else last


def describe_connections() -> str:
    """Return all connections and presets with their meanings and options, for a help text."""
    return "; ".join(
        f"{name} ({connection.meaning}; {', '.join(map(flag, connection.options)) or 'no options'})"
        for name, connection in (CONNECTIONS | PRESETS).items()
    )


TITLES = ("name", "exact", "state", "step", "lower", "used by", "meaning")


def list_connections() -> list[str]:
    """Return a table as lines: the titles of its columns, and a line for each connection and preset."""
    rows = [
        (name, c.exact, c.state, c.step or "-", c.lower or "-", c.used_by or "-", c.meaning)
        for name, c in (CONNECTIONS | PRESETS).items()
    ]
    widths = [max(map(len, column)) for column in zip(TITLES, *rows)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in (TITLES, *rows)]


def remark_on_blocks(config: Any, num_blocks: int | None) -> str | None:
    """Return a remark if a retrofit has another number of blocks than the user may expect.

    Args:
        config: The configuration of the result.
        num_blocks: The number of blocks that the user gave; `None` if not given.

    Returns:
        A sentence, or `None` if there is nothing to remark.
    """
    if config.residual_connection != owners("num_blocks"):
        return None
    from attnres.attn_res_attnres import block_sublayers  # the caller, who made `config`, has imported PyTorch

    size, sublayers = block_sublayers(config), config.num_sublayers
    count = math.ceil(sublayers / size)
    if num_blocks is not None and count != num_blocks:
        if size == 1:
            return f"--num-blocks {num_blocks} becomes Full AttnRes: there are {sublayers} sublayers, each a block."
        return f"--num-blocks {num_blocks} becomes {count}: {sublayers} sublayers, {size} to a block."
    if num_blocks is None and count == 1 and size > 1:
        return (
            f"a block size of {size} puts all {sublayers} sublayers into one block, so that each attends only to the "
            f"embedding and one sum. --block-size {math.ceil(sublayers / 8)} would make about 8 blocks."
        )
    return None


__all__ = [
    "CONNECTIONS",
    "PRESETS",
    "TITLES",
    "Connection",
    "describe_connections",
    "flag",
    "list_connections",
    "owners",
    "remark_on_blocks",
]
