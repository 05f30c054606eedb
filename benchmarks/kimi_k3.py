"""Compare Kimi K3 with Kimi Linear of the same shape, both with attention residuals and on the same weights.

Three forms of Kimi K3 are measured. One has the bounded decay and SiTU only, so its tensors are those of Kimi Linear.
The second adds the gates: of full rank in delta attention, and before the output projection of full attention. The
third is all of Kimi K3, with routed experts in a latent space.

Gates and latent space need other matrix products, whose time is arithmetic and not overhead. So each form is also
compared with its *control*: Kimi Linear with the same matrix products, made of the modules of `transformers`.
"""

import gc
from collections.abc import Callable, Iterator
from copy import copy
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode
from transformers import PreTrainedModel
from transformers.models.kimi_linear import modeling_kimi_linear

from attnres import AttnResConfig, AttnResKimiK3Config
from attnres.conversion.family import DEFAULT_CONNECTION
from attnres.kimi_k3_attnres import KimiK3MoE

from . import kimi_k3_packed
from .shapes import build, kimi_linear, tiny_kimi_linear, token_ids
from .stored import cell, markdown_table, verdict
from .timing import Setting, Times, Ways, compare, interleave
from .workloads import decoding, prefill, training_step

TOKENS, DECODED = 256, 8
DTYPES = "float32", "bfloat16"
TARGET = 1.03
BLOCK = 2  # layers in a block
LINEAR = "Kimi Linear"
BOUNDS, GATES, WHOLE = "bounds", "bounds and gates", "all"
CONTROL = "control of "  # prefix of a form's name
_GATE_FIELDS = ("use_full_rank_gate", "mla_use_output_gate")
# Workload -> function that prepares its ways, calls per repeat, and repeats per repeat of the setting.
WORKLOADS: dict[str, tuple[Callable[[dict[str, PreTrainedModel], Tensor], Ways], int, int]] = {
    "prefill": (prefill, 1, 2),
    "decoding": (decoding, DECODED, 4),
    "training step": (training_step, 1, 1),
}
# Name of a ratio -> its two ways.
PAIRS: dict[str, tuple[str, str]] = {
    f"{first} / {second}": (first, second)
    for first, second in (("Kimi K3", LINEAR), ("Kimi K3", "control"), ("control", LINEAR))
}


def measure(setting: Setting) -> Iterator[dict]:
    """Yield one row per dtype, workload and form, then those of packed experts."""
    config = linear_config(setting.quick)
    for dtype in DTYPES[:1] if setting.quick else DTYPES:
        models = variants(config, getattr(torch, dtype), setting.device)
        ids = token_ids(config, 16 if setting.quick else TOKENS, 1, setting.device)
        for model in models.values():
            balance(model, ids.shape[1])
        for workload, (prepare, calls, times) in WORKLOADS.items():
            products = {name: count_products(prepare({name: model}, ids)[name]) for name, model in models.items()}
            ways, repeats = prepare(models, ids), replace(setting, repeats=times * setting.repeats)
            seconds = interleave(ways, repeats, calls=calls)
            for form in (BOUNDS, GATES, WHOLE):
                row: dict[str, Any] = {"dtype": dtype, "workload": workload, "form": form, "tokens": ids.shape[1]}
                row["products"] = products[form] / products[LINEAR]
                yield row | compare(compared(seconds, form), PAIRS)
        del models
        gc.collect()
    yield from kimi_k3_packed.measure(setting)


def compared(seconds: dict[str, Times], form: str) -> dict[str, Times]:
    """Return the times of Kimi Linear, of a form of Kimi K3, and of its control."""
    control = LINEAR if form == BOUNDS else CONTROL + form
    return {LINEAR: seconds[LINEAR], "Kimi K3": seconds[form], "control": seconds[control]}


def linear_config(quick: bool) -> AttnResConfig:
    """Return the configuration of Kimi Linear with attention residuals."""
    config = tiny_kimi_linear() if quick else kimi_linear()
    fields = config.to_dict() | {"residual_connection": DEFAULT_CONNECTION, "attn_res_block_size": 2 * BLOCK}
    return AttnResConfig.from_dict(fields)


