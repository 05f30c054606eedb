"""Expert balancing without an auxiliary loss, as DeepSeek-V3 and Kimi Linear do it.

After each optimizer step, for each router, with `c_i` the tokens that chose expert i in the whole global batch:

    b_i <- b_i + rate * sign(mean(c) - c_i)

`b` is the router's `e_score_correction_bias`. It decides only which experts are chosen, not their weights, and has no
gradient. It is a buffer of the model, so checkpoints hold it.
"""

import math
from functools import partial

import torch
from accelerate.utils import reduce
from torch import Tensor, nn

from .logged import LoggedCallback

BIAS = "e_score_correction_bias"


def routers(model: nn.Module) -> list[nn.Module]:
    """The modules of a model that own a correction bias, in order; none for a dense model."""
    return [m for m in model.modules() if m._buffers.get(BIAS) is not None or m._parameters.get(BIAS) is not None]


def balance_step(bias: Tensor, load: Tensor, rate: float) -> None:
    """`b_i += rate * sign(mean(c) - c_i)`, in place; `bias` and the integer counts `load` are `[experts]`."""
    # In integers, times the number of experts: an expert with exactly the mean load keeps its bias.
    bias.add_(torch.sign(load.sum() - load * len(load)).to(bias.dtype), alpha=rate)


def load_balance(load: Tensor) -> tuple[Tensor, Tensor]:
    """How even the counts `load` `[experts]` are.

    Returns:
        The largest violation, `max_i c_i / mean(c) - 1` (0: even; experts / top_k - 1: all tokens choose the same
        ones), and the entropy of the shares over its maximum, `H(c / sum(c)) / log(experts)` (1: even). Scalars.
    """
    share = load.float() / load.sum()
    entropy = torch.special.entr(share).sum() / math.log(len(load)) if len(load) > 1 else torch.ones_like(share[0])
    return share.max() * len(load) - 1, entropy


class ExpertBalance(LoggedCallback):
    """Balances the experts of the model that a `Trainer` trains; does nothing to a model without correction biases.

    The load is what the routers return, over all micro-batches of a step and all processes. Only the forward passes of
    training count: not those of evaluation, and not those that gradient checkpointing repeats. The load balance is in
    the log, see [`metrics`].

    The biases are made float32: a step of 0.001 would be lost in bfloat16. Pass this callback to the constructor of the
    `Trainer`, so that a checkpoint is read into float32 too.

    Args:
        rate: of the update, the published 0.001 by default; 0 only measures.

    Raises:
        ValueError: the rate is negative; a module with a correction bias does not return which experts it chose; or the
            biases of a model with adapters are to be changed, which an adapter's file does not hold.
        RuntimeError: no router ran in the first step.
    """

    def __init__(self, rate: float = 0.001):
        if rate < 0:
            raise ValueError(f"the rate of expert balancing is {rate}, but must not be negative.")
        self.rate = rate
        self._routers: list[nn.Module] = []
        self._handles: list = []

    def on_init_end(self, args, state, control, model=None, **kwargs):
        for router in routers(model):
            bias = getattr(router, BIAS)
            bias.data = bias.data.float()

    def on_train_begin(self, args, state, control, model=None, **kwargs):
        super().on_train_begin(args, state, control, **kwargs)
        self.on_init_end(args, state, control, model)
        self.on_train_end(args, state, control)
        self._routers = routers(model)
        if self._routers and self.rate and hasattr(model, "peft_config"):
            raise ValueError("an adapter does not hold the routers' correction biases: set the balancing rate to 0.")
        self._counting = self._measured = False
        self._violation = self._entropy = None
        self._steps = 0
        biases = [getattr(router, BIAS) for router in self._routers]
        self._loads = [torch.zeros(bias.numel(), dtype=torch.long, device=bias.device) for bias in biases]
        if not self._routers:
            return
        # What runs between a call of the whole model and its return is a forward pass; what gradient checkpointing
        # repeats runs later, in the backward pass.
        self._handles = [
            model.register_forward_pre_hook(self._begin_forward),
            model.register_forward_hook(self._end_forward, always_call=True),
        ]
        for router, load in zip(self._routers, self._loads):
            self._handles.append(router.register_forward_hook(partial(self._count, load)))

    def on_train_end(self, args, state, control, **kwargs):
        while self._handles:
            self._handles.pop().remove()

    def _begin_forward(self, model: nn.Module, inputs: tuple) -> None:
        self._counting = model.training

    def _end_forward(self, model: nn.Module, inputs: tuple, output) -> None:
        self._counting = False

    def _count(self, load: Tensor, router: nn.Module, inputs: tuple, output) -> None:
        if not self._counting:
            return
        outputs = output if isinstance(output, tuple) else (output,)
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
        if not self._routers:
            return
        device = self._loads[0].device
        loads = reduce(torch.cat([load.to(device) for load in self._loads]), "sum")
        if not self._measured and not loads.any():
            raise RuntimeError("no router ran in this step: the load of the experts cannot be counted on this model.")
        self._measured = True
        measures = []
        for router, own_load, load in zip(self._routers, self._loads, loads.split([len(own) for own in self._loads])):
            bias = getattr(router, BIAS)
            balance_step(bias.view(-1), load.to(bias.device), self.rate)
            measures.append(torch.stack(load_balance(load)))
            own_load.zero_()
        violation, entropy = torch.stack(measures).unbind(1)
        self._violation = violation if self._steps == 0 else self._violation + violation
        self._entropy = entropy if self._steps == 0 else self._entropy + entropy
        self._steps += 1

    def metrics(self) -> dict[str, float]:
        """Load balance of the steps since the last call: means over steps, and over layers or of the worst layer.

        `expert_max_violation`, `expert_max_violation_worst_layer` and `expert_load_entropy`, as in [`load_balance`].
        Empty when there was no step, and for a model without routers.
        """
        if not self._routers or self._steps == 0:
            return {}
        violation, entropy = self._violation / self._steps, self._entropy / self._steps
        self._steps = 0
        return {
            "expert_max_violation": violation.mean().item(),
            "expert_max_violation_worst_layer": violation.max().item(),
            "expert_load_entropy": entropy.mean().item(),
        }


__all__ = ["ExpertBalance", "balance_step", "load_balance", "routers"]
