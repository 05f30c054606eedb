"""llama.cpp computes what `attnres` does with a trained Kimi K3: it reads the saved files, and has its own code.

Where llama.cpp departs from the release, the models here avoid it: it has one epsilon for all norms, so that of the
model is 1e-6, which the release has for the norms of delta attention and of full attention's latent vectors.
"""

import base64
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from attnres import AttnResKimiK3ForCausalLM
from attnres.configuration import load

from ..modeling_attnres import kimi_k3_release as release
from .kimi_k3_gguf import write_gguf

REQUIREMENT = "xllamacpp==2026.10.11549"
TOLERANCE = 5e-5  # of the largest logit; they agree to about 3e-6
# Fields of the model in training. Weights are so large that SiTU, gates and decays leave their linear range.
SMALL = {"vocab_size": 256, "rms_norm_eps": 1e-6, "initializer_range": 0.2}
VARIANTS: dict[str, dict[str, Any]] = {
    "released": {},
    "blocks of three layers": {"attn_res_block_size": 3},
    "decay without bound": {"gate_lower_bound": None},
    "low-rank gate": {"use_full_rank_gate": False},
    "full-rank queries": {"q_lora_rank": None},
    # With the norm, the scale of the experts' sum hardly matters.
    "experts without norm": {"latent_moe_use_norm": False, "routed_scaling_factor": 1.7},
    "weights as they are": {"latent_moe_use_norm": False, "routed_scaling_factor": 1.7, "norm_topk_prob": False},
    "experts without latent space": {"routed_expert_hidden_size": None, "latent_moe_use_norm": False},
    "router groups": {"n_group": 4, "topk_group": 2, "latent_moe_use_norm": False},
    "dense": {"num_local_experts": None},
    "up projection without bound": {"activation_situ_linear_beta": None},
    "full attention without gate": {"mla_use_output_gate": False},
    "text model alone": {"checkpoint_layout": "text"},
    "no attention residuals": {"attn_res_block_size": None},
}
LENGTHS = (1, 7, 64, 150)  # of the prompts; delta attention computes in chunks of 64
NEW_TOKENS = 12


def prompts() -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(3, SMALL["vocab_size"], (1, length), generator=generator) for length in LENGTHS]


def trained(**changes: Any) -> AttnResKimiK3ForCausalLM:
    """A model after some steps of training, on sequences that count in steps of their own."""
    torch.manual_seed(0)
    model = AttnResKimiK3ForCausalLM(load("attnres-k3-tiny", **SMALL | changes))
    for name, tensor in model.state_dict().items():
        # Training moves the correction of the router by fixed small steps, and depth queries begin at zero.
        if name.endswith(("e_score_correction_bias", "_res_proj.weight")):
            torch.nn.init.normal_(tensor, std=0.1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(5):
        start, step = torch.randint(SMALL["vocab_size"], (2, 8, 1))
        ids = (start + step * torch.arange(32)) % SMALL["vocab_size"]
        optimizer.zero_grad()
        model(ids, labels=ids).loss.backward()
        optimizer.step()
    return model


def pack_experts(folder: Path) -> None:
    """Replace the routed experts of a checkpoint by packed ones, as the release has them."""
    for file in folder.glob("*.safetensors"):
        packed, _ = release.pack_experts(load_file(file))
        save_file(packed, file, metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["text_config"]["quantization_config"] = release.QUANTIZATION
    (folder / "config.json").write_text(json.dumps(config))


@pytest.fixture(scope="module")
def python(python_with) -> Path:
    return python_with("llama-cpp", REQUIREMENT, dependencies=False)


@pytest.fixture
def run_llama_cpp(python, run_session, tmp_path) -> Callable[..., list[list[tuple[Tensor, list[int]]]]]:
    """`run_llama_cpp(*files)`: for each GGUF file, for each prompt, logits `[seq, vocab]` and new tokens."""

    def run(*files: Path) -> list[list[tuple[Tensor, list[int]]]]:
        (tmp_path / "prompts.json").write_text(json.dumps([prompt[0].tolist() for prompt in prompts()]))
        results = run_session(python, "llama_cpp_session.py", tmp_path / "prompts.json", str(NEW_TOKENS), *files)
        return [[(as_logits(result["logits"]), result["tokens"]) for result in of_file] for of_file in results]

    return run


def as_logits(text: str) -> Tensor:
    logits = np.frombuffer(base64.b64decode(text), dtype="<f4").reshape(-1, SMALL["vocab_size"])
    return torch.from_numpy(logits.copy())


@torch.no_grad()
def largest_difference(model: AttnResKimiK3ForCausalLM, results: list[tuple[Tensor, list[int]]]) -> float:
    """The largest difference of logits from those of llama.cpp, as a part of the largest logit."""
    expected = [model(prompt).logits[0] for prompt in prompts()]
    largest = max(logits.abs().max() for logits in expected)
    return float(max((logits - e).abs().max() for (logits, _), e in zip(results, expected, strict=True)) / largest)


def greedy_tokens(model: AttnResKimiK3ForCausalLM) -> list[list[int]]:
    options = {"max_new_tokens": NEW_TOKENS, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    return [model.generate(prompt, **options)[0, prompt.shape[1] :].tolist() for prompt in prompts()]


@pytest.mark.slow
@pytest.mark.parametrize("variant", [*VARIANTS, "packed experts", "bfloat16"])
def test_llama_cpp_computes_the_same_logits_and_tokens_from_the_saved_files(run_llama_cpp, tmp_path, variant):
    folder = tmp_path / "model"
    model = trained(**VARIANTS.get(variant, {}))
    (model.bfloat16() if variant == "bfloat16" else model).save_pretrained(folder)
    if variant == "packed experts":
        pack_experts(folder)
    write_gguf(folder, tmp_path / "model.gguf")
    model = AttnResKimiK3ForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    (results,) = run_llama_cpp(tmp_path / "model.gguf")
    print(variant, largest_difference(model, results), greedy_tokens(model)[0])
    assert largest_difference(model, results) < TOLERANCE
    assert [tokens for _, tokens in results] == greedy_tokens(model)
