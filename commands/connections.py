"""Describe the residual connections for the command line, without importing PyTorch.

Help texts and options derive from this table. The import of the registry `attnres.CONNECTIONS` takes seconds;
`tests/commands/test_quick.py` compares the table with it.
"""

import math
from typing import Any

# Name -> (meaning, options of a retrofit). The first connection is the default.
CONNECTIONS: dict[str, tuple[str, tuple[str, ...]]] = {
    "attn_res": ("attention residuals, Full or in blocks", ("block_size", "scale", "num_blocks", "full")),
    "standard": ("the residual stream", ()),
    "denseformer": ("DenseFormer's averages over depth", ()),
    "muddformer": ("MUDDFormer's averages over depth, whose weights each token sets", ()),
    "dca": ("DCA's sums of all outputs, with weights of channel and token", ()),
    "residual_scalars": ("the residual stream, scaled before each layer, plus the embedding", ()),
    "scaled": ("the residual stream with scaled outputs, or in another of six forms", ()),
    "laurel": ("LAuReL's weights and low-rank map of the stream", ()),
    "frac_connections": ("Hyper-Connections between parts of one stream", ()),
    "highway": ("Highway gates, from scratch only", ()),
    "hyper_connections": ("Hyper-Connections", ("streams",)),
    "identity_hc": ("Hyper-Connections whose streams are not mixed", ("streams",)),
    "mhc": ("Hyper-Connections with Sinkhorn's doubly stochastic mixing", ("streams",)),
    "mhc_lite": ("Hyper-Connections with averages of permutations", ("streams",)),
    "gated_residual": ("streams that are read and written through gates", ("streams",)),
    "post_norm": ("norms on the stream itself, from scratch only", ()),
}


def flag(option: str) -> str:
    """Return the command-line option for an argument of a function, such as `--num-blocks` for `num_blocks`."""
    return f"--{option.replace('_', '-')}"


def owners(option: str) -> str:
    """Return the names of the connections that have an option, as `a, b or c`."""
    *others, last = (name for name, (_, options) in CONNECTIONS.items() if option in options)
    return f"{', '.join(others)} or {last}" if others else last


def describe_connections() -> str:
    """Return all connections with their meanings and options, for a help text."""
    return "; ".join(
        f"{name} ({meaning}; {', '.join(map(flag, options)) or 'no options'})"
        for name, (meaning, options) in CONNECTIONS.items()
    )


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


__all__ = ["CONNECTIONS", "describe_connections", "flag", "owners", "remark_on_blocks"]
