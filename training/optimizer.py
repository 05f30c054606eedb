"""Optimizers and schedules: AdamW for all parameters, or Muon for the hidden matrices and AdamW for the others.

    Muon     B <- mu B + (1 - mu) G,   W <- (1 - lr wd) W - lr 0.2 sqrt(max(W.shape)) NewtonSchulz((1 - mu) G + mu B)

The factor `0.2 sqrt(max(W.shape))` is Moonshot's: a step is as large as one of AdamW, so one learning rate serves both.

Kimi K3 was trained with the momentum of its Q, K and V projections cut along the heads, and each head's block
orthogonalised by itself ("Per-Head Muon", section 2.5 of its report, arXiv 2607.24653). The report does not say how the
weight that holds a head's keys and values is cut: here a head has one block for its keys and one for its values.
"""

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.optim._muon import DEFAULT_A, DEFAULT_B, DEFAULT_C, _adjust_lr, _zeropower_via_newtonschulz
from torch.optim.lr_scheduler import LambdaLR
from transformers import get_cosine_with_min_lr_schedule_with_warmup, get_wsd_schedule

from attnres import AttnResKimiK3Config
from attnres.parameter_kinds import parameters_by_kind, residual_rate_factors, rows_of_heads

from .recipe import OPTIMIZERS, SCHEDULES


def build_optimizer(
    model: nn.Module,
    *,
    name: str = "adamw",
    learning_rate: float,
    weight_decay: float = 0.1,
    residual_lr_factor: float = 1.0,
    betas: tuple[float, float] = (0.9, 0.95),
    eps: float = 1e-8,
    momentum: float = 0.95,
    muon_per_head: bool | None = None,
) -> torch.optim.Optimizer:
    """Build the optimizer of a model's trainable parameters, in groups: matrices, vectors, residual tensors.

    Args:
        model: Any model. Only parameters that require a gradient are taken, tied ones once.
        name: `"adamw"`, or `"muon"`: Muon for the matrices inside the decoder (routers included, and each expert's
            matrix by itself), AdamW for embeddings, the output head, convolution kernels and vectors.
        learning_rate: The rate of the backbone.
        weight_decay: The decay of matrices and kernels. Vectors (norms, biases, KDA's decay rates) and residual tensors
            do not decay.
        residual_lr_factor: The rate of the residual connections' tensors, as a factor of `learning_rate`. A connection
            may declare a further factor for some of its tensors (`ResidualConnection.rate_factors`).
        betas: AdamW's betas.
        eps: AdamW's eps.
        momentum: Muon's `mu`.
        muon_per_head: Whether Muon orthogonalises each head of the Q, K and V projections by itself. By default as the
            model was trained: true for Kimi K3, else false.

    Returns:
        `torch.optim.AdamW`, or a [`MuonAdamW`].

    Raises:
        ValueError: The name is unknown, there is nothing to train, or Muon gets parameters that DeepSpeed has
            partitioned.
    """
    if name not in OPTIMIZERS:
        raise ValueError(f"the optimizer is {name!r}, but must be {' or '.join(map(repr, OPTIMIZERS))}.")
    kinds = parameters_by_kind(model)
    if not any(kinds.values()):
        raise ValueError("no parameter of the model requires a gradient: there is nothing to train.")
    if name == "adamw":
        groups = _by_mesh(parameter_groups(model, learning_rate, weight_decay, residual_lr_factor))
        return torch.optim.AdamW(groups, lr=learning_rate, betas=betas, eps=eps, weight_decay=weight_decay)
    if any(hasattr(parameter, "ds_shape") for parameter in kinds["matrices"]):
        raise ValueError("Muon needs whole matrices, which DeepSpeed ZeRO-3 has cut up: set the optimizer to 'adamw'.")
    if muon_per_head is None:
        muon_per_head = getattr(getattr(model, "config", None), "model_type", None) == AttnResKimiK3Config.model_type
    heads, matrices = rows_of_heads(model) if muon_per_head else {}, defaultdict(list)
    for parameter in kinds["matrices"]:
        matrices[heads.get(parameter, ())].append(parameter)
    decaying = {"lr": learning_rate, "weight_decay": weight_decay}
    groups = [{"params": matrices[rows], **decaying, "method": "muon", "head_rows": rows} for rows in sorted(matrices)]
    groups += [{"params": kinds["others"], **decaying}] if kinds["others"] else []
    groups += [{"params": kinds["vectors"], **decaying, "weight_decay": 0.0}] if kinds["vectors"] else []
    groups = _by_mesh(groups + _residual_groups(model, kinds["residual"], learning_rate * residual_lr_factor))
    return MuonAdamW(groups, lr=learning_rate, weight_decay=weight_decay, betas=betas, eps=eps, momentum=momentum)


