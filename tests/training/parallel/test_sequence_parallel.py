"""Beside tensor parallelism, the depth state is sharded along the sequence, and nothing else changes."""

import json
import os
import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedModel

from attnres.configuration import load
from attnres.residual_attnres import residual_tensors
from attnres.training.launch import Launch, check_launch
from attnres.training.parallel.sequence_parallel import shard_sequence
from attnres.training.parallel.sequence_split import SequenceSplit
from attnres.training.recipe import read_recipe

from ... import forks
from ...conversion.backbones import COMMON, build_member, member_config

ROOT = Path(__file__).parents[3]
# Two models are sharded in all ways among four processes, and the others among two, which is sooner done.
PROCESSES, FEWER = 4, 2
# Name -> case of `backbones.py`, and fields that differ. The backbones have other ways through a layer: whole attention
# and experts, norms of heads, norms after a sublayer, biases, one sublayer of two branches, and inputs that are cut up
# within the module.
NO_BIASES = {"attention_bias": False, "mlp_bias": False}
MODELS = {
    "llama": ("llama", NO_BIASES),
    "qwen3": ("qwen3", {}),
    "kimi_linear": ("kimi_linear", {"moe_intermediate_size": 32}),  # a kernel wants 16 bytes of each process
    "kimi_k3": ("kimi_k3", {}),
    "qwen3_moe": ("qwen3_moe", {"num_hidden_layers": 3}),
    "gemma3": (
        "gemma3_text",
        {"num_hidden_layers": 3, "layer_types": ["full_attention"] * 3, "attention_bias": False},
    ),
    "gpt_neox": ("gpt_neox", {"num_hidden_layers": 4, "hidden_dropout": 0.0, "attention_dropout": 0.0}),
    "phi3": ("phi3", {"num_hidden_layers": 3, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attention_dropout": 0.0}),
}
# Other connections: with streams, and with all earlier outputs; and AttnRes with several switches.
SWITCHES = {"attn_res_query": "input_dependent", "attn_res_heads": 2, "attn_res_window": 2}
MODELS |= {
    name: ("llama", {"num_hidden_layers": 3, "residual_connection": name}) for name in ("mhc", "denseformer")
} | {"switches": ("llama", {"num_hidden_layers": 3} | SWITCHES)}
TRAINED, THOROUGH = ("llama", "qwen3", "kimi_linear"), ("llama", "kimi_linear")


def make_model(name: str) -> PreTrainedModel:
    """Make a model whose heads and vocabulary four ranks can share, with depth weights far from uniform."""
    case, changes = MODELS[name]
    torch.manual_seed(0)
    if case == "kimi_k3":
        config = load("attnres-k3-tiny", num_hidden_layers=4, vocab_size=100)
    else:
        fields = {"num_key_value_heads": 4, "vocab_size": 100, "attn_res_block_size": 3} | changes
        config = member_config(case, **fields)
    model = AutoModelForCausalLM.from_config(config)
    # The other weights stay small, as they are at the start, since rounding grows with them from layer to layer.
    with torch.no_grad():
        for tensor in residual_tensors(model).values():
            tensor.add_(torch.randn_like(tensor), alpha=0.3)
    return model


def compare(folder: Path, processes: int) -> None:
    """Run `sequence_parallel_session.py` with the models for this number of processes."""
    for name in MODELS:
        if processes == (PROCESSES if name in THOROUGH else FEWER):
            make_model(name).save_pretrained(folder / name, save_original_format=False)
    session = Path(__file__).with_name("sequence_parallel_session.py")
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT)}
    done = forks.launch(session, folder, processes=processes, env=environment, timeout=600)
    assert done.returncode == 0, done.stderr[-4000:]


@pytest.fixture(scope="module")
def results(once) -> dict[str, Any]:
    """The results of `sequence_parallel_session.py` in four and in two processes."""
    results = {}
    for processes in (PROCESSES, FEWER):
        folder = once(f"sequence-parallel-{processes}", partial(compare, processes=processes))
        results |= json.loads((folder / "results.json").read_text())
    return results


@pytest.mark.slow
@pytest.mark.parametrize("model", MODELS)
def test_losses_outputs_and_gradients_are_those_of_one_process(model, results):
    """In all processes, for lengths that are no multiple of the ranks, and with accumulated and recomputed batches."""
    compared = {what: found for what, found in results[model].items() if what != "measured"}
    # Some models also go through steps of training, short rows, inference, and sharding by FSDP2 too.
    assert len(compared) == 1 + (model in TRAINED) + 3 * (model in THOROUGH)
    for what, (difference, tensor) in compared.items():
        assert difference <= 1e-5, (what, tensor)


