"""llama.cpp computes what `attnres` does with a trained Kimi K3: it reads the saved files, and has its own code.

Where llama.cpp departs from the release, the models here avoid it: it has one epsilon for all norms, so that of the
model is 1e-6, which the release has for the norms of delta attention and of full attention's latent vectors.
"""

import base64
import functools
import json
import re
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from attnres import AttnResKimiK3Config, AttnResKimiK3ForCausalLM
from attnres.configuration import load

from .kimi_k3_gguf import write_gguf

REQUIREMENT = "xllamacpp==2026.10.11549"
TOLERANCE = 5e-5  # of the largest logit
# Fields of `attnres-k3-tiny` that differ here. Weights are large: SiTU, gates and decays leave their linear range.
SMALL = {"vocab_size": 256, "rms_norm_eps": 1e-6, "initializer_range": 0.1}
WITHOUT_NORM = {"latent_moe_use_norm": False, "routed_scaling_factor": 1.7}  # with it, their scale hardly matters
# Fields by their released names; `None` turns a feature off.
VARIANTS: dict[str, dict[str, Any]] = {
    "released": {},
    "blocks of three layers": {"attn_res_block_size": 3},
    "no attention residuals": {"attn_res_block_size": None},
    "decay without bound": {"gate_lower_bound": None},
    "low-rank gate": {"use_full_rank_gate": False},
    "full-rank queries": {"q_lora_rank": None},
    "full attention without gate": {"mla_use_output_gate": False},
    "experts without norm": WITHOUT_NORM,
    "weights as they are": WITHOUT_NORM | {"moe_renormalize": False},
    "router groups": WITHOUT_NORM | {"num_expert_group": 4, "topk_group": 2},
    "experts without latent space": WITHOUT_NORM | {"routed_expert_hidden_size": None},
    "no shared experts": {"num_shared_experts": 0},
    "fewer heads of delta attention": {"num_heads": 3},
    "dense": {"num_experts": None},
    "up projection without bound": {"activation_situ_linear_beta": None},
}
LENGTHS = (1, 7, 64, 150)  # of the prompts; delta attention computes in chunks of 64
NEW_TOKENS = 12


def configuration(**changes: Any) -> AttnResKimiK3Config:
    fields = load("attnres-k3-tiny").to_dict()
    text, linear = fields["text_config"], fields["text_config"]["linear_attn_config"]
    for name, value in (SMALL | changes).items():
        (linear if name in linear else text)[name] = value
    return AttnResKimiK3Config.from_dict(fields)


def trained(**changes: Any) -> AttnResKimiK3ForCausalLM:
    """A model after some steps of training, on sequences that count in steps of different length."""
    return deepcopy(_trained(tuple(changes.items())))


@functools.cache
def _trained(changes: tuple[tuple[str, Any], ...]) -> AttnResKimiK3ForCausalLM:
    config = configuration(**dict(changes))
    torch.manual_seed(0)
    model = AttnResKimiK3ForCausalLM(config)
    for name, tensor in model.state_dict().items():
        # Depth queries begin at zero, and nothing here moves the correction of the router.
        if name.endswith("_res_proj.weight"):
            torch.nn.init.normal_(tensor, std=0.03)
        if name.endswith("e_score_correction_bias"):
            torch.nn.init.normal_(tensor, std=0.1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    for _ in range(10):
        start, step = torch.randint(config.vocab_size, (2, 8, 1))
        ids = (start + step * torch.arange(32)) % config.vocab_size
        optimizer.zero_grad()
        model(ids, labels=ids).loss.backward()
        optimizer.step()
    return model


def prompts() -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(3, SMALL["vocab_size"], (1, length), generator=generator) for length in LENGTHS]


@pytest.fixture(scope="module")
def python(python_with) -> Path:
    return python_with("llama-cpp", REQUIREMENT, dependencies=False)


@pytest.fixture
def run_llama_cpp(python, run_session, tmp_path) -> Callable[..., list[tuple[list[Tensor], list[list[int]]]]]:
    """`run_llama_cpp(*files)`: for each GGUF file, logits `[seq, vocab]` and new tokens of all prompts."""

    def run(*files: Path, new_tokens: int = NEW_TOKENS) -> list[tuple[list[Tensor], list[list[int]]]]:
        (tmp_path / "prompts.json").write_text(json.dumps([prompt[0].tolist() for prompt in prompts()]))
        results = run_session(python, "llama_cpp_session.py", tmp_path / "prompts.json", str(new_tokens), *files)
        return [([as_logits(r["logits"]) for r in of_file], [r["tokens"] for r in of_file]) for of_file in results]

    return run


def as_logits(text: str) -> Tensor:
    return torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.float32).view(-1, SMALL["vocab_size"])


@torch.no_grad()
def logits_of(model: AttnResKimiK3ForCausalLM) -> Tensor:
    """The logits `[seq, vocab]` of all prompts, one after another."""
    return torch.cat([model(prompt).logits[0] for prompt in prompts()])


def largest_difference(expected: Tensor, logits: list[Tensor]) -> float:
    """The largest difference between a model's logits and others, as a part of the model's largest logit."""
    return float((torch.cat(logits) - expected).abs().max() / expected.abs().max())


