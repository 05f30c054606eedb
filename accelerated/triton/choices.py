"""The implementation that `auto` chooses on a GPU, by the number of sources.

The table comes from host times measured without a GPU (`python -m benchmarks --only host`); replace it after a run on a
GPU. It names our kernels everywhere, because no library needs less host time. Liger's kernels also need all sources in
one tensor. The copy reads and writes each source once more, where the kernel reads it once or twice.
"""

# For training (gradients are recorded) and for inference: the fewest sources, and the implementation from there on. If
# an implementation cannot run, `auto` takes ours.
TRAINING: tuple[tuple[int, str], ...] = ((1, "triton"),)
INFERENCE: tuple[tuple[int, str], ...] = ((1, "triton"),)


def chosen(count: int, trains: bool) -> str:
    """Return the name of the implementation for `count` sources, for training or for inference."""
    return next(name for fewest, name in reversed(TRAINING if trains else INFERENCE) if count >= fewest)


def are_all(name: str) -> bool:
    """Return whether one implementation is chosen everywhere."""
    return {entry for _, entry in (*TRAINING, *INFERENCE)} == {name}


__all__ = ["are_all", "chosen"]
