"""Kimi K3 as straight lines of float64, written from a description of the released model: the yardstick of its tests.

It works on the tensors and the fields of a released checkpoint, under their released names. Nothing of the package or
of transformers' models is used; nothing is cached, chunked, batched over experts or fused. `MISREADINGS` are mistakes
that other programs have made, or that the description invites. Each changes one line.
"""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

MISREADINGS = (
    *("blocks count sublayers", "block begins with the mixed input", "embedding is counted twice"),
    *("output reads the last sum", "values are normed", "scores are divided by sqrt(d)", "key norm has no weight"),
    *("decay is clamped", "decay has no bound", "A_log is outside of the sigmoid", "A_log is per channel"),
    *("convolution has no activation", "output gate of KDA is silu", "queries are not scaled", "beta is not a sigmoid"),
    *("latent norms have the model's epsilon", "full attention has no gate", "gate of full attention is silu"),
    *("SiTU leaves up unchanged", "SiTU is SiLU", "shared experts have SiLU", "dense MLPs have SiLU"),
    *("bias is in the weights", "router has a softmax", "weights are not renormalised", "scaling follows the norm"),
    *("experts have no norm", "groups are masked by zero", "w1 and w3 are exchanged"),
)


def logits(
    tensors: Mapping[str, Tensor], fields: Mapping[str, Any], token_ids: Tensor, misreading: str | None = None
) -> Tensor:
    """Compute the logits `[batch, seq, vocab]` in float64 of unpadded tokens.

    Args:
        tensors: those of the text model by released name, without a prefix.
        fields: those of the text model's `config.json`.
        token_ids: `[batch, seq]`.
        misreading: one of `MISREADINGS`.
    """
    assert misreading is None or misreading in MISREADINGS
    return _Model(tensors, fields, misreading).logits(token_ids)


