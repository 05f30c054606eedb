"""The callbacks of a run that measure and balance the model, and stop the run after SIGTERM.

[`Monitor`] and [`ExpertBalance`] work with any `transformers.Trainer`.
"""

import inspect
import math
import signal
import time
from functools import partial
from types import FrameType
from typing import Any

import torch
from accelerate import PartialState
from accelerate.utils import reduce
from torch import Tensor, nn
from transformers import PreTrainedModel, Trainer, TrainerCallback
from transformers.trainer_callback import CallbackHandler

from attnres.analysis.watching import connections_of, measuring, watched
from attnres.mtp_attnres import MultiTokenPrediction
from attnres.rows_attnres import documents_by_signs

from .measures import depth_attention_summary, device_name, flops_per_token, peak_flops

BIAS = "e_score_correction_bias"  # of a router


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
        flops, peak = self._training_flops(), peak_flops(device_name(self._device))
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
        if self._arguments.get("pixel_values") is not None:  # the slice may cut an image, so it has text alone
            is_text = rows["input_ids"] != self._model.config.image_token_id
            rows = {name: row[is_text] for name, row in rows.items()}
        # Ranks that share a sequence get equal parts. So their mean is that of all tokens.
        ranks = self._ranks_per_batch()
        count = min(len(rows["input_ids"]), self.slice_tokens)
        return {name: row[None, : max(count - count % ranks, 1)] for name, row in rows.items()}


