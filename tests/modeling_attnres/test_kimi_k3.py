"""Kimi K3 computes what its release does: held against a transcription in float64, on checkpoints written by hand."""

from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from attnres import AttnResKimiK3ForCausalLM

from . import kimi_k3_release as release
from . import kimi_k3_straight_line as straight_line
from .connections import cached_logits

# The released fields, and each optional feature the other way.
VARIANTS: dict[str, dict[str, Any]] = {
    "released": {},
    "decay without bound": {"gate_lower_bound": ...},
    "low-rank gate": {"use_full_rank_gate": ...},
    "full-rank queries": {"q_lora_rank": None},
    "full attention without gate": {"mla_use_output_gate": False},
    "up projection without bound": {"activation_situ_linear_beta": None},
    "SiLU": {"hidden_act": "silu", "activation_situ_beta": ..., "activation_situ_linear_beta": ...},
    "experts without norm": {"latent_moe_use_norm": False},
    "experts without latent space": {"routed_expert_hidden_size": ..., "latent_moe_use_norm": ...},
    "router groups": {"num_expert_group": 4, "topk_group": 2, "latent_moe_use_norm": False},
    "one expert": {"num_experts_per_token": 1, "latent_moe_use_norm": False},
    "weights as they are": {"moe_renormalize": False, "latent_moe_use_norm": False},
    "every other layer": {"moe_layer_freq": 2, "first_k_dense_replace": 2},
    "dense": {"num_experts": None},
    "no shared experts": {"num_shared_experts": 0},
    "tied": {"tie_word_embeddings": True},
    "blocks of one": {"attn_res_block_size": 1},
    "blocks of two": {"attn_res_block_size": 2},
    "one block": {"attn_res_block_size": 7},
    "no attention residuals": {"attn_res_block_size": ...},
    "queries and keys without a second part": {"qk_rope_head_dim": 0},
    "key-value heads as the heads": {"num_key_value_heads": ...},
    "mostly full attention": {"full_attn_layers": [1, 2, 4, 6, 7], "kda_layers": [3, 5]},
}
# Of these, the attention is that of the release.
OF_MLP = ["up projection without bound", "SiLU", "experts without norm", "experts without latent space", "one expert"]
OF_MLP += ["router groups", "weights as they are", "every other layer", "dense", "no shared experts"]
IDS = torch.randint(3, 64, (2, 11), generator=torch.Generator().manual_seed(1))


def tensors_of(fields: dict[str, Any], seed: int = 0) -> dict[str, Tensor]:
    tensors = release.random_tensors(fields, torch.float32, seed)
    if fields["num_expert_group"] > 1:
        for name, tensor in tensors.items():
            if name.endswith("e_score_correction_bias"):
                tensor -= 2  # so that an expert of a group that is left out would be chosen, were it masked by zero
    return tensors


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> Callable[[str], tuple[AttnResKimiK3ForCausalLM, dict[str, Any], dict[str, Tensor]]]:
    """`models(variant)`: a model that was loaded from a release, the fields, and the tensors."""
    loaded = {}

    def load(variant: str):
        if variant not in loaded:
            fields = release.text_fields(**VARIANTS[variant])
            tensors = tensors_of(fields)
            folder = release.write(tmp_path_factory.mktemp("release"), fields, tensors)
            loaded[variant] = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32), fields, tensors
        return loaded[variant]

    return load


@pytest.fixture
def all_float64() -> Iterator[None]:
    """What the models compute in float32 whatever their dtype is, they compute in float64."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "float32", torch.float64)
        patch.setattr(Tensor, "float", Tensor.double)
        yield


def double_model(model: AttnResKimiK3ForCausalLM) -> AttnResKimiK3ForCausalLM:
    copied = AutoModelForCausalLM.from_config(model.config).eval()
    copied.load_state_dict(model.state_dict())
    copied.double().set_experts_implementation("eager")
    return copied


@torch.no_grad()
@pytest.mark.parametrize("variant", VARIANTS)
def test_model_follows_the_equations(models, variant, all_float64):
    model, fields, tensors = models(variant)
    expected = straight_line.logits(tensors, fields, IDS)
    assert expected.std() > 0.3
    exact = double_model(model)
    # Without a cache alone where only the MLP differs.
    passes = [exact(IDS).logits] if variant in OF_MLP else [exact(IDS).logits, cached_logits(exact, IDS)]
    for logits in passes:
        assert logits.dtype == torch.float64
        torch.testing.assert_close(logits, expected, rtol=0, atol=1e-6)


# Each variant follows its equations in float64 above. In float32, other loops compute delta attention and SiTU.
IN_FLOAT32 = ["released", "decay without bound", "low-rank gate", "up projection without bound", "SiLU"]
IN_FLOAT32 += ["router groups", "no attention residuals", "mostly full attention"]


@torch.no_grad()
@pytest.mark.parametrize("variant", IN_FLOAT32)
def test_model_follows_the_equations_in_float32(models, variant):
    model, fields, tensors = models(variant)
    assert type(model) is AttnResKimiK3ForCausalLM
    expected = straight_line.logits(tensors, fields, IDS)
    for logits in (model(IDS).logits, cached_logits(model, IDS)):
        torch.testing.assert_close(logits.double(), expected, rtol=0, atol=2e-3)


@cache
def read_rightly(variant: str) -> tuple[dict[str, Any], dict[str, Tensor], Tensor]:
    """Return the fields and tensors of a variant, and its logits by the equations."""
    fields = release.text_fields(**VARIANTS[variant])
    tensors = tensors_of(fields)
    return fields, tensors, straight_line.logits(tensors, fields, IDS)


@pytest.mark.parametrize("misreading", straight_line.MISREADINGS)
def test_the_equations_tell_each_misreading_apart(misreading):
    variant = {"weights are not renormalised": "experts without norm", "groups are masked by zero": "router groups"}
    fields, tensors, expected = read_rightly(variant.get(misreading, "released"))
    misread = straight_line.logits(tensors, fields, IDS, misreading)
    assert (misread - expected).abs().max() > 20e-6
