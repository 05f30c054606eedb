"""Expert balancing without an auxiliary loss, as DeepSeek-V3 and Kimi Linear do it.

After each optimizer step, for each router, with `c_i` the number of tokens of the global batch that chose expert i:

    b_i <- b_i + rate * sign(mean(c) - c_i)

`b` is the router's `e_score_correction_bias`. It decides only which experts are chosen, not their weights, and has no
gradient. It is a buffer of the model, so checkpoints hold it.
"""

import math
from functools import partial

import torch
from accelerate.utils import reduce
from torch import Tensor, nn

from .monitor import LoggedCallback

BIAS = "e_score_correction_bias"


def routers(model: nn.Module) -> list[nn.Module]:
    """Return the routers of a model in order: the modules with a correction bias. A dense model has none."""
    # Some models store the bias as a buffer, others as a parameter.
    return [m for m in model.modules() if m._buffers.get(BIAS) is not None or m._parameters.get(BIAS) is not None]


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


class ExpertBalance(LoggedCallback):
    """A callback that balances the experts of the model that a `Trainer` trains. Without routers it does nothing.

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


__all__ = ["ExpertBalance", "balance_step", "load_balance", "routers"]
