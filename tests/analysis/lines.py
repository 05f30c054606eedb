"""Attention residuals written out from the equations, to compare measurements with.

`straight_line` of `tests/conversion/backbones.py` runs the modules of a standard model. `Reads` computes their inputs.
"""

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ..modeling_attnres.connections import connections_of

EPS = 1e-6


class Reads:
    """Compute the input of each reader in turn, `sum_i a_i s_i`, from the outputs `[v_0, v_1, ...]` before it.

    Args:
        member: The model with attention residuals, whose weights are used.
        hidden: A source that is left out of the sums of the readers after it. The other weights stay.
        masked: A source that is left out likewise, with a softmax over the other sources.
        uniform: A reader whose weights are all equal.
    """

    def __init__(
        self,
        member: PreTrainedModel,
        hidden: int | None = None,
        masked: int | None = None,
        uniform: int | None = None,
    ):
        self.connections = connections_of(member)
        norms = {name.removesuffix("_norm"): m for name, m in member.named_modules() if name.endswith("_res_norm")}
        names = {m: name.removesuffix("_proj") for name, m in member.named_modules() if name.endswith("_res_proj")}
        self.norms = [norms[names[connection]].weight for connection in self.connections]
        self.size = member.config.attn_res_block_size
        self.is_sum = member.config.attn_res_scale == "sum"
        self.hidden, self.masked, self.uniform = hidden, masked, uniform
        self.inputs: list[Tensor] = []
        self.weights: list[Tensor] = []
        self.outputs: list[Tensor] = []

    def __call__(self, outputs: list[Tensor]) -> Tensor:
        reader = len(outputs) - 1
        for tensor in outputs:
            if tensor.requires_grad:
                tensor.retain_grad()
        bounds = [(0, 1)] + [(b, min(b + self.size, reader + 1)) for b in range(1, reader + 1, self.size)]
        sources = [sum(outputs[a:b]) for a, b in bounds]
        query = self.connections[reader].weight[0] * self.norms[reader]
        if reader == self.uniform:
            query = query * 0
        keys = [s / (s.square().mean(-1, keepdim=True) + EPS).sqrt() for s in sources]
        logits = torch.stack([(query * key).sum(-1) for key in keys])
        # A block is hidden once it is finished. The last block, which may be shorter, is finished at the output.
        over = [b - a == self.size or reader == len(self.connections) - 1 or i == 0 for i, (a, b) in enumerate(bounds)]
        is_out = [over[i] and reader > 0 and i in (self.hidden, self.masked) for i in range(len(sources))]
        if self.masked is not None and any(is_out):
            logits[is_out.index(True)] = -torch.inf
        weights = torch.softmax(logits, 0)
        kept = [0.0 if out else 1.0 for out in is_out]
        total = sum(k * w.unsqueeze(-1) * s for k, w, s in zip(kept, weights, sources))
        self.weights.append(weights)
        self.outputs = outputs
        self.inputs.append(total * len(sources) if self.is_sum else total)
        return self.inputs[-1]


def loss_of(logits: Tensor, ids: Tensor) -> Tensor:
    """Return the loss in nats per predicted token."""
    return torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