class ExpertBalance(LoggedCallback):
    """A callback that balances the experts of the model that a `Trainer` trains. Without routers it does nothing.

    This is the balancing without an auxiliary loss of DeepSeek-V3 and Kimi Linear. After each optimizer step, for each
    router, with `c_i` the number of tokens of the global batch that chose expert i:

        b_i <- b_i + rate * sign(mean(c) - c_i)

    `b` is the router's `e_score_correction_bias`. It decides only which experts are chosen, not their weights, and has
    no gradient. It is a buffer of the model, so checkpoints hold it.

    The load counts the experts that the routers return, over all micro-batches of a step and all processes. Forward
    passes of an evaluation do not count, nor do passes that gradient checkpointing repeats. The balance appears in the
    log, see [`metrics`].

    The biases are made float32, since a step of 0.001 would be lost in bfloat16. Pass this callback to the constructor
    of the `Trainer`, so that a checkpoint is read into float32 too.

    Args:
        rate: The rate of the update, by default the published 0.001. With 0, the callback only measures.

    Raises:
        ValueError: The rate is negative; from training: a module with a correction bias does not return which experts
            it chose, or the model has adapters and the rate is not 0, since the file of an adapter has no biases.
        RuntimeError: From training: no router ran in the first step.
    """

    def __init__(self, rate: float = 0.001):
        if rate < 0:
            raise ValueError(f"the rate of expert balancing is {rate}, but must not be negative.")
        self.rate = rate
        self._routers: list[nn.Module] = []
        self._handles: list = []

    def on_init_end(self, args, state, control, model: nn.Module, **kwargs):
        """Make the biases float32, before a checkpoint is read into them."""
        for router in routers(model):
            bias = getattr(router, BIAS)
            bias.data = bias.data.float()

    def on_train_begin(self, args, state, control, model: nn.Module, **kwargs):
        """Attach counters to the routers."""
        super().on_train_begin(args, state, control, **kwargs)
        # Again: if the callback was added to an existing `Trainer`, this has not been called yet.
        self.on_init_end(args, state, control, model)
        # Remove the counters of an earlier training that ended with an error.
        self.on_train_end(args, state, control)
        self._routers = routers(model)
        if self._routers and self.rate and hasattr(model, "peft_config"):
            raise ValueError("an adapter does not hold the routers' correction biases: set the balancing rate to 0.")
        self._counting = self._measured = False
        self._violation = self._entropy = torch.zeros(())  # sums over steps, `[routers]` after the first
        self._steps = 0
        biases = [getattr(router, BIAS) for router in self._routers]
        self._loads = [torch.zeros(bias.numel(), dtype=torch.long, device=bias.device) for bias in biases]
        if not self._routers:
            return
        # Count only between the call of the whole model and its return: gradient checkpointing repeats layers later, in
        # the backward pass.
        self._handles = [
            model.register_forward_pre_hook(self._begin_forward),
            model.register_forward_hook(self._end_forward, always_call=True),
        ]
        for router, load in zip(self._routers, self._loads):
            self._handles.append(router.register_forward_hook(partial(self._count, load)))

    def on_train_end(self, args, state, control, **kwargs):
        """Remove the counters."""
        while self._handles:
            self._handles.pop().remove()

    def _begin_forward(self, model: nn.Module, inputs: tuple) -> None:
        self._counting = model.training

    def _end_forward(self, model: nn.Module, inputs: tuple, output) -> None:
        self._counting = False

    def _count(self, load: Tensor, router: nn.Module, inputs: tuple, output) -> None:
        """Add the experts that a router has chosen to its `load`."""
        if not self._counting:
            return
        outputs = output if isinstance(output, tuple) else (output,)
        # Routers return logits and weights too, in an order that differs. Only the chosen experts are integers.
        chosen = [o for o in outputs if isinstance(o, Tensor) and o.dtype in (torch.int32, torch.int64)]
        if len(chosen) != 1:
            raise ValueError(
                f"{type(router).__name__} has an `{BIAS}`, but does not return which experts it chose: "
                "its load cannot be balanced."
            )
        experts = chosen[0].detach().flatten().long()
        load.scatter_add_(0, experts, torch.ones_like(experts))

    @torch.no_grad()
    def on_optimizer_step(self, args, state, control, **kwargs):
        """Sum the load over all processes, and update the biases."""
        if not self._routers:
            return
        device = self._loads[0].device
        loads = self._sum(torch.cat([load.to(device) for load in self._loads]))
        if not self._measured and not loads.any():
            raise RuntimeError("no router ran in this step: the load of the experts cannot be counted on this model.")
        self._measured = True
        measures = []
        sizes = [len(load) for load in self._loads]
        for router, local_load, load in zip(self._routers, self._loads, loads.split(sizes)):
            bias = getattr(router, BIAS)
            balance_step(bias.view(-1), load.to(bias.device), self.rate)
            measures.append(torch.stack(load_balance(load)))
            local_load.zero_()
        violation, entropy = torch.stack(measures).unbind(1)
        self._violation = violation if self._steps == 0 else self._violation + violation
        self._entropy = entropy if self._steps == 0 else self._entropy + entropy
        self._steps += 1

    def _sum(self, loads: Tensor) -> Tensor:
        """Sum the load of all routers over the processes that have them."""
        return reduce(loads, "sum")

    def metrics(self) -> dict[str, float]:
        """Return the load balance since the last call, as in [`load_balance`], averaged over steps.

        Returns:
            `expert_max_violation` and `expert_load_entropy`, averaged over layers, and
            `expert_max_violation_worst_layer`. Empty if there was no step, and for a model without routers.
        """
        if not self._routers or self._steps == 0:
            return {}
        violation, entropy = self._violation / self._steps, self._entropy / self._steps
        self._steps = 0
        return self._describe(violation, entropy)

    def _describe(self, violation: Tensor, entropy: Tensor) -> dict[str, float]:
        """Return the metrics for the largest violation and the entropy of each router."""
        return {
            "expert_max_violation": violation.mean().item(),
            "expert_max_violation_worst_layer": violation.max().item(),
            "expert_load_entropy": entropy.mean().item(),
        }


def routers(model: nn.Module) -> list[nn.Module]:
    """Return the routers of a model in order: the modules with a correction bias. A dense model has none.

    The router of a layer for multi-token prediction is among them only if that layer is trained.
    """
    ahead = MultiTokenPrediction.layer(model)
    is_idle = ahead is not None and not any(parameter.requires_grad for parameter in ahead.parameters())
    idle = {*ahead.modules()} if ahead is not None and is_idle else set()
    modules = [module for module in model.modules() if module not in idle]
    # Some models store the bias as a buffer, others as a parameter.
    return [m for m in modules if m._buffers.get(BIAS) is not None or m._parameters.get(BIAS) is not None]


