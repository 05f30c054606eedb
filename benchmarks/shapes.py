"""Build the measured models: a standard model with random weights, and each connection on the same weights."""

import copy
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from attnres.attn_res_attnres import AttnRes
from attnres.configuration import load
from attnres.conversion import retrofit
from attnres.residual_attnres import DepthState, ResidualConnection, residual_tensors

from .peers import pseudocode

T = TypeVar("T")

# Small, so that most of the time goes to the layers, which have the residual connections.
VOCABULARY = 8192
STANDARD = "standard"
CONNECTIONS: dict[str, dict] = {
    "Block S=4": {"block_size": 4},
    "Block S=2": {"block_size": 2},
    "Full": {"full": True},
}
# The one connection that is measured with the pseudocode. With Full, that takes several times as long as the model.
WITH_PSEUDOCODE = "Block S=4"
PSEUDOCODE = f"pseudocode, {WITH_PSEUDOCODE}"
EAGER = "eager, "  # prefix of a connection's name if depth attention runs by PyTorch's operations


@dataclass(frozen=True)
class Shape:
    """The configuration of a standard model, and the connections to measure it with."""

    config: PreTrainedConfig
    connections: tuple[str, ...] = tuple(CONNECTIONS)


def llama(width: int = 1024, layers: int = 12) -> PreTrainedConfig:
    """Return the configuration of a Llama with heads of 64."""
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
    """Return the paper's Kimi Linear configuration `attnres-296m` with fewer layers, and with 16 experts of 256."""
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
    """Return a Kimi Linear configuration for quick runs."""
    return load("attnres-tiny", residual_connection="standard", num_hidden_layers=4)


def shapes(quick: bool) -> dict[str, Shape]:
    """Return the shapes to measure, by name."""
    if quick:
        shape = Shape(tiny_kimi_linear(), ("Block S=4", "Full"))
        return {"Llama": Shape(llama(width=64, layers=2)), "Kimi Linear": shape}
    return {"Llama": Shape(llama()), "Kimi Linear": Shape(kimi_linear(), ("Block S=4", "Full"))}


def variants(shape: Shape, dtype: torch.dtype, device: str, eager: bool = True) -> dict[str, PreTrainedModel]:
    """Return models on the same weights by name: standard, ours per connection, eager if asked, and the pseudocode."""
    standard = build(shape.config, dtype, device)
    models = {STANDARD: standard} | {name: connect(standard, **CONNECTIONS[name]) for name in shape.connections}
    if eager:
        models |= {EAGER + name: connect(standard, "eager", **CONNECTIONS[name]) for name in shape.connections}
    return models | {PSEUDOCODE: with_pseudocode(connect(standard, **CONNECTIONS[WITH_PSEUDOCODE]))}


def build(config: PreTrainedConfig, dtype: torch.dtype, device: str) -> PreTrainedModel:
    """Return a model in evaluation mode. Its random weights are the same in each call."""
    torch.manual_seed(0)
    with torch.device(device):
        return AutoModelForCausalLM.from_config(config, dtype=dtype).eval()


def connect(standard: PreTrainedModel, implementation: str = "auto", **blocks: Any) -> PreTrainedModel:
    """Retrofit a standard model, with small random pseudo-queries, so that it computes nearly the same function.

    With small queries, experts get the same tokens as in the standard model. The queries are not zero, so that no
    implementation can skip work.

    Args:
        standard: the model, which shares its weights with the result.
        implementation: a name of `attnres.DEPTH_ATTENTION`.
        **blocks: arguments of `retrofit` that set the blocks.

    Returns:
        The model with attention residuals.
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
    """The paper's pseudocode as a residual connection: every read stacks and normalises all sources again."""

    has_norm = True
    weight: nn.Parameter
    eps: float

    def forward(self, state: DepthState, norm_weight: Tensor) -> tuple[Tensor, None, DepthState]:
        """Return the input of the sublayer, no weights, and the unchanged state."""
        sources = state if isinstance(state, tuple) else (state,)
        result = pseudocode(self.weight.squeeze(0), sources, norm_weight, self.eps)
        return result * len(sources), None, state  # times the number of sources: the retrofit's scale `sum`

    write = AttnRes.write


def with_pseudocode(model: PreTrainedModel) -> PreTrainedModel:
    """Replace depth attention by the paper's pseudocode in a model with attention residuals, and return the model."""
    for module in model.modules():
        if isinstance(module, AttnRes):
            # The module keeps its tensors. Only its forward pass changes.
            module.__class__ = Pseudocode  # pyrefly: ignore[bad-argument-type]  # its layout is the same
    return model


def copy_with_shared_weights(model: PreTrainedModel) -> PreTrainedModel:
    """Return a copy of a model that shares its parameters."""
    return copy.deepcopy(model, {id(parameter): parameter for parameter in model.parameters()})


def compared(results: Mapping[str, T], connection: str) -> dict[str, T]:
    """Select the results to compare for one connection.

    Args:
        results: the result of each model of [`variants`].
        connection: name of the connection.

    Returns:
        The results of the connection, of the standard model and, if they are measured, of the connection by PyTorch's
        operations and of the pseudocode.
    """
    chosen = {"ours": results[connection]}
    if EAGER + connection in results:
        chosen["ours eager"] = results[EAGER + connection]
    chosen["standard"] = results[STANDARD]
    return chosen | ({"pseudocode": results[PSEUDOCODE]} if connection == WITH_PSEUDOCODE else {})


def unique_parameters(models: Iterable[nn.Module]) -> list[nn.Parameter]:
    """Return the parameters of all models without repetition; the models share most of them."""
    return list({id(parameter): parameter for model in models for parameter in model.parameters()}.values())


def token_ids(config: PreTrainedConfig, length: int, batch: int, device: str) -> Tensor:
    """Return random token ids, `[batch, length]`, the same in each call."""
    generator = torch.Generator().manual_seed(0)
    return torch.randint(3, config.vocab_size, (batch, length), generator=generator).to(device)