class _Model:
    def __init__(self, tensors: Mapping[str, Tensor], fields: Mapping[str, Any], misreading: str | None):
        self.tensors = {name.removeprefix("model."): tensor.detach().double() for name, tensor in tensors.items()}
        self.fields, self.misreading = fields, misreading
        self.eps = fields["rms_norm_eps"]

    def is_misread(self, misreading: str) -> bool:
        assert misreading in MISREADINGS
        return self.misreading == misreading

    def weight(self, name: str) -> Tensor:
        return self.tensors[f"{name}.weight"]

    def logits(self, token_ids: Tensor) -> Tensor:
        fields, size = self.fields, self.fields.get("attn_res_block_size")
        embedding = self.weight("embed_tokens")[token_ids]
        if not size:  # the standard residual stream
            x = embedding
            for i in range(fields["num_hidden_layers"]):
                x = x + self.attention(i, self.norm(f"layers.{i}.input_layernorm", x))
                x = x + self.mlp(i, self.norm(f"layers.{i}.post_attention_layernorm", x))
            return self.head(x)
        blocks: list[Tensor] = []
        running: Tensor | None = embedding
        for i in range(fields["num_hidden_layers"]):
            layer = f"layers.{i}"
            h = running if not blocks else self.mix(f"{layer}.self_attention_res", blocks, running)
            if i % size == 0 or self.is_misread("blocks count sublayers"):
                if self.is_misread("blocks count sublayers"):
                    if (2 * i) % size == 0:
                        blocks, running = [*blocks, running], None
                elif self.is_misread("block begins with the mixed input"):
                    blocks, running = [*blocks, h], None
                elif self.is_misread("embedding is counted twice") and i == 0:
                    blocks = [running]
                else:
                    blocks, running = [*blocks, running], None
            output = self.attention(i, self.norm(f"{layer}.input_layernorm", h))
            running = output if running is None else running + output
            m = self.mix(f"{layer}.mlp_res", blocks, running)
            if self.is_misread("blocks count sublayers") and (2 * i + 1) % size == 0:
                blocks, running = [*blocks, running], None
            output = self.mlp(i, self.norm(f"{layer}.post_attention_layernorm", m))
            running = output if running is None else running + output
        if self.is_misread("output reads the last sum"):
            return self.head(running)
        return self.head(self.mix("output_attn_res", blocks, running))

    def head(self, x: Tensor) -> Tensor:
        name = "embed_tokens" if self.fields["tie_word_embeddings"] else "lm_head"
        return self.norm("norm", x) @ self.weight(name).T

    def norm(self, name: str, x: Tensor, eps: float | None = None) -> Tensor:
        return self.weight(name) * _unit(x, self.eps if eps is None else eps)

    def mix(self, name: str, blocks: list[Tensor], running: Tensor | None) -> Tensor:
        sources = blocks if running is None else [*blocks, running]
        query = self.weight(f"{name}_proj")[0]
        if not self.is_misread("key norm has no weight"):
            query = query * self.weight(f"{name}_norm")
        if self.is_misread("scores are divided by sqrt(d)"):
            query = query / math.sqrt(len(query))
        scores = torch.stack([(_unit(source, self.eps) * query).sum(-1) for source in sources])
        probabilities = torch.exp(scores) / torch.exp(scores).sum(0)
        if self.is_misread("values are normed"):
            sources = [_unit(source, self.eps) for source in sources]
        return sum(p.unsqueeze(-1) * source for p, source in zip(probabilities, sources))

    def attention(self, layer: int, x: Tensor) -> Tensor:
        linear, name = self.fields["linear_attn_config"], f"layers.{layer}.self_attn"
        is_linear = layer + 1 in linear["kda_layers"]
        return self.kda(name, x) if is_linear else self.mla(name, x)

    def kda(self, name: str, x: Tensor) -> Tensor:
        linear = self.fields["linear_attn_config"]
        batch, length, _ = x.shape
        heads, width, kernel = linear["num_heads"], linear["head_dim"], linear["short_conv_kernel_size"]
        qkv = []
        for part in "qkv":
            taps = self.weight(f"{name}.{part}_conv1d")[:, 0]  # (channels, kernel); the last is the token's own
            y = x @ self.weight(f"{name}.{part}_proj").T
            y = torch.cat([torch.zeros(batch, kernel - 1, y.shape[-1], dtype=torch.float64), y], dim=1)
            y = sum(y[:, tap : tap + length] * taps[:, tap] for tap in range(kernel))
            if not self.is_misread("convolution has no activation"):
                y = y * torch.sigmoid(y)
            qkv.append(y.reshape(batch, length, heads, width))
        q, k, v = qkv
        q, k = (y / torch.sqrt((y * y).sum(-1, keepdim=True) + 1e-6) for y in (q, k))
        if not self.is_misread("queries are not scaled"):
            q = q / math.sqrt(width)
        f = x @ self.weight(f"{name}.f_a_proj").T @ self.weight(f"{name}.f_b_proj").T + self.tensors[f"{name}.dt_bias"]
        f = f.reshape(batch, length, heads, width)
        rate = torch.exp(self.tensors[f"{name}.A_log"][:heads]).reshape(heads, 1)
        if self.is_misread("A_log is per channel"):
            rate = torch.exp(self.tensors[f"{name}.A_log"][:width])
        bound = linear.get("gate_lower_bound")
        if bound is None or self.is_misread("decay has no bound"):
            g = -rate * torch.log1p(torch.exp(f))
        elif self.is_misread("decay is clamped"):
            g = torch.clamp(-rate * torch.log1p(torch.exp(f)), min=bound)
        elif self.is_misread("A_log is outside of the sigmoid"):
            g = bound * rate * torch.sigmoid(f)
        else:
            g = bound * torch.sigmoid(rate * f)
        beta = x @ self.weight(f"{name}.b_proj").T
        beta = beta if self.is_misread("beta is not a sigmoid") else torch.sigmoid(beta)

        state = torch.zeros(batch, heads, width, width, dtype=torch.float64)  # keys, values
        outputs = []
        for t in range(length):
            state = torch.exp(g[:, t]).unsqueeze(-1) * state
            error = v[:, t] - torch.einsum("bhkv,bhk->bhv", state, k[:, t])
            state = state + torch.einsum("bhk,bhv->bhkv", k[:, t], beta[:, t].unsqueeze(-1) * error)
            outputs.append(torch.einsum("bhkv,bhk->bhv", state, q[:, t]))
        o = self.norm(f"{name}.o_norm", torch.stack(outputs, dim=1))
        if linear.get("use_full_rank_gate"):
            gate = x @ self.weight(f"{name}.g_proj").T
        else:
            gate = x @ self.weight(f"{name}.g_a_proj").T @ self.weight(f"{name}.g_b_proj").T
        gate = gate * torch.sigmoid(gate) if self.is_misread("output gate of KDA is silu") else torch.sigmoid(gate)
        return (o.reshape(batch, length, -1) * gate) @ self.weight(f"{name}.o_proj").T

    def mla(self, name: str, x: Tensor) -> Tensor:
        fields = self.fields
        batch, length, _ = x.shape
        heads, nope, rope = fields["num_attention_heads"], fields["qk_nope_head_dim"], fields["qk_rope_head_dim"]
        rank, width = fields["kv_lora_rank"], fields["v_head_dim"]
        eps = self.eps if self.is_misread("latent norms have the model's epsilon") else 1e-6
        if fields["q_lora_rank"] is None:
            q = x @ self.weight(f"{name}.q_proj").T
        else:
            q = self.norm(f"{name}.q_a_layernorm", x @ self.weight(f"{name}.q_a_proj").T, eps)
            q = q @ self.weight(f"{name}.q_b_proj").T
        q = q.reshape(batch, length, heads, nope + rope)
        latent = x @ self.weight(f"{name}.kv_a_proj_with_mqa").T
        kv = self.norm(f"{name}.kv_a_layernorm", latent[..., :rank], eps) @ self.weight(f"{name}.kv_b_proj").T
        kv = kv.reshape(batch, length, heads, nope + width)
        k = torch.cat([kv[..., :nope], latent[..., None, rank:].expand(-1, -1, heads, -1)], dim=-1)
        outputs = []
        for t in range(length):
            scores = torch.einsum("bhd,bshd->bhs", q[:, t], k[:, : t + 1]) / math.sqrt(nope + rope)
            weights = torch.exp(scores) / torch.exp(scores).sum(-1, keepdim=True)
            outputs.append(torch.einsum("bhs,bshd->bhd", weights, kv[:, : t + 1, :, nope:]))
        o = torch.stack(outputs, dim=1).reshape(batch, length, -1)
        if fields.get("mla_use_output_gate") and not self.is_misread("full attention has no gate"):
            gate = x @ self.weight(f"{name}.g_proj").T
            o = o * torch.sigmoid(gate) * (gate if self.is_misread("gate of full attention is silu") else 1)
        return o @ self.weight(f"{name}.o_proj").T

    def activation(self, gate: Tensor, up: Tensor, is_silu: bool = False) -> Tensor:
        if self.fields["hidden_act"] == "silu" or self.is_misread("SiTU is SiLU") or is_silu:
            return gate * torch.sigmoid(gate) * up
        beta, linear_beta = self.fields["activation_situ_beta"], self.fields.get("activation_situ_linear_beta")
        if linear_beta is not None and not self.is_misread("SiTU leaves up unchanged"):
            up = linear_beta * torch.tanh(up / linear_beta)
        return beta * torch.tanh(gate / beta) * torch.sigmoid(gate) * up

    def plain_mlp(self, name: str, x: Tensor, is_silu: bool) -> Tensor:
        gate, up = x @ self.weight(f"{name}.gate_proj").T, x @ self.weight(f"{name}.up_proj").T
        return self.activation(gate, up, is_silu) @ self.weight(f"{name}.down_proj").T

    def mlp(self, layer: int, x: Tensor) -> Tensor:
        fields, name = self.fields, f"layers.{layer}.block_sparse_moe"
        is_dense = layer < fields["first_k_dense_replace"] or layer % fields["moe_layer_freq"] != 0
        if fields["num_experts"] is None or is_dense:
            return self.plain_mlp(f"layers.{layer}.mlp", x, self.is_misread("dense MLPs have SiLU"))
        latent = fields.get("routed_expert_hidden_size")
        z = x @ self.weight(f"{name}.routed_expert_down_proj").T if latent else x
        routed = torch.zeros_like(z)
        for b in range(x.shape[0]):
            for t in range(x.shape[1]):
                for expert, weight in self.route(name, x[b, t]):
                    owner = f"{name}.experts.{expert}"
                    gate, up = z[b, t] @ self.weight(f"{owner}.w1").T, z[b, t] @ self.weight(f"{owner}.w3").T
                    if self.is_misread("w1 and w3 are exchanged"):
                        gate, up = up, gate
                    routed[b, t] += weight * (self.activation(gate, up) @ self.weight(f"{owner}.w2").T)
        if latent:
            if fields.get("latent_moe_use_norm") and not self.is_misread("experts have no norm"):
                routed = self.norm(f"{name}.routed_expert_norm", routed)
            routed = routed @ self.weight(f"{name}.routed_expert_up_proj").T
        if self.is_misread("scaling follows the norm"):
            routed = routed * fields["routed_scaling_factor"]
        if not fields["num_shared_experts"]:
            return routed
        return routed + self.plain_mlp(f"{name}.shared_experts", x, self.is_misread("shared experts have SiLU"))

    def route(self, name: str, x: Tensor) -> list[tuple[int, Tensor]]:
        """The chosen experts of one token and their weights."""
        fields = self.fields
        count, groups, chosen = fields["num_experts"], fields["num_expert_group"], fields["num_experts_per_token"]
        scores = torch.sigmoid(self.weight(f"{name}.gate") @ x)
        if self.is_misread("router has a softmax"):
            scores = torch.softmax(self.weight(f"{name}.gate") @ x, 0)
        merit = scores + self.tensors[f"{name}.gate.e_score_correction_bias"]
        if groups > 1:
            of_groups = merit.reshape(groups, -1).sort(descending=True)[0][:, :2].sum(-1)
            kept = of_groups.argsort(descending=True)[: fields["topk_group"]].tolist()
            for expert in range(count):
                if expert // (count // groups) not in kept:
                    merit[expert] = 0 if self.is_misread("groups are masked by zero") else -math.inf
        experts = merit.argsort(descending=True)[:chosen].tolist()
        weights = [(merit if self.is_misread("bias is in the weights") else scores)[expert] for expert in experts]
        if fields["moe_renormalize"] and chosen > 1 and not self.is_misread("weights are not renormalised"):
            total = sum(weights) + 1e-20
            weights = [weight / total for weight in weights]
        factor = 1 if self.is_misread("scaling follows the norm") else fields["routed_scaling_factor"]
        return [(expert, weight * factor) for expert, weight in zip(experts, weights)]


def _unit(x: Tensor, eps: float) -> Tensor:
    return x / torch.sqrt((x * x).mean(-1, keepdim=True) + eps)