def parameter_groups(
    model: nn.Module, learning_rate: float, weight_decay: float, residual_lr_factor: float = 1.0
) -> list[dict[str, Any]]:
    """Group parameters for a PyTorch optimizer: matrices with weight decay, vectors without, and residual tensors.

    Args:
        model: Any model. Only parameters that require a gradient are taken.
        learning_rate: The rate of the backbone.
        weight_decay: The decay of matrices. Vectors (norms, biases) and residual tensors do not decay.
        residual_lr_factor: The rate of the residual connections' tensors, as a factor of `learning_rate`. A connection
            may declare a further factor for some of its tensors (`ResidualConnection.rate_factors`).

    Returns:
        The groups, without empty ones, each with `params`, `lr` and `weight_decay`.
    """
    kinds = parameters_by_kind(model)
    groups = [
        {"params": kinds["matrices"] + kinds["others"], "lr": learning_rate, "weight_decay": weight_decay},
        {"params": kinds["vectors"], "lr": learning_rate, "weight_decay": 0.0},
        *_residual_groups(model, kinds["residual"], learning_rate * residual_lr_factor),
    ]
    return [group for group in groups if group["params"]]


class MuonAdamW(torch.optim.Optimizer):
    """An optimizer that applies Muon to groups with `method="muon"`, and AdamW to the others.

    On a matrix it computes the same, bit for bit, as `torch.optim.Muon(adjust_lr_fn="match_rms_adamw")`. PyTorch's Muon
    refuses the stacked weights of experts, `[experts, out, in]`. Here each expert's matrix is updated by itself, in one
    batched call for all experts. Gate and up projections that the model stores as one matrix are updated as one. If a
    group has `head_rows`, such as `(128,)`, a matrix is cut into blocks of so many rows, and each is updated by itself.

    Sharded parameters (FSDP2, tensor parallel): each matrix is gathered for its update, one at a time, and every
    process computes the whole update. If the processes share out whole experts, each process updates its own.
    Parameters that an engine has flattened (FSDP1, DeepSpeed) are refused, since they are no longer matrices.

    Args:
        params: Parameter groups; `method` of a group is `"muon"` or, by default, `"adamw"`.
        lr: The rate of groups that set none.
        weight_decay: The decay of groups that set none.
        betas: AdamW's betas.
        eps: AdamW's eps.
        momentum: Muon's `mu`.

    Raises:
        ValueError: A parameter of a Muon group is neither a matrix nor a stack of matrices.
    """

    def __init__(
        self,
        params: list[dict[str, Any]],
        lr: float = 1e-3,
        weight_decay: float = 0.1,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        momentum: float = 0.95,
    ):
        # PyTorch's AdamW updates the other groups. It owns no parameters: `step` gives it the current ones, since
        # `load_state_dict` and FSDP2 replace the parameters of an optimizer.
        self._adamw = torch.optim.AdamW([{"params": []}], lr=lr, betas=betas, eps=eps, weight_decay=weight_decay)
        super().__init__(params, self._adamw.defaults | {"momentum": momentum, "method": "adamw", "head_rows": ()})
        for group in self.param_groups:
            _check_matrices(group)

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {"_adamw": self._adamw}

    @torch.no_grad()
    def step(self, closure=None):
        """Take one step, as any PyTorch optimizer does."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._adamw.state = self.state
        self._adamw.param_groups = [group for group in self.param_groups if group["method"] == "adamw"]
        self._adamw.step()
        self._adamw.param_groups = []
        for group in self.param_groups:
            if group["method"] == "muon":
                self._muon_step(group)
        return loss

    def _muon_step(self, group: dict[str, Any]) -> None:
        """Update the parameters of a Muon group."""
        _check_matrices(group)
        lr, momentum = group["lr"], group["momentum"]
        for parameter in group["params"]:
            gradient = parameter.grad
            if gradient is None:
                continue
            state = self.state[parameter]
            if not state:
                state["momentum_buffer"] = torch.zeros_like(gradient, memory_format=torch.preserve_format)
            average = state["momentum_buffer"].lerp_(gradient, 1 - momentum)
            update = _orthogonal(gradient.lerp(average, momentum), group.get("head_rows", ()))
            parameter.mul_(1 - lr * group["weight_decay"])
            # Blocks of heads have been scaled each by its own shape.
            rate = lr if group.get("head_rows") else _adjust_lr(lr, "match_rms_adamw", parameter.shape[-2:])
            parameter.add_(update, alpha=-rate)


def build_schedule(
    optimizer: torch.optim.Optimizer,
    name: str = "cosine",
    *,
    steps: int,
    warmup_steps: int = 0,
    decay_steps: int = 0,
    min_rate: float = 0.0,
    decay_type: str = "linear",
) -> LambdaLR:
    """Build a schedule of `transformers`, which multiplies every group's rate by the same factor.

    Args:
        optimizer: The optimizer.
        name: `"cosine"`: after the warm-up, half a cosine over all remaining steps (`decay_steps` has no effect).
            `"wsd"`: after the warm-up a stable rate, then a decay over the last `decay_steps`.
        steps: All steps of the run.
        warmup_steps: The steps over which the rate grows linearly from 0.
        decay_steps: The steps over which `"wsd"` decays.
        min_rate: The factor at the end, from 0 to 1.
        decay_type: The form of `"wsd"`'s decay: `"linear"`, `"cosine"` or `"1-sqrt"`.

    Returns:
        The schedule.

    Raises:
        ValueError: The name is unknown, `min_rate` is out of range, or the lengths do not fit into `steps`.
    """
    if name not in SCHEDULES:
        raise ValueError(f"the schedule is {name!r}, but must be {' or '.join(map(repr, SCHEDULES))}.")
    if not 0 <= min_rate <= 1:
        raise ValueError(f"min_rate is {min_rate}, but must be between 0 and 1: it is a factor of the learning rate.")
    decay = decay_steps if name == "wsd" else 0
    if min(warmup_steps, decay) < 0 or warmup_steps + decay > steps:
        raise ValueError(
            f"warmup_steps ({warmup_steps}) and decay_steps ({decay_steps}) must not be negative, and must fit into "
            f"the {steps} steps of the run."
        )
    if name == "cosine":
        return get_cosine_with_min_lr_schedule_with_warmup(optimizer, warmup_steps, steps, min_lr_rate=min_rate)
    schedule = get_wsd_schedule(
        optimizer, warmup_steps, decay_steps, num_training_steps=steps, decay_type=decay_type, min_lr_ratio=min_rate
    )
    (factor, *_) = schedule.lr_lambdas
    # That function would begin the warm-up at `min_rate`.
    return LambdaLR(optimizer, lambda step: step / warmup_steps if step < warmup_steps else factor(step))


def _residual_groups(model: nn.Module, parameters: list[nn.Parameter], rate: float) -> list[dict[str, Any]]:
    """Group residual tensors by the factors of the rate that their connections declare."""
    factors, groups = residual_rate_factors(model), defaultdict(list)
    for parameter in parameters:
        groups[factors.get(parameter, 1.0)].append(parameter)
    return [{"params": groups[f], "lr": rate * f, "weight_decay": 0.0} for f in sorted(groups, reverse=True)]


def _by_mesh(groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Split groups by the device mesh of their parameters, since one kernel updates a whole group."""
    split = []
    for group in groups:
        by_mesh = defaultdict(list)
        for parameter in group["params"]:
            by_mesh[parameter.device_mesh if isinstance(parameter, DTensor) else None].append(parameter)
        split += [{**group, "params": parameters} for parameters in by_mesh.values()]
    return split


