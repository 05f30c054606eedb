"""Build models whose every connection coefficient matters, and measure their logits and gradients."""

from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from attnres.residual_attnres import ResidualConnection, residual_tensors
from attnres.value_residual_attnres import VALUE_RESIDUAL_FIELDS, value_residual_tensors

from ..caches import CACHE

BACKBONES = ["llama", "kimi_linear"]
# Forms of a connection that start as the standard one -> name of the connection, and fields.
FORMS = {
    "attn_res, gated": (
        "attn_res",
        {"attn_res_gated": True, "attn_res_window": 2, "attn_res_blocks": "rms", "attn_res_block_size": 3},
    ),
    "attn_res, by head": (
        "attn_res",
        {"attn_res_query": "input_dependent", "attn_res_heads": 4, "attn_res_activation": "sigmoid"}
        | {"attn_res_scale": "sum", "attn_res_block_size": 3},
    ),
    "attn_res, static": (
        "attn_res",
        {"attn_res_query": "none", "attn_res_count_prior": True, "attn_res_values": "normed", "attn_res_gated": True},
    ),
}


@torch.no_grad()
def stir(model: PreTrainedModel) -> PreTrainedModel:
    """Draw the tensors of the residual connections at random, far from their initial values."""
    generator = torch.Generator().manual_seed(2)
    for name, tensor in residual_tensors(model).items():
        scale = tensor.shape[-1] ** -0.5 if tensor.ndim == 2 else 0.5
        if tensor.ndim == 2 and tensor.shape[0] == tensor.shape[1]:
            scale *= 0.1  # `W_l` of a query multiplies an input that is not normed: logits should be about 1
        if name.endswith(".up"):
            scale *= 0.2  # nothing bounds MUDDFormer's weights either: they would cancel or grow with depth
        mean = 1.0 if name.endswith(".scale") else 0.0
        noise = torch.randn(tensor.shape, generator=generator)
        if name.endswith((".static", ".scale")) and tensor.any():
            # Nothing bounds the coefficients of Hyper-Connections: far from the start, they would grow with depth.
            tensor.add_(0.05 * noise)
        else:
            tensor.copy_(mean + scale * noise)
    return model


def fields_of(connection: str) -> dict:
    """Return the configuration fields of a connection or of a form in `FORMS`."""
    name, fields = FORMS.get(connection, (connection, {}))
    return {"residual_connection": name, **fields}


def build(backbones: ModuleType, case: str, connection: str, **fields) -> PreTrainedModel:
    """Build a model in eval mode with drawn connections; its other weights are those of `backbones.build(case)`."""
    return stir(build_start(backbones, case, connection, **fields))


def build_start(backbones: ModuleType, case: str, connection: str, **fields) -> PreTrainedModel:
    """Build the same model with connections at their initial values: a retrofit of `backbones.build(case)`."""
    standard = backbones.build(case, **{name: fields[name] for name in fields if name not in VALUE_RESIDUAL_FIELDS})
    torch.manual_seed(3)
    config = backbones.member_config(case, **fields_of(connection) | fields)
    model = AutoModelForCausalLM.from_config(config).eval()
    missing, unexpected = model.load_state_dict(standard.state_dict(), strict=False)
    assert not unexpected and set(missing) == {*residual_tensors(model), *value_residual_tensors(model)}
    return model


def connections_of(model: PreTrainedModel) -> list[ResidualConnection]:
    """Return the connections of the sublayers in order, and last that of the output."""
    return sorted((m for m in model.modules() if isinstance(m, ResidualConnection)), key=lambda c: c.sublayer)


def double(model: PreTrainedModel) -> PreTrainedModel:
    """Cast a model to float64; grouped experts do not support it, so choose the eager ones."""
    if hasattr(model.config, "_experts_implementation") and model._can_set_experts_implementation():
        model.set_experts_implementation("eager")
    return model.double()


def difference(actual: Tensor, expected: Tensor) -> float:
    """Return the largest difference, relative to the largest expected number."""
    return ((actual - expected).abs().max() / expected.abs().max()).item()


