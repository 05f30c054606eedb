"""Tell the layouts that this package runs from the layouts that need another engine.

`attnres train` shards a model by FSDP2, tensor and expert parallelism of `transformers` (`distributed` of a recipe),
or by layers (`pipeline` of a recipe), but not by both. `generate` shards by tensor parallelism.
"""

from .jobs import Layout


def missing_engine(layout: Layout, training: bool) -> str | None:
    """Return why this package does not run a layout, in a few words; `None` if it does.

    Args:
        layout: The layout.
        training: Whether it is of a training step; if not, of serving.
    """
    if layout.pipeline > 1:
        return _missing_beside_pipeline(layout) if training else "a pipeline that serves"
    if layout.expert > 1 and not training:
        return "experts shared in serving"
    if layout.expert > 1 and layout.tensor > 1:
        return "experts shared beside states sharded along the sequence"
    if layout.shard > 1 and not layout.reshard:
        return "weights gathered once a step without a pipeline"
    return None


def _missing_beside_pipeline(layout: Layout) -> str | None:
    """Return why `attnres train` does not run a layout with pipeline stages; `None` if it does."""
    if layout.tensor > 1:
        return "tensor parallelism beside a pipeline"
    if layout.expert > 1:
        return "experts shared beside a pipeline"
    # `fsdp: true` shards a stage among all pipelines, and gathers it once a step.
    if layout.shard > 1 and (layout.reshard or layout.shard < layout.data):
        return "weights gathered per layer, or sharded among some pipelines only"
    return None


__all__ = ["missing_engine"]