def _check_matrices(group: dict[str, Any]) -> None:
    """Raise ValueError if a parameter of a Muon group is neither a matrix nor a stack of matrices."""
    for parameter in group["params"]:
        if group["method"] == "muon" and parameter.ndim not in (2, 3):
            raise ValueError(
                f"Muon needs whole matrices, but was given a tensor of shape {list(parameter.shape)}, as engines that "
                "flatten parameters do (FSDP1, DeepSpeed): use FSDP2, or set the optimizer to 'adamw'."
            )


def _orthogonal(update: Tensor, head_rows: Sequence[int] = ()) -> Tensor:
    """Orthogonalise a matrix `[out, in]`, or each matrix of a stack `[experts, out, in]`, by Newton-Schulz iterations.

    With `head_rows`, each block of a matrix is orthogonalised by itself, and scaled to a step at a rate of 1. The
    result of a sharded tensor is sharded in the same way.
    """
    if isinstance(update, DTensor):
        mesh, placements = update.device_mesh, update.placements
        # A stack that is sharded along its experts: each process has whole matrices.
        if update.ndim == 3 and all(p in (Replicate(), Shard(0)) for p in placements):
            local = _orthogonal(update.to_local())
            return DTensor.from_local(local, mesh, placements, shape=update.shape, stride=update.stride())
        whole = DTensor.from_local(_orthogonal(update.full_tensor(), head_rows), mesh, [Replicate()] * mesh.ndim)
        return whole.redistribute(placements=placements)

    if head_rows:
        parts = update.unflatten(0, (-1, sum(head_rows))).split(tuple(head_rows), dim=1)  # [heads, rows, in] each
        parts = [_orthogonal(part) * _adjust_lr(1.0, "match_rms_adamw", part.shape[-2:]) for part in parts]
        return torch.cat(parts, dim=1).flatten(0, 1)

    # A private function of PyTorch, with which the result is the same, bit for bit, as that of `torch.optim.Muon`.
    def newton_schulz(matrix: Tensor) -> Tensor:
        return _zeropower_via_newtonschulz(matrix, (DEFAULT_A, DEFAULT_B, DEFAULT_C), ns_steps=5, eps=1e-7)

    if update.ndim == 2:
        return newton_schulz(update)
    return torch.vmap(newton_schulz)(update) if len(update) else update


__all__ = ["MuonAdamW", "build_optimizer", "build_schedule", "parameter_groups"]
