"""What a run shows beside loss and gradient norm: tokens/s, model FLOP use, and how the depth attention is spread.

model FLOP use = tokens/s * FLOPs/token / (peak FLOP/s * devices)
FLOPs/token    = 6 N + 3 A,   N: activated parameters without the embedding table, A: forward FLOPs of mixing tokens
"""

import math
import re
import time

import torch
from accelerate import PartialState
from accelerate.utils import reduce
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel, TrainerCallback

from attnres.configuration import count_parameters

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


def depth_attention_summary(depth_attentions: tuple[Tensor | None, ...]) -> dict[str, float]:
    """How the weights `a` `[sources, batch, seq]` of each aggregation are spread; means over those with K > 1 sources.

    They are taken as shares of their sum, since sigmoids do not add up to one.

    `depth_entropy`: `H(a) / log K`, 1 for uniform weights, 0 for a single source; `depth_weight_nearest` and
    `depth_weight_embedding`: the weight on the last and on the first source.
    """
    several = [weights.float() for weights in depth_attentions if weights is not None and len(weights) > 1]
    if not several:
        return {}
    several = [a / a.sum(0) for a in several]
    measures = {
        "depth_entropy": [torch.special.entr(a).sum(0).mean() / math.log(len(a)) for a in several],
        "depth_weight_nearest": [a[-1].mean() for a in several],
        "depth_weight_embedding": [a[0].mean() for a in several],
    }
    return {name: torch.stack(values).mean().item() for name, values in measures.items()}


class Monitor(TrainerCallback):
    """Measures throughput over each logging window, and depth attention at its end. [`metrics`] has the results.

    - `tokens_per_second`: of all processes. Every position of a batch counts: packed batches have no padding. The time
      is that of training steps with their data loading, without evaluation and saving.
    - `model_flop_use`: of the devices' peak, where that is known and all weights are trained.
    - `depth_entropy`, `depth_weight_nearest`, `depth_weight_embedding` of a model that records depth attentions, see
      [`depth_attention_summary`]: on the first `slice_tokens` tokens of each process's last batch. It costs one forward
      pass over them, without gradient, for each line of the log; that time counts in no window.
    """

    def __init__(self, slice_tokens: int = 256):
        self.slice_tokens = slice_tokens
        self._handle = None
        self._metrics: dict[str, float] = {}

    def metrics(self) -> dict[str, float]:
        """The measurements of the logging window that has just ended; empty if they have been taken already."""
        metrics, self._metrics = self._metrics, {}
        return metrics

    def on_train_begin(self, args, state, control, model=None, **kwargs):
        self.on_train_end(args, state, control)
        self._flops: dict[int, float | None] = {}
        self._has_depth_attention = "depth_attentions" in (getattr(model, "_can_record_outputs", None) or {})
        self._device = args.device
        self._tokens = 0
        self._ids: Tensor | None = None
        self._seconds, self._since = 0.0, time.perf_counter()
        self._handle = model.register_forward_pre_hook(self._see_batch, with_kwargs=True)

    def on_train_end(self, args, state, control, **kwargs):
        if self._handle is not None:
            self._handle.remove()
            self._handle = None

    # Kept out of compiled graphs: there is nothing to compile, and the batch is to be seen on each call.
    @torch.compiler.disable
    def _see_batch(self, model: nn.Module, inputs: tuple, kwargs: dict) -> None:
        if model.training and (ids := kwargs.get("input_ids", inputs[0] if inputs else None)) is not None:
            self._tokens += ids.numel()
            self._ids = ids

    def on_step_end(self, args, state, control, model=None, **kwargs):
        self._count_time()
        if control.should_log:
            self._end_window(model)

    def on_epoch_end(self, args, state, control, model=None, **kwargs):
        if control.should_log:
            self._end_window(model)

    def on_evaluate(self, args, state, control, **kwargs):
        self._since = time.perf_counter()

    on_save = on_evaluate

    def _count_time(self) -> None:
        now = time.perf_counter()
        self._seconds += now - self._since
        self._since = now

    def _end_window(self, model: PreTrainedModel) -> None:
        if not self._tokens:
            return  # already ended, or a model without `input_ids`
        tokens = reduce(torch.tensor(self._tokens, device=self._device), "sum").item()  # waits for the device
        tokens //= getattr(model, "tp_size", None) or 1  # the processes of a tensor-parallel group share their batches
        self._count_time()
        self._metrics = {"tokens_per_second": tokens / self._seconds}
        flops, peak = self._training_flops(model), peak_flops(_device_name(self._device))
        if flops is not None and peak is not None:
            use = tokens / self._seconds * flops / (peak * PartialState().num_processes)
            self._metrics["model_flop_use"] = use
        self._metrics |= self._depth_attention(model)
        self._tokens, self._seconds, self._since = 0, 0.0, time.perf_counter()

    def _training_flops(self, model: PreTrainedModel) -> float | None:
        if not all(parameter.requires_grad for parameter in model.parameters()):
            return None  # a frozen weight has no gradient: 6 N would be too much
        length = self._ids.shape[-1]
        if length not in self._flops:
            try:
                self._flops[length] = flops_per_token(model.config, length)
            except (AttributeError, ValueError):
                self._flops[length] = None
        return self._flops[length]

    @torch.no_grad()
    def _depth_attention(self, model: PreTrainedModel) -> dict[str, float]:
        if not self._has_depth_attention:
            return {}
        training = model.training
        model.eval()  # no dropout, no random numbers; and no forward pass that expert balancing counts
        ids = self._ids[:1, : self.slice_tokens]
        outputs = model(input_ids=ids, use_cache=False, output_depth_attentions=True, logits_to_keep=1)
        model.train(training)
        summary = depth_attention_summary(outputs.depth_attentions or ())
        if not summary:  # other connections have no such weights: once is enough to see it
            self._has_depth_attention = False
            return {}
        mean = reduce(torch.tensor(list(summary.values()), device=self._device), "mean")
        return dict(zip(summary, mean.tolist()))


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


__all__ = ["Monitor", "PEAK_FLOPS", "depth_attention_summary", "flops_per_token", "peak_flops"]
