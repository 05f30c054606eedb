"""A prompt that `generate` reads in chunks gives the result of one that it reads in one pass."""

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from attnres.configuration import load

from ..conversion.backbones import CASES, COMMON, build_member, make_vivid
from ..live import growth_over_layers

LENGTH = 17


# One backbone of each kind of layers: full attention, sliding windows beside it, linear attention beside it.
KINDS = ["llama", "gemma3_text", "kimi_linear", "kimi_k3"]
OTHERS = [name for name in CASES if name not in (*KINDS, "llama, tied")]


@pytest.fixture(scope="module")
def model(request) -> PreTrainedModel:
    """Return a member of the family on each backbone, with depth weights far from uniform."""
    if request.param == "kimi_k3":
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(load("attnres-k3-tiny", vocab_size=COMMON["vocab_size"])).eval()
        make_vivid(model)
        return model
    # Phi-3's LongRoPE has other frequencies for rows of more than 16 tokens, so there the chunks of a row matter.
    fields = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}} if request.param == "phi3" else {}
    if "gpt_neox" in request.param:
        # The backbone does not know the field, but the static cache takes its size from it.
        fields["num_key_value_heads"] = COMMON["num_attention_heads"]
    return build_member(request.param, attn_res_block_size=3, **fields)


def prompts(*padding: int) -> dict[str, Tensor]:
    """Return a prompt for each number of tokens of padding at its begin."""
    ids = torch.randint(3, COMMON["vocab_size"], (len(padding), LENGTH), generator=torch.Generator().manual_seed(2))
    mask = torch.arange(LENGTH) >= torch.tensor(padding)[:, None]
    return {"input_ids": ids.masked_fill(~mask, COMMON["pad_token_id"]), "attention_mask": mask.long()}


def generate(model: PreTrainedModel, inputs: dict[str, Tensor], chunk: int | None, **options) -> Tensor:
    """Generate 4 tokens, and return their logits `[tokens, batch, vocabulary]`."""
    options |= {"prefill_chunk_size": chunk, "max_new_tokens": 4, "min_new_tokens": 4, "do_sample": False}
    result = model.generate(**inputs, **options, return_dict_in_generate=True, output_logits=True)
    return torch.stack(result.logits)


def assert_same(found: Tensor, expected: Tensor) -> None:
    """Assert that logits agree within 1e-4 of the largest."""
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-4 * expected.abs().max().item())


STATIC = {"cache_implementation": "static"}
# Padding, and sizes of chunks with the options of `generate`. Of the padded rows, one is only padding in its first
# chunks, and one begins within a chunk. For a chunk of one token, `transformers` leaves the padding out of the masks
# for a static cache.
WAYS = {
    "whole": ((0,), [(16, {})]),
    "padded": ((0, 3, 11), [(3, {}), (5, STATIC), (1, STATIC)]),
    "padded, static": ((0, 3, 11), [(5, STATIC)]),
}


@pytest.mark.parametrize(
    ("model", "way"),
    [*((kind, way) for kind in KINDS for way in ("whole", "padded")), *((name, "padded, static") for name in OTHERS)],
    indirect=["model"],
)
def test_a_prompt_in_chunks_gives_the_logits_of_one_pass(model, way):
    padding, chunks = WAYS[way]
    expected = generate(model, prompts(*padding), None)
    for chunk, options in chunks:
        assert_same(generate(model, prompts(*padding), chunk, **options), expected)


@pytest.mark.parametrize("backbone", ["llama", pytest.param("kimi_linear", marks=pytest.mark.slow)])
def test_the_block_states_of_a_chunk_are_all_that_a_prompt_in_chunks_holds(backbone):
    """Compared with the residual stream, which holds one tensor in the place of the blocks, and the same cache."""
    length, chunk, blocks = 96, 16, 4  # before the last of 5 layers, whose blocks have 2 sublayers
    ids = torch.randint(3, COMMON["vocab_size"], (1, length), generator=torch.Generator().manual_seed(3))

    def most_bytes(connection: str, chunk: int | None) -> int:
        model = build_member(backbone, residual_connection=connection, num_hidden_layers=5, attn_res_block_size=2)
        options = {"prefill_chunk_size": chunk, "max_new_tokens": 1}
        return max(growth_over_layers(model.model, lambda: model.generate(ids, **options)))

    token = COMMON["hidden_size"] * 4  # bytes
    for tokens, size in ((length, None), (chunk, chunk)):
        assert most_bytes("attn_res", size) - most_bytes("standard", size) == (blocks - 1) * tokens * token
