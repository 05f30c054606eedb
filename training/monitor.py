"""Measurements of a training run: tokens/s, model FLOP use, depth attention, and magnitudes across the depth.

model FLOP use = tokens/s * FLOPs/token / (peak FLOP/s * devices)
FLOPs/token    = 6 N + 3 A,   N: activated parameters without the embedding table, A: forward FLOPs of mixing tokens
"""

import inspect
import re
import time
from collections.abc import Iterable
from typing import Any

import torch
from accelerate import PartialState
from accelerate.utils import reduce
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel, TrainerCallback
from transformers.trainer_callback import CallbackHandler

from attnres.analysis.depth_attention import share_measures
from attnres.analysis.watching import connections_of, measuring, watched
from attnres.configuration import count_parameters
from attnres.rows_attnres import documents_by_signs

# Pattern of a device's name -> peak dense bfloat16 FLOP/s, with float32 accumulation, from the vendors' data sheets
# (NVIDIA's data sheets give twice as much, "with sparsity"). The first pattern that matches the name counts.
PEAK_FLOPS = {
    r"\bMIG\b": None,  # a part of a device
    r"\bB200\b": 2250e12,
    r"\bH200 NVL\b": 835e12,
    r"\bG?H200\b": 989e12,
    r"\bH100 PCIe\b": 756e12,
    r"\bH100 NVL\b": 835e12,
    r"\bG?H100\b": 989e12,
    r"\bH800\b": 989e12,
    r"\bH20\b": 148e12,
    r"\bA[18]00\b": 312e12,
    r"\bA40\b": 149.7e12,
    r"\bA30\b": 165e12,
    r"\bA10\b": 125e12,
    r"\bL40S\b": 362e12,
    r"\bL40\b": 181e12,
    r"\bL4\b": 121e12,
    r"\bRTX 4090$": 165.2e12,
    r"\bRTX 3090$": 71e12,
    r"\bMI3(00|25)X\b": 1307.4e12,
    r"\bMI250X\b": 191.5e12,  # one of its two dies, which PyTorch shows as a device
}


def peak_flops(device_name: str) -> float | None:
    """Return the peak dense bfloat16 FLOP/s of a device by its name in PyTorch; `None` if it is unknown."""
    return next((peak for pattern, peak in PEAK_FLOPS.items() if re.search(pattern, device_name)), None)