def close(actual: Tensor, expected: Tensor) -> bool:
    """Return whether two results are equal up to rounding, as those of two implementations."""
    return actual.shape == expected.shape and difference(actual, expected) <= 1e-5


def cached_logits(model: PreTrainedModel, token_ids: Tensor) -> Tensor:
    """Return the logits of calls with a cache: of a prompt, of two tokens, and of the last three one by one."""
    cache, logits = None, []
    for piece in token_ids.split([token_ids.shape[1] - 5, 2, 1, 1, 1], dim=1):
        outputs = model(piece, **{CACHE: cache}, use_cache=True)
        cache = outputs[CACHE]
        logits.append(outputs.logits)
    return torch.cat(logits, dim=1)


def assert_reads(
    backbones: ModuleType,
    model: PreTrainedModel,
    standard: PreTrainedModel,
    read: Callable[[list[Tensor]], Tensor],
    uncached: float = 1e-6,
    cached: float = 1e-5,
) -> None:
    """Assert that a model is the standard one, but sublayers read `read([v_0, v_1, ...])`, and that this matters.

    Both models are in float64. `uncached` and `cached` bound the largest difference of logits, relative to the largest.
    """
    token_ids = backbones.token_ids()
    expected = backbones.straight_line(standard, token_ids, read)
    assert difference(standard(token_ids).logits, expected) > 0.05
    assert difference(model(token_ids).logits, expected) < uncached
    first = model(token_ids[:, :7], use_cache=True)
    last = model(token_ids[:, 7:], **{CACHE: first[CACHE]})
    assert difference(torch.cat([first.logits, last.logits], dim=1), expected) < cached


def loss_of(model: PreTrainedModel, token_ids: Tensor) -> Tensor:
    return model(token_ids, labels=token_ids, use_cache=False).loss


def gradients(model: PreTrainedModel, token_ids: Tensor) -> dict[str, Tensor]:
    """Return the gradient of every parameter that has one."""
    model.zero_grad(set_to_none=True)
    loss_of(model, token_ids).backward()
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters() if parameter.grad is not None}


def assert_same_gradients(actual: dict[str, Tensor], expected: dict[str, Tensor], relative: float) -> None:
    assert actual.keys() == expected.keys()
    largest = max(gradient.abs().max().item() for gradient in expected.values())
    for name, gradient in actual.items():
        tolerance = relative * max(expected[name].abs().max().item(), 1e-3 * largest)
        assert (gradient - expected[name]).abs().max() <= tolerance, name


def check_derivatives(connections: list[ResidualConnection], std: float = 0.5, **options: Any) -> None:
    """Compare derivatives of a chain of reads and writes with finite differences, at drawn tensors.

    Args:
        connections: those of the sublayers in order and of the output, in float64.
        std: Standard deviation of the tensors.
        **options: of `torch.autograd.gradcheck`.
    """
    new = {"generator": torch.Generator().manual_seed(0), "dtype": torch.float64}
    names = [(i, name) for i, connection in enumerate(connections) for name, _ in connection.named_parameters()]
    tensors = [std * torch.randn(connections[i].get_parameter(name).shape, **new) for i, name in names]
    embedding = torch.randn(1, 2, 4, **new).requires_grad_()

    def chain(embedding: Tensor, *tensors: Tensor) -> Tensor:
        state, inputs = embedding, []
        for i, connection in enumerate(connections):
            own = {name: tensor for (owner, name), tensor in zip(names, tensors) if owner == i}
            # Not `functional_call`, which gives the tensors to one call: the write needs them too.
            with nn.utils.stateless._reparametrize_module(connection, own):
                is_output = i == len(connections) - 1
                norm = nn.RMSNorm(4, 0.1).double() if connection.takes_norm and not is_output else None
                read, _, state = connection(state, norm)
                inputs.append(read)
                if not is_output:
                    state = connection.write(state, torch.sin(read + i))  # the output depends on the input
        return torch.stack(inputs)

    assert torch.autograd.gradcheck(chain, (embedding, *(tensor.requires_grad_() for tensor in tensors)), **options)