def greedy_tokens(model: AttnResKimiK3ForCausalLM) -> list[list[int]]:
    options = {"max_new_tokens": NEW_TOKENS, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    return [model.generate(prompt, **options)[0, prompt.shape[1] :].tolist() for prompt in prompts()]


@pytest.mark.slow
@pytest.mark.parametrize("variant", [*VARIANTS, "text model alone", "packed experts", "bfloat16"])
def test_llama_cpp_computes_the_same_logits_and_tokens_from_the_saved_files(run_llama_cpp, tmp_path, variant):
    folder = tmp_path / "model"
    model = trained(**VARIANTS.get(variant, {}))
    if variant == "text model alone":
        model.config.checkpoint_layout = "text"
    model.save_pretrained(folder, packed_experts=variant == "packed experts")
    if variant == "bfloat16":
        AttnResKimiK3ForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).save_pretrained(folder)
    write_gguf(folder, tmp_path / "model.gguf")
    model = AttnResKimiK3ForCausalLM.from_pretrained(folder, dtype=torch.float32)

    ((logits, tokens),) = run_llama_cpp(tmp_path / "model.gguf")
    assert largest_difference(logits_of(model), logits) < TOLERANCE
    assert tokens == greedy_tokens(model)


# Metadata of the GGUF file with other values, by the last part of the key.
ALTERATIONS: dict[str, dict[str, Any]] = {
    "blocks count sublayers": {"block_size": 1},
    "longer blocks": {"block_size": 3},
    "other epsilon": {"layer_norm_rms_epsilon": 1e-2},
    "decay has another bound": {"gate_lower_bound": -4.9},
    "decay has no bound": {"gate_lower_bound": ...},
    "bound of the gate": {"situ_beta": 4.1},
    "bound of the up projection": {"situ_linear_beta": 24.0},
    "up projection has no bound": {"situ_linear_beta": 0.0},
    "another expert": {"expert_used_count": 3},
    "scale of the experts": {"expert_weights_scale": 1.69},
    "weights are not renormalised": {"expert_weights_norm": False},
    "router has a softmax": {"expert_gating_func": 1},
}


@pytest.mark.slow
def test_the_comparison_notices_each_alteration_of_the_metadata(run_llama_cpp, tmp_path):
    folder = tmp_path / "model"
    trained(**WITHOUT_NORM).save_pretrained(folder)
    files = [tmp_path / f"{i}.gguf" for i in range(len(ALTERATIONS))]
    for file, changes in zip(files, ALTERATIONS.values(), strict=True):
        write_gguf(folder, file, **changes)
    expected = logits_of(AttnResKimiK3ForCausalLM.from_pretrained(folder, dtype=torch.float32))

    logits = [logits for logits, _ in run_llama_cpp(*files, new_tokens=0)]
    differences = dict(zip(ALTERATIONS, (largest_difference(expected, of_file) for of_file in logits), strict=True))
    assert min(differences.values()) > 10 * TOLERANCE, differences


def kind_of(name: str) -> str:
    """The name of a tensor without the numbers of layer and expert, but for the first layer's first depth query."""
    return name if "layers.0.self_attention_res" in name else re.sub(r"\.\d+\.", ".N.", name)


def with_noise(kind: str) -> Callable[[str, Tensor], Tensor]:
    def edit(name: str, tensor: Tensor) -> Tensor:
        noise = torch.randn(tensor.shape, generator=torch.Generator().manual_seed(0))
        return tensor * (1 + 0.2 * noise) if kind_of(name) == kind else tensor

    return edit


@pytest.mark.slow
def test_the_comparison_notices_each_kind_of_tensor_but_the_depth_query_of_the_first_layer(run_llama_cpp, tmp_path):
    folder = tmp_path / "model"
    trained().save_pretrained(folder)
    kinds = sorted({kind_of(name.removeprefix("language_model.")) for name in load_file(folder / "model.safetensors")})
    files = [tmp_path / f"{i}.gguf" for i in range(len(kinds))]
    for file, kind in zip(files, kinds, strict=True):
        write_gguf(folder, file, with_noise(kind))
    expected = logits_of(AttnResKimiK3ForCausalLM.from_pretrained(folder, dtype=torch.float32))

    logits = [logits for logits, _ in run_llama_cpp(*files, new_tokens=0)]
    differences = dict(zip(kinds, (largest_difference(expected, of_file) for of_file in logits), strict=True))
    unnoticed = {kind for kind, difference in differences.items() if difference < 10 * TOLERANCE}
    assert unnoticed == {kind for kind in kinds if kind.startswith("model.layers.0.self_attention_res_")}
    for file in files:  # a quarter of a gigabyte
        file.unlink()


@pytest.mark.slow
def test_the_comparison_notices_a_model_whose_blocks_count_sublayers(run_llama_cpp, tmp_path, monkeypatch):
    trained().save_pretrained(tmp_path / "model")
    write_gguf(tmp_path / "model", tmp_path / "model.gguf")
    monkeypatch.setattr(AttnResKimiK3Config, "attn_res_block_unit", 1)
    model = AttnResKimiK3ForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32)

    ((logits, tokens),) = run_llama_cpp(tmp_path / "model.gguf")
    assert largest_difference(logits_of(model), logits) > 1000 * TOLERANCE
    assert tokens != greedy_tokens(model)