def flops_per_token(config: PreTrainedConfig, length: int) -> float:
    """Count the FLOPs of training on one token, forward and backward: `6 N + 3 A`.

    `N` counts the activated parameters, with the output head and without the embedding table. Each parameter multiplies
    and adds once forward and twice backward. `A` counts the forward FLOPs of mixing tokens: for softmax attention
    `2 heads (qk_dim + v_dim) length` (PaLM's convention, which does not halve it for causality), and for KDA's
    recurrence, on a state `[k_dim, v_dim]` per head, `6 heads k_dim v_dim`. Norms, activations, depth attention (under
    1%) and the recomputation of gradient checkpointing are left out.

    Args:
        config: The configuration of a causal language model, of this family or of `transformers`.
        length: The length of the sequences in tokens.

    Returns:
        FLOPs per token.

    Raises:
        AttributeError, ValueError: No causal language model can be built from this configuration.
    """
    config = config.get_text_config()
    count = count_parameters(config)
    parameters = count.activated_non_embedding + config.vocab_size * config.hidden_size
    layers = config.num_hidden_layers
    heads = config.num_attention_heads
    linear_layers = (getattr(config, "layer_types", None) or []).count("linear_attention")
    if getattr(config, "qk_nope_head_dim", None):
        query_and_value = config.qk_nope_head_dim + config.qk_rope_head_dim + config.v_head_dim
    else:
        query_and_value = 2 * (getattr(config, "head_dim", None) or config.hidden_size // heads)
    mixing = (layers - linear_layers) * 2 * heads * query_and_value * length
    if linear_layers:
        mixing += linear_layers * 6 * config.linear_num_heads * config.linear_head_dim**2
    return 6 * parameters + 3 * mixing


def depth_attention_summary(depth_attentions: Iterable[Tensor | None]) -> dict[str, float]:
    """Summarise how the depth attention weights `a` of the sublayers and the output are spread over their K sources.

    Weights are divided by their sum first, since sigmoids do not add up to one.

    Args:
        depth_attentions: The weights of each sublayer and of the output, `[sources, batch, seq]`, of any dtype; `None`
            for a sublayer without weights.

    Returns:
        Means over tokens and over the sublayers with K > 1 sources, empty if there is none. `depth_entropy`:
        `H(a) / log K`, 1 for uniform weights, 0 for a single source. `depth_distance`: the distance from uniform
        weights, `sum_i |a_i - 1/K| / 2`, the share of the weight that would have to move. `depth_weight_nearest` and
        `depth_weight_embedding`: the weight on the last and on the first source.
    """
    several = [weights.float() for weights in depth_attentions if weights is not None and len(weights) > 1]
    if not several:
        return {}
    spread = [share_measures(a) for a in several]
    measures = {
        "depth_entropy": [entropy for entropy, _ in spread],
        "depth_distance": [distance for _, distance in spread],
        "depth_weight_nearest": [a[-1] / a.sum(0) for a in several],
        "depth_weight_embedding": [a[0] / a.sum(0) for a in several],
    }
    return {name: torch.stack([value.mean() for value in values]).mean().item() for name, values in measures.items()}


class LoggedCallback(TrainerCallback):
    """A callback that adds its [`metrics`] to each line of the log with the training loss.

    The line appears on the screen, in `state.log_history`, and in each reporter that `report_to` of the
    `TrainingArguments` names: TensorBoard, Trackio and others. It works with any `Trainer`, without a subclass.
    """

    def metrics(self) -> dict[str, float]:
        """Return the measurements since the last call, by name.

        All processes call it together, and return the same names.
        """
        raise NotImplementedError

    def on_train_begin(self, args, state, control, **kwargs):
        """Take the place before the reporters, so that they see the line with the measurements."""
        _move_first(self)

    def on_log(self, args, state, control, logs: dict[str, float], **kwargs):
        """Add the measurements to a line with the training loss."""
        if "loss" in logs:
            metrics = self.metrics()
            logs |= metrics
            state.log_history[-1] |= metrics  # `Trainer` has put a copy of the line there


def _move_first(callback: TrainerCallback) -> None:
    """Move a callback before the others of the `Trainer` that calls it.

    A `Trainer` calls its reporters before the callbacks that its user gives it, and all of them read the same line. So
    the measurements have to be in the line before the first reporter is called.
    """
    # Neither the constructor of `Trainer` nor `add_callback` takes a position, and no event passes the trainer or its
    # list of callbacks to a callback. The list can be reached only through the `CallbackHandler` that is calling now.
    # The alternative is a subclass of `Trainer`, which users of other trainers (such as TRL's) could not use.
    frame = inspect.currentframe()
    while frame is not None:
        caller = frame.f_locals.get("self")
        if isinstance(caller, CallbackHandler):
            # It is iterating over this list. Moving the current item to the front skips and repeats no other.
            if callback in caller.callbacks:
                caller.callbacks.remove(callback)
                caller.callbacks.insert(0, callback)
            return
        frame = frame.f_back


class Monitor(LoggedCallback):
    """A callback that logs throughput, and measures a model of this family across its depth.

    Each line of the log ends a window of time. It has the throughput of that window:

    - `tokens_per_second`: over all processes. Every position of a batch counts, padding too. The time is that of
      training steps and their data loading, without evaluation and saving.
    - `model_flop_use`: the share of the devices' peak, if the peak is known and all weights are trained.

    For a model of this family, the line also has measurements on the first `slice_tokens` tokens of each process's last
    batch, without padding. They cost one forward pass without gradient for each line, and its time is left out:

    - `magnitude_output`: the root mean square, over tokens and channels, of the output's input before its norm.
      `magnitude_growth`: `magnitude_output` divided by the root mean square of the first sublayer's input, which is
      the embedding. `magnitude_largest`: the largest root mean square of a sublayer's input. In a residual stream
      these values grow with depth; with attention residuals they stay bounded.
    - `depth_entropy`, `depth_distance`, `depth_weight_nearest` and `depth_weight_embedding` of attention residuals, see
      [`depth_attention_summary`].

    The callback does not change the training, random numbers included.

    Args:
        slice_tokens: The most tokens to measure on.
    """

    _model: PreTrainedModel  # during training

    def __init__(self, slice_tokens: int = 256):
        self.slice_tokens = slice_tokens
        self._handle = None
        self._tokens = 0

    def metrics(self) -> dict[str, float]:
        """End the window, and return its measurements. All processes call it together.

        Returns:
            Name -> value; empty if the window has no tokens.
        """
        if not self._tokens:  # the window has just begun, or the model gets no `input_ids`
            return {}
        tokens = reduce(torch.tensor(self._tokens, device=self._device), "sum").item()
        tokens //= self._ranks_per_batch()
        # After `item()`, which waits until the device has finished the window's steps.
        self._count_time()
        metrics = {"tokens_per_second": tokens / self._seconds}
        flops, peak = self._training_flops(), peak_flops(_device_name(self._device))
        if flops is not None and peak is not None:
            metrics["model_flop_use"] = tokens / self._seconds * flops / (peak * PartialState().num_processes)
        if self._has_connections:
            metrics |= self._across_depth()
        self._tokens, self._seconds, self._since = 0, 0.0, time.perf_counter()
        return metrics

    def _ranks_per_batch(self) -> int:
        """Return how many processes compute the same batch: those of a tensor-parallel group."""
        model = vars(self).get("_model")  # there is none outside of training
        return getattr(model, "tp_size", None) or 1

    def on_train_begin(self, args, state, control, model: PreTrainedModel, **kwargs):
        """Begin the first window, and attach a counter of tokens to the model."""
        super().on_train_begin(args, state, control, **kwargs)
        # Remove the counter of an earlier training that ended with an error.
        self.on_train_end(args, state, control)
        self._model = model
        self._flops: dict[int, float | None] = {}
        self._has_connections = bool(connections_of(model))
        self._device = args.device
        self._seconds, self._since = 0.0, time.perf_counter()
        self._handle = model.register_forward_pre_hook(self._see_batch, with_kwargs=True)

    def on_train_end(self, args, state, control, **kwargs):
        """Remove the counter of tokens."""
        if self._handle is not None:
            self._handle.remove()
        self._handle = None
        vars(self).pop("_model", None)
        self._tokens = 0

    # A compiled graph would run this only once, while it is compiled.
    @torch.compiler.disable
    def _see_batch(self, model: nn.Module, inputs: tuple, kwargs: dict) -> None:
        if model.training and (ids := kwargs.get("input_ids", inputs[0] if inputs else None)) is not None:
            self._tokens += ids.numel()
            self._ids, self._arguments = ids, kwargs

    def on_step_end(self, args, state, control, **kwargs):
        """Add the time of the step to the window."""
        self._count_time()

    def on_evaluate(self, args, state, control, **kwargs):
        """Leave the time of an evaluation, or of saving, out of the window."""
        self._since = time.perf_counter()

    on_save = on_evaluate

    def _count_time(self) -> None:
        now = time.perf_counter()
        self._seconds += now - self._since
        self._since = now

    def _training_flops(self) -> float | None:
        """Return the FLOPs per token for the length of the last batch; `None` if they cannot be counted."""
        # Frozen weights compute no gradient: `6 N` would be too much.
        if not all(parameter.requires_grad for parameter in self._model.parameters()):
            return None
        length = self._ids.shape[-1]
        if length not in self._flops:
            try:
                self._flops[length] = flops_per_token(self._model.config, length)
            except (AttributeError, ValueError):
                self._flops[length] = None
        return self._flops[length]

    @torch.no_grad()
    def _across_depth(self) -> dict[str, float]:
        """Measure magnitudes and depth attention on a slice of the last batch, averaged over processes."""
        squares: list[Tensor] = []
        weights: list[Tensor] = []

        def record(connection: nn.Module, forward: Any, *arguments: Any) -> Any:
            result = forward(*arguments)  # the sublayer's input, `[batch, seq, hidden]`, and its weights over sources
            squares.append(result[0].float().square().mean().to(self._device))
            if result[1] is not None:
                weights.append(result[1].to(self._device))
            return result

        # `measuring` sets eval mode, so that dropout draws no random numbers and expert balancing does not count this.
        with measuring(self._model), watched(self._model, record):
            self._model(**self._slice(), use_cache=False, logits_to_keep=1)
        summary = depth_attention_summary(weights)
        means = torch.tensor(list(summary.values()), dtype=torch.float32, device=self._device)
        # One reduction for all numbers.
        values = reduce(torch.stack([*squares, *means]), "mean")
        # Root mean squares of the inputs of the sublayers by depth, and of the output at the end.
        sizes, means = values[: len(squares)].sqrt(), values[len(squares) :]
        magnitudes = {
            "magnitude_output": sizes[-1],
            "magnitude_growth": sizes[-1] / sizes[0],
            "magnitude_largest": sizes[:-1].max(),
        }
        return {name: value.item() for name, value in magnitudes.items()} | dict(zip(summary, means.tolist()))

    def _slice(self) -> dict[str, Tensor]:
        """Return arguments of a forward pass on the first tokens of the last batch's first sequence, without padding.

        They are `[1, tokens]`: the tokens and, if the batch has them, their positions, and the documents that the
        training keeps apart.
        """
        ids, mask, positions = self._ids, *map(self._arguments.get, ("attention_mask", "position_ids"))
        rows = {"input_ids": ids}
        if isinstance(positions, Tensor) and positions.ndim == 2:
            rows["position_ids"] = positions.expand_as(ids)
            if mask is not None:  # with a mask, positions that restart do not begin a document
                rows["attention_mask"] = torch.ones_like(ids)
        is_marked = mask is None and "position_ids" in rows  # the positions mark the documents
        documents = None if is_marked else documents_by_signs(self._arguments, tuple(ids.shape), makes_cache=False)
        if documents is not None:
            rows["seq_idx"] = documents
        rows = {name: row[0] for name, row in rows.items()}
        if isinstance(mask, Tensor) and mask.shape == ids.shape and mask[0].any():
            rows = {name: row[mask[0].bool()] for name, row in rows.items()}
        # Ranks that share a sequence get equal parts. So their mean is that of all tokens.
        ranks = self._ranks_per_batch()
        count = min(len(rows["input_ids"]), self.slice_tokens)
        return {name: row[None, : max(count - count % ranks, 1)] for name, row in rows.items()}


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


__all__ = ["LoggedCallback", "Monitor", "depth_attention_summary", "flops_per_token", "peak_flops"]
