"""The costs of one model for one job, which all its layouts share: weights, traces of passes, products."""

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property

from attnres import ResidualConfig
from attnres.utils.partition import partition_layers

from .building import Batch
from .jobs import Job, Layout
from .schedules import fullest_moment, rank_actions
from .traces import Trace
from .tracing import trace
from .weights import StageWeights, Weights, adapter_weights, model_weights, stage_weights


class Costs:
    """The costs of a configuration's model for one job, from which layouts are planned. Each is computed once.

    Args:
        config: A configuration of the family.
        job: The job. Layouts may use another number of devices.

    Raises:
        ValueError: The context is longer than the model's, the model's is less than one token, or the model has value
            residuals.
    """

    def __init__(self, config: ResidualConfig, job: Job):
        longest = getattr(config, "max_position_embeddings", None)
        if longest is None:
            longest = job.context
        if longest < 1:
            raise ValueError(f"`max_position_embeddings` of the model is {longest}, but must be at least 1.")
        if job.context > longest:
            raise ValueError(
                f"The context must be at most {longest:,} tokens (`max_position_embeddings` of the model), got "
                f"{job.context:,}: give a shorter one, as in `--context {longest}`."
            )
        if config.value_residual is not None:
            raise ValueError("A plan does not count the first layer's values: leave out `value_residual`.")
        self.config, self.job = config, job
        self._traces: dict[tuple, Trace] = {}
        self._stages: dict[tuple, StageWeights] = {}
        self._kept: dict[tuple, tuple[int, int, int]] = {}
        self._partitions: dict[int, list[slice]] = {}

    @cached_property
    def weights(self) -> list[Weights]:
        """The parameters of the model; see [`model_weights`]."""
        return model_weights(self.config, self.job.packed)

    @cached_property
    def adapters(self) -> dict[int, int]:
        """Numbers that are trained beside frozen weights, by layer; see [`adapter_weights`]."""
        return {} if self.job.lora is None else adapter_weights(self.config, self.job.lora)

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
            batch = Batch(1, length, past, job.training, tensor=tensor)
            if job.training and job.lora is not None:
                batch = replace(batch, lora=job.lora, packed=job.packed)
            traced = trace(self.config, batch)
            self._traces[tensor, decode] = traced.sharded(tensor)
        return self._traces[tensor, decode]

    def stages(self, number: int) -> list[slice]:
        """Return the layers of each of several stages, about equal in activated parameters."""
        if number not in self._partitions:
            experts, used = self.experts
            activated = [0.0] * (self.num_layers + 1)
            for weight in self.weights:
                if weight.layer >= 0:
                    activated[weight.layer] += weight.number * (used / experts if weight.is_expert else 1)
            head = activated.pop() + sum(weight.number for weight in self._tied_head)
            self._partitions[number] = partition_layers(activated, number, head)
        return self._partitions[number]

    def of_rank(self, layout: Layout, rank: int) -> list[slice]:
        """Return the layers of each stage of one rank of a pipeline.

        Args:
            layout: The layout of the devices.
            rank: The number of the rank, from 0.
        """
        return self.stages(layout.stages)[rank :: layout.pipeline]

    @cached_property
    def _tied_head(self) -> list[Weights]:
        """The embedding, if the head multiplies with it."""
        return [w for w in self.weights if w.layer == -1] if self.config.tie_word_embeddings else []

    def stage_weights(self, layout: Layout, stages: Sequence[slice]) -> StageWeights:
        """Return the sums over the weights of the stages of one rank.

        They are computed once for all layouts that shard these weights alike.

        Args:
            layout: The layout of the devices.
            stages: The layers of each stage of the rank.
        """
        key = (layout.tensor, layout.expert, layout.shard, *((stage.start, stage.stop) for stage in stages))
        if key not in self._stages:
            layers = {layer for stage in stages for layer in range(self.num_layers)[stage]}
            is_first, is_last = 0 in layers, self.num_layers - 1 in layers
            layers |= {-1} if is_first else set()
            layers |= {self.num_layers} if is_last else set()
            weights = [weight for weight in self.weights if weight.layer in layers]
            experts, used = self.experts
            # The last stage multiplies with a tied embedding. It has a copy, unless it is also the first.
            copy = self._tied_head if is_last and not is_first else []
            sums = stage_weights([*weights, *copy], layout, self.job.optimizer, used / experts)
            sums.activated += sum(weight.on_one_device(layout) for weight in self._tied_head if is_last)
            sums.adapters = sum(self.adapters.get(layer, 0) for layer in layers)
            self._stages[key] = sums
        return self._stages[key]

    def kept(self, layout: Layout, rank: int, microbatches: int) -> tuple[int, int, int]:
        """Return the bytes that a rank keeps for backward passes when it keeps most, and those that it works with.

        Args:
            layout: The layout.
            rank: Number of the rank in its pipeline.
            microbatches: Number of micro-batches of a step.

        Returns:
            The kept bytes of states and of others, and the largest peak of a stage above the bytes that it keeps.
        """
        # From twice as many micro-batches as ranks on, no more wait.
        microbatches = min(microbatches, 2 * layout.pipeline)
        key = layout.tensor, layout.checkpointing, layout.pipeline, layout.virtual, rank, microbatches
        if key not in self._kept:
            traced, stages = self.trace(layout.tensor), self.of_rank(layout, rank)
            # For n = 0, 1, ...: the bytes that a micro-batch keeps once it has passed the rank's first n stages. Stages
            # share block states, so each counts once.
            kept = [traced.kept(layout.checkpointing, stages[:number]) for number in range(len(stages) + 1)]
            schedule = "Interleaved1F1B" if layout.virtual > 1 else "1F1B"
            actions = rank_actions(schedule, rank, layout.pipeline, microbatches, layout.virtual)
            moment = fullest_moment(actions, [sum(pair) for pair in kept])
            working = max(
                traced.peak(layout.checkpointing, stage) - sum(traced.kept(layout.checkpointing, [stage]))
                for stage in stages
            )
            self._kept[key] = sum(kept[n][0] for n in moment), sum(kept[n][1] for n in moment), working
        return self._kept[key]

    @cached_property
    def windows(self) -> list[int | None]:
        """For each layer with attention between pairs of tokens, the most tokens that one sees; `None` for all.

        Delta attention has few products between tokens: its matrices are much larger than its states.
        """
        window = getattr(self.config, "sliding_window", None)
        # Backbones without a list of kinds, such as Mistral, use their window in every layer.
        every = "full_attention" if window is None else "sliding_attention"
        kinds = getattr(self.config, "layer_types", None) or [every] * self.num_layers
        window_of = {"full_attention": None, "sliding_attention": window}
        return [window_of[kind] for kind in kinds if kind in window_of]

    def attention_flops(self, tokens: int) -> float:
        """Return the products and sums between the last `tokens` of the context and all that they see, in all layers.

        Args:
            tokens: Number of tokens.
        """
        config = self.config
        heads = config.num_attention_heads
        width = getattr(config, "head_dim", None) or config.hidden_size // heads
        if getattr(config, "kv_lora_rank", None):
            # Half of the products are of queries and keys, half of weights and values.
            width = (config.qk_nope_head_dim + config.qk_rope_head_dim + config.v_head_dim) / 2
        pairs = sum(_visible_pairs(self.job.context, tokens, window) for window in self.windows)
        return 2 * 2 * heads * width * pairs

    def attention_part(self, tensor: int) -> float:
        """Return the share of `attention_flops` that each of `tensor` devices computes.

        It is 1 if tensor parallelism does not shard attention.
        """
        rules = self.config.base_model_tp_plan or {}
        is_sharded = any(style in ("rowwise", "rowwise_rep") and ".mlp." not in name for name, style in rules.items())
        return 1 / tensor if is_sharded else 1.0

    def forward_flops(self, layout: Layout) -> list[float]:
        """Return the products and sums of the forward pass of one sequence on a device, for each stage."""
        context = self.job.context
        attention = self.attention_flops(context) * self.attention_part(layout.tensor) / layout.stages
        stages = self.stages(layout.stages)
        return [2 * self.stage_weights(layout, [stage]).activated * context + attention for stage in stages]


def _visible_pairs(context: int, tokens: int, window: int | None) -> float:
    """Return the number of pairs of one of the last `tokens` of a context and a token that it sees.

    A token sees those before it, but at most `window`.
    """
    before = context - tokens
    window = context if window is None else min(window, context)
    # The number rises from token to token until a window is full.
    rising = max(0, window - before)
    return rising * (before + rising / 2) + (tokens - rising) * window


__all__ = ["Costs"]
