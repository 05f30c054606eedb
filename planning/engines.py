"""Tell the layouts that this package runs from the layouts that need another engine.

`attnres train` shards a model by FSDP2, tensor and expert parallelism of `transformers` (`distributed` of a recipe),
or by layers (`pipeline` of a recipe), but not by both. `generate` shards by tensor parallelism.
"""

from attnres import ResidualConfig
from attnres.mtp_attnres import MultiTokenPrediction

from .jobs import Layout


def missing_engine(layout: Layout, training: bool, config: ResidualConfig) -> str | None:
    """Return why this package does not run a layout, in a few words; `None` if it does.

    Args:
        layout: The layout.
        training: Whether it is of a training step; if not, of serving.
        config: The configuration of the model.
    """
    if training and layout.tensor * layout.pipeline > 1 and MultiTokenPrediction.is_on(config):
        other = "a pipeline" if layout.pipeline > 1 else "states sharded along the sequence"
        return f"the layer for multi-token prediction (`num_nextn_predict_layers`) beside {other}"
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
