"""The costs of one model for one job, which all its layouts share: weights, traces of passes, products."""

from functools import cached_property
from itertools import pairwise

from attnres import ResidualConfig

from .building import Batch
from .jobs import Job, Layout
from .traces import Trace
from .tracing import trace
from .weights import StageWeights, Weights, model_weights, stage_weights


class Costs:
    """The costs of a configuration's model for one job, from which layouts are planned. Each is computed once.

    Args:
        config: A configuration of the family.
        job: The job. Layouts may use another number of devices.

    Raises:
        ValueError: The context is longer than the model's.
    """

    def __init__(self, config: ResidualConfig, job: Job):
        longest = getattr(config, "max_position_embeddings", None) or job.context
        if job.context > longest:
            raise ValueError(
                f"The context must be at most {longest:,} tokens (`max_position_embeddings` of the model), got "
                f"{job.context:,}."
            )
        self.config, self.job = config, job
        self._traces: dict[tuple, Trace] = {}
        self._stages: dict[tuple, StageWeights] = {}
        self._kept: dict[tuple, tuple[int, int, int]] = {}

    @cached_property
    def weights(self) -> list[Weights]:
        """The parameters of the model; see [`model_weights`]."""
        return model_weights(self.config)

    @property
    def num_layers(self) -> int:
        """Number of decoder layers."""
        return self.config.num_hidden_layers

    @cached_property
    def experts(self) -> tuple[int, int]:
        """Number of routed experts of a layer, and number that a token uses; 1 and 1 without experts."""
        if not any(weight.is_expert for weight in self.weights):
            return 1, 1
        names = ("num_local_experts", "num_experts", "n_routed_experts")
        number = next(value for name in names if (value := getattr(self.config, name, None)))
        return number, self.config.num_experts_per_tok

    @property
    def expert_columns(self) -> int:
        """Number of columns that a token sends to its experts in a layer."""
        return self.experts[1] * (getattr(self.config, "routed_expert_hidden_size", None) or self.config.hidden_size)

    def trace(self, tensor: int, decode: bool = False) -> Trace:
        """Return the trace of one sequence on one of `tensor` devices, with states sharded along the sequence.

        Args:
            tensor: Number of devices that share each matrix.
            decode: In serving, trace the step after the whole context in place of the last chunk of the prompt.

        Raises:
            ValueError: So many devices cannot share the matrices.
        """
        if (tensor, decode) not in self._traces:
            job = self.job
            length = job.context if job.training else 1 if decode else min(job.chunk, job.context)
            past = 0 if job.training else job.context - length
            traced = trace(self.config, Batch(1, length, past, job.training, tensor=tensor))
            self._traces[tensor, decode] = traced.sharded(tensor)
        return self._traces[tensor, decode]

    def stages(self, pipeline: int) -> list[slice]:
        """Return the layers of each stage, as equal as can be.

        The last stages get the remainder, since fewer micro-batches wait there.
        """
        bounds = [self.num_layers * stage // pipeline for stage in range(pipeline + 1)]
        return [slice(*pair) for pair in pairwise(bounds)]

    def stage_weights(self, layout: Layout, stage: slice) -> StageWeights:
        """Return the sums over the weights of a stage; layouts that divide them alike share the sums."""
        key = (layout.tensor, layout.expert, layout.shard, stage.start, stage.stop)
        if key not in self._stages:
            first, is_last = -1 if stage.start == 0 else stage.start, stage.stop == self.num_layers
            last = self.num_layers if is_last else stage.stop - 1
            weights = [weight for weight in self.weights if first <= weight.layer <= last]
            if self.config.tie_word_embeddings and is_last:
                # The last stage has a copy of the embedding, unless it is also the first, and multiplies with it.
                head = [weight for weight in self.weights if weight.layer == -1]
                weights += head if stage.start > 0 else []
            else:
                head = []
            experts, used = self.experts
            sums = stage_weights(weights, layout, self.job.optimizer, used / experts)
            sums.active += sum(weight.on_one_device(layout) for weight in head)
            self._stages[key] = sums
        return self._stages[key]

    def kept(self, tensor: int, checkpointing: bool, stage: slice) -> tuple[int, int, int]:
        """Return the bytes that a stage keeps for one backward pass, of states and of others, and the pass's peak."""
        key = tensor, checkpointing, stage.start, stage.stop
        if key not in self._kept:
            traced = self.trace(tensor)
            self._kept[key] = *traced.kept(checkpointing, stage), traced.peak(checkpointing, stage)
        return self._kept[key]

    def attention_flops(self, tokens: int) -> float:
        """Return the products and sums between the last `tokens` of the context and all before them, in all layers.

        Delta attention has few: its matrices are much larger than its states.
        """
        config = self.config
        kinds = getattr(config, "layer_types", None) or ["full_attention"] * self.num_layers
        heads = config.num_attention_heads
        width = getattr(config, "head_dim", None) or config.hidden_size // heads
        if getattr(config, "kv_lora_rank", None):
            # Half of the products are of queries and keys, half of weights and values.
            width = (config.qk_nope_head_dim + config.qk_rope_head_dim + config.v_head_dim) / 2
        pairs = tokens * (self.job.context - tokens / 2)
        return kinds.count("full_attention") * 2 * 2 * heads * width * pairs

    def attention_part(self, tensor: int) -> float:
        """Return the part of these that one of `tensor` devices computes: all, if the plan leaves attention whole."""
        plan = self.config.base_model_tp_plan or {}
        is_divided = any(style in ("rowwise", "rowwise_rep") and ".mlp." not in name for name, style in plan.items())
        return 1 / tensor if is_divided else 1.0

    def forward_flops(self, layout: Layout) -> list[float]:
        """Return the products and sums of the forward pass of one sequence on a device, for each stage."""
        context = self.job.context
        attention = self.attention_flops(context) * self.attention_part(layout.tensor) / layout.pipeline
        stages = self.stages(layout.pipeline)
        return [2 * self.stage_weights(layout, stage).active * context + attention for stage in stages]


__all__ = ["Costs"]