def k3_config(linear: AttnResConfig, **features: Any) -> AttnResKimiK3Config:
    """Return the configuration of Kimi K3 in the shape of a Kimi Linear, with the bounded decay and SiTU.

    Args:
        linear: the configuration of Kimi Linear.
        **features: fields of other features.
    """
    names = (
        *("vocab_size", "hidden_size", "num_hidden_layers", "intermediate_size", "rms_norm_eps", "layer_types"),
        *("num_attention_heads", "num_key_value_heads", "q_lora_rank", "kv_lora_rank", "v_head_dim"),
        *("qk_nope_head_dim", "qk_rope_head_dim", "linear_head_dim", "linear_num_heads", "linear_conv_kernel_dim"),
        *("num_local_experts", "num_experts_per_tok", "n_shared_experts", "moe_intermediate_size"),
        *("norm_topk_prob", "n_group", "topk_group", "routed_scaling_factor", "tie_word_embeddings"),
        *("bos_token_id", "eos_token_id", "pad_token_id"),
    )
    without = dict.fromkeys(_GATE_FIELDS, False) | {"routed_expert_hidden_size": None, "latent_moe_use_norm": False}
    fields: dict[str, Any] = {name: getattr(linear, name) for name in names} | without | features
    dense = (linear.mlp_layer_types or []).count("dense")
    return AttnResKimiK3Config(attn_res_block_size=BLOCK, first_k_dense_replace=dense, **fields)


