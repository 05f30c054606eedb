"""What a run shows beside loss and gradient norm: tokens/s, model FLOP use, depth attention, and magnitudes.

model FLOP use = tokens/s * FLOPs/token / (peak FLOP/s * devices)
FLOPs/token    = 6 N + 3 A,   N: activated parameters without the embedding table, A: forward FLOPs of mixing tokens
"""

import re
import time
from collections.abc import Iterable
from typing import Any

import torch
from accelerate import PartialState
from accelerate.utils import reduce
from torch import Tensor, nn
from transformers import PreTrainedConfig

from attnres.analysis.depth_attention import share_measures
from attnres.analysis.watching import connections_of, measuring, watched
from attnres.configuration import count_parameters

from .logged import LoggedCallback

# Peak dense bfloat16 FLOP/s of one device, with float32 accumulation, from the vendors' data sheets (NVIDIA's state
# twice as much, "with sparsity"). The first pattern found in the device's name counts; a name without one is unknown.
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
    """The peak dense bfloat16 FLOP/s of a device by the name PyTorch gives it; `None` where it is not known."""
    return next((peak for pattern, peak in PEAK_FLOPS.items() if re.search(pattern, device_name)), None)


def flops_per_token(config: PreTrainedConfig, length: int) -> float:
    """FLOPs of training (forward and backward) on one token of a sequence of this length.

    `6 N`: each activated parameter but those of the embedding table multiplies and adds once forward, and twice as much
    backward; the output head counts, tied or not. Mixing tokens, forward: softmax attention `2 heads (qk_dim + v_dim)
    length` (PaLM's convention, which does not halve it for causality); KDA's recurrence on its state, `[k_dim, v_dim]`
    per head, `6 heads k_dim v_dim`. Not counted: norms, activations, depth attention (under 1%), and what gradient
    checkpointing repeats.

    Raises:
        AttributeError, ValueError: no causal language model is built from this configuration.
    """
    config = config.get_text_config()
    count = count_parameters(config)
    parameters = count.activated_non_embedding + config.vocab_size * config.hidden_size
    layers = config.num_hidden_layers
    heads = config.num_attention_heads
    linear = (getattr(config, "layer_types", None) or []).count("linear_attention")
    if getattr(config, "qk_nope_head_dim", None):
        query_and_value = config.qk_nope_head_dim + config.qk_rope_head_dim + config.v_head_dim
    else:
        query_and_value = 2 * (getattr(config, "head_dim", None) or config.hidden_size // heads)
    mixing = (layers - linear) * 2 * heads * query_and_value * length
    if linear:
        mixing += linear * 6 * config.linear_num_heads * config.linear_head_dim**2
    return 6 * parameters + 3 * mixing


def depth_attention_summary(depth_attentions: Iterable[Tensor | None]) -> dict[str, float]:
    """How the weights `a` `[sources, batch, seq]` of each reader are spread; means over those with K > 1 sources.

    They are taken as shares of their sum, since sigmoids do not add up to one.

    `depth_entropy`: `H(a) / log K`, 1 for uniform weights, 0 for a single source; `depth_distance`: from uniform
    weights, `sum_i |a_i - 1/K| / 2`, the share of the weight that would have to move; `depth_weight_nearest` and
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
    return {name: torch.stack([of.mean() for of in values]).mean().item() for name, values in measures.items()}


class Monitor(LoggedCallback):
    """Adds to the log the throughput over each window between two lines, and at its end what happens across the depth.

    - `tokens_per_second`: of all processes. Every position of a batch counts, padding too. The time is that of training
      steps with their data loading, without evaluation and saving.
    - `model_flop_use`: of the devices' peak, where that is known and all weights are trained.

    Of a model of the family, on the first `slice_tokens` tokens of each process's last batch, without padding. It costs
    one forward pass over them, without gradient, for each line of the log; that time counts in no window:

    - `magnitude_output`: the root mean square, over tokens and channels, of what the output reads, before its norm;
      `magnitude_growth`: that over the same of what the first sublayer reads, the embedding; `magnitude_largest`: the
      largest of any sublayer's input. In a residual stream they grow with depth; with attention residuals they stay
      bounded.
    - `depth_entropy`, `depth_distance`, `depth_weight_nearest`, `depth_weight_embedding` of attention residuals, see
      [`depth_attention_summary`].

    Training is the same with it and without, random numbers included.
    """

    def __init__(self, slice_tokens: int = 256):
        self.slice_tokens = slice_tokens
        self._handle = None
        self._tokens = 0

    def metrics(self) -> dict[str, float]:
        """The measurements of the window, which ends; empty if it has just begun. All processes call it together."""
        if not self._tokens:
            return {}  # just begun, or a model without `input_ids`
        tokens = reduce(torch.tensor(self._tokens, device=self._device), "sum").item()  # waits for the device
        tokens //= getattr(self._model, "tp_size", None) or 1  # a tensor-parallel group's processes share their batches
        self._count_time()
        metrics = {"tokens_per_second": tokens / self._seconds}
        flops, peak = self._training_flops(), peak_flops(_device_name(self._device))
        if flops is not None and peak is not None:
            metrics["model_flop_use"] = tokens / self._seconds * flops / (peak * PartialState().num_processes)
        if self._has_connections:
            metrics |= self._across_depth()
        self._tokens, self._seconds, self._since = 0, 0.0, time.perf_counter()
        return metrics

    def on_train_begin(self, args, state, control, model=None, **kwargs):
        super().on_train_begin(args, state, control, **kwargs)
        self.on_train_end(args, state, control)
        self._model = model
        self._flops: dict[int, float | None] = {}
        self._has_connections = bool(connections_of(model))
        self._device = args.device
        self._seconds, self._since = 0.0, time.perf_counter()
        self._handle = model.register_forward_pre_hook(self._see_batch, with_kwargs=True)

    def on_train_end(self, args, state, control, **kwargs):
        if self._handle is not None:
            self._handle.remove()
        self._handle = self._model = None
        self._tokens = 0

    # Kept out of compiled graphs: there is nothing to compile, and the batch is to be seen on each call.
    @torch.compiler.disable
    def _see_batch(self, model: nn.Module, inputs: tuple, kwargs: dict) -> None:
        if model.training and (ids := kwargs.get("input_ids", inputs[0] if inputs else None)) is not None:
            self._tokens += ids.numel()
            self._ids, self._mask = ids, kwargs.get("attention_mask")

    def on_step_end(self, args, state, control, **kwargs):
        self._count_time()

    def on_evaluate(self, args, state, control, **kwargs):
        self._since = time.perf_counter()

    on_save = on_evaluate

    def _count_time(self) -> None:
        now = time.perf_counter()
        self._seconds += now - self._since
        self._since = now

    def _training_flops(self) -> float | None:
        if not all(parameter.requires_grad for parameter in self._model.parameters()):
            return None  # a frozen weight has no gradient: 6 N would be too much
        length = self._ids.shape[-1]
        if length not in self._flops:
            try:
                self._flops[length] = flops_per_token(self._model.config, length)
            except (AttributeError, ValueError):
                self._flops[length] = None
        return self._flops[length]

    @torch.no_grad()
    def _across_depth(self) -> dict[str, float]:
        squares: list[Tensor] = []
        weights: list[Tensor] = []

        def read(connection: nn.Module, forward: Any, *arguments: Any) -> Any:
            result = forward(*arguments)
            squares.append(result[0].float().square().mean().to(self._device))
            if result[1] is not None:
                weights.append(result[1].to(self._device))
            return result

        # In eval mode: no dropout, no random numbers; and no forward pass that expert balancing counts.
        with measuring(self._model), watched(self._model, read):
            self._model(input_ids=self._slice(), use_cache=False, logits_to_keep=1)
        summary = depth_attention_summary(weights)
        found = torch.stack([*squares, *torch.tensor(list(summary.values()), dtype=torch.float32, device=self._device)])
        found = reduce(found, "mean")
        sizes, means = found[: len(squares)].sqrt(), found[len(squares) :]  # of readers by depth, the output last
        magnitudes = {
            "magnitude_output": sizes[-1],
            "magnitude_growth": sizes[-1] / sizes[0],
            "magnitude_largest": sizes[:-1].max(),
        }
        return {name: value.item() for name, value in magnitudes.items()} | dict(zip(summary, means.tolist()))

    def _slice(self) -> Tensor:
        """The first tokens of the last batch's first sequence, `[1, tokens]`, without its padding."""
        ids, mask = self._ids[0], self._mask
        if isinstance(mask, Tensor) and mask.shape == self._ids.shape and mask[0].any():
            ids = ids[mask[0].bool()]
        return ids[None, : self.slice_tokens]


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


__all__ = ["Monitor", "PEAK_FLOPS", "depth_attention_summary", "flops_per_token", "peak_flops"]