def balance_step(bias: Tensor, load: Tensor, rate: float) -> None:
    """Update the bias of a router in place: `b_i += rate * sign(mean(c) - c_i)`.

    Args:
        bias: The correction bias, `[experts]`.
        load: The number of tokens that chose each expert, integers `[experts]`.
        rate: The rate of the update.
    """
    # Integers, multiplied by the number of experts, so that an expert with exactly the mean load keeps its bias.
    bias.add_(torch.sign(load.sum() - load * len(load)).to(bias.dtype), alpha=rate)


def load_balance(load: Tensor) -> tuple[Tensor, Tensor]:
    """Measure how evenly tokens are spread over the experts of a router.

    Args:
        load: The number of tokens that chose each expert, `[experts]`.

    Returns:
        Two scalars: the largest violation, `max_i c_i / mean(c) - 1` (0 if even; `experts / top_k - 1` if all tokens
        choose the same experts), and the relative entropy, `H(c / sum(c)) / log(experts)` (1 if even).
    """
    share = load.float() / load.sum()
    entropy = torch.special.entr(share).sum() / math.log(len(load)) if len(load) > 1 else torch.ones_like(share[0])
    return share.max() * len(load) - 1, entropy


class LossAhead(LoggedCallback):
    """A callback that logs `mtp_loss`, the loss of a layer for multi-token prediction, in nats/token."""

    def __init__(self) -> None:
        self._sum: Tensor | None = None
        self._count = 0

    def add(self, loss: Tensor) -> None:
        """Add the mean loss of a micro-batch."""
        self._sum = loss if self._sum is None else self._sum + loss
        self._count += 1

    def metrics(self) -> dict[str, float]:
        """Return the mean since the last call, over the micro-batches of all processes; none without such a layer."""
        if self._sum is None:
            return {}
        mean = reduce(self._sum / self._count, "mean")
        self._sum, self._count = None, 0
        return {"mtp_loss": mean.item()}


class StopOnSignal(TrainerCallback):
    """A callback that, on SIGTERM to any of the processes, saves a checkpoint after the step and ends training.

    Args:
        trainer: The trainer that it is a callback of.

    Attributes:
        received: Whether a process has received SIGTERM and, since all processes know of it, the run stops. A signal
            after the last step changes nothing, as the run ends anyway.
    """

    def __init__(self, trainer: Trainer):
        self.trainer = trainer
        self.received = self._is_signalled = False
        self._previous_handler: Any = None

    def on_train_begin(self, args, state, control, **kwargs):
        """Begin to listen for SIGTERM."""
        self._previous_handler = signal.signal(signal.SIGTERM, self._receive)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        self._is_signalled = True

    def on_step_end(self, args, state, control, **kwargs):
        """Save and stop if a process has received SIGTERM."""
        # All processes have to stop after the same step, whichever of them has received the signal.
        flag = torch.tensor(int(self._is_signalled), device=args.device)
        self.received = bool(self.trainer.accelerator.reduce(flag, "sum"))
        if self.received:
            control.should_save = control.should_training_stop = True

    def on_epoch_end(self, args, state, control, **kwargs):
        """Keep the checkpoint that a stopped run resumes from."""
        if self.received:
            # With `save_total_limit` 1 and `load_best_model_at_end`, `Trainer` ends by removing all but the best.
            args.save_total_limit = None

    def restore_handler(self) -> None:
        """Restore the handler of SIGTERM that was there before training, if training has begun."""
        if self._previous_handler is not None:
            signal.signal(signal.SIGTERM, self._previous_handler)
            self._previous_handler = None


class Intervals(TrainerCallback):
    """A callback that logs, evaluates and saves by the settings of this run, also where an earlier run had others.

    `Trainer` goes on by the intervals that a checkpoint has stored.
    """

    def on_train_begin(self, args, state, control, **kwargs):
        """Set the intervals."""
        state.compute_steps(args, state.max_steps)


__all__ = [
    "ExpertBalance",
    "Intervals",
    "LoggedCallback",
    "LossAhead",
    "Monitor",
    "StopOnSignal",
    "balance_step",
    "load_balance",
    "routers",
]