@pytest.mark.slow
def test_each_rank_has_its_share_of_the_memory_of_the_block_states(results):
    memory = results["llama"]["measured"]["memory"]
    assert memory["matrices"] == memory["whole"] == PROCESSES * memory["sequence"]
    # Before the last of 5 layers there are the embedding, 2 blocks and a partial sum; the first was there before.
    assert memory["whole"] == 3 * results["llama"]["measured"]["hidden"]


@pytest.mark.slow
def test_the_same_bytes_are_sent_as_with_tensor_parallelism_alone(results):
    measured = results["llama"]["measured"]
    sent = {
        (way, name): sum(kinds.values()) for way in ("forward", "backward") for name, kinds in measured[way].items()
    }
    assert sent["forward", "sequence"] == sent["forward", "matrices"] > 0
    # The embedding and each sublayer have a reduce-scatter, and each sublayer and the head an all-gather.
    share = (PROCESSES - 1) / PROCESSES
    by_kind = measured["backward"]["sequence"]
    assert by_kind.pop("all_reduce") == 2 * share * measured["vectors"]
    expected = (measured["sublayers"] + 1) * share * measured["hidden"]
    assert by_kind == {"reduce_scatter": expected, "gather": expected}
    # `transformers` sums the gradient of a sublayer's input for each of its first matrices.
    assert sent["backward", "sequence"] < sent["backward", "matrices"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "sharding", ["FSDP2 replicas", "TP x FSDP2", "EP x FSDP2", "TP of qwen3", "TP of gemma3", "TP of kimi_k3"]
)
def test_other_shardings_give_the_gradients_of_one_process(sharding, results):
    difference, tensor = results[sharding]
    assert difference <= 1e-5, tensor


@pytest.mark.slow
@pytest.mark.parametrize("sharding", ["TP with sequence parallelism", "the same by autocast", "EP"])
def test_in_16_bits_a_sharded_model_has_the_errors_of_a_whole_one(sharding, results):
    errors = results["16 bits"][sharding]
    assert errors["sharded"] < 2 * errors["whole"] < 0.5


@pytest.mark.slow
def test_gradients_of_norms_are_corrected_where_transformers_sums_them_again(results):
    """Without the correction, a release of `transformers` is wrong if and only if the correction is for it."""
    (difference, tensor), is_corrected = results["TP without the correction"]
    assert ("_norm.weight" in tensor and difference > 0.1) if is_corrected else difference <= 1e-5


@pytest.mark.slow
def test_a_model_is_made_sequence_parallel_once(results):
    assert "this model is sequence parallel already" in results["llama"]["measured"]["a second time"]


@given(length=st.integers(1, 40), size=st.integers(2, 9), dim=st.integers(0, 2))
def test_the_parts_of_all_ranks_are_the_whole_and_zeros(length, size, dim):
    shape = [2, 3, 4]
    shape[dim] = length
    full = torch.arange(torch.Size(shape).numel()).view(shape) + 1
    parts = [SequenceSplit(length, size, rank).part_of(full, dim) for rank in range(size)]
    assert len({part.shape for part in parts}) == 1
    joined = torch.cat(parts, dim)
    assert torch.equal(joined.narrow(dim, 0, length), full)
    assert not joined.narrow(dim, length, joined.shape[dim] - length).any()


@pytest.mark.parametrize(
    "settings, message",
    [
        ("{sequence_parallel: true}", "give `tp_size` too, or leave it out."),
        ("{fsdp_size: 2, sequence_parallel: true}", "give `tp_size` too, or leave it out."),
        ("{tp_size: 2, ep_size: 2, sequence_parallel: true}", "cannot stand beside `ep_size`"),
        ("{tp_size: 2, sequence_parallel: 2}", "is 2, but must be true or false."),
        ("{tp_size: 2, sequence_paralel: true}", "Did you mean `sequence_parallel`?"),
        ("{tp_size: 3, sequence_parallel: true}", "among 3 processes, but this run has 2."),
    ],
)
def test_impossible_settings_of_sequence_parallelism_are_refused(settings, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        recipe = read_recipe("pretrain", ("model=x", "train=y", "out=z", f"distributed={settings}"))
        check_launch(recipe, Launch(processes=2))


def test_sequence_parallelism_without_tensor_parallelism_or_outside_the_family_is_refused():
    with pytest.raises(ValueError, match=re.escape("load it with `distributed_config=DistributedConfig(tp_size=N)`")):
        shard_sequence(build_member("llama"))
    standard = LlamaForCausalLM(LlamaConfig(**COMMON))
    with pytest.raises(ValueError, match="needs a model of this family, not a LlamaForCausalLM"):
        shard_sequence(standard)