def variants(linear: AttnResConfig, dtype: torch.dtype, device: str) -> dict[str, PreTrainedModel]:
    """Return the compared models by name, which share their tensors; see [`share`]."""
    gates = dict.fromkeys(_GATE_FIELDS, True)
    latent = {"routed_expert_hidden_size": linear.hidden_size // 2, "latent_moe_use_norm": True}
    models = {LINEAR: build(linear, dtype, device)}
    for form, features in {BOUNDS: {}, GATES: gates, WHOLE: gates | latent}.items():
        models[form] = build(k3_config(linear, **features), dtype, device)
        share(models[LINEAR], models[form])
        if features:
            models[CONTROL + form] = control = build(linear, dtype, device)
            share(models[LINEAR], control)
            add_products(control, models[form])
    return models


def share(model: PreTrainedModel, other: PreTrainedModel) -> None:
    """Let another model have the tensors of a model that have the same name, shape and dtype.

    The rates `A_log` mean something else to a bounded decay, and have another start. With Kimi Linear's it would be
    nearly constant, and denormal numbers would slow down its exponentials.
    """
    tensors = dict(model.named_parameters())
    is_bounded = isinstance(other.config, AttnResKimiK3Config)
    for name, tensor in [*other.named_parameters()]:
        if is_bounded and name.endswith("A_log"):
            continue
        shared = tensors.get(name, tensor)
        if (shared.shape, shared.dtype) == (tensor.shape, tensor.dtype):
            owner, _, key = name.rpartition(".")
            setattr(other.get_submodule(owner), key, shared)


class BalancedRouter(modeling_kimi_linear.KimiLinearTopkRouter):
    """A router that sends each token to experts that are drawn once. The cost of experts depends on the choice."""

    drawn: Tensor  # the experts of each token, `[tokens, top_k]`

    def forward(self, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return logits `[tokens, experts]`, and weights and chosen experts `[tokens, top_k]`."""
        logits, weights, chosen = super().forward(hidden_states)
        return logits, weights, self.drawn[: chosen.shape[0]]


def balance(model: PreTrainedModel, tokens: int) -> None:
    """Let all experts of a model be chosen equally often, and by the same tokens in each model.

    Args:
        model: the model, which is changed.
        tokens: the largest number of tokens in a call.
    """
    generator = torch.Generator().manual_seed(0)
    for module in model.modules():
        if isinstance(module, modeling_kimi_linear.KimiLinearTopkRouter):
            order = torch.rand(tokens, module.num_experts, generator=generator).argsort(-1)
            module.__class__ = BalancedRouter
            module.drawn = order[:, : module.top_k].to(module.weight.device)


def add_products(model: PreTrainedModel, k3: PreTrainedModel) -> None:
    """Give a Kimi Linear the matrix products of a Kimi K3, whose weights it shares.

    Args:
        model: the Kimi Linear, which is changed.
        k3: a Kimi K3 of the same shape.
    """
    for layer, of_k3 in zip(model.model.layers, k3.model.layers):
        attention, mlp = layer.self_attn, layer.mlp
        if layer.block_type == "full_attention":
            attention.o_proj = GatedProjection(attention.o_proj, of_k3.self_attn.g_proj)
            attention.register_forward_pre_hook(attention.o_proj.compute_gate, with_kwargs=True)
        else:
            attention.g_a_proj, attention.g_b_proj = of_k3.self_attn.g_proj, nn.Identity()
        if getattr(of_k3.mlp, "is_latent", False):
            mlp.experts = LatentExperts(of_k3.mlp)


class GatedProjection(nn.Module):
    """An output projection whose input is gated by a projection of the attention's input."""

    def __init__(self, projection: nn.Linear, gate: nn.Linear):
        super().__init__()
        self.projection, self.gate = projection, gate
        self.logits = torch.empty(0)

    def compute_gate(self, attention: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Compute the logits before the attention is called with these arguments."""
        self.logits = self.gate(args[0] if args else kwargs["hidden_states"])

    def forward(self, x: Tensor) -> Tensor:
        """Compute `[batch, seq, hidden]` for `[batch, seq, heads * d_v]`."""
        logits, self.logits = self.logits, torch.empty(0)
        return self.projection(x * logits.sigmoid())


class LatentExperts(nn.Module):
    """Experts of Kimi Linear between two projections."""

    def __init__(self, mlp: KimiK3MoE):
        super().__init__()
        config = copy(mlp.config)
        config.hidden_act, config.hidden_size = "silu", config.routed_expert_hidden_size
        with torch.device("meta"):
            self.experts = modeling_kimi_linear.KimiLinearExperts(config)
        self.experts.gate_up_proj, self.experts.down_proj = mlp.experts.gate_up_proj, mlp.experts.down_proj
        self.down, self.up = mlp.routed_expert_down_proj, mlp.routed_expert_up_proj

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Compute `[tokens, hidden]` for an input of that shape."""
        return self.up(self.experts(self.down(hidden_states), top_k_index, top_k_weights))


def count_products(way: Callable[[], object]) -> int:
    """Count the multiply-adds in the matrix products of a call."""

    # PyTorch does not count the grouped products of experts: `[rows, k] @ [experts, k, n]` or `[m, rows] @ [rows, n]`.
    def grouped(first: tuple[int, ...], second: tuple[int, ...], *args: Any, **kwargs: Any) -> int:
        return 2 * first[0] * first[1] * second[-1]

    mapping = {torch.ops.aten._grouped_mm: grouped}
    with FlopCounterMode(display=False, custom_mapping=mapping) as counter:
        way()
    return counter.get_total_flops() // 2


def tables(rows: list[dict]) -> dict[str, str]:
    """Return the tables of all rows, by their name in the README."""
    packed = [row for row in rows if row["form"] == kimi_k3_packed.PACKED]
    rows = [row for row in rows if row["form"] != kimi_k3_packed.PACKED]
    ratio, overhead, arithmetic = PAIRS
    columns = ["dtype", "workload", "form", ratio, "multiply-adds", arithmetic, overhead, "target"]
    forms = markdown_table(
        "Forms of Kimi K3, time as a ratio to Kimi Linear of the same shape",
        columns,
        [
            [
                *(row[key] for key in columns[:3]),
                *(cell(row, ratio, 3), f"{row['products']:.3f}", cell(row, arithmetic, 3), cell(row, overhead, 3)),
                verdict(row["ratios"][overhead]["median"], TARGET),
            ]
            for row in rows
        ],
    )
    return {"kimi_k3": "\n\n".join([forms, *([kimi_k3_packed.table(packed)] if packed else [])])}
