"""Connections train in pure bfloat16: their tensors move, and streams differ by more than rounding."""

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

import attnres
from attnres.conversion import retrofit
from attnres.residual_attnres import ResidualNorm, residual_tensors
from attnres.streams_attnres import ResidualStreams

from .connections import FORMS

STEP = 2**-8  # the largest rounding error of bfloat16, relative
# Forms with tensors that the default form of their connection lacks.
OTHERS = {
    "muddformer, post norm": ("muddformer", {"muddformer_post_norm": True}),
    "scaled, shifted": ("scaled", {"scaled_form": "shifted"}),
    "scaled, mixed": ("scaled", {"scaled_form": "mixed"}),
    "residual_scalars, nanochat": ("residual_scalars", {"residual_scalars_start": "nanochat"}),
}


def start(backbones, name: str, fields: dict) -> PreTrainedModel:
    """Return a retrofit in float32 or, where the form has no exact start, a model from scratch."""
    torch.manual_seed(3)
    try:
        return retrofit(backbones.build("llama"), name, **fields)
    except ValueError:
        return AutoModelForCausalLM.from_config(backbones.member_config("llama", residual_connection=name, **fields))


def train(model: PreTrainedModel, token_ids: Tensor, steps: int = 6, rate: float = 1e-3) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=0.0)
    for _ in range(steps):
        model(token_ids, labels=token_ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def spread(model: PreTrainedModel, token_ids: Tensor) -> float:
    """Return the deviation of the streams that the output reads from their mean, relative to that mean."""
    streams = []
    output = next(m for m in model.modules() if isinstance(m, ResidualStreams) and m.is_output)
    hook = output.register_forward_pre_hook(lambda _, arguments: streams.append(arguments[0][0].float()))
    with torch.no_grad():
        model(token_ids)
    hook.remove()
    mean = streams[0].mean(-2, keepdim=True)
    return ((streams[0] - mean).square().mean() / mean.square().mean()).sqrt().item()


FORMS_WITH_TENSORS = [*(set(attnres.CONNECTIONS) - {"standard", "post_norm"}), *FORMS, *OTHERS]


@pytest.mark.parametrize("form", sorted(FORMS_WITH_TENSORS))
def test_tensors_move_and_streams_part_in_a_few_steps_in_bfloat16(backbones, form):
    name, fields = FORMS.get(form, OTHERS.get(form, (form, {})))
    model, token_ids = start(backbones, name, fields).to(torch.bfloat16), backbones.token_ids()
    assert model.dtype == torch.bfloat16
    # A key norm has the dtype of its checkpoint. Queries start at zero, multiply it in each channel, and do move.
    norms = {id(module.weight) for module in model.modules() if isinstance(module, ResidualNorm)}
    tensors = {key: tensor for key, tensor in residual_tensors(model).items() if id(tensor) not in norms}
    before = {key: tensor.clone() for key, tensor in tensors.items()}
    train(model, token_ids)
    # In each tensor an entry must move, and in a vector every entry that starts at another value than zero.
    moved = {key: tensor != before[key] for key, tensor in tensors.items()}
    still = {key for key, entries in moved.items() if not entries.any()}
    still |= {key for key, entries in moved.items() if entries.ndim == 1 and not (entries | (before[key] == 0)).all()}
    # The first sublayer reads one source, whose softmax weight is always 1.
    one_source = {key for key in tensors if name == "attn_res" and key.startswith("model.layers.0.self_attention")}
    assert tensors and still <= one_source
    if any(isinstance(module, ResidualStreams) for module in model.modules()):
        assert spread(model, token_ids) > STEP
