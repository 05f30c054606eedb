"""The models that are measured: a backbone with random weights, and the same weights under each residual connection."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from attnres.attn_res_attnres import AttnRes
from attnres.configuration import load
from attnres.conversion import retrofit
from attnres.residual_attnres import DepthState, ResidualConnection, residual_tensors

from .peers import pseudocode

T = TypeVar("T")

# A small vocabulary, which makes the rest, where residual connections are, a larger part of the whole.
VOCABULARY = 8192
STANDARD = "standard"
CONNECTIONS: dict[str, dict] = {
    "Block S=4": {"block_size": 4},
    "Block S=2": {"block_size": 2},
    "Full": {"full": True},
}
# The pseudocode is measured with this connection only; with Full it takes several times as long as the whole model.
WITH_PSEUDOCODE = "Block S=4"
PSEUDOCODE = f"pseudocode, {WITH_PSEUDOCODE}"
EAGER = "eager, "  # before the name of a connection: depth attention in PyTorch's operations


@dataclass(frozen=True)
class Shape:
    """The configuration of a standard model, and the connections that it is measured with."""

    config: PreTrainedConfig
    connections: tuple[str, ...] = tuple(CONNECTIONS)


def llama(width: int = 1024, layers: int = 12) -> PreTrainedConfig:
    return AutoConfig.for_model(
        "llama",
        vocab_size=VOCABULARY,
        hidden_size=width,
        intermediate_size=width * 11 // 4,
        num_hidden_layers=layers,
        num_attention_heads=max(1, width // 64),
        num_key_value_heads=max(1, width // 64),
        max_position_embeddings=4096,
        tie_word_embeddings=True,
    )


def kimi_linear(layers: int = 8, hidden_size: int = 1024) -> PreTrainedConfig:
    """The paper's model of width 1024, but 8 layers, and 16 experts of which 8 are used for a token, not 8 of 256."""
    return load(
        "attnres-296m",
        hidden_size=hidden_size,
        residual_connection="standard",
        vocab_size=VOCABULARY,
        num_hidden_layers=layers,
        num_local_experts=16,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )


def tiny_kimi_linear() -> PreTrainedConfig:
    return load("attnres-tiny", residual_connection="standard", num_hidden_layers=4)


def shapes(quick: bool) -> dict[str, Shape]:
    """The models that are measured, by name."""
    if quick:
        shape = Shape(tiny_kimi_linear(), ("Block S=4", "Full"))
        return {"Llama": Shape(llama(width=64, layers=2)), "Kimi Linear": shape}
    return {"Llama": Shape(llama()), "Kimi Linear": Shape(kimi_linear(), ("Block S=4", "Full"))}


def variants(shape: Shape, dtype: torch.dtype, device: str) -> dict[str, PreTrainedModel]:
    """The standard model and, on the same weights, two for each connection and one with the paper's pseudocode."""
    standard = build(shape.config, dtype, device)
    models = {STANDARD: standard} | {name: connect(standard, **CONNECTIONS[name]) for name in shape.connections}
    models |= {EAGER + name: connect(standard, "eager", **CONNECTIONS[name]) for name in shape.connections}
    return models | {PSEUDOCODE: with_pseudocode(connect(standard, **CONNECTIONS[WITH_PSEUDOCODE]))}


def build(config: PreTrainedConfig, dtype: torch.dtype, device: str) -> PreTrainedModel:
    torch.manual_seed(0)
    with torch.device(device):
        return AutoModelForCausalLM.from_config(config, dtype=dtype).eval()


def connect(standard: PreTrainedModel, implementation: str = "auto", **blocks: int | bool) -> PreTrainedModel:
    """The model with attention residuals, on the same weights, computing nearly the same function.

    Pseudo-queries are small and not zero: experts get the same tokens as in the standard model, and nothing may be
    skipped.

    Args:
        implementation: of depth attention, a name of `attnres.DEPTH_ATTENTION`.
    """
    model = retrofit(standard, **blocks)
    model.config.depth_attention_implementation = implementation
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for tensor in residual_tensors(model).values():
            if tensor.ndim == 2:
                tensor.copy_(torch.randn(tensor.shape, generator=generator) / 1000)
    return model


class Pseudocode(ResidualConnection):
    """The paper's pseudocode as the residual connection: every read stacks all sources and normalises them anew."""

    has_norm = True

    def forward(self, state: DepthState, norm_weight: Tensor) -> tuple[Tensor, None, DepthState]:
        sources = state if isinstance(state, tuple) else (state,)
        result = pseudocode(self.weight.squeeze(0), sources, norm_weight, self.eps)
        return result * len(sources), None, state  # the scale `sum` of the retrofit

    write = AttnRes.write


def with_pseudocode(model: PreTrainedModel) -> PreTrainedModel:
    """Put the paper's pseudocode into a model with attention residuals, in place of what it has."""
    for module in model.modules():
        if isinstance(module, AttnRes):
            module.__class__ = Pseudocode
    return model


def compared(found: Mapping[str, T], connection: str) -> dict[str, T]:
    """Of what was found of each variant: of a connection in both ways, of the standard model and of a peer, if any."""
    own = {"ours": found[connection], "ours eager": found[EAGER + connection], "standard": found[STANDARD]}
    return own | ({"pseudocode": found[PSEUDOCODE]} if connection == WITH_PSEUDOCODE else {})


def unique_parameters(models: Iterable[nn.Module]) -> list[nn.Parameter]:
    """Those of all models, which share most of them, each once."""
    return list({id(parameter): parameter for model in models for parameter in model.parameters()}.values())


def token_ids(config: PreTrainedConfig, length: int, batch: int, device: str) -> Tensor:
    """Random ones, `[batch, length]`."""
    generator = torch.Generator().manual_seed(0)
    return torch.randint(3, config.vocab_size, (batch, length), generator=generator).to(device)
